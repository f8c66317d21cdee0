"""A run that ends before its last step: the files that it saves, and its messages."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax

from tunix_lite.basics.errors import SamplerFault, is_of_a_peer
from tunix_lite.basics.types import Metrics, TrainState
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.stopping import StopRun
from tunix_lite.runs.session import Session
from tunix_lite.settings.config import RunConfig
from tunix_lite.tasks.processes import SharedError
from tunix_lite.tracking.disk import trouble
from tunix_lite.tracking.rows import is_number, read_rows
from tunix_lite.tracking.rundir import RunDir


@dataclass
class Unfinished:
    """A run that has not ended yet: how to keep its last whole step. Example: `with
    unfinished.kept(): ...` saves the state if a signal ends the block."""

    session: Session
    state: Callable[[], TrainState]
    save: Callable[[], None]  # the state as it is now, in the background
    wait: Callable[[], None]  # until what was saved is on disk
    on_disk: int  # the step whose state a checkpoint holds, or that the run began with
    # calls that give trackers the rest of the last whole step
    pending: list[Callable[[], None]] = field(default_factory=list)

    def log_pending(self) -> None:
        """Gives trackers the rest of the last whole step."""
        while self.pending:
            self.pending.pop()()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, an end before the last step leaves a checkpoint of the last whole one, if nothing
        has changed since. StopRun is raised again with the state and the reason attached; any other
        error is raised as it is. Nothing is saved after an error of the devices or of the disk,
        where saving may hang or fail, nor after one that other processes may not know of."""
        session = self.session
        try:
            yield
        except StopRun as stop:
            self.log_pending()
            stop.state = self.state()
            session.status.stopped = session.stopping.reason()
            self._save_new()
            raise
        except Exception as error:
            # A failed update may have destroyed the state that it was given. A state inside a
            # rollout cannot be resumed.
            state = self.state()
            is_there = not any(x.is_deleted() for x in jax.tree.leaves(state))
            updates = session.run.algorithm.updates_per_rollout
            may_save = is_there and int(state.step) % updates == 0
            is_shared = any(isinstance(one, SharedError) for one in _behind(error))
            may_save &= jax.process_count() == 1 or is_shared
            # Where devices, memory, the disk or another process failed, saving may hang; and a
            # state that is not finite, or of a wrong sampler, is not worth it.
            kinds = (
                jax.errors.JaxRuntimeError,
                MemoryError,
                FloatingPointError,
                SamplerFault,
            )
            may_save &= trouble(error, session.run_dir.path) is None
            may_save &= not any(
                isinstance(one, kinds) or is_of_a_peer(one) for one in _behind(error)
            )
            if may_save:
                try:
                    self.log_pending()
                    self._save_new()
                except Exception as second:
                    step = session.status.steps
                    text = f"the state of step {step} could not be saved: {second}"
                    error.add_note(f"and {text}")
                    session.console.say(text)
            raise

    def _save_new(self) -> None:
        if int(self.state().step) != self.on_disk:
            self.save()
        self.wait()


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def unmeasured(run: RunConfig, run_dir: RunDir, start: int) -> dict | None:
    """The metrics of step `start` in metrics.jsonl, if the evaluation that is due there was ended;
    else None. The same on all processes, which must all come here."""
    evaluation = run.evaluation
    due = is_due(start, evaluation.interval_steps, run.training.max_steps)
    row = None
    names = []
    if run.loss_examples:
        names.append("eval/loss")
    if evaluation.num_examples:
        names.append("eval/accuracy")
    if start and names and due:
        rows = (row for _, _, row in read_rows(run_dir.metrics) if row is not None)
        row = next((row for row in rows if row["step"] == start), None)
    # the first process writes the file, and others may not see it
    row = allgather_values(row)[0]
    if row is None or row.keys() >= {*names}:
        return None
    return {
        name: math.nan if value is None else value
        for name, value in row.items()
        if name != "step" and (value is None or is_number(value))
    }


def is_due(step: int, every: int, last: int) -> bool:
    """Returns whether work that is done every `every` steps, and after the last, is due now."""
    return step == last or bool(every and step % every == 0)


# ---- messages


def loss_numbers(metrics: Metrics) -> str:
    return ", ".join(f"{name} {metrics[name]}" for name in ("train/loss", "train/grad_norm"))


def diverged(
    step: int, skipped: int, checkpoints: Path, metrics: Metrics | None = None
) -> str:
    """Says why a run gives up, and how to go on."""
    seen = f"{loss_numbers(metrics)}; " if metrics else ""
    updates = "this update was" if skipped == 1 else f"{skipped} updates in a row were"
    return (
        f"step {step}: {seen}{updates} not finite. None was made: checkpoint {step} in "
        f"{checkpoints} has the weights before. A learning rate that is too high is the usual "
        "cause; a reward or a loss of your own that divides by 0 is another. "
        "resume.force=true goes on from the newest checkpoint with other settings, a higher "
        "training.max_skipped_in_a_row with the same ones"
    )
