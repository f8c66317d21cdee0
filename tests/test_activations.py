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


def by_the_formula(activation, gate, up, cotangent):
    """The value, and the gradients of gate and up, in float64."""
    small = 1e-4
    slope = (activated(activation, gate + small) - activated(activation, gate - small)) / (2 * small)
    value = activated(activation, gate)
    return value * up, cotangent * up * slope, cotangent * value


# half a unit in the last of 8 bits, where values are rounded once
@pytest.mark.parametrize("dtype, rtol, atol", [("float32", 2e-6, 2e-6), ("bfloat16", 2**-8 * 1.001, 4e-6)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_activation_and_its_gradient_are_those_of_numpy(activation, dtype, rtol, atol):
    rng = np.random.default_rng(0)
    gate = np.concatenate([np.linspace(-12, 12, 481), [-88.0, 88.0]])
    arrays = [jnp.asarray(x, dtype) for x in (gate, *rng.normal(size=(2, len(gate))))]
    out, pull_back = jax.vjp(lambda *x: gated(activation, *x), *arrays[:2])
    expected = by_the_formula(activation, *(np.asarray(x, np.float64) for x in arrays))
    for found, exact in zip((out, *pull_back(arrays[2])), expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rtol, atol=atol)


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
