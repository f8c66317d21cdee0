"""One run at a time writes to a folder."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"  # its name in the folder; it stays there, and says who was the last
CANNOT_LOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system that has no locks
POLL = 0.2  # seconds


@contextlib.contextmanager
def claimed(folder: Path, timeout: float) -> Iterator[None]:
    """Inside, nobody else can claim the folder, which is made if need be; the end of the process frees it, too.

    A run whose launcher was killed still saves what it has, in this folder: the one that goes on from there waits.
    Raises ValueError if another process has the folder for `timeout` more seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        until = time.monotonic() + timeout
        while not _locked(file):
            if time.monotonic() > until:
                file.seek(0)
                raise ValueError(
                    f"{folder} is in use by {file.read().strip() or 'another process'}, and was for {timeout:g} s: "
                    "end that run, or give this one another hydra.run.dir"
                )
            time.sleep(POLL)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        yield


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
    return True
