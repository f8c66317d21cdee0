"""Races tunix_lite, transformers, TRL and llama.cpp on real weights and rows of GSM8K, in turns: `make bench-real`.

    python benchmarks/real/race.py --models FOLDER --rows train.jsonl --peer-python PYTHON --gguf FOLDER --node FOLDER
    python benchmarks/real/race.py ... --only 'sampling smollm2 (1|16) x 64' --rounds 2
    python benchmarks/real/race.py --table

--models has the folders smollm2-135m-instruct and gemma-3-270m in Hugging Face layout. --peer-python is an interpreter
with torch, transformers, trl, peft and datasets; --node a folder with node_modules/node-llama-cpp; --gguf has a folder
of each model's name with weights.gguf in float32, written by `tunix-lite export kind=gguf type=f32`.

Each side runs in a process of its own; a signal stops all but the one whose turn it is. Ours starts twice: without
compiled programs, for one call, and with those that the first has kept. The first call of each side is reported by
itself, and figures are medians over the rounds that follow. One JSON file a race, written after each of its cells;
a cell that is there is not raced again, unless a side is missing or --again is given. `sampling`: so many requests at
once, tokens until the end or the limit. `scoring`: log-probabilities of so many tokens after each prompt. `grpo`: whole
steps, prompts x completions x tokens. `sft`: whole steps. `text`: whole steps on full rows, rows x tokens.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "peers")]

from arguments import count, new_folder
from arithmetic import turns
from run import RESULTS, VENVS, Worker, commit, machine

# name -> its folder, and the user's message: a question as it is, or for a base model one that asks for an answer
MODELS = {
    "smollm2": ("smollm2-135m-instruct", "{question}"),
    "gemma3": ("gemma-3-270m", "Question: {question}\nAnswer:"),
}
# side -> the packages that its interpreter needs
PACKAGES = {
    "transformers": ("torch", "transformers"),
    "trl": ("torch", "transformers", "trl", "peft", "datasets"),
}
# race -> who is in it
RACES = {
    "sampling": ("ours", "transformers", "llama_cpp"),
    "scoring": ("ours", "transformers"),
    "grpo": ("ours", "trl"),
    "sft": ("ours", "trl"),
    "text": ("ours", "trl"),
}
THREADS = 2
# What all sides get in all races. settings: of our runs, such as training.packing=none.
COMMON = {
    "prompt_length": 256,
    "learning_rate": 1e-5,
    "lora_rank": 0,
    "training": {"threads": THREADS},
    "peer_dtype": "float32",
    "settings": [],
}


def cells() -> dict[str, dict]:
    """Name of each cell, race first, -> what all sides get, but for files. `prompts` counts rows of GSM8K."""
    sizes = {f"sampling {n} x {new}": {"prompts": n, "new_tokens": new} for new in (64, 200) for n in (1, 16, 64)}
    sizes["scoring 32 x 64"] = {"prompts": 32, "new_tokens": 64, "peer_batch": 8}
    for trained, rank in (("all weights", 0), ("LoRA", 16)):
        work = {"prompts": 4, "generations": 8, "new_tokens": 64, "lora_rank": rank, "peer_batch": 32}
        sizes[f"grpo 4 x 8 x 64, {trained}"] = work
    # TRL packs rows of about two problems each, so that both sides learn from as many tokens in an update
    packed = {"peer_width": 512, "peer_batch": 1, "peer_passes": 8}
    sizes["sft 16 rows"] = {"prompts": 16, "new_tokens": 512} | packed
    sizes["text 8 x 512"] = {"prompts": 8, "new_tokens": 511, "prompt_length": 1} | packed
    return {
        f"{race} {model} {size}": COMMON | {"race": race, "of_model": model} | work
        for model in MODELS
        for race, size, work in ((*name.split(" ", 1), work) for name, work in sizes.items())
    }


def with_files(work: dict, args: argparse.Namespace, folder: Path) -> dict:
    """The work of a cell with its model, prompts and rows. `folder` is the cell's own."""
    from tunix_lite.models.tokenizer import Tokenizer
    from tunix_lite.tasks.gsm8k import Gsm8kTaskConfig

    model_folder, template = MODELS[work["of_model"]]
    # an update of SFT takes other rows each time, and a row of text some four of them
    needed = work["prompts"] * {"sft": 4, "text": 64}.get(work["race"], 1)
    lines = args.rows.read_text().splitlines()[:needed]
    if len(lines) < needed:
        sys.exit(f"--rows: {args.rows} has {len(lines)} rows; this race needs {needed}")
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    task = Gsm8kTaskConfig(train=str(file), held_out=str(file), prompt=template)
    examples = list(task.source.train)
    work = work | {"template": template, "examples": examples, "rows_file": str(file), "folder": str(folder)}
    work |= {"model": str(args.models / model_folder), "programs": str(folder / "programs")}
    if work["race"] == "text":
        work["texts"] = [f"{example['question']}\n{example['completion']}" for example in examples]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in work["texts"]))
    work["gguf"] = str(args.gguf / model_folder / "weights.gguf") if args.gguf else ""
    if work["race"] in ("sampling", "scoring"):
        tokenizer = Tokenizer.load(work["model"])
        work["ids"] = [tokenizer.prompt(template.format(**example)) for example in examples]
        solutions = [tokenizer.encode(example["completion"]) for example in examples]
        new = work["new_tokens"]
        # a short solution again, so that each has as many tokens
        work["completions"] = [(ids * new)[:new] for ids in solutions]
        work["prompt_length"] = max(work["prompt_length"], *map(len, work["ids"]))
    return work


def missing(side: str, model: str, args: argparse.Namespace) -> str | None:
    """Why a side cannot be measured, with a line that changes it."""
    if side == "llama_cpp":
        if not args.node or not (args.node / "node_modules" / "node-llama-cpp").is_dir():
            return "no node-llama-cpp: npm install --prefix peer node-llama-cpp, then --node peer"
        name = MODELS[model][0]
        if not args.gguf or not (args.gguf / name / "weights.gguf").is_file():
            export = f"tunix-lite export model.weights={name} kind=gguf type=f32 out=gguf/{name}"
            return f"no GGUF file: {export}, then --gguf gguf"
    elif side in PACKAGES:
        needed = PACKAGES[side]
        install = f"python -m venv peer && peer/bin/pip install {' '.join(needed)}, then --peer-python peer/bin/python"
        if not args.peer_python or not args.peer_python.is_file():
            return f"no interpreter: {install}"
        look = f"import importlib.util as u; print(*[n for n in {needed!r} if u.find_spec(n) is None])"
        ran = subprocess.run([args.peer_python, "-c", look], capture_output=True, text=True)
        if ran.returncode or ran.stdout.strip():
            return f"not installed: {ran.stdout.strip() or 'Python itself'}; {install}"
    return None


def command_of(side: str, args: argparse.Namespace) -> list[str]:
    if side == "ours":
        return [sys.executable, str(HERE / "ours.py")]
    if side == "llama_cpp":
        return ["node", str(HERE / "llama_cpp.mjs"), str(args.node)]
    return [str(args.peer_python), str(HERE / "torch_peers.py")]


def race(work: dict, args: argparse.Namespace, lacks: dict[str, str | None]) -> dict[str, dict]:
    """The calls of all sides. One that fails is left out, and its error stands in its place."""
    sides: dict[str, dict] = {side: {"not_measured": why} if why else {"rounds": []} for side, why in lacks.items()}
    workers: dict[str, Worker] = {}

    def call(side: str, which: str) -> None:
        """Starts a side where it does not run, and lets it make one call."""
        try:
            if side not in workers:
                workers[side] = Worker(side, command_of(side, args), work, VENVS / "logs")
                sides[side]["facts"] = workers[side].facts
            answer = workers[side].ask("step")
        except RuntimeError as error:
            print(f"  {error}", flush=True)
            # results name no folders of a machine
            sides[side]["not_measured"] = re.sub(r"/[\w./+-]*/", "", str(error))
            if side in workers:
                workers.pop(side).end()
            return
        answer["tokens"] = sum(answer.pop("lengths"))
        seconds = answer["seconds"]["step"]
        peak = answer["peak_rss_mb"] / 1e3
        print(f"  {side:12} {which:16} {seconds:7.2f} s {answer['tokens']:6} tokens {peak:6.2f} GB", flush=True)
        if which.isdecimal():
            sides[side]["rounds"].append(answer)
        else:
            sides[side][which] = answer

    with tempfile.TemporaryDirectory() as folder:
        work = with_files(work, args, Path(folder))
        try:
            for side in (side for side, why in lacks.items() if not why):
                if side == "ours":
                    call(side, "without_programs")
                    if side not in workers:
                        continue
                    workers.pop(side).end()
                call(side, "first")
            for number, side in turns(list(workers), args.rounds):
                if side in workers:
                    call(side, str(number + 1))
        finally:
            for worker in workers.values():
                worker.end()
    return sides


def speed(answer: dict) -> float:
    return answer["tokens"] / answer["seconds"]["step"]


def table(folder: Path) -> str:
    """All cells that are kept, a line for each side: medians over the rounds. How many times faster ours is, is the
    median of the rounds' quotients of tokens a second. First calls: with kept programs, and without."""
    head = "race|side|seconds|rollout|update|CPU s|tokens/s|ours is faster by|peak GB|first call"
    lines = [head.split("|"), ["---"] * (head.count("|") + 1)]
    notes = []
    for name in RACES:
        file = folder / f"real_{name}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        for cell, result in kept.items():
            sides = {side: one for side, one in result["sides"].items() if "not_measured" not in one}
            for side, one in sides.items():
                ours = sides.get("ours", {}).get("rounds", []) if side != "ours" else []
                lines.append([cell, side, *row(one, ours)])
            for side in result["sides"].keys() - sides.keys():
                why = result["sides"][side]["not_measured"]
                notes.append(f"{cell}, {side}: not measured. {why}")
            # what must be the same for all sides
            for what, of_side in (("prompt_tokens", "facts"), ("mean_logprob", "first")):
                values = {side: round(one[of_side][what], 3) for side, one in sides.items() if one[of_side].get(what)}
                if len(set(values.values())) > 1:
                    notes.append(f"{cell}: {what} differs, {values}")
        notes += conditions(name, kept)
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *notes])


def conditions(name: str, kept: dict[str, dict]) -> list[str]:
    """Where, when and with what the cells of a race were measured: a line, or none for no cells."""
    if not kept:
        return []
    machines = {f"{each['machine']['processor']}, {each['machine']['cores']} cores" for each in kept.values()}
    loads = [each["machine"]["load_before"] for each in kept.values()]
    facts = [one["facts"] for each in kept.values() for one in each["sides"].values() if "facts" in one]
    versions = {f"{package} {number}" for each in facts for package, number in each["versions"].items()}
    since = sorted({f"{each['date']} {each['commit']}" for each in kept.values()})
    counts = {len(one["rounds"]) for each in kept.values() for one in each["sides"].values() if one.get("rounds")}
    rounds = " or ".join(map(str, sorted(counts))) + (" round" if counts == {1} else " rounds")
    about = f"{rounds}; load before {max(loads)} at most; {', '.join(since)}"
    return [f"{name}: {', '.join(sorted(machines | versions))}; {about}"]


def row(one: dict, ours: list[dict]) -> list[str]:
    """The figures of one side. ours: the rounds of ours, where they are to be compared."""
    rounds = one["rounds"]
    phases = [[each["seconds"].get(phase) for each in rounds] for phase in ("step", "rollout", "update")]
    if None in phases[1]:
        phases[1:] = [], []
    first = [one[start]["seconds"]["step"] for start in ("first", "without_programs") if start in one]
    return [
        *(f"{median(seconds):.2f}" if seconds else "" for seconds in phases),
        f"{median(each['cpu_seconds'] for each in rounds):.2f}",
        f"{median(map(speed, rounds)):.0f}",
        f"{median(speed(b) / speed(a) for a, b in zip(rounds, ours, strict=True)):.2f}" if ours else "",
        f"{max(each['peak_rss_mb'] for each in rounds) / 1e3:.2f}",
        ", ".join(f"{seconds:.1f}" for seconds in first),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with the folders of the models")
    parser.add_argument("--rows", type=Path, help="train.jsonl of GSM8K")
    parser.add_argument("--peer-python", type=Path, help="interpreter of transformers and TRL")
    parser.add_argument("--gguf", type=Path, help="folder with the folders of the models as GGUF files")
    parser.add_argument("--node", type=Path, help="folder with node_modules/node-llama-cpp")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression over the names of cells")
    parser.add_argument("--sides", nargs="+", default=[], help="only these, such as ours transformers")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--change", type=change, nargs="+", default=[], help="of a cell's work, such as peer_batch=16")
    parser.add_argument("--again", action="store_true", help="races cells that are kept, too")
    parser.add_argument("--table", action="store_true", help="only prints what is kept")
    parser.add_argument("--out", type=new_folder, default=RESULTS, help="folder of the JSON files")
    args = parser.parse_args()
    if args.table:
        return args
    for option in ("models", "rows"):
        if getattr(args, option) is None or not getattr(args, option).exists():
            parser.error(f"--{option}: there is no {getattr(args, option)}; {__doc__.splitlines()[2].strip()}")
    if not any(re.search(args.only, name) for name in cells()):
        parser.error(f"--only: no cell is called that; there are {', '.join(cells())}")
    return args


def change(text: str) -> tuple[str, object]:
    """A key of a cell's work and its value, in JSON; a value that is none is a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    args = arguments()
    if args.table:
        print(table(args.out))
        return
    # Ended from outside, the race ends its workers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    # a race keeps its programs by itself
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    args.out.mkdir(parents=True, exist_ok=True)
    for cell, work in cells().items():
        if not re.search(args.only, cell):
            continue
        if args.change:
            cell += f", {' '.join(f'{key}={value}' for key, value in args.change)}"
            work |= dict(args.change)
        file = args.out / f"real_{work['race']}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        sides = [side for side in RACES[work["race"]] if not args.sides or side in args.sides]
        lacks = {side: missing(side, work["of_model"], args) for side in sides}
        known = kept.get(cell, {}).get("sides", {})
        wanted = [side for side, why in lacks.items() if not why]
        if not args.again and all("first" in known.get(side, {}) for side in wanted):
            print(f"{cell}: kept already", flush=True)
            continue
        print(f"{cell}: {args.rounds} rounds of {', '.join(wanted)}", flush=True)
        began = time.perf_counter()
        about = {"date": datetime.date.today().isoformat(), "machine": machine(), "commit": commit(), "work": work}
        answers = race(work | {"name": re.sub(r"\W+", "_", cell)}, args, lacks)
        seconds = round(time.perf_counter() - began, 1)
        about |= {"load_after": round(os.getloadavg()[0], 2), "seconds_of_the_race": seconds}
        file.write_text(json.dumps(kept | {cell: about | {"sides": answers}}, indent=1) + "\n")
        print(f"  {file.name}: {seconds:.0f} s", flush=True)
    print(table(args.out))


if __name__ == "__main__":
    main()
