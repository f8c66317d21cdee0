"""Checkpoints of the TrainState with orbax: saved in the background, kept whole, restored onto any mesh."""

import contextlib
import errno
import functools
import logging
import os
import re
import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from tunix_lite.types import Params, TrainState


def _accuracy(metrics: dict) -> float:
    return metrics["accuracy"]


class Checkpoints:
    """The checkpoints of one run, `checkpoints/<step>/`: the newest `keep`, and the `keep_best` that did best."""

    def __init__(self, folder: str | Path, keep: int = 2, keep_best: int = 0):
        self.folder = Path(folder).absolute()
        self._keep, self._keep_best = keep, keep_best
        self._opened = None
        self._parent = _identity(self.folder.parent) if self.folder.parent.is_dir() else None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            policies = ocp.checkpoint_managers
            best = policies.BestN(get_metric_fn=_accuracy, n=self._keep_best, keep_checkpoints_without_metrics=False)
            options = ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(self._keep), best]),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,  # of a run that was killed while it saved
            )
            _say_it_once()
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order. Makes no folder."""
        return sorted(self._manager.all_steps()) if self.folder.is_dir() else []

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint, or None. Makes no folder."""
        return self._manager.latest_step() if self.folder.is_dir() else None

    def listed(self) -> list[int]:
        """The steps of all whole checkpoints, in order, as the folder shows them: for when the disk is in trouble.

        It neither clears away what was cut short nor waits for another process. Raises OSError.
        """
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())  # a half one has a longer name

    def save(self, state: TrainState, accuracy: float | None = None) -> None:
        """Copies the state off the devices and writes it in the background; the state may be donated afterwards.

        accuracy: held-out, of this very state, if it was measured. Raises OSError, of the save before it, too.
        """
        metrics = None if accuracy is None else {"accuracy": accuracy}
        self.folder.mkdir(exist_ok=True)
        with self._as_os_error():
            saved = self._manager.save(int(state.step), args=ocp.args.StandardSave(state), metrics=metrics)
        assert saved, f"orbax skipped step {int(state.step)}: {self.folder} holds a later one"

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, with the shapes and shardings of `like`.

        Raises ValueError if there is none, or if it holds something else than `like`.
        """
        step = self.latest_step()
        if step is None:
            raise ValueError(f"{self.folder} holds no checkpoint")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def restore_params(self, like: Params, step: int | None = None) -> tuple[int, Params]:
        """(step, params) of a checkpoint, the newest if `step` is None, without the optimizer's state.

        `like` are ShapeDtypeStructs that say shapes and places. Raises ValueError if there is no such checkpoint, or
        if it holds something else.
        """
        steps = self.steps()
        if not steps or step not in (None, *steps):
            there = f"; there is {', '.join(map(str, steps))}" if steps else ""
            raise ValueError(f"{self.folder} holds no checkpoint{'' if step is None else f' of step {step}'}{there}")
        step = max(steps) if step is None else step
        wanted = {"params": like}
        restore = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape), wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore, partial_restore=True)
        with ocp.CheckpointManager(self.folder, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
            try:
                return step, manager.restore(step, args=args)["params"]
            except (ValueError, TypeError, KeyError) as error:
                first_line = str(error).strip().splitlines()[0][:300]
                raise ValueError(f"{self.folder} does not hold weights of this model: {first_line}") from error

    def check(self) -> None:
        """Raises OSError if the folder is gone or the last save has failed by now. Does not wait."""
        self._check_there()
        if self._opened is not None and not self._opened.is_saving_in_progress():
            # Not check_for_errors: it takes the error from the thread that, hearing of none, deletes old checkpoints.
            self.wait()

    def _check_there(self) -> None:
        """Raises OSError if the folder of the run is gone, or is another one."""
        if _identity(self.folder.parent) != self._parent:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder.parent))

    @contextlib.contextmanager
    def _as_os_error(self):
        """Raises what went wrong with the disk as the OSError it was; of tensorstore's it is in the text only."""
        try:
            yield
        except Exception as error:
            try:
                self._check_there()
            except OSError as gone:
                raise gone from error
            said = re.search(r"os_error_code='(\d+)'", str(error))
            if isinstance(error, OSError) or not said:
                raise
            number = int(said[1])
            raise OSError(number, os.strerror(number), str(self.folder)) from error

    def wait(self) -> None:
        """Until everything is on disk. Raises OSError if that cannot be."""
        with self._as_os_error():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is on disk. Raises OSError if that cannot be."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with self._as_os_error():
                try:
                    opened.wait_until_finished()
                finally:
                    opened.close()


# ---- small print


def _identity(folder: Path) -> tuple[int, int]:
    """Tells a folder from one made in its place: orbax makes what it misses, even where nothing is mounted now."""
    stat = folder.stat()
    return stat.st_dev, stat.st_ino


@functools.cache
def _say_it_once() -> None:
    """Leaves a save that fails to its exception. Else its threads fill the screen, pages for every array."""
    for name in ("absl", "asyncio"):  # where orbax logs, and where its tasks do that nobody waits for any more
        logging.getLogger(name).addFilter(_is_news)
    show = sys.unraisablehook

    def show_news(what) -> None:
        trace = what.exc_traceback
        # tensorstore tells each of those tasks that it is done, and prints that its event loop is closed
        if trace is None or trace.tb_frame.f_code.co_name != "call_soon_threadsafe":
            show(what)

    sys.unraisablehook = show_news


def _is_news(record: logging.LogRecord) -> bool:
    is_of_orbax = "orbax" in record.pathname or "orbax" in record.getMessage()
    return record.levelno < logging.ERROR or not is_of_orbax
