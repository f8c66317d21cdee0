"""The schedule and the chain are what they say."""

import jax.numpy as jnp
import numpy as np
import pytest

from tunix_lite.learner.optim import OptimizerConfig, learning_rate_at, make_optimizer


def rates(max_steps=11, **settings):
    cfg = OptimizerConfig(learning_rate=1.0, **settings)
    return [learning_rate_at(cfg, max_steps, step) for step in range(max_steps)]


def test_schedules_by_hand():
    """As transformers and optax: the end is one update after the last, so that the last one still learns."""
    np.testing.assert_allclose(rates(), 1.0)
    part = np.arange(11) / 11
    np.testing.assert_allclose(rates(schedule="linear"), 1 - part, atol=1e-6)
    np.testing.assert_allclose(rates(schedule="linear", end_fraction=0.5), 1 - part / 2, atol=1e-6)
    np.testing.assert_allclose(rates(schedule="cosine"), (1 + np.cos(np.pi * part)) / 2, atol=1e-6)
    # two updates of warm-up, the second at the peak; then 4/5, 3/5, 2/5, 1/5
    np.testing.assert_allclose(rates(6, schedule="linear", warmup_steps=2), [0.5, 1, 0.8, 0.6, 0.4, 0.2], atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 20])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_schedule_spans_the_run(schedule, warmup):
    """Tunix D10: a shipped decay over 10 steps left the rest of every run at learning rate 0. The peak is there once."""
    seen = np.array(rates(max_steps=500, schedule=schedule, warmup_steps=warmup))
    assert 0 < seen[-1] < 0.003 and seen.max() == 1
    assert np.flatnonzero(seen == 1).tolist() == [max(warmup, 1) - 1]


def test_a_decay_after_a_warm_up_is_that_of_transformers_by_its_formula():
    """get_linear_schedule_with_warmup(w, T + 1), an update later: its first has rate 0, ours 1/w."""
    w, T = 4, 10
    theirs = [s / w if s < w else (T + 1 - s) / (T + 1 - w) for s in range(1, T + 1)]
    np.testing.assert_allclose(rates(T, schedule="linear", warmup_steps=w), theirs, atol=1e-6)


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
        x = x - 0.1 * (1 - step / 5) * (direction + decay)
    np.testing.assert_allclose(np.concatenate([params["layer"]["q"], params["layer"]["q_norm"]]), x, rtol=1e-5)


@pytest.mark.parametrize("bad", [{"schedule": "step"}, {"beta1": 1.0}, {"learning_rate": -1.0}, {"end_fraction": 2.0}])
def test_settings_that_cannot_be_right(bad):
    with pytest.raises(ValueError):
        OptimizerConfig(**bad)
