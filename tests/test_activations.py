"""The activation of a gated feed-forward: against numpy in float64, and what its backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_lite.models.activations import ACTIVATIONS, gated


def activated(activation, x):
    """In float64: gelu with tanh as published, and silu."""
    if activation == "gelu":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def test_every_activation_is_tested():
    assert set(ACTIVATIONS) == {"gelu", "silu"}


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_gated_activation_and_its_gradient_are_those_of_numpy(activation):
    gate = np.concatenate([np.linspace(-12, 12, 481), [-88.0, 88.0]])
    rng = np.random.default_rng(0)
    up, cotangent = rng.normal(size=(2, len(gate)))
    out, pull_back = jax.vjp(lambda *x: gated(activation, *x), *(jnp.asarray(x, jnp.float32) for x in (gate, up)))
    of_gate, of_up = pull_back(jnp.asarray(cotangent, jnp.float32))

    small = 1e-4
    slope = (activated(activation, gate + small) - activated(activation, gate - small)) / (2 * small)
    for found, expected in (
        (out, activated(activation, gate) * up),
        (of_gate, cotangent * up * slope),
        (of_up, cotangent * activated(activation, gate)),
    ):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_in_bfloat16_values_and_gradients_are_rounded_once(activation):
    gate, up, cotangent = (
        jnp.asarray(x, jnp.bfloat16) for x in np.random.default_rng(1).normal(size=(3, 1000)) * [[4], [1], [1]]
    )
    out, pull_back = jax.vjp(lambda *x: gated(activation, *x), gate, up)
    wide = [np.asarray(x, np.float64) for x in (gate, up, cotangent)]
    small = 1e-4
    slope = (activated(activation, wide[0] + small) - activated(activation, wide[0] - small)) / (2 * small)
    expected = (
        activated(activation, wide[0]) * wide[1],
        wide[2] * wide[1] * slope,
        wide[2] * activated(activation, wide[0]),
    )
    for found, exact in zip((out, *pull_back(cotangent)), expected, strict=True):
        assert found.dtype == jnp.bfloat16
        # half a unit in the last of 8 bits
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8 * 1.001, atol=4e-6)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_keeps_gate_and_up_alone(activation, dtype):
    def kept(gate, up):
        return jax.vjp(lambda *x: gated(activation, *x), gate, up)[1]

    given = jax.ShapeDtypeStruct((8, 16), dtype)
    assert [(x.shape, str(x.dtype)) for x in jax.tree.leaves(jax.eval_shape(kept, given, given))] == [
        ((8, 16), dtype)
    ] * 2


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_far_from_zero_gradients_keep_their_digits(activation):
    """Where the activation is nearly 0, its slope is no difference of numbers near 1."""
    gate = np.array([-4.0, -6.0]) if activation == "gelu" else np.array([-12.0, -30.0])
    _, pull_back = jax.vjp(lambda *x: gated(activation, *x), *jnp.ones((2, 2), jnp.float32).at[0].set(gate))
    small = 1e-4
    slope = (activated(activation, gate + small) - activated(activation, gate - small)) / (2 * small)
    if activation == "gelu":
        # 1 + tanh loses its digits in float64, too: half of it is sigmoid(2 u)
        u = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        share = 1 / (1 + np.exp(-2 * u))
        slope = share + gate * share * (1 - share) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * gate**2)
    np.testing.assert_allclose(pull_back(jnp.ones(2))[0], slope, rtol=2e-5)
