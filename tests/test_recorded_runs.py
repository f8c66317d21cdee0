"""What tests/recorded_runs.py takes for the same and for different; the runs themselves are made by hand."""

import copy
import json

import pytest
import recorded_runs

RUN = {
    "exit_codes": {"last": 0},
    "metrics": [{"step": 1, "train/loss": 0.5, "train/grad_norm": float("nan")}],
    "checkpoint": {"step": 1, "params": "a", "opt_state": "b"},
    "samples": {"step_000001.jsonl": "c"},
}


@pytest.mark.parametrize(
    "path, to, said",
    [
        (("exit_codes", "last"), 1, "sft: exit_codes: last 0, now 1"),
        (("metrics", 0, "train/loss"), 0.5000000000000001, "metrics of step 1: train/loss 0.5, now 0.5000000000000001"),
        (("checkpoint", "opt_state"), "c", "checkpoint: opt_state b, now c"),
        (("samples", "step_000001.jsonl"), "d", "samples: "),
    ],
)
def test_each_part_of_a_record_counts(path, to, said, tmp_path, capsys):
    *places, last = path
    changed = inner = copy.deepcopy(RUN)
    for key in places:
        inner = inner[key]
    inner[last] = to
    for name, run in (("before", RUN), ("again", RUN), ("after", changed)):
        (tmp_path / name).write_text(json.dumps({"made_with": {}, "runs": {"sft": run}}))
    assert recorded_runs.compare(tmp_path / "before", tmp_path / "again") == 0
    assert recorded_runs.compare(tmp_path / "before", tmp_path / "after") == 1
    assert said in capsys.readouterr().out
