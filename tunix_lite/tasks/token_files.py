"""Text files become files of tokens, once, and those become rows that are full.

The text is cut into parts. Each is tokenised by one process, and kept in a folder whose name says
what it was made of. So a later start finds it, and so does every other process, and nobody has to
remember a position: row i is a place in the files.

Example: documents `a b c` and `d e`, an end token of 1, rows of 4 tokens. The tokens are a b c 1 d
e 1; row 0 is `a b c 1` and row 1 is `1 d e 1`. A row begins with the last token of the one before,
which predicts its second: each token is learned once in a pass over the rows."""

import hashlib
import json
import os
import re
import tempfile
import time
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tunix_lite.basics.addresses import NO_ADDRESSES, is_address
from tunix_lite.basics.plain_text import shortened
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.tasks.messages import fields_of
from tunix_lite.tasks.row_files import KINDS, parquet_groups, parquet_rows

# bytes of text in a part of a file; of Parquet, a row group is one
PART_BYTES = 2**25
# documents that are tokenised together
AT_ONCE = 128
# bytes that are read beyond a part, and of a piece of a file that is one document
MORE = 2**18
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
    is_start: bool = True
    is_end: bool = True


def files_of(pattern: str) -> list[str]:
    """The files that a path or a pattern such as `corpus/*.txt` names, sorted. Raises
    ValueError."""
    path = Path(pattern).expanduser()
    files = [str(path)] if path.is_file() else sorted(glob(str(path), recursive=True))
    if not files:
        why = f": {NO_ADDRESSES}" if is_address(pattern) else " names no file"
        raise ValueError(f"{pattern}{why}")
    for file in files:
        if not file.endswith(FORMATS):
            many = "; name files in it by a pattern, '*.jsonl'" if os.path.isdir(file) else ""
            raise ValueError(
                f"{file} is no text file: its name must end with {', '.join(FORMATS)}{many}"
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
    # one document in so many is held out; 0: none
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
    def folders(self) -> list[Path]:
        """The folder of each part's tokens."""
        stats = ((Path(file).name, os.stat(file)) for file in files_of(self.pattern))
        files = [(name, seen.st_size, seen.st_mtime_ns) for name, seen in stats]
        tokenizer = self.tokenizer
        tokens = [tokenizer.backend.to_str(), tokenizer.start_ids, tokenizer.end_id]
        cut = [self.field, self.separator, self.special_tokens_in_data, self.held_out_every]
        made_of = json.dumps([VERSION, PART_BYTES, files, tokens, cut])
        folder = self.cache / hashlib.sha256(made_of.encode()).hexdigest()[:16]
        return [folder / f"{i:06d}" for i in range(len(self.parts))]

    def texts(self, limit: int | None) -> Iterator[str]:
        """Texts of documents, `limit` or a few more of them, as many of each part; None: all. Of a
        file that is one document, its pieces."""
        each = None if limit is None else -(-limit // max(1, len(self.parts)))
        for part in self.parts:
            yield from (piece.text for piece in islice(self._pieces(part), each))

    @property
    def num_made(self) -> int:
        """Counts the parts whose tokens are there."""
        return sum(folder.is_dir() for folder in self.folders)

    def rows(self, split: str, width: int) -> "TokenRows":
        """The rows of a split, `train` or `held_out`, of `width` tokens each. The first call makes
        what is missing of the tokens. Raises ValueError, with the place, for a malformed document,
        or if the cache cannot be written; OSError."""
        index, count = self.process
        last_seen = time.monotonic()
        for i in sorted(range(len(self.parts)), key=lambda i: i % count != index):
            # another process makes it, or, if nothing comes from there, this one
            is_own = i % count == index
            while not self.folders[i].is_dir():
                is_own |= time.monotonic() - last_seen > PATIENCE
                if is_own:
                    self.make(i)
                else:
                    time.sleep(0.05)
            last_seen = last_seen if is_own else time.monotonic()
        return TokenRows(self.folders, split, width)

    def make(self, number: int) -> None:
        """Tokenises a part. Its folder comes whole, of whoever is first. Raises as `rows`."""
        splits = ("train", "held_out")
        tokens = {split: array("i") for split in splits}
        ends = {split: array("q") for split in splits}
        part = self.parts[number]
        # a file that is one document counts as one; else those of a part do
        count = part.number if self._is_whole(part) else 0
        pieces = self._pieces(part)
        while some := list(islice(pieces, AT_ONCE)):
            texts = [piece.text for piece in some]
            try:
                encoded = self.tokenizer.documents(texts, self.special_tokens_in_data)
            except ValueError as error:
                raise ValueError(f"{some[0].place} and after: {error}") from error
            for piece, ids in zip(some, encoded):
                every = self.held_out_every
                split = splits[bool(every) and (count + 1) % every == 0]
                tokens[split].extend(self.tokenizer.start_ids if piece.is_start else ())
                tokens[split].extend(ids)
                if piece.is_end:
                    tokens[split].append(self.tokenizer.end_id)
                    ends[split].append(len(tokens[split]))
                    count += 1

        folder = self.folders[number]
        about = {}
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                dir=folder.parent, ignore_cleanup_errors=True
            ) as made:
                for split in splits:
                    Path(made, f"{split}.tokens").write_bytes(tokens[split])
                    Path(made, f"{split}.ends").write_bytes(ends[split])
                    digest = hashlib.blake2b(tokens[split], digest_size=8).hexdigest()
                    about[split] = [len(tokens[split]), len(ends[split]), digest]
                Path(made, "about.json").write_text(json.dumps(about))
                os.chmod(made, 0o755)
                try:
                    os.rename(made, folder)
                except OSError:
                    # another process was first; or something else has the name
                    if not folder.is_dir():
                        raise
        except OSError as error:
            raise ValueError(
                f"task.cache={self.cache} cannot be written: {error.strerror}"
            ) from error

    def _is_whole(self, part: _Part) -> bool:
        """Returns whether the file of the part is one document."""
        return part.file.endswith(".txt") and self.separator is None

    def _pieces(self, part: _Part) -> Iterator[_Piece]:
        """The documents of a part that are not blank, or pieces of its only one."""
        if self._is_whole(part):
            yield from _pieces_of_file(part)
            return
        if part.file.endswith(".txt"):
            for place, data in _separated(part, self.separator.encode()):
                if data.strip():
                    yield _Piece(place, _decoded(data, place))
            return
        read = dict
        rows = _separated(part, b"\n")
        if part.file.endswith(".parquet"):
            numbered = parquet_rows(part.file, [part.begin], [self.field])
            group = f"{part.file}, group {part.begin + 1}, row"
            rows = ((f"{group} {i}", row) for i, row in numbered)
        else:
            read = KINDS["jsonl"][1]
        for place, row in rows:
            # a line of JSON may be blank
            if not (row.strip() if isinstance(row, bytes) else row):
                continue
            try:
                row = read(row)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            text = row.get(self.field)
            if not isinstance(text, str):
                if self.field in row:
                    raise ValueError(
                        f"{place}: {self.field!r} holds {shortened(text)}, which is no text"
                    )
                raise ValueError(
                    f"{place}: no {self.field!r}; the row has {fields_of(row)}: "
                    "task.field=NAME says which field is the text"
                )
            if text.strip():
                yield _Piece(place, text)


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 (byte {error.start} from there)") from error


def _separated(part: _Part, separator: bytes) -> Iterator[tuple[str, bytes]]:
    """The texts between separators that begin in the part, with their places. Where several
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
        start = len(BOM_UTF8) if not at and data.startswith(BOM_UTF8) else 0
        if part.begin:
            before = between.search(data)
            start = before.end() if before else len(data)
        while at + start < part.end:
            after = between.search(data, start)
            # a run of separators may go on behind what was read, and a text does
            while (after is None or after.end() == len(data)) and (more := file.read(MORE)):
                data = data[start:] + more
                at += start
                start = 0
                after = between.search(data)
            yield f"{part.file}, byte {at + start}", data[start : after and after.start()]
            start = after.end() if after else len(data) + part.end


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
            lines = file.readlines(min(MORE, part.end - begin)) if begin < part.end else []
            data = b"".join(lines)
            data = data.removeprefix(BOM_UTF8) if is_start else data
            is_end = file.tell() >= part.end
            if data or part.is_last:
                ends = is_end and part.is_last
                yield _Piece(place, _decoded(data, place), is_start, ends)
            is_start = False


class TokenRows(Sequence):
    """The rows of a split, as examples that say their place. Tokens stay on the disk.
    Example: rows[5] is {"row": 5, "split": "train"}, and rows.tokens(5) are its tokens."""

    def __init__(self, folders: list[Path], split: str, width: int):
        """folders: of the parts. width: tokens of a row."""
        self.split = split
        self.width = width
        self._files = [str(folder / split) for folder in folders]
        about = [json.loads((folder / "about.json").read_text())[split] for folder in folders]
        self.num_documents = sum(documents for _, documents, _ in about)
        # of the tokens; the same for the same files and tokenizer
        self.digest = hashlib.sha256(repr([width, *about]).encode()).hexdigest()[:16]
        # the first token of each part, and the number of all
        self._starts = np.cumsum([0, *(tokens for tokens, *_ in about)])
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
            np.fromfile(f"{self._files[part]}.tokens", np.int32, count, offset=4 * start)
            for part, start, count in self._pieces(row)
        ]
        return np.concatenate(read)

    def segment_ids(self, row: int) -> np.ndarray:
        """The number of each token's document in its row, from 1, int32."""
        segments = []
        before = 1
        for part, start, count in self._pieces(row):
            if part not in self._ends:
                file = f"{self._files[part]}.ends"
                has_any = os.path.getsize(file)
                self._ends[part] = np.memmap(file, np.int64, "r") if has_any else np.zeros(0)
            # documents that end before each token, and before the first after the piece
            places = np.arange(start, start + count + 1)
            ended = np.searchsorted(self._ends[part], places, side="right")
            segments.append(before + ended[:-1] - ended[0])
            before += ended[-1] - ended[0]
        return np.concatenate(segments).astype(np.int32)
