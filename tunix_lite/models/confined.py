"""Asks a process of its own, with limits, to run what a stranger's folder brought: see
confined_worker.

One process serves all. It starts when it is first asked (some 0.1 s), and an answer takes a
fraction of a millisecond.
"""

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jinja2
import markupsafe

import tunix_lite
from tunix_lite.models.confined_worker import HEAD, LENGTH

# bytes of addresses; an interpreter with jinja2 takes some 50 MB
MEMORY = 512 * 2**20
# of the processor, for one request
SECONDS = 1.0
# seconds by the clock, for one request: another limit, for a process that somebody has stopped
WAITED = 30.0
# attempts: a signal that was meant for the run may end the process
STARTS = 3
# bytes
MOST_ANSWER = 2**28
START = (
    "import json, sys; sys.path, *rest = json.loads(sys.argv[1]); "
    "from tunix_lite.models.confined_worker import serve; serve(*rest)"
)
# what starting Python may need; no token
KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONHOME",
)


class Refused(ValueError):
    """The request failed, or overran a limit. The message is the end of a sentence: what it did."""


def ask(kind: str, *arguments) -> str:
    """What the worker says to a request (confined_worker.ASKED) with these plain values. Raises
    Refused."""
    global _running
    request = pickle.dumps((kind, arguments))
    with _LOCK:
        for _ in range(STARTS):
            if _running is None or not _running.is_ours():
                _running = _Worker()
            try:
                return _running.ask(request)
            except _Gone as gone:
                _running.close()
                _running = None
                if gone.overran:
                    raise Refused(str(gone)) from None
                last = gone
    raise Refused(f"ends the process that runs it ({last})")


class _Gone(Exception):
    """The worker is no more, or may as well be."""

    def __init__(self, how: str, overran: bool):
        super().__init__(how)
        self.overran = overran


class _Worker:
    def __init__(self):
        packages = [
            str(Path(module.__file__).parents[1]) for module in (tunix_lite, jinja2, markupsafe)
        ]
        # a finder of an editable install is not in sys.path
        found_in = [
            *map(os.path.abspath, sys.path),
            *packages,
        ]
        # -I -S: neither PYTHONPATH nor site-packages' start-up code; sys.path is given
        command = [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            START,
            json.dumps([found_in, MEMORY, SECONDS]),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in KEPT if name in os.environ},
            bufsize=0,
        )
        self._owner = os.getpid()
        os.set_blocking(self._process.stdin.fileno(), False)

    def is_ours(self) -> bool:
        """Whether we may ask it: a fork of ours has the same pipes, and they may have been
        closed."""
        return self._owner == os.getpid() and not self._process.stdin.closed

    def ask(self, request: bytes) -> str:
        until = time.monotonic() + WAITED
        try:
            self._send(LENGTH.pack(len(request)) + request, until)
            succeeded, size = HEAD.unpack(self._receive(HEAD.size, until))
            if size > MOST_ANSWER:
                raise _Gone(f"answers with {size:,} bytes", overran=True)
            said = self._receive(size, until).decode()
        except BrokenPipeError:
            raise self._gone() from None
        if not succeeded:
            raise Refused(said)
        return said

    def _send(self, content: bytes, until: float) -> None:
        to, left = self._process.stdin.fileno(), memoryview(content)
        while left:
            self._wait(to, select.POLLOUT, until)
            left = left[os.write(to, left) :]

    def _receive(self, count: int, until: float) -> bytes:
        source, parts = self._process.stdout.fileno(), []
        while count:
            self._wait(source, select.POLLIN, until)
            parts.append(os.read(source, min(count, 2**20)))
            count -= len(parts[-1])
            if not parts[-1]:
                raise self._gone()
        return b"".join(parts)

    def _wait(self, for_: int, event: int, until: float) -> None:
        ready = select.poll()
        ready.register(for_, event)
        if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
            raise _Gone(f"takes more than {WAITED:g} seconds", overran=True)

    def _gone(self) -> _Gone:
        """How it ended."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return _Gone("closes its pipes", overran=True)
        if code == -signal.SIGPROF:
            return _Gone(
                f"takes more than {SECONDS:g} second{'' if SECONDS == 1 else 's'} of the processor",
                True,
            )
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return _Gone(how, overran=False)

    def close(self) -> None:
        is_ours = self.is_ours()
        if is_ours:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        if is_ours:
            self._process.wait()


_running: _Worker | None = None
_LOCK = threading.Lock()
# another thread may hold it
os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.Lock()))


@atexit.register
def _close() -> None:
    if _running is not None:
        _running.close()
