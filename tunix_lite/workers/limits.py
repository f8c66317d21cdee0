"""Limits on the time and memory of a part of a call: a pattern that never ends, or sympy."""

import contextlib
import multiprocessing
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# bytes of memory that a child may take beside what it begins with
_CHILD_MEMORY = 1024**3


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError, naming `what`, when the block takes longer than this. It works by a
    signal, in the main thread alone, where a reward worker makes its calls; C that never looks for
    signals goes on."""
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


def call_with_limits(fn: Callable[[], T], seconds: float, what: str) -> T:
    """Calls fn in a forked child, with _CHILD_MEMORY, which is killed after so many seconds; where
    jax is loaded, forking is not safe, and fn is called here under `time_limit`. Raises what fn
    raises, TimeoutError naming `what`, and MemoryError where the child was killed."""
    if "jax" in sys.modules:
        with time_limit(seconds, what):
            return fn()
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)

    def answer() -> None:
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            # The fork has the addresses of its parent, and they count, too.
            most = pages * resource.getpagesize() + _CHILD_MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            result = (True, fn())
        except Exception as error:
            # Not the error itself, which may not survive pickling.
            result = (False, RuntimeError(f"{type(error).__name__}: {error}"[:1000]))
        writing.send(result)

    child = fork.Process(target=answer, daemon=True)
    child.start()
    # Otherwise the end of the child would not end the pipe.
    writing.close()
    try:
        if not reading.poll(seconds):
            raise TimeoutError(f"{what} took more than {seconds:g} seconds")
        is_returned, value = reading.recv()
    except EOFError:
        raise MemoryError(f"{what} ended its process") from None
    finally:
        reading.close()
        child.kill()
        child.join()
    if not is_returned:
        raise value
    return value
