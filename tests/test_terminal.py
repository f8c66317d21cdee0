"""The terminal: a line that is rewritten where one can be, plain lines elsewhere, and the same files either way; what a
program says while it works."""

import contextlib
import fcntl
import io
import pty
import re
import struct
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from tunix_lite.rollout.requests import Request
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.tracking import progress
from tunix_lite.tracking.console import Console, lines_of_sample


@contextlib.contextmanager
def on_a_terminal(term: str = "xterm-256color"):
    """Standard output and error are a terminal of 80 columns. The list has what was written there, afterwards."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    seen = []
    with pytest.MonkeyPatch.context() as patch, open(theirs, "w") as stream:
        patch.setenv("TERM", term)
        patch.delenv("NO_COLOR", raising=False)
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield seen
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:
        while part := terminal.read(65536):  # an OSError at the end, as the other side is closed
            seen.append(part.decode())


NASTY = "a\x1b[2J\x07[bold]b\u202e"


def test_the_time_left_counts_the_evaluations_that_are_still_to_come(tmp_path):
    """Steps of 2 s and evaluations of 30 s at steps 0, 5, 10, 15 and 18: the mean of all that was would be wrong."""
    board = Console(tmp_path / "train.log", 18, stream=io.StringIO(), evaluates_every=5)
    board.log(0, {"time/eval": 40.0})
    left = {}
    for step in range(1, 19):
        board.log(step, {"time/step": 2.0} | ({"time/eval": 30.0} if step in (5, 10, 15, 18) else {}))
        left[step] = board.seconds_left(step)
    assert left[1] is None and left[2] == 16 * 2 + 4 * 40
    assert left[5] == 13 * 2 + 3 * 30 and left[17] == 2 + 30 and left[18] == 0


def test_a_sample_is_one_line_whatever_it_holds():
    row = {"prompt": "p\nq", "completion": NASTY, "extracted": None, "correct": False, "reward": 0.25}
    assert lines_of_sample(row, True) == [f"  wrong  p ⏎ q  →  {NASTY}  [no answer]  reward 0.25"]
    assert lines_of_sample({"reward": "x"}, True) == ["  wrong  None  →  None  [no answer]"]


def log_of_a_board(log, long: str = "") -> str:
    """Shows eight steps on standard output; train.log without its clock."""
    console = Console(log, max_steps=8)
    console.panel("title", [("mesh", "fsdp=1")])
    console.busy("compiling…")
    console.show(long)
    for step in range(1, 9):
        console.show("updating")
        metrics = {"reward/mean": step / 8, "train/kl": 0.1, "time/step": 1.0}
        console.log(step, metrics | ({"eval/accuracy": 0.5} if step == 4 else {}))
    console.say("a hint", style="yellow")
    console.say("a fact")
    console.close()
    return re.sub(r"(?m)^\d\S* ", "", log.read_text())


def test_a_terminal_has_a_line_that_is_rewritten_as_wide_as_it_is_and_a_dumb_one_plain_lines(tmp_path):
    with on_a_terminal() as seen:
        log = log_of_a_board(tmp_path / "live.log", long="x" * 100)
    shown = [text.partition("\r")[0].strip() for text in "".join(seen).split("\r\x1b[2K")[1:]]
    assert "step 0/8 0% | compiling…" in shown and "step 1/8 12% | updating" not in log
    assert max(map(len, (text for text in shown if "xxx" in text))) == 79, "it ends before the last of 80 columns"
    assert "\x1b[33ma hint\x1b[0m" in "".join(seen)
    assert "updating" not in shown[-1], "nothing of it stays"

    with on_a_terminal("dumb") as seen:
        assert log_of_a_board(tmp_path / "dumb.log") == log, "the files are the same whatever the screen is"
    dumb = "".join(seen)
    assert "\x1b" not in dumb
    steps = [line.split(" | ")[0] for line in dumb.splitlines() if line.startswith("step")]
    assert steps == [f"step {n}/8 {n / 8:.0%}" for n in range(1, 9)]


def test_quiet_prints_hints_and_results_only(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path / "train.log", max_steps=2, stream=stream, mode="quiet")
    console.log(1, {"reward/mean": 0.1, "time/step": 2.0})
    console.say("a fact")
    console.say("a hint", style="yellow")
    console.close()
    assert stream.getvalue() == "a hint\n"
    assert len((tmp_path / "train.log").read_text().splitlines()) == 3


# ---- how far a program is, and how long it still takes


def test_the_time_left_is_by_the_completions_that_have_ended():
    now = [0.0]
    progress = SamplingProgress(SimpleNamespace(note=lambda text: None, show=lambda text: None), [4, 4])
    progress.elapsed = lambda: now[0]
    assert progress.text(3.0) == "compiling the sampler and reading prompts, for 8 completions, 3 s"
    requests = [Request(i, i, 0, 64, num_new=16) for i in range(4)]
    now[0] = 4.0
    progress.on_chunk(requests, {})
    assert progress.text(9.0) == "sampled 0 of 8 completions, 16 tokens/s"
    now[0] = 6.0
    requests[0].reason = requests[1].reason = "eos"
    progress.on_chunk(requests, {})
    assert progress.text(40.0) == "sampled 2 of 8 completions, 21 tokens/s, 18 s left"


def long_work(monkeypatch) -> None:
    """Some work that says nothing, as it is short, and some of a second, which prints a result halfway."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.05)
    count = [0]
    with progress.Progress(progress.StandardError(), lambda s: "short", None, patience=60.0):
        pass
    doing = lambda s: f"sampled {count[0]} of 9\x1b[2J"  # noqa: E731
    with progress.Progress(progress.StandardError(), doing, lambda s: "sampled 9 completions") as line:
        for count[0] in range(10):
            time.sleep(0.1)
            if count[0] == 5:
                with line.hidden():
                    print("a result", flush=True)


def test_a_pipe_gets_whole_lines_at_the_start_now_and_then_and_at_the_end(monkeypatch, capsys):
    long_work(monkeypatch)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "a result\n", err
    assert lines[0] == "sampled 0 of 9\\x1b[2J" and lines[-1] == "sampled 9 completions"
    assert 3 <= len(lines) <= 6 and all(re.fullmatch(r"sampled \d of 9.*", line) for line in lines[:-1])
    assert "\x1b" not in err and "\r" not in err and "short" not in err


def test_a_terminal_gets_one_line_that_is_rewritten_and_makes_room_for_results(monkeypatch):
    with on_a_terminal() as seen:
        long_work(monkeypatch)
    seen = "".join(seen)
    assert len(re.findall(r"\r\x1b\[2Ksampled \d of 9", seen)) >= 8
    assert "\r\x1b[2Ka result\r\n" in seen and seen.endswith("\r\x1b[2Ksampled 9 completions\r\n")
    assert seen.count("\n") == 2 and "\x1b[2J" not in seen
