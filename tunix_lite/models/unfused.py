"""Values that XLA for CPUs computes in kernels of their own, and a product with a faster gradient.
It removes an `optimization_barrier` before it joins operations, but not a call that must not be
inlined."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

# an array, or a tree of arrays
Arrays = TypeVar("Arrays")


@jax.jit
def _itself(x: Arrays) -> Arrays:
    # Without the barrier jax would drop a function that computes nothing.
    return jax.lax.optimization_barrier(x)


def unfused(x: Arrays) -> Arrays:
    """x, an array or a tree of them, as the result of a call that XLA does not inline: what reads
    one of its arrays runs once all of them are there."""
    with set_xla_metadata(inlineable="false"):
        return _itself(x)


def unfused_on_cpu(x: Arrays) -> Arrays:
    """x; where a program is compiled for CPUs, `unfused`."""
    return jax.lax.platform_dependent(x, cpu=unfused, default=lambda x: x)


@jax.custom_vjp
def with_unfused_cotangent(x: jax.Array) -> jax.Array:
    """x. On a CPU its cotangent is `unfused`. It has no forward-mode derivative (jax.jvp)."""
    return x


with_unfused_cotangent.defvjp(
    lambda x: (x, None), lambda _, cotangent: (unfused_on_cpu(cotangent),)
)


@jax.jit
def matrix_first(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    """rows [..., R, I] times the transpose of matrix [..., O, I]: [..., R, O], where R is small."""
    # XLA for CPUs would transpose the matrix for every product. The barriers keep this order.
    barrier = jax.lax.optimization_barrier
    columns = barrier(jnp.swapaxes(rows, -1, -2))
    return jnp.swapaxes(barrier(jnp.matmul(matrix, columns)), -1, -2)


@jax.custom_vjp
def matmul(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """rows [R, I] times matrix [I, O]: [R, O]. On a CPU the gradient of the matrix is faster."""
    return jnp.matmul(rows, matrix)


def _matmul_backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    rows, matrix = residuals
    # only CPUs need another order of additions: elsewhere the plain product is the fastest
    of_matrix = jax.lax.platform_dependent(
        rows,
        cotangent,
        cpu=_summed_on_cpu,
        default=lambda rows, cotangent: jnp.matmul(rows.T, cotangent),
    )
    return jnp.matmul(cotangent, matrix.T), of_matrix


matmul.defvjp(lambda *arrays: (jnp.matmul(*arrays), arrays), _matmul_backward)


def _summed_on_cpu(rows: jax.Array, cotangent: jax.Array) -> jax.Array:
    # A sum over the last dim of the first factor goes to the faster library, YNNPACK. Without the
    # barriers XLA would undo the transposes (timed on an Intel Xeon: docs/log.md, 2026-11-24).
    barrier = jax.lax.optimization_barrier
    if rows.shape[1] <= cotangent.shape[1]:
        return jnp.matmul(barrier(unfused(rows).T), cotangent)
    return barrier(jnp.matmul(barrier(unfused(cotangent).T), rows)).T
