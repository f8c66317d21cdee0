"""Takes back the tokens that slots drew behind a stop text.

The host looks for stop texts once a chunk of decoding is over, and by then slots may have read more
tokens. In a single turn nobody needs the slot any more. A conversation goes on from there, so its
slot must be as if it had never read them:

save         before a chunk: what the chunk may overwrite
rewind       after it: slots in which a stop text ended a turn hold the kept tokens alone

A cache of whole lengths loses nothing, as columns behind the newest token are not attended to. A
ring (a local layer) loses its oldest columns to new tokens, so these are saved. T is the chunk.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.cache import KV
from tunix_lite.rollout.programs import SamplerSpec, Slots, at_home


@flax.struct.dataclass
class Saved:
    """Slot state to restore when a stop text ends inside the chunk.

    Example: save(spec, slots), before `decode` takes the slots.
    """

    # [B, K, T, ...] of each local layer; None for a global one
    columns: list[KV | None]
    # [B] as of Slots
    lengths: jax.Array
    num_drawn: jax.Array
    # [B, V]; None without a repetition penalty
    seen: jax.Array | None


def longest_chunk(spec: SamplerSpec) -> int:
    """Tokens of a chunk, at most, that can be taken back: no more than a ring has columns."""
    kinds = set(spec.cfg.kinds)
    columns = (kv_cache.num_columns(spec.cfg, kind, spec.max_length) for kind in kinds)
    return min(spec.chunk, *columns)


def save(spec: SamplerSpec, slots: Slots) -> Saved:
    """Saves the slot state that the next chunk may overwrite."""

    def of_layer(kind: str, kv: KV) -> KV | None:
        if kind != "local":
            return None
        index_BT = next_columns(spec, slots.lengths, kv)
        return jax.tree.map(lambda x: kv_cache.take_columns(x, index_BT), kv)

    columns = [of_layer(kind, kv) for kind, kv in zip(spec.cfg.kinds, slots.cache)]
    # Copies, as the slots themselves are donated to the chunk.
    seen = None if slots.seen is None else jnp.copy(slots.seen)
    return Saved(columns, jnp.copy(slots.lengths), jnp.copy(slots.num_drawn), seen)


def next_columns(spec: SamplerSpec, lengths_B: jax.Array, kv: KV) -> jax.Array:
    """The columns that the next chunk writes, [B, T]."""
    return (lengths_B[:, None] + jnp.arange(spec.chunk)) % kv.k.shape[2]


def rewind(
    spec: SamplerSpec,
    slots: Slots,
    saved: Saved,
    tokens_TB: jax.Array,
    kept_B: jax.Array,
) -> Slots:
    """The slots after a chunk of which kept_B tokens stay, -1: as it is. The slots that lose tokens
    do not run, and wait for an answer. tokens_TB: what the chunk drew."""
    is_back_B = kept_B >= 0
    place_T = jnp.arange(spec.chunk)
    is_lost_BT = is_back_B[:, None] & (place_T >= kept_B[:, None])
    rows_B1 = jnp.arange(len(kept_B))[:, None]

    def restored(kv: KV, old: KV | None) -> KV:
        if old is None:
            return kv
        C = kv.k.shape[2]
        # What stays as it is goes to a column that does not exist.
        target_BT = jnp.where(is_lost_BT, next_columns(spec, saved.lengths, kv), C + place_T)

        def put(now: jax.Array, before: jax.Array) -> jax.Array:
            here = now.at[rows_B1, :, target_BT]
            return kv_cache.constrain_kv(here.set(before.swapaxes(1, 2), mode="drop"))

        return jax.tree.map(put, kv, old)

    def chosen(before: jax.Array, now: jax.Array) -> jax.Array:
        return jnp.where(is_back_B.reshape(-1, *[1] * (now.ndim - 1)), before, now)

    seen = slots.seen
    if seen is not None:
        is_kept_BT = place_T < kept_B[:, None]
        no_token = seen.shape[1]
        kept_BT = jnp.where(is_kept_BT, tokens_TB.T, no_token)
        seen = chosen(saved.seen.at[rows_B1, kept_BT].set(True, mode="drop"), seen)
    back = slots.replace(
        cache=[restored(kv, old) for kv, old in zip(slots.cache, saved.columns)],
        seen=seen,
        lengths=chosen(saved.lengths + kept_B, slots.lengths),
        num_drawn=chosen(saved.num_drawn + kept_B, slots.num_drawn),
        running=slots.running & ~is_back_B,
    )
    return at_home(back, "batch")
