"""Compiler options for single programs, by platform: XLA for one refuses those of another."""

import warnings
from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tunix_lite.parallel.mesh import current_platform

# By platform, options of its compiler by name.
OptionsByPlatform = Mapping[str, Mapping[str, str | bool]]

# XLA for TPU copies arrays from the device's memory into on-chip memory, and back. For each array
# it divides the bytes that kernels use by the bytes that are copied. It does not copy where the
# ratio is below this option. A cache that is copied in and out has about 0.5: its size is used
# once and copied twice. Weights are only copied in, and have 1. With at most 0.5 the cache of
# Gemma 3 1B was copied, from 0.6 on it was not (docs/log.md, 24 November 2026).
FOR_DECODING: OptionsByPlatform = {
    "tpu": {"xla_tpu_msa_inefficient_use_to_copy_ratio": "0.75"}
}

# Weights from which on an update on a CPU is made for little memory.
MANY_WEIGHTS = 2**26

# XLA for CPUs orders kernels so that many can run beside each other, which keeps more arrays at
# once. A toy's update takes 3 % longer with this order (docs/log.md, 28 November 2026).
LEAST_MEMORY: OptionsByPlatform = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
}


def for_updates(num_weights: int) -> OptionsByPlatform:
    """The options of an update of a model with so many weights, frozen ones among them."""
    return LEAST_MEMORY if num_weights >= MANY_WEIGHTS else {}


def options_of_mesh(options: OptionsByPlatform) -> dict[str, str | bool] | None:
    """The options of the current mesh's platform that its compiler knows, as jax.jit takes them, or
    None."""
    platform = current_platform()
    return _known_options(platform, tuple(options.get(platform, {}).items())) or None


@cache
def _known_options(
    platform: str,
    options: tuple[tuple[str, str | bool], ...],
) -> dict[str, str | bool]:
    """The options, if the compiler of the current mesh's devices knows them all; else {} and a
    warning."""
    if not options:
        return {}
    mesh = jax.sharding.get_mesh()
    # The default platform may be another than that of the mesh.
    place = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    # the smallest program there is: only its options are asked about
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)
    # No call lists the options of a compiler.
    try:
        jax.jit(jnp.negative, compiler_options=dict(options)).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        # another error is of this machine, and no matter of options
        if "No such compile option" not in str(error):
            raise
        names = ", ".join(name for name, _ in options)
        warnings.warn(
            f"the compiler for {platform} does not know {names}, so programs are compiled without "
            "it; they may move more bytes or take more memory. A newer version of the compiler may "
            "know it",
            stacklevel=2,
        )
        return {}
    return dict(options)
