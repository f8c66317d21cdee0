"""Runs code from a folder that we do not trust in another process, with limits: see
confined_worker.

One process serves all requests. It starts with the first one (some 0.1 s), and an answer takes a
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
from typing import Any

import jinja2
import markupsafe

import tunix_lite
from tunix_lite.models.confined_worker import HEAD, LENGTH

# Bytes of addresses. An interpreter with jinja2 takes some 50 MB.
MEMORY = 512 * 2**20
# Of the processor, for one request.
SECONDS = 1.0
# Seconds by the clock, for one request: a second limit, for a process that was stopped.
WAITED = 30.0
# Attempts. A signal that was meant for the run may end the process.
STARTS = 3
# Bytes of one answer.
MOST_ANSWER = 2**28
START = (
    "import json, sys; sys.path, *rest = json.loads(sys.argv[1]); "
    "from tunix_lite.models.confined_worker import serve; serve(*rest)"
)
# Variables that Python may need to start. None of them holds a secret.
KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")


class Refused(ValueError):
    """The request failed, or exceeded a limit. The message is the end of a sentence: what it
    did."""


def ask(kind: str, *arguments: Any) -> str:
    """The worker's answer to a request. kind: one of confined_worker.HANDLERS. arguments: plain
    values. Raises Refused."""
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
    """The worker has ended, or does not answer."""

    def __init__(self, how: str, overran: bool):
        super().__init__(how)
        self.overran = overran


class _Worker:
    """The process, and the pipes to it."""

    def __init__(self):
        packages = [
            str(Path(module.__file__).parents[1]) for module in (tunix_lite, jinja2, markupsafe)
        ]
        # An editable install is found by a hook, not by sys.path, so the packages are named.
        import_path = [*map(os.path.abspath, sys.path), *packages]
        # -I -S: neither PYTHONPATH nor start-up code of site-packages; sys.path is an argument.
        command = [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            START,
            json.dumps([import_path, MEMORY, SECONDS]),
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
        """Whether this process may use it. A fork has the same pipes, and may not."""
        return self._owner == os.getpid() and not self._process.stdin.closed

    def ask(self, request: bytes) -> str:
        """The answer to a pickled request. Raises Refused, or _Gone if the worker ends."""
        until = time.monotonic() + WAITED
        try:
            self._send(LENGTH.pack(len(request)) + request, until)
            succeeded, size = HEAD.unpack(self._receive(HEAD.size, until))
            if size > MOST_ANSWER:
                raise _Gone(f"answers with {size:,} bytes", overran=True)
            answer = self._receive(size, until).decode()
        except BrokenPipeError:
            raise self._gone() from None
        if not succeeded:
            raise Refused(answer)
        return answer

    def _send(self, content: bytes, until: float) -> None:
        to = self._process.stdin.fileno()
        left = memoryview(content)
        while left:
            self._wait(to, select.POLLOUT, until)
            left = left[os.write(to, left) :]

    def _receive(self, count: int, until: float) -> bytes:
        source = self._process.stdout.fileno()
        parts = []
        while count:
            self._wait(source, select.POLLIN, until)
            parts.append(os.read(source, min(count, 2**20)))
            count -= len(parts[-1])
            if not parts[-1]:
                raise self._gone()
        return b"".join(parts)

    def _wait(
        self,
        for_: int,
        event: int,
        until: float,
    ) -> None:
        ready = select.poll()
        ready.register(for_, event)
        if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
            raise _Gone(f"takes more than {WAITED:g} seconds", overran=True)

    def _gone(self) -> _Gone:
        """The exception that says how it ended."""
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
        """Ends the process, if it is ours, and closes the pipes."""
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
# In a fork, a thread that does not exist there may hold the lock.
os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.Lock()))


@atexit.register
def _close() -> None:
    if _running is not None:
        _running.close()
