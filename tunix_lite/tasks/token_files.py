"""Text files become files of tokens, once, and those become rows that are full.

The text is cut into parts of some megabytes. Each part is tokenised by one process, and kept in the
folder of a cache under a name that says what it was made of. So a later start finds it, every
process finds the parts of all, and nobody has to remember a position: row i of n is a place in the
files.

Example: documents `a b c` and `d e`, an end token of 1, rows of 4 tokens. The tokens are a b c 1 d
e 1; row 0 is `a b c 1` and row 1 is `1 d e 1`. A row begins with the last token of the one before,
which predicts its second: each token is learned once in a pass over the rows."""

import contextlib
import hashlib
import json
import os
import re
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tunix_lite.basics.addresses import NO_ADDRESSES, is_address
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.tasks.messages import fields_of
from tunix_lite.tasks.row_files import KINDS, parquet_groups, parquet_rows

# bytes of text in a part of a file; of Parquet, a row group is one
PART_BYTES = 2**25
# bytes of text that are tokenised together
AT_ONCE = 2**20
# seconds without a new part of another process after which this one makes the part itself
PATIENCE = 120.0
FORMATS = (".jsonl", ".txt", ".parquet")
# another number makes the tokens anew
VERSION = 1


class _Part(NamedTuple):
    """A part of a file: the documents that begin in these bytes, or these row groups."""

    file: str
    number: int  # of the file
    begin: int
    end: int
    is_last: bool  # of its file


class _Piece(NamedTuple):
    """A text to be tokenised: a document, or a piece of one that is a whole file."""

    place: str
    text: str
    number: int  # of the document: in its part, or of the file that it is
    is_start: bool = True
    is_end: bool = True


def files_of(pattern: str) -> list[str]:
    """The files that a path or a pattern such as `corpus/*.txt` names, sorted. Raises
    ValueError."""
    if is_address(pattern):
        raise ValueError(f"{pattern}: {NO_ADDRESSES}")
    path = Path(pattern).expanduser()
    files = [str(path)] if path.is_file() else sorted(glob(str(path), recursive=True))
    if not files:
        raise ValueError(f"{pattern} names no file")
    for file in files:
        if not file.endswith(FORMATS) or not Path(file).is_file():
            raise ValueError(
                f"{file} is no text file; its name ends with {', '.join(FORMATS)}"
            )
    return files


@dataclass(frozen=True)
class TokenFiles:
    """The tokens of text files, made by all processes together and kept in a folder.
    Example: TokenFiles("corpus.jsonl", tokenizer, Path("cache")).rows("train", 1024)[0]."""

    pattern: str  # of the files
    tokenizer: Tokenizer
    cache: Path
    field: str = "text"
    separator: str | None = None
    special_tokens_in_data: str = "text"
    # so many documents have one that is held out; 0: none
    held_out_every: int = 0
    # of the process, and how many there are
    process: tuple[int, int] = (0, 1)

    @cached_property
    def parts(self) -> list[_Part]:
        """The parts of all files, in order; the same on any number of processes."""
        parts = []
        for number, file in enumerate(files_of(self.pattern)):
            is_parquet = file.endswith(".parquet")
            size = parquet_groups(file) if is_parquet else Path(file).stat().st_size
            step = 1 if is_parquet else PART_BYTES
            for begin in range(0, size, step):
                end = min(begin + step, size)
                parts.append(_Part(file, number, begin, end, end == size))
        return parts

    @cached_property
    def folder(self) -> Path:
        """The folder of these tokens; its name says what they were made of."""
        files = [
            (Path(file).name, (seen := os.stat(file)).st_size, seen.st_mtime_ns)
            for file in files_of(self.pattern)
        ]
        tokens = [self.tokenizer.backend.to_str(), self.tokenizer.start_ids, self.dtype.name]
        about = [VERSION, PART_BYTES, self.field, self.separator, self.special_tokens_in_data]
        made_of = json.dumps(
            [files, *tokens, self.tokenizer.end_id, *about, self.held_out_every]
        )
        return self.cache / hashlib.sha256(made_of.encode()).hexdigest()[:16]

    @cached_property
    def dtype(self) -> np.dtype:
        """The type of a token in the files."""
        last = max(self.tokenizer.vocabulary.values())
        return np.dtype(np.uint16 if last < 2**16 else np.uint32)

    def rows(self, split: str, width: int) -> "TokenRows":
        """The rows of a split, `train` or `held_out`, of `width` tokens each. The first call makes
        what is missing of the tokens. Raises ValueError, with the place, for a malformed document;
        OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        index, count = self.process
        numbers = range(len(self.parts))
        own = set(numbers[index::count])
        last_seen = time.monotonic()
        for i in sorted(numbers, key=lambda i: i not in own):
            # another process makes it, or, if nothing comes from there, this one
            is_mine = False
            while not self._about(i).is_file():
                is_mine = i in own or time.monotonic() - last_seen > PATIENCE
                if is_mine:
                    self._make(i)
                else:
                    time.sleep(0.05)
            if not is_mine:
                last_seen = time.monotonic()
        about = [json.loads(self._about(i).read_text()) for i in numbers]
        return TokenRows(self.folder, split, width, self.dtype, [one[split] for one in about])

    @property
    def num_made(self) -> int:
        """Counts the parts whose tokens are there."""
        return sum(self._about(i).is_file() for i in range(len(self.parts)))

    def _about(self, part: int) -> Path:
        return self.folder / f"{part:06d}.json"

    def _make(self, number: int) -> None:
        """Tokenises a part. Its json file comes last, and whole."""
        unique = f".{os.uname().nodename}-{os.getpid()}"
        splits = ("train", "held_out")
        paths = {split: self.folder / f"{number:06d}.{split}" for split in splits}
        ends: dict[str, list[int]] = {split: [] for split in splits}
        totals = dict.fromkeys(splits, 0)
        hashes = {split: hashlib.blake2b(digest_size=8) for split in splits}
        with contextlib.ExitStack() as at_end:
            files = {
                split: at_end.enter_context(open(f"{path}.tokens{unique}", "wb"))
                for split, path in paths.items()
            }
            for pieces in _together(self._pieces(self.parts[number])):
                for piece, ids in zip(pieces, self._tokens(pieces)):
                    every = self.held_out_every
                    split = splits[bool(every) and (piece.number + 1) % every == 0]
                    data = np.array(ids, self.dtype).tobytes()
                    files[split].write(data)
                    hashes[split].update(data)
                    totals[split] += len(ids)
                    if piece.is_end:
                        ends[split].append(totals[split])
        about = {}
        for split, path in paths.items():
            os.replace(f"{path}.tokens{unique}", f"{path}.tokens")
            of_ends = np.array(ends[split], np.int64)
            of_ends.tofile(f"{path}.ends{unique}")
            os.replace(f"{path}.ends{unique}", f"{path}.ends")
            about[split] = {
                "tokens": totals[split],
                "documents": len(of_ends),
                "digest": hashes[split].hexdigest(),
            }
        written = Path(f"{self._about(number)}{unique}")
        written.write_text(json.dumps(about))
        os.replace(written, self._about(number))

    def _tokens(self, pieces: list[_Piece]) -> Iterator[list[int]]:
        texts = [piece.text for piece in pieces]
        how = self.special_tokens_in_data
        try:
            encoded = self.tokenizer.documents(texts, how)
        except ValueError:
            # which one it is
            for piece in pieces:
                try:
                    self.tokenizer.documents([piece.text], how)
                except ValueError as error:
                    raise ValueError(f"{piece.place}: {error}") from error
            raise
        for piece, ids in zip(pieces, encoded):
            before = self.tokenizer.start_ids if piece.is_start else ()
            yield [*before, *ids, *([self.tokenizer.end_id] if piece.is_end else [])]

    def _pieces(self, part: _Part) -> Iterator[_Piece]:
        """The texts of a part that are not blank."""
        if part.file.endswith(".txt") and self.separator is None:
            yield from _pieces_of_file(part)
            return
        number = 0
        for place, text in self._documents(part):
            if text.strip():
                yield _Piece(place, text, number)
                number += 1

    def _documents(self, part: _Part) -> Iterator[tuple[str, str]]:
        """The documents of a part, with their places."""
        if part.file.endswith(".parquet"):
            groups = range(part.begin, part.end)
            for i, row in parquet_rows(part.file, groups, [self.field]):
                place = f"{part.file}, row {i} of group {part.begin + 1}"
                yield place, _text_of(row, self.field, place)
            return
        is_text = part.file.endswith(".txt")
        separator = self.separator if is_text else "\n"
        read_json = KINDS["jsonl"][1]
        for start, data in _separated(part, separator.encode()):
            place = f"{part.file}, byte {start}"
            if not is_text and data.strip():
                try:
                    row = read_json(data)
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from error
                yield place, _text_of(row, self.field, place)
            elif is_text:
                yield place, _decoded(data, place)


def _text_of(row: dict, field: str, place: str) -> str:
    text = row.get(field)
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: no text in {field!r}; the row has {fields_of(row)}: task.field=NAME says "
            "which field is the text"
        )
    return text


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 (byte {error.start} from there)") from error


def _separated(part: _Part, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """The texts between separators that begin in the part, with their first bytes. Where several
    newlines separate, more of them do, too: so each part finds the same separators."""
    pattern = re.escape(separator)
    if separator == separator[:1] * len(separator):
        pattern = re.escape(separator[:1]) + b"{%d,}" % len(separator)
    between = re.compile(pattern)
    with open(part.file, "rb") as file:
        # a separator may end where the part begins
        at = max(0, part.begin - len(separator))
        file.seek(at)
        data = file.read(part.end - at)
        start = 0
        if part.begin:
            before = between.search(data)
            if before is None:
                return
            start = before.end()
        elif data.startswith(BOM_UTF8):
            start = len(BOM_UTF8)
        while at + start < part.end:
            after = between.search(data, start)
            # a run of separators may go on behind what was read, and a text does
            while (after is None or after.end() == len(data)) and (more := file.read(AT_ONCE)):
                data = data[start:] + more
                at += start
                start = 0
                after = between.search(data)
            yield at + start, data[start : after.start() if after else len(data)]
            if after is None:
                return
            start = after.end()


def _pieces_of_file(part: _Part) -> Iterator[_Piece]:
    """The text of a part of a file that is one document, in pieces of whole lines."""
    with open(part.file, "rb") as file:
        # a line that begins before the part is of the part before
        file.seek(max(0, part.begin - 1))
        if part.begin:
            file.readline()
        is_start = not part.begin
        is_end = False
        while not is_end:
            begin = file.tell()
            place = f"{part.file}, byte {begin}"
            lines = file.readlines(min(AT_ONCE, part.end - begin)) if begin < part.end else []
            data = b"".join(lines)
            is_end = file.tell() >= part.end
            if is_start:
                data = data.removeprefix(BOM_UTF8)
            if data or part.is_last:
                ends = is_end and part.is_last
                yield _Piece(place, _decoded(data, place), part.number, is_start, ends)
            is_start = False


def _together(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in lists of about AT_ONCE characters."""
    some: list[_Piece] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.text)
        if size >= AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


class TokenRows(Sequence):
    """The rows of a split, as examples that say their place. Tokens stay on the disk.
    Example: rows[5] is {"row": 5, "split": "train"}, and rows.tokens(5) are its tokens."""

    def __init__(
        self, folder: Path, split: str, width: int, dtype: np.dtype, about: list[dict]
    ):
        """about: `tokens`, `documents` and `digest` of each part."""
        self.split = split
        self.width = width
        self.num_documents = sum(part["documents"] for part in about)
        # of the tokens; the same for the same files and tokenizer
        self.digest = hashlib.sha256(repr([width, *about]).encode()).hexdigest()[:16]
        self._dtype = dtype
        self._files = [str(folder / f"{i:06d}.{split}") for i in range(len(about))]
        # the first token of each part, and the number of all
        self._starts = np.cumsum([0, *(part["tokens"] for part in about)])
        self._ends: dict[int, np.ndarray] = {}

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of all documents, with those that begin and end them."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        # the first token is predicted by nothing
        return -(-max(0, self.num_tokens - 1) // (self.width - 1))

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {"row": int(index), "split": self.split}

    def _pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """(part, its first token, how many) of a row."""
        begin = row * (self.width - 1)
        end = min(begin + self.width, self.num_tokens)
        part = int(np.searchsorted(self._starts, begin, side="right")) - 1
        while begin < end:
            count = min(end, int(self._starts[part + 1])) - begin
            if count:
                yield part, begin - int(self._starts[part]), count
            begin += count
            part += 1

    def tokens(self, row: int) -> np.ndarray:
        """The tokens of a row, int32; the last row may have fewer than `width`."""
        # not mapped: pages of a mapped file would count as memory of the process
        read = [
            np.fromfile(
                f"{self._files[part]}.tokens",
                self._dtype,
                count,
                offset=start * self._dtype.itemsize,
            )
            for part, start, count in self._pieces(row)
        ]
        return np.concatenate(read).astype(np.int32)

    def segment_ids(self, row: int) -> np.ndarray:
        """The number of each token's document in its row, from 1, int32."""
        segments = []
        before = 0
        for part, start, count in self._pieces(row):
            if part not in self._ends:
                file = f"{self._files[part]}.ends"
                is_empty = not os.path.getsize(file)
                self._ends[part] = (
                    np.zeros(0, np.int64) if is_empty else np.memmap(file, np.int64, "r")
                )
            ends = self._ends[part]
            # documents that end before each token of the row
            first = np.searchsorted(ends, start, side="right")
            here = np.arange(start, start + count)
            ended = np.searchsorted(ends, here, side="right") - first
            segments.append(before + ended)
            before += int(np.searchsorted(ends, start + count, side="right") - first)
        return (1 + np.concatenate(segments)).astype(np.int32)
