"""Ends a run before its last step, on all processes at once, after a signal or when time is up:
between two rollouts or during one, whose state is that of a whole step. An update must be waited
for."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tunix_lite.distributed.join import HEARTBEAT, STARTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals that a scheduler or a closed terminal sends, sometimes both.
_OF_MACHINES = ("SIGTERM", "SIGHUP")
# Seconds in which a second signal may be the first one, sent once more.
_ECHO = 2.0
# What a signal cannot interrupt.
UPDATE = "update"
COMPILATION = "compilation"
# Seconds of sampling between two questions among processes; at most a tenth of the grace period.
PERIOD = 2.0

_PROCESS_START = time.time()


def job_start_time(environ: Mapping[str, str]) -> float:
    """When the job started, in seconds since 1970: TUNIX_LITE_STARTED, or this process's start.
    Raises ValueError."""
    text = environ.get(STARTED) or _PROCESS_START
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{STARTED}={text} is no number of seconds since 1970, as `date +%s` prints it"
        ) from None


class StopRun(BaseException):
    """Ends the run on all of its processes. No `except Exception` catches it."""


class Stopping:
    """Handles signals and the time limit of a run, inside `with`. The first signal waits for
    `reason` and the checks below; a second one raises KeyboardInterrupt. Outside of the main thread
    only the time limit counts."""

    def __init__(
        self,
        max_minutes: float | None,
        say: Callable[[str], None],
        passed: float = 0.0,
        grace: float = 30.0,
    ):
        """max_minutes: None: no limit; `passed` seconds of it are over. say: prints a line."""
        # Set by the loop: whether the state is that of a whole step, so that the run may stop now.
        self.may_stop = False
        # Set by the loop: whether there is a step to save that this run has made.
        self.has_learned = False

        # the time limit
        minutes = math.inf if max_minutes is None else max_minutes
        self._deadline = time.monotonic() + 60 * minutes - max(passed, 0.0)
        # seconds of the longest step so far, and the time at which `reason` was last called
        self._longest = 0.0
        self._last_reason: float | None = None

        # signals: the name of the first one, when it came, and the handlers before ours
        self._signal_name: str | None = None
        self._signal_time = 0.0
        self._handlers_before: dict[int, Any] = {}
        self._watcher: tuple[int, threading.Thread, int] | None = None
        self._say = say
        self._grace = grace

        # UPDATE or COMPILATION under way, and when it ends if it is as long as the longest so far.
        self._under_way: str | None = None
        self._likely_end = 0.0
        self._update_seconds = 0.0

        # Processes ask each other every `_every` chunks. `_chunks` were sampled since `_asked`.
        self._period = min(PERIOD, grace / 10)
        self._every = 1
        self._chunks = 0
        self._asked: float | None = None

    def __enter__(self) -> "Stopping":
        # Python lets only the main thread set handlers.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            # nohup has SIGHUP ignored, and it stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers_before[number] = signal.signal(number, self._on_signal)

        # Python runs handlers only when compiled code returns, which may take minutes. Until then
        # the signal is a byte in a pipe, and a thread says at once what it will do.
        reading, writing = os.pipe()
        # Python refuses a file for signals that may block.
        os.set_blocking(writing, False)
        fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        numbers = set(self._handlers_before)

        def watch() -> None:
            with open(reading, "rb", buffering=0) as signals:
                while came := signals.read(1):
                    if came[0] in numbers:
                        # On a full disk the log cannot be written; the run itself reports that.
                        with contextlib.suppress(OSError):
                            self._say(self._promise(signal.Signals(came[0]).name))
                        break
                # Read on until the pipe is closed, or it would fill up.
                while signals.read(64):
                    pass

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        self._watcher = (writing, thread, fd_before)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        if self._watcher is not None:
            writing, thread, fd_before = self._watcher
            # First, or a signal would be written to a pipe that is closed.
            signal.set_wakeup_fd(fd_before)
            # The end of the pipe ends the thread.
            os.close(writing)
            thread.join()
            self._watcher = None

    # ---- signals

    def _on_signal(self, number: int, _) -> None:
        name = signal.Signals(number).name
        first = self._signal_name
        if first is None:
            self._signal_name = name
            self._signal_time = time.monotonic()
            return
        # The same may be sent once more: by a scheduler to every process of a job, or by the
        # launcher. Two Ctrl-C without a launcher come from a person.
        from_a_machine = name in _OF_MACHINES or HEARTBEAT in os.environ
        is_same = name == first or (name in _OF_MACHINES and first in _OF_MACHINES)
        if not (from_a_machine and is_same and time.monotonic() < self._signal_time + _ECHO):
            raise KeyboardInterrupt

    def _promise(self, name: str) -> str:
        """The line that says what happens after the first signal, of this name."""
        once_more = "; once more stops at once"
        kept = "and no step has been made that could be saved"
        if self.has_learned:
            kept = "with a checkpoint"

        # A rollout is sampled or graded, or nothing is learned yet.
        what = self._under_way
        if what is None:
            when = "" if self.may_stop or not self.has_learned else " before the next rollout"
            return f"{name}: stopping{when}, {kept}{once_more}"
        if what == COMPILATION:
            return f"{name}: stopping after the {what} under way, {kept}{once_more}"
        left = self._likely_end - time.monotonic()
        about = f", in about {left:.0f} s" if left > 1 else ""
        if left > self._grace:
            about += f", longer than training.grace_seconds={self._grace:g}"
        return (
            f"{name}: stopping after the {what} under way{about}, with a checkpoint{once_more}"
        )

    @contextlib.contextmanager
    def uninterruptible(self, what: str, times: int = 1) -> Iterator[None]:
        """A context around an UPDATE or a COMPILATION. times: of them before the run may stop."""
        began = time.monotonic()
        self._under_way = what
        self._likely_end = began + times * self._update_seconds
        try:
            yield
            # An update that raised says nothing of how long one takes.
            if what == UPDATE:
                self._update_seconds = max(self._update_seconds, time.monotonic() - began)
        finally:
            self._under_way = None

    # ---- questions of the loop, the sampler and the graders

    def is_requested(self) -> bool:
        """Whether this process was asked to stop and may. Other processes may not know it yet."""
        return self.may_stop and self._signal_name is not None

    def check_between_chunks(self) -> None:
        """Raises StopRun, at the same chunk on all, if one is to. All call it equally often."""
        if not self.may_stop:
            return
        if jax.process_count() == 1:
            return self.stop_if(self.is_requested() or self._is_too_late())

        # Is it time to ask? All agree on the number of chunks, as it follows from the slowest.
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
        self._chunks += 1
        if self._chunks < self._every:
            return

        # Ask: was one of us signalled, and how long does a chunk take on the slowest?
        asked = self._signal_name is not None or self._is_too_late()
        own = np.array([asked, (now - self._asked) / self._chunks], np.float32)
        is_signalled, seconds = np.max(multihost_utils.process_allgather(own), axis=0)
        chunks_a_period = self._period / max(float(seconds), 1e-6)
        self._every = int(np.clip(chunks_a_period, 1, 2 * self._every))
        self._chunks = 0
        self._asked = time.monotonic()
        self.stop_if(bool(is_signalled))

    def check_before_update(self) -> None:
        """Raises StopRun on all processes if one is to stop, or an update would end too late."""
        if self.may_stop:
            asked = self._signal_name is not None or self._is_too_late(self._update_seconds)
            if jax.process_count() > 1:
                asked = bool(np.max(multihost_utils.process_allgather(np.int32(asked))))
            self.stop_if(asked)

    def _is_too_late(self, more: float = 0.0) -> bool:
        """Whether the time limit is over in `more` seconds. The first step is always made."""
        return self.has_learned and time.monotonic() + more > self._deadline

    def stop_if(self, now: bool) -> None:
        """Raises StopRun if `now`. All processes of the run must call it with the same answer."""
        if now:
            raise StopRun

    def reason(self) -> str | None:
        """Why the run must end after this step: "SIGTERM", "training.max_minutes" ...; None: go on.
        Call it once a step."""
        # The first step, which compiles, does not count.
        now = time.monotonic()
        if self._last_reason is not None:
            self._longest = max(self._longest, now - self._last_reason)
        self._last_reason = now
        is_late = now + max(self._longest, self._update_seconds) > self._deadline

        # Processes exchange the index of their reason; the highest one counts.
        reasons = (None, *[number.name for number in SIGNALS], "training.max_minutes")
        own = reasons.index(self._signal_name)
        if own == 0 and is_late:
            own = len(reasons) - 1
        if jax.process_count() > 1:
            own = int(np.max(multihost_utils.process_allgather(np.int32(own))))
        return reasons[own]
