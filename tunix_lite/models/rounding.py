"""Where values are rounded to bfloat16, and in which order sums are taken: decided here, not by the
compiler.

The sampler and the trainer compute the same model in two programs: token by token on a cache, and
whole rows in a scan over layers. XLA may drop a rounding to bfloat16 where a step back to float32
follows. It does so wherever it fuses the two, and it fuses differently in each program.
`reduce_precision` is a rounding that XLA must keep. So each value between two steps of the model
goes through `stored`, each product through `product`, and all that happens between two of them is
computed in float32.

The last bits of float32 remain. A sum taken in another order flips a rounding to bfloat16 about
once in 2^16 times; a flipped value flips its neighbours, and a few layers later nothing is alike. A
CPU's compiler chooses kernels, and with them the order, by the number of rows. So on a CPU sums are
exact (`sum_exactly`) or in the order of the tokens (`sum_one_by_one`), and a single row is computed
as two. On CPUs with AMX this order does not hold (docs/references/limits.md). Accelerators sum as
their kernels do. In float32 and float64 nothing here changes a program.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of what must not be rounded to bfloat16: norms, softmax, rope and logits."""
    return jnp.promote_types(dtype, jnp.float32)


def is_rounded(dtype: DTypeLike) -> bool:
    """Whether values are kept in fewer bits than they are computed in."""
    return at_least_float32(dtype) != dtype


def wide(x: jax.Array) -> jax.Array:
    """x to compute with: in float32, if it is kept in fewer bits."""
    return x.astype(at_least_float32(x.dtype))


def stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x as `dtype` keeps it, rounded here."""
    if x.dtype == dtype or not is_rounded(dtype):
        return x.astype(dtype)
    kept = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kept.nexp, kept.nmant).astype(dtype)


def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, kept as x is."""
    return stored(wide(x) + wide(y), x.dtype)


def product(
    multiply: Callable[..., jax.Array],
    x: jax.Array,
    y: jax.Array,
    on_cpu: Callable[..., jax.Array] | None = None,
    sum_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """multiply(x, y) of two arrays of one dtype: summed in float32, and rounded once.

    multiply: matmul, or an einsum. on_cpu: what computes the same on a CPU, if not multiply.
    sum_dtype: bfloat16 rounds the part of each shard, too, so that parts travel between devices in
    half the bytes. The backward pass is that of multiply, unchanged: nothing else computes the same
    gradient, so its roundings need not agree with anything.
    """
    if not is_rounded(x.dtype):
        return multiply(x, y)
    return _product(multiply, on_cpu or multiply, jnp.promote_types(sum_dtype, x.dtype), x, y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    multiply: Callable[..., jax.Array],
    on_cpu: Callable[..., jax.Array],
    sum_dtype: jnp.dtype,
    x: jax.Array,
    y: jax.Array,
) -> jax.Array:
    summed = partial(multiply, preferred_element_type=sum_dtype)
    if sum_dtype == x.dtype:
        # Rounded here once more: where one device has the whole sum, XLA may drop the product's own
        # rounding.
        return stored(wide(summed(x, y)), x.dtype)
    if on_cpu is multiply:
        return stored(summed(x, y), x.dtype)

    def rounded_on_cpu(x: jax.Array, y: jax.Array) -> jax.Array:
        return stored(on_cpu(x, y, preferred_element_type=sum_dtype), x.dtype)

    def rounded(x: jax.Array, y: jax.Array) -> jax.Array:
        # A GPU's products end in a conversion at no cost, but not in reduce_precision, which would
        # be a kernel of its own. The barrier keeps XLA from dropping the conversion.
        return jax.lax.optimization_barrier(summed(x, y).astype(x.dtype))

    return jax.lax.platform_dependent(x, y, cpu=rounded_on_cpu, default=rounded)


def _product_forward(
    multiply: Callable[..., jax.Array],
    on_cpu: Callable[..., jax.Array],
    sum_dtype: jnp.dtype,
    x: jax.Array,
    y: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(multiply, on_cpu, sum_dtype, x, y), (x, y)


def _product_backward(
    multiply: Callable[..., jax.Array],
    on_cpu: Callable[..., jax.Array],
    sum_dtype: jnp.dtype,
    residuals: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    _, pull_back = jax.vjp(multiply, *residuals)
    return pull_back(cotangent)


_product.defvjp(_product_forward, _product_backward)


def by_rows(
    fn: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    axis: int,
    parts: int = 1,
) -> jax.Array:
    """fn(x), where fn keeps the rows of x, which lie along `axis`. parts: how many parts the mesh
    divides the rows into.

    On a CPU no device multiplies a single row in bfloat16: that is another kernel, with another
    order of its sums. There a single row is computed as two.
    """
    if not is_rounded(x.dtype) or x.shape[axis] > parts:
        return fn(x)

    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(fn(jnp.repeat(x, 2, axis)), 0, None, 2, axis)

    return jax.lax.platform_dependent(x, cpu=twice, default=fn)


def softmax(scores: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Softmax over the last dim of float32 scores, in float32, for a computation in `dtype`."""
    plain = partial(jax.nn.softmax, axis=-1)
    if not is_rounded(dtype):
        return plain(scores)
    return jax.lax.platform_dependent(scores, cpu=_softmax_on_cpu, default=plain)


def mean_square(x: jax.Array) -> jax.Array:
    """The mean of x^2 over the last dim, [..., 1], float32."""

    def by_compiler(x: jax.Array) -> jax.Array:
        return jnp.mean(wide(x) ** 2, axis=-1, keepdims=True)

    if not is_rounded(x.dtype):
        return by_compiler(x)
    return jax.lax.platform_dependent(x, cpu=_mean_square_on_cpu, default=by_compiler)


def inverse_root(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """1 / sqrt(x) of float32 numbers, for a computation in `dtype`."""
    if not is_rounded(dtype):
        return jax.lax.rsqrt(x)
    return jax.lax.platform_dependent(x, cpu=_inverse_root_on_cpu, default=jax.lax.rsqrt)


# ---- on a CPU
# The barriers keep exp and its like the kernels of one compiler. Without them, XLA fuses exp into
# the kernel of a sum where there are many rows.


def sum_one_by_one(
    probs: jax.Array,
    values: jax.Array,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """sum_s probs[b, k, ..., q, s] values[b, k, s, h] as [b, ..., k, q, h], added in the order of
    s.

    The kernel adds the products of two neighbours first, and which are neighbours depends on where
    a sequence begins in its row. Zeros between them keep every product by itself, and zeros before
    or after a sequence change nothing.
    """

    def zeros_between(x: jax.Array, axis: int) -> jax.Array:
        interior = [(0, int(i == axis), int(i == axis)) for i in range(x.ndim)]
        return jax.lax.pad(x, jnp.zeros((), x.dtype), interior)

    B, K, S, H = values.shape
    rows = zeros_between(probs.reshape(B, K, -1, S), 3)
    sums = jnp.einsum(
        "bkms,bksh->bkmh",
        rows,
        zeros_between(values, 2),
        preferred_element_type=preferred_element_type,
    )
    return jnp.moveaxis(sums.reshape(*probs.shape[:-1], H), 1, -3)


def _softmax_on_cpu(scores: jax.Array) -> jax.Array:
    top = jax.lax.optimization_barrier(
        jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    )
    exps = jax.lax.optimization_barrier(jnp.exp(scores - top))
    return exps / jax.lax.optimization_barrier(sum_exactly(exps))


def _inverse_root_on_cpu(x: jax.Array) -> jax.Array:
    """1 / sqrt(x) in two steps. A CPU's rsqrt differs by a bit between a loop that is vectorised
    and one that is not; these two steps do not."""
    return jnp.sqrt(1 / x)


def _mean_square_on_cpu(x: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(wide(x))), axis=-1, keepdims=True)
    # Twice the nearest power of two: not less than the largest, and a division by it is exact.
    unit = 2 * jax.lax.reduce_precision(jnp.maximum(largest, 1e-15), 8, 0)
    return jax.lax.optimization_barrier(sum_exactly((wide(x) / unit) ** 2)) * unit**2 / x.shape[-1]


@jax.custom_jvp
def sum_exactly(x: jax.Array) -> jax.Array:
    """The sum of numbers from 0 to 1 over the last dim, [..., 1]: the same bits in every order of
    adding.

    Each number is cut into parts on grids so coarse that a sum of parts is exact in float32's 24
    bits: of up to 4096 numbers, parts of 12 bits and 12 bits. What is cut off is below 2^-24 of the
    whole, float32's own precision.
    """
    bits = 24 - max(1, x.shape[-1] - 1).bit_length()
    sums = []
    rest = x
    for level in range(1, -(-24 // bits) + 1):
        grid = 2.0 ** (-bits * level)
        part = jnp.round(rest / grid) * grid
        sums.append(jnp.sum(part, axis=-1, keepdims=True))
        rest = rest - part
    return sum(sums[1:], sums[0])


@sum_exactly.defjvp
def _sum_exactly_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return sum_exactly(*primals), jnp.sum(*tangents, axis=-1, keepdims=True)
