"""metrics.jsonl read back: every step of a run once and in order, or what is wrong with the file,
by its line."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from tunix_lite.files.untrusted import parse_object, read_lines

MOST_STEPS = 2**63
LARGEST = sys.float_info.max


def read_rows(file: Path) -> Iterator[tuple[int, bytes, dict | None]]:
    """(number from 1, the line, its row) of each line; None: it is no object with a step. No file:
    no lines.

    One line is held at a time, and of a long one only the beginning. Lines end with \\n alone:
    other characters that end lines elsewhere may stand inside of a JSON text. Raises ValueError if
    the file cannot be read.
    """
    if not file.is_file():
        return
    for number, (line, is_whole) in enumerate(read_lines(file), 1):
        yield number, line, _row(line) if is_whole else None


def _row(line: bytes) -> dict | None:
    try:
        row = parse_object(line.decode("utf-8"), "the line")
    except ValueError:
        # bytes that are no UTF-8, too
        return None
    return row if type(row.get("step")) is int and 0 <= row["step"] < MOST_STEPS else None


def is_number(value) -> bool:
    """Whether a value of a JSON file is a number that a float can hold: neither NaN, nor one of 400
    digits."""
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def rows_until(file: Path, last: int) -> Iterator[tuple[int, bytes, dict]]:
    """Of the steps up to `last` what can be read, as `read_rows` gives it, in order; of no step
    two."""
    before = -1
    for number, line, row in read_rows(file):
        if row is not None and before < row["step"] <= last:
            before = row["step"]
            yield number, line, row


def drops_rows(file: Path, last: int) -> bool:
    """Whether there stands something before the row of `last` that `rows_until` leaves out."""
    kept = {number for number, _, _ in rows_until(file, last)}
    end = max(kept, default=0)
    return any(
        line.strip() and number not in kept for number, line, _ in read_rows(file) if number < end
    )


def check_rows(file: Path, last: int, began: int | None) -> None:
    """Raises ValueError, with the line, unless the file has each step from the run's first to
    `last` once, in order.

    began: the step that the run began from, whose evaluation may stand there, too; None: not known.
    What follows the row of `last` does not count: a run that was killed wrote it after its last
    checkpoint, perhaps by half.
    """
    end = max(
        (number for number, _, row in read_rows(file) if row is not None and row["step"] <= last),
        default=0,
    )
    before = None
    for number, line, row in itertools.islice(read_rows(file), end):
        if row is None and line.strip():
            raise ValueError(f"line {number} of {file} is not the metrics of a step")
        if row is not None:
            step = row["step"]
            first = (0, step) if began is None else (0, 1) if began == 0 else (began + 1,)
            if before is None and step not in first:
                raise ValueError(
                    f"{file} begins with step {step}, and the run with step {began + 1}"
                )
            if before is not None and step != before + 1:
                raise ValueError(
                    f"line {number} of {file} is of step {step}, and the one before it of step "
                    f"{before}"
                )
            before = step
    if before != last and last != (began or 0):
        there = (
            "is not there"
            if not file.is_file()
            else "holds no step"
            if before is None
            else f"ends with {before}"
        )
        raise ValueError(f"{file} {there}, and the newest checkpoint is of step {last}")
