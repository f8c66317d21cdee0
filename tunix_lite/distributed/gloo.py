"""Gloo, which carries what CPU devices of several processes send each other, greets each of its
connections on the screen, in the middle of what a run shows there. Here these lines go to the log.

It is compiled code and writes to file 1, whatever Python does with its `sys.stdout`. So
`sys.stdout` gets a file of its own, the screen, and file 1 becomes a pipe, from which everything
but those lines is passed on.
"""

import atexit
import contextlib
import ctypes
import os
import re
import sys
import threading
from pathlib import Path

BEGINS = b"[Gloo] Rank "
PIECES = (
    rb"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |"
    rb"Expected number of connected peer ranks is : )*\s*"
)
# for what is still in the pipe at the end
END_SECONDS = 1.0

_filters: list["Filter"] = []


def redirect_greetings() -> None:
    """From now on, its greetings are kept for `log_into`. Once, and before several processes use
    CPU devices."""
    if not _filters:
        _filters.append(Filter())
        atexit.register(restore_stdout)


def log_into(file: Path) -> None:
    """Where the greetings go, those that have been kept until now, too."""
    for each in _filters:
        each.log_into(file)


def restore_stdout() -> None:
    """At the end of the process: file 1 is the screen again, and what was under way to it is
    there."""
    for each in _filters:
        each.close()


class Filter:
    """Stands between file 1 and the screen."""

    def __init__(self):
        sys.stdout.flush()
        self._screen, stdout = os.dup(1), sys.stdout
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(writing)
        settings = {"encoding": stdout.encoding, "errors": stdout.errors, "closefd": False}
        sys.stdout = open(self._screen, "w", **settings)  # noqa: SIM115
        sys.stdout.reconfigure(
            line_buffering=stdout.line_buffering, write_through=stdout.write_through
        )
        # greetings, which have not ended yet
        self._begun = 0
        self._kept: list[bytes] = []
        self._log: Path | None = None
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self._thread.start()

    def log_into(self, file: Path) -> None:
        self._log = file
        self._write()

    def _pass_on(self, reading: int) -> None:
        with open(reading, "rb") as said:
            for line in said:
                self._begun += line.count(BEGINS)
                # of several threads, piece by piece
                if self._begun and re.fullmatch(PIECES, line):
                    self._begun -= 1
                    self._kept.append(line)
                    self._write()
                else:
                    # a screen that is gone
                    with contextlib.suppress(OSError):
                        os.write(self._screen, line)

    def _write(self) -> None:
        if self._log is not None:
            # a full disk ends a run elsewhere
            with (
                contextlib.suppress(OSError),
                self._log.open("ab") as log,
            ):
                while self._kept:
                    log.write(self._kept.pop(0))

    def close(self) -> None:
        sys.stdout.flush()
        with contextlib.suppress(OSError, AttributeError):
            # what compiled code keeps until the very end
            ctypes.CDLL(None).fflush(None)
        # the end of the pipe, unless somebody we started still has it
        os.dup2(self._screen, 1)
        self._thread.join(END_SECONDS)
