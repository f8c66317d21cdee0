"""Files of rows, a dict a row: JSON lines, CSV and Parquet."""

import codecs
import csv
import glob
import hashlib
import json
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from tunix_lite.files.addresses import NO_ADDRESSES, is_address
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


class Rows(list):
    """The rows of a file, and in which of its lines each stands.

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
        self.lines = array("q")
        self.word = "row" if kind == "parquet" else "line"
        # how many rows were left out, and why the first of them
        self.skipped = 0
        self.first_skipped = ""
        # what was found out about all of them, by what was asked
        self.known: dict = {}
        for number, read in KINDS[kind](file):
            try:
                row = read(self._at(number))
                if checker is not None:
                    check_row(row, self._at(number), checker.check)
            except ValueError as error:
                if on_error == "raise":
                    raise
                self.skipped += 1
                self.first_skipped = self.first_skipped or str(error)
                continue
            self.append(row)
            self.lines.append(number)
        if not self:
            left_out = f"; all {self.skipped} rows were left out, the first: {self.first_skipped}"
            raise ValueError(f"{file} holds no examples{left_out if self.skipped else ''}")

    def where(self, index: int) -> str:
        """`train.jsonl, line 250`."""
        return self._at(self.lines[index])

    def part(self, places: Sequence[int]) -> "Rows":
        """Some of the rows, which keep their lines; `skipped` stays with the whole."""
        rows = Rows.__new__(Rows, ())
        list.__init__(rows, [self[i] for i in places])
        rows.file, rows.word = self.file, self.word
        rows.lines = array("q", [self.lines[i] for i in places])
        rows.skipped, rows.first_skipped, rows.known = 0, "", {}
        return rows

    def changed(self, change: Callable[[dict], dict], key: Any) -> "Rows":
        """Rows with change(row) for each row, which keep their lines; a start makes them once.

        key: what is equal where the change is the same.
        """
        if key not in self.known:
            rows = self.part(range(len(self)))
            rows[:] = [change(row) for row in self]
            rows.skipped, rows.first_skipped = self.skipped, self.first_skipped
            self.known[key] = rows
        return self.known[key]

    def _at(self, number: int) -> str:
        return f"{self.file}, {self.word} {number}"


class RowsOnDisk(Sequence):
    """The rows of a file with one JSON object a line that stays on disk: memory holds where each
    begins and a hash of its prompt, 32 bytes a row. Rows are read when they are asked for.

    Example: RowsOnDisk("train.jsonl")[250] is the same dict as Rows("train.jsonl")[250].
    """

    def __init__(self, file: str, on_error: str = "raise", checker: Any = None):
        """Reads the file once, and raises or skips as Rows does."""
        self.file = file
        self.lines = array("q")
        self.skipped = 0
        self.first_skipped = ""
        # what was made of these rows, such as a reader that is ahead
        self.known: dict = {}
        # a hash of each prompt, if a checker says what the prompt is
        self.prompts = array("q")
        self._begins = array("q")
        self._sizes = array("q")
        with open(file, "rb") as opened:
            self._find(opened, on_error, checker)
        if not self.lines:
            raise ValueError(f"{file} holds no examples")
        self._opened = os.open(file, os.O_RDONLY)

    def _find(self, opened: BinaryIO, on_error: str, checker: Any) -> None:
        begin = 0
        for number, line in enumerate(opened, start=1):
            place = begin
            begin += len(line)
            if number == 1:
                mark = mark_at_start(line, self.file)
                place += mark
                line = line[mark:]
            if not line.strip():
                continue
            at = f"{self.file}, line {number}"
            try:
                row = _json_row(line, at)
                if checker is not None:
                    check_row(row, at, checker.check)
            except ValueError as error:
                if on_error == "raise":
                    raise
                self.skipped += 1
                self.first_skipped = self.first_skipped or str(error)
                continue
            self.lines.append(number)
            if checker is not None:
                self.prompts.append(hash_of(checker.messages(row)))
            self._begins.append(place)
            self._sizes.append(len(line))

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # several threads may read at once: each says from where
        line = os.pread(self._opened, self._sizes[index], self._begins[index])
        return _json_row(line, self.where(index))

    def where(self, index: int) -> str:
        """`train.jsonl, line 250`."""
        return f"{self.file}, line {self.lines[index]}"


@lru_cache(maxsize=FILES_KEPT)
def rows_on_disk(
    file: str, modified: int, on_error: str = "raise", checker: Any = None
) -> RowsOnDisk:
    """As the file is now: a start asks twice. modified: its time in nanoseconds."""
    return RowsOnDisk(file, on_error, checker)


def mark_at_start(line: bytes, file: str) -> int:
    """Bytes of the mark that editors on Windows put before UTF-8; it is no part of the first row.
    Raises ValueError for the mark of UTF-16."""
    if line.startswith(UTF_16):
        raise ValueError(f"{file}, line 1: UTF-16; save the file as UTF-8")
    return len(codecs.BOM_UTF8) if line.startswith(codecs.BOM_UTF8) else 0


def hash_of(messages: Iterable) -> int:
    """Of a prompt, 64 bits; the same within one process."""
    return hash(tuple(messages))


def check_row(row: dict, at: str, check: Callable[[dict], Any]) -> None:
    """Calls check(row). Its ValueError begins with `at`, file and line, then."""
    try:
        check(row)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error


def rows_of(file: str, kind: str, on_error: str = "raise", checker: Any = None) -> Rows:
    """As the file is now: a start reads it twice, once to check the settings, and the second time
    finds it here. checker: see Rows; one that does the same must compare equal."""
    check_is_file(file)
    with open(file, "rb") as opened:
        content = hashlib.file_digest(opened, "blake2b").digest()
    return _rows_with(file, content, kind, on_error, checker)


def check_is_file(file: str) -> None:
    """Raises ValueError for a path that is no file, with what stands for several."""
    if Path(file).is_file():
        return
    if is_address(file):
        raise ValueError(f"{file}: {NO_ADDRESSES}")
    if "*" in file:
        count = len(glob.glob(file))
        raise ValueError(
            f"{file}: only files that are read in order may be several (this one matches {count}); "
            "set task.shuffle_buffer=10000 and task.held_out=FILE"
        )
    raise ValueError(f"{file} is not a file")


@lru_cache(maxsize=FILES_KEPT)
def _rows_with(file: str, content: bytes, kind: str, on_error: str, checker: Any) -> Rows:
    return Rows(file, kind, on_error, checker)


def where(examples: Sequence[dict], index: int) -> str:
    """Where example `index` stands: file and line, or its number."""
    return examples.where(index) if isinstance(examples, Rows | RowsOnDisk) else f"example {index}"


# ---- is it the same data

# bytes of all files together that are read as a whole; of more, READ_BLOCKS blocks
READ_WHOLE = 2**32
READ_BLOCKS = 4096
# bytes
BLOCK = 2**20
# how the digest of files begins, beside those that earlier versions made of some of the rows
OF_BYTES = "bytes "


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
            # of a block that reaches into the next file, what lies in this one
            here = slice(bisect_left(starts, begin - BLOCK), bisect_left(starts, begin + size))
            for start in starts[here]:
                first = max(start, begin)
                last = min(start + BLOCK, begin + size)
                if first < last:
                    opened.seek(first - begin)
                    digest.update(opened.read(last - first))
        begin += size
    return OF_BYTES + digest.hexdigest()[:16]


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
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line[mark_at_start(line, str(file)) :]
            # what is no ASCII may be white space, too
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
    try:
        value = json.loads(line)
    except ValueError as error:
        # JSONDecodeError, or an integer of more than 4300 digits
        raise ValueError(f"{at}: not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(
            f"{at}: nested too deep: more than {DEEPEST} lists and objects in one another"
        ) from error
    if line.count("[") + line.count("{") > DEEPEST and _is_deeper(value, DEEPEST):
        raise ValueError(
            f"{at}: nested too deep: more than {DEEPEST} lists and objects in one another"
        )
    return value


def _is_deeper(value, depth: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(
        _is_deeper(item, depth - 1) for item in inside if isinstance(item, dict | list)
    )


def _json_rows(file: str) -> Iterator[tuple[int, Callable[[str], dict]]]:
    for number, line in _raw_lines(file):
        yield number, lambda at, line=line: _json_row(line, at)


def _json_row(line: bytes, at: str) -> dict:
    row = json_of(_decoded(line, at), at)
    if not isinstance(row, dict):
        raise ValueError(
            f"{at}: not an object with named fields; each line is one, such as "
            '{"question": "1 + 2", "answer": "3"}'
        )
    return row


# ---- CSV


def _csv_rows(file: str) -> Iterator[tuple[int, Callable[[str], dict]]]:
    """The first line names the columns. All values are texts."""
    # a field may be as long as it likes
    csv.field_size_limit(sys.maxsize)
    # what is not UTF-8 becomes half characters, and is refused row by row
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
                    yield number, lambda at, values=values: _csv_row(names, values, at)
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
            f"{file}: a Parquet file needs pyarrow: pip install 'tunix_lite[data]'"
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
