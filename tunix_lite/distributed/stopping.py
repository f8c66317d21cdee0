"""When a run is to end before its last step: a signal asked for it, or its time is up. All
processes end together.

A run stops between two rollouts, where its state is that of a whole step. While a rollout is
sampled and judged that state does not change, so nothing is lost but the rollout if it stops there;
only an update must be waited for.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from tunix_lite.distributed.join import HEARTBEAT, STARTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
# what ends jobs and closes terminals sends them, at times both
OF_MACHINES = ("SIGTERM", "SIGHUP")
# seconds
ECHO = 2.0
# what cannot be ended
UPDATE, COMPILATION = "update", "compilation"
# seconds of sampling after which several processes ask each other, at most a tenth of the grace
PERIOD = 2.0

_OURS = time.time()


def job_start_time(environ: Mapping[str, str]) -> float:
    """When, in seconds since 1970: as a launcher or a job script says, else when this process did.
    Raises ValueError.

    So max_minutes counts what went before: attempts that failed, meeting, waiting for the folder,
    compiling.
    """
    said = environ.get(STARTED) or _OURS
    try:
        return float(said)
    except ValueError:
        raise ValueError(
            f"{STARTED}={said} is no number of seconds since 1970, as `date +%s` says it"
        ) from None


class StopRun(BaseException):
    """The run ends here, on all of its processes: between two whole steps, with nothing changed
    since the last one.

    Not an Exception: no `except` of an algorithm or a reward is meant for it.
    """


class Stopping:
    """Inside `with`, the first signal is kept for `reason` and `look`; the second is a
    KeyboardInterrupt, at once.

    Signals are SIGTERM, Ctrl-C and SIGHUP; one that is ignored when we come, as nohup does with
    SIGHUP, stays ignored. Outside of the main thread, where Python has no signals, only the time
    counts.
    """

    def __init__(
        self,
        max_minutes: float | None,
        say: Callable[[str], None],
        passed: float = 0.0,
        grace: float = 30.0,
    ):
        """passed: the seconds of max_minutes that are gone already; grace:
        training.grace_seconds."""
        self._until = (
            None if max_minutes is None else time.monotonic() + 60 * max_minutes - max(passed, 0.0)
        )
        self._said, self._say, self._before = None, say, {}
        # when the first signal came
        self._heard = 0.0
        # of a step, in seconds; when we were last asked
        self._longest, self._looked = 0.0, None
        # nothing has changed since the last step at which a run can be resumed
        self.may_stop = False
        # there is a step to keep that was not there when the run began
        self.has_learned = False
        # what cannot be ended, how often it comes, since when
        self._under_way: tuple[str, int, float] | None = None
        # of the longest one so far
        self._update_seconds = 0.0
        self._period, self._grace = min(PERIOD, grace / 10), grace
        # since we last asked; between two times; when that was
        self._chunks, self._every, self._asked = (
            0,
            1,
            None,
        )
        self._watch: tuple[int, threading.Thread, int] | None = None

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}
            self._begin_to_watch()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._watch is not None:
            writing, thread, before = self._watch
            signal.set_wakeup_fd(before)
            os.close(writing)
            thread.join()
            self._watch = None

    # ---- signals

    def _on_signal(self, number: int, _) -> None:
        if self._said is not None:
            if self._is_echo(number):
                return
            raise KeyboardInterrupt
        self._said, self._heard = signal.Signals(number).name, time.monotonic()

    def _is_echo(self, number: int) -> bool:
        """Whether a second signal is the first one once more: a scheduler signals every process of
        a job, and the launcher hands its signal on. Two Ctrl-C come from a person; a launcher that
        means it kills instead."""
        name, machines = signal.Signals(number).name, OF_MACHINES
        from_a_machine = name in machines or HEARTBEAT in os.environ
        is_same = name == self._said or (name in machines and self._said in machines)
        return from_a_machine and is_same and time.monotonic() < self._heard + ECHO

    def _begin_to_watch(self) -> None:
        """A thread that says what a signal will do: the handler itself waits while compiled code
        runs, for minutes."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        numbers = set(self._before)

        def watch() -> None:
            with open(reading, "rb", buffering=0) as signals:
                while came := signals.read(1):
                    if came[0] in numbers:
                        # the run itself will find that disk full
                        with contextlib.suppress(OSError):
                            self._say(self._promise(signal.Signals(came[0]).name))
                        break
                # until it is closed
                while signals.read(64):
                    pass

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        self._watch = writing, thread, before

    def _promise(self, name: str) -> str:
        """What happens now that this signal has come."""
        once_more = "; once more stops at once"
        kept = (
            "with a checkpoint"
            if self.has_learned
            else "and no step has been made that could be saved"
        )
        if self._under_way is None:
            when = "" if self.may_stop or not self.has_learned else " before the next rollout"
            return f"{name}: stopping{when}, {kept}{once_more}"
        what, times, since = self._under_way
        if what == COMPILATION:
            return f"{name}: stopping after the {what} under way, {kept}{once_more}"
        left = since + times * self._update_seconds - time.monotonic()
        if left > self._grace:
            return (
                f"{name}: the {what} under way takes about {left:.0f} s more, longer than "
                "training.grace_seconds="
                f"{self._grace:g}, and cannot be ended: stopping after it, with a checkpoint, if "
                "we are given the time"
                f"{once_more}"
            )
        about = f", in about {left:.0f} s" if left > 1 else ""
        return f"{name}: stopping after the {what} under way{about}, with a checkpoint{once_more}"

    @contextlib.contextmanager
    def uninterruptible(self, what: str, times: int = 1) -> Iterator[None]:
        """Inside runs what cannot be ended, an UPDATE or a COMPILATION; `times`: that often, until
        the run can stop."""
        began = time.monotonic()
        self._under_way = what, times, began
        try:
            yield
            if what == UPDATE:
                self._update_seconds = max(self._update_seconds, time.monotonic() - began)
        finally:
            self._under_way = None

    # ---- whoever can stop asks

    def is_requested(self) -> bool:
        """Whether this process need not wait for what the state does not depend on; the others may
        not know yet."""
        return self.may_stop and self._said is not None

    def check_between_chunks(self) -> None:
        """Between two chunks of a rollout: raises StopRun, at the same chunk on all processes,
        if one was asked to stop.

        Alone, that costs nothing. Several processes ask each other now and then, after a number of
        chunks that all of them know, since all know how long the chunks have taken on the slowest.
        """
        if not self.may_stop:
            return
        if jax.process_count() == 1:
            return self.stop_if(self.is_requested())
        now = time.monotonic()
        self._asked = now if self._asked is None else self._asked
        self._chunks += 1
        if self._chunks < self._every:
            return
        mine = np.array([self._said is not None, (now - self._asked) / self._chunks], np.float32)
        someone, seconds = np.max(multihost_utils.process_allgather(mine), axis=0)
        self._every = int(np.clip(self._period / max(float(seconds), 1e-6), 1, 2 * self._every))
        self._chunks, self._asked = 0, time.monotonic()
        self.stop_if(bool(someone))

    def check_before_update(self) -> None:
        """Before the state changes: raises StopRun, on all processes, if one was asked to stop."""
        if self.may_stop:
            asked = self._said is not None
            if jax.process_count() > 1:
                asked = bool(np.max(multihost_utils.process_allgather(np.int32(asked))))
            self.stop_if(asked)

    def stop_if(self, now: bool) -> None:
        """Raises StopRun if `now`. All processes of the run must call it with the same answer."""
        if now:
            raise StopRun

    def reason(self) -> str | None:
        """Why to end after this step, the same on all processes; None: go on. Ask once a step.

        Time is up when another step as long as the longest so far would not end in time. The first
        one does not count: it loads and compiles.
        """
        now = time.monotonic()
        self._longest, self._looked = max(self._longest, now - (self._looked or now)), now
        is_late = self._until is not None and now + self._longest > self._until
        names = [number.name for number in SIGNALS]
        own = 1 + names.index(self._said) if self._said else 1 + len(names) if is_late else 0
        if jax.process_count() > 1:
            own = int(np.max(multihost_utils.process_allgather(np.int32(own))))
        return (None, *names, "training.max_minutes")[own]
