"""The lock file of a folder, and whether a process has it."""

import contextlib
import fcntl
from pathlib import Path

# It stays in the folder, and holds the name of the last owner.
LOCK = ".lock"


def is_held(folder: Path) -> bool | None:
    """Whether a process has the lock of a folder; None: that cannot be seen, or none ever had."""
    try:
        with (folder / LOCK).open() as file:
            # A shared lock is refused while a run has its own, and is gone with the file.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return None


def lock_owner(folder: Path) -> str | None:
    """The text in the lock file, which no two locks share; None if there is none."""
    with contextlib.suppress(OSError):
        return (folder / LOCK).read_text().strip()
    return None
