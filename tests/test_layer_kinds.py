"""Layers of several kinds: a made-up kind, attention without rotation, beside one of the package."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NEW, PROMPT, logits_of, random_params, set_mesh
from test_docs import EXAMPLE

from tunix_lite.learner.policy import token_logprobs
from tunix_lite.models import attention, decoder, weights
from tunix_lite.models.architecture import Architecture, repeated
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

NAME = "unrotated.UNROTATED"


@pytest.fixture(autouse=True)
def example_is_on_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)


@pytest.fixture(scope="module")
def mixed(cfg) -> Architecture:
    """Two periods and a layer that is left over."""
    return replace(cfg, num_layers=7, pattern=(NAME, NAME, "local"))


def scores(params, tokens, cfg, **settings):
    meta = attention.one_sequence_per_row(jnp.ones_like(tokens, bool))
    return decoder.logits(params, cfg, decoder.forward(params, cfg, tokens, meta, **settings))


def test_each_kind_has_a_stack_and_one_shape_has_one(cfg, mixed):
    def shapes(cfg):
        return {path: w.shape for path, w in weights.flatten(decoder.weights(cfg)).items() if path.endswith("/q")}

    assert shapes(mixed) == {"layers/UNROTATED/q": (5, 16, 4, 8), "layers/local/q": (2, 16, 4, 8)}
    assert shapes(cfg) == {"layers/q": (3, 16, 4, 8)}


def test_the_shortest_period_is_found():
    assert repeated("aab" * 2 + "a") == ("a", "a", "b")
    assert repeated("aabab") == tuple("aabab")


def test_a_pattern_names_kinds_that_there_are(cfg):
    with pytest.raises(ValueError, match="its entries are local, global"):
        replace(cfg, pattern=("nope",))
    with pytest.raises(ValueError, match="whose last names differ"):
        replace(cfg, pattern=("a.NOPE", "b.NOPE"))
    with pytest.raises(ValueError, match="is not a LayerKind"):
        decoder.weights(replace(cfg, pattern=("test_layer_kinds.NAME",)))


def test_a_scan_over_periods_is_layer_after_layer(mixed):
    params = random_params(mixed)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 12))

    def loss(params, scan_layers):
        return jnp.mean(jax.nn.log_softmax(scores(params, tokens, mixed, scan_layers=scan_layers))[..., 3])

    one, other = (jax.jit(jax.value_and_grad(partial(loss, scan_layers=way)))(params) for way in (True, False))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), one, other)


def test_the_made_up_kind_knows_no_positions(mixed):
    """Without rotation the last token does not see in which order the others come; with it, it does."""
    tokens = np.random.default_rng(1).integers(0, 32, (1, 9))
    turned = np.concatenate([tokens[:, :-1][:, ::-1], tokens[:, -1:]], axis=1)
    alone = replace(mixed, pattern=(NAME,), num_layers=1)
    params = random_params(alone)
    last, last_of_turned = (logits_of(params, alone, x)[:, -1] for x in (tokens, turned))
    np.testing.assert_allclose(last, last_of_turned, atol=1e-5)
    rotated = replace(alone, pattern=("global",))
    params = params | {"layers": params["layers"]["UNROTATED"]}
    last, last_of_turned = (logits_of(params, rotated, x)[:, -1] for x in (tokens, turned))
    assert np.abs(last - last_of_turned).max() > 0.1


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((2, 2), marks=pytest.mark.wide)])
def test_what_is_sampled_is_what_is_scored(mixed, mesh):
    set_mesh(*mesh)
    params = random_params(mixed)
    generate = make_generate(
        mixed, GenerationConfig(PROMPT, NEW), (-1,), 0, rollout=RolloutConfig(num_slots=2, chunk=4)
    )
    rollout = generate(params, [[5, 6, 7], [3] * PROMPT, [9]], jax.random.key(0))
    scored = jax.jit(partial(token_logprobs, cfg=mixed))(params, rollout.tokens, rollout.token_mask)
    mask = rollout.completion_mask
    assert mask.sum() == 3 * NEW
    np.testing.assert_allclose(np.asarray(scored)[mask], rollout.logprobs[mask], atol=1e-5)
