"""Checkpoints of the TrainState with orbax: saved in the background, kept whole, restored onto any
mesh."""

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.errors import is_of_a_peer
from tunix_lite.files import digests
from tunix_lite.files.untrusted import check_only_files, read_object
from tunix_lite.plain_text import shown
from tunix_lite.types import Params, TrainState


def _accuracy(metrics: dict) -> float:
    return metrics["accuracy"]


# arrays in a message
SHOWN = 4
# kept in ABOUT
SKIPPED = "skipped_in_a_row"
# in the folder of a checkpoint
ABOUT = "about.json"
# orbax writes these when all else is there: nothing of ours
LATER = {
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
}
# read from disk at a time, by a process: what a host holds of a checkpoint beside what its devices
# hold
HOST_GB = 4
# a save may take: all processes wait for the first, which makes the digests of all files
SAVE_SECONDS = 3600


class Checkpoints:
    """The checkpoints of one run, `checkpoints/<step>/`: the newest `keep`, and the `keep_best`
    that did best.

    Looking at them changes nothing, whoever else is writing there; saving clears away what was cut
    short.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        keep_best: int = 0,
        when_whole: Callable[[], None] | None = None,
    ):
        """when_whole: called once, when the first save is on disk."""
        self.folder = Path(folder).absolute()
        self._keep, self._keep_best = keep, keep_best
        self._opened, self._when_whole, self._is_saved = None, when_whole, False
        # what will stand in ABOUT of the step that is being saved
        self._saving: dict = {}
        self._parent = _identity(self.folder.parent) if self.folder.parent.is_dir() else None
        self._own = _identity(self.folder) if self.folder.is_dir() else None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """What saves. Only for the run that has claimed the folder: it deletes what seems
        unfinished."""
        if self._opened is None:
            policies = ocp.checkpoint_managers
            best = policies.BestN(
                get_metric_fn=_accuracy, n=self._keep_best, keep_checkpoints_without_metrics=False
            )
            options = ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [policies.LatestN(self._keep), best]
                ),
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(
                    timeout_secs=SAVE_SECONDS,
                    post_finalization_callback=self._before_it_gets_its_name,
                ),
                # of a run that was killed while it saved
                cleanup_tmp_directories=True,
            )
            _say_it_once()
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened

    def _before_it_gets_its_name(self) -> None:
        """Of the first process, in the background: all files of the step are written, but not yet
        called checkpoint.

        What orbax wrote into folders that it made in the place of deleted ones never gets the name.
        Raises OSError.
        """
        self._check_there()
        for half in self.folder.glob(f"{self._saving['step']}.*tmp*"):
            (half / ABOUT).write_text(json.dumps(self._saving) + "\n")
            digests.write_digests(half, LATER)

    @contextlib.contextmanager
    def _reading(self, handler: ocp.CheckpointHandler):
        """What reads: a manager that clears nothing away."""
        _say_it_once()
        options = ocp.CheckpointManagerOptions(create=False)
        with ocp.CheckpointManager(self.folder, options=options, item_handlers=handler) as manager:
            yield manager

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order, as the folder shows them. Makes no folder. Raises
        OSError."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        # a half one has a longer name
        return sorted(int(name) for name in names if is_step(name))

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None. Makes no folder. Raises OSError."""
        return max(self.steps(), default=None)

    def whole_steps(self) -> list[int]:
        """The steps whose files are all there now, with the sizes that they had. Reads none of
        them. Raises OSError."""
        return [step for step in self.steps() if not self._missing(step)]

    def _missing(self, step: int) -> str | None:
        """What a checkpoint lacks, in words; by its digests where it has them. None: nothing is
        missing."""
        folder = self.folder / str(step)
        if not folder.is_dir():
            return "it is a file and not a folder"
        if not any(folder.iterdir()):
            return "its folder is empty"
        # damaged digests: whoever reads the checkpoint says so
        with contextlib.suppress(ValueError):
            for name, (size, _) in (digests.read_digests(folder) or {}).items():
                if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                    return f"{name} is not as it was written"
        for name in ("default/_METADATA", "default/manifest.ocdbt"):
            if not (folder / name).is_file():
                return f"{name} is gone"
        return None

    def check_whole(self, step: int) -> None:
        """Raises ValueError, with the remedy, for what is called a checkpoint and cannot be one.
        Reads no array."""
        if missing := self._missing(step):
            raise ValueError(self._damaged(step, missing))

    def has_digests(self, step: int) -> bool:
        """Whether reading this step notices every change of its files: earlier versions kept
        none."""
        return (self.folder / str(step) / digests.NAME).is_file()

    def _verify(self, step: int) -> None:
        """Compares all files of a step with their digests; several processes share the work, and
        all hear of it.

        A checkpoint without digests has nothing to compare with. Raises ValueError, naming step,
        file and remedy.
        """
        folder, found = self.folder / str(step), []
        try:
            check_only_files(folder)
            kept = digests.read_digests(folder) or {}
            by_size = sorted(kept, key=lambda name: kept[name][0])
            found = digests.changed_files(
                folder, kept, by_size[jax.process_index() :: jax.process_count()]
            )
        except ValueError as error:
            found = [str(error)]
        if found := [what for theirs in allgather_values(found) for what in theirs]:
            more = f", and {len(found) - 1} more files" if len(found) > 1 else ""
            raise ValueError(self._damaged(step, found[0] + more))

    def save(self, state: TrainState, accuracy: float | None = None, skipped: int = 0) -> None:
        """Copies the state off the devices and writes it in the background; the state may be
        donated afterwards.

        accuracy: held-out, of this very state, if it was measured. skipped: how many updates in a
        row were not made until now. Raises OSError, of the save before it, too.
        """
        step = int(state.step)
        metrics = None if accuracy is None else {"accuracy": accuracy}
        if self._own is None:
            self.folder.mkdir(exist_ok=True)
            self._own = _identity(self.folder)
        with self._as_os_error():
            # which is what reads _saving
            self._manager.wait_until_finished()
            self._check_there()
            self._saving = {"step": step, SKIPPED: skipped}
            saved = self._manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics)
        assert saved, f"orbax skipped step {step}: {self.folder} holds a later one"
        self._is_saved = True

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, with the shapes and shardings of `like`: arrays, or
        ShapeDtypeStructs with shardings.

        Every array is made once, where it stays; delete what stands there now before you call. All
        files are compared with their digests first. Raises ValueError if there is no checkpoint, if
        it cannot be read or has changed since it was written, or if it holds something else than
        `like`.
        """
        step = self.latest_step()
        if step is None:
            raise ValueError(f"{self.folder} holds no checkpoint")
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=_host_gb(abstract))
        return self._read(step, handler, ocp.args.StandardRestore(abstract), abstract)

    def skipped_in_a_row(self, step: int) -> int:
        """How many updates were not made, one after the other, up to this step. Raises
        ValueError."""
        file = self.folder / str(step) / ABOUT
        try:
            if os.path.lexists(file):
                return _count(read_object(file).get(SKIPPED))
            with self._reading(
                ocp.StandardCheckpointHandler()
            ) as manager:  # where earlier versions kept it
                return _count((manager.metadata(step).custom_metadata or {}).get(SKIPPED, 0))
        except Exception as error:
            # orbax raises what it likes
            raise ValueError(self._damaged(step, _reason(error))) from error

    def restore_params(self, like: Params, step: int | None = None) -> tuple[int, Params]:
        """(step, params) of a checkpoint, the newest if `step` is None, without the optimizer's
        state.

        `like` are ShapeDtypeStructs that say shapes and places. Which file holds which array only
        orbax knows, so all files are compared with their digests. Raises ValueError if there is no
        such checkpoint, if it cannot be read or has changed since it was written, or if it holds
        something else.
        """
        steps = self.steps()
        if not steps or step not in (None, *steps):
            there = f"; there is {', '.join(map(str, steps))}" if steps else ""
            raise ValueError(
                f"{self.folder} holds no "
                f"checkpoint{'' if step is None else f' of step {step}'}{there}"
            )
        step = max(steps) if step is None else step
        wanted = {"params": like}
        restore = jax.tree.map(
            lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape), wanted
        )
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore, partial_restore=True)
        handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_host_gb(wanted))
        return step, self._read(step, handler, args, wanted, whole=False)["params"]

    def _read(self, step: int, handler: ocp.CheckpointHandler, args, wanted, whole: bool = True):
        """What `args` ask for of this step. Raises ValueError; `wanted`: what it should hold,
        `whole`: and no more."""
        self._verify(step)
        try:
            with self._reading(handler) as manager:
                return manager.restore(step, args=args)
        except (jax.errors.JaxRuntimeError, MemoryError):
            # says nothing of the files
            raise
        except Exception as error:
            # orbax raises what it likes
            if is_of_a_peer(error):
                raise
            raise ValueError(self._why_not(step, wanted, whole, error)) from error

    def _why_not(self, step: int, wanted, whole: bool, error: Exception) -> str:
        """Why a step could not be restored: it holds something else, as its own description says,
        or it is damaged."""
        try:
            tree = ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / "default").tree
            here, there = _shapes(wanted), _shapes(tree)
        except Exception as unreadable:
            error = unreadable
        else:
            there = there if whole else {name: there[name] for name in here if name in there}
            if other := [name for name in {**here, **there} if here.get(name) != there.get(name)]:
                listed = "; ".join(
                    f"{name}: {here.get(name)!r} here, {there.get(name)!r} there"
                    for name in other[:SHOWN]
                )
                more = f"; and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
                return (
                    f"step {step} of {self.folder} does not fit this model or optimizer: "
                    f"{listed}{more}"
                )
        return self._damaged(step, _reason(error))

    def _damaged(self, step: int, why: str) -> str:
        """That a step cannot be used and why, and what to remove: the checkpoint before it is then
        the newest."""
        earlier = [s for s in self.steps() if s < step]
        then = (
            f"to go on from step {earlier[-1]}"
            if earlier
            else "to begin anew: there is no earlier one"
        )
        return f"step {step} cannot be read ({why}); remove {self.folder / str(step)} {then}"

    def check(self) -> None:
        """Raises OSError if the folder is gone or the last save has failed by now. Does not
        wait."""
        self._check_there()
        if self._opened is not None and not self._opened.is_saving_in_progress():
            # Not check_for_errors: it takes the error from the thread that, hearing of none,
            # deletes old checkpoints.
            self.wait()

    def _check_there(self) -> None:
        """Raises OSError if the folder of the run, or that of its checkpoints, is gone or is
        another one."""
        for folder, known in ((self.folder.parent, self._parent), (self.folder, self._own)):
            if known is not None and _identity(folder) != known:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))

    @contextlib.contextmanager
    def _as_os_error(self):
        """Raises what went wrong with the disk as the OSError it was; of tensorstore's it is in the
        text only."""
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
        if self._opened is not None:
            with self._as_os_error():
                self._opened.wait_until_finished()
            self._say_whole()

    def _say_whole(self) -> None:
        if self._is_saved and self._when_whole is not None:
            say, self._when_whole = self._when_whole, None
            say()

    def close(self) -> None:
        """Waits until everything is on disk. Raises OSError if that cannot be."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with self._as_os_error():
                try:
                    opened.wait_until_finished()
                finally:
                    opened.close()
            self._say_whole()


# ---- small print


def is_step(name: str) -> bool:
    """Whether this is how the folder of a checkpoint is called: 0, 7, 60; not 007, and no digits
    but 0 to 9."""
    return name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0")


def _host_gb(wanted) -> int:
    """What may be read at a time: HOST_GB, and where one array is larger, it; twice, as saved parts
    are read whole."""
    largest = max(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(wanted))
    return max(HOST_GB, 1 + math.ceil(2 * largest / 1e9))


def _reason(error: BaseException) -> str:
    """One line of what is at the bottom of an error, without the details of tensorstore."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = re.split(r" \[(?:tensorstore_spec|source locations)", str(error).strip())[
        0
    ].splitlines()
    return lines[0][:300] if lines else repr(error)


def _shapes(tree) -> dict[str, tuple | str]:
    """The shape of every array by its path, `params/layers/w`; whether lists or tuples hold them is
    the same."""

    def is_empty(x) -> bool:
        return x is None or (isinstance(x, (tuple, list, dict)) and not x)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): "nothing"
        if is_empty(x)
        else tuple(x.shape)
        for path, x in leaves
    }


def _count(value) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{SKIPPED} is {shown(value)}, and not a count")
    return value


def _identity(folder: Path) -> tuple[int, int]:
    """Tells a folder from one made in its place: orbax makes what it misses, even where nothing is
    mounted now."""
    stat = folder.stat()
    return stat.st_dev, stat.st_ino


@functools.cache
def _say_it_once() -> None:
    """Leaves a save or a read that fails to its exception. Else its threads fill the screen, pages
    for every array."""
    # where orbax logs, and where its tasks do that nobody waits for any more
    for name in (
        "absl",
        "asyncio",
    ):
        logging.getLogger(name).addFilter(_is_news)
    show = sys.unraisablehook

    def show_news(what) -> None:
        trace = what.exc_traceback
        code = None if trace is None else trace.tb_frame.f_code
        # tensorstore tells each of those tasks that it is done, and prints that its event loop is
        # closed; of a read that fails, the other parts fail with nobody waiting for them
        if code is None or (
            code.co_name != "call_soon_threadsafe" and "orbax" not in code.co_filename
        ):
            show(what)

    sys.unraisablehook = show_news


def _is_news(record: logging.LogRecord) -> bool:
    is_of_orbax = "orbax" in record.pathname or "orbax" in record.getMessage()
    return record.levelno < logging.ERROR or not is_of_orbax
