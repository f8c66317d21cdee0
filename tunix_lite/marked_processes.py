"""Processes found by a mark in their environment, which all that they start inherit (Linux).

Whoever ends a group of processes finds those that left it so: the launcher's guard, and the pool of
reward workers. Uses only the standard library.
"""

import contextlib
import os
from pathlib import Path


def find_marked(mark: bytes) -> set[int]:
    """The ids of the other running processes that were started with `mark` in their environment."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        # A process may be gone by now, or belong to another user.
        with contextlib.suppress(OSError):
            pid = int(process.name)
            # The environment of a process that has ended is empty.
            if mark in (process / "environ").read_bytes() and pid != os.getpid():
                found.add(pid)
    return found


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process, which may be gone."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
