"""metrics.jsonl read back: every step of a run once and in order, or what is wrong with the file, by its line."""

import json
from collections.abc import Iterator
from pathlib import Path


def lines_of(file: Path) -> Iterator[tuple[int, bytes, dict | None]]:
    """(number from 1, the line, its row) of each line; None: it is no object with a step. No file: no lines.

    Lines end with \\n alone: other characters that end lines elsewhere may stand inside of a JSON text.
    """
    for number, line in enumerate(file.read_bytes().split(b"\n") if file.is_file() else [], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: bytes that are no UTF-8, too
            row = None
        is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
        yield number, line, row if is_row else None


def rows_until(file: Path, last: int) -> list[tuple[int, bytes, dict]]:
    """Of the steps up to `last` what can be read, as `lines_of` gives it, in order; of no step two."""
    found: list[tuple[int, bytes, dict]] = []
    for number, line, row in lines_of(file):
        if row is not None and row["step"] <= last and (not found or row["step"] > found[-1][2]["step"]):
            found.append((number, line, row))
    return found


def loses(file: Path, last: int) -> bool:
    """Whether there stands something before the row of `last` that `rows_until` leaves out."""
    kept = {number for number, _, _ in rows_until(file, last)}
    end = max(kept, default=0)
    return any(line.strip() and number not in kept for number, line, _ in lines_of(file) if number < end)


def check_rows(file: Path, last: int, began: int | None) -> None:
    """Raises ValueError, with the line, unless the file has each step from the run's first to `last` once, in order.

    began: the step that the run began from, whose evaluation may stand there, too; None: not known. What follows the
    row of `last` does not count: a run that was killed wrote it after its last checkpoint, perhaps by half.
    """
    lines = [*lines_of(file)]
    kept = [i for i, (_, _, row) in enumerate(lines) if row is not None and row["step"] <= last]
    before = None
    for number, line, row in lines[: kept[-1] + 1] if kept else []:
        if row is None and line.strip():
            raise ValueError(f"line {number} of {file} is not the metrics of a step")
        if row is not None:
            step = row["step"]
            first = (0, step) if began is None else (0, 1) if began == 0 else (began + 1,)
            if before is None and step not in first:
                raise ValueError(f"{file} begins with step {step}, and the run with step {began + 1}")
            if before is not None and step != before + 1:
                raise ValueError(f"line {number} of {file} is of step {step}, and the one before it of step {before}")
            before = step
    if before != last and last != (began or 0):
        there = "is not there" if not file.is_file() else "holds no step" if before is None else f"ends with {before}"
        raise ValueError(f"{file} {there}, and the newest checkpoint is of step {last}")
