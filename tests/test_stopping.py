"""When a run ends before its last step."""

import contextlib
import signal
import threading
import time

import numpy as np
import pytest

from tunix_lite.distributed import stopping


@pytest.fixture(autouse=True)
def usual_signals():
    """As in a shell's foreground: what runs in its background, or under nohup, begins with some of them ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, settable."""
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    return now


def test_time_is_up_when_another_step_would_not_end_in_time(clock):
    """Of ten minutes four go into loading and compiling, then steps take 60, 120 and 60 s: 540 s, and no 120 more."""
    asked = stopping.Stopping(10, print)
    for seconds, reason in ((240, None), (300, None), (420, None), (480, None), (540, "training.max_minutes")):
        clock[0] = seconds
        assert asked.reason() == reason, seconds


def test_a_step_that_cannot_end_in_time_is_left_between_two_chunks_or_before_its_update(clock):
    """The first step tells nothing of the second one, which overshot a limit by 79 s."""
    asked = stopping.Stopping(1, print)
    asked.may_stop = True
    clock[0] = 61
    asked.check_between_chunks()  # the first step is made, however long it takes
    clock[0] = 0
    with asked.uninterruptible(stopping.UPDATE):
        clock[0] = 20
    asked.has_learned = True
    assert asked.reason() is None
    clock[0] = 39
    asked.check_before_update()
    clock[0] = 41
    asked.check_between_chunks()
    with pytest.raises(stopping.StopRun):
        asked.check_before_update()  # 20 s more would be 61
    assert asked.reason() == "training.max_minutes"
    clock[0] = 61
    with pytest.raises(stopping.StopRun):
        asked.check_between_chunks()


def test_a_job_began_when_its_launcher_says_so_else_when_this_process_did():
    assert stopping.job_start_time({"TUNIX_LITE_STARTED": "1700000000"}) == 1.7e9
    for environ in ({}, {"TUNIX_LITE_STARTED": ""}):
        first = stopping.job_start_time(environ)
        assert first <= time.time() and stopping.job_start_time(environ) == first
    with pytest.raises(
        ValueError, match=r"^TUNIX_LITE_STARTED=noon is no number of seconds since 1970, as `date \+%s`"
    ):
        stopping.job_start_time({"TUNIX_LITE_STARTED": "noon"})


SIGNALS = [  # (is a launcher there, the second signal of its time, whether it counts as the same one)
    (False, signal.SIGINT, 0, False),  # a person's second one stops at once
    (False, signal.SIGTERM, 0, True),
    (False, signal.SIGHUP, 0, True),  # systemd ends a session with both
    (True, signal.SIGTERM, 1.9, True),  # who ends a whole job signals both, launcher and process
    (True, signal.SIGTERM, 2.1, False),
]


@pytest.mark.parametrize("by_launcher, second, after, is_one", SIGNALS)
def test_a_second_signal_stops_at_once_but_not_one_that_comes_with_the_first(
    by_launcher, second, after, is_one, clock, monkeypatch
):
    if by_launcher:
        monkeypatch.setenv(stopping.HEARTBEAT, "a file")
    said = []
    with stopping.Stopping(None, said.append) as asked:
        assert asked.reason() is None
        signal.raise_signal(signal.SIGTERM)
        clock[0] = after
        with contextlib.nullcontext() if is_one else pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
        assert asked.reason() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def heard(said: list) -> list:
    """What a thread says of a signal, as soon as it has."""
    until = time.time() + 5
    while not said and time.time() < until:
        time.sleep(0.01)
    return said


@pytest.mark.parametrize(
    "may_stop, has_learned, under_way, promise",
    [
        (True, True, None, "stopping, with a checkpoint"),
        (False, True, None, "stopping before the next rollout, with a checkpoint"),
        (False, False, None, "stopping, and no step has been made that could be saved"),
        (False, True, "update", "stopping after the update under way, in about 15 s, with a checkpoint"),
        (False, True, "two updates", "stopping after the update under way, in about 35 s, longer than training.grace_"),
    ],
)
def test_what_a_signal_does_is_said_at_once_though_compiled_code_runs(may_stop, has_learned, under_way, promise, clock):
    """An update took 20 s before, and this one has run for 5."""
    said = []
    with stopping.Stopping(None, said.append, grace=30) as asked:
        with asked.uninterruptible(stopping.UPDATE):
            clock[0] = 20.0
        asked.may_stop, asked.has_learned = may_stop, has_learned
        times = 2 if under_way == "two updates" else 1
        what = stopping.UPDATE if times == 2 else under_way
        with asked.uninterruptible(what, times) if what else contextlib.nullcontext():
            clock[0] = 25.0
            signal.raise_signal(signal.SIGTERM)
            (line,) = heard(said)
            assert line.startswith(f"SIGTERM: {promise}") and line.endswith("; once more stops at once")


class Together:
    """Two processes, each with a clock of its own, whose chunks take this long on the one and on the other."""

    def __init__(self, monkeypatch, seconds: tuple[float, float]):
        self.now, self.asks, self.seconds = [0.0, 0.0], 0, seconds
        self.turn, self.meeting, self.given = threading.local(), threading.Barrier(2), [None, None]
        monkeypatch.setattr(stopping.jax, "process_count", lambda: 2)
        monkeypatch.setattr(stopping.time, "monotonic", lambda: self.now[self.turn.process])
        monkeypatch.setattr(stopping.multihost_utils, "process_allgather", self.gather)

    def gather(self, value):
        self.given[self.turn.process] = value
        self.meeting.wait(10)
        everyone = np.stack(self.given)
        self.meeting.wait(10)
        self.asks += self.turn.process == 0
        return everyone

    def chunks(self, process: int, most: int, signal_at: int | None, left: list) -> None:
        self.turn.process = process
        asked = stopping.Stopping(None, print)  # threads: it handles no signals
        asked.may_stop = True
        try:
            for chunk in range(most):
                self.now[process] += self.seconds[process]
                if chunk == signal_at:
                    asked._signal_name = "SIGTERM"
                asked.check_between_chunks()
        except stopping.StopRun:
            left[process] = chunk

    def run(self, most: int, signal_at: int | None) -> list:
        """The chunk after which each left, when process 1 had its signal before it looked at that one."""
        left = [None, None]
        at = (None, signal_at)
        threads = [threading.Thread(target=self.chunks, args=(p, most, at[p], left)) for p in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return left


@pytest.mark.parametrize("seconds", [(0.05, 0.08), (0.5, 0.01), (3.0, 3.0), (0.001, 0.001)])
def test_processes_leave_at_the_same_chunk_though_only_one_was_signalled(seconds, monkeypatch):
    """And within some two periods of two seconds, on the slower clock."""
    left = Together(monkeypatch, seconds).run(10_000, 1_000)
    assert left[0] == left[1] and 1_000 <= left[0] <= 1_001 + 2 * stopping.PERIOD / max(seconds)
