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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tunix_lite.basics.addresses import is_address
from tunix_lite.basics.buckets import brought
from tunix_lite.basics.plain_text import shortened
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.tasks.hub_rows import is_hub, table_of_hub
from tunix_lite.tasks.messages import fields_of
from tunix_lite.tasks.row_files import json_row, lines_within, parquet_groups, parquet_rows
from tunix_lite.tasks.sources import SPLITS

# bytes of text in a part of a file; of Parquet, a row group is one; of the hub, so many rows
PART_BYTES = 2**25
_PART_ROWS = 20_000
# documents that are tokenised together
AT_ONCE = 128
# seconds without a new part of another process after which this one makes the rest itself
PATIENCE = 120.0
FORMATS = (".jsonl", ".txt", ".parquet")
# another number makes the tokens anew
VERSION = 4


class _Part(NamedTuple):
    """A part of a file: the documents that begin in these bytes, or these row groups, or rows."""

    file: str
    number: int  # of the file
    begin: int
    end: int


def files_of(pattern: str) -> list[str]:
    """The files that a path or a pattern such as `corpus/*.txt` names, sorted; those of a bucket
    are brought. A name of the hub is one file. Raises ValueError."""
    if is_hub(pattern):
        return [pattern]
    path = Path(pattern).expanduser()
    if is_address(pattern):
        folder, name = re.fullmatch(r"(.*?)((?:/[^/]*[*?\[].*)?)", pattern).groups()
        path = Path(f"{brought(folder, (name[1:], name[1:].replace('**/', '')))}{name}")
    files = [str(path)]
    if not path.is_file():
        files = sorted(glob(str(path), recursive=True))
    if not files:
        raise ValueError(f"{pattern} names no file")
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
            if is_hub(file):
                size, step = len(table_of_hub(file)), _PART_ROWS
            elif file.endswith(".parquet"):
                size, step = parquet_groups(file), 1
            else:
                size, step = os.path.getsize(file), PART_BYTES
            for begin in range(0, size, step):
                parts.append(_Part(file, number, begin, min(begin + step, size)))
        return parts

    @cached_property
    def folders(self) -> list[Path]:
        """The folder of each part's tokens."""
        stats = {
            part.file: not is_hub(part.file) and os.stat(part.file) for part in self.parts
        }
        files = [
            [os.path.abspath(file), stat.st_size, stat.st_mtime_ns] if stat else [file]
            for file, stat in stats.items()
        ]
        tokenizer = self.tokenizer
        tokens = [tokenizer.backend.to_str(), tokenizer.start_ids, tokenizer.end_id]
        cut = [self.field, self.special_tokens_in_data, self.held_out_every]
        made_of = json.dumps([VERSION, PART_BYTES, files, tokens, cut])
        folder = self.cache / hashlib.sha256(made_of.encode()).hexdigest()[:16]
        return [folder / f"{i:06d}" for i in range(len(self.parts))]

    def texts(self, limit: int | None) -> Iterator[str]:
        """Texts of documents, or lines of a text file: about `limit`, of each part; None: all."""
        each = None if limit is None else -(-limit // max(1, len(self.parts)))
        for part in self.parts:
            yield from (text for _, text, _ in islice(self._documents(part), each))

    def rows(self, split: str, width: int) -> "TokenRows":
        """The rows of a split, `train` or `held_out`, of `width` tokens each. The first call makes
        what is missing of the tokens. Raises ValueError, with the place, for a malformed document,
        or if the cache cannot be written; OSError."""
        index, count = self.process
        patience = PATIENCE
        for i in sorted(range(len(self.parts)), key=lambda i: i % count != index):
            # another process makes it, or, if nothing comes from there, this one
            began = time.monotonic()
            while not self.folders[i].is_dir():
                if i % count == index or time.monotonic() - began > patience:
                    if i % count != index:
                        patience = 0.0
                    self.make(i)
                else:
                    time.sleep(0.05)
        return TokenRows(self.folders, split, width)

    def make(self, number: int) -> None:
        """Tokenises a part. Its folder comes whole, of whoever is first. Raises as `rows`."""
        part = self.parts[number]
        tokens = {split: array("i") for split in SPLITS}
        ends = {split: array("q") for split in SPLITS}
        # a text file counts as one document; else those of a part do
        is_text = part.file.endswith(".txt")
        count = part.number if is_text else 0
        is_start = not part.begin or not is_text
        documents = self._documents(part)
        while some := list(islice(documents, AT_ONCE)):
            texts = [text for _, text, _ in some]
            try:
                encoded = self.tokenizer.documents(texts, self.special_tokens_in_data)
            except ValueError as error:
                raise ValueError(f"{some[0][0]} and after: {error}") from error
            for (_, _, is_end), ids in zip(some, encoded):
                every = self.held_out_every
                split = SPLITS[bool(every) and (count + 1) % every == 0]
                tokens[split].extend(self.tokenizer.start_ids if is_start else ())
                tokens[split].extend(ids)
                if is_end:
                    tokens[split].append(self.tokenizer.end_id)
                    ends[split].append(len(tokens[split]))
                    count += 1
                is_start = is_end

        folder = self.folders[number]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                dir=folder.parent, ignore_cleanup_errors=True
            ) as half:
                for split in SPLITS:
                    Path(half, f"{split}.tokens").write_bytes(tokens[split])
                    Path(half, f"{split}.ends").write_bytes(ends[split])
                    digest = hashlib.blake2b(tokens[split], digest_size=8).hexdigest()
                    Path(half, f"{split}.digest").write_text(digest)
                os.chmod(half, 0o755)
                os.rename(half, folder)
        except OSError as error:
            # else another process was first
            if not folder.is_dir():
                raise ValueError(
                    f"task.cache={self.cache} cannot be written: {error.strerror}"
                ) from error

    def _documents(self, part: _Part) -> Iterator[tuple[str, str, bool]]:
        """(place, text, whether it ends there) of documents, or of a text file's lines."""
        file, _, begin, end = part
        is_text = file.endswith(".txt")
        counted = f"{file}, row"
        if is_hub(file):
            raw = enumerate(table_of_hub(file).select(range(begin, end)), begin + 1)
        elif file.endswith(".parquet"):
            counted = f"{file}, group {begin + 1}, row"
            raw = parquet_rows(file, [begin], [self.field])
        else:
            counted = f"{file}, byte"
            raw = lines_within(file, begin, end)
            size = os.path.getsize(file)
        for place, data in raw:
            try:
                text = data.decode() if is_text else self._text_of(data)
            except ValueError as error:
                raise ValueError(f"{counted} {place}: {error}") from error
            if text.strip() or is_text:
                is_end = not is_text or place + len(data) >= size
                yield f"{counted} {place}", text, is_end

    def _text_of(self, data: bytes | dict) -> str:
        """The text in a row, or in its line, which may be blank. Raises ValueError."""
        if isinstance(data, bytes) and not data.strip():
            return ""
        row = json_row(data) if isinstance(data, bytes) else data
        text = row.get(self.field)
        if not isinstance(text, str):
            what = f"holds {shortened(text)}" if self.field in row else "is not there"
            raise ValueError(
                f"{self.field!r} {what}, and should be a text; the row has {fields_of(row)}: "
                "task.field=NAME names another field"
            )
        return text


class TokenRows(Sequence):
    """The rows of a split, as examples that say their place. Tokens stay on the disk.
    Example: rows[5] is {"row": 5, "split": "train"}, and rows.tokens(5) are its tokens."""

    def __init__(self, folders: list[Path], split: str, width: int):
        """folders: of the parts, in order."""
        self.split = split
        self.width = width
        self._files = [folder / f"{split}.tokens" for folder in folders]
        # the first token of each part, and the number of all
        self._starts = np.cumsum([0, *(file.stat().st_size // 4 for file in self._files)])
        # those that begin and end documents are counted
        self.num_tokens = int(self._starts[-1])
        ends = [np.fromfile(folder / f"{split}.ends", np.int64) for folder in folders]
        # where each document ends in all tokens
        self._ends = np.concatenate([one + at for one, at in zip(ends, self._starts)])
        self.num_documents = len(self._ends)
        # of the tokens; the same for the same files and tokenizer
        about = [(folder / f"{split}.digest").read_text() for folder in folders]
        self.digest = hashlib.sha256(
            repr([width, self.num_documents, about]).encode()
        ).hexdigest()[:16]

    def __len__(self) -> int:
        # the first token is predicted by nothing
        return -(-max(0, self.num_tokens - 1) // (self.width - 1))

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {"row": int(index), "split": self.split}

    def _place(self, row: int) -> tuple[int, int]:
        """The first token of a row, and the first that is not of it: the last row may be short."""
        begin = row * (self.width - 1)
        return begin, min(begin + self.width, self.num_tokens)

    def tokens(self, row: int) -> np.ndarray:
        """The tokens of a row, int32; the last row may have fewer than `width`."""
        begin, end = self._place(row)
        first, last = np.searchsorted(self._starts, [begin, end - 1], side="right")
        pieces = []
        for part in range(first - 1, last):
            start, stop = self._starts[part : part + 2]
            skipped = max(begin - start, 0)
            count = min(end, stop) - start - skipped
            # not mapped: pages of a mapped file would count as memory of the process
            pieces.append(np.fromfile(self._files[part], np.int32, count, offset=4 * skipped))
        return np.concatenate(pieces)

    def segment_ids(self, row: int) -> np.ndarray:
        """The number of each token's document in its row, from 1, int32."""
        ended = np.searchsorted(self._ends, np.arange(*self._place(row)), side="right")
        return (ended - ended[0] + 1).astype(np.int32)
