"""A process that makes calls for this one (workers/child.py) and can be killed at any time. Answers
are lines of JSON: what a call writes to the pipe can be wrong, but cannot run anything here."""

import io
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tunix_lite.workers.child import short_repr

# seconds until a process must have imported what it needs
START_SECONDS = 120
# seconds that a killed process may take: one that waits for a lost disk cannot even be killed
_END_SECONDS = 5
# seconds between two looks at whether a silent process is still there
_LOOK_SECONDS = 0.2
_READ_BYTES = 64 * 1024
# most seconds that the kernel is waited for while it loads a program
_LOADING = 1.0
# bytes of an answer, at most: a text of child.KEPT characters takes far less
_LONGEST = 4 * 1024 * 1024
# bytes that an empty pipe takes at once
_SURELY_FITS = 32 * 1024
# this variable of a process, which all that it starts inherit, says which process it is
_MARK = "TUNIX_LITE_REWARDS"
# not multiprocessing: its spawn imports the program that runs, and with it jax
_START = (
    "import json, sys; sys.path, *rest = json.loads(sys.argv[1]); "
    "from tunix_lite.workers.child import work; work(*rest)"
)


class Outcome(NamedTuple):
    """The outcome of a call. kind: "", value: what the function returned; or kind: error, timeout,
    crash or not_number, value: how it failed.
    Example: Outcome("", 0.5), or Outcome("timeout", None)."""

    kind: str
    value: Any


class WorkerProcess:
    """A process, and the pipes to and from it. It is first sent a list of functions, and then lists
    of (number of the call, place of the function, its arguments). limits: bytes of memory, and
    seconds of the processor for a call. output: where it prints; None: where this process does.
    longest: bytes of an answer. Raises OSError."""

    def __init__(
        self,
        environment: Mapping[str, str],
        limits: tuple[int, float] | None = None,
        output: BinaryIO | int | None = None,
        flags: Sequence[str] = (),
        import_path: Sequence[str] = (),
        longest: int = _LONGEST,
    ):
        calls, self._calls = Pipe(duplex=False)
        reading, answers = os.pipe()
        self._answers = io.FileIO(reading)
        # seconds of the last call, as the process measured them
        self.seconds = 0.0
        # whole lines of answers, and the beginning of the next one
        self._lines: deque[bytes] = deque()
        self._rest = bytearray()
        self._longest = longest
        self._mark = secrets.token_hex(16)
        self._arriving = select.poll()
        self._arriving.register(reading, select.POLLIN)
        path = [*map(str, sys.path), *import_path]
        # Our copies of its ends are closed, or its end would not end the pipes.
        with calls, open(answers, "wb"):
            rest = [path, calls.fileno(), answers, os.getpid(), limits]
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", _START, json.dumps(rest)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(calls.fileno(), answers),
                # out of reach of Ctrl-C, and a group that can be killed as one
                start_new_session=True,
                env={**environment, _MARK: self._mark},
            )

    def send(self, message: bytes, seconds: float) -> None:
        """Sends pickled calls. A process that does not read a long message in time is killed."""
        timer = threading.Timer(seconds, self.kill)
        # A short one fits into the pipe, whether or not it is read.
        if len(message) > _SURELY_FITS:
            timer.start()
        # It is gone, and `answer` says how.
        with suppress(OSError):
            self._calls.send_bytes(message)
        timer.cancel()

    def answer(self, seconds: float, number: int | None = None) -> Outcome:
        """Returns the next answer, within so many seconds; it must be about call `number`."""
        began = time.monotonic()
        while not self._lines:
            # Asked before the pipe is read: what it wrote before its end is then all there.
            is_gone = self.process.poll() is not None
            left = began + seconds - time.monotonic()
            if self._arriving.poll(1000 * max(0.0, min(_LOOK_SECONDS, left))):
                # Splits it into whole lines and a rest, which is never copied for those behind it.
                part = self._answers.read(_READ_BYTES)
                is_gone = not part
                *lines, rest = part.split(b"\n")
                if lines:
                    lines[0] = bytes(self._rest) + lines[0]
                    self._rest = bytearray()
                    self._lines.extend(lines)
                self._rest += rest
            if self._lines:
                break
            if is_gone:
                # the pipe may be closed before the process is gone
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_LOOK_SECONDS)
                code = self.process.poll()
                if code is None:
                    return "crash", "closed the pipes of its process"
                how = f"exit code {code}"
                if code < 0:
                    known = -code in set(signal.Signals)
                    how = signal.Signals(-code).name if known else f"signal {-code}"
                return "crash", f"ended its process with {how}"
            if len(self._rest) > self._longest:
                how = f"wrote more than {self._longest:,} bytes to the pipe of its process"
                return "crash", how
            # whether or not something still comes
            if left <= 0:
                return "timeout", None
        line = self._lines.popleft()
        try:
            about, kind, value, taken = json.loads(line)
            self.seconds = float(taken)
        except (TypeError, ValueError):
            return "crash", f"wrote {short_repr(line)} to the pipe of its process"
        if about != number and kind != "refused":
            return "crash", "got the answer to another call from its process"
        return kind, value

    def kill(self) -> None:
        """Kills it and all that it started. It may be done twice, and from another thread."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        # its descendants in any session or group
        for pid in find_marked(f"{_MARK}={self._mark}".encode()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)

    def release(self) -> None:
        """Closes the pipes. Only the thread that reads may do this."""
        self._answers.close()
        # what could not be sent
        with suppress(OSError):
            self._calls.close()


def find_marked(mark: bytes) -> set[int]:
    """The ids of the other running processes that were started with `mark` in their environment."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        # A process may be gone by now, or belong to another user.
        with suppress(OSError):
            pid = int(process.name)
            if pid != os.getpid() and mark in _environment(process):
                pids.add(pid)
    return pids


def _environment(process: Path) -> bytes:
    """The variables that a process was started with; b"" if it has ended, or is of the kernel.
    While the kernel loads a program, its process shows none: it is asked again."""
    deadline = time.monotonic() + _LOADING
    while True:
        # Such a process has memory, but env_end, field 51 in proc(5), is 0. Asked first, since it
        # may be loaded at any moment.
        memory = int((process / "statm").read_text().split()[0])
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        is_loading = memory > 0 and fields[51 - 3] == "0"
        environment = (process / "environ").read_bytes()
        if environment or not is_loading or time.monotonic() > deadline:
            return environment
        time.sleep(0.001)
