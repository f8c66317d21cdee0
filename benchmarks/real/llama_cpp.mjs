// llama.cpp's side of the sampling race: `node llama_cpp.mjs FOLDER`, where FOLDER holds node_modules/node-llama-cpp.
// It draws the likeliest token, which costs it least. Started from a file: with `node -e` the package does not find
// its own library.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const began = performance.now();
const folder = join(process.argv[2], "node_modules", "node-llama-cpp");
const { getLlama } = await import(pathToFileURL(join(folder, "dist", "index.js")).href);
const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
const imported = performance.now();

const peakRssMb = () => (Number(/VmHWM:\s+(\d+)/.exec(readFileSync("/proc/self/status", "utf8"))[1]) * 1024) / 1e6;
const answer = (facts) => process.stdout.write(JSON.stringify({ ...facts, peak_rss_mb: peakRssMb() }) + "\n");
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

const work = JSON.parse((await lines.next()).value);
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
const model = await llama.loadModel({ modelPath: work.gguf });
const longest = Math.max(...work.ids.map((ids) => ids.length)) + work.new_tokens;
const context = await model.createContext({
  contextSize: longest,
  sequences: work.ids.length,
  threads: work.training.threads,
});
answer({
  event: "ready",
  import_seconds: (imported - began) / 1e3,
  setup_seconds: (performance.now() - imported) / 1e3,
  versions: { "node-llama-cpp": version },
  prompt_tokens: work.ids.flat().length,
});

// The number of new tokens of one request. The end token counts; the package does not report it.
const complete = async (ids) => {
  const sequence = context.getSequence();
  let count = 0;
  for await (const _ of sequence.evaluate(ids, { temperature: 0 })) if (++count >= work.new_tokens) break;
  await sequence.clearHistory();
  sequence.dispose();
  return Math.min(count + 1, work.new_tokens);
};

for (;;) {
  const { value, done } = await lines.next();
  if (done || value.trim() !== "step") process.exit(0);
  const start = performance.now();
  const cpu = process.cpuUsage();
  const lengths = await Promise.all(work.ids.map(complete));
  const step = (performance.now() - start) / 1e3;
  const { user, system } = process.cpuUsage(cpu);
  answer({ event: "step", lengths, seconds: { step }, cpu_seconds: (user + system) / 1e6 });
}
