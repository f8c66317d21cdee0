"""Trackers beside the files: the calls that other libraries get.

A stand-in of each library records its calls. The tests at the end use the real ones where they are installed.
"""

import json
import re
import sys
import time
import types
from pathlib import Path

import pytest

from tunix_lite.settings import compose as composing
from tunix_lite.tracking import plugs
from tunix_lite.tracking.plugs import Guarded, TrackedRun, columns_of

ROW = {"prompt": "2 + 2?", "completion": "# 4 <b>\nyes", "expected": "4", "extracted": "4", "correct": True}
ROWS = [
    ROW | {"reward": 1.0, "rewards": {"right": 1.0, "short": 0.5}, "advantage": 0.7},
    ROW | {"reward": None, "rewards": {"right": None}, "correct": False, "advantage": None, "completion": "\x1b[31m"},
]
SETTINGS = {"seed": 0, "algorithm": {"_target_": "a.B", "clip": [0.2]}}


def tracked(folder, **more) -> TrackedRun:
    return TrackedRun(folder, "today/noon", "tunix_lite", SETTINGS, **{"resume_at": None, **more})


# ---- stand-ins of three libraries: an attribute is a function that records its call


class Recorder:
    def __init__(self, calls: list, name: str = "", **known):
        self.__dict__.update(known)
        self._calls, self._name = calls, name

    def __getattr__(self, name):
        def call(*arguments, **named):
            self._calls.append((f"{self._name}{name}", arguments, named))
            return (name, *arguments, *named.values()) if name[0].isupper() else None

        if name.startswith("__"):
            raise AttributeError(name)
        return call


@pytest.fixture
def stand_in(monkeypatch):
    def make(name: str, **functions):
        calls: list = []
        module = types.ModuleType(name)
        recorder = Recorder(calls)
        module.__getattr__ = lambda attribute: getattr(recorder, attribute)
        for attribute, function in functions.items():
            setattr(module, attribute, lambda *a, _f=function, _n=attribute, **k: calls.append((_n, a, k)) or _f(calls))
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return make


def use(tracker) -> None:
    tracker.log(3, {"train/loss": 0.5, "eval/failed_rewards": 0})
    tracker.log_samples(3, ROWS)
    tracker.close()


def plug(name: str, *overrides: str):
    return composing.compose([f"tracking={name}", *overrides]).tracking.trackers[name]


def test_wandb_gets_metrics_and_tables_and_its_id_back(stand_in, tmp_path):
    calls = stand_in("wandb", init=lambda calls: Recorder(calls, "run.", id="abc-1"))
    use(plug("wandb", "project_name=mine", "tracking.trackers.wandb.mode=offline")(tracked(tmp_path)))
    plug("wandb")(tracked(tmp_path, resume_at=3))
    first, *logged, last, second = [call for call in calls if call[0][0].islower()]
    assert first[0] == "init" and first[2] | {"dir": None} == {
        "project": "mine", "entity": None, "mode": "offline", "name": "today/noon", "id": None, "resume": "allow",
        "dir": None, "config": SETTINGS,
    }  # fmt: skip
    assert second[2]["id"] == "abc-1" and second[2]["resume"] == "allow", "a run that resumes goes on there"
    assert [(name, named) for name, _, named in logged] == [("run.log", {"step": 3})] * 2
    metrics, samples = [arguments[0] for _, arguments, _ in logged]
    assert metrics == {"train/loss": 0.5, "eval/failed_rewards": 0}
    assert samples["samples"] == ("Table", *columns_of(ROWS))
    assert last[0] == "run.finish"


def test_mlflow_gets_numbers_settings_and_completions_as_an_artifact(stand_in, tmp_path):
    info = types.SimpleNamespace(info=types.SimpleNamespace(run_id="f00"))
    calls = stand_in("mlflow", start_run=lambda calls: info)
    open_it = plug("mlflow", "tracking.trackers.mlflow.tracking_uri='sqlite:///here.db'")
    use(open_it(tracked(tmp_path)))
    open_it(tracked(tmp_path, resume_at=3))
    names = [name for name, _, _ in calls]
    opening = ["set_tracking_uri", "set_experiment", "start_run"]
    assert names == [*opening, "log_params", "log_metrics", "log_text", "end_run", *opening]
    by_name = [call for call in calls if call[0] == "start_run"]
    assert by_name[0][2] == {"run_id": None, "run_name": "today/noon"} and by_name[1][2]["run_id"] == "f00"
    assert calls[3][1][0] == {"seed": "0", "algorithm._target_": "a.B", "algorithm.clip": "[0.2]"}
    assert calls[4][1:] == (({"train/loss": 0.5, "eval/failed_rewards": 0.0},), {"step": 3})
    text, name = calls[5][1]
    assert name == "samples/step_000003.jsonl" and [json.loads(line) for line in text.splitlines()] == ROWS


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
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

    mine = types.SimpleNamespace(log=log, close=lambda: calls.append("closed"))
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


# ---- the real ones, where they are installed


def real(name: str):
    module = pytest.importorskip(name)
    if not hasattr(module, "start_run") and not hasattr(module, "init"):
        pytest.skip(f"{name} is there without its parts")
    return module


@pytest.mark.parity
def test_real_mlflow_has_what_it_was_given(tmp_path):
    mlflow = real("mlflow")
    open_it = plug("mlflow", f"tracking.trackers.mlflow.tracking_uri='sqlite:///{tmp_path}/mlflow.db'")
    use(open_it(tracked(tmp_path)))
    (found,) = mlflow.search_runs(experiment_names=["tunix_lite"], output_format="list")
    assert found.data.metrics["train/loss"] == 0.5 and found.data.params["seed"] == "0"
    open_it(tracked(tmp_path, resume_at=3)).close()
    assert len(mlflow.search_runs(experiment_names=["tunix_lite"], output_format="list")) == 1


@pytest.mark.parity
def test_real_wandb_writes_below_the_run_without_a_network(tmp_path):
    real("wandb")
    use(plug("wandb", "tracking.trackers.wandb.mode=offline")(tracked(tmp_path)))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20
    while b"train/loss" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.2)  # a process of its own writes it
    assert b"train/loss" in file.read_bytes()


@pytest.mark.parity
def test_real_trackio_has_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    real("trackio")
    use(plug("trackio")(tracked(tmp_path)))
    assert any(b"train/loss" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
