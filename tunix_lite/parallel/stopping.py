"""When a run is to end before its last step: a signal asked for it, or its time is up. All processes end together."""

import signal
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Inside `with`, the first SIGTERM or Ctrl-C is kept for `reason`; the second is a KeyboardInterrupt, at once.

    Outside of the main thread, where Python has no signals, only the time counts.
    """

    def __init__(self, max_minutes: float | None, say: Callable[[str], None]):
        self._until = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._said, self._say, self._before = None, say, {}
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
            raise KeyboardInterrupt
        self._said = signal.Signals(number).name
        self._say(f"{self._said}: stopping after this step, with a checkpoint; once more stops at once")

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
