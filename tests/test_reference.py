"""The reference of the KL term is the policy that training starts from, however often it is resumed; and observers."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train import SHORT, lines, without_time

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.basics.errors import ConfigError, RunFailed
from tunix_lite.models import decoder
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.source import ModelConfig
from tunix_lite.models.weights import Lora, init_params
from tunix_lite.runs import watch
from tunix_lite.runs.reference import Reference, find_reference, reference_of
from tunix_lite.runs.setup import prepare
from tunix_lite.runs.watch import StepDone
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train

QUICK = [*SHORT, "evaluation.num_examples=0", "tracking.tensorboard=false", "tracking.samples_interval_steps=0",
         "algorithm.kl_coef=0.1", "optimizer.learning_rate=1e-2"]  # fmt: skip
LORA = ["model.lora.rank=2", "model.lora.alpha=4"]


@pytest.mark.parametrize(
    "more, words",
    [
        ([], "the weights of checkpoint 1 of "),
        pytest.param(LORA, "the base with the adapters of", marks=pytest.mark.wide),
    ],
    ids=["all weights", "adapters"],
)
def test_a_run_from_a_checkpoint_of_another_is_pulled_back_to_it_and_to_nothing_earlier(more, words, tmp_path):
    """Resumed itself, it has the same reference, though the other run is gone: it equals one that never stopped."""
    first, second, again = tmp_path / "first", tmp_path / "second", tmp_path / "again"
    train(compose([*QUICK, *more, "training.max_steps=1", "training.save_interval_steps=1"]), first)
    assert abs(lines(first)[0]["train/kl"]) < 1e-6
    on = [*QUICK, *more, "training.max_steps=3", "training.save_interval_steps=1"]
    whole = train(compose([*on, f"resume={first}"]), second)
    kl = {row["step"]: row["train/kl"] for row in lines(second)}
    assert abs(kl[2]) < 1e-6 < 1e-4 < kl[3], "at its first update the policy is the reference"
    assert words in (second / "train.log").read_text() and f"{first}" in (second / "train.log").read_text()
    assert json.loads((second / "reference.json").read_text())["kept"] == 1

    shutil.rmtree(first)
    shutil.copytree(second, again)
    shutil.rmtree(again / "checkpoints" / "3")
    resumed = train(compose([*on, f"resume={first}"]), again)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert [without_time(row) for row in lines(again)] == [without_time(row) for row in lines(second)]

    shutil.rmtree(again / "checkpoints" / "3")
    shutil.rmtree(again / "reference")
    with pytest.raises(ConfigError, match="resume: .*/again/reference/1 is gone, which held the reference of the run"):
        prepare(compose(on), RunDir(again))
    (again / "reference.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="resume: .*/reference.json is nested too deep: .*, so the reference is not"):
        prepare(compose(on), RunDir(again))
    (again / "reference.json").unlink()
    with pytest.raises(ConfigError, match="resume: .*/again has no reference.json: the run had no KL term"):
        prepare(compose(on), RunDir(again))
    begins_anew = prepare(compose([*on, "resume.force=true"]), RunDir(again)).reference
    assert begins_anew.words in ("the weights of random", "the base")


# ---- which one it is, and what is kept of it


def asked(reference=True, adapter=None):
    algorithm = SimpleNamespace(needs=Needs(reference=reference))
    model = ModelConfig("bundled", lora=LoraConfig(adapter=adapter))
    return SimpleNamespace(algorithm=algorithm, resume=SimpleNamespace(force=False), model=model)


ADAPTED = SimpleNamespace(lora=LoraConfig(rank=2))


@pytest.mark.parametrize(
    "run, model, found",
    [
        (asked(reference=False), ADAPTED, None),
        (asked(), SimpleNamespace(lora=None), Reference("the weights of bundled")),
        (asked(), ADAPTED, Reference("the base")),
        (asked(adapter="/my/sft"), ADAPTED, Reference("the base with the adapters of /my/sft", kept=0)),
    ],
)
def test_the_reference_of_a_run_that_begins_is_what_its_model_names(run, model, found, tmp_path):
    assert find_reference(run, model, RunDir(tmp_path), None) == found


def test_adapters_that_training_starts_from_are_kept_with_the_run(cfg, params, tmp_path):
    """The folder of the adapter may change, and what is loaded is deleted or trained further."""
    lora = LoraConfig(rank=2)
    model = SimpleNamespace(lora=lora, cfg=cfg)
    table = adapter_weights(decoder.weights(cfg), lora)
    started_from, others = (
        jax.tree.map(lambda x: x + 0.5, init_params(table, jax.random.key(seed))) for seed in (0, 1)
    )
    wanted = jax.tree.map(np.array, started_from)
    begins = Reference("the base with the adapters of /my/sft", kept=0)
    folder = RunDir(tmp_path)
    first = reference_of(folder, begins, model, jnp.float32, params, started_from)
    jax.tree.map(lambda x: x.delete(), started_from)
    goes_on = find_reference(asked(), model, folder, folder.checkpoints)
    assert goes_on == replace(begins, is_new=False)
    for found in (first, reference_of(folder, goes_on, model, jnp.float32, params, others)):
        leaf = found["layers"]["q"]
        assert isinstance(leaf, Lora) and leaf.base is params["layers"]["q"]
        np.testing.assert_array_equal(leaf.a, wanted["layers"]["q"]["a"])
        np.testing.assert_array_equal(leaf.b, wanted["layers"]["q"]["b"])


# ---- the observers of users


def rows_and_entropy(done: StepDone) -> dict:
    """An observer as a user writes it: it sees the batch, the update's metrics and the state."""
    batch = done.experience.batch
    return {"my/rows": len(batch.tokens), "my/entropy": done.learned["train/entropy"], "my/step": done.state.step}


def fails_in_step_2(done: StepDone) -> dict:
    return {"other/number": 1.0 if done.step < 2 else "none"}


def test_an_observer_adds_its_numbers_and_a_run_whose_observer_fails_keeps_its_last_step(tmp_path):
    named = [
        f"+tracking.observers.{name}={{_target_: {__name__}.{name}}}"
        for name in ("rows_and_entropy", "fails_in_step_2")
    ]
    settings = [*SHORT, "training.save_interval_steps=0", "evaluation.num_examples=0", *named]
    with pytest.raises(RunFailed, match="^tracking.observers.fails_in_step_2: other/number is str"):
        train(compose(settings), tmp_path)
    first, second = lines(tmp_path)
    assert (first["my/rows"], first["my/step"], first["other/number"]) == (16, 1, 1.0)
    assert first["my/entropy"] == pytest.approx(first["train/entropy"])
    assert second["step"] == 2 and "other/number" not in second
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]
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
        watch.Watch.call_observers(watching, None)
