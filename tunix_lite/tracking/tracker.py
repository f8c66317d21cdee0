"""Where metrics are written: metrics.jsonl, TensorBoard, or a tracker of the user's own."""

import json
import math
import shutil
import time
from numbers import Real
from pathlib import Path
from typing import Protocol

from tunix_lite.basics.types import Metrics
from tunix_lite.tracking.rows import check_rows, rows_until

# Between two flushes of TensorBoard's file.
_FLUSH_SECONDS = 30


class Tracker(Protocol):
    """The methods of a class that takes metrics; it needs no base class. It may also have
    `log_samples(step, rows)`, which gets the completions of a step as samples/ has them.
    Example: `tracker.log(12, {"train/loss": 0.31, "reward/mean": 0.5})`."""

    def log(self, step: int, metrics: Metrics) -> None:
        """step: the number of updates done. metrics: plain numbers by "part/name"."""
        ...

    def close(self) -> None:
        """Called once, at the end of the run, also after an error."""
        ...


class JsonLines:
    """Writes metrics.jsonl, one JSON object a step. Without its time/, perf/ and memory/ keys it is
    the same, byte for byte, for one seed."""

    def __init__(self, file: Path, resume_at: int | None):
        """resume_at: the step that the run resumes from; later steps are cut off. None: begin a new
        file. Of a file that lacks steps, or has lines that cannot be read and so are lost, a copy
        is kept as metrics.damaged-1.jsonl. Raises OSError."""
        if resume_at is not None and file.is_file():
            copy = file.with_name(f"{file.stem}.damaged-1{file.suffix}")
            try:
                check_rows(file, resume_at, None)
            except ValueError:
                # The first copy has what was there; a later one would have less.
                if not copy.exists():
                    shutil.copyfile(file, copy)
            # Under another name until it is whole: a kill in between leaves the old file.
            fresh = file.with_suffix(".jsonl.tmp")
            with fresh.open("wb") as half:
                half.writelines(line + b"\n" for _, line, _ in rows_until(file, resume_at))
            fresh.replace(file)
        self._file = file.open("a" if resume_at is not None else "w")

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes the row of a step; NaN and infinity become null."""
        row = {"step": step}
        # In one order, as the file of a seed is the same byte for byte.
        for name, value in sorted(metrics.items()):
            row[name] = (
                None if isinstance(value, float) and not math.isfinite(value) else value
            )
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Writes event files into the run's folder, for `tensorboard --logdir outputs/`, in the calling
    thread: that of tensorboardX's SummaryWriter, once a full disk has ended it, makes the next log
    wait for ever."""

    def __init__(self, folder: Path, resume_at: int | None):
        """resume_at: TensorBoard no longer shows later steps of earlier event files."""
        # Imported here, because it imports torch if there is one, which takes over a second.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        self._summary = summary
        # the clock at the last flush
        self._flushed = 0.0
        self._file = EventsWriter(str(folder / "events"))
        if resume_at is not None:
            self._file.write_event(
                Event(step=resume_at + 1, session_log=SessionLog(status=SessionLog.START))
            )

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a step, one event for each number."""
        for name, value in metrics.items():
            if isinstance(value, Real):
                summary = self._summary.scalar(name, value)
                event = self._event(wall_time=time.time(), step=step, summary=summary)
                self._file.write_event(event)
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()
