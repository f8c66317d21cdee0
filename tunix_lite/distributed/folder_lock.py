"""A lock on the folder of a run: one run at a time writes to it."""

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tunix_lite.basics.addresses import address_of
from tunix_lite.basics.buckets import send
from tunix_lite.basics.locks import LOCK, is_held, lock_owner
from tunix_lite.distributed import join
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.bucket_folder import bring_run, hold_bucket, writes_directly

# Errors of a file system that has no locks: there, nothing keeps a second run out.
_CANNOT_LOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# Seconds between two attempts to take the lock.
_POLL = 0.2


@contextlib.contextmanager
def lock_folder(folder: Path, timeout: float) -> Iterator[str | None]:
    """A context in which no other process can lock the folder, which is made if need be. Gives the
    last owner of the lock, who is gone; None where the file system has no locks. Raises ValueError
    if another process has the lock for `timeout` seconds, or .lock is a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LOCK).is_dir():
        raise ValueError(
            f"{folder / LOCK} is a folder, and a run keeps a file of that name: move it away"
        )
    # Not "w", which would empty the name of a run that has the lock.
    with (folder / LOCK).open("a+") as file:
        # Wait for the other run, and tell the user once whom we wait for.
        deadline = time.monotonic() + timeout
        other = None
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                before = lock_owner(folder)
                break
            except OSError as error:
                if error.errno in _CANNOT_LOCK:
                    before = None
                    break
                if not isinstance(error, BlockingIOError):
                    raise
            if other is None:
                other = (lock_owner(folder) or "another process").partition(",")[0]
                text = f"waiting for {folder}, which is in use by {other}"
                print(text, file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{folder} is in use by {other}, and was for {timeout:g} s: end that run, or "
                    "give this one another hydra.run.dir"
                )
            time.sleep(_POLL)

        # Write our name on disk: other hosts compare it.
        file.truncate(0)
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}"
        file.write(f"process {os.getpid()} of {socket.gethostname()}, since {now}\n")
        file.flush()
        os.fsync(file.fileno())
        yield before


@contextlib.contextmanager
def lock_folder_for_all(folder: Path, timeout: float) -> Iterator[None]:
    """A context in which the folder belongs to this run: process 0 has the lock, all see the file.
    Raises ValueError on all processes if another run has it, or some process sees another
    folder."""
    with contextlib.ExitStack() as until_done:
        error = None
        if join.is_first():
            try:
                before = until_done.enter_context(lock_folder(folder, timeout))
                if address_of(folder) is not None:
                    owner = str(lock_owner(folder))
                    until_done.enter_context(hold_bucket(folder, owner, before, timeout))
            # It is raised below, on all processes: alone, this one would leave the others waiting.
            except ValueError as problem:
                error = str(problem)
        join.agree({}, error)

        # The lock file that process 0 wrote must be visible at this path on every host.
        reports = allgather_values([str(folder.absolute()), lock_owner(folder)])
        first_folder, owner = reports[0]
        error = (
            f"hydra.run.dir: {folder} is not the folder that process 0 writes to, {first_folder}; "
            "all hosts must see it"
        )
        if address_of(folder) is not None:
            error = (
                f"hydra.run.dir={address_of(folder)}: processes on several machines can write to "
                "gs:// by its address; mount another bucket as a folder that all machines see"
            )
        if writes_directly(folder) and lock_owner(folder) != owner:
            # A place on another machine has what the bucket has, and a log of its own.
            error = _problem_of_bringing(folder)
            until_done.callback(lambda: [send(log) for log in folder.glob("train.p*.log")])
        else:
            # On a network disk it may take some seconds.
            deadline = time.monotonic() + 10
            while lock_owner(folder) != owner and time.monotonic() < deadline:
                time.sleep(_POLL)
            error = None if lock_owner(folder) == owner else error
        join.agree({}, error)
        yield


def bring_for_all(folder: Path) -> None:
    """Brings a run's folder from its bucket, if it lies in one. ValueError is raised on all."""
    if address_of(folder) is not None:
        join.agree({}, _problem_of_bringing(folder))


def _problem_of_bringing(folder: Path) -> str | None:
    """Brings a run's folder, unless a run of this machine has it; says why it could not."""
    try:
        if not is_held(folder):
            bring_run(folder)
    except ValueError as problem:
        return str(problem)
    return None
