"""A run that is killed again and again ends as if nothing had happened: `make soak`, an hour, or a few kills by hand.

    python tests/soak.py --kills 20 [--processes 2] [--updates 2] [--seed 0]
    python tests/soak.py --minutes 60

One run goes through undisturbed. Another, of the same settings, gets kill -9, SIGTERM or kill -9 of one process of its
launcher at random moments, in the middle of saving too, and is started again with the same command until it ends. Then
parameters and optimizer are the same to the bit, and metrics.jsonl has every step once and the same numbers.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
STEPS = 24
RUN = [
    *(f"training.max_steps={STEPS}", "training.prompts_per_step=4", "algorithm.num_generations=4"),
    *("generation.max_new_tokens=8", "evaluation.num_examples=8", "evaluation.interval_steps=4"),
    *("training.save_interval_steps=2", "optimizer.learning_rate=1e-3", "tracking.samples_interval_steps=4"),
    "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}",
]


def command(folder: Path, processes: int, updates: int) -> list[str]:
    launcher = ["-m", "tunix_lite.launch", f"--nprocs={processes}"] if processes > 1 else []
    settings = [*RUN, f"algorithm.updates_per_rollout={updates}", f"hydra.run.dir={folder}"]
    return [sys.executable, *launcher, str(ROOT / "run_training.py"), *settings]


def started(call: list[str], cache: Path) -> subprocess.Popen:
    """In a group of its own, so that it can be killed whole; programs are compiled once for all starts."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        call, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def disturbed(process: subprocess.Popen, after: float, how: str) -> str:
    """What became of it: `done`, or how it was ended after so many seconds."""
    try:
        process.communicate(timeout=after)
        return "done"
    except subprocess.TimeoutExpired:
        pass
    try:
        if how == "one":
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            os.kill(int(random.choice(children)) if children else process.pid, signal.SIGKILL)
        elif how == "term":
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return how


def kept(folder: Path) -> tuple[list[dict], dict[str, np.ndarray]]:
    """The metrics but for the clock's, and every array of the last checkpoint."""
    import jax
    import orbax.checkpoint as ocp

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))} for row in rows]
    last = max((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    assert last.name == str(STEPS), last
    reader = ocp.PyTreeCheckpointer()
    shapes = reader.metadata(last / "default").item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)  # whatever mesh wrote them
    state = reader.restore(last / "default", restore_args=as_numpy)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return rows, {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def check_same(folder: Path, wanted) -> None:
    (rows, arrays), (expected_rows, expected) = kept(folder), wanted
    assert [row["step"] for row in rows] == list(range(STEPS + 1)), [row["step"] for row in rows]
    assert rows == expected_rows, "metrics differ"
    assert arrays.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(arrays[name], values, err_msg=name)


def soak(folder: Path, processes: int, updates: int, enough, chance: random.Random) -> int:
    """Runs with faults until `enough(kills)`; every finished run is compared. Returns how often it was disturbed."""
    cache, kills, rounds = folder / "cache", 0, 0
    print("undisturbed ...", flush=True)
    began = time.monotonic()
    whole = started(command(folder / "whole", processes, updates), cache)
    out, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, out.decode()[-3000:]
    seconds, wanted = time.monotonic() - began, kept(folder / "whole")
    ways = ["group", "term", *(["one"] if processes > 1 else [])]
    while not enough(kills):
        here, rounds = folder / f"disturbed-{rounds}", rounds + 1
        while True:
            found = disturbed(
                process := started(command(here, processes, updates), cache),
                chance.uniform(2, max(6, 0.7 * seconds)) if not enough(kills) else 600,
                chance.choice(ways),
            )
            if found == "done":
                assert process.returncode == 0, f"exit code {process.returncode}, see {here}/train.log"
                if json.loads((here / "status.json").read_text())["status"] == "completed":
                    break
                continue
            kills += 1
            steps = sorted(int(p.name) for p in (here / "checkpoints").glob("[0-9]*") if p.name.isdecimal())
            print(f"{kills} {found}, exit {process.returncode}, checkpoints {steps}", flush=True)
        check_same(here, wanted)
        print(f"round {rounds}: the same to the bit after {kills} disturbances", flush=True)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, help="instead of a number of kills")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    until = time.monotonic() + 60 * (args.minutes or 0)
    enough = (lambda kills: time.monotonic() > until) if args.minutes else (lambda kills: kills >= args.kills)
    with tempfile.TemporaryDirectory() as folder:
        kills = soak(Path(folder), args.processes, args.updates, enough, random.Random(args.seed))
    print(f"{kills} disturbances, {args.processes} processes, {args.updates} updates a rollout: equal to the bit")


if __name__ == "__main__":
    main()
