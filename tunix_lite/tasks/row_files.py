"""Files of rows, a dict a row: JSON lines, CSV and Parquet; in memory, on disk, or read in order.

Row number p of the endless stream of files that are read in order is a function of the files, the
seed and p: epochs stand one after the other, and each buffer full of rows is put into an order
drawn from seed, epoch and the number of the buffer. So a run that goes on needs no state: it passes
over the rows it has had.
"""

import codecs
import csv
import glob
import hashlib
import json
import os
import sys
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.files.addresses import NO_ADDRESSES, is_address
from tunix_lite.files.untrusted import is_deeper
from tunix_lite.plain_text import shortened

ON_ERROR = ("raise", "skip")
# brackets in brackets that a row may have: what is written of it later must be readable, too
DEEPEST = 100
# read and looked at once, though a start asks for them twice
FILES_KEPT = 4
UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


def check_on_error(on_error: str) -> None:
    """Raises ValueError for anything but raise and skip."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}; it is raise or skip")


# ---- a row and its place


class PlacedRow(dict):
    """A row of a file, which knows its place. What another process gets is a plain dict.

    Example: PlacedRow({"prompt": "hi"}, "train.jsonl, line", 250).place is "train.jsonl, line 250".
    """

    __slots__ = ("_file", "_number")

    def __init__(self, values: Mapping, file: str, number: int):
        """file: with the word for what is counted, `line` or `row`."""
        super().__init__(values)
        self._file = file
        self._number = number

    @property
    def place(self) -> str:
        """File and line of the row."""
        return f"{self._file} {self._number}"

    def changed(self, values: Mapping) -> "PlacedRow":
        """Replaces the values; the place stays."""
        return PlacedRow(values, self._file, self._number)

    def __reduce__(self):
        return dict, (dict(self),)


def place_of(example: Mapping) -> str:
    """File and line of an example; "" for one that is not of a file."""
    return example.place if isinstance(example, PlacedRow) else ""


def where(examples: Sequence[dict], index: int) -> str:
    """Names the place of example `index`: file and line, or its number."""
    return place_of(examples[index]) or f"example {index}"


def _counted(file: str, kind: str) -> str:
    """Returns the file with the word for its unit, `line` or `row`."""
    return f"{file}, {'row' if kind == 'parquet' else 'line'}"


def _row(read: Callable[[str], dict], file: str, number: int, checker: Any) -> PlacedRow:
    """The row at a place. Raises ValueError that begins with the place, for one that cannot be
    read, and for one for which checker.check(row) raises ValueError. file: as of PlacedRow."""
    at = f"{file} {number}"
    row = PlacedRow(read(at), file, number)
    if checker is not None:
        try:
            checker.check(row)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from error
    return row


# ---- in memory


class Rows(list):
    """The rows of a file, each of which knows its line.

    Example: rows = Rows("train.jsonl"); rows[0] is a dict, rows.where(0) is "train.jsonl, line 1".
    """

    def __init__(
        self,
        file: str,
        kind: str = "jsonl",
        on_error: str = "raise",
        checker: Any = None,
    ):
        """Raises ValueError, naming file and line, for a row that cannot be read, and for one for
        which checker.check(row) raises ValueError; with on_error=skip such rows are left out.

        kind: one of KINDS.
        """
        self.file = file
        # number of rows that were left out, and the reason for the first
        self.skipped = 0
        self.first_skipped = ""
        # cached results of checks of all rows, by their settings
        self.known: dict = {}
        for number, read in KINDS[kind](file):
            try:
                self.append(_row(read, _counted(file, kind), number, checker))
            except ValueError as error:
                if on_error == "raise":
                    raise
                self.skipped += 1
                self.first_skipped = self.first_skipped or str(error)
        if not self:
            left_out = f"; all {self.skipped} rows were left out, the first: {self.first_skipped}"
            raise ValueError(f"{file} holds no examples{left_out if self.skipped else ''}")

    def where(self, index: int) -> str:
        """`train.jsonl, line 250`."""
        return self[index].place

    def part(self, places: Sequence[int]) -> "Rows":
        """Some of the rows, which keep their lines; `skipped` stays with the whole."""
        rows = Rows.__new__(Rows)
        rows.extend(self[i] for i in places)
        rows.file = self.file
        rows.skipped = 0
        rows.first_skipped = ""
        rows.known = {}
        return rows

    def changed(self, change: Callable[[dict], dict], key: Any) -> "Rows":
        """Rows with change(row) for each row, which keep their lines; a start makes them once.

        key: what is equal where the change is the same.
        """
        if key not in self.known:
            rows = self.part(range(len(self)))
            rows[:] = [row.changed(change(row)) for row in self]
            rows.skipped, rows.first_skipped = self.skipped, self.first_skipped
            self.known[key] = rows
        return self.known[key]


def rows_of(file: str, kind: str, on_error: str = "raise", checker: Any = None) -> Rows:
    """Reads the rows of a file, as it is now. A start reads it twice: once to check the settings,
    and the second time finds it here. checker: see Rows; one that does the same must compare
    equal."""
    check_is_file(file)
    with open(file, "rb") as opened:
        content = hashlib.file_digest(opened, "blake2b").digest()
    return _rows_with(file, content, kind, on_error, checker)


@lru_cache(maxsize=FILES_KEPT)
def _rows_with(file: str, content: bytes, kind: str, on_error: str, checker: Any) -> Rows:
    return Rows(file, kind, on_error, checker)


def check_is_file(file: str) -> None:
    """Raises ValueError for a path that is no file, with what stands for several."""
    if Path(file).is_file():
        return
    if is_address(file):
        raise ValueError(f"{file}: {NO_ADDRESSES}")
    if "*" in file:
        matches = len(glob.glob(file))
        raise ValueError(
            f"{file}: only files that are read in order may be several (this one matches "
            f"{matches}); set task.shuffle_buffer=10000 and task.held_out=FILE"
        )
    raise ValueError(f"{file} is not a file")


# ---- on disk


class RowsOnDisk(Sequence):
    """The rows of a file with one JSON object a line that stays on disk: memory holds where each
    begins and a hash of its prompt, 32 bytes a row. Rows are read when they are asked for.

    Example: RowsOnDisk("train.jsonl")[250] is the same dict as Rows("train.jsonl")[250].
    """

    def __init__(self, file: str, on_error: str = "raise", checker: Any = None):
        """Reads the file once, and raises or skips as Rows does."""
        self.file = file
        self.skipped = 0
        self.first_skipped = ""
        # objects made of these rows, such as a reader that is ahead
        self.known: dict = {}
        # a hash of each prompt, if a checker says what the prompt is
        self.prompts = array("q")
        self._numbers = array("q")
        self._begins = array("q")
        self._sizes = array("q")
        for number, begin, line in _raw_lines(file):
            try:
                row = _row(partial(_json_row, line), f"{file}, line", number, checker)
            except ValueError as error:
                if on_error == "raise":
                    raise
                self.skipped += 1
                self.first_skipped = self.first_skipped or str(error)
                continue
            self._numbers.append(number)
            self._begins.append(begin)
            self._sizes.append(len(line))
            if checker is not None:
                self.prompts.append(checker.hash(row))
        if not self._numbers:
            raise ValueError(f"{file} holds no examples")
        self._opened = os.open(file, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # several threads may read at once: each says from where
        line = os.pread(self._opened, self._sizes[index], self._begins[index])
        return _row(partial(_json_row, line), f"{self.file}, line", self._numbers[index], None)

    def where(self, index: int) -> str:
        """`train.jsonl, line 250`."""
        return f"{self.file}, line {self._numbers[index]}"


@lru_cache(maxsize=FILES_KEPT)
def rows_on_disk(
    file: str, modified: int, on_error: str = "raise", checker: Any = None
) -> RowsOnDisk:
    """Reads the rows of a file on disk, as it is now; a start asks twice. modified: its time in
    nanoseconds."""
    return RowsOnDisk(file, on_error, checker)


# ---- in order


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
        if not self.files:
            raise ValueError(f"{files}: no file has such a name")
        for file in self.files:
            check_is_file(file)
        self.buffer = buffer
        # malformed rows that were passed over, by where they stand; and why the first of them
        self.skipped: set[str] = set()
        self.first_skipped = ""
        self._said = 0
        # cached results of checks of the files, by their settings
        self.known: dict = {}
        # rows of an epoch, once one has been read to its end
        self.num_rows: int | None = None
        self._kind = kind
        self._on_error = on_error
        self._checker = checker
        self._ahead: dict[tuple[int, int], ReadAhead] = {}

    def first(self, most: int) -> list[dict]:
        """The first rows of the first file. Raises ValueError if there is none."""
        rows = list(islice((read() for read in self._epoch()), most))
        if not rows:
            raise ValueError(self._empty())
        return rows

    def news(self) -> str:
        """Describes the malformed rows since the last call; "" if there are none."""
        num_skipped = len(self.skipped)
        if num_skipped == self._said:
            return ""
        self._said = num_skipped
        return f"{num_skipped:,} malformed rows left out so far, the first: {self.first_skipped}"

    def batch(
        self,
        batch_size: int,
        seed: int,
        step: int,
        why_not: Callable[[dict], str] | None = None,
    ) -> list[dict]:
        """Batch number `step`; the one after it is read meanwhile. Raises ValueError, with file and
        line, for a malformed row.

        why_not: why a row is not taken, or "", the same for all batches of a stream; None: all are.
        One that is not is left out as a malformed row is.
        """

        def batches_from(first: int) -> Iterator[list[dict]]:
            rows = self.rows_from(seed, first * batch_size, why_not)
            return (list(islice(rows, batch_size)) for _ in count())

        ahead = self._ahead.setdefault((batch_size, seed), ReadAhead())
        return ahead.batch(step, batches_from)

    def rows_from(
        self, seed: int, position: int, why_not: Callable[[dict], str] | None = None
    ) -> Iterator[dict]:
        """The endless stream of a seed, from a position on. why_not: as of `batch`."""
        left = position
        for epoch in count():
            # an epoch that was read before need not be read to be passed over
            if self.num_rows is not None and left >= self.num_rows:
                left -= self.num_rows
                continue
            rows = self._epoch(why_not)
            num_read = 0
            for number in count():
                block = list(islice(rows, self.buffer))
                num_read += len(block)
                # rows before the position are not even read
                if left >= len(block):
                    left -= len(block)
                else:
                    order = np.random.default_rng((seed, epoch, number)).permutation(len(block))
                    block = [read() for read in block]
                    yield from (block[i] for i in order[left:])
                    left = 0
                if len(block) < self.buffer:
                    break
            if not num_read:
                raise ValueError(self._empty())
            self.num_rows = num_read

    def _epoch(self, why_not: Callable[[dict], str] | None = None) -> Iterator[Callable[[], dict]]:
        """A function that reads it, for each row of all files. Where malformed rows are left out,
        a row must be read to know whether it counts."""
        for file in self.files:
            counted = _counted(file, self._kind)
            for number, read in KINDS[self._kind](file):
                reads = partial(_row, read, counted, number, self._checker)
                if self._on_error == "raise":
                    yield reads
                    continue
                try:
                    row = reads()
                    if why_not is not None and (why := why_not(row)):
                        raise ValueError(why)
                except ValueError as error:
                    self.skipped.add(f"{counted} {number}")
                    self.first_skipped = self.first_skipped or str(error)
                    continue
                yield lambda row=row: row

    def _empty(self) -> str:
        why = f"; the first row left out: {self.first_skipped}" if self.skipped else ""
        return f"{', '.join(self.files)[:400]} holds no examples{why}"


class ReadAhead:
    """Reads batches in their order: a thread reads the next one while the run makes a step.

    Example: ReadAhead().batch(3, batches_from) is next(batches_from(3)).
    """

    def __init__(self):
        # the step of the batch that is being read, the batches, and where it will be
        self._next: tuple[int, Iterator, Future] | None = None

    def batch(self, step: int, batches_from: Callable[[int], Iterator[list[dict]]]) -> list[dict]:
        """Batch number `step`. batches_from(step): the batches from there on; it is asked at the
        start, and for a step out of order. What reading raises is raised here."""
        # None until all went well: what failed is read again when it is asked for again
        known, self._next = self._next, None
        if known is None or known[0] != step:
            batches = batches_from(step)
            known = (step, batches, self._read(batches))
        _, batches, future = known
        batch = future.result()
        self._next = (step + 1, batches, self._read(batches))
        return batch

    def _read(self, batches: Iterator[list[dict]]) -> Future:
        future: Future = Future()

        def read() -> None:
            try:
                future.set_result(next(batches))
            except BaseException as error:
                future.set_exception(error)

        # A daemon: a file system that hangs must not keep the run from ending.
        threading.Thread(target=read, daemon=True).start()
        return future


# ---- is it the same data

# bytes of all files together that are read as a whole; of more, READ_BLOCKS blocks
READ_WHOLE = 2**32
READ_BLOCKS = 4096
# bytes
BLOCK = 2**20


def digest_of_files(files: Sequence[str]) -> str:
    """A digest of the sizes of all files and of their bytes; the same wherever the files lie.

    Of more than READ_WHOLE bytes it is of READ_BLOCKS blocks, evenly spread over all files as if
    they were one, the first and the last bytes among them.
    """
    stats = [os.stat(file) for file in files]
    return _digest_of_files(
        tuple((file, s.st_size, s.st_mtime_ns, s.st_ino) for file, s in zip(files, stats))
    )


@lru_cache(maxsize=FILES_KEPT)
def _digest_of_files(files: tuple[tuple[str, int, int, int], ...]) -> str:
    """files: (path, bytes, time in nanoseconds, inode). A start asks twice for the same."""
    sizes = [size for _, size, _, _ in files]
    digest = hashlib.sha256(json.dumps(sizes).encode())
    total = sum(sizes)
    spread = max(total - BLOCK, 0)
    is_whole = total <= READ_WHOLE
    starts = [] if is_whole else [i * spread // (READ_BLOCKS - 1) for i in range(READ_BLOCKS)]
    begin = 0
    for path, size, *_ in files:
        with open(path, "rb") as opened:
            if is_whole:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
            # A block may reach into the next file: only its part in this one is read here.
            here = slice(bisect_left(starts, begin - BLOCK), bisect_left(starts, begin + size))
            for start in starts[here]:
                first = max(start, begin)
                last = min(start + BLOCK, begin + size)
                if first < last:
                    opened.seek(first - begin)
                    digest.update(opened.read(last - first))
        begin += size
    return "bytes " + digest.hexdigest()[:16]


# ---- JSON lines


def lines_of(file: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers; ValueError for one that is
    not UTF-8.

    A line ends with a newline, with nothing else: JSON and texts may hold other separators (U+2028,
    U+0085).
    """
    for number, _, line in _raw_lines(file):
        yield number, _decoded(line, f"{file}, line {number}")


def _raw_lines(file: str | Path) -> Iterator[tuple[int, int, bytes]]:
    """(number, where it begins, bytes) of each line that is not blank."""
    end = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            end += len(line)
            if number == 1 and line.startswith(UTF_16):
                raise ValueError(f"{file}, line 1: UTF-16; save the file as UTF-8")
            if number == 1:
                # the mark that editors on Windows put before UTF-8 is no part of the first row
                line = line.removeprefix(codecs.BOM_UTF8)
            # White space need not be ASCII.
            if line.strip() and (not line.isspace() or line.decode(errors="replace").strip()):
                yield number, end - len(line), line


def _decoded(line: bytes, at: str) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}"
        raise ValueError(f"{at}: not UTF-8 ({byte})") from error


def json_of(line: str, at: str) -> Any:
    """The value in a line of JSON. Raises ValueError that begins with `at`, file and line."""
    too_deep = f"{at}: nested too deep: more than {DEEPEST} lists and objects in one another"
    try:
        value = json.loads(line)
    except ValueError as error:
        # JSONDecodeError, or an integer of more than 4300 digits
        raise ValueError(f"{at}: not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if line.count("[") + line.count("{") > DEEPEST and is_deeper(value, DEEPEST):
        raise ValueError(too_deep)
    return value


def _json_row(line: bytes, at: str) -> dict:
    row = json_of(_decoded(line, at), at)
    if not isinstance(row, dict):
        raise ValueError(
            f"{at}: not an object with named fields; each line is one, such as "
            '{"question": "1 + 2", "answer": "3"}'
        )
    return row


def _json_rows(file: str) -> Iterator[tuple[int, Callable[[str], dict]]]:
    for number, _, line in _raw_lines(file):
        yield number, partial(_json_row, line)


# ---- CSV


def _csv_rows(file: str) -> Iterator[tuple[int, Callable[[str], dict]]]:
    """The first line names the columns. All values are texts."""
    # a field may be as long as it likes
    csv.field_size_limit(sys.maxsize)
    # Bytes that are not UTF-8 become half characters, and are refused row by row.
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            names = next(reader, [])
            if not names:
                raise ValueError(
                    f"{file}, line 1: there are no columns; the first line names them, such as "
                    "question,answer"
                )
            if not all(names) or len({*names}) != len(names):
                raise ValueError(
                    f"{file}, line 1: the columns are {shortened(names)}; each needs a name of its "
                    "own"
                )
            number = reader.line_num + 1
            for values in reader:
                if values:
                    yield number, partial(_csv_row, names, values)
                # a value in quotes may go on over several lines
                number = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{file}, line {reader.line_num}: not CSV ({error})") from error


def _csv_row(names: list[str], values: list[str], at: str) -> dict:
    if len(values) != len(names):
        raise ValueError(f"{at}: {len(values)} values for {len(names)} columns")
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{at}: not UTF-8") from error
    return dict(zip(names, values))


# ---- Parquet


def _parquet_rows(file: str) -> Iterator[tuple[int, Callable[[str], dict]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(
            f"{file}: a Parquet file needs pyarrow: pip install -e '.[data]'"
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, lambda at, row=row: row
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file}: cannot be read as Parquet ({error})") from error


# kind -> a function: file -> (number of the line, a function that reads the row there) of each row
KINDS = {"jsonl": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
