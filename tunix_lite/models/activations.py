"""The activation of a gated feed-forward, and a backward pass that keeps only two products for it:
by itself jax.vjp would keep up to eight arrays as large as the products."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from tunix_lite.models.rounding import stored, wide

# Of the tokens' hidden values, elementwise. gelu is in its tanh form.
ACTIVATIONS = {"gelu": partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) * up, elementwise, computed in float32 at least and kept as gate is.
    activation: a name of ACTIVATIONS. It has no forward-mode derivative (jax.jvp)."""
    return stored(ACTIVATIONS[activation](wide(gate)) * wide(up), gate.dtype)


def _backward(
    activation: str, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = residuals
    # The same functions by another formula than ACTIVATIONS. With the same one, the compiler would
    # see that the forward pass has computed it, and keep that for the backward pass.
    x = wide(gate)
    if activation == "gelu":
        # x sigmoid(2 u), where u = sqrt(2 / pi) (x + 0.044715 x^3): tanh(u) = 2 sigmoid(2 u) - 1
        scale = math.sqrt(2 / math.pi)
        share = jax.nn.sigmoid(2 * scale * (x + 0.044715 * x**3))
        twice_slope_of_u = 2 * scale * (1 + 3 * 0.044715 * x**2)
        activated = x * share
        slope = share + x * share * (1 - share) * twice_slope_of_u
    else:
        # sigmoid(x) is 1 or exp(x), over 1 + exp(-|x|)
        small = jnp.exp(-jnp.abs(x))
        share = jnp.where(x < 0, small, 1.0) / (1 + small)
        activated = x * share
        slope = share + x * share * (1 - share)
    of_gate = wide(cotangent) * wide(up) * slope
    of_up = wide(cotangent) * activated
    return stored(of_gate, gate.dtype), stored(of_up, up.dtype)


gated.defvjp(lambda *arguments: (gated(*arguments), arguments[1:]), _backward)
