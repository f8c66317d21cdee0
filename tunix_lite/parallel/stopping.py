"""When a run is to end before its last step: a signal asked for it, or its time is up. All processes end together."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from tunix_lite.parallel.distributed import HEARTBEAT, STARTED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO = 2.0  # seconds

_OURS = time.time()


def job_began(environ: Mapping[str, str]) -> float:
    """When, in seconds since 1970: as a launcher or a job script says, else when this process did. Raises ValueError.

    So max_minutes counts what went before: attempts that failed, meeting, waiting for the folder, compiling.
    """
    said = environ.get(STARTED) or _OURS
    try:
        return float(said)
    except ValueError:
        raise ValueError(f"{STARTED}={said} is no number of seconds since 1970, as `date +%s` says it") from None


class Stopping:
    """Inside `with`, the first SIGTERM or Ctrl-C is kept for `reason`; the second is a KeyboardInterrupt, at once.

    Outside of the main thread, where Python has no signals, only the time counts.
    """

    def __init__(self, max_minutes: float | None, say: Callable[[str], None], passed: float = 0.0):
        """`passed`: the seconds of max_minutes that are gone already."""
        self._until = None if max_minutes is None else time.monotonic() + 60 * max_minutes - max(passed, 0.0)
        self._said, self._say, self._before = None, say, {}
        self._heard = 0.0  # when the first signal came
        self._longest, self._looked = 0.0, None  # of a step, in seconds; when we were last asked

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _) -> None:
        if self._said is not None:
            if self._is_echo(number):
                return
            raise KeyboardInterrupt
        self._said, self._heard = signal.Signals(number).name, time.monotonic()
        self._say(f"{self._said}: stopping after this step, with a checkpoint; once more stops at once")

    def _is_echo(self, number: int) -> bool:
        """Whether a second signal is the first one once more: who ends a whole job signals us, and whoever started us,
        who hands it on. Two Ctrl-C are those of a person, but from a launcher, which would kill instead."""
        from_a_machine = number == signal.SIGTERM or HEARTBEAT in os.environ
        return from_a_machine and signal.Signals(number).name == self._said and time.monotonic() < self._heard + ECHO

    def reason(self) -> str | None:
        """Why to end after this step, the same on all processes; None: go on. Ask once a step.

        Time is up when another step as long as the longest so far would not end in time. The first one does not count:
        it loads and compiles.
        """
        now = time.monotonic()
        self._longest, self._looked = max(self._longest, now - (self._looked or now)), now
        is_late = self._until is not None and now + self._longest > self._until
        own = 1 + SIGNALS.index(signal.Signals[self._said]) if self._said else 3 if is_late else 0
        if jax.process_count() > 1:
            own = int(np.max(multihost_utils.process_allgather(np.int32(own))))
        return (None, *(number.name for number in SIGNALS), "training.max_minutes")[own]
