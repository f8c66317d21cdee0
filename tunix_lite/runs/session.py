"""A run in its folder, from its opening to the record of its end."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax

from tunix_lite.basics.addresses import check_on_disk, shown_place
from tunix_lite.basics.errors import error_context
from tunix_lite.basics.plain_text import hide_users_of_urls
from tunix_lite.basics.types import TrainState
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.stopping import Stopping, StopRun
from tunix_lite.parallel.mesh import own_rows
from tunix_lite.planning.at_start import is_out_of_memory
from tunix_lite.runs.setup import Parts, prepare
from tunix_lite.settings.config import RunConfig, plain
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.task import Task
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.disk import disk_errors_explained
from tunix_lite.tracking.rundir import RunDir, Status


@dataclass
class Job:
    """The job that a run is part of. Example: `Job(began, "hydra.sweep.dir=outputs/sweep")` for a
    run of a sweep."""

    # time.time() when the job began: training.max_minutes counts from there; None: from the call
    began: float | None = None
    # the setting with which the same command goes on; None: hydra.run.dir of the run's folder
    resume_hint: str | None = None
    # components that this process has found already (setup.find_parts); None: not yet
    found: Parts | None = None
    # set by open_run: a sweep asks it why the run was stopped
    stopping: Stopping | None = None
    # set by open_run at its end: why the run ended before its last step, such as "SIGINT"
    stopped: str | None = None


@dataclass
class Session:
    """An open run: its settings, components, console and status. Example: `with open_run(run,
    folder) as session: session.console.say("hello")`."""

    run: RunConfig
    parts: Parts
    run_dir: RunDir
    console: Console
    status: Status
    stopping: Stopping
    # closes everything that the run has opened, in reverse order
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    # the state at the start, once it is loaded; in the end the last one
    state: TrainState | None = field(default=None, repr=False)
    # updates in a row before the start that were skipped, because a number was not finite
    skipped: int = 0

    @property
    def task(self) -> Task:
        """Returns the parts' task; in an open run its reward workers are running."""
        return self.parts.task

    @property
    def begins_here(self) -> bool:
        """Returns whether this folder has no checkpoint yet: the run begins afresh, or resumes from
        another run's folder."""
        return self.parts.resume_from != self.run_dir.checkpoints


@contextlib.contextmanager
def open_run(run: RunConfig, folder: Path, job: Job | None) -> Iterator[Session]:
    """Inside, the run is open; at the end status.json says how it ended, if its model was loaded.

    The caller sets `session.state`. A run that was asked to stop ends the `with` block early and
    without an error: its last state is in `session.state`, too. Raises ConfigError: for settings
    before anything is written, for memory and weights later; DiskError if the folder cannot be
    written any more; any other error as it is."""
    job = job or Job()
    began = job.began or time.time()
    # before anything is written or shown
    hide_users_of_urls(plain(run))

    # Checks: a mistake in the settings ends the run here. The lease of a bucket is the command's.
    with error_context(""):
        check_on_disk("folder", str(folder))
    run_dir = RunDir(folder, jax.process_index())
    parts = prepare(run, run_dir, job.found)
    # with the number of steps that its epochs have
    run = parts.resolved.run
    jax.set_mesh(parts.mesh)
    status = Status(run_dir)
    whole_steps = Checkpoints(run_dir.checkpoints).whole_steps
    explained = partial(disk_errors_explained, run_dir.path, status.progress, whole_steps)

    with explained(), contextlib.ExitStack() as at_end:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        # Of several processes one may end another from compiled code: its last words stay visible.
        # Only one process shows it, too.
        console = Console(
            run_dir.log,
            run.training.max_steps,
            run.training.log_interval_steps,
            quiet=not run_dir.is_first,
            mode=run.tracking.console,
            evaluates_every=run.evaluation.interval_steps,
            epochs=run.training.epochs,
        )
        at_end.push(closed_at_end(console.close))

        # Which run this is.
        if not parts.overwrites_other_run(run_dir):
            parts.write_fingerprint(run_dir)
        status.about = parts.metadata
        console.panel(*parts.summary(run_dir))
        if parts.failing:
            tried = f"tried on made-up completions before the run: {parts.failing}"
            console.say(f"warning: {tried}", style="yellow")

        # Its clock, and what may end it early.
        minutes = run.training.max_minutes
        passed = time.time() - began
        stopping = Stopping(minutes, console.say, passed, run.training.grace_seconds)
        job.stopping = stopping
        session = Session(run, parts, run_dir, console, status, stopping)

        # Inside, the run is made; then the status says how it ended.
        resume_hint = job.resume_hint or f"hydra.run.dir={shown_place(folder)}"
        with _status_at_the_end(session, resume_hint), explained(), session.closing:
            # Reward workers start while the model loads.
            here = (jax.process_index(), jax.process_count())
            rows = partial(own_rows, num_rows=parts.rows.num_rows)
            processes = Processes(*here, allgather_values, stopping, rows)
            workers = parts.task.with_workers(
                run.rewards, console.say, processes, run.conversation
            )
            # closed with the run, or their processes would stay
            task = session.closing.enter_context(workers)
            session.parts = replace(parts, task=task)
            yield session
        job.stopped = status.stopped


@contextlib.contextmanager
def _status_at_the_end(session: Session, resume_hint: str) -> Iterator[None]:
    """Records in status.json and on the console how the block ended. A stop is no error."""
    try:
        yield
    except StopRun as stop:
        session.state = stop.state
    except BaseException as error:
        # While a run is loading, status.json stays what an earlier start wrote.
        if not session.status.started:
            raise
        # a person who pressed Ctrl-C twice knows why it ended
        word = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        # The disk may be what failed: then the error under way says more than a second one.
        with contextlib.suppress(OSError):
            session.status.write(word, error=f"{type(error).__name__}: {error}")
            steps = Checkpoints(session.run_dir.checkpoints).whole_steps()
            saved = "no checkpoint was saved"
            if steps:
                saved = (
                    f"checkpoint {steps[-1]} is in {shown_place(session.run_dir.checkpoints)}"
                )
            session.console.say(
                f"{word} after step {session.status.steps}; {saved}", style="red"
            )
            if is_out_of_memory(error):
                session.console.say(
                    "out of memory: docs/howto/out_of_memory.md has what takes less, and "
                    "tunix-lite plan what fits",
                    style="yellow",
                )
        raise
    status = session.status
    status.write("stopped" if status.stopped else "completed")
    for text, style in status.closing_lines(resume_hint):
        session.console.say(text, style=style)


def closed_at_end(close: Callable[[], None]) -> Callable[..., None]:
    """Wraps `close` for ExitStack.push. Where an error is under way, an OSError of closing is added
    to it as a note; otherwise it is raised."""

    def leave(_: object, error: BaseException | None, __: object) -> None:
        try:
            close()
        except OSError as second:
            if error is None:
                raise
            error.add_note(f"and then {second}")

    return leave
