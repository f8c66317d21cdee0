"""Rounds values to bfloat16 at places that are decided here, not by the compiler: the sampler and
the trainer are two programs, and XLA drops roundings where it fuses two steps. `reduce_precision`
is a rounding that it must keep. In float32 and float64 nothing here changes a program."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of what must not be rounded to bfloat16: norms, softmax, rope and logits."""
    return jnp.promote_types(dtype, jnp.float32)


def is_rounded(dtype: DTypeLike) -> bool:
    """True if values are stored in fewer bits than they are computed in."""
    return at_least_float32(dtype) != dtype


def wide(x: jax.Array) -> jax.Array:
    """x to compute with: in float32, if it is kept in fewer bits."""
    return x.astype(at_least_float32(x.dtype))


def stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x as `dtype` keeps it, rounded here."""
    if x.dtype == dtype or not is_rounded(dtype):
        return x.astype(dtype)
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant).astype(dtype)


def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, kept as x is."""
    return stored(wide(x) + wide(y), x.dtype)


def product(
    multiply: Callable[..., jax.Array],
    x: jax.Array,
    y: jax.Array,
    sum_dtype: DTypeLike = jnp.float32,
    by_conversion: bool = False,
) -> jax.Array:
    """multiply(x, y) of two arrays of one dtype: summed in float32, and rounded once.

    sum_dtype: bfloat16 rounds the part of each shard, too. by_conversion: on accelerators it ends
    in a conversion, which costs a GPU nothing. The backward pass is that of multiply.
    """
    if not is_rounded(x.dtype):
        return multiply(x, y)
    return _product(multiply, by_conversion, jnp.promote_types(sum_dtype, x.dtype), x, y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    multiply: Callable[..., jax.Array],
    by_conversion: bool,
    sum_dtype: jnp.dtype,
    x: jax.Array,
    y: jax.Array,
) -> jax.Array:
    summed = partial(multiply, preferred_element_type=sum_dtype)
    if sum_dtype == x.dtype:
        # Rounded here once more: where one device has the whole sum, XLA may drop the product's own
        # rounding.
        return stored(wide(summed(x, y)), x.dtype)

    def rounded(x: jax.Array, y: jax.Array) -> jax.Array:
        return stored(summed(x, y), x.dtype)

    def converted(x: jax.Array, y: jax.Array) -> jax.Array:
        # The barrier keeps XLA from dropping the conversion.
        return jax.lax.optimization_barrier(summed(x, y).astype(x.dtype))

    if not by_conversion:
        return rounded(x, y)
    return jax.lax.platform_dependent(x, y, cpu=rounded, default=converted)


def _product_backward(
    multiply: Callable[..., jax.Array],
    by_conversion: bool,
    sum_dtype: jnp.dtype,
    residuals: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    _, pull_back = jax.vjp(multiply, *residuals)
    return pull_back(cotangent)


_product.defvjp(lambda *arguments: (_product(*arguments), arguments[3:]), _product_backward)
