"""A value that XLA computes in kernels of its own, and does not fuse with what reads it.

XLA for CPUs fuses a cheap operation into each one that reads its result. That is slow in two
cases. A transpose that is fused with arithmetic visits memory in strides, where a plain transpose
goes block by block. And a product that is fused with a softmax leaves its fast kernel. An
`optimization_barrier` does not help, because XLA for CPUs removes it before it fuses. A call of a
function that must not be inlined does help.

Use it on CPUs only: other compilers fuse well.
"""

import jax
from jax.experimental.xla_metadata import set_xla_metadata


@jax.jit
def _itself(x: jax.Array) -> jax.Array:
    # Without the barrier jax would drop a function that computes nothing.
    return jax.lax.optimization_barrier(x)


def unfused(x: jax.Array) -> jax.Array:
    """x, of any shape and dtype, as the result of a call that XLA does not inline."""
    with set_xla_metadata(inlineable="false"):
        return _itself(x)


@jax.custom_vjp
def with_unfused_cotangent(x: jax.Array) -> jax.Array:
    """x. On a CPU its cotangent is `unfused`."""
    return x


def _backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.platform_dependent(cotangent, cpu=unfused, default=lambda x: x),)


with_unfused_cotangent.defvjp(lambda x: (x, None), _backward)
