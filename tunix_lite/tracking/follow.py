"""Follows a run by its files alone, while it goes on or afterwards: metrics, status and samples.

The files may be of somebody else: they are read as data, a bounded part at a time, and nothing is
written.
"""

import os
from pathlib import Path
from typing import Any

from tunix_lite.files.untrusted import (
    MOST_LINE,
    parse_object,
    read_from,
    read_object,
    read_yaml,
)
from tunix_lite.plain_text import visible
from tunix_lite.tracking.rows import MOST_STEPS, is_number
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Metrics

# Bytes of metrics.jsonl before its end that a first look reads; those of one look; and of samples.
FIRST = 4 * 2**20
MOST = 4 * 2**20
MOST_SAMPLES = 2 * 2**20
# Files of samples/ and numbers of a step that are looked at.
MOST_FILES = 10_000
MOST_METRICS = 400
# Words of status.json for a run that has ended.
ENDED = ("completed", "stopped", "failed", "interrupted")


class FollowedRun:
    """What the files of a run have said since the last look.

    Example: `run = FollowedRun(Path("outputs/latest"))`, then `run.new_rows()` again and again.
    """

    def __init__(self, folder: Path):
        self.run_dir = RunDir(folder)
        self._offset: int | None = None
        self._rest = b""
        self._sample = ""

    def new_rows(self) -> list[tuple[int, Metrics]]:
        """(step, metrics) of each line since the last call, in the order of the file.

        Half a line waits for its other half. Where the file was cut, as by a run that resumed, it
        is read anew. Raises ValueError if it cannot be read.
        """
        file = self.run_dir.metrics
        if not file.is_file():
            return []
        if self._offset is None:
            self._offset = max(0, file.stat().st_size - FIRST)
            # The first line is then half of one, most likely.
            self._rest = b"" if self._offset == 0 else b"{"
        part, size = read_from(file, self._offset, MOST)
        if size < self._offset:
            self._offset, self._rest = 0, b""
            part, _ = read_from(file, 0, MOST)
        self._offset += len(part)
        *lines, self._rest = (self._rest + part).split(b"\n")
        # No line of a run is as long: it is left out, as its end will be.
        self._rest = self._rest[: MOST_LINE + 1]
        found = (_metrics(line) for line in lines if len(line) <= MOST_LINE)
        return [row for row in found if row is not None]

    def status(self) -> dict[str, Any]:
        """status.json, {} where there is none that can be read."""
        try:
            return read_object(self.run_dir.status, MOST_LINE)
        except ValueError:
            return {}

    def has_ended(self) -> bool:
        return self.status().get("status") in ENDED

    def max_steps(self) -> int | None:
        """training.max_steps of the run; None where its settings cannot be read."""
        return self._steps("training", "max_steps")

    def evaluates_every(self) -> int:
        """evaluation.interval_steps of the run; 0 where its settings cannot be read."""
        return self._steps("evaluation", "interval_steps") or 0

    def _steps(self, group: str, name: str) -> int | None:
        try:
            settings = read_yaml(self.run_dir.path / ".hydra" / "config.yaml", MOST_LINE)
        except ValueError:
            return None
        found = settings.get(group)
        steps = found.get(name) if isinstance(found, dict) else None
        return steps if type(steps) is int and 0 < steps < MOST_STEPS else None

    def new_samples(self) -> tuple[int, list[dict]] | None:
        """(step, rows) of the newest file of samples/, where it has not been returned before."""
        names = []
        try:
            with os.scandir(self.run_dir.path / "samples") as entries:
                for _, entry in zip(range(MOST_FILES), entries):
                    number = entry.name.removeprefix("step_").removesuffix(".jsonl")
                    if entry.name == f"step_{number}.jsonl" and number.isdecimal():
                        names.append(entry.name)
            newest = max(names, default="")
            if newest == self._sample:
                return None
            file = self.run_dir.path / "samples" / newest
            content, _ = read_from(file, 0, MOST_SAMPLES)
        except (OSError, ValueError):
            return None
        self._sample = newest
        rows = [_object(line) for line in content.split(b"\n")]
        step = int(newest.removeprefix("step_").removesuffix(".jsonl")[:18])
        return step, [row for row in rows if row]


def _object(line: bytes) -> dict:
    try:
        return parse_object(line.decode("utf-8"), "the line")
    except ValueError:
        return {}


def _metrics(line: bytes) -> tuple[int, Metrics] | None:
    """The step and the numbers of a line; None if it holds something else."""
    row = _object(line)
    step = row.get("step")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        return None
    numbers = {visible(name): value for name, value in row.items() if is_number(value)}
    del numbers["step"]
    return step, dict(list(numbers.items())[:MOST_METRICS])
