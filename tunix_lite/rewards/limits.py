"""Limits on the time and memory of a part of a call: a pattern that never ends, or sympy."""

import contextlib
import os
import pickle
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# bytes of memory that a child may take beside what it begins with
CHILD_MEMORY = 1024**3


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError, naming `what`, when the block takes longer than this.

    It works by a signal, which Python handles in the main thread of a process; a reward worker
    makes all its calls there. In another thread the block has no limit of its own, and only
    rewards.timeout ends it. A part in C that never looks for signals is ended by that, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call_with_limits(fn: Callable[[], Any], seconds: float, what: str) -> Any:
    """What fn() returns, made in a forked child that is killed after so many seconds, whatever it
    does then, and that has CHILD_MEMORY.

    Raises what fn raises, TimeoutError naming `what`, and MemoryError where the child was killed.
    Where jax is loaded, forking is not safe; fn is then called here under `time_limit`.
    """
    if "jax" in sys.modules:
        with time_limit(seconds, what):
            return fn()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(fn, writing)
    os.close(writing)
    try:
        return _await(reading, seconds, what)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer(fn: Callable[[], Any], writing: int) -> None:
    """The child: it ends here, and never comes back to the worker's code."""
    try:
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + CHILD_MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            said = pickle.dumps((True, fn()))
        except Exception as error:
            said = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"[:1000])))
        with os.fdopen(writing, "wb") as file:
            file.write(said)
    finally:
        os._exit(0)


def _await(reading: int, seconds: float, what: str) -> Any:
    arriving = select.poll()
    arriving.register(reading, select.POLLIN)
    deadline = time.monotonic() + seconds
    said = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not arriving.poll(1000 * left):
            raise TimeoutError(f"{what} took more than {seconds:g} seconds")
        part = os.read(reading, 65536)
        if not part:
            break
        said += part
    if not said:
        raise MemoryError(f"{what} ended its process")
    is_returned, value = pickle.loads(said)
    if not is_returned:
        raise value
    return value
