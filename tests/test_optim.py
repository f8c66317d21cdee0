"""The schedule and the chain are what they say."""

import jax.numpy as jnp
import numpy as np
import pytest

from tunix_lite.learner.optim import OptimizerConfig, describe, learning_rate_at, make_optimizer


def rates(max_steps=11, **settings):
    cfg = OptimizerConfig(learning_rate=1.0, **settings)
    return [learning_rate_at(cfg, max_steps, step) for step in range(max_steps)]


def test_schedules_by_hand():
    np.testing.assert_allclose(rates(), 1.0)
    np.testing.assert_allclose(rates(schedule="linear"), np.linspace(1, 0, 11), atol=1e-6)
    np.testing.assert_allclose(rates(schedule="linear", end_fraction=0.5), np.linspace(1, 0.5, 11), atol=1e-6)
    np.testing.assert_allclose(rates(schedule="cosine"), (1 + np.cos(np.pi * np.arange(11) / 10)) / 2, atol=1e-6)


def test_the_schedule_spans_the_run():
    """Tunix D10: a shipped decay over 10 steps left the rest of every run at learning rate 0."""
    for schedule in ("linear", "cosine"):
        seen = rates(max_steps=500, schedule=schedule, warmup_steps=20)
        assert min(seen[:-1]) > 0 and seen[-1] < 1e-6


def test_warm_up_rises_from_the_first_update():
    np.testing.assert_allclose(rates(warmup_steps=4)[:6], [0.25, 0.5, 0.75, 1, 1, 1], atol=1e-6)


def test_the_chain_equals_adamw_in_float64():
    cfg = OptimizerConfig(learning_rate=0.1, schedule="linear", weight_decay=0.3, max_grad_norm=1.0, beta2=0.9)
    optimizer = make_optimizer(cfg, max_steps=5)
    params = {"layer": {"q": jnp.array([1.0, -2.0]), "q_norm": jnp.array([0.5])}}
    state = optimizer.init(params)
    x, m, v = np.array([1.0, -2.0, 0.5]), np.zeros(3), np.zeros(3)
    rng = np.random.default_rng(0)
    for step in range(5):
        g = rng.normal(size=3) * 3
        grads = {"layer": {"q": jnp.array(g[:2], jnp.float32), "q_norm": jnp.array(g[2:], jnp.float32)}}
        updates, state = optimizer.update(grads, state, params)
        params = {"layer": {k: params["layer"][k] + updates["layer"][k] for k in ("q", "q_norm")}}
        g = g / max(1.0, np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g**2
        direction = (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.9 ** (step + 1))) + 1e-8)
        decay = np.array([0.3, 0.3, 0.0]) * x  # norms do not decay
        x = x - 0.1 * (1 - step / 4) * (direction + decay)
    np.testing.assert_allclose(np.concatenate([params["layer"]["q"], params["layer"]["q_norm"]]), x, rtol=1e-5)


def test_the_chain_is_said_in_words():
    text = describe(OptimizerConfig(learning_rate=1e-4, schedule="cosine", warmup_steps=5, weight_decay=0.1))
    assert text == "clip 1 → adamw(0.0001 cosine, warm-up 5, betas 0.9 0.99, decay 0.1)"


@pytest.mark.parametrize("bad", [{"schedule": "step"}, {"beta1": 1.0}, {"learning_rate": -1.0}, {"end_fraction": 2.0}])
def test_settings_that_cannot_be_right(bad):
    with pytest.raises(ValueError):
        OptimizerConfig(**bad)
