"""Ends the processes of a run if their launcher is killed.

A program of its own, which needs only the standard library and one module of ours. The launcher
starts it, and holds the only other end of its pipe. Through the pipe the launcher sends the ids of
the processes that it starts, a line each, and a dot when it ends. If the pipe closes without the
dot, the launcher was killed, and the guard ends the run. All processes of the run have the path of
the launcher's temporary folder in their environment: reward workers too, and whatever they started.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tunix_lite.workers.marked_processes import find_marked, send_signal

# Seconds that the run has to finish its update and to save, after the launcher is gone.
GRACE = 300.0
# Seconds between two looks at the processes.
POLL = 0.2


def main() -> None:
    pipe = int(sys.argv[1])
    folder = Path(sys.argv[2])

    # Signals to the launcher's group of processes, such as Ctrl-C, must not end the guard.
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    with open(pipe) as lines:
        *processes, last = lines.read().split("\n")
    if last != ".":
        end_all({int(pid) for pid in processes}, folder)
        shutil.rmtree(folder, ignore_errors=True)


def end_all(processes: set[int], folder: Path, grace: float = GRACE) -> None:
    """Ends all processes of the run. Those named in `processes` have `grace` seconds to save.

    First sends them SIGTERM. Whoever ended the launcher has mostly sent it already, and a run
    takes two signals at once for one. When all of them have ended, or the time is up, every process
    that has `folder` in its environment is killed.
    """
    mark = f"={folder}/".encode()
    deadline = time.monotonic() + grace
    for pid in processes & find_marked(mark):
        send_signal(pid, signal.SIGTERM)

    while left := find_marked(mark):
        is_time = not left & processes or time.monotonic() > deadline
        for pid in left:
            # SIGCONT: a process that is stopped would not see the SIGTERM.
            send_signal(pid, signal.SIGKILL if is_time else signal.SIGCONT)
        time.sleep(POLL)
