"""What the server must not forget, in one folder: a journal in SQLite, and weights in files.

A request is in the journal before the client hears that it was accepted, and its result is there
before the client can read it. So a server that was killed goes on where it was: it does again what
was accepted and has no result.

  journal.sqlite     sessions, models, samplers, checkpoints, requests with their results
  models/            the newest weights and optimizer state of each model
  samplers/          weights of samplers that have no name
  checkpoints/       what clients saved under a name
"""

import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

JOURNAL = "journal.sqlite"
WAITING = 0
DONE = 1
FAILED = 2

TABLES = """
CREATE TABLE IF NOT EXISTS records (
  kind TEXT, id TEXT, session TEXT, value TEXT, PRIMARY KEY (kind, id));
CREATE TABLE IF NOT EXISTS requests (
  arrival INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, seq INTEGER, kind TEXT,
  body BLOB, state INTEGER DEFAULT 0, result BLOB, attempts INTEGER DEFAULT 0, ended REAL);
CREATE INDEX IF NOT EXISTS by_owner ON requests (owner, seq);
CREATE INDEX IF NOT EXISTS with_body ON requests (owner, seq) WHERE body != x'';
"""


@dataclass
class TinkerSession:
    """A client's run.

    Example: TinkerSession("4f2a", created=1700000000.0).
    """

    id: str
    created: float = field(default_factory=time.time)
    metadata: dict[str, Any] = field(default_factory=dict)
    display_name: str | None = None
    is_finished: bool = False
    # the last time that its client was heard
    heard: float = field(default_factory=time.time)


@dataclass
class Model:
    """A model in training: what it was made with, and how far it is.

    Example: Model("4f2a:train:0", "4f2a").
    """

    id: str
    session: str
    created: float = field(default_factory=time.time)
    # rank, seed, attention and mlp; None trains all weights
    adapters: dict[str, int] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    # the request that is next
    next_seq: int = 0
    # the last request that the file of weights holds, and that file
    saved_seq: int = -1
    saved: str | None = None
    # whether gradients since the last step are incomplete
    has_failed: bool = False
    last_request: float = field(default_factory=time.time)


@dataclass
class Sampler:
    """Frozen weights that samples are drawn from.

    Example: Sampler("4f2a:sample:0", "4f2a") draws from the base model.
    """

    id: str
    session: str
    # a file below the folder; None: the base model
    file: str | None = None
    model_path: str | None = None
    clones: int = 0


@dataclass
class Checkpoint:
    """Weights that a client saved under a name.

    Example: Checkpoint("tinker://4f2a:train:0/weights/final", "4f2a:train:0", "training", ...).
    """

    id: str
    model: str
    # training or sampler
    kind: str
    file: str
    # as of its model
    adapters: dict[str, int] | None
    created: float = field(default_factory=time.time)
    size: int = 0
    expires: float | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class TinkerRequest:
    """A request in the journal.

    Example: TinkerRequest(1, "4f2a:train:0:1", "4f2a:train:0", 1, "optim_step").
    """

    arrival: int
    id: str
    owner: str
    seq: int
    kind: str


RECORDS = {"session": TinkerSession, "model": Model, "sampler": Sampler, "checkpoint": Checkpoint}
Record = TinkerSession | Model | Sampler | Checkpoint


class Store:
    """The folder. Any thread may call it.

    Example: store = Store(Path("outputs/tinker")); store.put(TinkerSession("4f2a")).
    """

    def __init__(self, folder: Path):
        """Raises OSError or sqlite3.Error if the folder cannot be written."""
        self.folder = folder
        for name in ("models", "samplers", "checkpoints"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            folder / JOURNAL, check_same_thread=False, isolation_level=None, timeout=1.0
        )
        # A second server on the same folder is refused here. What is committed outlives a kill.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(TABLES)
        self._records: dict[str, dict[str, Any]] = {kind: {} for kind in RECORDS}
        for kind, name, value in self._db.execute("SELECT kind, id, value FROM records"):
            self._records[kind][name] = RECORDS[kind](**json.loads(value))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside is written, or nothing."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # ---- records

    def get(self, kind: str, name: str) -> Any:
        """The record of this name, or None."""
        return self._records[kind].get(name)

    def all(self, kind: str) -> list[Any]:
        with self._lock:
            return list(self._records[kind].values())

    def put(self, record: Record) -> None:
        """Writes a record, new or changed."""
        [kind] = [kind for kind, made in RECORDS.items() if isinstance(record, made)]
        value = json.dumps(asdict(record))
        session = getattr(record, "session", "")
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)",
                (kind, record.id, session, value),
            )
            self._records[kind][record.id] = record

    def remove(self, kind: str, name: str) -> None:
        with self._lock:
            self._db.execute("DELETE FROM records WHERE kind = ? AND id = ?", (kind, name))
            self._records[kind].pop(name, None)

    # ---- requests

    def accept(self, owner: str, seq: int, kind: str, body: bytes) -> tuple[TinkerRequest, bool]:
        """Writes a request into the journal, and whether it is new. A client that sends one again,
        as it did not hear the answer, gets the first one."""
        name = f"{owner}:{seq}"
        with self._lock:
            cursor = self._db.execute(
                "INSERT OR IGNORE INTO requests (id, owner, seq, kind, body) "
                "VALUES (?, ?, ?, ?, ?)",
                (name, owner, seq, kind, body),
            )
            is_new = cursor.rowcount == 1
            [found] = self._requests("id = ?", name)
        return found, is_new

    def waiting(self) -> list[TinkerRequest]:
        """All that have no result, in the order in which they came."""
        return self._requests("state = ? ORDER BY arrival", WAITING)

    def done_after(self, owner: str, seq: int, kind: str) -> list[TinkerRequest]:
        """Requests of this kind after seq that have a result, in their order."""
        where = "owner = ? AND seq > ? AND kind = ? AND state = ? ORDER BY seq"
        return self._requests(where, owner, seq, kind, DONE)

    def _requests(self, where: str, *values: Any) -> list[TinkerRequest]:
        columns = "arrival, id, owner, seq, kind"
        with self._lock:
            rows = self._db.execute(f"SELECT {columns} FROM requests WHERE {where}", values)
            return [TinkerRequest(*row) for row in rows]

    def body(self, request: TinkerRequest) -> bytes:
        with self._lock:
            query = "SELECT body FROM requests WHERE arrival = ?"
            return self._db.execute(query, (request.arrival,)).fetchone()[0]

    def begin(self, request: TinkerRequest) -> int:
        """Counts an attempt; returns how many there are. A request that kills the server again
        and again is told apart by it."""
        with self._lock:
            query = "UPDATE requests SET attempts = attempts + 1 WHERE arrival = ?"
            self._db.execute(query, (request.arrival,))
            query = "SELECT attempts FROM requests WHERE arrival = ?"
            return self._db.execute(query, (request.arrival,)).fetchone()[0]

    def end(self, request: TinkerRequest, state: int, result: bytes) -> None:
        """Writes the result."""
        with self._lock:
            self._db.execute(
                "UPDATE requests SET state = ?, result = ?, ended = ? WHERE arrival = ?",
                (state, result, time.time(), request.arrival),
            )

    def result(self, name: str) -> tuple[int, str, bytes | None] | None:
        """State, kind and result of a request; None if there is no such request."""
        with self._lock:
            query = "SELECT state, kind, result FROM requests WHERE id = ?"
            return self._db.execute(query, (name,)).fetchone()

    def forget_bodies(self, owner: str, seq: int) -> None:
        """Drops the bodies of requests up to seq: saved weights hold what they did."""
        with self._lock:
            # The index with_body holds these few of them, so a long run does not become slow.
            where = "owner = ? AND seq <= ? AND state > 0 AND body != x''"
            self._db.execute(f"UPDATE requests SET body = x'' WHERE {where}", (owner, seq))

    def forget_results(self, before: float) -> None:
        """Drops requests that ended before this time and are in no weights' way."""
        with self._lock:
            query = "DELETE FROM requests WHERE state > 0 AND ended < ? AND body = x''"
            self._db.execute(query, (before,))

    # ---- files

    def new_file(self, room: str, name: str) -> tuple[Path, Path]:
        """A path to write to, and the one that it gets by `keep`. Raises ValueError for a name
        that leads out of the folder."""
        final = self.folder / room / name.replace(":", "_")
        if (self.folder / room).resolve() not in final.resolve().parents:
            raise ValueError(f"{name!r} is no name for a file")
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.with_name(f".{final.name}.new")
        delete(draft)
        return draft, final

    def keep(self, draft: Path, final: Path) -> str:
        """Gives a complete file its name; returns it as records write it."""
        delete(final)
        os.replace(draft, final)
        return final.relative_to(self.folder).as_posix()

    def path(self, file: str) -> Path:
        return self.folder / file


def delete(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Bytes of a file or of all files of a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
