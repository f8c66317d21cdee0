"""A step of a run once more, from the files of the run: the same data, completions and update.

The newest checkpoint before the step is restored, and the steps up to it are made again: data and
random numbers are functions of seed and step. Nothing is written.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.config import RunConfig
from tunix_lite.distributed.stopping import Stopping
from tunix_lite.errors import error_context
from tunix_lite.learner.optim import learning_rate_at, num_updates
from tunix_lite.report.evidence import read_sample_file
from tunix_lite.runs.experience import FreshExperience
from tunix_lite.runs.learner import build_learner
from tunix_lite.runs.reference import find_reference
from tunix_lite.runs.samples import advantage_metrics, advantages_of, sample_rows
from tunix_lite.runs.session import Session
from tunix_lite.runs.setup import Parts, check_resumed, download_models, find_parts
from tunix_lite.tracking.console import OUR_PARTS, Console
from tunix_lite.tracking.rows import is_number, rows_until
from tunix_lite.tracking.rundir import RunDir, Status, read_status

# parts of metrics' names that say how long something took, or where: no step repeats them
OF_THE_MACHINE = ("time", "perf", "memory", "eval")
# and metrics that count from the first step of a run on
COUNTED = ("train/num_tokens",)
# seconds without a line while steps are made again
QUIET = 10.0


@dataclass(frozen=True)
class Replayed:
    """A step that was made again, and what the run logged of it.

    Example: `replay_step(run, Path("outputs/latest"), 12, print).metrics["train/loss"]`.
    """

    step: int
    # the step of the checkpoint that it began from; 0: the weights that the run began with
    began: int
    metrics: dict[str, float]
    # of metrics.jsonl; {} if the step has no line
    logged: dict[str, float]
    # as a file of samples/ has them; None: nothing was sampled
    samples: list[dict] | None
    # the file of the step; None: the run wrote none
    logged_samples: list[dict] | None


def replay_step(
    run: RunConfig, folder: Path, step: int, say: Callable[[str], None]
) -> Replayed:
    """Makes step number `step` (from 1) of the run in `folder` again.

    run: the settings of the run, on the mesh of this machine. say: prints a line about what takes
    long. Raises ConfigError.
    """
    run_dir = RunDir(folder)
    last = run.training.max_steps
    with error_context("step"):
        if step > last:
            raise ValueError(
                f"{step}: this run has {last} steps; give step={last} or an earlier one"
            )
        check_reached(run_dir, step)
        began = nearest_before(run_dir, step, run.algorithm.updates_per_rollout)
    parts = download_models(find_parts(run))
    differs = check_resumed(parts, run_dir)
    with error_context("replay"):
        reference = find_reference(run, parts.model, run_dir, run_dir.checkpoints)
    parts = replace(parts, reference=reference, differs=differs)
    if began:
        parts = replace(parts, resume_from=run_dir.checkpoints, resume_step=began)

    # What is made again, from where.
    origin = f"checkpoint {began}" if began else "the weights that the run began with"
    count = "1 step" if step - began == 1 else f"{step - began} steps"
    rows = [row for _, _, row in rows_until(run_dir.metrics, step) if row["step"] > began]
    seconds = [row["time/step"] for row in rows if is_number(row.get("time/step"))]
    took = f", which took the run {sum(seconds):.0f} s" if seconds else ""
    say(f"from {origin}: {count} to make{took}")
    if parts.differs:
        say(f"not as in the run: {parts.differs}")
    with open_replay(parts, run_dir) as session:
        learner = build_learner(session)
        source_of = FreshExperience(session, learner)
        state = learner.state
        said_at = time.monotonic()
        for number in range(began, step):
            if number > began and time.monotonic() - said_at > QUIET:
                said_at = time.monotonic()
                say(f"step {number} is made again, {step - number} to make")
            experience = source_of.take(number, learner.policy_params(state))
            made = num_updates(state.opt_state)
            updated = learner.train_step(state, learner.frozen, experience.rows)
            state, learned = jax.block_until_ready(updated)
    resolved = learner.resolved
    rate = learning_rate_at(resolved.optimizer, resolved.run.training.max_steps, made)
    metrics = {name: float(value) for name, value in learned.items()}
    metrics |= {name: float(x) for name, x in experience.metrics.items()}
    metrics["train/learning_rate"] = rate
    if experience.metrics:
        metrics |= advantage_metrics(experience.batch)
    graded = experience.graded
    # The line of metrics.jsonl, if there is one.
    logged = next((row for row in rows if row["step"] == step), {})
    return Replayed(
        step,
        began,
        {name: x for name, x in metrics.items() if _is_repeated(name)},
        {name: x for name, x in logged.items() if _is_repeated(name) and is_number(x)},
        None
        if graded is None
        else sample_rows(graded, advantages_of(graded, experience.batch)),
        read_sample_file(folder, step),
    )


# ---- where it begins


def check_reached(run_dir: RunDir, step: int) -> None:
    """Raises ValueError for a step after the one in which the run ended, or is now."""
    # without the file nothing is known of where the run ended
    if not run_dir.metrics.is_file():
        return
    steps = [row["step"] for _, _, row in rows_until(run_dir.metrics, step)]
    reached = max([0, *steps, *Checkpoints(run_dir.checkpoints).steps()])
    if step > reached + 1:
        raise ValueError(
            f"{step}: this run has made {reached} steps; give step={reached} or an earlier one, or "
            f"step={reached + 1}, in which it ended"
        )


def nearest_before(run_dir: RunDir, step: int, updates: int = 1) -> int:
    """The newest checkpoint that a step can be reached from; 0: the run's beginning. updates: of a
    rollout: a run goes on only between two rollouts. Raises ValueError."""
    if step < 1:
        raise ValueError(f"{step}: the first step of a run is 1")
    steps = Checkpoints(run_dir.checkpoints).steps()
    before = [number for number in steps if number < step and number % updates == 0]
    if before:
        return max(before)
    _, _, began, _ = read_status(run_dir.status)
    if not began:
        return 0
    can = f"{min(steps) + 1} and later" if steps else "none"
    raise ValueError(
        f"{step}: this run began from step {began} of another, and {run_dir.checkpoints} holds "
        f"nothing before step {step}; steps that can be replayed: {can}"
    )


@contextlib.contextmanager
def open_replay(parts: Parts, run_dir: RunDir) -> Iterator[Session]:
    """A session that writes nothing into the folder of the run."""
    run = parts.resolved.run
    jax.set_mesh(parts.mesh)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as closing:
        console = Console(Path(scratch) / "replay.log", run.training.max_steps, quiet=True)
        closing.callback(console.close)
        stopping = Stopping(None, console.say)
        session = Session(run, parts, run_dir, console, Status(run_dir), stopping, closing)
        workers = parts.task.with_workers(
            run.rewards, console.say, conversation=run.conversation
        )
        session.task = closing.enter_context(workers)
        yield session


# ---- what the run logged


def _is_repeated(name: str) -> bool:
    part = name.partition("/")[0]
    return name not in COUNTED and part in OUR_PARTS and part not in OF_THE_MACHINE
