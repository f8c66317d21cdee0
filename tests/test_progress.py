"""What a program says while it works: how far it is, how long it still takes, on a terminal and on a pipe."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import numpy as np
import pytest

from tunix_lite.commands.generate import PartialFile
from tunix_lite.rollout.requests import Request
from tunix_lite.rollout.time_left import LengthEstimate, SamplingClock
from tunix_lite.tracking.dashboard import seconds_in_words
from tunix_lite.tracking.progress import Progress

CHUNK = 16


def requests_of(lengths, limit: int) -> list[Request]:
    return [Request(i, i, 0, limit) for i in range(len(lengths))]


def sampled(clock, now, lengths, limit: int, slots: int, seconds: float, first: float):
    """Samples in slots by hand, a chunk at a time; yields after each chunk. Chunks take `seconds`, the first one
    `first` more."""
    requests = requests_of(lengths, limit)
    free = list(requests)
    held: list[Request] = []
    clock.begin()
    now[0] += first
    while free or held:
        while free and len(held) < slots:
            held.append(free.pop(0))
        now[0] += seconds
        for request in held:
            count = min(CHUNK, lengths[request.prompt] - len(request.tokens))
            request.tokens += [0] * count
            if len(request.tokens) == lengths[request.prompt]:
                request.reason = "length" if len(request.tokens) == limit else "eos"
        clock.take(held)
        held = [request for request in held if request.reason is None]
        yield


def lengths_of(kind: str, count: int, limit: int) -> list[int]:
    rng = np.random.default_rng(7)
    drawn = rng.lognormal(np.log(0.3 * limit), 0.4, count)
    if kind == "loops":  # a third never ends
        drawn = np.where(rng.random(count) < 1 / 3, limit, drawn)
    if kind == "uniform":
        drawn = rng.uniform(1, limit, count)
    if kind == "cut":
        drawn = np.where(rng.random(count) < 0.9, limit, drawn)
    if kind == "alike":
        drawn = np.full(count, limit // 3)
    return np.clip(drawn, 1, limit).astype(int).tolist()


@pytest.mark.parametrize(
    ("kind", "count", "slots", "limit"),
    [
        ("cut", 32, 32, 96),
        ("loops", 32, 32, 256),
        ("loops", 160, 160, 512),
        ("loops", 160, 32, 256),
        ("uniform", 160, 160, 256),
        ("uniform", 160, 32, 256),
        ("lognormal", 160, 32, 512),
        ("lognormal", 160, 16, 256),
        ("alike", 160, 16, 256),
    ],
)
def test_the_time_left_after_a_fifth_is_within_a_quarter_of_what_comes(kind, count, slots, limit):
    """The first chunk waits 40 s for compilers and prompts, which is no part of the work that is estimated."""
    now = [0.0]
    clock = SamplingClock([count], lambda: 40.0 if now[0] else 0.0, lambda: now[0])
    times, left = [], []
    for _ in sampled(clock, now, lengths_of(kind, count, limit), limit, slots, 2.0, first=40.0):
        times.append(now[0])
        left.append(clock.seconds_left())
    end = times[-1]
    at = next(i for i, t in enumerate(times) if t - 40 >= 0.2 * (end - 40))
    assert left[at] == pytest.approx(end - times[at], rel=0.25)
    assert left[0] is None and left[-1] == 0.0, "a chunk is timed from the one before"


def test_a_chunk_that_compiles_and_the_first_one_are_not_part_of_the_rate():
    now, compiled = [0.0], [0.0]
    clock = SamplingClock([4], lambda: compiled[0], lambda: now[0])
    steps = sampled(clock, now, [64] * 4, 64, 4, 1.0, first=9.0)
    next(steps)
    assert clock.tokens_per_second() is None
    next(steps)
    assert clock.tokens_per_second() == 4 * CHUNK / 1.0 and clock.seconds_left() == 2.0
    now[0] += 30.0
    compiled[0] += 30.0
    next(steps)
    assert clock.tokens_per_second() == 4 * CHUNK / 1.0 and clock.seconds_left() == 1.0


def test_samples_that_come_behind_the_greedy_completions_count():
    """16 greedy ones of 64 tokens take 4 chunks of 2 s; then 32 of the same kind in 16 slots, 8 chunks, and prompts
    that took 6 s to read are read again."""
    now = [0.0]
    clock = SamplingClock([16, 32], lambda: 0.0, lambda: now[0])
    steps = sampled(clock, now, [64] * 16, 64, 16, 2.0, first=6.0)
    next(steps)
    next(steps)
    # The first chunk itself is taken for reading, too.
    assert clock.seconds_left() == 2 * 2.0 + 8 * 2.0 + (6.0 + 2.0)


def test_lengths_are_estimated_as_lifetimes():
    """Kaplan and Meier by hand: of 4, one ends at 2 and one at 4, one still grows at 3, one was cut at 8.
    S(2) = 3/4; at 4 two are at risk: S(4) = 3/8."""
    lengths = LengthEstimate([(2, True), (4, True), (8, False)], [3], limit=8)
    longer = np.exp(lengths._log_longer)
    np.testing.assert_allclose(longer[[1, 2, 3, 4, 8]], [1, 3 / 4, 3 / 4, 3 / 8, 3 / 8])
    assert lengths.draw(np.full(100, 5)).min() == 8, "nobody was seen to end behind 5"
    assert sorted(lengths.draw(np.zeros(8, int)).tolist()) == [2, 2, 4, 4, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (48, "48 s"), (125, "2m05s"), (59.7, "1m00s"), (11540, "3h12m")]
)
def test_durations_are_words(seconds, text):
    assert seconds_in_words(seconds) == text


@pytest.mark.parametrize(("unread", "expected"), [(0, 2.0), (400, 32.0)])
def test_prompts_that_are_read_between_chunks_are_no_part_of_the_rate(unread, expected):
    """8 requests of 32 tokens in 4 slots, chunks of 2 s; the prompts of the last four, 400 tokens, take 30 s and are
    read before the second chunk. Then 3 chunks less one are left; and if 400 more were to be read, 30 s for those."""
    now = [0.0]
    clock = SamplingClock([8], lambda: 0.0, lambda: now[0])
    requests = requests_of([32] * 8, 32)
    clock.begin()

    def chunk(some, seconds, read, unread):
        now[0] += seconds
        for request in some:
            request.tokens += [0] * 16
            request.prompts_read = (read, unread)
            request.reason = "eos" if len(request.tokens) == 32 else None
        clock.take(some)

    chunk(requests[:4], 35.0, 400, 400 + unread)
    chunk(requests[:4], 32.0, 800, unread)
    assert clock.seconds_left() is None and clock.tokens_per_second() is None
    chunk(requests[4:], 2.0, 800, unread)
    assert clock.tokens_per_second() == 64 / 2.0 and clock.seconds_left() == expected


# ---- on a terminal, and on a pipe

SCRIPT = """
import sys, time
from tunix_lite.tracking import progress
progress.LINE_SECONDS, progress.LOOK_SECONDS = 0.3, 0.05
count = [0]
doing = lambda s: f"sampled {count[0]} of 9\\x1b[2J"
with progress.Progress(progress.StandardError(), lambda s: "short", None, patience=60.0):
    pass
with progress.Progress(progress.StandardError(), doing, lambda s: "sampled 9 completions") as line:
    for count[0] in range(10):
        time.sleep(0.1)
        if count[0] == 5:
            with line.hidden():
                print("a result", flush=True)
"""


def run_script(script: str, on_terminal: bool) -> tuple[str, str]:
    """Standard output and standard error; on a terminal of 80 columns both are what it got."""
    call = [sys.executable, "-c", script]
    environment = os.environ | {"TERM": "xterm-256color", "JAX_PLATFORMS": "cpu"}
    if not on_terminal:
        done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    run = subprocess.Popen(call, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], 120)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            seen += part
    finally:
        run.kill()
        run.wait()
        os.close(ours)
    return seen.decode(), seen.decode()


def test_a_pipe_gets_whole_lines_at_the_start_now_and_then_and_at_the_end():
    out, err = run_script(SCRIPT, on_terminal=False)
    lines = err.splitlines()
    assert out == "a result\n"
    assert lines[0] == "sampled 0 of 9\\x1b[2J" and lines[-1] == "sampled 9 completions"
    assert 3 <= len(lines) <= 6 and all(re.fullmatch(r"sampled \d of 9.*", line) for line in lines[:-1])
    assert "\x1b" not in err and "\r" not in err and "short" not in err


def test_a_terminal_gets_one_line_that_is_rewritten_and_makes_room_for_results():
    seen, _ = run_script(SCRIPT, on_terminal=True)
    assert len(re.findall(r"\r\x1b\[2Ksampled \d of 9", seen)) >= 8
    assert "\r\x1b[2Ka result\r\n" in seen and seen.endswith("\r\x1b[2Ksampled 9 completions\r\n")
    assert seen.count("\n") == 2 and "\x1b[2J" not in seen


def test_work_that_fails_has_no_end_line():
    said = []
    output = SimpleNamespace(show=said.append, note=said.append, say=said.append)
    with pytest.raises(KeyboardInterrupt), Progress(output, lambda s: "under way", lambda s: "done"):
        raise KeyboardInterrupt
    assert "under way" in said and "done" not in said and said[-1] == ""


# ---- results so far


def test_completions_are_on_the_disk_as_they_end(tmp_path):
    path = tmp_path / "said.jsonl.partial"
    path.write_text("of an earlier start\n")
    with PartialFile(path) as file:
        file.write("")
        assert path.read_text() == "of an earlier start\n"
        for text in ("one", "two"):
            file.write(f"{text}\n")
        assert path.read_text() == "one\ntwo\n"
    with PartialFile(None) as file:
        file.write("three\n")
    assert list(tmp_path.iterdir()) == [path]
