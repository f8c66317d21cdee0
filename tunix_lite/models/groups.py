"""How tokens stand in rows for the products of experts: expert after expert, in blocks of one
expert each; the last block of an expert is filled up with rows that count zero. So no row is
dropped, and P pairs of a token and an expert take at most P + min(E, P) block rows.

The rows of a token are gathered and added in the order of its experts, so no sum depends on the
order of the tokens. Letters beside those of types.py: N tokens, k experts of a token, P = N k
pairs, E experts, R rows.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tunix_lite.models.rounding import at_least_float32, stored

# Rows of a block, at least and at most. Tensor cores multiply 16 at least.
FEWEST = 16
MOST = 128


@flax.struct.dataclass
class ExpertGroups:
    """Where the pairs of a token and an expert stand.

    Example: two tokens whose experts are [[1, 0], [1, 2]], in blocks of 2 rows: the rows are pairs
    1, none, 0, 2, 3, none, and two more blocks have none.
    """

    pair: jax.Array  # the pair of each row, [R]; P: none, a row that must count zero
    row: jax.Array  # the row of each pair, [N, k]; R: none, as the pair has no expert
    first: jax.Array  # the first block of each expert, [E]
    count: jax.Array  # blocks of each expert, [E]
    expert: jax.Array  # the expert of each block, [R / block]; of one without rows, the last
    block: int = flax.struct.field(pytree_node=False)  # rows of a block
    # whether tokamax multiplies them on GPUs
    tokamax: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def is_pair(self) -> jax.Array:
        """Whether a row has a pair, [R, 1]."""
        return self.pair[:, None] < self.row.size

    @property
    def token(self) -> jax.Array:
        """The token of each row, [R]; N: none."""
        return self.pair // self.row.shape[1]

    @property
    def expected_touched(self) -> float:
        """Experts that have rows, where all are equally likely: E (1 - (1 - k / E)^N)."""
        E = len(self.first)
        tokens, per_token = self.row.shape
        return E * (1 - (1 - per_token / E) ** tokens)

    @property
    def expected_blocks(self) -> float:
        """Blocks of an expert that has rows, where all are equally likely."""
        # Half of the last block is filled up on average.
        rows = self.row.size / self.expected_touched
        return max(1.0, rows / self.block + 0.5)

    @property
    def expected_rows(self) -> float:
        """Rows of all these blocks."""
        return self.expected_touched * self.expected_blocks * self.block

    def of_rows(self, bias_EC: jax.Array) -> jax.Array:
        """The bias of each row's expert, [R, C]."""
        is_expert = self.expert[:, None] == jnp.arange(len(bias_EC))
        # A product, as the gradient of a gather is a scatter, which adds in any order.
        highest = jax.lax.Precision.HIGHEST
        of_blocks = jnp.matmul(is_expert.astype(bias_EC.dtype), bias_EC, precision=highest)
        # Of other rows nothing may reach the gradient.
        return jnp.where(self.is_pair, jnp.repeat(of_blocks, self.block, axis=0), 0)


def block_of(pairs: int, experts: int) -> int:
    """Rows of a block: a power of two, such that a quarter of the rows at most fills up, unless
    there are few."""
    share = max(pairs // (4 * experts), 1)
    return min(max(1 << (share.bit_length() - 1), FEWEST), MOST)


def rows_needed(pairs: int, experts: int, block: int | None = None) -> int:
    """Rows that hold so many pairs, whatever their experts are. block: None: by `block_of`."""
    block = block_of(pairs, experts) if block is None else block
    return (pairs // block + min(experts, pairs)) * block


def group(ids_Nk: jax.Array, experts: int, block: int) -> ExpertGroups:
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
    blocks = rows_needed(pairs, experts, block) // block
    number = jnp.arange(blocks)[:, None]
    expert = jnp.minimum(jnp.sum(number >= first + count, axis=1), experts - 1)[:, None]
    place = (number - first[expert]) * block + jnp.arange(block)
    is_row = place < size[expert]
    pair = jnp.where(is_row, order[jnp.where(is_row, before[expert] + place, 0)], pairs)
    # A row of no pair is set nowhere.
    rows = jnp.arange(pair.size).reshape(pair.shape)
    row = jnp.full(pairs, pair.size).at[pair].set(rows, mode="drop")
    return ExpertGroups(
        pair=pair.reshape(-1),
        row=row.reshape(ids_Nk.shape),
        first=first,
        count=count,
        expert=expert[:, 0],
        block=block,
    )


# ---- between tokens and rows


@jax.custom_vjp
def to_rows(x: jax.Array, source_R: jax.Array, rows_Nk: jax.Array) -> jax.Array:
    """The rows x[source_R], [R, ...]; where the source is len(x), the last one once more. rows_Nk:
    the rows of each element of x, in which its gradient is added up; R: none."""
    return x.at[source_R].get(mode="clip")


@jax.custom_vjp
def from_rows(rows: jax.Array, source_R: jax.Array, rows_Nk: jax.Array) -> jax.Array:
    """The sum of the rows of each token, [N, ...], float32 at least, by the order of its
    experts."""
    total = jnp.zeros((len(rows_Nk), *rows.shape[1:]), at_least_float32(rows.dtype))
    for j in range(rows_Nk.shape[1]):
        # A gather: a scatter would add in any order.
        picked = rows.at[rows_Nk[:, j]].get(mode="clip")
        is_row = (rows_Nk[:, j] < len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
        total = total + jnp.where(is_row, picked, 0)
    return total


to_rows.defvjp(
    lambda x, *at: (to_rows(x, *at), (x[:0], *at)),
    lambda kept, g: (stored(from_rows(g, *kept[1:]), kept[0].dtype), None, None),
)
from_rows.defvjp(
    lambda rows, *at: (from_rows(rows, *at), (rows[:0], *at)),
    lambda kept, g: (stored(to_rows(g, *kept[1:]), kept[0].dtype), None, None),
)
