"""What drawing tokens costs at the vocabulary of Gemma 3. Prints one JSON line for each setting.

    python benchmarks/sampling.py [--slots 32] [--vocabulary 262144] [--tokens 8] [--repeats 3] [--other FOLDER]

A model of 1 layer of 16 with random weights, so that nearly all of a decode step is scores and drawing. Settings: plain
draws from everything, top_p=0.95, top_k=50, both with min_p=0.05, and greedy with top_p=0.95. Seconds of a setting are
the median over its turns of a rollout of so many tokens in each slot, after one that compiles; beside them, those of
all cores that the process used, which other work on the machine changes less.

--other: the folder of another version of the code. Both versions then take turns, each turn in a process of its own,
and the ratios are the other's median times over ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = {
    "plain": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "greedy top_p": {"top_p": 0.95, "temperature": 0.0},
}


def one_turn(args) -> dict[str, dict[str, float]]:
    """Milliseconds of a decode step, by setting: on the clock, and of all cores."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from tunix_lite.distributed.host_memory import keep_freed_memory

    keep_freed_memory()

    import jax

    from tunix_lite.models import decoder, weights
    from tunix_lite.models.architecture import Architecture
    from tunix_lite.parallel.mesh import make_mesh
    from tunix_lite.rollout.generate import make_sampler
    from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

    jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1]))
    cfg = Architecture(args.vocabulary, 1, 16, 1, 1, 16, 16)
    params = weights.init_params(decoder.weights(cfg), jax.random.key(0))
    prompts = [[5, 6, 7]] * args.slots
    took = {}
    for name in args.settings:
        generation = GenerationConfig(4, args.tokens, **SETTINGS[name])
        sample = make_sampler(cfg, generation, (), 0, rollout=RolloutConfig(args.slots, args.tokens))
        for turn in range(2):  # the first compiles
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in sample(params, prompts, jax.random.key(turn)):
                pass
            seconds = {"wall": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
            took[name] = {clock: round(1e3 * took / args.tokens, 1) for clock, took in seconds.items()}
    return took


def in_a_process(args, folder: Path) -> dict[str, dict[str, float]]:
    command = [sys.executable, __file__, "--one-turn", "--tokens", str(args.tokens), "--slots", str(args.slots)]
    command += ["--vocabulary", str(args.vocabulary), "--settings", *args.settings]
    told = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    if told.returncode:
        sys.exit(f"with the code in {folder}:\n{told.stderr}")
    return json.loads(told.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=262_144)
    parser.add_argument("--tokens", type=int, default=8, help="of each slot in a turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--other", type=Path, help="folder of another version of the code, which takes turns with this")
    parser.add_argument("--one-turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_turn:
        print(json.dumps(one_turn(args)))
        return
    arms = {"ours": Path(__file__).parents[1]} | ({"other": args.other.resolve()} if args.other else {})
    turns = {arm: [] for arm in arms}
    for _ in range(args.repeats):
        for arm, folder in arms.items():
            turns[arm].append(in_a_process(args, folder))
    for name in args.settings:
        took = {arm: [turn[name] for turn in turns[arm]] for arm in arms}
        line = {"benchmark": "sampling", "setting": name, "slots": args.slots, "vocabulary": args.vocabulary}
        for clock in ("wall", "cpu"):
            ms = {arm: statistics.median(turn[clock] for turn in took[arm]) for arm in arms}
            line |= {f"{arm}_{clock}_ms_per_step": round(value, 1) for arm, value in ms.items()}
            if args.other:
                line[f"{clock}_ratio"] = round(ms["other"] / ms["ours"], 2)
        print(json.dumps(line | {"turns": took, "cores": os.cpu_count()}), flush=True)


if __name__ == "__main__":
    main()
