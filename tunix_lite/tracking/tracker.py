"""Where the numbers of a run go. A tracker is anything with `log(step, metrics)` and `close()`."""

import json
import math
import numbers
from pathlib import Path
from typing import Protocol

from tunix_lite.types import Metrics


class Tracker(Protocol):
    """The whole interface. `step` is the number of updates done; metrics are plain numbers by "part/name"."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object a step. Without its time/, perf/ and memory/ keys it is the same for the same seed."""

    def __init__(self, file: Path, resume_at: int | None = None):
        """`resume_at`: steps after it, written by a run that died before its next checkpoint, are cut off."""
        if resume_at is not None and file.is_file():
            lines = [line for line in file.read_text().splitlines() if _step_of(line) <= resume_at]
            fresh = file.with_suffix(".jsonl.tmp")
            fresh.write_text("".join(line + "\n" for line in lines))
            fresh.replace(file)
        self._file = file.open("a" if resume_at is not None else "w")

    def log(self, step: int, metrics: Metrics) -> None:
        """Numbers that are not finite become null, which is all that JSON has for them."""
        said = {name: None if _is_not_finite(value) else value for name, value in sorted(metrics.items())}
        self._file.write(json.dumps({"step": step, **said}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _is_not_finite(value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")  # the last line of a run that was killed while it wrote


class TensorBoard:
    """Event files in the run's folder, for `tensorboard --logdir outputs/`."""

    def __init__(self, folder: Path, resume_at: int | None = None):
        """`resume_at`: what earlier event files say of later steps is no longer shown."""
        from tensorboardX import SummaryWriter  # here, because it imports torch where there is one: over a second

        purge = None if resume_at is None else resume_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if isinstance(value, numbers.Real):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
