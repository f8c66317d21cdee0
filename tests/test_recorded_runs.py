"""What tests/recorded_runs.py takes for the same and for different; the runs themselves are made by hand."""

import copy
import json
from pathlib import Path

import numpy as np
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
        (("metrics",), [], "metrics: 1 lines, now 0"),
        (("checkpoint", "sha256", "opt_state"), "c", "checkpoint: "),
        (("files",), ["metrics.jsonl"], "files:\nsft:     @@ -1,2 +1 @@\nsft:      metrics.jsonl\nsft:     -train.log"),
        (("contents", "status.json", "status"), "failed", "contents, status.json:"),
        (("messages", "train.log"), ["loading…"], "messages, train.log:"),
    ],
)
def test_each_part_of_a_record_counts(path, to, said, tmp_path, capsys):
    assert compared(tmp_path, RUN) == 0
    assert compared(tmp_path, changed(*path, to=to)) == 1
    assert said in capsys.readouterr().out


def test_messages_and_contents_can_be_shown_without_counting(tmp_path, capsys):
    run = changed("messages", "stderr", to=["a warning"])
    assert compared(tmp_path, run, {"messages"}) == 0
    assert compared(tmp_path, run, {"contents"}) == 1
    assert capsys.readouterr().out.count("+a warning") == 2


def test_the_order_of_metrics_counts_and_a_nan_equals_itself(tmp_path, capsys):
    row = RUN["metrics"][0]
    reordered = {key: row[key] for key in reversed(row)}
    assert compared(tmp_path, changed("metrics", 0, to=reordered)) == 1
    assert "the keys are in another order" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, kept",
    [
        ("08:43:15 loading the model…", "loading the model…"),
        ("step 2/6 33% | eta 1m 05s | loss 0.25 | 0.42 s/step", "step 2/6 33% | loss 0.25 | <seconds> s/step"),
        ("4 steps in 18s; everything is in /tmp/x/run", "4 steps in <seconds>; everything is in <run>"),
        ("fit into 90% of 4,116 MB free", "fit into 90% of <bytes> MB free"),
        ("memory: 0.01 of 5.89 GiB a device at most", "memory: 0.01 of <bytes> GiB a device at most"),
        ("4 of attached, 5.89 GiB each", "4 of attached, <bytes> GiB each"),
        (
            "peak 0.01 GiB (update, an estimate) of 5.89, 0%.",
            "peak 0.01 GiB (update, an estimate) of <bytes>, <share>.",
        ),
        ("| update | all-reduce | fsdp | 10 | 2.53 | 3.79 |", "| update | all-reduce | fsdp | 10 | 2.53 | 3.79 |"),
        ("3 MB of them, lr 1.0e-03, 12:30 is no clock", "3 MB of them, lr 1.0e-03, 12:30 is no clock"),
        ("a\n[Gloo] Rank 1 is connected to 3 peer ranks. Expected : 3\nb", "a\nb"),
    ],
)
def test_only_the_clock_the_machine_and_the_place_are_masked(text, kept):
    assert recorded_runs.masked(text, [(Path("/tmp/x/run"), "<run>")]) == kept


def test_a_digest_sees_each_bit_the_type_and_the_name():
    arrays = {"a": np.zeros(3, np.float32), "b": np.ones(2, np.int32)}
    digest = recorded_runs.digest_of(arrays)
    assert digest == recorded_runs.digest_of(dict(reversed(arrays.items())))
    others = [
        arrays | {"a": np.nextafter(arrays["a"], 1, dtype=np.float32)},
        arrays | {"a": arrays["a"].astype(np.int32)},
        arrays | {"a": arrays["a"].reshape(1, 3)},
        {"c" if name == "b" else name: array for name, array in arrays.items()},
    ]
    assert digest not in [recorded_runs.digest_of(other) for other in others]


def test_a_run_that_one_record_lacks_is_a_difference_unless_others_are_asked_for(tmp_path, capsys):
    for name, runs in (("before", {"sft": RUN, "grpo_2x2": RUN}), ("after", {"sft": RUN})):
        (tmp_path / name).write_text(json.dumps({"made_with": {}, "runs": runs}))
    files = tmp_path / "before", tmp_path / "after"
    assert recorded_runs.compare(*files, set(), []) == 1
    assert "grpo_2x2: is not in both records" in capsys.readouterr().out
    assert recorded_runs.compare(*files, set(), ["sft"]) == 0
