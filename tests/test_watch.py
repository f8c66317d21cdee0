"""What watches a run besides the loop: the observers of users."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from test_train import SHORT, lines

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.errors import RunFailed
from tunix_lite.runs import watch
from tunix_lite.runs.watch import StepDone
from tunix_lite.settings.compose import compose
from tunix_lite.train import train


def rows_and_entropy(done: StepDone) -> dict:
    """An observer as a user writes it: it sees the batch, the update's metrics and the state."""
    batch = done.experience.batch
    return {"my/rows": len(batch.tokens), "my/entropy": done.learned["train/entropy"], "my/step": done.state.step}


def test_an_observer_named_in_the_settings_adds_its_numbers_to_every_step(tmp_path):
    named = f"+tracking.observers.mine={{_target_: {__name__}.rows_and_entropy}}"
    train(compose([*SHORT, "training.max_steps=2", "evaluation.num_examples=0", named]), tmp_path)
    assert [(row["my/rows"], row["my/step"]) for row in lines(tmp_path)] == [(16, 1), (16, 2)]
    assert all(row["my/entropy"] == pytest.approx(row["train/entropy"]) for row in lines(tmp_path))


def fails_in_step_2(done: StepDone) -> dict:
    return {"my/number": 1.0 if done.step < 2 else "none"}


def test_a_run_whose_observer_fails_keeps_its_last_step(tmp_path):
    named = f"+tracking.observers.mine={{_target_: {__name__}.fails_in_step_2}}"
    with pytest.raises(RunFailed, match="^tracking.observers.mine: my/number is str"):
        train(compose([*SHORT, "training.save_interval_steps=0", "evaluation.num_examples=0", named]), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]
    assert [row["step"] for row in lines(tmp_path)] == [1, 2] and "my/number" not in lines(tmp_path)[1]
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    "found, said",
    [
        (3.0, "it returned float; return a dict like {'my/number': 1.0}"),
        ({"train/loss": 1.0}, "'train/loss' is not the name of a metric of yours"),
        ({"my/losses": np.ones(3)}, "my/losses is ndarray; give one number"),
    ],
)
def test_what_an_observer_returns_is_checked(found, said):
    settings = SimpleNamespace(tracking=SimpleNamespace(observers={"mine": lambda done: found}))
    watching = SimpleNamespace(session=SimpleNamespace(run=settings))
    with pytest.raises(RunFailed, match=f"^tracking.observers.mine: {re.escape(said)}"):
        watch.Watch.observed(watching, None)
