"""The folder of a run that lies in a bucket. A bucket has no locks and no appending, so the run
works in the folder's place on this machine; an object says that it does (a lease), and what changes
is copied. A checkpoint is copied before it gets its name, and its last object makes it whole."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tunix_lite.basics.addresses import address_of
from tunix_lite.basics.buckets import LEASE, WHOLE, bring, explained, send, store_of
from tunix_lite.basics.errors import RunFailed
from tunix_lite.distributed import join

# Seconds between two signs of life, and without one until another run takes the folder. The one
# that waits counts them by its own clock: no two clocks are compared.
BEAT = 10.0
DEAD = 60.0
# Seconds between two copies of the files that have changed.
COPY = 30.0

# those that this process has, by their places
_HELD: dict[Path, "BucketFolder"] = {}


def held_bucket(path: Path) -> "BucketFolder | None":
    """The folder in a bucket that this process has and this path is in, if there is one."""
    return next((held for place, held in _HELD.items() if path.is_relative_to(place)), None)


def writes_directly(path: Path) -> bool:
    """Whether orbax writes checkpoints at this path to their bucket itself: each of several
    processes its own arrays. orbax has a driver for gs:// alone."""
    return len(join.hosts()) > 1 and (address_of(path) or "").startswith("gs://")


def bring_run(place: Path) -> None:
    """Brings the folder of a run that this process will write to. Raises ValueError as `bring`."""
    bring(str(address_of(place)), is_mine=True, with_arrays=not writes_directly(place))


@contextlib.contextmanager
def hold_bucket(place: Path, owner: str, before: str | None, timeout: float) -> Iterator[None]:
    """A context in which the bucket's folder is this run's. Its files are in `place`, and what
    changes there is copied until the end.

    owner: of the lock on `place`, and `before` the one before, which is dead: if it had the bucket
    last, what it left in the place is newer. Raises ValueError if another run has the folder for
    `timeout` seconds, and RunFailed if the last copy fails.
    """
    held = BucketFolder(place, owner)
    with explained(place):
        held.take(before, timeout)
    try:
        with _repeated(BEAT, held.beat):
            bring_run(place)
            held.has_all = True
            held.beat()
            _HELD[place] = held
            try:
                with _repeated(COPY, held.copy):
                    yield
            finally:
                del _HELD[place]
                is_failing = sys.exc_info()[0] is not None
                try:
                    held.copy()
                except OSError as error:
                    left = f"what was written in the last {COPY:g} s is in {place} only"
                    if not is_failing:
                        raise RunFailed(f"{error.strerror}; {left}") from error
                    _say(f"error: {error.strerror}; {left}")
    finally:
        with contextlib.suppress(OSError):
            held.beat(is_held=False)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _repeated(seconds: float, work: Callable[[], None]) -> Iterator[None]:
    """Inside, a thread works every so many seconds. A save will raise what fails for long."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            with contextlib.suppress(OSError):
                work()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class BucketFolder:
    """A run's folder in a bucket, as the process sees it that has its lease.
    Example: `held_bucket(run_dir.path).copy()` takes what has changed to the bucket now."""

    def __init__(self, place: Path, owner: str):
        """owner: a text that no two runs share."""
        self.place = place
        self.owner = owner
        self._fs, self._root = store_of(place)
        # Leases are numbered, and each is created once: whoever creates the next has the folder.
        self._leases = f"{self._root}/{LEASE}"
        self._number = 0
        self._beats = 0
        # whether the place has all that the bucket had, so that from now on it is newer
        self.has_all = False
        # why this run may no longer write
        self.lost: str | None = None
        # files as they were copied
        self._copied: dict[str, tuple[int, int]] = {}
        self._copying = threading.Lock()

    # ---- the lease

    def take(self, dead: str | None, timeout: float) -> None:
        """Takes the lease. dead: an owner on this machine that is known to be dead. Raises
        ValueError if another owner lives for `timeout` seconds."""
        started = since = time.monotonic()
        seen = {}
        while True:
            number, last = self._newest()
            other = last.get("owner")
            if last.get("held") and other != dead:
                now = time.monotonic()
                if last != seen:
                    if seen and now - started > timeout:
                        raise ValueError(
                            f"{address_of(self.place)} is in use by {other}, and was for "
                            f"{timeout:g} s: end that run, or give this one another hydra.run.dir"
                        )
                    if not seen:
                        _say(
                            f"waiting for {address_of(self.place)}, which is in use by {other}; "
                            f"without a sign of life it is free in {DEAD:g} s"
                        )
                    seen = last
                    since = now
                if now - since < DEAD:
                    time.sleep(min(1.0, DEAD / 10))
                    continue
                silent = f"{other} gave no sign of life for {DEAD:g} s"
                _say(f"{silent}, by the clock of this machine: this run takes its place")
            self._number = number + 1
            self.has_all = other == dead and bool(last.get("has_all"))
            try:
                self._write(mode="create")
            # What the stores raise is not known here. It may be ours though the answer was lost.
            except Exception:
                newest, lease = self._newest()
                if newest == number:
                    raise
                if lease.get("owner") != self.owner:
                    continue
            if number:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{self._leases}/{number:06d}")
            return

    def _newest(self) -> tuple[int, dict]:
        """The number of the newest lease, and what it says; (0, {}) if there is none."""
        names = self._fs.find(self._leases)
        if not names:
            return 0, {}
        try:
            return int(max(names).rpartition("/")[2]), json.loads(
                self._fs.cat_file(max(names))
            )
        # The next one was created, and this one removed.
        except FileNotFoundError:
            return self._newest()

    def _write(self, is_held: bool = True, mode: str = "overwrite") -> None:
        lease = {"owner": self.owner, "held": is_held, "has_all": self.has_all}
        lease["beats"] = self._beats
        name = f"{self._leases}/{self._number:06d}"
        self._fs.pipe_file(name, json.dumps(lease).encode(), mode=mode)

    def check(self) -> None:
        """Raises OSError if another run has the folder now, or the store cannot be reached."""
        with explained(self.place, OSError):
            number, lease = self._newest()
            if number != self._number:
                self.lost = (
                    f"{address_of(self.place)} was taken by {lease.get('owner')}, as this run gave "
                    f"no sign of life for {DEAD:g} s"
                )
                raise ValueError(self.lost)

    def beat(self, is_held: bool = True) -> None:
        """Gives a sign of life, or leaves the folder to others. Raises OSError as `check`."""
        self.check()
        self._beats += 1
        with explained(self.place, OSError):
            self._write(is_held)

    # ---- its files

    def copy(self) -> None:
        """Copies the files that have changed, and removes checkpoints that orbax has removed here,
        or that a dead run has left unfinished. Raises OSError as `check`."""
        self.check()
        with self._copying, explained(self.place, OSError):
            for file in sorted(self.place.rglob("*")):
                name = file.relative_to(self.place).as_posix()
                is_apart = name == ".lock" or name.startswith(("checkpoints/", "reference/"))
                if is_apart or name.endswith(".tmp") or not file.is_file():
                    continue
                stat = (file.stat().st_size, file.stat().st_mtime_ns)
                if self._copied.get(name) != stat:
                    # A file may grow meanwhile: what is read now is sent.
                    self._fs.pipe_file(f"{self._root}/{name}", file.read_bytes())
                    self._copied[name] = stat

            # Where orbax writes to the bucket itself, it alone removes old ones. The newest stays.
            here = {p.name for p in self.place.glob("checkpoints/*") if p.name.isdecimal()}
            if not here or writes_directly(self.place):
                return
            newest = max(map(int, here))
            there = self._fs.find(f"{self._root}/checkpoints")
            steps = {
                name.removeprefix(f"{self._root}/checkpoints/").partition("/")[0]
                for name in there
            }
            for step in steps - here:
                if step.isdecimal() and int(step) < newest:
                    self._remove(f"checkpoints/{step}/")

    def save(self, half: Path, step: Path) -> None:
        """Copies a checkpoint whose files are in `half` and which will be called `step` here. It is
        whole in the bucket when this returns, and so is what was written before it; if orbax writes
        there itself, orbax makes it whole afterwards. Raises OSError as `check`."""
        is_all = not writes_directly(step)
        self.copy()
        name = f"{step.relative_to(self.place).as_posix()}/"
        with explained(self.place, OSError):
            if is_all:
                self._remove(name)
            send(step, half=half)
        self.check()
        if is_all:
            with explained(self.place, OSError):
                self._fs.pipe_file(f"{self._root}/{name}{WHOLE}", b"all files are here")

    def clear(self, folder: Path) -> None:
        """Removes the checkpoints below a folder of the place. Raises OSError as `check`."""
        with explained(self.place, OSError):
            self._remove(f"{folder.relative_to(self.place).as_posix()}/")

    def _remove(self, step: str) -> None:
        """Removes a checkpoint, and first the object that makes it whole."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{step}{WHOLE}")
        if names := self._fs.find(f"{self._root}/{step}"):
            self._fs.rm(names)
