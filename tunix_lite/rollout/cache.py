"""What slots keep of their sequences, by layer: a `KV`, head-major, or the state of a recurrent
layer. The token at position p is in column p mod C: C is the whole length in a global layer, the
window in a local one. Letters beside those of types.py: C columns of the cache, M prompts read
together."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.decoder import kind_of_layer
from tunix_lite.parallel.mesh import axis_size, constrain

# Logical axes of keys and values; scales have the first three.
AXES = ("batch", "kv_heads", "seq", "head_dim")
# The least columns of a cache that grows: a shorter one is not worth a program of its own.
MIN_COLUMNS = 256


@flax.struct.dataclass
class KV:
    """The keys and values of one layer; with scales, int8 codes of them.
    Example: 4 slots, 2 key heads of size 8 and 256 columns: k and v are [4, 2, 256, 8]."""

    # [B, K, C, H]
    k: jax.Array
    v: jax.Array
    # [B, K, C] float32, one for each head of each token; None where k and v are no codes
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None

    @property
    def columns(self) -> int:
        """C, the tokens that it holds of a sequence."""
        return self.k.shape[2]

    def resized(self, columns: int) -> "KV":
        """Gives the cache so many columns; no sequence may have wrapped around it."""
        more = max(0, columns - self.columns)
        padding = [(0, 0), (0, 0), (0, more), (0, 0)]

        def resize(x: jax.Array) -> jax.Array:
            # Scales have no last dim.
            left = x[:, :, :columns]
            return _constrain_kv(jnp.pad(left, padding[: x.ndim]))

        return jax.tree.map(resize, self)

    def with_token(self, new: "KV", positions_B: jax.Array) -> "KV":
        """The cache with one new token per row. new: as `to_cache_format` makes it, with T = 1."""
        rows_B = jnp.arange(len(positions_B))
        columns_B = positions_B % self.columns

        def put(old: jax.Array, x: jax.Array) -> jax.Array:
            # A slice update under vmap would be a loop of its own for each layer on a TPU.
            here = old.at[rows_B, :, columns_B]
            token = x[:, :, 0]
            # One index a row, inside the cache: XLA need neither clip it nor look for collisions.
            return _constrain_kv(
                here.set(token, unique_indices=True, mode="promise_in_bounds")
            )

        return jax.tree.map(put, self, new)

    def with_tokens(
        self, new: "KV", rows_R: jax.Array, lengths_R: jax.Array, counts_R: jax.Array
    ) -> "KV":
        """The cache with the new tokens of rows_R, [R, K, W, ...]. A ring keeps the last ones."""
        B = len(self.k)
        C = self.columns
        place_W = jnp.arange(new.k.shape[2])
        count_R1 = counts_R[:, None]
        is_kept_RW = (place_W < count_R1) & (place_W >= count_R1 - C) & (rows_R < B)[:, None]
        columns_RW = (lengths_R[:, None] + place_W) % C
        # What is not kept goes to a column that does not exist, so each with an index of its own.
        target_RW = jnp.where(is_kept_RW, columns_RW, C + place_W)

        def put(old: jax.Array, x: jax.Array) -> jax.Array:
            here = old.at[rows_R[:, None], :, target_RW]
            return _constrain_kv(here.set(x.swapaxes(1, 2), mode="drop"))

        return jax.tree.map(put, self, new)

    def as_ring(self, lengths_B: jax.Array, columns: int) -> "KV":
        """Right-padded prompts in at most `columns` columns: a ring keeps the last tokens."""
        if self.columns <= columns:
            return self
        # Columns that hold no token yet may hold anything: nothing attends to them.
        index_BC = jnp.maximum(positions_held(lengths_B - 1, columns), 0)

        def put(x: jax.Array) -> jax.Array:
            return jax.vmap(lambda row, index_C: jnp.take(row, index_C, axis=1))(x, index_BC)

        return jax.tree.map(put, self)


def _head_copies(num_kv_heads: int, tp: int) -> int:
    """Copies of each key/value head in the cache: every shard of tp holds one of its own."""
    if tp > num_kv_heads and tp % num_kv_heads == 0:
        return tp // num_kv_heads
    # Else tp divides the heads, or each shard holds all of them (mesh.MAY_STAY_WHOLE).
    return 1


def num_columns(cfg: Architecture, kind: str, length: int, spare: int = 0) -> int:
    """C for sequences of up to `length` tokens in a layer of this kind. spare: so many of the last
    tokens can be taken back, as they have overwritten none of the window before them."""
    return min(cfg.window + spare, length) if kind == "local" else length


def cache_shapes(
    cfg: Architecture,
    rows: int,
    length: int,
    dtype: DTypeLike,
    int8: bool,
    tp: int,
    spare: int = 0,
) -> list[Any]:
    """The shapes of a cache of `rows` sequences of up to `length` tokens: a `KV` or a state for
    each layer; None for one that reads the keys and values of another layer."""
    cache = []
    for layer, kind in enumerate(cfg.kinds):
        if layer in cfg.sources:
            cache.append(None)
            continue
        state_shapes = kind_of_layer(kind).state_shapes
        if state_shapes is not None:
            cache.append(state_shapes(cfg, rows, dtype))
            continue
        columns = num_columns(cfg, kind, length, spare)
        heads, head_dim = cfg.kv_shape(kind)
        shape = (rows, heads * _head_copies(heads, tp), columns)
        stored_dtype = jnp.int8 if int8 else dtype
        values = jax.ShapeDtypeStruct((*shape, head_dim), stored_dtype)
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
    spare: int = 0,
) -> list[Any]:
    """A cache of `rows` sequences, all zeros. rows_axis: the logical axis of its rows, batch or
    prompts."""
    shapes = cache_shapes(cfg, rows, length, dtype, int8, axis_size("tp"), spare)

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        return _constrain_kv(jnp.zeros(x.shape, x.dtype), rows_axis)

    return jax.tree.map(zeros, shapes)


def columns_of(layer: Any) -> int | None:
    """Columns of the cache of a layer; None: it keeps a state, which has none, or nothing."""
    return layer.columns if isinstance(layer, KV) else None


def column_sizes(length: int, longest_prompt: int) -> list[int]:
    """The columns that a cache for sequences of up to `length` tokens may have, the most first,
    three sizes at most: column_sizes(9216, 1024) is [9216, 4096, 1024], and column_sizes(320, 256)
    is [320, 200]."""
    # Three at most, as programs are compiled for each.
    powers = []
    while 4 * (MIN_COLUMNS << len(powers)) <= 3 * length:
        powers.append(MIN_COLUMNS << len(powers))
    shorter = [size for size in (*powers[-1:], *powers[-3:-1][:1]) if size >= longest_prompt]
    # Most prompts are far shorter than the longest: of four of GSM8K's, 94 % are within 5/8 of 256
    # tokens. A CPU reads 320 columns in one thread, which is a third of a step of 32 slots.
    narrow = -(-5 * length // 64) * 8
    if not shorter and 2 * narrow >= MIN_COLUMNS:
        shorter = [narrow]
    return [length, *shorter]


def _constrain_kv(x: jax.Array, rows_axis: str = "batch") -> jax.Array:
    """An array of a KV with its sharding constraint."""
    return constrain(x, *logical_axes(x, rows_axis))


def logical_axes(x: jax.Array | jax.ShapeDtypeStruct, rows_axis: str) -> tuple[str, ...]:
    """The logical axes of an array of a KV, its keys, values or scales."""
    return (rows_axis, *AXES[1:])[: x.ndim]


def to_cache_format(
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    int8: bool,
) -> KV:
    """New keys and values in the layout of the cache, [B, K, T, H], as int8 codes if asked."""
    copies = _head_copies(k_BTKH.shape[2], axis_size("tp"))
    k_BKTH, v_BKTH = (jnp.repeat(x, copies, axis=2).swapaxes(1, 2) for x in (k_BTKH, v_BTKH))
    return quantize_kv(k_BKTH, v_BKTH) if int8 else KV(k_BKTH, v_BKTH)


def quantize_kv(k_BKTH: jax.Array, v_BKTH: jax.Array) -> KV:
    """int8 codes of keys and values: x is about code * scale, at most half a scale off."""
    k_scales, v_scales = (
        jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32) / 127 for x in (k_BKTH, v_BKTH)
    )

    def codes(x_BKTH: jax.Array, scales_BKT: jax.Array) -> jax.Array:
        values = x_BKTH.astype(jnp.float32)
        # A head of zeros has scale 0, by which nothing can be divided.
        least = jnp.maximum(scales_BKT, 1e-30)
        return jnp.round(values / least[..., None]).astype(jnp.int8)

    return KV(codes(k_BKTH, k_scales), codes(v_BKTH, v_scales), k_scales, v_scales)


def positions_held(newest_B: jax.Array, columns: int) -> jax.Array:
    """The position that each column holds, [B, C], when the newest token has position newest_B.
    Negative: none."""
    # Of the positions p with p mod C = c, column c holds the newest.
    return newest_B[:, None] - (newest_B[:, None] - jnp.arange(columns)) % columns


def attended_columns(
    cfg: Architecture,
    kind: str,
    newest_B: jax.Array,
    columns: int,
) -> jax.Array:
    """The columns that the newest token of each row attends to, [B, C] bool, in a layer of this
    kind."""
    held_BC = positions_held(newest_B, columns)
    is_held_BC = held_BC >= 0
    if kind == "local":
        # A ring with spare columns holds more than the window.
        return is_held_BC & (newest_B[:, None] - held_BC < cfg.window)
    return is_held_BC


def store_rows(prompts: Any, new: Any, first_row: jax.Array) -> Any:
    """The prompt cache of a layer with the rows of `new` from `first_row` on."""

    def put(all_rows: jax.Array, rows: jax.Array) -> jax.Array:
        start = (first_row, *[0] * (rows.ndim - 1))
        rows = _constrain_kv(rows, "prompts")
        updated = jax.lax.dynamic_update_slice(all_rows, rows, start)
        return _constrain_kv(updated, "prompts")

    return jax.tree.map(put, prompts, new)


def load_rows(kv: Any, prompts: Any, rows_B: jax.Array, is_new_B: jax.Array) -> Any:
    """The cache of a layer whose new rows begin as rows rows_B of the prompt cache do."""

    def put(all_columns: jax.Array, beginnings: jax.Array) -> jax.Array:
        # Only the columns that prompts can have are written; no prompt exceeds the cache.
        beginnings = beginnings[:, :, : all_columns.shape[2]]
        width = beginnings.shape[2]
        is_new = is_new_B.reshape(-1, *[1] * (beginnings.ndim - 1))
        new = jnp.take(beginnings, rows_B, axis=0)
        merged = jnp.where(is_new, new, all_columns[:, :, :width])
        updated = jax.lax.dynamic_update_slice_in_dim(all_columns, merged, 0, axis=2)
        return _constrain_kv(updated)

    return jax.tree.map(put, kv, prompts)
