"""Processes found by a mark in their environment, which all that they start inherit (Linux).

Whoever ends a group of processes finds those that left it so: the launcher's guard, and the pool of
reward workers. Uses only the standard library.
"""

import contextlib
import os
import time
from pathlib import Path

# most seconds that the kernel is waited for while it loads a program
LOADING = 1.0


def find_marked(mark: bytes) -> set[int]:
    """The ids of the other running processes that were started with `mark` in their environment."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        # A process may be gone by now, or belong to another user.
        with contextlib.suppress(OSError):
            pid = int(process.name)
            if pid != os.getpid() and mark in _environment(process):
                pids.add(pid)
    return pids


def _environment(process: Path) -> bytes:
    """The variables that a process was started with; b"" if it has ended, or is of the kernel.

    While the kernel loads a program, its process shows no environment, although whoever started it
    goes on already. Such a process is asked again until it shows one, for LOADING seconds at most.
    """
    deadline = time.monotonic() + LOADING
    while True:
        # asked first: it may be loaded at any moment
        is_loading = _is_loading(process)
        environment = (process / "environ").read_bytes()
        if environment or not is_loading or time.monotonic() > deadline:
            return environment
        time.sleep(0.001)


def _is_loading(process: Path) -> bool:
    """Returns whether a process has memory, but no place in it for its environment yet (proc(5),
    stat)."""
    memory = int((process / "statm").read_text().split()[0])
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    # the field env_end is number 51, and the name in brackets is number 2
    return memory > 0 and fields[51 - 3] == "0"


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process, which may be gone."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
