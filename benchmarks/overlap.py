"""What rollout.overlap=carry saves where completions have long tails. Prints JSON lines.

    python benchmarks/overlap.py [--arms none carry] [--turns 3] [--steps 12] [--max-new 256] [--set KEY=VALUE ...]
    python benchmarks/overlap.py --target 0.6 [--turns 3] [--steps 120] [--set KEY=VALUE ...]

Each run is a process of its own, a real training run of the bundled base on arithmetic; arms take turns. Without
--target the length of each completion is fixed beforehand: those of benchmarks/peers, whose mean is a quarter of
--max-new, in another order for every step. Which tokens are drawn does not matter then, and nothing is learned. With
--target lengths are the model's own, and a run is timed until its held-out accuracy has reached the target.

tokens_per_second counts completion tokens that updates learned from, over the whole time of the steps after --warm-up;
so it includes rewards, updates and what carrying costs. processor_seconds are of the same steps, decode_steps and
reread_tokens are sums over them. The last line has the ratios of each arm to the first one, medians over turns:
tokens_per_second, and of the others the first arm's over the arm's, so that above 1 is better in all of them.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

from workloads import long_tails

ARMS = {
    "none": [],
    "carry": ["rollout.overlap=carry", "rollout.max_staleness=2"],
    "carry_1": ["rollout.overlap=carry", "rollout.max_staleness=1"],
    "carry_3": ["rollout.overlap=carry", "rollout.max_staleness=3"],
    "carry_4": ["rollout.overlap=carry", "rollout.max_staleness=4"],
    "one_step": ["rollout.overlap=one_step"],
}
QUIET = ["tracking.console=quiet", "tracking.report=false", "tracking.tensorboard=false", "rewards.workers=0"]
SIZES = [
    "training.prompts_per_step=8",
    "algorithm.num_generations=8",
    "rollout.chunk=8",
    "training.packing=auto",
    "training.save_interval_steps=0",
]
COUNTED = {"decode_steps": "rollout/decode_steps", "reread_tokens": "rollout/reread_tokens"}


@cache
def lengths_of(step: int, rows: int, longest: int) -> list[int]:
    """Of the completions of the prompts of a step, in their order. Kept, since carry asks for each completion."""
    lengths = long_tails(rows, longest)
    random.Random(step).shuffle(lengths)
    return lengths


def force_lengths(prompts: int, generations: int, longest: int) -> None:
    """From here on every completion has the tokens of `lengths_of`: its limit, and no end token ends it earlier."""
    from tunix_lite.rollout.carry import CarrySampler
    from tunix_lite.runs import learner, overlap

    rows = prompts * generations
    make_generate = learner.make_generate_with_partner
    make_carry_sampler = overlap.make_carry_sampler

    def generate_of(cfg, generation, eos_ids, *others):
        del eos_ids
        generate = make_generate(cfg, generation, (), *others)
        steps = iter(range(10**9))

        def forced(*args, **options):
            return generate(*args, limits=lengths_of(next(steps), rows, longest), **options)

        return forced

    def requests_of(self, in_order):
        requests = [one.as_request(i, longest, self.criteria) for i, one in enumerate(in_order)]
        for one, request in zip(in_order, requests):
            request.limit = lengths_of(one.step, rows, longest)[one.prompt * generations + one.generation]
        return requests

    def sampler_of(cfg, generation, eos_ids, *others):
        del eos_ids
        return make_carry_sampler(cfg, generation, (), *others)

    learner.make_generate_with_partner = generate_of
    overlap.make_carry_sampler = sampler_of
    CarrySampler._requests = requests_of


def work(args) -> None:
    """One run, in this process: {} of what it took."""
    from tunix_lite.commands.program import compose
    from tunix_lite.train import train

    run = compose([*QUIET, *args.set])
    if args.target is None:
        count = run.training.prompts_per_step
        force_lengths(count, run.algorithm.num_generations, run.generation.max_new_tokens)
    clock = {}

    def observed(done) -> dict:
        clock[done.step] = (time.perf_counter(), time.process_time())
        return {}

    run = replace(run, tracking=replace(run.tracking, observers={"clock": observed}))
    with tempfile.TemporaryDirectory() as folder:
        train(run, folder)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"]]
    last = rows[-1]["step"]
    if args.target is not None:
        reached = [row["step"] for row in rows if row.get("eval/accuracy", 0) >= args.target]
        last = reached[0] if reached else last
    began = args.warm_up
    counted = [row for row in rows if began < row["step"] <= last]
    sequences = run.training.prompts_per_step * run.algorithm.num_generations
    seconds = clock[last][0] - clock[began][0]
    evaluated = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    print(
        json.dumps(
            {
                "steps": last,
                "reached": None if args.target is None else bool(reached),
                "seconds": round(seconds, 3),
                "processor_seconds": round(clock[last][1] - clock[began][1], 3),
                "tokens_per_second": sum(row["completions/mean_length"] for row in counted) * sequences / seconds,
                "slot_use": statistics.mean(row["rollout/slot_use"] for row in counted),
                "staleness_mean": statistics.mean(row.get("rollout/staleness_mean", 0) for row in counted),
                "sampling_seconds": round(sum(row["time/rollout"] for row in counted), 3),
                "accuracies": evaluated,
                **{name: sum(row.get(key, 0) for row in counted) for name, key in COUNTED.items()},
            }
        )
    )


def main() -> None:
    """Runs the arms in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=["none", "carry"], choices=ARMS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that do not count: they compile")
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--target", type=float, help="held-out accuracy")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of all arms")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return

    evaluation = [] if args.target else ["evaluation.num_examples=0"]
    settings = [*SIZES, *evaluation, f"training.max_steps={args.steps}", f"generation.max_new_tokens={args.max_new}"]
    own = ["--work", "--warm-up", str(args.warm_up)]
    own += [] if args.target is None else ["--target", str(args.target)]
    found = {arm: [] for arm in args.arms}
    for turn in range(args.turns):
        for arm in args.arms:
            command = [sys.executable, __file__, *own, "--set", *settings, *ARMS[arm], *args.set]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            took = json.loads(done.stdout.splitlines()[-1])
            found[arm].append(took)
            print(json.dumps({"arm": arm, "turn": turn} | took), flush=True)
    print(json.dumps(ratios(found, args.arms[0])))


def ratios(found: dict[str, list[dict]], first: str) -> dict:
    """Each arm's median against the first arm's; above 1 is better."""
    result = {}
    for arm, turns in found.items():
        for name in ("tokens_per_second", "seconds", "processor_seconds", "decode_steps"):
            ours = statistics.median(one[name] for one in turns)
            theirs = statistics.median(one[name] for one in found[first])
            result[f"{arm}/{name}"] = round(ours / theirs if name == "tokens_per_second" else theirs / ours, 3)
    return result


if __name__ == "__main__":
    main()
