"""The product of two matrices. On a CPU the gradient of the second one is computed in a faster way.

The gradient of a weight is rows^T times the cotangent. It is a sum over all tokens, which are the
first dim of both factors. XLA for CPUs has two libraries for products, YNNPACK and Eigen. YNNPACK
sums over the last dim of its first factor. Any other product goes to Eigen. So on a CPU we first
transpose the factor with fewer columns, in a kernel of its own. That kernel was timed on an Intel
Xeon only (docs/log.md, 2026-11-24). Other platforms need no such copy.
"""

import jax
import jax.numpy as jnp

from tunix_lite.models.unfused import unfused


@jax.custom_vjp
def matmul(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """rows [R, I] times matrix [I, O]: [R, O]."""
    return jnp.matmul(rows, matrix)


def _forward(rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.matmul(rows, matrix), (rows, matrix)


def _backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    rows, matrix = residuals
    of_matrix = jax.lax.platform_dependent(rows, cotangent, cpu=_summed_on_cpu, default=_summed)
    return jnp.matmul(cotangent, matrix.T), of_matrix


matmul.defvjp(_forward, _backward)


def _summed(rows: jax.Array, cotangent: jax.Array) -> jax.Array:
    return jnp.matmul(rows.T, cotangent)


def _summed_on_cpu(rows: jax.Array, cotangent: jax.Array) -> jax.Array:
    # Without the barriers XLA would undo the transposes, and multiply as `_summed` does.
    barrier = jax.lax.optimization_barrier
    if rows.shape[1] <= cotangent.shape[1]:
        return jnp.matmul(barrier(unfused(rows).T), cotangent)
    return barrier(jnp.matmul(barrier(unfused(cotangent).T), rows)).T
