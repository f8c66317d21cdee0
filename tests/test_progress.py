"""What a program says while it works: how far it is, how long it still takes, on a terminal and on a pipe."""

import os
import re
import subprocess
import sys

from pseudo_terminal import seen_on_terminal

from tunix_lite.rollout.requests import Request
from tunix_lite.runs.sampling_progress import _SamplingClock


def test_the_time_left_is_by_the_completions_that_have_ended_and_compiling_is_no_part_of_it():
    now, compiled = [0.0], [0.0]
    clock = _SamplingClock(8, lambda: compiled[0], lambda: now[0])
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


def test_a_pipe_gets_whole_lines_at_the_start_now_and_then_and_at_the_end():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120)
    err, lines = done.stderr, done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout == "a result\n", err
    assert lines[0] == "sampled 0 of 9\\x1b[2J" and lines[-1] == "sampled 9 completions"
    assert 3 <= len(lines) <= 6 and all(re.fullmatch(r"sampled \d of 9.*", line) for line in lines[:-1])
    assert "\x1b" not in err and "\r" not in err and "short" not in err


def test_a_terminal_gets_one_line_that_is_rewritten_and_makes_room_for_results():
    seen = seen_on_terminal("-c", SCRIPT)
    assert len(re.findall(r"\r\x1b\[2Ksampled \d of 9", seen)) >= 8
    assert "\r\x1b[2Ka result\r\n" in seen and seen.endswith("\r\x1b[2Ksampled 9 completions\r\n")
    assert seen.count("\n") == 2 and "\x1b[2J" not in seen
