"""What rollout.overlap=carry saves where completions have long tails. Prints JSON lines.

    python benchmarks/overlap.py [--arms none carry] [--turns 3] [--steps 12] [--max-new 256] [--set KEY=VALUE ...]
    python benchmarks/overlap.py --task repeated_addition --target 0.7 [--base FOLDER] [--turns 3] [--steps 26]
    python benchmarks/overlap.py --target 0.6 [--turns 3] [--steps 120] [--set KEY=VALUE ...]

Each run is a process of its own, a real training run of the bundled base; arms take turns, and turn t has seed=t in all
of them. Without --target the length of each completion is fixed beforehand: those of benchmarks/peers, whose mean is a
quarter of --max-new, in another order for every step. Which tokens are drawn does not matter then, and nothing is
learned. With --target lengths are the model's own, and a run is timed until its held-out accuracy has reached the
target. --task arithmetic has completions of about one length. --task repeated_addition (repeated_addition.py) has a
long tail: the bundled base is fine-tuned on its demonstrations first, which takes some two minutes, once; --base keeps
that model, or takes it where it is.

Without --target seconds are those of the steps after --warm-up. With --target they begin with the first step, since it
is learned from, too. Compiling is left out of them, and so are evaluations, which seconds_with_evaluation adds. Each
arm then runs once before the first turn, which fills a cache of compiled programs; step_seconds is the median of the
steps after --warm-up, to compare with.
tokens_per_second counts completion tokens of the groups that updates took, agreeing ones included, over these seconds;
so it includes rewards, updates and what carrying costs. processor_seconds (without --target) are of the same steps,
decode_steps and reread_tokens are sums over them. rollout_share is the median share of a step that sampling takes. The
last line has the ratios of each arm to the first one in the same turn, the median of them: tokens_per_second, and of
the others the first arm's over the arm's, so that above 1 is better in all of them. A run that does not reach the
target counts as it ended: see `reached`.
"""

import argparse
import json
import os
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

from repeated_addition import RepeatedAddition
from workloads import long_tails

ARMS = {
    "none": [],
    "carry": ["rollout.overlap=carry", "rollout.max_staleness=2"],
    "carry_1": ["rollout.overlap=carry", "rollout.max_staleness=1"],
    "carry_3": ["rollout.overlap=carry", "rollout.max_staleness=3"],
    "carry_4": ["rollout.overlap=carry", "rollout.max_staleness=4"],
    "one_step": ["rollout.overlap=one_step"],
}
QUIET = ["tracking.console=quiet", "tracking.tensorboard=false", "rewards.workers=0"]
SIZES = [
    "training.prompts_per_step=8",
    "algorithm.num_generations=8",
    "rollout.chunk=8",
    "training.packing=auto",
    "training.save_interval_steps=0",
]
# The completions of 16 prompts: a tail is one of prompts here, so more of them than with lengths fixed beforehand.
RACE = [
    "training.prompts_per_step=16",
    "algorithm.num_generations=4",
    "algorithm.agreeing_groups=drop",
    "training.micro_batch_tokens=512",
    "optimizer.learning_rate=1e-5",
    "evaluation.interval_steps=2",
    "evaluation.num_examples=128",
    "evaluation.num_samples=0",
]
TEACHING = [
    "algorithm=sft",
    "training.prompts_per_step=64",
    "training.max_steps=200",
    "optimizer.learning_rate=2e-3",
    "optimizer.schedule=cosine",
    "evaluation.num_examples=0",
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
    from tunix_lite.rollout.generate import GenerateFunction
    from tunix_lite.rollout.partial import OpenCompletion
    from tunix_lite.runs import overlap, separate_sampling

    rows = prompts * generations
    make_generate = separate_sampling.make_generate
    make_sampler = overlap.make_sampler
    as_request = OpenCompletion.as_request

    def generate_of(cfg, generation, eos_ids, *others):
        del eos_ids
        generate = make_generate(cfg, generation, (), *others)
        steps = iter(range(10**9))

        def forced(*args, **options):
            return generate(*args, limits=lengths_of(next(steps), rows, longest), **options)

        return GenerateFunction(forced, generate.compile_ahead)

    def request_of(self, ids, place, limit, criteria):
        limit = lengths_of(self.step, rows, longest)[self.prompt * generations + self.generation]
        return as_request(self, ids, place, limit, criteria)

    def sampler_of(cfg, generation, eos_ids, *others):
        del eos_ids
        return make_sampler(cfg, generation, (), *others)

    separate_sampling.make_generate = generate_of
    overlap.make_sampler = sampler_of
    OpenCompletion.as_request = request_of


class CompileClock:
    """When programs were traced and compiled, or read from the cache of programs, on time.perf_counter.

    Example: with [(1, 3), (2, 4)] seen, `seconds(0, 3.5)` is 2.5: one lies partly within the other.
    """

    def __init__(self):
        self.spans: list[tuple[float, float]] = []

    def __call__(self, event: str, seconds: float, **others) -> None:
        """A listener of jax.monitoring."""
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self.spans.append((now - seconds, now))

    def seconds(self, began: float, ended: float) -> float:
        """Of the time between the two, what compiling took."""
        total = 0.0
        for start, end in sorted(self.spans):
            start, end = max(start, began), min(end, ended)
            if end > start:
                total += end - start
                began = end
        return total


def composed(task: str, settings: list[str]):
    """The settings of a run."""
    from tunix_lite.settings.compose import compose

    run = compose([*QUIET, *settings])
    if task == "repeated_addition":
        run = replace(run, task=replace(run.task, source=RepeatedAddition()))
    return run


def teach(folder: Path, task: str, max_new: int) -> None:
    """Fine-tunes the bundled base on the demonstrations of the task, into a folder."""
    from tunix_lite.inference.export import export
    from tunix_lite.inference.language_model import load
    from tunix_lite.train import train

    run = composed(task, [*TEACHING, f"generation.max_new_tokens={max_new}"])
    with tempfile.TemporaryDirectory() as of_run:
        train(run, of_run)
        export(load(of_run), folder, dtype="fp32")


def work(args) -> None:
    """One run, in this process: {} of what it took."""
    import jax

    from tunix_lite.train import train

    compiling = CompileClock()
    jax.monitoring.register_event_duration_secs_listener(compiling)
    run = composed(args.task, args.set)
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
    sequences = run.training.prompts_per_step * run.algorithm.num_generations
    settled = [row for row in rows if args.warm_up < row["step"]]
    found = {}
    if args.target is None:
        began = args.warm_up
        seconds = clock[last][0] - clock[began][0]
        found["processor_seconds"] = round(clock[last][1] - clock[began][1], 3)
    else:
        # from the first step on; that of step `last` comes after its clock
        began = 0
        start = clock[1][0] - rows[0]["time/step"]
        evaluations = {row["step"]: row.get("time/eval", 0.0) for row in rows}
        compiled = compiling.seconds(start, clock[last][0])
        seconds = clock[last][0] - start - compiled
        seconds -= sum(evaluations[step] for step in range(1, last))
        with_evaluation = seconds + sum(evaluations[step] for step in range(1, last + 1))
        found |= {"seconds_with_evaluation": round(with_evaluation, 3), "compile_seconds": round(compiled, 3)}
    counted = [row for row in rows if began < row["step"] <= last]
    evaluated = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    print(
        json.dumps(
            {
                "steps": last,
                "reached": None if args.target is None else bool(reached),
                "seconds": round(seconds, 3),
                **found,
                "tokens_per_second": sum(row["completions/mean_length"] for row in counted) * sequences / seconds,
                "slot_use": statistics.mean(row["rollout/slot_use"] for row in counted),
                "staleness_mean": statistics.mean(row.get("rollout/staleness_mean", 0) for row in counted),
                "sampling_seconds": round(sum(row["time/rollout"] for row in counted), 3),
                "rollout_share": round(statistics.median(row["time/rollout"] / row["time/step"] for row in settled), 3),
                "step_seconds": round(statistics.median(row["time/step"] for row in settled), 3),
                "update_seconds": round(statistics.median(row["time/update"] for row in settled), 3),
                "mean_length": round(statistics.mean(row["completions/mean_length"] for row in counted), 1),
                "staleness_max": max(row.get("rollout/staleness_max", 0) for row in counted),
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
    parser.add_argument("--task", default="arithmetic", choices=["arithmetic", "repeated_addition"])
    parser.add_argument("--base", type=Path, help="folder of the fine-tuned model; without it, a temporary one")
    parser.add_argument("--first-seed", type=int, default=0, help="of the first turn")
    parser.add_argument("--teach", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of all arms")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    if args.teach:
        teach(args.teach, args.task, args.max_new)
        return
    if args.task != "arithmetic" and args.target is None:
        parser.error(f"--task {args.task} is learned: give a --target")

    with tempfile.TemporaryDirectory() as folder:
        settings = []
        if args.task == "repeated_addition":
            base = args.base or Path(folder) / "base"
            if base.exists() and not (base / "model.safetensors").is_file():
                parser.error(f"--base {base}: it has no model.safetensors; name a model's folder, or one to be made")
            if not base.exists():
                command = [sys.executable, __file__, "--task", args.task, "--max-new", str(args.max_new)]
                subprocess.run([*command, "--teach", str(base)], cwd=ROOT, stdout=sys.stderr, check=True)
            settings = [*RACE, f"model.weights={base.resolve()}"]
        race(args, settings, Path(folder) / "programs")


def race(args, settings: list[str], programs: Path) -> None:
    """The arms in turns, with these settings beside the usual ones. programs: folder for compiled ones."""
    evaluation = [] if args.target else ["evaluation.num_examples=0"]
    sizes = [f"training.max_steps={args.steps}", f"generation.max_new_tokens={args.max_new}"]
    settings = [*SIZES, *evaluation, *sizes, *settings]
    own = ["--work", "--task", args.task, "--warm-up", str(args.warm_up)]
    own += [] if args.target is None else ["--target", str(args.target)]
    found = {arm: [] for arm in args.arms}
    environment = dict(os.environ)
    if args.target is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(programs)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # where there is a target, turn -1 fills the cache
    for turn in range(0 if args.target is None else -1, args.turns):
        for arm in args.arms:
            command = [
                sys.executable,
                __file__,
                *own,
                "--set",
                *settings,
                f"seed={args.first_seed + max(0, turn)}",
                *ARMS[arm],
                *args.set,
            ]
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            took = json.loads(done.stdout.splitlines()[-1])
            if turn >= 0:
                found[arm].append(took)
            print(json.dumps({"arm": arm, "turn": turn} | took), flush=True)
    print(json.dumps(ratios(found, args.arms[0])))


def ratios(found: dict[str, list[dict]], first: str) -> dict:
    """The median over turns of each arm against the first arm in the same turn; above 1 is better."""
    result = {}
    for arm, turns in found.items():
        names = (
            "tokens_per_second",
            "seconds",
            "seconds_with_evaluation",
            "processor_seconds",
            "decode_steps",
            "steps",
        )
        for name in (name for name in names if name in turns[0]):
            gains = [one[name] / other[name] for one, other in zip(turns, found[first])]
            gain = statistics.median(gains if name == "tokens_per_second" else [1 / x for x in gains])
            result[f"{arm}/{name}"] = round(gain, 3)
    return result


if __name__ == "__main__":
    main()
