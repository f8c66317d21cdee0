"""Moves the greetings of Gloo from the screen to the log of the run.

Gloo is the library with which CPU devices of several processes communicate. It prints a line for
each of its connections, in the middle of the run's own output. It is compiled code and writes to
file descriptor 1, so replacing `sys.stdout` does not help. Instead descriptor 1 becomes a pipe, and
`sys.stdout` writes to a copy of the old descriptor. A thread reads the pipe, keeps the greetings,
and writes all else to the screen.
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
# Seconds to wait, at the end of the process, for what is still in the pipe.
END_SECONDS = 1.0

_filters: list["Filter"] = []


def redirect_greetings() -> None:
    """Keeps all greetings of Gloo from now on, until `log_into` names a file for them.

    Call it before several processes use CPU devices. A second call does nothing.
    """
    if not _filters:
        _filters.append(Filter())
        atexit.register(end_redirection)


def log_into(file: Path) -> None:
    """Appends the greetings to this file: those kept until now, and all that follow."""
    for each in _filters:
        each.log_into(file)


def end_redirection() -> None:
    """Writes what is still in the pipe. From here on compiled code prints nothing; Python still
    does.

    Runs at the end of the process. Call it before `os._exit`, which runs nothing of that kind.
    """
    for each in _filters:
        each.close()


class Filter:
    """The pipe between file descriptor 1 and the screen, and the thread that reads it."""

    def __init__(self):
        # Python's own output goes to the screen directly, through a copy of descriptor 1.
        stdout = sys.stdout
        stdout.flush()
        self._screen = os.dup(1)

        # All that compiled code writes to descriptor 1 goes into the pipe.
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(writing)
        settings = {"encoding": stdout.encoding, "errors": stdout.errors, "closefd": False}
        sys.stdout = open(self._screen, "w", **settings)  # noqa: SIM115
        sys.stdout.reconfigure(
            line_buffering=stdout.line_buffering, write_through=stdout.write_through
        )

        # the number of greetings that have begun and not ended
        self._begun = 0
        # greetings that are not in the log yet
        self._kept: list[bytes] = []
        self._log: Path | None = None
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self._thread.start()

    def log_into(self, file: Path) -> None:
        """Appends the greetings to this file from now on, with those kept until now."""
        self._log = file
        self._write()

    def _pass_on(self, reading: int) -> None:
        """Reads the pipe to its end, keeps the greetings and writes all else to the screen."""
        with open(reading, "rb") as lines:
            for line in lines:
                self._begun += line.count(BEGINS)
                # Several threads of Gloo print at once, so a line may hold pieces of greetings.
                if self._begun and re.fullmatch(PIECES, line):
                    self._begun -= 1
                    self._kept.append(line)
                    self._write()
                else:
                    # The screen may be gone: a closed terminal, or a pipe that nobody reads.
                    with contextlib.suppress(OSError):
                        os.write(self._screen, line)

    def _write(self) -> None:
        """Appends the kept greetings to the log, if `log_into` has named it."""
        if self._log is not None:
            # A full disk must not end this thread; other parts of the run report it.
            with contextlib.suppress(OSError), self._log.open("ab") as log:
                while self._kept:
                    log.write(self._kept.pop(0))

    def close(self) -> None:
        """Ends what descriptor 1 takes, and waits END_SECONDS for what is in the pipe."""
        sys.stdout.flush()
        # Buffers of compiled code would else be written after the pipe is closed.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        # This closes the pipe, unless a process that we started still has it open. Gloo's threads
        # may greet while the process ends; compiled code has no other last words on stdout.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        self._thread.join(END_SECONDS)
