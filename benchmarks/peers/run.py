"""Races tunix_lite, TRL and Tunix on the same work, in turns: `make bench-peers`.

    python benchmarks/peers/run.py [--workloads fixed,lora] [--frameworks ours,trl] [--rounds 5]

Each framework runs in a process of its own; all but the one whose turn it is are stopped. One JSON file for each
workload goes to benchmarks/results/ as soon as it is done.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import arithmetic
import workloads

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results"
VENVS = ROOT / ".peers"
# framework -> (worker, its arguments)
WORKERS = {
    "tunix": ("tunix_worker.py", []),
    "trl": ("trl_worker.py", []),
    "ours": ("ours_worker.py", ["--packing", "none"]),
    "ours_shared": ("ours_worker.py", ["--packing", "prefix"]),
}
ROUNDS = {"fixed": 5, "long_tails": 3, "long_prompts": 3, "vocabulary": 3, "lora": 5}
TINY = {"prompts": 2, "prompt_length": 8, "new_tokens": 16, "generations": 4}
# the longest that one answer may take, compilation included
LIMIT = 900


class Worker:
    """A process that computes when it is asked to, and is stopped otherwise."""

    def __init__(self, framework: str, command: list[str], work: dict, logs: Path):
        logs.mkdir(parents=True, exist_ok=True)
        self.framework = framework
        self.log = logs / f"{work['name']}_{framework}.log"
        threads = str(work["training"]["threads"])
        self.began = time.perf_counter()
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self.facts = self._ask(json.dumps(work))
        self.facts["ready_seconds"] = round(time.perf_counter() - self.began, 2)

    def ask(self, what: str) -> dict:
        """The answer to one line; the process runs until then and no longer."""
        self.process.send_signal(signal.SIGCONT)
        return self._ask(what)

    def step(self, work: dict) -> dict:
        """The answer to a step. Raises RuntimeError unless the completions have the lengths that they should have."""
        answer = self.ask("step")
        expected = workloads.new_lengths(work)
        if sorted(answer["lengths"]) != sorted(expected):
            raise RuntimeError(
                f"{self.framework} sampled {sum(answer['lengths'])} tokens in place of {sum(expected)}: "
                f"{answer['lengths']}, not {expected}"
            )
        return answer

    def _ask(self, line: str) -> dict:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], LIMIT)[0]:
            raise RuntimeError(f"{self.framework} took longer than {LIMIT} s")
        answer = self.process.stdout.readline()
        if not answer:
            last = self.log.read_text().strip().splitlines()[-1:] or ["it wrote nothing"]
            raise RuntimeError(f"{self.framework} ended: {last[0]} ({self.log.name} has all)")
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(answer)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def command_of(framework: str) -> list[str]:
    """The command that starts a framework's worker."""
    script, arguments = WORKERS[framework]
    return [python_of(framework), str(HERE / script), *arguments]


def python_of(framework: str) -> str:
    """The interpreter that a framework is installed for, if it is installed."""
    if framework.startswith("ours"):
        return sys.executable
    return str(VENVS / framework / "bin" / "python")


def race(work: dict, frameworks: list[str], rounds: int) -> dict:
    """One workload: everybody starts, compiles in a first step, then takes turns. A framework that fails is left
    out, and its error stands in its place."""
    workers: dict[str, Worker] = {}
    found: dict[str, dict] = {}
    began = time.perf_counter()
    peaks = [measured_peak(work)]
    try:
        for framework in frameworks:
            found[framework] = started(framework, work, workers)
        for number, framework in arithmetic.turns(frameworks, rounds):
            if framework in workers:
                taken = turn(workers[framework], work, found[framework])
                print(f"  {number + 1}/{rounds} {framework:12} {taken}", flush=True)
                if taken is None:
                    workers.pop(framework).end()
    finally:
        for worker in workers.values():
            worker.end()
    peaks.append(measured_peak(work))
    return result(work, found, peaks, time.perf_counter() - began)


def started(framework: str, work: dict, workers: dict[str, Worker]) -> dict:
    """Starts a worker and lets it take its first step, which compiles."""
    try:
        workers[framework] = Worker(framework, command_of(framework), work, VENVS / "logs")
        first = workers[framework].step(work)
    except RuntimeError as error:
        if framework in workers:
            workers.pop(framework).end()
        print(f"  {error}", flush=True)
        return {"error": str(error)}
    print(f"  {framework}: first step {first['seconds']['step']:.1f} s", flush=True)
    return {"facts": workers[framework].facts, "first_step": first["seconds"]["step"], "steps": []}


def turn(worker: Worker, work: dict, found: dict) -> float | None:
    """One step of one framework; None: it failed."""
    try:
        answer = worker.step(work)
    except RuntimeError as error:
        found["error"] = str(error)
        return None
    found["steps"].append(answer["seconds"])
    found["peak_rss_mb"] = answer["peak_rss_mb"]
    return round(answer["seconds"]["step"], 3)


def measured_peak(work: dict) -> float:
    """GFLOP/s of a large float32 product while nobody else computes."""
    worker = Worker("ours", command_of("ours"), workloads.workload("fixed"), VENVS / "logs")
    try:
        return worker.ask("peak")["gflops"]
    finally:
        worker.end()


def result(work: dict, found: dict[str, dict], peaks: list[float], seconds: float) -> dict:
    """All that is kept of one workload."""
    lengths = workloads.new_lengths(work)
    return {
        "benchmark": "peers",
        "workload": {name: value for name, value in work.items() if name not in ("prompt_tokens", "lengths")},
        "lengths": {"mean": sum(lengths) / len(lengths), "most": max(lengths), "total": sum(lengths)},
        "gflop_per_step": round(workloads.step_flops(work) / 1e9, 1),
        "matmul_peak_gflops": [round(peak, 1) for peak in peaks],
        "frameworks": {name: of_framework(work, found, name, max(peaks)) for name in found},
        "seconds_of_the_race": round(seconds, 1),
    }


def of_framework(work: dict, found: dict[str, dict], name: str, peak: float) -> dict:
    """What is kept of one framework: its steps as they were, and what follows from them."""
    mine = found[name]
    if "error" in mine or not mine["steps"]:
        return {"error": mine.get("error", "no turn was taken")}
    steps = mine["steps"]
    median = arithmetic.summary(steps)
    kept = {
        "seconds": median,
        "spread": arithmetic.spread(steps),
        "rollout_tokens_per_second": arithmetic.tokens_per_second(
            sum(workloads.new_lengths(work)), median["rollout"]["median"]
        ),
        "share_of_peak": arithmetic.share_of_peak(workloads.step_flops(work), median["step"]["median"], peak),
        "peak_rss_mb": round(mine["peak_rss_mb"]),
        "import_seconds": round(mine["facts"]["import_seconds"], 2),
        "setup_seconds": round(mine["facts"]["setup_seconds"], 2),
        "compile_seconds": arithmetic.compile_seconds(mine["first_step"], steps),
        "trained_parameters": mine["facts"]["trained_parameters"],
        "versions": mine["facts"]["versions"],
        "steps": [{phase: round(seconds, 4) for phase, seconds in step.items()} for step in steps],
    }
    for ours in ("ours", "ours_shared"):
        other = found.get(ours, {}).get("steps", [])
        if name not in ("ours", "ours_shared") and len(other) == len(steps):
            kept[f"times_{ours}"] = arithmetic.ratios(steps, other)
    return kept


def machine() -> dict:
    """The hardware, without a name or a path of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": ", ".join(sorted(names)) or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit, with + where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return head + ("+" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(workloads.SIZES))
    parser.add_argument("--frameworks", default=",".join(WORKERS))
    parser.add_argument("--rounds", type=int, help="steps of each framework; without it 3 or 5, by the workload")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs; needs --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the JSON files")
    args = parser.parse_args()
    for option, names, known in (
        ("workloads", args.workloads, workloads.SIZES),
        ("frameworks", args.frameworks, WORKERS),
    ):
        wrong = [name for name in names.split(",") if name not in known]
        if wrong:
            parser.error(f"--{option}: there is no {wrong[0]!r}; there are {','.join(known)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds is at least 1")
    if args.out.is_file():
        parser.error(f"--out: {args.out} is a file; name a folder")
    if args.tiny and args.out == RESULTS:
        parser.error("--tiny gives no results worth keeping: name another folder with --out")

    # Before anybody computes: a race needs all of them.
    missing = [name for name in args.frameworks.split(",") if not Path(python_of(name)).exists()]
    if missing:
        there = ",".join(name for name in WORKERS if name.startswith("ours"))
        sys.exit(f"not installed: {', '.join(missing)}; `make peers` installs all, --frameworks {there} goes without")

    # Ended from outside, the race ends its workers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Everybody gets the same processors.
    processors = sorted(os.sched_getaffinity(0))[: workloads.TRAINING["threads"]]
    os.sched_setaffinity(0, processors)
    frameworks = args.frameworks.split(",")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.workloads.split(","):
        rounds = args.rounds or ROUNDS[name]
        print(f"{name}: {rounds} rounds of {', '.join(frameworks)}", flush=True)
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "commit": commit(),
            "command": shlex.join(["python", "benchmarks/peers/run.py", *sys.argv[1:]]),
        }
        work = workloads.workload(name, **(TINY if args.tiny else {}))
        found = race(work, frameworks, rounds)
        file = args.out / f"peers_{name}.json"
        file.write_text(json.dumps(about | {"load_after": round(os.getloadavg()[0], 2)} | found, indent=1) + "\n")
        print(f"  {file.name}: {found['seconds_of_the_race']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
