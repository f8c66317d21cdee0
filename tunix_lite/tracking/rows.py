"""Reads metrics.jsonl back, and checks that it holds every step of a run once and in order."""

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from tunix_lite.basics.untrusted import parse_object, read_lines

# A step must be below this: it must fit into 64 bits.
MOST_STEPS = 2**63
# The largest number that a float can hold.
_LARGEST = sys.float_info.max


def read_rows(file: Path) -> Iterator[tuple[int, bytes, dict | None]]:
    """Each line of the file as (its number from 1, its bytes, its row), of which the first
    MOST_LINE bytes are in memory; none without a file. The row is None if the line is not the
    metrics of a step. Raises ValueError if the file cannot be read."""
    if not file.is_file():
        return
    for number, (line, is_whole) in enumerate(read_lines(file), 1):
        row = {}
        # ValueError: the line is no UTF-8, or no JSON object.
        with contextlib.suppress(ValueError):
            row = parse_object(line.decode("utf-8"), "the line") if is_whole else {}
        is_step = type(row.get("step")) is int and 0 <= row["step"] < MOST_STEPS
        yield number, line, row if is_step else None


def is_number(value: object) -> bool:
    """Whether a JSON value is a number that a float can hold, and not NaN or infinite."""
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST


def rows_until(file: Path, last: int) -> Iterator[tuple[int, bytes, dict]]:
    """The rows of steps up to `last`, as of `read_rows`, whose step is above the one before."""
    before = -1
    for number, line, row in read_rows(file):
        if row is not None and before < row["step"] <= last:
            before = row["step"]
            yield number, line, row


def check_rows(file: Path, last: int, began: int | None) -> None:
    """Raises ValueError unless the file holds each step of the run up to `last`, that of the newest
    checkpoint, once and in order. began: the step that the run began from, which may have a row of
    its evaluation; None: not known."""
    # The last line that counts, and then each step must follow the one before.
    end = 0
    for number, _, row in read_rows(file):
        if row is not None and row["step"] <= last:
            end = number
    before = None
    for number, line, row in itertools.islice(read_rows(file), end):
        if row is None:
            if line.strip():
                raise ValueError(f"line {number} of {file} is not the metrics of a step")
            continue
        step = row["step"]
        first = {step}
        if began == 0:
            # With an evaluation before the first step the run has a row of it.
            first = {0, 1}
        elif began is not None:
            first = {began + 1}
        if before is None and step not in first:
            raise ValueError(
                f"{file} begins with step {step}, and the run with step {began + 1}"
            )
        if before is not None and step != before + 1:
            raise ValueError(
                f"line {number} of {file} is of step {step}, and the one before it of step {before}"
            )
        before = step

    # The last one must be that of the checkpoint.
    if before != last and last != (began or 0):
        there = f"ends with {before}"
        if before is None:
            there = "holds no step" if file.is_file() else "is not there"
        raise ValueError(f"{file} {there}, and the newest checkpoint is of step {last}")
