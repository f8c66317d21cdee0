"""When a run ends before its last step."""

import signal
import time

import pytest

from tunix_lite.parallel import stopping


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


def test_what_the_job_spent_before_counts(clock):
    """Of ten minutes; a clock of another machine that is ahead of ours adds none."""
    for passed, left in ((0, 600), (300, 300), (-300, 600)):
        clock[0] = 0.0
        asked = stopping.Stopping(10, print, passed)
        for seconds, reason in ((left - 1, None), (left + 1, "training.max_minutes")):
            clock[0] = seconds
            assert asked.reason() == reason, (passed, seconds)
    assert stopping.Stopping(10, print, passed=900).reason() == "training.max_minutes"


def test_a_job_began_when_its_launcher_says_so_else_when_this_process_did():
    assert stopping.job_began({"TUNIX_LITE_STARTED": "1700000000"}) == 1.7e9
    for environ in ({}, {"TUNIX_LITE_STARTED": ""}):
        first = stopping.job_began(environ)
        assert first <= time.time() and stopping.job_began(environ) == first
    with pytest.raises(
        ValueError, match=r"^TUNIX_LITE_STARTED=noon is no number of seconds since 1970, as `date \+%s`"
    ):
        stopping.job_began({"TUNIX_LITE_STARTED": "noon"})


def test_the_second_signal_is_at_once():
    said = []
    with stopping.Stopping(None, said.append) as asked:
        assert asked.reason() is None
        signal.raise_signal(signal.SIGTERM)
        assert asked.reason() == "SIGTERM" and len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_a_launcher_hands_on_as_well_counts_once(number, clock, monkeypatch):
    """Who ends a whole job signals both. A person's second SIGTERM comes later; a second Ctrl-C the launcher keeps."""
    monkeypatch.setenv(stopping.HEARTBEAT, "a file")
    with stopping.Stopping(None, print) as asked:
        for seconds in (10, 10.001, 11.9):
            clock[0] = seconds
            signal.raise_signal(number)
        assert asked.reason() == signal.Signals(number).name
        clock[0] = 12.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_without_a_launcher_two_sigterms_at_once_are_one_and_two_ctrl_c_are_two(clock, monkeypatch):
    monkeypatch.delenv(stopping.HEARTBEAT, raising=False)
    with stopping.Stopping(None, print) as asked:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert asked.reason() == "SIGTERM"
    with stopping.Stopping(None, print):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
