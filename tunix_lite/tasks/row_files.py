"""Files of rows, a dict a row: JSON lines, CSV and Parquet; in memory, or read in order.

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
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tunix_lite.files.addresses import NO_ADDRESSES, is_address
from tunix_lite.files.plain_text import shortened
from tunix_lite.files.untrusted import is_deeper

ON_ERROR = ("raise", "skip")
# brackets in brackets that a row may have: what is written of it later must be readable, too
DEEPEST = 100
# files read at once, though a start asks for them twice
FILES_KEPT = 4
UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
# bytes of all files together that are digested as a whole; of more, READ_BLOCKS blocks
READ_WHOLE = 2**32
READ_BLOCKS = 4096
# bytes
BLOCK = 2**20

# reads one row; its argument is the place of the row, for messages
ReadRow = Callable[[str], dict]


class RowChecker(Protocol):
    """Makes the example of a row. One that does the same compares equal."""

    def check(self, row: dict) -> dict:
        """The example that the row is or becomes. Raises ValueError for a malformed row."""


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

    def __reduce__(self):
        return dict, (dict(self),)


def place_of(example: Mapping) -> str:
    """File and line of an example; "" for one that is not of a file."""
    return example.place if isinstance(example, PlacedRow) else ""


def _readers(
    file: str, kind: str, checker: RowChecker | None
) -> Iterator[tuple[str, Callable[[], PlacedRow]]]:
    """The place of each row, and a function that reads it. It raises ValueError with the place."""
    counted = f"{file}, {'row' if kind == 'parquet' else 'line'}"

    def row_at(number: int, read: ReadRow) -> PlacedRow:
        at = f"{counted} {number}"
        values = read(at)
        try:
            return PlacedRow(checker.check(values) if checker else values, counted, number)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from error

    for number, read in KINDS[kind](file):
        yield f"{counted} {number}", partial(row_at, number, read)


# ---- in memory


class Rows(list):
    """The rows of a file, each of which knows its line.

    Example: rows = Rows("train.jsonl"); rows[0] is a dict, rows[0].place is "train.jsonl, line 1".
    """

    def __init__(
        self,
        file: str,
        kind: str = "jsonl",
        on_error: str = "raise",
        checker: RowChecker | None = None,
    ):
        """Raises ValueError, naming file and line, for a malformed row; with on_error=skip such
        rows are left out. kind: one of KINDS."""
        self.file = file
        # number of rows that were left out, and the reason for the first
        self.skipped = 0
        self.first_skipped = ""
        # cached results of checks of all rows, by their settings
        self.known: dict = {}
        for _, read in _readers(file, kind, checker):
            try:
                self.append(read())
            except ValueError as error:
                if on_error == "raise":
                    raise
                self.skipped += 1
                self.first_skipped = self.first_skipped or str(error)
        if not self:
            left_out = (
                f"; all {self.skipped} rows were left out, the first: {self.first_skipped}"
            )
            raise ValueError(f"{file} holds no examples{left_out if self.skipped else ''}")

    def part(self, places: Sequence[int]) -> "Rows":
        """Some of the rows, which keep their lines; `skipped` stays with the whole."""
        rows = Rows.__new__(Rows)
        rows.extend(self[i] for i in places)
        rows.file = self.file
        rows.skipped = 0
        rows.first_skipped = ""
        rows.known = {}
        return rows


def rows_of(
    file: str, kind: str, on_error: str = "raise", checker: RowChecker | None = None
) -> Rows:
    """Reads the rows of a file, as it is now; the second time a start finds them here."""
    _check_is_file(file)
    with open(file, "rb") as opened:
        content = hashlib.file_digest(opened, "blake2b").digest()
    return _rows_with(file, content, kind, on_error, checker)


@lru_cache(maxsize=FILES_KEPT)
def _rows_with(
    file: str, content: bytes, kind: str, on_error: str, checker: RowChecker | None
) -> Rows:
    return Rows(file, kind, on_error, checker)


def _check_is_file(file: str) -> None:
    """Raises ValueError for a path that is no file, with what stands for several."""
    if Path(file).is_file():
        return
    if is_address(file):
        raise ValueError(f"{file}: {NO_ADDRESSES}")
    if "*" in file:
        raise ValueError(
            f"{file}: only files that are read in order may be several (this one matches "
            f"{len(glob.glob(file))}); set task.shuffle_buffer=10000 and task.held_out=FILE"
        )
    raise ValueError(f"{file} is not a file")


# ---- in order


class RowStream:
    """The rows of one or several files, in the order of the files. Memory holds a buffer of rows.

    Example: RowStream("parts/*.jsonl", 10_000).batch(16, seed=0, step=3) is the fourth batch.
    """

    def __init__(
        self,
        files: str,
        buffer: int,
        kind: str = "jsonl",
        on_error: str = "raise",
        checker: RowChecker | None = None,
    ):
        """files: a path, in which * stands for anything; the names are sorted. Raises ValueError if
        there is no such file."""
        self.files = sorted(glob.glob(files)) if "*" in files else [files]
        if not self.files:
            raise ValueError(f"{files}: no file has such a name")
        for file in self.files:
            _check_is_file(file)
        self.buffer = buffer
        self.known: dict = {}
        # malformed rows that were passed over, by where they stand; and why the first of them
        self.skipped: set[str] = set()
        self.first_skipped = ""
        self._num_reported = 0
        # rows of an epoch, once one has been read to its end
        self.num_rows: int | None = None
        self._kind = kind
        self._on_error = on_error
        self._checker = checker
        # the next step and the rows from there on, by batch size and seed
        self._next: dict[tuple[int, int], tuple[int, Iterator[dict]]] = {}

    def first(self, most: int) -> list[dict]:
        """The first rows of the first file. Raises ValueError if there is none."""
        rows = list(islice((read() for read in self._epoch()), most))
        if not rows:
            raise ValueError(self._empty())
        return rows

    def news(self) -> str:
        """Describes the malformed rows since the last call; "" if there are none."""
        num_skipped = len(self.skipped)
        if num_skipped == self._num_reported:
            return ""
        self._num_reported = num_skipped
        return f"{num_skipped:,} malformed rows left out so far, the first: {self.first_skipped}"

    def batch(
        self,
        batch_size: int,
        seed: int,
        step: int,
        why_not: Callable[[dict], str] | None = None,
    ) -> list[dict]:
        """Batch number `step`. Raises ValueError, with file and line, for a malformed row.

        why_not: why a row is not taken, or "", the same for all batches of a stream; None: all are.
        One that is not is left out as a malformed row is.
        """
        # gone until all went well: what failed is read again when it is asked for again
        next_step, rows = self._next.pop((batch_size, seed), (-1, iter(())))
        if next_step != step:
            rows = self._rows_from(seed, step * batch_size, why_not)
        batch = list(islice(rows, batch_size))
        self._next[batch_size, seed] = step + 1, rows
        return batch

    def _rows_from(
        self, seed: int, left: int, why_not: Callable[[dict], str] | None
    ) -> Iterator[dict]:
        """The endless stream of a seed after the first `left` rows."""
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

    def _epoch(
        self, why_not: Callable[[dict], str] | None = None
    ) -> Iterator[Callable[[], dict]]:
        """A function that reads it, for each row of all files. Where malformed rows are left out,
        a row must be read to know whether it counts."""
        for file in self.files:
            for place, read in _readers(file, self._kind, self._checker):
                if self._on_error == "raise":
                    yield read
                    continue
                try:
                    row = read()
                    if why_not is not None and (why := why_not(row)):
                        raise ValueError(why)
                except ValueError as error:
                    self.skipped.add(place)
                    self.first_skipped = self.first_skipped or str(error)
                    continue
                yield lambda row=row: row

    def _empty(self) -> str:
        why = f"; the first row left out: {self.first_skipped}" if self.skipped else ""
        return f"{', '.join(self.files)[:400]} holds no examples{why}"


def digest_of_files(files: Sequence[str]) -> str:
    """A digest of the sizes of all files and of their bytes; the same wherever the files lie.

    Of more than READ_WHOLE bytes it is of READ_BLOCKS blocks, evenly spread over all files as if
    they were one, the first and the last bytes among them.
    """
    sizes = [os.stat(file).st_size for file in files]
    digest = hashlib.sha256(json.dumps(sizes).encode())
    spread = max(sum(sizes) - BLOCK, 0)
    is_whole = sum(sizes) <= READ_WHOLE
    starts = [] if is_whole else [i * spread // (READ_BLOCKS - 1) for i in range(READ_BLOCKS)]
    begin = 0
    for file, size in zip(files, sizes):
        with open(file, "rb") as opened:
            if is_whole:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
            # A block may reach into the next file: only its part in this one is read here.
            here = slice(bisect_left(starts, begin - BLOCK), bisect_left(starts, begin + size))
            for start in starts[here]:
                first = max(start, begin)
                last = min(start + BLOCK, begin + size)
                opened.seek(first - begin)
                digest.update(opened.read(max(last - first, 0)))
        begin += size
    return "bytes " + digest.hexdigest()[:16]


# ---- JSON lines


def lines_of(file: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers; ValueError for one that is
    not UTF-8.

    A line ends with a newline, with nothing else: JSON and texts may hold other separators (U+2028,
    U+0085).
    """
    for number, line in _raw_lines(file):
        yield number, _decoded(line, f"{file}, line {number}")


def _raw_lines(file: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.startswith(UTF_16):
                raise ValueError(f"{file}, line 1: UTF-16; save the file as UTF-8")
            if number == 1:
                # the mark that editors on Windows put before UTF-8 is no part of the first row
                line = line.removeprefix(codecs.BOM_UTF8)
            # White space need not be ASCII.
            if line.strip() and (not line.isspace() or line.decode(errors="replace").strip()):
                yield number, line


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


def _json_rows(file: str) -> Iterator[tuple[int, ReadRow]]:
    for number, line in _raw_lines(file):
        yield number, partial(_json_row, line)


# ---- CSV and Parquet


def _csv_rows(file: str) -> Iterator[tuple[int, ReadRow]]:
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


def _parquet_rows(file: str) -> Iterator[tuple[int, ReadRow]]:
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
