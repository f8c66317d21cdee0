"""Trackers beside the files: the calls that other libraries get.

A stand-in of each library records its calls.
"""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest

from tunix_lite.settings import compose as composing
from tunix_lite.tracking import plugs
from tunix_lite.tracking.plugs import Guarded, TrackedRun

ROW = {"prompt": "2 + 2?", "completion": "# 4 <b>\nyes", "expected": "4", "extracted": "4", "correct": True}
ROWS = [
    ROW | {"reward": 1.0, "rewards": {"right": 1.0, "short": 0.5}, "advantage": 0.7},
    ROW | {"reward": None, "rewards": {"right": None}, "correct": False, "advantage": None, "completion": "\x1b[31m"},
]
METRICS = {"train/loss": 0.5, "eval/failed_rewards": 0}
SETTINGS = {"seed": 0, "algorithm": {"_target_": "a.B", "clip": [0.2]}}


def tracked(folder, **more) -> TrackedRun:
    return TrackedRun(folder, "today/noon", "tunix_lite", SETTINGS, **{"resume_at": None, **more})


@pytest.fixture
def stand_in(monkeypatch):
    """A library that takes every call and remembers it."""

    def make(name: str) -> MagicMock:
        monkeypatch.setitem(sys.modules, name, MagicMock())
        return sys.modules[name]

    return make


def use(tracker) -> None:
    tracker.log(3, METRICS)
    tracker.log_samples(3, ROWS)
    tracker.close()


def plug(name: str, *overrides: str):
    return composing.compose([f"tracking={name}", *overrides]).tracking.trackers[name]


def test_wandb_gets_metrics_and_tables_and_its_id_back(stand_in, tmp_path):
    wandb = stand_in("wandb")
    run = wandb.init.return_value
    run.id = "abc-1"
    use(plug("wandb", "project_name=mine", "tracking.trackers.wandb.mode=offline")(tracked(tmp_path)))
    plug("wandb")(tracked(tmp_path, resume_at=3))
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first | {"dir": None} == {
        "project": "mine", "entity": None, "mode": "offline", "name": "today/noon", "id": None, "resume": "allow",
        "dir": None, "config": SETTINGS,
    }  # fmt: skip
    assert second["id"] == "abc-1" and second["resume"] == "allow", "a run that resumes goes on there"
    table = {"samples": wandb.Table.return_value}
    assert run.log.call_args_list == [call(METRICS, step=3), call(table, step=3)]
    columns, (first, second) = wandb.Table.call_args.kwargs.values()
    assert len(columns) == 8 and first[:6] == ["2 + 2?", "# 4 <b>\nyes", "4", "4", True, 1.0]
    assert first[6:] == ["{'right': 1.0, 'short': 0.5}", 0.7] and second[1] == "\\x1b[31m" and second[5] is None
    run.finish.assert_called_once()


def test_mlflow_gets_numbers_settings_and_completions_as_an_artifact(stand_in, tmp_path):
    mlflow = stand_in("mlflow")
    mlflow.start_run.return_value.info.run_id = "f00"
    open_it = plug("mlflow", "tracking.trackers.mlflow.tracking_uri='sqlite:///here.db'")
    use(open_it(tracked(tmp_path)))
    open_it(tracked(tmp_path, resume_at=3))
    opening = ["set_tracking_uri", "set_experiment", "start_run"]
    names = [name for name, _, _ in mlflow.mock_calls]
    assert names == [*opening, "log_params", "log_metrics", "log_text", "end_run", *opening]
    first, second = (call.kwargs for call in mlflow.start_run.call_args_list)
    assert first == {"run_id": None, "run_name": "today/noon"} and second["run_id"] == "f00"
    assert mlflow.log_params.call_args.args[0] == {"seed": "0", "algorithm._target_": "a.B", "algorithm.clip": "[0.2]"}
    mlflow.log_metrics.assert_called_once_with(METRICS, step=3)
    text, name = mlflow.log_text.call_args.args
    assert name == "samples/step_000003.jsonl" and [json.loads(line) for line in text.splitlines()] == ROWS


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_there_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setattr(plugs.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"{name} is not installed: pip install -e '.\[{name}\]'"):
        plug(name).check()


# ---- what they share


def test_a_tracker_that_fails_is_named_once_and_gets_nothing_more():
    said, calls = [], []

    def log(step, metrics):
        calls.append(step)
        if step == 2:
            raise ConnectionError("no\nnetwork")

    mine = SimpleNamespace(log=log, close=lambda: calls.append("closed"))
    guarded = Guarded("tracking.trackers.mine", mine, said.append)
    guarded.log_samples(1, ROWS)  # it has none
    for step in (1, 2, 3):
        guarded.log(step, {})
    guarded.close()
    assert calls == [1, 2]
    words = r"tracking.trackers.mine failed (ConnectionError: no\nnetwork); nothing more is sent to it"
    assert said == [f"warning: {words}"]


def test_the_tracker_of_the_docs_is_one(tmp_path, monkeypatch):
    page = Path(__file__).parents[1] / "docs" / "guide" / "trackers.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    open_it = composing.compose(["+tracking.trackers.mine=mine.open_lines"]).tracking.trackers["mine"]
    said: list[str] = []
    use(Guarded("mine", open_it(tracked(tmp_path)), said.append))
    assert not said and (tmp_path / "mine.txt").read_text().splitlines() == ["3 None", "3 '# 4 <b>\\nyes'"]
