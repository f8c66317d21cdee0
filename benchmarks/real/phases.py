"""The peak of memory in each phase of a run on a CPU, beside what `plan` predicts. Linux only.

    python benchmarks/real/phases.py train  [--json FILE] model.weights=FOLDER algorithm=sft ...
    python benchmarks/real/phases.py evaluate [--json FILE] model.weights=FOLDER task=gsm8k ...

One run of the settings, in this process, as `run_training.py` or `tunix-lite evaluate` does it. Between two phases the
kernel's high water mark of the resident size (VmHWM) is set to what is held then, so that each phase has a peak of its
own. Predicted is the plan of that run, as it wrote it at its start, or of an evaluation the plan of its rollouts.
Beside each peak stands what was held when it ended, and its parts: pages of files, the heap in use, arrays of jax,
machine code, and what glibc keeps of freed memory; and the same parts at the largest moment that a thread saw, which
looks ten times a second. All in GB (1e9 bytes).
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tunix_lite.distributed.host_memory import _Mallinfo2, keep_freed_memory

# as the commands of tunix_lite do
keep_freed_memory()

import jax

from tunix_lite import api
from tunix_lite.basics.types import Params
from tunix_lite.commands import evaluate as evaluation
from tunix_lite.inference.language_model import load
from tunix_lite.parallel.mesh import resolve_mesh_shape
from tunix_lite.planning.hardware import attached_machine
from tunix_lite.planning.plan import estimated
from tunix_lite.runs.experience import Experience, ExperienceSource, TaskExperience
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.session import Session
from tunix_lite.settings.resolved_run import find_model

GB = 1e9
# of an evaluation
EXAMPLES = 16
# (phase, peak and parts of what is held), as they come
SEEN: list[tuple[str, dict]] = []
# parts of what was held at the largest moment of this phase that a thread saw
LARGEST: dict[str, float] = {}
# the first line of a mapping in smaps, proc(5), and how much of it is resident
MAPPING = re.compile(r"^([0-9a-f]+-[0-9a-f]+ .*)\n(?:\w+:.*\n)*?Rss: +(\d+) kB", re.MULTILINE)


def held() -> dict[str, float]:
    """What the process holds now, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kib = {name: int(fields[name].split()[0]) * 1024 / GB for name in ("VmHWM", "VmRSS", "RssFile")}
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    report = libc.mallinfo2()
    arrays = {}
    for x in jax.live_arrays():
        # the thread that looks may meet one that is being freed
        with contextlib.suppress(RuntimeError):
            arrays[x.unsafe_buffer_pointer()] = x.nbytes
    heap = (report.number_8 + report.number_5) / GB
    # Compiled programs lie in executable memory that is of no file.
    code = 0
    for name, entry in MAPPING.findall(Path("/proc/self/smaps").read_text()):
        if name.split()[1][2] == "x" and name.split()[4] == "0":
            code += int(entry) * 1024 / GB
    return {
        "peak": kib["VmHWM"],
        "held": kib["VmRSS"],
        "files": kib["RssFile"],
        "heap": heap,
        "arrays": sum(arrays.values()) / GB,
        "code": code,
        "freed": kib["VmRSS"] - kib["RssFile"] - heap - code,
    }


def look() -> None:
    """Keeps the parts of the largest moment of a phase."""
    while True:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if pages * 4096 / GB > LARGEST.get("held", 0) + 0.01:
            LARGEST.update(held())
        time.sleep(0.1)


def ended(phase: str) -> None:
    """The peak of the phase that ends here, and the next one begins."""
    SEEN.append((phase, {name: round(size, 3) for name, size in held().items()}))
    print(phase, SEEN[-1][1], file=sys.stderr, flush=True)
    largest = {name: round(size, 3) for name, size in LARGEST.items() if name != "peak"}
    print(f"{phase}, at its largest", largest, file=sys.stderr, flush=True)
    SEEN[-1][1]["largest"] = largest
    LARGEST.clear()
    Path("/proc/self/clear_refs").write_text("5")


class Source(TaskExperience):
    """Experience of the task, with the ends of its phases."""

    def compile_ahead(self, state: api.TrainState) -> None:
        super().compile_ahead(state)
        ended("compile")

    def take(self, step: int, params: Params) -> Experience:
        ended("before the step")
        taken = super().take(step, params)
        ended("rollout")
        return taken


def source_of(session: Session, learner: Learner) -> ExperienceSource:
    ended("load")
    return Source(session, learner)


def step_done(done: api.StepDone) -> dict:
    ended("update")
    return {}


def train(overrides: list[str]) -> dict[str, float]:
    """Runs the training. Returns what was predicted, by phase."""
    quiet = ["training.max_steps=2", "training.save_interval_steps=0", "evaluation.num_examples=0"]
    run = api.compose([*quiet, "tracking.console=quiet", *overrides])
    tracking = replace(run.tracking, observers={"phases": step_done})
    with tempfile.TemporaryDirectory() as folder:
        api.train(replace(run, tracking=tracking), Path(folder) / "run", make_source=source_of)
        plan = json.loads((Path(folder) / "run/plan.json").read_text())["plans"][0]
    print(json.dumps({name: plan[name] for name in ("resident_bytes", "phases")}), file=sys.stderr)
    stays = sum(plan["resident_bytes"].values())
    predicted = {p["name"]: (stays + sum(p["adds"].values())) / GB for p in plan["phases"]}
    return {"load": plan["resume_peak_bytes"] / GB} | predicted


def evaluate(overrides: list[str]) -> dict[str, float]:
    """Evaluates a model. Returns what was predicted, by phase."""
    run = api.compose(overrides)
    options = evaluation.EvaluateTaskConfig(num_examples=EXAMPLES)
    # as the command does; it reads the tokenizer, too
    evaluation._check_models(run, options)

    def opener():
        model = load(run.model.weights)
        ended("load")
        return model

    evaluation._score(run, options, opener, "model")
    ended("evaluate")
    # A run whose only rollouts are of this evaluation, with the slots that it takes on a CPU.
    few = ["algorithm=sft", f"evaluation.num_examples={EXAMPLES}", "rollout.num_slots=16"]
    run = api.compose([*overrides, *few])
    sizes = resolve_mesh_shape(run.model.mesh_shape, 1)
    plan = estimated(run, attached_machine(), *find_model(run.model), sizes)
    loaded = sum(plan.resident[name] for name in ("parameters", "process"))
    return {"load": loaded / GB, "evaluate": plan.evaluation_bytes / GB}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "evaluate"])
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    threading.Thread(target=look, daemon=True).start()
    ended("import")
    predicted = {"train": train, "evaluate": evaluate}[args.what](overrides)
    rows = []
    for phase in dict.fromkeys(name for name, _ in SEEN):
        peaks = [parts["peak"] for name, parts in SEEN if name == phase]
        of_plan = predicted.get(phase)
        rows.append((phase, max(peaks), of_plan, of_plan and of_plan / max(peaks)))
        print(f"{phase:16} {rows[-1][1]:6.2f} " + (f"{of_plan:6.2f} {rows[-1][3]:5.2f}" if of_plan else ""))
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv[1:], "rows": rows, "seen": SEEN}, indent=1))


if __name__ == "__main__":
    main()
