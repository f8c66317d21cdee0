"""When a run ends before its last step."""

import signal

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


def test_the_second_signal_is_at_once():
    said = []
    with stopping.Stopping(None, said.append) as asked:
        assert asked.reason() is None
        signal.raise_signal(signal.SIGTERM)
        assert asked.reason() == "SIGTERM" and len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
