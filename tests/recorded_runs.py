"""Records what whole training runs leave, so that `make golden ARGS='--runs COMMIT'` can compare two states of the code.

    python tests/recorded_runs.py before.json        all runs, some 5 minutes on two cores
    python tests/recorded_runs.py sft.json sft dpo   some of them

Each run is a process of its own, started as a user starts it: `run_training.py` or the launcher. The script imports
nothing of the package, so that modules may move. Of each run the record holds the exit code, metrics.jsonl without what
depends on the clock or the machine, and SHA-256 digests of the arrays of the last checkpoint and of the files of samples.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 300  # seconds until a run must have ended
DEVICES = 4  # of all processes of a run together
STEPS = 6

BASE = (
    f"training.max_steps={STEPS}",
    "training.save_interval_steps=3",
    "training.prompts_per_step=4",
    "algorithm.num_generations=4",
    "generation.max_new_tokens=8",
    "evaluation.num_examples=8",
    "evaluation.num_samples=0",
    "evaluation.interval_steps=3",
    "tracking.samples_interval_steps=3",
    "optimizer.learning_rate=1e-3",
    "optimizer.schedule=linear",
    "rewards.timeout=120",  # a loaded machine must not turn a slow call into a failed one
    # Groups must disagree, or nothing would be learned.
    "+task.rewards.short={fn: {_target_: tunix_lite.rewards.text.brevity}, weight: 1.0}",
)
MESH_4X1 = "model.mesh_shape=[[4,1],[fsdp,tp]]"
MESH_2X2 = "model.mesh_shape=[[2,2],[fsdp,tp]]"
CONVERSATIONS = (
    *("experiment=guessing", f"training.max_steps={STEPS}", "training.prompts_per_step=4"),
    *("algorithm.num_generations=4", "generation.max_new_tokens=32", "evaluation.num_examples=8"),
    *("evaluation.num_samples=0", "evaluation.interval_steps=3", "tracking.samples_interval_steps=3"),
)
SFT = (*(setting for setting in BASE if not setting.startswith("algorithm.")), "generation.max_new_tokens=64")


@dataclass(frozen=True)
class Run:
    """One run to record."""

    settings: tuple[str, ...]
    processes: int = 1


RUNS = {
    "grpo_4x1": Run((*BASE, MESH_4X1)),
    "grpo_2x2": Run((*BASE, MESH_2X2)),
    "sft": Run((*SFT, "algorithm=sft", MESH_2X2)),
    "lora_nf4": Run((*BASE, "model.lora.rank=8", "model.lora.base=nf4", "algorithm.kl_coef=0.1", MESH_2X2)),
    "dpo": Run((*BASE, "algorithm=dpo", "algorithm.pairs=sampled", MESH_2X2)),
    "overlap_carry": Run((*BASE, "rollout.overlap=carry", MESH_2X2)),
    "conversations": Run((*CONVERSATIONS, MESH_2X2)),
    "packing_prefix": Run((*BASE, "training.packing=prefix", MESH_4X1)),
    "two_updates": Run((*BASE, "algorithm.updates_per_rollout=2", "training.save_interval_steps=2", MESH_2X2)),
    "overlap_one_step": Run((*BASE, "rollout.overlap=one_step", MESH_2X2)),
    "two_processes": Run((*BASE, MESH_2X2), processes=2),
}

FLAGS = "--xla_backend_optimization_level=0"  # compiling takes most of the time
if version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
ON_THE_CLOCK = ("time/", "perf/", "memory/")  # metrics
READING = threading.Lock()  # orbax reads one checkpoint at a time


def last_logged_step(folder: Path) -> int:
    """The last step that metrics.jsonl has in full; -1 if there is none."""
    file = folder / "metrics.jsonl"
    whole_lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(whole_lines[-1])["step"] if whole_lines else -1


# ---- starting runs


def environment(devices: int) -> dict[str, str]:
    """Of every process: nothing of the caller's settings of JAX, XLA or a cluster, and no compilation cache."""
    ours = ("JAX_", "XLA_", "TUNIX_LITE_", "SLURM_", "PYTHON", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "RECORDED_")
    others = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return others | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": FLAGS,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONHASHSEED": "0",
        "COLUMNS": "120",
        "LC_ALL": "C.UTF-8",
    }


def started(run: Run, folder: Path) -> subprocess.Popen:
    """A run in `folder`. What it prints is added to FOLDER.out and FOLDER.err."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "tunix_lite.launch", f"--nprocs={run.processes}"] if run.processes > 1 else []
    with open(f"{folder}.out", "ab") as out, open(f"{folder}.err", "ab") as err:
        return subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / "run_training.py"), *run.settings, f"hydra.run.dir={folder}"],
            env=environment(DEVICES // run.processes),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


# ---- reading what a run left


def metrics_of(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock or the machine."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in row.items() if not key.startswith(ON_THE_CLOCK)} for row in rows]


def checkpoint_of(folder: Path) -> dict:
    """Of the last checkpoint: its step, and a digest of each array that orbax wrote there, whatever mesh it was on."""
    os.environ.update(JAX_PLATFORMS="cpu")
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    steps = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
    if not steps:
        return {}
    place = folder / "checkpoints" / str(max(steps)) / "default"
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax looks here for a file of the folder above, and says so
    with READING:
        reader = ocp.PyTreeCheckpointer()
        shapes = reader.metadata(place).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        state = reader.restore(place, restore_args=as_numpy)
    arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}
    digests = {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in arrays.items()}
    return {"step": max(steps)} | {name: f"{x.dtype} {x.shape} {digests[name]}" for name, x in arrays.items()}


def recorded(run: Run, folder: Path) -> dict:
    """Makes the run and says what it left."""
    process = started(run, folder)
    try:
        code = process.wait(LIMIT)
    finally:
        process.kill()
    samples = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("samples/*"))}
    checkpoint = checkpoint_of(folder)
    return {"exit_codes": {"last": code}, "metrics": metrics_of(folder), "checkpoint": checkpoint, "samples": samples}


# ---- comparing


def different_metrics(one: list[dict], other: list[dict]) -> Iterator[str]:
    """Compared as text: a NaN equals a NaN."""
    if len(one) != len(other):
        yield f"metrics: {len(one)} lines, now {len(other)}"
    for before, after in zip(one, other, strict=False):
        for key in before | after:
            if json.dumps(before.get(key)) != json.dumps(after.get(key)):
                yield f"metrics of step {before['step']}: {key} {before.get(key)}, now {after.get(key)}"


def differences(one: dict, other: dict, parts: tuple[str, ...] = ("exit_codes", "checkpoint", "samples")) -> list[str]:
    """What differs between two records of one run."""
    lines = [
        f"{part}: {key} {one[part].get(key)}, now {other[part].get(key)}"
        for part in parts
        for key in one[part] | other[part]
        if one[part].get(key) != other[part].get(key)
    ]
    return [*lines, *different_metrics(one["metrics"], other["metrics"])]


# ---- the program


def record(out: Path, names: list[str]) -> str | None:
    """Makes the runs of these names, or all, two at a time, and writes what they left. Returns who failed."""
    names = names or list(RUNS)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        place = Path(temporary).resolve()
        records = pool.map(lambda name: recorded(RUNS[name], place / name / "run"), names)
        runs = dict(zip(names, records, strict=True))
    out.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")
    return "\n".join(f"{name} failed" for name, run in runs.items() if run["exit_codes"]["last"]) or None


def compare(before: Path, after: Path) -> int:
    """Prints what differs between two records of the same runs. 1 if anything does."""
    one, other = (json.loads(path.read_text()) for path in (before, after))
    lines = [f"{name}: {line}" for name in one for line in differences(one[name], other[name])]
    print("\n".join(lines) or f"{len(one)} runs are the same")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(record(Path(sys.argv[1]), sys.argv[2:]))
