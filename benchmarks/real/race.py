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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    """All cells that are asked for, race by race. `prompts` is the number of rows of GSM8K."""
    scored, grpo, learned = ((4, 8), (2, 2, 8), 2) if args.tiny else ((32, 64), (4, 8, 64), 16)
    sampling = [(requests, new) for new in args.new_tokens for requests in args.requests]
    of_race = {
        "sampling": {f"{n} x {new}": {"prompts": n, "new_tokens": new} for n, new in sampling},
        "scoring": {f"{scored[0]} x {scored[1]}": {"prompts": scored[0], "new_tokens": scored[1], "peer_batch": 8}},
        "grpo": {
            f"{grpo[0]} x {grpo[1]} x {grpo[2]}, {trained}": {
                **dict(zip(("prompts", "generations", "new_tokens"), grpo, strict=True)),
                "peer_batch": grpo[0] * grpo[1],
                "lora_rank": rank,
            }
            for trained, rank in (("all weights", 0), ("LoRA", 16))
        },
        # TRL packs rows of about two problems each, so that both sides learn from as many tokens in an update
        "sft": {
            f"{learned} rows": {
                **{"prompts": learned, "new_tokens": 512, "generations": 1},
                **{"peer_width": 512, "peer_batch": 1, "peer_passes": learned // 2},
            }
        },
    }
    for race in args.only:
        for model in args.model:
            for size, work in of_race[race].items():
                yield Cell(race, model, size, {"race": race} | COMMON | work | dict(args.change))


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
    work |= {"model": str(args.models / model_folder), "name": f"real_{cell.race}_{cell.name}".replace(" ", "_")}
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
        work = with_files(cell, args, Path(folder))
        try:
            for side in (side for side, why in lacks.items() if not why):
                if side == "ours":
                    call(side, "without_programs")
                    if side in workers:
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
    left_out = []
    for name in RACES:
        file = folder / f"real_{name}.json"
        for cell, result in json.loads(file.read_text())["cells"].items() if file.exists() else ():
            ours = result["sides"].get("ours", {"not_measured": ""})
            ours = [] if "not_measured" in ours else ours["rounds"]
            for side, one in result["sides"].items():
                if "not_measured" in one:
                    left_out.append(f"{name} {cell}, {side}: not measured. {one['not_measured']}")
                else:
                    lines.append([f"{name} {cell}", side, *row(one, ours if side != "ours" else [])])
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *left_out])


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
    parser.add_argument("--only", type=names_of(RACES), default=list(RACES), help=f"of {','.join(RACES)}")
    parser.add_argument("--model", type=names_of(MODELS), default=list(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument(
        "--sides", type=names_of({"ours", *PACKAGES, "llama_cpp"}), help="those that race; without it all"
    )
    parser.add_argument("--requests", type=counts, default=[1, 16, 64], help="sizes of sampling, such as 1,16,64")
    parser.add_argument("--new-tokens", type=counts, default=[64, 200], help="sizes of sampling, such as 64,200")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--change", type=change, nargs="+", default=[], help="of a cell's work, such as peer_batch=16")
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


def change(text: str) -> tuple[str, object]:
    """A key of a cell's work and its value, in JSON; a value that is none is a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


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
        there = [side for side in RACES[cell.race] if not args.sides or side in args.sides]
        lacks = {side: missing(side, args, cell.model) for side in there}
        known = results["cells"].get(cell.name, {}).get("sides", {})
        wanted = [side for side, why in lacks.items() if not why]
        if not args.again and wanted and all(known.get(side, {}).get("first") for side in wanted):
            print(f"{cell.race} {cell.name}: kept already", flush=True)
            continue
        print(f"{cell.race} {cell.name}: {args.rounds} rounds of {', '.join(wanted)}", flush=True)
        began = time.perf_counter()
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "commit": commit(),
            "work": cell.work,
        }
        sides = race(cell, args, lacks)
        about["load_after"] = round(os.getloadavg()[0], 2)
        about["seconds_of_the_race"] = round(time.perf_counter() - began, 1)
        results["cells"][cell.name] = about | {"sides": sides}
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"  {file.name}: {about['seconds_of_the_race']:.0f} s", flush=True)
    print(table(args.out))


if __name__ == "__main__":
    main()
