"""The products of models/grouped.py by tokamax's kernels for Hopper GPUs
(github.com/openxla/tokamax), in bfloat16: the products of models/grouped_kernels.py, in an order of
sums that tokamax chooses. Letters as there."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.models.groups import ExpertGroups

_OF_ROWS = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
_OF_WEIGHT = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


def multiply(
    rows_RA: jax.Array, weight: jax.Array, groups: ExpertGroups, is_transposed: bool = False
) -> jax.Array:
    """The rows times the weights [E, A, C] of their experts, or times [E, C, A] transposed, [R, C].
    Raises ValueError for what tokamax cannot multiply."""
    matrices = weight.mT if is_transposed else weight
    return _ragged_dot(rows_RA, matrices, groups, _OF_ROWS, rows_RA.dtype)


def weight_gradient(
    rows_RA: jax.Array, g_RC: jax.Array, groups: ExpertGroups, dtype: DTypeLike
) -> jax.Array:
    """The gradient of the weights, [E, A, C] in `dtype`. Raises ValueError as `multiply`."""
    return _ragged_dot(rows_RA, g_RC, groups, _OF_WEIGHT, dtype)


def _ragged_dot(
    left: jax.Array,
    right: jax.Array,
    groups: ExpertGroups,
    dims: jax.lax.RaggedDotDimensionNumbers,
    dtype: DTypeLike,
) -> jax.Array:
    import tokamax
    from absl import flags

    # Else tokamax would look for its flags in the command line, and refuse what it does not know.
    flags.FLAGS.mark_as_parsed()
    # The last expert takes all rows that are left: of others tokamax would leave anything.
    sizes = (
        (groups.count * groups.block)
        .at[-1]
        .add(len(left) - jnp.sum(groups.count) * groups.block)
    )
    try:
        return tokamax.ragged_dot_general(
            left,
            right,
            sizes.astype(jnp.int32),
            dims,
            preferred_element_type=dtype,
            implementation="mosaic",
        )
    except NotImplementedError as error:
        shapes = f"{left.dtype} {list(left.shape)} with {list(right.shape)}"
        raise ValueError(
            f"training.expert_kernels=tokamax cannot multiply {shapes} ({error}); it takes "
            "bfloat16 and multiples of 64 on Hopper GPUs; set training.expert_kernels=auto"
        ) from error
