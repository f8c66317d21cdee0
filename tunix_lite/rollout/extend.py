"""The compiled programs of conversations: tokens that nobody sampled join a slot.

extend       appends tokens, such as what an environment answers, to some slots, in one pass over
             them; what the slots hold already is attended to, and never read again
read_slot    copies the sequence of a slot, so that the host can keep it (the slot is parked)
write_slot   puts such a copy into a slot
save, rewind take back what slots drew behind a stop text (rewind.py)

They work on the `Slots` of programs.py. Letters beside those of types.py: R slots that are
extended, W new tokens of each, C columns of the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import attention, decoder
from tunix_lite.parallel.mesh import axis_size, constrain
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.cache import KV
from tunix_lite.rollout.programs import Programs, SamplerSpec, Slots, at_home, counting_jit
from tunix_lite.rollout.rewind import rewind, save
from tunix_lite.types import Params

# The widths that new tokens are padded to. Longer ones are read in pieces of the last of them.
EXTEND_WIDTHS = (16, 64, 256)
# Slots that one call extends, where the mesh does not divide the slots: these, or all.
FEW_SLOTS = 8


@dataclass(frozen=True)
class TurnPrograms:
    """The compiled programs of conversations, beside `Programs` of the same spec.

    Example: make_turn_programs(make_programs(replace(spec, holds=True))).
    """

    # (slots, per_layer_params, rows [R], tokens [R, W], counts [R], limits [R]) -> Slots; donates
    # the slots
    extend: Callable
    # (slots, row) -> Slots of one row, which every device holds
    read_slot: Callable
    # (slots, Slots of one row, row) -> Slots; donates the slots
    write_slot: Callable
    # (slots) -> Saved, before a chunk; only where there are stop texts
    save: Callable
    # (slots, Saved, tokens [T, B], kept [B]) -> Slots, after it; donates the slots
    rewind: Callable


def make_turn_programs(programs: Programs) -> TurnPrograms:
    """Each program compiles when it is first called, and is counted in `programs.compiles`."""

    def compiled(function: Callable, **options) -> Callable:
        program = partial(function, programs.spec)
        return counting_jit(function, programs.compiles, program, **options)

    return TurnPrograms(
        extend=compiled(extend, donate_argnums=0),
        read_slot=compiled(read_slot),
        write_slot=compiled(write_slot, donate_argnums=0),
        save=compiled(save),
        rewind=compiled(rewind, donate_argnums=0),
    )


# ---- what the host passes


@dataclass(frozen=True)
class ExtendCall:
    """The arguments of one call of `extend`: arrays of the host, of R slots.

    Example: of slots 1 and 4, with 3 and 5 new tokens: rows [1, 4, B, B, ...], where row B is no
    slot; tokens [8, 16].
    """

    rows: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    limits: np.ndarray


def extend_calls(
    new: dict[int, tuple[list[int], int]],
    num_slots: int,
    fsdp: int | None = None,
) -> list[ExtendCall]:
    """The calls that append these tokens, by slot, and set `num_drawn` limits.

    new: by slot, (tokens, the count of sampled tokens at which the turn that follows is cut). Which
    widths and pieces there are depends on the length of the tokens alone, and so does rounding.
    fsdp: None takes that of the current mesh.
    """
    fsdp = axis_size("fsdp") if fsdp is None else fsdp
    calls = []
    widest = EXTEND_WIDTHS[-1]
    rounds = max((-(-len(tokens) // widest) for tokens, _ in new.values()), default=0)
    for i in range(rounds):
        # In each round, the slots with pieces of one width go together.
        by_width: dict[int, list[tuple[int, list[int], int]]] = {}
        for slot, (tokens, limit) in new.items():
            piece = tokens[i * widest : (i + 1) * widest]
            if piece:
                width = min(w for w in EXTEND_WIDTHS if w >= len(piece))
                is_last = (i + 1) * widest >= len(tokens)
                by_width.setdefault(width, []).append((slot, piece, limit if is_last else 0))
        # How many answers come together is a matter of the clock, so all calls have one shape.
        together = FEW_SLOTS if _reads_few(num_slots, fsdp) else num_slots
        for width, pieces in sorted(by_width.items()):
            for start in range(0, len(pieces), together):
                some = pieces[start : start + together]
                calls.append(_extend_call(some, width, num_slots, fsdp))
    return calls


def _reads_few(num_slots: int, fsdp: int) -> bool:
    """Returns whether a call reads FEW_SLOTS slots. Where fsdp divides the slots, each device reads
    its own: none is gathered from another."""
    return fsdp == 1 and num_slots > FEW_SLOTS


def _extend_call(
    pieces: list[tuple[int, list[int], int]],
    width: int,
    num_slots: int,
    fsdp: int,
) -> ExtendCall:
    """One call for (slot, tokens, limit) of one width."""
    is_few = _reads_few(num_slots, fsdp)
    count = FEW_SLOTS if is_few else num_slots
    rows = np.full(count, num_slots, np.int32) if is_few else np.arange(num_slots, dtype=np.int32)
    tokens = np.zeros((count, width), np.int32)
    counts = np.zeros(count, np.int32)
    limits = np.zeros(count, np.int32)
    for i, (slot, piece, limit) in enumerate(pieces):
        place = i if is_few else slot
        rows[place] = slot
        tokens[place, : len(piece)] = piece
        counts[place] = len(piece)
        limits[place] = limit
    return ExtendCall(rows, tokens, counts, limits)


# ---- extend


def extend(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    rows_R: jax.Array,
    tokens_RW: jax.Array,
    counts_R: jax.Array,
    limits_R: jax.Array,
) -> Slots:
    """Appends counts_R tokens to the sequences of slots rows_R.

    A slot decodes on from there, up to limits_R sampled tokens of the whole conversation; with
    limit 0 it waits for the rest of its tokens. A row beyond the slots, or with count 0, is none.
    With R = B, rows_R are all slots in order.
    """
    R, W = tokens_RW.shape
    chosen = ChosenSlots(rows_R, counts_R > 0, len(slots.lengths))

    # Read the new tokens: their keys and values join the cache.
    lengths_R = chosen.read(slots.lengths)
    positions_RW = lengths_R[:, None] + jnp.arange(W)
    cache = jax.tree.map(chosen.read, slots.cache)
    attend_fn = attend_to_cache_and_new(spec, cache, lengths_R, counts_R, W)
    hidden_RWD, new_kv = decoder.forward_by_layer(
        per_layer_params, spec.cfg, tokens_RW, positions_RW, attend_fn, spec.tp_reduce_dtype
    )

    # The first token of the next turn is drawn from the last of them.
    last_R = jnp.maximum(counts_R - 1, 0)
    seen = slots.seen
    if spec.has_penalty:
        is_token_RW = jnp.arange(W) < counts_R[:, None]
        nothing_RV = jnp.zeros((R, spec.cfg.vocab_size), bool)
        new_RV = nothing_RV.at[jnp.arange(R)[:, None], tokens_RW].max(is_token_RW)
        seen = chosen.write(seen, chosen.read(seen) | new_RV)
    extended = slots.replace(
        cache=[
            write_tokens(kv, new, rows_R, lengths_R, counts_R)
            for kv, new in zip(slots.cache, new_kv)
        ],
        hidden=chosen.write(slots.hidden, hidden_RWD[jnp.arange(R), last_R]),
        seen=seen,
        lengths=chosen.write(slots.lengths, lengths_R + counts_R),
        limits=chosen.write(slots.limits, limits_R),
        running=chosen.write(slots.running, limits_R > 0),
    )
    return at_home(extended, "batch")


@dataclass(frozen=True)
class ChosenSlots:
    """The slots that a call of `extend` is about: R of B.

    Example: `ChosenSlots(rows_R, counts_R > 0, 64)`, with rows_R [3, 64], where row 64 is no slot.
    """

    # [R]
    rows: jax.Array
    # [R] bool: False where nothing is appended
    is_new: jax.Array
    num_slots: int

    @property
    def are_all(self) -> bool:
        """Returns whether they are all slots, in order: then nothing is gathered over fsdp."""
        return len(self.rows) == self.num_slots

    def read(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [R, ...]"""
        if self.are_all:
            return x
        return jnp.take(x, jnp.minimum(self.rows, self.num_slots - 1), axis=0)

    def write(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """[B, ...] with the rows that are new, of [R, ...]."""
        new = new.astype(old.dtype)
        if self.are_all:
            return jnp.where(self.is_new.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        target_R = jnp.where(self.is_new, self.rows, self.num_slots)
        return old.at[target_R].set(new, mode="drop")


def attend_to_cache_and_new(
    spec: SamplerSpec,
    cache: list[KV],
    lengths_R: jax.Array,
    counts_R: jax.Array,
    W: int,
) -> Callable:
    """attend_fn(layer, q, k, v) for W new tokens per row, as decoder.forward_by_layer takes it.

    It returns what they attend to, and their keys and values in the layout of the cache.
    """
    cfg = spec.cfg
    num_columns = {kind: kv.k.shape[2] for kind, kv in zip(cfg.kinds, cache)}
    masks = {
        kind: mask_of_cache_and_new(
            attention.window_of(cfg, kind == "local"), lengths_R, counts_R, columns, W
        )
        for kind, columns in num_columns.items()
    }

    def attend_fn(
        layer: int,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
    ):
        kind = cfg.kinds[layer]
        new = kv_cache.to_cache_format(cfg, k_BTKH, v_BTKH, spec.int8)
        old = cache[layer]
        old_mask, new_mask = masks[kind]

        both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=2), old, new)
        mask = jnp.concatenate([old_mask, new_mask], axis=2)
        return attend_in_pieces(spec, q_BTNH, both, mask), new

    return attend_fn


def mask_of_cache_and_new(
    window: int | None,
    lengths_R: jax.Array,
    counts_R: jax.Array,
    columns: int,
    W: int,
) -> tuple[jax.Array, jax.Array]:
    """Masks what each new token sees: columns of the cache [R, W, C], and new tokens [R, W, W]."""
    held_RC = kv_cache.positions_held(lengths_R - 1, columns)
    query_RW = lengths_R[:, None] + jnp.arange(W)
    old_RWC = jnp.broadcast_to(held_RC[:, None] >= 0, (len(lengths_R), W, columns))
    place_W = jnp.arange(W)
    # A token behind the last one sees itself, so that no row of scores is empty.
    is_token_RW = place_W < counts_R[:, None]
    new_RWW = (place_W[:, None] >= place_W) & is_token_RW[:, None]
    new_RWW |= place_W[:, None] == place_W
    if window is not None:
        old_RWC &= query_RW[:, :, None] - held_RC[:, None] < window
        new_RWW &= place_W[:, None] - place_W < window
    return old_RWC, new_RWW


def attend_in_pieces(
    spec: SamplerSpec,
    q_BTNH: jax.Array,
    kv: KV,
    mask_BTS: jax.Array,
) -> jax.Array:
    """Calls attention.attend for so many queries at a time that their scores fit."""
    T = q_BTNH.shape[1]
    length = attention.piece_length(q_BTNH, kv.k.shape[2])
    pieces = []
    for start in range(0, T, length):
        queries = slice(start, start + length)
        q_piece = q_BTNH[:, queries]
        mask_piece = mask_BTS[:, queries]
        piece = attention.attend(
            spec.cfg, q_piece, kv.k, kv.v, mask_piece, kv.k_scales, kv.v_scales
        )
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def write_tokens(
    kv: KV,
    new: KV,
    rows_R: jax.Array,
    lengths_R: jax.Array,
    counts_R: jax.Array,
) -> KV:
    """The cache with the new tokens of rows_R at their columns. A ring keeps the last ones.

    new: [R, K, W, ...], as `to_cache_format` makes it.
    """
    B, _, C = kv.k.shape[:3]
    W = new.k.shape[2]
    place_W = jnp.arange(W)
    count_R1 = counts_R[:, None]
    is_kept_RW = (place_W < count_R1) & (place_W >= count_R1 - C)
    columns_RW = (lengths_R[:, None] + place_W) % C
    # What is not kept goes to a column that does not exist, so each with an index of its own.
    columns_RW = jnp.where(is_kept_RW, columns_RW, C + place_W)
    is_row_R = rows_R < B

    def put(old: jax.Array, x: jax.Array) -> jax.Array:
        target_RW = jnp.where(is_row_R[:, None], columns_RW, C + place_W)
        here = old.at[rows_R[:, None], :, target_RW]
        updated = here.set(x.swapaxes(1, 2), mode="drop")
        return kv_cache.constrain_kv(updated)

    return jax.tree.map(put, kv, new)


# ---- parking


def read_slot(spec: SamplerSpec, slots: Slots, row: jax.Array) -> Slots:
    """A copy of one slot, [1, ...] each, whole on every device, so that every host can read it."""
    del spec

    def of_row(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        one = jax.lax.dynamic_slice_in_dim(x, row, 1, axis=0)
        return constrain(one, *["seq"] * one.ndim)

    return jax.tree.map(of_row, slots)


def write_slot(
    spec: SamplerSpec,
    slots: Slots,
    one: Slots,
    row: jax.Array,
) -> Slots:
    """The slots with `one`, as read_slot made it, in this row. Requests taken stay as they are."""
    del spec
    is_row_B = jnp.arange(len(slots.lengths)) == row

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if not old.ndim:
            return old
        if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            new = jax.random.wrap_key_data(new)
        is_row = is_row_B.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(is_row, new, old)

    return at_home(jax.tree.map(put, slots, one), "batch")
