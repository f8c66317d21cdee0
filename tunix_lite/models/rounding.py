"""What is kept in bfloat16, and is therefore rounded: decided here and where it is called, not by the compiler.

XLA may drop a rounding to bfloat16 that is followed by a step back to float32, and it does wherever it fuses the two:
one way in the scan over whole rows that trains, another in the layer by layer program that samples. The two then round
in different places and say different probabilities. `reduce_precision` is a rounding that XLA must keep. So every value
between two steps of the model goes through `stored`, every product through `product`, and all that stands between two
of them is computed in float32. In float32 and float64 nothing is rounded and nothing is added to a program.
"""

from functools import partial

import jax
import jax.numpy as jnp


def at_least_float32(dtype):
    """The dtype of what must not be rounded to bfloat16: norms, softmax, rope and scores."""
    return jnp.promote_types(dtype, jnp.float32)


def wide(x):
    """x to compute with: in float32 where it is stored in less."""
    return x.astype(at_least_float32(x.dtype))


def stored(x, dtype):
    """x as `dtype` keeps it, rounded here and nowhere else."""
    if x.dtype == dtype or jnp.finfo(dtype).bits >= 32:
        return x.astype(dtype)
    of = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, of.nexp, of.nmant).astype(dtype)


def product(multiply, x, y):
    """multiply(x, y), of one dtype: summed in float32 and rounded once. multiply: jnp.matmul, or an einsum.

    The backward pass is that of multiply itself: its sums are rounded as the compiler likes, they meet nothing.
    """
    return multiply(x, y) if jnp.finfo(x.dtype).bits >= 32 else _product(multiply, x, y)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(multiply, x, y):
    return stored(multiply(x, y, preferred_element_type=at_least_float32(x.dtype)), x.dtype)


def _forward(multiply, x, y):
    return _product(multiply, x, y), (x, y)


def _backward(multiply, kept, slope):
    return jax.vjp(multiply, *kept)[1](slope)


_product.defvjp(_forward, _backward)
