"""Races tunix_lite, transformers, TRL and llama.cpp on real weights and rows of GSM8K, in turns: `make bench-real`.

    python benchmarks/real/race.py --models FOLDER --rows train.jsonl --peer-python PYTHON --gguf FOLDER --node FOLDER
    python benchmarks/real/race.py ... --only sampling --model smollm2 --requests 16 --new-tokens 64 --rounds 2
    python benchmarks/real/race.py --table

--models has the folders smollm2-135m-instruct and gemma-3-270m in Hugging Face layout. --peer-python is an interpreter
with torch, transformers, trl, peft and datasets; --node a folder with node_modules/node-llama-cpp; --gguf has a folder
of each model's name with weights.gguf in float32, written by `tunix-lite export kind=gguf type=f32`.

Each side runs in a process of its own; a signal stops all but the one whose turn it is. Ours starts twice: without
compiled programs, for one call, and with those that the first has kept. The first call of each side is reported by
itself, and figures are medians over the rounds that follow. One JSON file a race, written after each of its cells;
a cell that is there is not raced again, unless a side is missing or --again is given.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "peers")]

from arguments import count, new_folder
from arithmetic import turns
from run import RESULTS, Worker, commit, machine

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
}
LEARNING_RATE = 1e-5
THREADS = 2


@dataclass(frozen=True)
class Cell:
    """One race at one size on one model. `work` is what all sides get, but for files."""

    race: str
    model: str
    size: str
    work: dict

    @property
    def name(self) -> str:
        return f"{self.model} {self.size}"


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """All cells that are asked for, race by race, small ones first."""
    common = {"prompt_length": 256, "learning_rate": LEARNING_RATE, "training": {"threads": THREADS}, "lora_rank": 0}
    common |= {"peer_dtype": args.peer_dtype, "settings": args.settings}
    for race in args.only:
        for model in args.model:
            for size, work in sizes(race, args):
                yield Cell(race, model, size, common | work | {"race": race})


def sizes(race: str, args: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """The sizes of a race, with what they set. `prompts` is the number of rows of GSM8K."""
    if race == "sampling":
        for new in args.new_tokens:
            for requests in args.requests:
                yield f"{requests} x {new}", {"prompts": requests, "new_tokens": new}
    elif race == "scoring":
        prompts, new = (4, 8) if args.tiny else (32, 64)
        yield f"{prompts} x {new}", {"prompts": prompts, "new_tokens": new, "peer_batch": args.peer_batch or 8}
    elif race == "grpo":
        prompts, generations, new = (2, 2, 8) if args.tiny else (4, 8, 64)
        size = f"{prompts} x {generations} x {new}"
        work = {"prompts": prompts, "generations": generations, "new_tokens": new, "algorithm": "grpo"}
        work["peer_batch"] = args.peer_batch or prompts * generations
        work["settings"] = [*args.settings, f"algorithm.num_generations={generations}"]
        yield f"{size}, all weights", work
        yield f"{size}, LoRA", work | {"lora_rank": 16}
    else:
        # TRL packs rows of about two problems each, so that both sides learn from as many tokens in an update
        prompts, passes = (2, 1) if args.tiny else (16, 8)
        work = {"prompts": prompts, "new_tokens": 512, "algorithm": "sft", "peer_batch": args.peer_batch or 1}
        yield f"{prompts} rows", work | {"peer_width": args.peer_width, "peer_passes": args.peer_passes or passes}


def with_files(cell: Cell, args: argparse.Namespace, folder: Path) -> dict:
    """The cell's work with its model, prompts and rows. What is drawn once a cell lies in `folder`."""
    from tunix_lite.models.tokenizer import Tokenizer
    from tunix_lite.tasks.gsm8k import Gsm8k

    model_folder, template = MODELS[cell.model]
    # an update of SFT takes other rows each time
    needed = cell.work["prompts"] * (4 if cell.race == "sft" else 1)
    lines = args.rows.read_text().splitlines()[:needed]
    if len(lines) < needed:
        sys.exit(f"--rows: {args.rows} has {len(lines)} rows; this race needs {needed}")
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    examples = list(Gsm8k(train_file=str(file), held_out_file=str(file)).train)
    work = cell.work | {"template": template, "examples": examples, "rows_file": str(file), "folder": str(folder)}
    work |= {"model": str(args.models / model_folder), "name": f"real {cell.race} {cell.name}"}
    work["programs"] = str(folder / "programs")
    work["gguf"] = str(args.gguf / model_folder / "weights.gguf") if args.gguf else ""
    if cell.race in ("sampling", "scoring"):
        tokenizer = Tokenizer.load(work["model"])
        work["ids"] = [tokenizer.prompt(template.format(**example)) for example in examples]
        solutions = [tokenizer.encode(example["completion"]) for example in examples]
        new = work["new_tokens"]
        # a short solution again, so that each has as many tokens
        work["completions"] = [(ids * new)[:new] for ids in solutions]
        work["prompt_length"] = max(work["prompt_length"], *map(len, work["ids"]))
    return work


def missing(side: str, args: argparse.Namespace, model: str) -> str | None:
    """Why a side cannot be measured, with a line that changes it."""
    if side == "llama_cpp":
        if not args.node or not (args.node / "node_modules" / "node-llama-cpp").is_dir():
            return "no node-llama-cpp: npm install --prefix peer node-llama-cpp, then --node peer"
        name = MODELS[model][0]
        if not args.gguf or not (args.gguf / name / "weights.gguf").is_file():
            return (
                f"no GGUF file: tunix-lite export model.weights={name} kind=gguf type=f32 out=gguf/{name}, --gguf gguf"
            )
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


def race(cell: Cell, args: argparse.Namespace, lacks: dict[str, str | None]) -> dict[str, dict]:
    """Everybody's figures. A side that fails is left out, and its error stands in its place."""
    figures: dict[str, dict] = {side: {"not_measured": why} for side, why in lacks.items() if why}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = with_files(cell, args, Path(folder))
        try:
            for side in (side for side, why in lacks.items() if not why):
                figures[side] = started(side, work, args, workers)
            for number, side in turns(list(workers), args.rounds):
                if side not in workers:
                    continue
                try:
                    answer = workers[side].ask("step")
                except RuntimeError as error:
                    failed(side, error, figures, workers)
                    continue
                figures[side]["rounds"].append(answer)
                print(f"  {number + 1}/{args.rounds} {side:12} {shown_step(answer)}", flush=True)
        finally:
            for worker in workers.values():
                worker.end()
    return figures


def started(side: str, work: dict, args: argparse.Namespace, workers: dict[str, Worker]) -> dict:
    """Starts a worker and lets it make its first call; ours does so without kept programs first."""
    logs = args.out / "logs"
    figures: dict = {"rounds": []}
    for start in ("without_programs", "first") if side == "ours" else ("first",):
        try:
            workers[side] = Worker(side, command_of(side, args), work, logs)
            figures["facts"] = workers[side].facts
            figures[start] = workers[side].ask("step")
        except RuntimeError as error:
            failed(side, error, {side: figures}, workers)
            return figures
        print(f"  {side}, {start} call: {shown_step(figures[start])}", flush=True)
        if start == "without_programs":
            workers.pop(side).end()
    return figures


def failed(side: str, error: RuntimeError, figures: dict[str, dict], workers: dict[str, Worker]) -> None:
    if side in workers:
        workers.pop(side).end()
    print(f"  {error}", flush=True)
    # results name no folders of a machine
    figures[side]["error"] = re.sub(r"(?<![\w.])/[\w./+-]*/", "", str(error)).replace("://", " ")


def shown_step(answer: dict) -> str:
    return f"{answer['seconds']['step']:.2f} s, {sum(answer['lengths'])} tokens, {answer['peak_rss_mb'] / 1e3:.2f} GB"


def kept(side: str, figures: dict[str, dict]) -> dict:
    """What the JSON file keeps of one side: medians, first calls, and how many times faster ours is, by the median
    of the rounds' quotients of tokens a second."""
    mine = figures[side]
    if "not_measured" in mine or "error" in mine or not mine["rounds"]:
        reason = mine.get("not_measured") or mine.get("error") or "no round was made"
        return {"not_measured": reason}
    rounds = mine["rounds"]
    phases = rounds[0]["seconds"]
    result = {
        "seconds": {phase: middle(each["seconds"][phase] for each in rounds) for phase in phases},
        "cpu_seconds": middle(each["cpu_seconds"] for each in rounds),
        "tokens": middle(sum(each["lengths"]) for each in rounds),
        "tokens_per_second": middle(map(speed, rounds)),
        "peak_rss_mb": round(max(each["peak_rss_mb"] for each in rounds)),
        "first_seconds": round(mine["first"]["seconds"]["step"], 2),
        "setup_seconds": round(mine["facts"]["setup_seconds"], 2),
        "prompt_tokens": mine["facts"]["prompt_tokens"],
        "versions": mine["facts"]["versions"],
        "rounds": [{name: each[name] for name in ("seconds", "cpu_seconds", "lengths")} for each in rounds],
    }
    if "mean_logprob" in rounds[0]:
        result["mean_logprob"] = rounds[0]["mean_logprob"]
    if first := mine.get("without_programs"):
        result["first_seconds_without_programs"] = round(first["seconds"]["step"], 2)
        result["peak_rss_mb_without_programs"] = round(first["peak_rss_mb"])
    ours = figures.get("ours", {}).get("rounds", [])
    if side != "ours" and len(ours) == len(rounds):
        pairs = list(zip(rounds, ours, strict=True))
        result["times_ours"] = {"step": middle(speed(b) / speed(a) for a, b in pairs)}
        for phase in phases.keys() & ours[0]["seconds"].keys() & {"rollout", "update"}:
            if "rollout" in ours[0]["seconds"]:
                ratios = (a["seconds"][phase] / b["seconds"][phase] for a, b in pairs)
                result["times_ours"][phase] = middle(ratios)
    return result


def speed(answer: dict) -> float:
    return sum(answer["lengths"]) / answer["seconds"]["step"]


def middle(values: Iterator[float]) -> float:
    return round(statistics.median(values), 3)


def table(folder: Path) -> str:
    """All kept cells, a line for each side."""
    head = "race|side|seconds|rollout|update|CPU seconds|tokens/s|times as fast as it|peak GB|first call"
    lines = [head.split("|"), ["---"] * (head.count("|") + 1)]
    left_out = []
    for name in RACES:
        file = folder / f"real_{name}.json"
        for cell, result in json.loads(file.read_text())["cells"].items() if file.exists() else ():
            ours = result["sides"].get("ours", {})
            for side, one in result["sides"].items():
                if "not_measured" in one:
                    left_out.append(f"{name} {cell}, {side}: not measured. {one['not_measured']}")
                    continue
                lines.append([f"{name} {cell}", side, *row(one, ours)])
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *left_out])


def row(one: dict, ours: dict) -> list[str]:
    seconds = one["seconds"]
    has_phases = "rollout" in seconds
    first = f"{one['first_seconds']:.1f}"
    if "first_seconds_without_programs" in one:
        first += f" ({one['first_seconds_without_programs']:.1f} without programs)"
    times = one.get("times_ours", {})
    peak = f"{one['peak_rss_mb'] / 1e3:.2f}"
    if times and "peak_rss_mb" in ours:
        peak += f" (ours {ours['peak_rss_mb'] / one['peak_rss_mb']:.2f} of it)"
    return [
        f"{seconds['step']:.2f}",
        *(f"{seconds[phase]:.2f}" if has_phases else "" for phase in ("rollout", "update")),
        f"{one['cpu_seconds']:.2f}",
        f"{one['tokens_per_second']:.0f}",
        ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in sorted(times.items())),
        peak,
        first,
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with the folders of the models")
    parser.add_argument("--rows", type=Path, help="train.jsonl of GSM8K")
    parser.add_argument("--peer-python", type=Path, help="interpreter of transformers and TRL")
    parser.add_argument("--gguf", type=Path, help="folder with the folders of the models as GGUF files")
    parser.add_argument("--node", type=Path, help="folder with node_modules/node-llama-cpp")
    parser.add_argument("--only", type=names_of(RACES), default=list(RACES), help=f"of {','.join(RACES)}")
    parser.add_argument("--model", type=names_of(MODELS), default=list(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument(
        "--sides", type=names_of({"ours", *PACKAGES, "llama_cpp"}), help="those that race; without it all"
    )
    parser.add_argument("--requests", type=counts, default=[1, 16, 64], help="sizes of sampling, such as 1,16,64")
    parser.add_argument("--new-tokens", type=counts, default=[64, 200], help="sizes of sampling, such as 64,200")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--peer-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peer-batch", type=count, help="rows in a pass of transformers or TRL")
    parser.add_argument(
        "--peer-width", type=int, default=512, help="tokens of TRL's packed row in sft; 0 packs nothing"
    )
    parser.add_argument("--peer-passes", type=count, help="passes of TRL in an update of sft")
    parser.add_argument("--settings", nargs="+", default=[], help="settings of our runs, such as training.packing=none")
    parser.add_argument("--again", action="store_true", help="races cells that are kept, too")
    parser.add_argument("--table", action="store_true", help="only prints what is kept")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs; needs --out")
    parser.add_argument("--out", type=new_folder, default=RESULTS, help="folder of the JSON files")
    args = parser.parse_args()
    if args.table:
        return args
    for option in ("models", "rows"):
        if getattr(args, option) is None or not getattr(args, option).exists():
            parser.error(f"--{option}: there is no {getattr(args, option)}; {__doc__.splitlines()[2].strip()}")
    if args.tiny and args.out == RESULTS:
        parser.error("--tiny gives no results worth keeping: name another folder with --out")
    return args


def names_of(known: dict | set) -> object:
    def names(text: str) -> list[str]:
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"there is no {wrong[0]!r}; there are {','.join(sorted(known))}")
        return text.split(",")

    return names


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


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
    for cell in cells(args):
        file = args.out / f"real_{cell.race}.json"
        results = json.loads(file.read_text()) if file.exists() else {"benchmark": "real", "cells": {}}
        sides = [side for side in RACES[cell.race] if not args.sides or side in args.sides]
        lacks = {side: missing(side, args, cell.model) for side in sides}
        known = results["cells"].get(cell.name, {}).get("sides", {})
        wanted = [side for side, why in lacks.items() if not why]
        if not args.again and wanted and all("seconds" in known.get(side, {}) for side in wanted):
            print(f"{cell.race} {cell.name}: kept already", flush=True)
            continue
        print(f"{cell.race} {cell.name}: {args.rounds} rounds of {', '.join(wanted)}", flush=True)
        began = time.perf_counter()
        # options with what they were set to, but for files and folders
        flags = [word for word in sys.argv[1:] if "/" not in word]
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "commit": commit(),
            "command": shlex.join(["python", "benchmarks/real/race.py", *flags]),
            "work": cell.work,
        }
        figures = race(cell, args, lacks)
        about["load_after"] = round(os.getloadavg()[0], 2)
        about["seconds_of_the_race"] = round(time.perf_counter() - began, 1)
        results["cells"][cell.name] = about | {"sides": {side: kept(side, figures) for side in figures}}
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"  {file.name}: {about['seconds_of_the_race']:.0f} s", flush=True)
    print(table(args.out))


if __name__ == "__main__":
    main()
