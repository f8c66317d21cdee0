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

from tunix_lite.rollout.requests import Request
from tunix_lite.runs.sampling_progress import SamplingClock


def test_the_time_left_is_by_the_completions_that_have_ended_and_compiling_is_no_part_of_it():
    now, compiled = [0.0], [0.0]
    clock = SamplingClock(8, lambda: compiled[0], lambda: now[0])
    requests = [Request(i, i, 0, 64, num_new=16) for i in range(4)]
    now[0] = 4.0
    clock.take(requests)
    assert clock.tokens_per_second() == 4 * 16 / 4.0 and clock.seconds_left() is None
    now[0], compiled[0] = 36.0, 30.0
    requests[0].reason = requests[1].reason = "eos"
    clock.take(requests)
    assert clock.tokens_per_second() == 8 * 16 / 6.0 and clock.seconds_left() == 6.0 * 6 / 2
    now[0] = 38.0
    assert clock.seconds_left() == 16.0, "two seconds have gone by since"


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
