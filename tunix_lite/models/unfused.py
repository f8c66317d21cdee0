"""A value that XLA computes in kernels of its own, apart from what computes it and what reads it.

XLA for CPUs joins operations into one kernel where it can. That is slow in some cases. A transpose
that is joined with arithmetic reads memory in strides, where a plain transpose goes block by block.
One kernel for a product and the backward pass of a softmax is slower than two, and so is one kernel
for the products and the activation of a feed-forward. An `optimization_barrier` does not keep
operations apart: XLA for CPUs removes it before it joins them. A call of a function that must not
be inlined does.

Use it on CPUs only. What XLA makes for other platforms was not looked at.
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


def unfused_on_cpu(x: jax.Array) -> jax.Array:
    """x; where a program is compiled for CPUs, `unfused`."""
    return jax.lax.platform_dependent(x, cpu=unfused, default=lambda x: x)


@jax.custom_vjp
def with_unfused_cotangent(x: jax.Array) -> jax.Array:
    """x. On a CPU its cotangent is `unfused`. It has no forward-mode derivative (jax.jvp)."""
    return x


def _backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (unfused_on_cpu(cotangent),)


with_unfused_cotangent.defvjp(lambda x: (x, None), _backward)
