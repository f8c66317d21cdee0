"""The products of models/grouped.py as kernels for NVIDIA GPUs (Pallas, which hands them to
Triton). A program multiplies a block of rows with some columns of its expert's weight, or adds up a
tile of one expert's gradient, block after block: the order of every sum is fixed. The programs of a
block without rows read nothing. Or tokamax (github.com/openxla/tokamax), which has kernels for
Hopper GPUs, multiplies. Letters as there; W columns of a program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from tunix_lite.models.groups import ExpertGroups
from tunix_lite.models.weights import Int8, Leaf

_OF_ROWS = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
_OF_WEIGHT = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
# Columns of a program, and rows of a tile of a gradient, at most.
COLUMNS = 64
# Numbers that are summed over at once; tensor cores take 16 at least.
AT_ONCE = 64
_PARAMS = triton.CompilerParams(num_warps=4, num_stages=3)


def multiply(
    rows_RA: jax.Array,
    weight: Leaf,
    groups: ExpertGroups,
    is_transposed: bool = False,
) -> jax.Array:
    """The rows times the weights [E, A, C] of their experts, or times [E, C, A] transposed, [R, C].
    weight: an array, or `Int8`, which is dequantised in the kernel; of tokamax an array. A is a
    multiple of 16. Raises NotImplementedError for what tokamax cannot multiply."""
    if groups.tokamax:
        matrices = weight.mT if is_transposed else weight
        return _by_tokamax(rows_RA, matrices, groups, _OF_ROWS, rows_RA.dtype)
    arrays = (weight.codes, weight.scales) if isinstance(weight, Int8) else (weight,)
    columns = arrays[0].shape[1 if is_transposed else 2]
    out = jax.ShapeDtypeStruct((len(rows_RA), columns), rows_RA.dtype)
    grid = (len(groups.expert), pl.cdiv(columns, COLUMNS))
    kernel = partial(_multiply, groups.block, is_transposed)
    # Each program sees the whole arrays.
    call = pl.pallas_call(
        kernel, grid=grid, out_shape=out, compiler_params=_PARAMS, name="grouped_product"
    )
    return call(rows_RA, groups.expert, groups.first, groups.count, *arrays)


def weight_gradient(
    rows_RA: jax.Array,
    g_RC: jax.Array,
    groups: ExpertGroups,
    dtype: DTypeLike,
) -> jax.Array:
    """The gradient of the weights, [E, A, C] in `dtype`: of each expert its rows, transposed, times
    the cotangents `g_RC` of their products."""
    if groups.tokamax:
        return _by_tokamax(rows_RA, g_RC, groups, _OF_WEIGHT, dtype)
    shape = (len(groups.first), rows_RA.shape[1], g_RC.shape[1])
    grid = (shape[0], pl.cdiv(shape[1], COLUMNS), pl.cdiv(shape[2], COLUMNS))
    out = jax.ShapeDtypeStruct(shape, dtype)
    kernel = partial(_add_up, groups.block)
    call = pl.pallas_call(
        kernel, grid=grid, out_shape=out, compiler_params=_PARAMS, name="grouped_gradient"
    )
    return call(rows_RA, g_RC, groups.first, groups.count)


def _by_tokamax(
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
    sizes = groups.count * groups.block
    sizes = sizes.at[-1].add(len(left) - jnp.sum(sizes))
    return tokamax.ragged_dot_general(
        left, right, sizes, dims, preferred_element_type=dtype, implementation="mosaic"
    )


def _places(piece: jax.Array, size: int) -> jax.Array:
    """The columns of a piece; those beyond the last one are the last one again."""
    at = piece * COLUMNS + jnp.arange(COLUMNS)
    return jnp.minimum(at, size - 1) if size % COLUMNS else at


def _exact(dtype: DTypeLike) -> jax.lax.Precision | None:
    # As in decode_attention: tf32 is too coarse.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _multiply(block: int, is_transposed: bool, rows_RA: jax.Array, *refs: jax.Array) -> None:
    """One block of rows and some columns."""
    expert, first, count, *weight, out_RC = refs
    number = pl.program_id(0)
    at_R = number * block + jnp.arange(block)
    at_W = _places(pl.program_id(1), out_RC.shape[1])
    dtype = rows_RA.dtype
    # A divisor, so that no turn reads beyond the sum.
    at_once = int(np.gcd(rows_RA.shape[1], AT_ONCE))

    def piece_of(e: jax.Array, at: jax.Array) -> jax.Array:
        """The weights of these inputs and columns, as they lie."""
        inputs, outputs = (at_W, at) if is_transposed else (at, at_W)
        values = weight[0][e, inputs[:, None], outputs[None]]
        if len(weight) == 1:
            return values
        # inputs of a scale
        share = weight[0].shape[1] // weight[1].shape[1]
        scales = weight[1][e, inputs[:, None] // share, outputs[None]]
        return (values.astype(jnp.float32) * scales).astype(dtype)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        at = i * at_once + jnp.arange(at_once)
        rows = rows_RA[at_R[:, None], at[None]]
        piece = piece_of(expert[number], at)
        return total + triton.dot(rows, piece, trans_b=is_transposed, precision=_exact(dtype))

    # A block without an expert, behind the blocks of the last one, turns no loop.
    last = len(first) - 1
    is_used = number < first[last] + count[last]
    turns = is_used.astype(jnp.int32) * (rows_RA.shape[1] // at_once)
    total = jax.lax.fori_loop(0, turns, add, jnp.zeros((block, COLUMNS), jnp.float32))
    out_RC[at_R[:, None], at_W[None]] = total.astype(dtype)


def _add_up(
    block: int,
    rows_RA: jax.Array,
    g_RC: jax.Array,
    first: jax.Array,
    count: jax.Array,
    out_EAC: jax.Array,
) -> None:
    """A tile of one expert's gradient."""
    expert = pl.program_id(0)
    at_A = _places(pl.program_id(1), rows_RA.shape[1])
    at_C = _places(pl.program_id(2), g_RC.shape[1])

    def add(j: jax.Array, total: jax.Array) -> jax.Array:
        at_R = (j * block + jnp.arange(block))[:, None]
        rows = rows_RA[at_R, at_A[None]]
        g = g_RC[at_R, at_C[None]]
        return total + triton.dot(rows, g, trans_a=True, precision=_exact(rows.dtype))

    start = first[expert]
    total = jnp.zeros((COLUMNS, COLUMNS), jnp.float32)
    total = jax.lax.fori_loop(start, start + count[expert], add, total)
    out_EAC[expert, at_A[:, None], at_C[None]] = total.astype(out_EAC.dtype)
