"""A run that is killed again and again ends as if nothing had happened: `make soak`, an hour, or a few kills by hand.

    python tests/soak.py --minutes 60
    python tests/soak.py --kills 20 [--processes 2] [--updates 2] [--seed 0]

One run goes through undisturbed. Another, of the same settings, is disturbed at random moments, in the middle of saving
too, in the ways of WAYS, and is started again with the same command until it ends. Then parameters and optimizer are
the same to the bit, and metrics.jsonl has every step once and the same numbers. In both a reward fails now and then: it
raises, is not a number, or ends its worker; and now and then a gradient is not a number. One and two processes and one
and two updates a rollout take turns, where nothing is said of them; runs of two updates begin with another's
checkpoint (resume=FOLDER).
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from recorded_runs import ROOT, checkpoint_of, differences, last_logged_step, metrics_of

STEPS = 24
RUN = [
    *(f"training.max_steps={STEPS}", "training.prompts_per_step=4", "algorithm.num_generations=4"),
    *(
        "generation.max_new_tokens=8",
        "evaluation.num_examples=8",
        "evaluation.num_samples=0",
        "evaluation.interval_steps=4",
    ),
    *("optimizer.learning_rate=1e-3", "tracking.samples_interval_steps=4", "rewards.on_error=zero"),
    *("algorithm._target_=faulty_algorithm.NotFinite", "training.max_skipped_in_a_row=100"),
    "+task.rewards.short={fn: {_target_: faulty_rewards.now_and_then}, weight: 1.0}",
    "rollout.chunk=1",  # so that most signals come in the middle of a rollout, which is left there
]
BEFORE = 4  # steps of the run that others go on from
STALL = 30  # seconds until a launcher ends a run of which a process is stopped
ALL, LAUNCHER, ONE, STOP, TERM, INTERRUPT, TWICE, HANG_UP, SOME = WAYS = (
    "kill -9 of all",
    "kill -9 of the launcher",
    "kill -9 of one process",
    "SIGSTOP of one process",
    "SIGTERM",
    "Ctrl-C",
    "Ctrl-C twice",
    "SIGHUP",
    "SIGTERM of one process",
)
DEVICES = 2  # of all processes together


def command(folder: Path, processes: int, updates: int) -> list[str]:
    launcher = ["-m", "tunix_lite.launch", f"--nprocs={processes}"] if processes > 1 else []
    settings = [f"launch.stall_timeout={STALL}", f"algorithm.updates_per_rollout={updates}"]
    settings += [f"training.save_interval_steps={updates}"]
    if folder.name == "before":
        settings += [f"training.max_steps={BEFORE}"]
    elif updates > 1:
        settings += [f"resume={folder.parent / 'before'}"]
    return [sys.executable, *launcher, str(ROOT / "run_training.py"), *RUN, *settings, f"hydra.run.dir={folder}"]


def started(folder: Path, processes: int, updates: int) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_NUM_CPU_DEVICES": str(DEVICES // processes),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiling is most of a start
    }
    with open(f"{folder}.out", "ab") as out:
        call = command(folder, processes, updates)
        return subprocess.Popen(call, env=environment, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)


def wait_for_a_moment(process: subprocess.Popen, folder: Path, seconds: float, chance: random.Random) -> bool:
    """Whether it still runs at a moment that is mostly while it steps and saves, seldom while it starts."""
    if chance.random() < 0.2:
        until = time.monotonic() + chance.uniform(0.5, 30)
    else:
        before = last_logged_step(folder)
        while process.poll() is None and last_logged_step(folder) <= before:
            time.sleep(0.02)
        until = time.monotonic() + chance.uniform(0, 0.4 * seconds)
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    return process.poll() is None


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


def disturb(process: subprocess.Popen, way: str, processes: int, chance: random.Random) -> None:
    """Ends it in this way; with kill -9 of the launcher its processes go on, and save, while the next run starts."""
    trainers = children(process.pid) if processes > 1 else [process.pid]
    if way == ALL:
        process.send_signal(signal.SIGSTOP)  # so that it sees nobody end
        for pid in trainers:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    elif way == LAUNCHER:
        process.kill()
    elif way == ONE and trainers:
        os.kill(chance.choice(trainers), signal.SIGKILL)
    elif way == SOME and trainers:  # which the others hear of in the middle of a rollout, or after a step
        os.kill(chance.choice(trainers), signal.SIGTERM)
    elif way == STOP and trainers:
        os.kill(chance.choice(trainers), signal.SIGSTOP)
    else:
        process.send_signal({TERM: signal.SIGTERM, HANG_UP: signal.SIGHUP}.get(way, signal.SIGINT))
        if way == TWICE:
            time.sleep(chance.uniform(0.05, 0.5))
            process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=120)
    finally:
        process.kill()


def kept(folder: Path) -> dict:
    """The metrics but for the clock's, what status.json says of them, and digests of the last checkpoint's arrays."""
    status = json.loads((folder / "status.json").read_text())
    checkpoint = checkpoint_of(folder)
    assert checkpoint["step"] == STEPS, checkpoint["step"]
    status = {name: status[name] for name in ("status", "steps", "eval")}
    return {"metrics": metrics_of(folder), "status": status, "checkpoint": checkpoint}


def check_same(folder: Path, updates: int, wanted: dict) -> None:
    found = kept(folder)
    first = 0 if updates == 1 else BEFORE + 1
    assert [row["step"] for row in found["metrics"]] == list(range(first, STEPS + 1))
    assert not (lines := differences(wanted, found, ("status", "checkpoint"))), lines


def through(folder: Path, processes: int, updates: int) -> None:
    run = started(folder, processes, updates)
    assert run.wait(timeout=600) == 0, Path(f"{folder}.out").read_text()[-3000:]


def undisturbed(folder: Path, processes: int, updates: int) -> tuple[dict, float]:
    """What must come out, and how long the steps take that do not compile."""
    if updates > 1:
        through(folder / "before", processes, updates)
    through(folder / "whole", processes, updates)
    wanted = kept(folder / "whole")
    for fault in ("rewards/errors", "rewards/crashes", "rewards/not_numbers", "train/skipped"):
        assert sum(row.get(fault, 0) for row in wanted["metrics"]), f"no {fault}"
    lines = (folder / "whole" / "metrics.jsonl").read_text().splitlines()
    return wanted, sum(json.loads(line)["time/step"] for line in lines[2:])


def soak(folder: Path, turns: list[tuple[int, int]], enough: Callable[[int], bool], chance: random.Random) -> int:
    """Runs with faults until `enough(kills)`; every finished run is compared. Returns how often it was disturbed."""
    kills, known = 0, {}
    for number, settings in enumerate(itertools.cycle(turns)):
        if enough(kills):
            return kills
        processes, updates = settings
        own = folder / f"{processes}-{updates}"
        if settings not in known:
            own.mkdir()
            known[settings] = undisturbed(own, *settings)
            print(f"{processes} processes, {updates} updates a rollout: undisturbed", flush=True)
        wanted, seconds = known[settings]
        here = own / f"disturbed-{number}"
        ways = WAYS if processes > 1 else [way for way in WAYS if way not in (LAUNCHER, ONE, STOP, SOME)]
        while not is_completed(here):
            process, way = started(here, *settings), chance.choice(ways)
            if enough(kills) or not wait_for_a_moment(process, here, seconds, chance):
                assert process.wait(timeout=600) in (0, 130), f"exit code {process.returncode}, see {here}.out"
                continue
            step = last_logged_step(here)
            disturb(process, way, processes, chance)
            kills += 1
            found = sorted(path.name for path in (here / "checkpoints").glob("*"))
            print(f"{kills} {way} at step {step}: exit {process.returncode}, checkpoints {found}", flush=True)
        check_same(here, updates, wanted)
        print(f"round {number + 1}: the same to the bit after {kills} disturbances", flush=True)


def is_completed(folder: Path) -> bool:
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text())["status"] == "completed"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, help="instead of a number of kills")
    parser.add_argument("--processes", type=int, choices=(1, 2))
    parser.add_argument("--updates", type=int, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    until = time.monotonic() + 60 * (args.minutes or 0)
    enough = (lambda kills: time.monotonic() > until) if args.minutes else (lambda kills: kills >= args.kills)
    turns = [(p, u) for u in (1, 2) for p in (1, 2) if args.processes in (None, p) and args.updates in (None, u)]
    folder = Path(tempfile.mkdtemp(prefix="soak_"))  # it stays where something differs
    kills = soak(folder, turns, enough, random.Random(args.seed))
    shutil.rmtree(folder)
    print(f"{kills} disturbances: equal to the bit")


if __name__ == "__main__":
    main()
