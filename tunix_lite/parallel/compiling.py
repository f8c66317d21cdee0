"""Programs that are compiled before they run, so that their memory is known and compiling is not
taken for running."""

from collections.abc import Callable

import jax


def compiled_once(lower: Callable) -> Callable:
    """compiled(*args): what lower(*args) gives, compiled; once for arguments, or shapes, of one
    form and place."""
    ready = {}

    def compiled(*args):
        leaves, form = jax.tree.flatten(args)
        key = (form, *((x.shape, x.dtype, x.sharding) for x in leaves))
        if key not in ready:
            ready[key] = lower(*args).compile()
        return ready[key]

    return compiled
