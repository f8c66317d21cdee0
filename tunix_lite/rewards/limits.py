"""A limit on the time of a part of a call that has none of its own: a pattern, or sympy."""

import contextlib
import signal
import threading
from collections.abc import Iterator


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
