"""Rows of files that are read from the beginning to the end, a buffer of them shuffled at a time.

Row number p of the endless stream is a function of the files, the seed and p: epochs stand one
after the other, and each buffer full of rows is put into an order drawn from seed, epoch and the
number of the buffer. So a run that goes on needs no state: it passes over the rows it has had.
"""

import glob
import queue
import threading
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.files.addresses import NO_ADDRESSES, is_address
from tunix_lite.tasks.row_files import KINDS, check_row


class RowStream:
    """The rows of one or several files, in the order of the files. Memory holds a buffer of rows,
    and those that are read ahead.

    Example: RowStream("parts/*.jsonl", 10_000).batch(16, seed=0, step=3) is the fourth batch.
    """

    def __init__(
        self,
        files: str,
        buffer: int,
        kind: str = "jsonl",
        on_error: str = "raise",
        checker: Any = None,
    ):
        """files: a path, in which * stands for anything; the names are sorted. Raises ValueError if
        there is no such file."""
        self.files = sorted(glob.glob(files)) if "*" in files else [files]
        missing = [file for file in self.files if not Path(file).is_file()]
        if not self.files:
            raise ValueError(f"{files}: no file has such a name")
        if missing and is_address(missing[0]):
            raise ValueError(f"{missing[0]}: {NO_ADDRESSES}")
        if missing:
            raise ValueError(f"{missing[0]} is not a file")
        self.buffer = buffer
        # malformed rows that were passed over, by where they stand; and why the first of them
        self.skipped: set[str] = set()
        self.first_skipped = ""
        self._said = 0
        # what was found out about the files, by what was asked
        self.known: dict = {}
        # rows of an epoch, once one has been read to its end
        self.num_rows: int | None = None
        self._kind = kind
        self._on_error = on_error
        self._checker = checker
        self._readers: dict[tuple[int, int], _Reader] = {}

    def first(self, most: int) -> list[dict]:
        """The first rows of the first file. Raises ValueError if there is none."""
        rows = list(islice((read() for read in self._epoch()), most))
        if not rows:
            raise ValueError(self._empty())
        return rows

    def news(self) -> str:
        """What is new of malformed rows since it was asked last; "" if nothing is."""
        found = len(self.skipped)
        if found == self._said:
            return ""
        self._said = found
        return f"{found:,} malformed rows left out so far, the first: {self.first_skipped}"

    def batch(self, batch_size: int, seed: int, step: int) -> list[dict]:
        """Batch number `step`; the one after it is read meanwhile. Raises ValueError, with file and
        line, for a malformed row."""
        key = (batch_size, seed)
        reader = self._readers.get(key)
        if reader is None or reader.next_step != step:
            if reader is not None:
                reader.close()
            rows = self.rows_from(seed, step * batch_size)
            reader = self._readers[key] = _Reader(rows, 2 * batch_size, step)
        return reader.batch(batch_size)

    def rows_from(self, seed: int, position: int) -> Iterator[dict]:
        """The endless stream of a seed, from a position on."""
        left = position
        for epoch in count():
            # an epoch that was read before need not be read to be passed over
            if self.num_rows is not None and left >= self.num_rows:
                left -= self.num_rows
                continue
            rows = self._epoch()
            found = 0
            for number in count():
                if left >= self.buffer:
                    passed = sum(1 for _ in islice(rows, self.buffer))
                    left -= passed
                    found += passed
                    if passed == self.buffer:
                        continue
                    break
                block = [read() for read in islice(rows, self.buffer)]
                order = np.random.default_rng((seed, epoch, number)).permutation(len(block))
                yield from (block[i] for i in order[left:])
                left = max(0, left - len(block))
                found += len(block)
                if len(block) < self.buffer:
                    break
            if not found:
                raise ValueError(self._empty())
            self.num_rows = found

    def _epoch(self) -> Iterator[Callable[[], dict]]:
        """A function that reads it, for each row of all files. Where malformed rows are left out,
        a row must be read to know whether it counts."""
        for file in self.files:
            word = "row" if self._kind == "parquet" else "line"
            for number, read in KINDS[self._kind](file):
                at = f"{file}, {word} {number}"
                if self._on_error == "raise":
                    yield lambda read=read, at=at: self._checked(read, at)
                    continue
                try:
                    row = self._checked(read, at)
                except ValueError as error:
                    self.skipped.add(at)
                    self.first_skipped = self.first_skipped or str(error)
                    continue
                yield lambda row=row: row

    def _checked(self, read: Callable[[str], dict], at: str) -> dict:
        row = read(at)
        if self._checker is not None:
            check_row(row, at, self._checker.check)
        return row

    def _empty(self) -> str:
        why = f"; the first row left out: {self.first_skipped}" if self.skipped else ""
        return f"{', '.join(self.files)[:400]} holds no examples{why}"


class _Reader:
    """A thread that reads rows ahead of the run, at most so many."""

    def __init__(self, rows: Iterator[dict], most: int, step: int):
        self.next_step = step
        self._queue: queue.Queue = queue.Queue(most)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(rows,), daemon=True)
        self._thread.start()

    def _read(self, rows: Iterator[dict]) -> None:
        try:
            for row in rows:
                if not self._put((row, None)):
                    return
        except Exception as error:
            # raised by the batch that would have had the row
            self._put((None, error))

    def _put(self, item: tuple) -> bool:
        while not self._ends.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def batch(self, size: int) -> list[dict]:
        self.next_step += 1
        found = []
        for _ in range(size):
            row, error = self._queue.get()
            if error is not None:
                # asked again, it is read again
                self.next_step = -1
                raise error
            found.append(row)
        return found

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
