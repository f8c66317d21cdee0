"""Is a step's time known before it runs? Twenty settings of the bundled model, predicted and then measured.

    python benchmarks/foresight.py [--rounds 2] [--steps 10] [--only 5] [--out FILE.json]

For each setting a process of its own predicts (as `tunix-lite plan` does: each program timed by itself, put together by
the scheduler and the packing) and another one trains for some steps. Lengths come from one run of the default setting,
which is made first; no setting sees its own lengths. A machine is not equally fast all the time, so the settings are
gone through in rounds, and both times of a setting are medians over the rounds; FILE.json keeps every round, and a
later call with the same file adds its own. Printed are both times, phase by phase, how far off the step was, and
Kendall's tau between the two orders. The targets: every step within 20 %, and tau of at least 0.8.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = ["evaluation.interval_steps=0", "evaluation.num_examples=0", "training.save_interval_steps=0"]
# Slots, packing, micro-batches, lengths, group sizes and recomputation, alone and together.
SETTINGS = [
    [],
    ["rollout.num_slots=16"],
    ["rollout.num_slots=32"],
    ["rollout.num_slots=64", "rollout.chunk=8"],
    ["training.packing=sequences"],
    ["training.packing=prefix"],
    ["training.packing=prefix", "training.micro_batch_tokens=1024"],
    ["training.packing=prefix", "rollout.num_slots=32"],
    ["training.micro_batch_size=16"],
    ["training.micro_batch_size=64"],
    ["generation.max_new_tokens=24"],
    ["generation.max_new_tokens=96"],
    ["generation.max_new_tokens=96", "training.packing=sequences"],
    ["algorithm.num_generations=4"],
    ["algorithm.num_generations=16"],
    ["algorithm.num_generations=16", "training.packing=prefix"],
    ["training.remat=block"],
    ["training.remat=dots", "training.micro_batch_size=32"],
    ["algorithm.kl_coef=0.04"],
    ["algorithm.kl_coef=0.04", "training.packing=prefix", "training.prompts_per_step=8"],
]


def kendall_tau(first: list[float], second: list[float]) -> float:
    """Of all pairs, the share in the same order in both less the share in the other: tau-a, ties count for neither."""
    count = len(first)
    score = 0
    for i in range(count):
        for j in range(i):
            product = (first[i] - first[j]) * (second[i] - second[j])
            score += (product > 0) - (product < 0)
    return score / (count * (count - 1) / 2)


def trained(overrides: list[str], folder: Path, steps: int) -> None:
    """A run of so many steps in this folder."""
    words = [*BASE, *overrides, f"training.max_steps={steps}", f"hydra.run.dir={folder}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_training.py"), *words], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")


def compared(overrides: list[str], recorded: Path, run: Path) -> list[dict]:
    """Rows of predicted and measured, the prediction by a process of its own."""
    script = (
        "import sys, json; from benchmarks import foresight; "
        "print('ROWS ' + json.dumps(foresight.predict(json.loads(sys.argv[1]), *sys.argv[2:])))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", script, json.dumps(overrides), str(recorded), str(run)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    if done.returncode or not lines:
        raise SystemExit(f"predicting {overrides} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("ROWS "))


def predict(overrides: list[str], recorded: str, run: str) -> list[dict]:
    """In a process of its own: the prediction of one setting beside what `run` measured."""
    from tunix_lite.distributed.host_memory import keep_freed_memory

    keep_freed_memory()

    from tunix_lite.commands.plan import PlanConfig, make_plans, with_forecast
    from tunix_lite.commands.program import compose
    from tunix_lite.planning import compare_run
    from tunix_lite.planning.lengths import recorded_lengths

    settings = compose([*BASE, *overrides])
    [plan] = make_plans(settings, PlanConfig(analytic=True), []).plans
    plan = with_forecast(plan, recorded_lengths(recorded), PlanConfig())
    rows = compare_run.predicted_against(plan.forecast, compare_run.measured(run))
    return [{"name": row.name, "predicted": row.predicted, "measured": row.measured} for row in rows]


def medians(rounds: list[list[dict]]) -> dict[str, dict]:
    """One setting over its rounds: by phase, the median predicted and the median measured seconds."""
    named = [{row["name"]: row for row in rows} for rows in rounds]
    found = {}
    for name in named[0]:
        there = [rows[name] for rows in named if name in rows]
        found[name] = {side: _median([row[side] for row in there]) for side in ("predicted", "measured")}
    return found


def _median(values: list[float | None]) -> float | None:
    """Of the values that there are."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def shown(rows: dict[str, dict], name: str) -> str:
    """Predicted and measured seconds of a phase."""
    if name not in rows or rows[name]["measured"] is None:
        return f"{'-':>15}"
    return f"{rows[name]['predicted']:7.3f} {rows[name]['measured']:7.3f}"


def summary(settings: list[dict]) -> dict:
    """How well the predictions of all settings agree with what was measured."""
    steps = [setting["medians"]["step"] for setting in settings]
    offs = [abs(step["predicted"] / step["measured"] - 1) for step in steps]
    predicted = [step["predicted"] for step in steps]
    measured = [step["measured"] for step in steps]
    return {
        "within_20_percent": sum(off <= 0.2 for off in offs),
        "median_off": statistics.median(offs),
        "most_off": max(offs),
        "kendall_tau": kendall_tau(predicted, measured) if settings[1:] else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each run; the first two do not count")
    parser.add_argument("--rounds", type=int, default=2, help="times that all settings are gone through")
    parser.add_argument("--only", type=int, default=len(SETTINGS), help="the first so many settings")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON; rounds that it holds count, too")
    args = parser.parse_args()
    if args.only < 1 or args.rounds < 1 or args.steps < 3:
        parser.error("--only and --rounds are at least 1, --steps at least 3, as the first two do not count")

    if args.out and not args.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    try:
        earlier = json.loads(args.out.read_text())["settings"] if args.out and args.out.exists() else []
        rounds_of = {tuple(setting["overrides"]): setting["rounds"] for setting in earlier}
    except (OSError, ValueError, KeyError, TypeError):
        parser.error(f"--out: {args.out} is there and holds no figures of an earlier call")
    settings = [{"overrides": one, "rounds": rounds_of.get(tuple(one), [])} for one in SETTINGS[: args.only]]
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "recorded"
        # completions grow longer while a model learns, so the recorded run is as long as the others
        trained([], recorded, args.steps)
        print(f"{'rollout s':>15} {'scoring s':>15} {'update s':>15} {'step s':>15}  off by  setting", flush=True)
        for i in range(args.rounds * len(settings)):
            setting = settings[i % len(settings)]
            run = Path(folder) / f"run{i}"
            trained(setting["overrides"], run, args.steps)
            setting["rounds"].append(compared(setting["overrides"], recorded, run))
            setting["medians"] = rows = medians(setting["rounds"])
            off = rows["step"]["predicted"] / rows["step"]["measured"] - 1
            cells = " ".join(shown(rows, name) for name in ("rollout", "scoring", "update", "step"))
            print(f"{cells}  {off:+6.0%}  {' '.join(setting['overrides']) or '(default)'}", flush=True)
            if args.out and i % len(settings) == len(settings) - 1:
                found = {"benchmark": "foresight"} | summary(settings) | {"settings": settings}
                args.out.write_text(json.dumps(found, indent=1) + "\n")

    found = summary(settings)
    print(
        f"step within 20 %: {found['within_20_percent']} of {len(settings)}; "
        f"median off {found['median_off']:.0%}, most {found['most_off']:.0%}"
    )
    if found["kendall_tau"] is not None:
        print(f"Kendall's tau of the two orders: {found['kendall_tau']:.2f}")


if __name__ == "__main__":
    main()
