"""Programs that are compiled before they run, so that their memory is known and the time of
compiling does not count as time of running."""

from collections.abc import Callable
from typing import Any

import jax


def compiled_once(lower: Callable[..., jax.stages.Lowered]) -> Callable[..., jax.stages.Compiled]:
    """compiled(*args) -> the executable of lower(*args).

    It compiles once for arguments (arrays or ShapeDtypeStructs) of one structure with the same
    shapes, dtypes and shardings.
    """
    executables = {}

    def compiled(*args: Any) -> jax.stages.Compiled:
        leaves, structure = jax.tree.flatten(args)
        key = (structure, *((x.shape, x.dtype, x.sharding) for x in leaves))
        if key not in executables:
            executables[key] = lower(*args).compile()
        return executables[key]

    return compiled
