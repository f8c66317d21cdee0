"""What is kept in bfloat16 and so is rounded, and in which order sums are taken: decided here, not
by the compiler.

The sampler and the trainer compute the same model in two programs: token by token on a cache, and
whole rows in a scan over layers. XLA may drop a rounding to bfloat16 where a step back to float32
follows. It does so wherever it fuses the two, and it fuses differently in each program.
`reduce_precision` is a rounding that it must keep. So each value between two steps of the model
goes through `stored`, each product through `product`, and all that stands between two of them is
computed in float32.

What is left are the last bits of float32. A sum taken in another order flips a rounding to bfloat16
about once in 2^16 times; a flipped value flips its neighbours, and a few layers on nothing is
alike. A CPU's compiler chooses kernels, and with them the order, by the number of rows. So on a CPU
sums are exact (`total`) or in the order of the tokens (`one_by_one`), and a single row is computed
as two. Accelerators sum as their kernels do. In float32 and float64 nothing here changes a program.
"""

from functools import partial

import jax
import jax.numpy as jnp


def at_least_float32(dtype):
    """The dtype of what must not be rounded to bfloat16: norms, softmax, rope and scores."""
    return jnp.promote_types(dtype, jnp.float32)


def is_rounded(dtype) -> bool:
    """Whether values are kept in less than what they are computed in."""
    return at_least_float32(dtype) != dtype


def wide(x):
    """x to compute with: in float32 where it is kept in less."""
    return x.astype(at_least_float32(x.dtype))


def stored(x, dtype):
    """x as `dtype` keeps it, rounded here."""
    if x.dtype == dtype or not is_rounded(dtype):
        return x.astype(dtype)
    kept = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kept.nexp, kept.nmant).astype(dtype)


def added(x, y):
    """x + y, kept as x is."""
    return stored(wide(x) + wide(y), x.dtype)


def product(multiply, x, y, on_cpu=None, sum_dtype=jnp.float32):
    """multiply(x, y) of two arrays of one dtype: summed in float32, and rounded once. multiply:
    matmul, or an einsum.

    on_cpu: what computes the same there, if not multiply. sum_dtype: bfloat16 rounds the part of
    each shard, too, so that parts travel between devices in half the bytes. The backward pass is
    that of multiply as it stands: what rounds there has no counterpart to agree with.
    """
    if not is_rounded(x.dtype):
        return multiply(x, y)
    return _product(multiply, on_cpu or multiply, jnp.promote_types(sum_dtype, x.dtype), x, y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(multiply, on_cpu, sum_dtype, x, y):
    summed = partial(multiply, preferred_element_type=sum_dtype)
    if sum_dtype == x.dtype:
        # Rounded here once more: where one device has the whole sum, XLA may drop the product's own
        # rounding.
        return stored(wide(summed(x, y)), x.dtype)
    if on_cpu is multiply:
        return stored(summed(x, y), x.dtype)
    summed_on_cpu = partial(on_cpu, preferred_element_type=sum_dtype)
    return stored(jax.lax.platform_dependent(x, y, cpu=summed_on_cpu, default=summed), x.dtype)


_product.defvjp(
    lambda multiply, on_cpu, sum_dtype, x, y: (_product(multiply, on_cpu, sum_dtype, x, y), (x, y)),
    lambda multiply, on_cpu, sum_dtype, kept, slope: jax.vjp(multiply, *kept)[1](slope),
)


def by_rows(fn, x, axis: int, parts: int = 1):
    """fn(x), whose result has the rows of x, too, on the same axis. parts: of the mesh that divide
    them.

    On a CPU no device multiplies a row alone in bfloat16: that is another kernel, with another
    order of its sums.
    """
    if not is_rounded(x.dtype) or x.shape[axis] > parts:
        return fn(x)

    def twice(x):
        return jax.lax.slice_in_dim(fn(jnp.repeat(x, 2, axis)), 0, None, 2, axis)

    return jax.lax.platform_dependent(x, cpu=twice, default=fn)


def softmax(scores, dtype):
    """Of float32 scores over the last dim, float32, for a computation in `dtype`."""
    plain = partial(jax.nn.softmax, axis=-1)
    return (
        jax.lax.platform_dependent(scores, cpu=_softmax, default=plain)
        if is_rounded(dtype)
        else plain(scores)
    )


def mean_square(x):
    """Of the last dim, which stays with size 1; float32."""
    by_compiler = lambda x: jnp.mean(wide(x) ** 2, axis=-1, keepdims=True)  # noqa: E731
    return (
        jax.lax.platform_dependent(x, cpu=_mean_square, default=by_compiler)
        if is_rounded(x.dtype)
        else by_compiler(x)
    )


def inverse_root(x, dtype):
    """1 / sqrt(x) of float32 numbers, for a computation in `dtype`."""
    if not is_rounded(dtype):
        return jax.lax.rsqrt(x)
    return jax.lax.platform_dependent(x, cpu=_inverse_root, default=jax.lax.rsqrt)


# ---- on a CPU
# Barriers, so that exp and its like are always those of one compiler and never those of a kernel
# that takes them in with a sum where there are many rows.


def one_by_one(probs, values, preferred_element_type):
    """sum_s probs[b, k, ..., q, s] values[b, k, s, h] as [b, ..., k, q, h], added in the order of
    s.

    The kernel adds the products of two neighbours first, and who is whose neighbour depends on
    where a sequence begins in its row. Zeros between them leave every product alone, and zeros
    before or after a sequence change nothing.
    """

    def apart(x, axis):
        interior = [(0, int(i == axis), int(i == axis)) for i in range(x.ndim)]
        return jax.lax.pad(x, jnp.zeros((), x.dtype), interior)

    B, K, S, H = values.shape
    rows = apart(probs.reshape(B, K, -1, S), 3)
    sums = jnp.einsum(
        "bkms,bksh->bkmh", rows, apart(values, 2), preferred_element_type=preferred_element_type
    )
    return jnp.moveaxis(sums.reshape(*probs.shape[:-1], H), 1, -3)


def _softmax(scores):
    top = jax.lax.optimization_barrier(
        jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    )
    exps = jax.lax.optimization_barrier(jnp.exp(scores - top))
    return exps / jax.lax.optimization_barrier(total(exps))


def _inverse_root(x):
    """A CPU's rsqrt differs by a bit between a loop that is vectorised and one that is not; these
    two steps do not."""
    return jnp.sqrt(1 / x)


def _mean_square(x):
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(wide(x))), axis=-1, keepdims=True)
    # a power of two, not less: the nearest one, twice
    unit = 2 * jax.lax.reduce_precision(jnp.maximum(largest, 1e-15), 8, 0)
    return jax.lax.optimization_barrier(total((wide(x) / unit) ** 2)) * unit**2 / x.shape[-1]


@jax.custom_jvp
def total(x):
    """The sum of the last dim, which stays with size 1, of numbers from 0 to 1: the same bits in
    every order of adding.

    Each number is cut into parts on grids so coarse that a sum of them is exact in float32's 24
    bits: of up to 4096 numbers, 12 bits and 12 bits. What is cut off lies below 2^-24 of the whole,
    float32's own precision.
    """
    bits = 24 - max(1, x.shape[-1] - 1).bit_length()
    sums, rest = [], x
    for level in range(1, -(-24 // bits) + 1):
        grid = 2.0 ** (-bits * level)
        part = jnp.round(rest / grid) * grid
        sums.append(jnp.sum(part, axis=-1, keepdims=True))
        rest = rest - part
    return sum(sums[1:], sums[0])


@total.defjvp
def _slope_of_total(primals, tangents):
    return total(*primals), jnp.sum(*tangents, axis=-1, keepdims=True)
