"""The terminal: a live region where one can be drawn, plain lines elsewhere, and the same files either way."""

import io
import re

import pytest
import rich.console
from pseudo_terminal import seen_on_terminal

from tunix_lite.tracking.console import Console, lines_of_sample
from tunix_lite.tracking.dashboard import Dashboard, best_middle_worst

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


def text_of(drawn, width: int) -> str:
    stream = io.StringIO()
    rich.console.Console(file=stream, width=width, color_system=None).print(drawn)
    return stream.getvalue()


def board_after(steps: int) -> Dashboard:
    board = Dashboard(20)
    for step in range(1, steps + 1):
        board.log(step, metrics(step))
    return board


@pytest.mark.parametrize("width", [50, 80, 140])
def test_the_region_holds_every_number_within_the_columns(width):
    text = text_of(board_after(12).drawn(width, 60), width)
    for part in ("step 12/20 60% | eta", "reward", "1.200", "kl", "0.0010", "groups agree", "50%", "cut", "25%",
                 "grad", "lr", "1.0e-05", "1,234", "31.0%", "1.50 GB", "rollout", "0.50 s", "update", "1.25 s"):  # fmt: skip
        assert part in text, f"{part} at {width}"
    assert max(map(len, text.splitlines())) <= width


def test_the_time_left_counts_the_evaluations_that_are_still_to_come():
    """Steps of 2 s and evaluations of 30 s at steps 0, 5, 10, 15 and 18: the mean of all that was would be wrong."""
    board = Dashboard(18, evaluates_every=5)
    board.log(0, {"time/eval": 40.0})
    left = {}
    for step in range(1, 19):
        board.log(step, {"time/step": 2.0} | ({"time/eval": 30.0} if step in (5, 10, 15, 18) else {}))
        left[step] = board.seconds_left()
    assert left[1] is None and left[2] == 16 * 2 + 4 * 40
    assert left[5] == 13 * 2 + 3 * 30 and left[17] == 2 + 30 and left[18] == 0


def test_a_sample_is_one_line_whatever_it_holds():
    row = {"prompt": "p\nq", "completion": NASTY, "extracted": None, "correct": False, "reward": 0.25}
    assert lines_of_sample(row, True) == [f"  wrong  p ⏎ q  →  {NASTY}  [no answer]  reward 0.25"]
    assert lines_of_sample({"reward": "x"}, True) == ["  wrong  None  →  None  [no answer]"]
    picked = best_middle_worst([[{"reward": r} for r in (1.0, None, 3.0, 2.0)], [{"reward": 9.0}] * 2])
    assert [row["reward"] for row in picked] == [3.0, 2.0, 1.0] and best_middle_worst([]) == []


SCRIPT = """
import sys, time
from pathlib import Path
from tunix_lite.tracking.console import Console
console = Console(Path(sys.argv[1]), max_steps=8, mode=sys.argv[2])
console.panel("title", [("mesh", "fsdp=1")])
console.busy("compiling…")
time.sleep(float(sys.argv[3]))
for step in range(1, 9):
    console.doing("updating")
    metrics = {"reward/mean": step / 8, "train/kl": 0.1, "time/step": 1.0}
    console.log(step, metrics | ({"eval/accuracy": 0.5} if step == 4 else {}))
    time.sleep(float(sys.argv[3]) / 2)
print("to standard error", file=sys.stderr)
console.say("a hint", style="yellow"); console.say("a fact")
console.close()
"""


def on_a_terminal(tmp_path, mode="auto", term="xterm-256color", pause=0.0, resize=None) -> tuple[str, str]:
    """What reaches the terminal, and train.log without its clock."""
    log = tmp_path / f"train-{mode}-{term}.log"
    seen = seen_on_terminal("-c", SCRIPT, str(log), mode, str(pause), term=term, resize=resize)
    return seen, re.sub(r"(?m)^\d\S* ", "", log.read_text())


def test_a_terminal_gets_a_live_region(tmp_path):
    seen, _ = on_a_terminal(tmp_path, pause=0.3, resize=(b"compiling", 140))
    assert "╭─ step " in seen and "reward" in seen and "compiling… 0 s" in seen
    assert "to standard error" in seen and "a hint" in seen
    columns = {len(line) for line in re.findall(r"╭─ step [^╮]*╮", seen)}
    assert max(columns) == 140 and min(columns) <= 140, "the region follows the terminal"


def test_a_dumb_terminal_and_a_pipe_get_a_plain_line_a_step(tmp_path):
    dumb, log = on_a_terminal(tmp_path, term="dumb")
    assert "\x1b" not in dumb and "╭" not in dumb
    assert [line.split(" | ")[0] for line in dumb.splitlines() if line.startswith("step")] == [
        f"step {n}/8 {n / 8:.0%}" for n in range(1, 9)
    ]
    # The files are the same whatever the screen is.
    _, live = on_a_terminal(tmp_path, mode="rich")
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
