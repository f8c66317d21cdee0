"""Where the numbers of a run go. A tracker is anything with `log(step, metrics)` and `close()`."""

import itertools
import json
import math
import numbers
import shutil
import time
from pathlib import Path
from typing import Protocol

from tunix_lite.tracking.rows import drops_rows, rows_until
from tunix_lite.types import Metrics


class Tracker(Protocol):
    """The whole interface. `step` is the number of updates done; metrics are plain numbers by
    "part/name"."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object a step. Without its time/, perf/ and memory/ keys it is the same
    for the same seed."""

    def __init__(self, file: Path, resume_at: int | None = None):
        """`resume_at`: steps after it, written by a run that died before its next checkpoint, are
        cut off.

        Where something before them would be left out, as lines that cannot be read (prepare refuses
        them, unless the user wants to go on), the file stays as it is under another name,
        `damaged_copy`.
        """
        if resume_at is not None and file.is_file():
            if drops_rows(file, resume_at):
                shutil.copyfile(file, damaged_copy(file))
            fresh = file.with_suffix(".jsonl.tmp")
            with fresh.open("wb") as half:
                half.writelines(line + b"\n" for _, line, _ in rows_until(file, resume_at))
            fresh.replace(file)
        self._file = file.open("a" if resume_at is not None else "w")

    def log(self, step: int, metrics: Metrics) -> None:
        """Numbers that are not finite become null, which is all that JSON has for them."""
        said = {
            name: None if _is_not_finite(value) else value
            for name, value in sorted(metrics.items())
        }
        self._file.write(json.dumps({"step": step, **said}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _is_not_finite(value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def damaged_copy(file: Path) -> Path:
    """metrics.damaged-1.jsonl, or the next number that is free."""
    names = (file.with_name(f"{file.stem}.damaged-{n}{file.suffix}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


class TensorBoard:
    """Event files in the run's folder, for `tensorboard --logdir outputs/`.

    Written here and now: SummaryWriter does it in a thread, and once a full disk has ended that
    thread, its next log waits forever.
    """

    FLUSH_SECONDS = 30

    def __init__(self, folder: Path, resume_at: int | None = None):
        """`resume_at`: what earlier event files say of later steps is no longer shown."""
        # here, because it imports torch where there is one: over a second
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar, self._flushed = Event, scalar, 0.0
        self._file = EventsWriter(str(folder / "events"))
        if resume_at is not None:
            self._file.write_event(
                Event(step=resume_at + 1, session_log=SessionLog(status=SessionLog.START))
            )

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if isinstance(value, numbers.Real):
                self._file.write_event(
                    self._event(wall_time=time.time(), step=step, summary=self._scalar(name, value))
                )
        if time.monotonic() > self._flushed + self.FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()
