"""Checkpoints of the TrainState with orbax: saved in the background, restored onto any mesh.

Each checkpoint has digests of its files, so that reading it notices every change.
"""

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from tunix_lite.basics import digests
from tunix_lite.basics.addresses import address_of
from tunix_lite.basics.best import Best
from tunix_lite.basics.errors import is_of_a_peer
from tunix_lite.basics.plain_text import reason_of, shown
from tunix_lite.basics.types import POLICY, Params, TrainState, policy_part
from tunix_lite.basics.untrusted import check_only_files, read_object
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.bucket_folder import held_bucket, writes_directly

# nested arrays, or shapes of arrays
Tree = TrainState | dict[str, Params]


# Most arrays that a message names.
_SHOWN = 4
# A file of ours in the folder of a checkpoint, and its key for the updates skipped in a row.
_ABOUT = "about.json"
_SKIPPED = "skipped_in_a_row"
# The name of the best checkpoint, and the key of the best steps in status.json.
BEST = "best"
# And one of runs whose rollouts overlap with learning: the completions in flight, as arrays.
_IN_FLIGHT = "in_flight.npz"
# Files that orbax writes after the digests are made, so they have none.
_LATER = {"_CHECKPOINT_METADATA", "commit_success.txt"}
# The gigabytes that a process reads at a time: host memory beside the arrays on its devices.
_HOST_GB = 4
# The bytes from which on a state on a CPU is on disk before the next update.
_LARGE = 256e6
# Most seconds of a save. All processes wait for the first, which makes the digests of all files.
_SAVE_SECONDS = 3600


class Checkpoints:
    """The checkpoints of one run, in folders `checkpoints/<step>/`. Only `save` removes any: old
    ones, and those that a killed run left unfinished.
    Example: `Checkpoints("outputs/latest/checkpoints").latest_step()`."""

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        keep_best: int = 0,
        best: Best | None = None,
        when_whole: Callable[[], None] | None = None,
    ):
        """keep: newest checkpoints that stay. keep_best: and of the best by `best`, which the run
        changes. when_whole: called once, when the first save is on disk."""
        self.folder = Path(folder).absolute()
        # Where orbax reads and writes: of several processes each its part of the bucket's arrays.
        self._is_direct = writes_directly(self.folder)
        self._there = epath.Path(address_of(self.folder) if self._is_direct else self.folder)
        policies = [ocp.checkpoint_managers.LatestN(keep)]
        if best is not None and keep_best:
            policies.append(_KeepBest(best, keep_best))
        self._policy = ocp.checkpoint_managers.AnyPreservationPolicy(policies)
        # orbax's manager, once it is needed
        self._opened: ocp.CheckpointManager | None = None
        self._when_whole = when_whole
        self._is_saved = False
        # what is being saved beside the state: ABOUT, and completions in flight
        self._saving: tuple[dict, dict[str, np.ndarray] | None] = ({}, None)
        # which folders these are, to notice one that was deleted and made again
        folders = (self.folder.parent, self.folder)
        self._known = {folder: _identity(folder) for folder in folders if folder.is_dir()}

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """The manager of orbax that saves, only for the run that has locked the folder."""
        if self._opened is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._policy,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(
                    timeout_secs=_SAVE_SECONDS,
                    post_finalization_callback=self._before_it_gets_its_name,
                ),
                # Remove what a run left that was killed while it saved.
                cleanup_tmp_directories=True,
            )
            _silence_orbax_errors()
            # Compressed, all arrays would be in memory once more until they are on disk, and floats
            # become only 8 % smaller (docs/log.md, 28 November 2026).
            self._opened = ocp.CheckpointManager(
                self._there,
                options=options,
                item_handlers=ocp.PyTreeCheckpointHandler(use_compression=False),
            )
        return self._opened

    def _before_it_gets_its_name(self) -> None:
        """Adds digests and files of ours before orbax renames the folder, in a thread."""
        self._check_there()
        about, in_flight = self._saving
        bucket = held_bucket(self.folder)
        step = self.folder / str(about["step"])
        if self._is_direct:
            # The places of older steps show what the bucket has.
            for old in set(self.steps()) - set(self._manager.all_steps()):
                shutil.rmtree(self.folder / str(old))
            step.mkdir(exist_ok=True)
        for half in [step] if self._is_direct else self.folder.glob(f"{step.name}.*tmp*"):
            (half / _ABOUT).write_text(json.dumps(about) + "\n")
            if in_flight is not None:
                np.savez_compressed(half / _IN_FLIGHT, **in_flight)
            if not self._is_direct:
                digests.write_digests(half, _LATER)
            if bucket is not None:
                bucket.save(half, step)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order; [] if there is no folder. Raises OSError."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        # An unfinished checkpoint has a longer name than its step.
        return sorted(int(name) for name in names if is_step(name))

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint; None if there is none. Raises OSError."""
        return max(self.steps(), default=None)

    def whole_steps(self) -> list[int]:
        """The steps whose files are all there, with the sizes that were saved. Raises OSError."""
        return [step for step in self.steps() if not self._missing(step)]

    def _missing(self, step: int) -> str | None:
        """Describes a fault in a checkpoint's files, by names and sizes; None: there is none."""
        folder = self.folder / str(step)
        if self._is_direct:
            # orbax has made it whole, and the store loses nothing
            return None
        if not folder.is_dir():
            return "it is a file and not a folder"
        if not any(folder.iterdir()):
            return "its folder is empty"
        # ValueError: the digests are damaged, which `_verify` reports.
        with contextlib.suppress(ValueError):
            for name, (size, _) in (digests.read_digests(folder) or {}).items():
                if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                    return f"{name} is not as it was written"
        for name in ("default/_METADATA", "default/manifest.ocdbt"):
            if not (folder / name).is_file():
                return f"{name} is gone"
        return None

    def check_whole(self, step: int) -> None:
        """Raises ValueError, with the remedy, if files of it are missing or cut off."""
        if missing := self._missing(step):
            raise ValueError(self._damaged(step, missing))

    def clear(self) -> None:
        """Removes all checkpoints, while no run reads or writes them. Raises OSError."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if (bucket := held_bucket(self.folder)) is not None:
            bucket.clear(self.folder)

    def has_digests(self, step: int) -> bool:
        """Returns whether this checkpoint has digests; a copy may have lost them."""
        return (self.folder / str(step) / digests.NAME).is_file()

    def save(
        self,
        state: TrainState,
        skipped: int = 0,
        in_flight: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Starts to save the state, which may be donated afterwards; a thread writes it. A large
        state on a CPU is on disk when this returns. Raises OSError. skipped: updates skipped in a
        row. in_flight: completions that no update has taken yet, as arrays."""
        step = int(state.step)
        if self.folder not in self._known:
            self.folder.mkdir(exist_ok=True)
            self._known[self.folder] = _identity(self.folder)
        with self._as_os_error():
            # The save before still reads what is set here.
            self._manager.wait_until_finished()
            self._check_there()
            self._saving = ({"step": step, _SKIPPED: skipped}, in_flight)
            saved = self._manager.save(step, args=ocp.args.PyTreeSave(state))
        assert saved, f"orbax skipped step {step}: {self.folder} holds a later one"
        self._is_saved = True
        # On a CPU orbax reads the arrays themselves, so that an update beside it makes new ones.
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        if size >= _LARGE and jax.default_backend() == "cpu":
            self.wait()

    def restore(self, like: TrainState) -> TrainState:
        """Reads the newest checkpoint, after comparing all its files with their digests. like: the
        shapes, dtypes and shardings to restore. Raises ValueError if there is no checkpoint, or it
        cannot be read, has changed, or does not match `like`."""
        return self._read(self.chosen_step(None), shapes_of(like))

    def restore_params(
        self, like: Params, step: int | str | None = None
    ) -> tuple[int, Params]:
        """(step, the policy's parameters). step: as of chosen_step. Raises as `restore`."""
        step = self.chosen_step(step)
        return step, policy_part(self._read(step, {"params": like}, is_part=True)["params"])

    def chosen_step(self, step: int | str | None) -> int:
        """This step; None: the newest; best: by status.json. ValueError: there is none."""
        steps = self.steps()
        if step == BEST and steps:
            status = self.folder.parent / "status.json"
            best = read_object(status).get(BEST) if status.is_file() else None
            if not isinstance(best, list):
                best = []
            for one in best:
                if one in steps:
                    return steps[steps.index(one)]
            raise ValueError(
                f"no checkpoint of {self.folder} is the best by training.best_metric; "
                "training.keep_best_checkpoints=1 keeps it; give the number of one: "
                f"step={steps[-1]}"
            )
        if isinstance(step, str):
            raise ValueError(f"step={step}; it is a number, or best")
        if not steps or step not in (None, *steps):
            of_step = "" if step is None else f" of step {step}"
            there = f"; there is {', '.join(map(str, steps))}" if steps else ""
            raise ValueError(f"{self.folder} holds no checkpoint{of_step}{there}")
        return steps[-1] if step is None else step

    def skipped(self, step: int) -> int:
        """Counts the updates in a row that were skipped up to this step. ValueError: damage."""

        def read(file: Path) -> int:
            count = read_object(file).get(_SKIPPED)
            if type(count) is not int or count < 0:
                raise ValueError(f"{_SKIPPED} is {shown(count)}, and not a count")
            return count

        # a copy may have lost it
        return self._beside(step, _ABOUT, read) or 0

    def in_flight(self, step: int) -> dict[str, np.ndarray] | None:
        """The completions in flight at this step; None: there are none. ValueError: damage."""

        def read(file: Path) -> dict[str, np.ndarray]:
            check_only_files(file.parent)
            # no pickles: numpy refuses them unless it is asked for them
            with np.load(file) as arrays:
                return {name: arrays[name] for name in arrays}

        return self._beside(step, _IN_FLIGHT, read)

    def _beside(self, step: int, name: str, read: Callable[[Path], Any]) -> Any:
        """Reads a file of ours in a checkpoint; None if it is not there."""
        file = self.folder / str(step) / name
        if not os.path.lexists(file):
            return None
        try:
            return read(file)
        # numpy and zipfile raise what they like
        except Exception as error:
            raise ValueError(self._damaged(step, f"{name}: {reason_of(error)}")) from error

    def _read(self, step: int, wanted: Tree, is_part: bool = False) -> Tree:
        """Restores arrays of these shapes, dtypes and shardings. Raises ValueError. is_part:
        whether the checkpoint may hold more. Each process checks a part of the files, so all must
        call it."""
        folder = self.folder / str(step)
        try:
            check_only_files(folder)
            recorded = {} if self._is_direct else digests.read_digests(folder) or {}
            by_size = sorted(recorded, key=lambda name: recorded[name][0])
            mine = by_size[jax.process_index() :: jax.process_count()]
            damage = digests.changed_files(folder, recorded, mine)
        except ValueError as error:
            damage = [str(error)]
        damage = [problem for problems in allgather_values(damage) for problem in problems]
        if damage:
            more = f", and {len(damage) - 1} more files" if len(damage) > 1 else ""
            raise ValueError(self._damaged(step, damage[0] + more))
        _silence_orbax_errors()
        try:
            there = self._there / str(step) / "default"
            tree = ocp.PyTreeCheckpointHandler().metadata(there).tree
            # Who reads a part of it may not know that a critic has trained as well.
            if is_part and POLICY in tree["params"]:
                wanted = {"params": {POLICY: wanted["params"]}}
            here = _shapes(wanted)
            there = _shapes(tree)
        except Exception as error:
            raise ValueError(self._damaged(step, reason_of(error))) from error
        names = here if is_part else here | there
        if other := [name for name in names if here.get(name) != there.get(name)]:
            shapes = [
                f"{name}: {here.get(name)!r} here, {there.get(name)!r} there" for name in other
            ]
            more = f"; and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
            raise ValueError(
                f"step {step} of {self.folder} does not fit this model or optimizer: "
                f"{'; '.join(shapes[:_SHOWN])}{more}"
            )

        # A saved chunk is read as a whole, so twice the largest array must fit.
        leaves = jax.tree.leaves(wanted)
        largest = max(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
        host_gb = max(_HOST_GB, 1 + math.ceil(2 * largest / 1e9))
        handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=host_gb)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(wanted, restore_args, partial_restore=is_part)
        options = ocp.CheckpointManagerOptions(create=False)
        try:
            with ocp.CheckpointManager(
                self._there, options=options, item_handlers=handler
            ) as manager:
                return manager.restore(step, args=args)
        # No memory, or trouble with the devices: the files are not at fault.
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        # orbax raises errors of all kinds.
        except Exception as error:
            if is_of_a_peer(error):
                raise
            raise ValueError(self._damaged(step, reason_of(error))) from error

    def _damaged(self, step: int, why: str) -> str:
        """The message that a step cannot be used, with the folder to remove."""
        then = "begin anew: there is no earlier one"
        if earlier := [s for s in self.steps() if s < step]:
            then = f"go on from step {earlier[-1]}"
        return (
            f"step {step} cannot be read ({why}); remove {self.folder / str(step)} to {then}"
        )

    def check(self) -> None:
        """Raises OSError if the folder is gone, or if the last save has failed by now."""
        self._check_there()
        if self._opened is not None and not self._opened.is_saving_in_progress():
            # orbax's check_for_errors would take the error from its thread, which deletes old ones.
            self.wait()

    def _check_there(self) -> None:
        """Raises OSError if a folder was replaced, or another run has it in its bucket."""
        bucket = held_bucket(self.folder)
        if bucket is not None and bucket.lost is not None:
            raise OSError(errno.EREMOTEIO, bucket.lost, str(self.folder))
        for folder, known in self._known.items():
            if _identity(folder) != known:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        """Inside, errors of the disk become OSError with a file; tensorstore raises others."""
        try:
            yield
        except Exception as error:
            try:
                self._check_there()
            except OSError as gone:
                raise gone from error
            if self._is_direct and not isinstance(error, OSError) and not is_of_a_peer(error):
                text = reason_of(error)
                raise OSError(errno.EREMOTEIO, text, str(self.folder)) from error
            match = re.search(r"(?:os_error_code='|^\[Errno )(\d+)", str(error))
            if not match or getattr(error, "filename", None):
                raise
            number = int(match[1])
            raise OSError(number, os.strerror(number), str(self.folder)) from error

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises OSError if it has failed."""
        if self._opened is not None:
            with self._as_os_error():
                self._opened.wait_until_finished()
            self._saving = {}, None
            # The first time after a save.
            if self._is_saved and self._when_whole is not None:
                when_whole = self._when_whole
                self._when_whole = None
                when_whole()

    def close(self) -> None:
        """Waits until the last save is on disk, and closes orbax. Raises OSError if it failed."""
        if self._opened is not None:
            try:
                self.wait()
            finally:
                opened = self._opened
                self._opened = None
                with self._as_os_error():
                    opened.close()


# ---- details


@dataclass(frozen=True)
class _KeepBest(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the best checkpoints, those of an earlier start too, which orbax would forget."""

    best: Best
    count: int

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        steps = [one.step for one in checkpoints]
        best = self.best.first(self.count, steps)
        return [step in best for step in steps]


def shapes_of(arrays: Tree) -> Tree:
    """Arrays, or their shapes, as ShapeDtypeStructs with shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def is_step(name: str) -> bool:
    """Returns whether this is the name of a checkpoint's folder: 0, 7, 60; not 007."""
    return name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0")


def _shapes(tree: Tree) -> dict[str, tuple | str]:
    """The shape of every array by its path, `params/layers/w`; lists count as tuples."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: x is None or (isinstance(x, tuple | list | dict) and not x)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.shape)
        if hasattr(x, "shape")
        else "nothing"
        for path, x in leaves
    }


def _identity(folder: Path) -> tuple[int, int]:
    """Device and inode of a folder, which differ after it was deleted and made again."""
    stat = folder.stat()
    return stat.st_dev, stat.st_ino


@functools.cache
def _silence_orbax_errors() -> None:
    """Keeps orbax and tensorstore from printing an error that they also raise."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return (
            record.levelno < logging.ERROR
            or "orbax" not in record.pathname + record.getMessage()
        )

    # orbax logs to absl, and asyncio logs for its tasks that nobody waits for any more.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_of_others)
    show = sys.unraisablehook

    def show_others(unraisable: "sys.UnraisableHookArgs") -> None:
        trace = unraisable.exc_traceback
        # After a read that failed, tensorstore calls tasks of a closed loop; nobody waits for them.
        code = trace and trace.tb_frame.f_code
        is_of_read = code and (
            code.co_name == "call_soon_threadsafe" or "orbax" in code.co_filename
        )
        if not is_of_read:
            show(unraisable)

    sys.unraisablehook = show_others
