"""What tests/recorded_runs.py takes for the same and for different; the runs themselves are made by hand."""

import copy
import json
from pathlib import Path

import pytest
import recorded_runs

RUN = {
    "exit_codes": [0],
    "metrics": [{"step": 1, "train/loss": 0.5, "train/grad_norm": float("nan")}],
    "checkpoint": {"step": 1, "arrays": 2, "sha256": {"params": "a", "opt_state": "b"}},
    "files": ["metrics.jsonl", "train.log"],
    "contents": {"status.json": {"status": "completed"}},
    "messages": {"stderr": [], "train.log": ["compiling…"]},
}


def changed(*path, to):
    run = copy.deepcopy(RUN)
    place = run
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return run


def compared(tmp_path: Path, run: dict, shown: set[str] = frozenset()) -> int:
    for name, each in (("before", RUN), ("after", run)):
        (tmp_path / name).write_text(json.dumps({"made_with": {}, "runs": {"sft": each}}))
    return recorded_runs.compare(tmp_path / "before", tmp_path / "after", shown, [])


@pytest.mark.parametrize(
    "path, to, said",
    [
        (("exit_codes",), [1], "sft: exit_codes: [0], now [1]"),
        (("metrics", 0, "train/loss"), 0.5000000000000001, "metrics of step 1: train/loss 0.5, now 0.5000000000000001"),
        (("checkpoint", "sha256", "opt_state"), "c", "checkpoint: "),
        (("contents", "status.json", "status"), "failed", "contents, status.json:"),
        (("messages", "train.log"), ["loading…"], "messages, train.log:"),
    ],
)
def test_each_part_of_a_record_counts(path, to, said, tmp_path, capsys):
    assert compared(tmp_path, RUN) == 0
    assert compared(tmp_path, changed(*path, to=to)) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, kept",
    [
        ("08:43:15 loading the model…", "loading the model…"),
        ("step 2/6 33% | eta 1m 05s | loss 0.25 | 0.42 s/step", "step 2/6 33% | loss 0.25 | <seconds> s/step"),
        ("4 steps in 18s; everything is in /tmp/x/run", "4 steps in <seconds>; everything is in <run>"),
        (
            "peak 0.01 GiB (update, an estimate) of 5.89, 0%.",
            "peak 0.01 GiB (update, an estimate) of <bytes>, <share>.",
        ),
        ("a\n[Gloo] Rank 1 is connected to 3 peer ranks. Expected : 3\nb", "a\nb"),
    ],
)
def test_only_the_clock_the_machine_and_the_place_are_masked(text, kept):
    assert recorded_runs.masked(text, [(Path("/tmp/x/run"), "<run>")]) == kept
