"""Keys and values already computed: one `KV` per layer, head-major, the token at position p in
column p mod C.

C is the whole length where a layer sees everything and the window where it slides: a ring, in which
a token takes the place of the one that has just left the window. Where a token stands depends on
its sequence alone, so neither the slot nor the time at which a sequence is decoded can change what
it sees. Head-major, and one array per layer, because that is the layout that decoding updates in
place on a GPU.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.models.decoder import Architecture
from tunix_lite.parallel.mesh import axis_size, constrain

AXES = ("batch", "kv_heads", "seq", "head_dim")
# of a cache that grows; what a shorter one would save is not worth a program of its own
FEWEST_COLUMNS = 256


@flax.struct.dataclass
class KV:
    """The keys and values of one layer; with scales, int8 codes of them, one scale for a head of a
    token."""

    k: jax.Array  # [B, K, C, H]
    v: jax.Array  # [B, K, C, H]
    k_scales: jax.Array | None = None  # [B, K, C] float32
    v_scales: jax.Array | None = None  # [B, K, C] float32


def head_copies(cfg: Architecture, tp: int) -> int:
    """How often each key/value head is kept: where there are fewer of them than tp, every shard of
    tp has its own."""
    return tp // cfg.num_kv_heads if tp % cfg.num_kv_heads == 0 and tp > cfg.num_kv_heads else 1


def num_columns(cfg: Architecture, kind: str, length: int) -> int:
    """C for sequences of up to `length` tokens in a layer of this kind."""
    return min(cfg.window, length) if kind == "local" else length


def cache_shapes(
    cfg: Architecture, rows: int, length: int, dtype: DTypeLike, int8: bool, tp: int
) -> list[KV]:
    """The shapes of a cache of `rows` sequences of up to `length` tokens, by arithmetic."""
    heads = cfg.num_kv_heads * head_copies(cfg, tp)
    cache = []
    for kind in cfg.kinds:
        shape = (rows, heads, num_columns(cfg, kind, length))
        values = jax.ShapeDtypeStruct((*shape, cfg.head_dim), jnp.int8 if int8 else dtype)
        scales = jax.ShapeDtypeStruct(shape, jnp.float32) if int8 else None
        cache.append(KV(values, values, scales, scales))
    return cache


def empty_cache(
    cfg: Architecture,
    rows: int,
    length: int,
    dtype: DTypeLike,
    int8: bool,
    rows_axis: str = "batch",
) -> list[KV]:
    """A cache of `rows` sequences of up to `length` tokens; `rows_axis` is the logical axis of its
    rows."""
    shapes = cache_shapes(cfg, rows, length, dtype, int8, axis_size("tp"))
    return jax.tree.map(lambda x: constrain_kv(jnp.zeros(x.shape, x.dtype), rows_axis), shapes)


def columns_in_use(tokens: int, length: int) -> int:
    """Columns for sequences that have up to `tokens` tokens, and up to `length` in the end.

    Powers of two, so that a rollout compiles few programs; all of them where that would save less
    than a quarter.
    """
    columns = max(FEWEST_COLUMNS, 1 << (tokens - 1).bit_length())
    return columns if 4 * columns <= 3 * length else length


def resize_columns(kv: KV, columns: int) -> KV:
    """The cache with so many columns: those of its end are new, or left out. No sequence may have
    wrapped around it."""
    more = max(0, columns - kv.k.shape[2])

    def resize(x):
        return constrain_kv(
            jnp.pad(x[:, :, :columns], [(0, 0), (0, 0), (0, more), (0, 0)][: x.ndim])
        )

    return jax.tree.map(resize, kv)


def constrain_kv(x: jax.Array, rows_axis: str = "batch") -> jax.Array:
    """An array of a KV, told how it lies on the mesh."""
    return constrain(x, *logical_axes(x, rows_axis))


def logical_axes(x: jax.Array | jax.ShapeDtypeStruct, rows_axis: str = "batch") -> tuple[str, ...]:
    """The logical axes of an array of a KV, its keys, values or scales."""
    return (rows_axis, *AXES[1:])[: x.ndim]


def to_cache_format(cfg: Architecture, k_BTKH, v_BTKH, int8: bool) -> KV:
    """New keys and values in the form that the cache has them in."""
    copies = head_copies(cfg, axis_size("tp"))
    k, v = (jnp.repeat(x, copies, axis=2).swapaxes(1, 2) for x in (k_BTKH, v_BTKH))
    return KV(*quantize_kv(k, v)) if int8 else KV(k, v)


def quantize_kv(k_BKTH, v_BKTH):
    """int8 codes of both, then their scales: x is about code * scale, at most half a scale off."""
    scales = [jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32) / 127 for x in (k_BKTH, v_BKTH)]
    codes = [
        jnp.round(x.astype(jnp.float32) / jnp.maximum(scale, 1e-30)[..., None]).astype(jnp.int8)
        for x, scale in zip((k_BKTH, v_BKTH), scales)
    ]
    return *codes, *scales


def write_token(kv: KV, new: KV, positions_B) -> KV:
    """The cache with one new token per row, in place where the cache is donated."""
    rows_B, columns_B = jnp.arange(len(positions_B)), positions_B % kv.k.shape[2]

    def put(rows, x):
        return constrain_kv(
            rows.at[rows_B, :, columns_B].set(
                x[:, :, 0], unique_indices=True, mode="promise_in_bounds"
            )
        )

    return jax.tree.map(put, kv, new)


def as_ring(kv: KV, lengths_B, columns: int) -> KV:
    """Whole prompts, right-padded, as a cache of at most `columns` columns keeps them."""
    if kv.k.shape[2] <= columns:
        return kv
    index_BC = jnp.maximum(positions_held(lengths_B - 1, columns), 0)
    take = jax.vmap(lambda row, index_C: jnp.take(row, index_C, axis=1))
    return jax.tree.map(lambda x: take(x, index_BC), kv)


def positions_held(newest_B, columns: int):
    """Which position each column holds, [B, C], when the newest is newest_B; negative: none of this
    sequence."""
    return newest_B[:, None] - (newest_B[:, None] - jnp.arange(columns)) % columns


def in_position_order(kv: KV, mask_B1C, newest_B) -> tuple[KV, jax.Array]:
    """The columns of a ring, and which are seen, from the oldest position to the newest: the order
    of a sum."""
    columns = kv.k.shape[2]
    index_BC = (newest_B[:, None] + 1 + jnp.arange(columns)) % columns
    take = jax.vmap(lambda row, index_C: jnp.take(row, index_C, axis=1))
    return jax.tree.map(lambda x: take(x, index_BC), kv), jnp.take_along_axis(
        mask_B1C, index_BC[:, None], axis=2
    )


def attended_columns(cfg: Architecture, kind: str, newest_B, columns: int):
    """Which columns the newest token of each row sees, [B, C]."""
    held_BC = positions_held(newest_B, columns)
    is_there_BC = held_BC >= 0
    return (
        is_there_BC & (newest_B[:, None] - held_BC < cfg.window) if kind == "local" else is_there_BC
    )


def store_rows(kept: KV, kv: KV, first_row, rows_axis: str) -> KV:
    """`kept` with the rows of `kv` from `first_row` on; columns that kv has not stay as they
    are."""

    def put(all_rows, rows):
        start = (first_row, *[0] * (rows.ndim - 1))
        return constrain_kv(
            jax.lax.dynamic_update_slice(all_rows, constrain_kv(rows, rows_axis), start), rows_axis
        )

    return jax.tree.map(put, kept, kv)


def load_rows(kv: KV, kept: KV, rows_B, is_new_B) -> KV:
    """The cache with, in each row that is new, the beginning that stands in row rows_B of
    `kept`."""

    def put(all_columns, beginnings):
        width = beginnings.shape[2]
        is_new = is_new_B.reshape(-1, *[1] * (beginnings.ndim - 1))
        merged = jnp.where(is_new, jnp.take(beginnings, rows_B, axis=0), all_columns[:, :, :width])
        return constrain_kv(jax.lax.dynamic_update_slice_in_dim(all_columns, merged, 0, axis=2))

    return jax.tree.map(put, kv, kept)


def tree_bytes(cache) -> int:
    """Bytes of a cache, or of the shapes of one, over all devices."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
