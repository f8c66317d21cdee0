"""Outlives the launcher of a run and nothing else: should that be killed, what it has started is
gone soon after.

A program of its own, of the standard library alone. It reads a pipe whose other end only the
launcher holds: numbers of processes, a line each, and at the end a dot. If the end comes without
one, the launcher was killed. What belongs to the run has the launcher's temporary folder in its
environment: reward workers, too, and what they started, in whatever session.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

# seconds for an update that is under way and a checkpoint, once the launcher is gone
GRACE = 300.0
POLL = 0.2


def main() -> None:
    pipe, folder = int(sys.argv[1]), Path(sys.argv[2])
    # who kills the launcher's group does not mean us
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(pipe) as said:
        *processes, last = said.read().split("\n")
    if last != ".":
        end_all({int(pid) for pid in processes}, folder)
        shutil.rmtree(folder, ignore_errors=True)


def end_all(processes: set[int], folder: Path, grace: float = GRACE) -> None:
    """Asks these processes to stop, wakes them if they are stopped, and ends them when the time is
    up; with the last of them ends all that belongs to the run. They have been asked already, as a
    rule: twice at once is once."""
    mark, until = f"={folder}/".encode(), time.monotonic() + grace
    for pid in processes & marked(mark):
        send(pid, signal.SIGTERM)
    while left := marked(mark):
        is_time = not left & processes or time.monotonic() > until
        for pid in left:
            send(pid, signal.SIGKILL if is_time else signal.SIGCONT)
        time.sleep(POLL)


def marked(mark: bytes) -> set[int]:
    """The processes, but us, in whose environment this stands, as they were started; those that
    have ended not."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        # gone, or another user's
        with contextlib.suppress(OSError):
            pid = int(process.name)
            # of one that has ended it is empty
            if mark in (process / "environ").read_bytes() and pid != os.getpid():
                found.add(pid)
    return found


def send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
