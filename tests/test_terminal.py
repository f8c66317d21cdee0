"""The terminal: a line that is rewritten where one can be, plain lines elsewhere, and the same files either way."""

import io
import re

from pseudo_terminal import seen_on_terminal

from tunix_lite.report.run_page import best_middle_worst
from tunix_lite.tracking.console import Console, lines_of_sample

NASTY = "a\x1b[2J\x07[bold]b\u202e"


def metrics(step: int) -> dict:
    return {
        "reward/mean": 0.1 * step,
        "completions/correct": 0.05 * step,
        "train/kl": 0.001,
        "train/grad_norm": 1.0,
        "train/learning_rate": 1e-5,
        "completions/mean_length": 20.0,
        "completions/truncated": 0.25,
        "reward/groups_that_agree": 0.5,
        "perf/mfu": 0.31,
        "perf/tokens_per_second_per_device": 1234.0,
        "memory/peak_gb": 1.5,
        "time/step": 2.0,
        "time/rollout": 0.5,
        "time/update": 1.25,
    }


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
    # The last step may be one with an evaluation by the interval, too.
    board = Console(tmp_path / "train.log", 10, stream=io.StringIO(), evaluates_every=5)
    for step in range(1, 11):
        board.log(step, {"time/step": 2.0, "time/eval": 30.0})
    assert board.seconds_left(10) == 0


def test_a_sample_is_one_line_whatever_it_holds():
    row = {"prompt": "p\nq", "completion": NASTY, "extracted": None, "correct": False, "reward": 0.25}
    assert lines_of_sample(row, True) == [f"  wrong  p ⏎ q  →  {NASTY}  [no answer]  reward 0.25"]
    assert lines_of_sample({"reward": "x"}, True) == ["  wrong  None  →  None  [no answer]"]
    picked = best_middle_worst([[{"reward": r} for r in (1.0, None, 3.0, 2.0)], [{"reward": 9.0}] * 2])
    assert [row["reward"] for row in picked] == [3.0, 2.0, 1.0] and best_middle_worst([]) == []


SCRIPT = """
import sys
from pathlib import Path
from tunix_lite.tracking.console import Console
console = Console(Path(sys.argv[1]), max_steps=8)
console.panel("title", [("mesh", "fsdp=1")])
console.busy("compiling…")
console.show(sys.argv[2])
for step in range(1, 9):
    console.show("updating")
    metrics = {"reward/mean": step / 8, "train/kl": 0.1, "time/step": 1.0}
    console.log(step, metrics | ({"eval/accuracy": 0.5} if step == 4 else {}))
print("to standard error", file=sys.stderr)
console.say("a hint", style="yellow"); console.say("a fact")
console.close()
"""


def on_a_terminal(tmp_path, term="xterm-256color", long="") -> tuple[str, str]:
    """What reaches the terminal, and train.log without its clock."""
    log = tmp_path / f"train-{term}-{len(long)}.log"
    seen = seen_on_terminal("-c", SCRIPT, str(log), long, term=term)
    return seen, re.sub(r"(?m)^\d\S* ", "", log.read_text())


def test_a_terminal_has_a_line_that_is_rewritten_as_wide_as_it_is(tmp_path):
    seen, log = on_a_terminal(tmp_path, long="x" * 100)
    shown = [text.partition("\r")[0].strip() for text in seen.split("\r\x1b[2K")[1:]]
    assert "step 0/8 0% | compiling…" in shown and "step 1/8 12% | updating" not in log
    assert max(map(len, (text for text in shown if "xxx" in text))) == 79, "it ends before the last of 80 columns"
    assert "to standard error" in seen and "\x1b[33ma hint\x1b[0m" in seen
    assert shown[-1] == "" or "updating" not in shown[-1], "nothing of it stays"


def test_a_dumb_terminal_and_a_pipe_get_a_plain_line_a_step(tmp_path):
    dumb, log = on_a_terminal(tmp_path, term="dumb")
    assert "\x1b" not in dumb
    assert [line.split(" | ")[0] for line in dumb.splitlines() if line.startswith("step")] == [
        f"step {n}/8 {n / 8:.0%}" for n in range(1, 9)
    ]
    # The files are the same whatever the screen is.
    _, live = on_a_terminal(tmp_path)
    assert live == log


def test_quiet_prints_hints_and_results_only(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path / "train.log", max_steps=2, stream=stream, mode="quiet")
    console.log(1, metrics(1))
    console.say("a fact")
    console.say("a hint", style="yellow")
    console.close()
    assert stream.getvalue() == "a hint\n"
    assert len((tmp_path / "train.log").read_text().splitlines()) == 3
