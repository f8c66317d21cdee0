"""Files of rows, a dict a row: JSON lines and Parquet."""

import codecs
import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tunix_lite.basics.untrusted import parse_json
from tunix_lite.tasks.hub_rows import is_hub, rows_of_hub
from tunix_lite.tasks.row_forms import formed

# brackets in brackets that a row may have: what is written of it later must be readable, too
DEEPEST = 100


class RowChecker(Protocol):
    """Makes the example of a row. One that does the same compares equal."""

    def check(self, row: dict) -> dict:
        """The example that the row is or becomes. Raises ValueError for a malformed row."""


class _PlacedRow(dict):
    """A row of a file, which knows its place. What another process gets is a plain dict."""

    # a file may have millions of rows, all of which are in memory
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
    return example.place if isinstance(example, _PlacedRow) else ""


class Rows(list):
    """The rows of a file, each of which knows its line.
    Example: rows = Rows("train.jsonl"); rows[0] is a dict, rows[0].place is "train.jsonl, line 1".
    """

    def __init__(
        self,
        file: str,
        on_error: str = "raise",
        checker: RowChecker | None = None,
        fields: tuple[tuple[str, str], ...] = (),
        max_rows: int | None = None,
    ):
        """Raises ValueError, naming file and line, for a malformed row; with on_error=skip such
        rows are left out. fields: as of `formed`. max_rows: of the file, from its start; None:
        all."""
        self.file = file
        # number of rows that were left out, and the reason for the first
        self.skipped = 0
        self.first_skipped = ""
        # names of the forms of the rows, the first one first
        self.forms: list[str] = []
        counted = f"{file}, row"
        read = dict
        if is_hub(file):
            raws = rows_of_hub(file, max_rows is not None)
        elif file.endswith((".parquet", ".pq")):
            raws = parquet_rows(file)
        else:
            counted = f"{file}, line"
            read = json_row
            raws = _raw_lines(file)
        for number, raw in islice(raws, max_rows):
            try:
                form, row = formed(read(raw), fields)
                if form and form not in self.forms:
                    self.forms.append(form)
                if checker:
                    row = checker.check(row)
                row = _PlacedRow(row, counted, number)
            except ValueError as error:
                why = f"{counted} {number}: {error}"
                if on_error == "raise":
                    raise ValueError(why) from error
                self.skipped += 1
                self.first_skipped = self.first_skipped or why
            else:
                self.append(row)
        if not self:
            left_out = (
                f"; all {self.skipped} rows were left out, the first: {self.first_skipped}"
            )
            raise ValueError(f"{file} holds no examples{left_out if self.skipped else ''}")

    def part(self, places: Sequence[int]) -> "Rows":
        """Some of the rows, which keep their lines."""
        rows = copy.copy(self)
        rows[:] = [self[i] for i in places]
        return rows


def lines_of(file: str | Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers; ValueError for one that is not UTF-8."""
    for number, line in _raw_lines(file):
        try:
            yield number, _decoded(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error


def _raw_lines(file: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    for number, (_, line) in enumerate(lines_within(file), start=1):
        if line.strip():
            yield number, line


def lines_within(
    file: str | Path, begin: int = 0, end: float = math.inf
) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in these bytes, with the byte at which each does. ValueError: UTF-16."""
    # In bytes, a line ends with a newline alone: JSON and texts may hold U+2028 and U+0085.
    with open(file, "rb") as lines:
        # A line may end where the part begins.
        lines.seek(max(0, begin - 1))
        at = begin and begin - 1 + len(lines.readline())
        first = b"" if at else lines.peek(3)
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"{file}, line 1: UTF-16; save the file as UTF-8")
        # The mark that editors on Windows put before UTF-8 is no part of the first line.
        if first.startswith(codecs.BOM_UTF8):
            at = len(lines.read(3))
        while at < end and (line := lines.readline()):
            yield at, line
            at += len(line)


def _decoded(line: bytes) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}"
        raise ValueError(f"not UTF-8 ({byte})") from error


def json_row(line: bytes) -> dict:
    """The object in a line. Raises ValueError."""
    row = parse_json(_decoded(line), DEEPEST)
    if not isinstance(row, dict):
        raise ValueError(
            "not an object with named fields; each line is one, such as "
            '{"question": "1 + 2", "answer": "3"}'
        )
    return row


@contextlib.contextmanager
def _parquet(file: str) -> Iterator[Any]:
    """The file, opened by pyarrow, whose errors become ValueError."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(
            f"{file}: a Parquet file needs pyarrow: pip install -e '.[data]'"
        ) from error
    try:
        yield parquet.ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file}: cannot be read as Parquet ({error})") from error


def parquet_rows(
    file: str, groups: Sequence[int] | None = None, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, dict]]:
    """The rows of these row groups with these columns, those that there are, numbered from 1; None:
    all. Raises ValueError."""
    with _parquet(file) as opened:
        if columns is not None:
            # pyarrow leaves out a column that is not there; then all say what there is
            columns = [name for name in columns if name in opened.schema_arrow.names] or None
        batches = opened.iter_batches(row_groups=groups, columns=columns)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def parquet_groups(file: str) -> int:
    """Counts the row groups of a Parquet file. Raises ValueError."""
    with _parquet(file) as opened:
        return opened.num_row_groups
