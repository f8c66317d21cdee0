"""One run at a time writes to a folder."""

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

from tunix_lite.distributed import join
from tunix_lite.distributed.allgather import allgather_values

# its name in the folder; it stays there, and says who was the last
LOCK = ".lock"
# a file system that has no locks
CANNOT_LOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# seconds
POLL = 0.2


@contextlib.contextmanager
def lock_folder(folder: Path, timeout: float) -> Iterator[None]:
    """Inside, nobody else can claim the folder, which is made if need be; the end of the process
    frees it, too.

    A run whose launcher was killed still saves what it has, in this folder: the one that goes on
    from there waits. Raises ValueError if another process has the folder for `timeout` more
    seconds, or if nobody can have it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LOCK).is_dir():
        raise ValueError(
            f"{folder / LOCK} is a folder, and a run keeps a file of that name: move the folder "
            "away"
        )
    with (folder / LOCK).open("a+") as file:
        until, other = time.monotonic() + timeout, None
        while not _locked(file):
            if other is None:
                other = _owner(folder)
                print(
                    f"waiting for {folder}, which is in use by {other}", file=sys.stderr, flush=True
                )
            if time.monotonic() > until:
                raise ValueError(
                    f"{folder} is in use by {other}, and was for {timeout:g} s: end that run, or "
                    "give this one another "
                    "hydra.run.dir"
                )
            time.sleep(POLL)
        file.truncate(0)
        file.write(
            f"process {os.getpid()} of {socket.gethostname()}, since "
            f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}\n"
        )
        file.flush()
        os.fsync(file.fileno())
        yield


@contextlib.contextmanager
def lock_folder_for_all(folder: Path, timeout: float) -> Iterator[None]:
    """Inside, the folder is that of this run on all of its processes: the first has claimed it, and
    all see it.

    Raises ValueError on all of them, if another run has it or if it is not one folder.
    """
    with contextlib.ExitStack() as until_done:
        error = None
        if join.is_first():
            try:
                until_done.enter_context(lock_folder(folder, timeout))
            except ValueError as problem:
                error = str(problem)
        join.agree({}, error)
        theirs, owner = allgather_values([str(folder.absolute()), lock_owner(folder)])[0]
        error = (
            f"hydra.run.dir: {folder} is not the folder that process 0 writes to, {theirs}; all "
            "hosts must see it"
        )
        join.agree({}, None if is_locked_by(owner, folder) else error)
        yield


def is_locked_by(owner: str, folder: Path, seconds: float = 10) -> bool:
    """Whether `lock_owner` says so; on a network disk another host may see it a little later."""
    until = time.monotonic() + seconds
    while (seen := lock_owner(folder)) != owner and time.monotonic() < until:
        time.sleep(POLL)
    return seen == owner


def lock_owner(folder: Path) -> str | None:
    """What whoever has the folder, or had it last, wrote there; None where nobody has. Never twice
    the same."""
    with contextlib.suppress(OSError):
        return (folder / LOCK).read_text().strip()
    return None


def _owner(folder: Path) -> str:
    return (lock_owner(folder) or "another process").partition(",")[0]


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
    return True
