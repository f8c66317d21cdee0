"""The memory of the server, in one folder: a journal in SQLite, and weights in models/, samplers/
(without a name) and checkpoints/. A request is in the journal before the client hears that it was
accepted."""

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tunix_lite.basics.plain_text import shown
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.fields import between, read

_JOURNAL = "journal.sqlite"
MOST_RANK = 4096
WAITING = 0
DONE = 1
FAILED = 2

# A second server on the same folder is refused. What is committed outlives a kill.
_TABLES = """
PRAGMA locking_mode=EXCLUSIVE;
PRAGMA journal_mode=WAL;
PRAGMA synchronous=NORMAL;
CREATE TABLE IF NOT EXISTS records (
  kind TEXT, id TEXT, value TEXT, PRIMARY KEY (kind, id));
CREATE TABLE IF NOT EXISTS requests (
  arrival INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, seq INTEGER, kind TEXT,
  body BLOB, state INTEGER DEFAULT 0, result BLOB, attempts INTEGER DEFAULT 0, ended REAL,
  digest BLOB);
CREATE INDEX IF NOT EXISTS by_owner ON requests (owner, seq);
CREATE INDEX IF NOT EXISTS waiting ON requests (arrival, owner) WHERE state = 0;
CREATE INDEX IF NOT EXISTS with_body ON requests (owner, seq) WHERE body != x'';
"""
# Errors of a disk that cannot be written, in whatever file.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass
class TinkerSession:
    """A client's run. Its id is like 4f2a."""

    id: str
    is_finished: bool = False
    heard: float = field(default_factory=time.time)  # the last time that its client was heard


@dataclass
class Adapters:
    """The adapters of a model, as a client asks for them."""

    rank: int = between(0, MOST_RANK, 0)
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True


@dataclass
class Model:
    """A model in training: what it was made with, and how far it is. Its id is 4f2a:train:0."""

    id: str
    session: str
    created: float = field(default_factory=time.time)
    adapters: Adapters | None = None  # None trains all weights
    next_seq: int = 0  # the request that is next
    # the last request that the file of weights holds, and that file
    saved_seq: int = between(-1, 2**62, -1)
    saved: str | None = None
    has_failed: bool = False  # whether gradients since the last step are incomplete


@dataclass
class Sampler:
    """Frozen weights that samples are drawn from. Its id is 4f2a:sample:0."""

    id: str
    session: str
    # a file below the folder; None: the base model
    file: str | None = None
    model_path: str | None = None


@dataclass
class Checkpoint:
    """Weights that a client saved under a name. Its id is tinker://4f2a:train:0/weights/NAME."""

    id: str
    model: str
    # training or sampler
    kind: str
    file: str
    adapters: Adapters | None
    created: float = field(default_factory=time.time)
    size: int = 0


class TinkerRequest(NamedTuple):
    """A request in the journal. Its id is that of its owner, a model or a sampler, and its seq."""

    arrival: int
    id: str
    owner: str
    seq: int
    kind: str


class StoreDamaged(ValueError):
    """The folder does not hold what a server of this version left there."""


_RECORDS = {
    "session": TinkerSession,
    "model": Model,
    "sampler": Sampler,
    "checkpoint": Checkpoint,
}
_KINDS = {made: kind for kind, made in _RECORDS.items()}
Record = TinkerSession | Model | Sampler | Checkpoint


class Store:
    """The folder. Any thread may call it."""

    def __init__(self, folder: Path):
        """Raises OSError or sqlite3.Error if the folder cannot be written, StoreDamaged."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Reentrant, as what is called inside of a transaction takes it, too.
        self._lock = threading.RLock()
        # Our lock lets threads take turns, and `transaction` says what belongs together.
        how = {"check_same_thread": False, "isolation_level": None, "timeout": 1.0}
        self._db = sqlite3.connect(folder / _JOURNAL, **how)
        self._records: dict[str, dict[str, Any]] = {kind: {} for kind in _RECORDS}
        try:
            self._db.executescript(_TABLES)
            for kind, name, value in self._db.execute("SELECT kind, id, value FROM records"):
                record = None
                # KeyError: of no kind that this server knows.
                with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    values = json.loads(value)
                    record = read(_RECORDS[kind], values)
                if (
                    record is None
                    or record.id != name
                    or not values.keys() <= vars(record).keys()
                ):
                    raise StoreDamaged(
                        f"{_JOURNAL}: the record {shown(kind)} {shown(name)} is not as expected; "
                        "it is damaged, or of another version of this server: start that "
                        "version, or take another folder (state_folder=)"
                    )
                self._records[kind][name] = record
        except BaseException:
            # While it is open, no other server gets the folder.
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside is written, or nothing."""
        # The connection commits at the end, or rolls back.
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _rows(self, query: str, *values: str | float | bytes) -> list[tuple]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def settle(self) -> None:
        """Moves what is committed from the file beside the journal into the journal itself."""
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    # ---- records

    def get(self, kind: str, name: str) -> Any:
        """The record of this name, or None."""
        return self._records[kind].get(name)

    def found(self, kind: str, name: str) -> Any:
        """The record of this name. Raises BadCall if there is none."""
        record = self.get(kind, name)
        if record is None:
            raise BadCall(f"there is no {kind} {shown(name)}", code="not_found")
        return record

    def all(self, kind: str) -> list[Any]:
        with self._lock:
            return list(self._records[kind].values())

    def put(self, record: Record) -> None:
        """Writes a record, new or changed."""
        kind = _KINDS[type(record)]
        value = json.dumps(asdict(record))
        with self._lock:
            query = "INSERT OR REPLACE INTO records (kind, id, value) VALUES (?, ?, ?)"
            # First the journal: after an error, the memory knows no more than the disk.
            self._rows(query, kind, record.id, value)
            self._records[kind][record.id] = record

    def remove(self, record: TinkerSession | Sampler | Checkpoint) -> None:
        """Deletes a record, and then its file."""
        kind = _KINDS[type(record)]
        with self._lock:
            self._rows("DELETE FROM records WHERE kind = ? AND id = ?", kind, record.id)
            self._records[kind].pop(record.id, None)
        self.delete(getattr(record, "file", None))

    # ---- requests

    def accept(
        self, owner: str, seq: int | None, kind: str, body: bytes, least: int = 0
    ) -> TinkerRequest:
        """Writes a request into the journal, unless a client that heard no answer sends it again.
        seq: its number; None: the first free one from `least` on. Raises BadCall if the number was
        that of another request."""
        digest = hashlib.sha256(kind.encode() + b" " + body).digest()
        with self._lock:
            if seq is None:
                query = "SELECT seq FROM requests WHERE owner = ? AND seq >= ?"
                taken = {row[0] for row in self._rows(query, owner, least)}
                seq = next(number for number in range(least, 2**62) if number not in taken)
            columns = "(id, owner, seq, kind, body, digest)"
            query = f"INSERT OR IGNORE INTO requests {columns} VALUES (?, ?, ?, ?, ?, ?)"
            self._rows(query, f"{owner}:{seq}", owner, seq, kind, body, digest)
            [request] = self._requests("owner = ? AND seq = ?", owner, seq)
            # Of the one that came first: its body may be forgotten by now, its digest stays.
            [(first,)] = self._rows("SELECT digest FROM requests WHERE id = ?", request.id)
        if first != digest:
            other = " with other data" if request.kind == kind else f", not {kind}"
            raise BadCall(f"request {seq} of {owner} was {request.kind}{other}", "seq_id")
        return request

    def waiting(self, session: str = "") -> list[TinkerRequest]:
        """All that have no result, of one session or of all, in the order in which they came."""
        where = f"state = {WAITING} AND owner LIKE ? ORDER BY arrival"
        # Sessions are hex digits, so nothing in them is a wildcard.
        return self._requests(where, f"{session}:%" if session else "%")

    def gradients_after(self, owner: str, seq: int) -> list[TinkerRequest]:
        """Gradients after seq that have a result, in their order."""
        where = f"owner = ? AND seq > ? AND kind = 'forward_backward' AND state = {DONE}"
        return self._requests(f"{where} ORDER BY seq", owner, seq)

    def _requests(self, where: str, *values: str | int) -> list[TinkerRequest]:
        query = f"SELECT arrival, id, owner, seq, kind FROM requests WHERE {where}"
        return [TinkerRequest(*row) for row in self._rows(query, *values)]

    def body(self, request: TinkerRequest) -> bytes:
        [(body,)] = self._rows("SELECT body FROM requests WHERE arrival = ?", request.arrival)
        return body

    def begin(self, request: TinkerRequest) -> int:
        """Counts an attempt at a request; returns how many there are now."""
        query = "UPDATE requests SET attempts = attempts + 1 WHERE arrival = ?"
        [(count,)] = self._rows(f"{query} RETURNING attempts", request.arrival)
        return count

    def end(self, request: TinkerRequest, state: int, result: bytes) -> None:
        query = "UPDATE requests SET state = ?, result = ?, ended = ? WHERE arrival = ?"
        self._rows(query, state, result, time.time(), request.arrival)

    def result(self, name: str) -> tuple[int, str, bytes | None] | None:
        """State, kind and result of a request; None if there is no such request."""
        rows = self._rows("SELECT state, kind, result FROM requests WHERE id = ?", name)
        return rows[0] if rows else None

    def forget_bodies(self, owner: str, seq: int) -> None:
        """Drops the bodies of requests up to seq: saved weights hold what they did."""
        # The index with_body holds these few of them, so a long run does not become slow.
        where = "owner = ? AND seq <= ? AND state > 0 AND body != x''"
        self._rows(f"UPDATE requests SET body = x'' WHERE {where}", owner, seq)

    def forget_results(self, before: float) -> None:
        """Drops requests that ended before this time and are in no weights' way."""
        self._rows("DELETE FROM requests WHERE state > 0 AND ended < ? AND body = x''", before)

    # ---- files

    def write(self, room: str, name: str, save: Callable[[Path], None]) -> str:
        """Lets `save` write a file, which gets its name once it is complete; returns its path.
        Raises ValueError."""
        final = self.folder / room / name.replace(":", "_")
        # No name that a client gives leads out of the folder.
        if (self.folder / room).resolve() not in final.resolve().parents:
            raise ValueError(f"{name!r} is no name for a file")
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.with_name(f".{final.name}.new")
        # A server that was killed may have left it.
        self.delete(draft)
        save(draft)
        # A folder cannot take the place of another that is not empty.
        self.delete(final)
        os.replace(draft, final)
        return final.relative_to(self.folder).as_posix()

    def delete(self, file: str | Path | None) -> None:
        """Removes a file or a folder, if it is there."""
        if file is not None and (path := self.folder / file).is_dir():
            shutil.rmtree(path)
        elif file is not None:
            path.unlink(missing_ok=True)


def session_of(owner: str) -> str:
    """The session that a model or a sampler belongs to: `4f2a` of `4f2a:train:0`."""
    return owner.partition(":")[0]


def disk_trouble(error: BaseException | None) -> str | None:
    """The reason that the journal or a file cannot be written; None: the error has none of it."""
    while error is not None:
        is_of_disk = isinstance(error, OSError) and error.errno in _DISK
        if is_of_disk or isinstance(error, sqlite3.Error):
            return str(error)
        # Some libraries raise it without a number.
        if "No space left on device" in str(error):
            return "no space left on the device"
        error = error.__cause__ or error.__context__
    return None
