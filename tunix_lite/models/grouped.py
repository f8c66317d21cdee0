"""Products of rows with the weights of their experts. Rows stand expert after expert, in blocks of
one expert each; the last block of an expert is filled up with rows of zeros. So no row is dropped,
and P pairs of a token and an expert take at most P + min(E, P) block rows.

No sum here depends on the order of the tokens: each row is multiplied by itself, and the rows of a
token are gathered and added in the order of its experts. Letters beside those of types.py: N
tokens, k experts of a token, P = N k pairs, E experts, R rows, A inputs and C outputs of a weight.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tunix_lite.models.rounding import added, at_least_float32, product, stored, wide
from tunix_lite.models.weights import ComputeCopy, Leaf, Lora, dense

# Rows of a block, at least and at most.
FEWEST = 8
MOST = 128


@flax.struct.dataclass
class Groups:
    """Where the pairs of a token and an expert stand.

    Example: two tokens whose experts are [[1, 0], [1, 2]], in blocks of 2 rows: the rows are pairs
    1, none, 0, 2, 3, none, and two more blocks have none.
    """

    pair: jax.Array  # the pair of each row, [R]; P: none, a row of zeros
    row: jax.Array  # the row of each pair, [N, k]; R: none, as the pair has no expert
    first: jax.Array  # the first block of each expert, [E]
    count: jax.Array  # blocks of each expert, [E]
    expert: jax.Array  # the expert of each block, [R / block]; of one without rows, the last
    touched: jax.Array  # the experts that have rows, in order, and then the others, [E]
    num_touched: jax.Array
    block: int = flax.struct.field(pytree_node=False)  # rows of a block

    @property
    def token(self) -> jax.Array:
        """The token of each row, [R]; N: none."""
        return self.pair // self.row.shape[1]

    def of_rows(self, bias_EC: jax.Array) -> jax.Array:
        """The bias of each row's expert, [R, C]."""
        is_expert = self.expert[:, None] == jnp.arange(len(bias_EC))
        # A product, as the gradient of a gather is a scatter, which adds in any order.
        highest = jax.lax.Precision.HIGHEST
        of_blocks = jnp.matmul(is_expert.astype(bias_EC.dtype), bias_EC, precision=highest)
        return jnp.repeat(of_blocks, self.block, axis=0)


def block_of(pairs: int, experts: int) -> int:
    """Rows of a block: a power of two, such that a quarter of the rows at most fills up, unless
    there are few."""
    share = max(pairs // (4 * experts), 1)
    return min(max(1 << (share.bit_length() - 1), FEWEST), MOST)


def group(ids_Nk: jax.Array, experts: int, block: int) -> Groups:
    """Groups the pairs by expert. An id of `experts` is no expert."""
    ids = ids_Nk.reshape(-1)
    pairs = ids.size
    # Stable: the pairs of an expert keep their order.
    order = jnp.argsort(ids, stable=True)
    size = jnp.sum(ids[:, None] == jnp.arange(experts), axis=0)
    before = jnp.cumsum(size) - size
    count = -(-size // block)
    first = jnp.cumsum(count) - count

    # The pair of each row, by the expert of its block and its place among that expert's rows.
    blocks = pairs // block + min(experts, pairs)
    number = jnp.arange(blocks)[:, None]
    expert = jnp.minimum(jnp.sum(number >= first + count, axis=1), experts - 1)[:, None]
    place = (number - first[expert]) * block + jnp.arange(block)
    is_row = place < size[expert]
    pair = order[jnp.where(is_row, before[expert] + place, 0)]
    # The row of each pair, by its place in the order.
    of_expert = jnp.minimum(ids[order], experts - 1)
    row = (first * block - before)[of_expert] + jnp.arange(pairs)
    row = jnp.where(ids[order] < experts, row, blocks * block)
    return Groups(
        pair=jnp.where(is_row, pair, pairs).reshape(-1),
        row=jnp.zeros_like(row).at[order].set(row, unique_indices=True).reshape(ids_Nk.shape),
        first=first,
        count=count,
        expert=expert[:, 0],
        touched=jnp.argsort(size == 0, stable=True),
        num_touched=jnp.sum(size > 0),
        block=block,
    )


# ---- between tokens and rows


@jax.custom_vjp
def to_rows(x: jax.Array, source_R: jax.Array, rows_Nk: jax.Array) -> jax.Array:
    """The rows x[source_R], [R, ...], zeros where the source is beyond x. rows_Nk: the rows of each
    element of x, in which its gradient is added up; R: none."""
    return _taken(x, source_R)


@jax.custom_vjp
def from_rows(rows: jax.Array, source_R: jax.Array, rows_Nk: jax.Array) -> jax.Array:
    """The sum of the rows of each token, [N, ...], float32 at least, by the order of its
    experts."""
    # A gather: a scatter would add in any order.
    picked = _taken(rows, rows_Nk).astype(at_least_float32(rows.dtype))
    total = picked[:, 0]
    for j in range(1, rows_Nk.shape[1]):
        total = total + picked[:, j]
    return total


def _taken(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


to_rows.defvjp(
    lambda x, source_R, rows_Nk: (_taken(x, source_R), (x[:0], source_R, rows_Nk)),
    lambda kept, g: (stored(from_rows(g, *kept[1:]), kept[0].dtype), None, None),
)
from_rows.defvjp(
    lambda rows, *at: (from_rows(rows, *at), (rows[:0], *at)),
    lambda kept, g: (stored(to_rows(g, *kept[1:]), kept[0].dtype), None, None),
)


# ---- products


def grouped_product(rows_RA: jax.Array, weight: Leaf, groups: Groups) -> jax.Array:
    """The rows times the weights [E, A, C] of their experts, [R, C], in the dtype of the rows. Rows
    of zeros stay zeros. Of weights only a `ComputeCopy` gets a gradient."""
    if isinstance(weight, Lora):
        # Two thin products, as in weights.project.
        thin_RK = grouped_product(rows_RA, weight.a, groups)
        adapted_RC = weight.scale * wide(grouped_product(thin_RK, weight.b, groups))
        base_RC = grouped_product(rows_RA, weight.base, groups)
        return added(base_RC, stored(adapted_RC, base_RC.dtype))
    if isinstance(weight, ComputeCopy):
        out_RC = _multiply(rows_RA, weight.value, groups)
        return _with_gradient_to_master(out_RC, rows_RA, weight.master, groups)
    return _multiply(rows_RA, weight, groups)


@jax.custom_vjp
def _multiply(rows_RA: jax.Array, weight: Leaf, groups: Groups) -> jax.Array:
    return _by_expert(rows_RA, weight, groups, is_transposed=False)


# The gradient of the rows is the same product, with each matrix transposed.
_multiply.defvjp(
    lambda rows, weight, groups: (_multiply(rows, weight, groups), (weight, groups)),
    lambda kept, g: (_by_expert(g, *kept, is_transposed=True), None, None),
)


def _by_expert(
    rows_RA: jax.Array, weight: Leaf, groups: Groups, is_transposed: bool
) -> jax.Array:
    """The product, one expert after the other; experts without rows are not read."""
    block = groups.block

    def matrix_of(expert: jax.Array) -> jax.Array:
        matrix = dense(jax.tree.map(lambda x: x[expert], weight), 1, rows_RA.dtype)
        return matrix.T if is_transposed else matrix

    def of_expert(i: jax.Array, out_RC: jax.Array) -> jax.Array:
        expert = groups.touched[i]
        matrix = matrix_of(expert)

        def of_block(j: jax.Array, out_RC: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(rows_RA, j * block, block)
            out = product(jnp.matmul, rows, matrix)
            return jax.lax.dynamic_update_slice_in_dim(out_RC, out, j * block, 0)

        first = groups.first[expert]
        return jax.lax.fori_loop(first, first + groups.count[expert], of_block, out_RC)

    outputs = jax.eval_shape(matrix_of, groups.num_touched).shape[1]
    start = jnp.zeros((len(rows_RA), outputs), rows_RA.dtype)
    return jax.lax.fori_loop(0, groups.num_touched, of_expert, start)


@jax.custom_vjp
def _with_gradient_to_master(
    out_RC: jax.Array, rows_RA: jax.Array, master: jax.Array, groups: Groups
) -> jax.Array:
    """`out_RC`, the product of the rows and a weight. Its gradient goes to `master`, in its dtype,
    as weights.project has it; a master divided over fsdp gets its part of the sum."""
    return out_RC


def _backward_to_master(kept: tuple, g_RC: jax.Array) -> tuple:
    rows_RA, master, groups = kept
    block = groups.block
    whole = (len(master), rows_RA.shape[1], g_RC.shape[1])
    dtype = at_least_float32(master.dtype)

    def of_expert(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = groups.touched[i]

        # Block after block, so that the order of the sum is that of the rows.
        def of_block(j: jax.Array, total: jax.Array) -> jax.Array:
            rows, g = (
                jax.lax.dynamic_slice_in_dim(x, j * block, block) for x in (rows_RA, g_RC)
            )
            contract = (((0,), (0,)), ((), ()))
            part = jax.lax.dot_general(rows, g, contract, preferred_element_type=dtype)
            return total + part

        first = groups.first[expert]
        total = jnp.zeros(whole[1:], dtype)
        total = jax.lax.fori_loop(first, first + groups.count[expert], of_block, total)
        return jax.lax.dynamic_update_index_in_dim(out, total, expert, 0)

    start = jnp.zeros(whole, dtype)
    gradient = jax.lax.fori_loop(0, groups.num_touched, of_expert, start)
    gradient = stored(gradient, master.dtype)
    for dim, size in enumerate(whole):
        if master.shape[dim] != size:
            gradient = jax.lax.psum_scatter(
                gradient, "fsdp", scatter_dimension=dim, tiled=True
            )
    return g_RC, None, gradient, None


_with_gradient_to_master.defvjp(lambda out, *rest: (out, rest), _backward_to_master)
