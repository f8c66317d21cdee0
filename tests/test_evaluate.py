"""Evaluation: while a run trains, and of any model by `tunix-lite evaluate`."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.commands import evaluate as command
from tunix_lite.inference import rollouts
from tunix_lite.inference.language_model import load
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.grading import group_metrics


def test_groups_are_counted_by_what_their_rewards_are():
    """By hand: all 0; all 1; mixed; all equal but neither; one kept of two; none kept."""
    total = np.array([0, 0, 1, 1, 0, 1, 0.5, 0.5, 1, 0, 0, 0.0])
    dropped = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1], bool)
    found = group_metrics(total, dropped, [[i, i + 1] for i in range(0, 12, 2)])
    assert found == {
        "reward/groups_all_zero": 1 / 6,
        "reward/groups_all_one": 2 / 6,
        "reward/groups_mixed": 1 / 6,
        "reward/groups_that_agree": 5 / 6,
    }


def test_every_setting_of_rollout_reaches_the_sampler(monkeypatch):
    """Of a model on one device. Only the number of slots and where the weights stay are chosen."""
    got = []
    monkeypatch.setattr(rollouts, "make_generate", lambda *arguments: got.append(arguments[5]))
    monkeypatch.setattr(rollouts, "choose_weights", lambda *_: ("gathered", ""))
    tokenizer = SimpleNamespace(eos_ids=(1,), pad_id=0)
    monkeypatch.setattr(rollouts, "num_params", lambda table: 135_000_000)
    monkeypatch.setattr(rollouts.decoder, "weights", lambda cfg: None)
    model = SimpleNamespace(mesh=set_mesh(1, 1), params={}, cfg=None, dtype=None, tokenizer=tokenizer)
    asked = RolloutConfig(None, 7, "auto", "int8", kernels="fused")
    rollouts.generate_of(model, GenerationConfig(), asked, [(4, 2)])
    assert got == [RolloutConfig(8, 7, "gathered", "int8", kernels="fused")]

    # On a CPU, 160 slots of 135M weights took 9.8 GB, and nothing was graded before nearly all had ended.
    for num_slots, expected in ((None, 16), (40, 40)):
        rollouts.generate_of(model, GenerationConfig(), replace(asked, num_slots=num_slots), [(160, 1)])
        assert got[-1].num_slots == expected


def test_an_evaluation_frees_the_weights_as_they_were_loaded(monkeypatch):
    """It samples with the weights layer by layer, once for both rollouts, so a real model is there once."""
    loaded, seen = [], []

    def opener():
        model = load("bundled")
        loaded.extend(weakref.ref(x) for x in jax.tree.leaves(model.params["layers"]))
        return model

    class Stop(Exception):
        pass

    def evaluate(policy, task, params, *_):
        gc.collect()
        seen.extend((type(params["layers"]), sum(x() is not None for x in loaded)))
        assert policy.generate.prepare(params) is params
        raise Stop

    monkeypatch.setattr(command, "evaluate", evaluate)
    with pytest.raises(Stop):
        command._score(compose([]), command.EvaluateTaskConfig(num_examples=2), opener, "model")
    assert len(loaded) > 5 and seen == [list, 0]
