"""Reading completions again that go on over an update: prompt and tokens so far, into empty slots.

The first tokens of a sequence attend to one another alone, so `read_first` needs no cache. What is
longer is appended by `extend`. M sequences are read together, W tokens of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import attention, decoder
from tunix_lite.parallel.mesh import axis_size, constrain
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.compile_ahead import compile_extend, results
from tunix_lite.rollout.extend import (
    EXTEND_WIDTHS,
    FEW_SLOTS,
    TurnPrograms,
    extend_calls,
    make_turn_programs,
)
from tunix_lite.rollout.programs import (
    Programs,
    Queue,
    SamplerSpec,
    Slots,
    at_home,
    counting_jit,
    no_tokens_seen,
)
from tunix_lite.rollout.requests import Request
from tunix_lite.types import Params, Prompts

# Tokens that read_first reads of a sequence, padding included, and those of all together.
FIRST_WIDTHS = (64, 128, 256)
FIRST_TOKENS = 1024
# And those of the pieces that follow: two of the widths of `extend`.
PIECE_WIDTHS = (64, 256)

# The tokens of a sequence, by slot, and the count of sampled tokens at which it is cut.
Sequences = dict[int, tuple[list[int], int]]


@dataclass(frozen=True)
class RereadPrograms:
    """The compiled programs that read again.

    Example: make_reread_programs(make_programs(spec)).
    """

    # (slots, queue, drawn [B]) -> Slots; donates the slots
    place: Callable
    # (slots, per_layer_params, rows [M], tokens [M, W], lengths [M], limits [M]) -> Slots; donates
    # the slots
    read_first: Callable
    turns: TurnPrograms


def make_reread_programs(programs: Programs) -> RereadPrograms:
    """Each program compiles when it is first called, and is counted in `programs.compiles`."""
    first = partial(read_first, programs.spec)
    return RereadPrograms(
        place=counting_jit(place_requests, programs.compiles, donate_argnums=0),
        read_first=counting_jit(read_first, programs.compiles, first, donate_argnums=0),
        turns=make_turn_programs(programs),
    )


def read_first(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    rows_M: jax.Array,
    tokens_MW: jax.Array,
    lengths_M: jax.Array,
    limits_M: jax.Array,
) -> Slots:
    """Reads the first tokens of M sequences, right-padded, into the empty slots rows_M. A row
    beyond the slots is none. limits_M: as `extend` takes them."""
    M, W = tokens_MW.shape
    is_token_MW = jnp.arange(W) < lengths_M[:, None]
    meta = attention.one_sequence_per_row(is_token_MW)

    def attend_fn(
        layer: int,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
    ):
        is_local = spec.cfg.kinds[layer] == "local"
        attended_BTNH = attention.xla(spec.cfg, is_local, meta, q_BTNH, k_BTKH, v_BTKH)
        new = kv_cache.to_cache_format(spec.cfg, k_BTKH, v_BTKH, spec.int8)
        return attended_BTNH, kv_cache.as_ring(new, lengths_M, slots.cache[layer].k.shape[2])

    tokens_MW = constrain(tokens_MW, "batch", "seq")
    hidden_MWD, new_cache = decoder.forward_by_layer(
        per_layer_params, spec.cfg, tokens_MW, meta.positions, attend_fn, spec.tp_reduce_dtype
    )

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows_M].set(new.astype(old.dtype), mode="drop")

    def put_columns(old: jax.Array, new: jax.Array) -> jax.Array:
        here = old.at[rows_M, :, : new.shape[2]]
        return kv_cache.constrain_kv(here.set(new, mode="drop"))

    seen = slots.seen
    if spec.has_penalty:
        nothing_MV = no_tokens_seen(spec, M)
        seen = put(seen, nothing_MV.at[jnp.arange(M)[:, None], tokens_MW].max(is_token_MW))
    read = slots.replace(
        cache=[jax.tree.map(put_columns, old, new) for old, new in zip(slots.cache, new_cache)],
        hidden=put(slots.hidden, hidden_MWD[jnp.arange(M), lengths_M - 1]),
        seen=seen,
        lengths=put(slots.lengths, lengths_M),
        limits=put(slots.limits, limits_M),
        running=put(slots.running, limits_M > 0),
    )
    return at_home(read, "batch")


def place_requests(
    slots: Slots,
    queue: Queue,
    drawn_B: jax.Array,
) -> Slots:
    """The first requests of the queue take the first slots, which are empty; they run once `extend`
    has read their tokens. drawn_B: tokens that each has; 0 leaves the slot empty."""
    is_taken_B = drawn_B > 0
    request_B = jnp.arange(len(drawn_B))
    keys_B = queue.keys[jnp.minimum(request_B, len(queue.rows) - 1)]
    placed = slots.replace(
        requests=jnp.where(is_taken_B, request_B, slots.requests),
        keys=jnp.where(is_taken_B, keys_B, slots.keys),
        num_drawn=jnp.where(is_taken_B, drawn_B, slots.num_drawn),
        num_taken=is_taken_B.sum(dtype=slots.num_taken.dtype),
    )
    return at_home(placed, "batch")


def read_again(
    programs: RereadPrograms,
    per_layer_params: Params,
    prompts: Prompts,
    requests: Sequence[Request],
    num_slots: int,
    slots: Slots,
    queue: Queue,
) -> Slots:
    """The slots, all empty until now, with the first requests in them: each is read whole, prompt
    and tokens so far, with these weights."""
    drawn = np.zeros(num_slots, np.int32)
    new: Sequences = {}
    for slot, (prompt, request) in enumerate(zip(prompts, requests)):
        drawn[slot] = len(request.tokens)
        new[slot] = ([*prompt, *request.tokens], request.limit)
    slots = programs.place(slots, queue, drawn)

    # Where fsdp divides the slots, each device reads its own: extend does that.
    is_whole = axis_size("fsdp") == 1
    if is_whole:
        for arrays in first_calls(new, num_slots):
            slots = programs.read_first(slots, per_layer_params, *arrays)
        widest = FIRST_WIDTHS[-1]
        new = {slot: (tokens[widest:], limit) for slot, (tokens, limit) in new.items()}
        new = {slot: (tokens, limit) for slot, (tokens, limit) in new.items() if tokens}

    # As many at once as extend takes without a row for every slot; those of one length together.
    at_once = FEW_SLOTS if is_whole else num_slots
    by_length = sorted(new, key=lambda slot: len(new[slot][0]))
    for i in range(0, len(by_length), at_once):
        together = {slot: new[slot] for slot in by_length[i : i + at_once]}
        for piece in pieces_of(together):
            for call in extend_calls(piece, num_slots):
                arrays = (call.rows, call.tokens, call.counts, call.limits)
                slots = programs.turns.extend(slots, per_layer_params, *arrays)
    return slots


def first_calls(new: Sequences, num_slots: int) -> Iterator[tuple[np.ndarray, ...]]:
    """(rows [M], tokens [M, W], lengths [M], limits [M]) of each call of `read_first`. A sequence
    that is longer than the widest W has limit 0: it waits for the rest. W depends on its length
    alone, and M on W."""
    widest = FIRST_WIDTHS[-1]
    for width in FIRST_WIDTHS:
        fits = [
            slot
            for slot, (tokens, _) in new.items()
            if width == min(w for w in FIRST_WIDTHS if w >= min(len(tokens), widest))
        ]
        count = min(num_slots, FIRST_TOKENS // width)
        for i in range(0, len(fits), count):
            rows = np.full(count, num_slots, np.int32)
            tokens_MW = np.zeros((count, width), np.int32)
            lengths = np.ones(count, np.int32)
            limits = np.zeros(count, np.int32)
            for place, slot in enumerate(fits[i : i + count]):
                tokens, limit = new[slot]
                rows[place] = slot
                lengths[place] = min(len(tokens), width)
                tokens_MW[place, : lengths[place]] = tokens[:width]
                limits[place] = limit if len(tokens) <= width else 0
            yield rows, tokens_MW, lengths, limits


def pieces_of(
    new: dict[int, tuple[list[int], int]],
) -> Iterator[dict[int, tuple[list[int], int]]]:
    """Cuts the tokens of each slot into pieces, one after the other, so that little padding is
    read: the rest is cut at 64 tokens, unless 256 are padded by fewer than 64. Only the last piece
    has the limit: until then the slot waits."""
    middle, widest = PIECE_WIDTHS
    while new:
        following = {}
        piece = {}
        for slot, (tokens, limit) in new.items():
            width = widest if len(tokens) > widest - middle else middle
            piece[slot] = (tokens[:width], 0 if tokens[width:] else limit)
            if tokens[width:]:
                following[slot] = (tokens[width:], limit)
        yield piece
        new = following


def compile_reread(
    programs: RereadPrograms, slots: Slots, queue: Queue, per_layer_params: Params
) -> None:
    """Compiles every program that `read_again` can need at any length."""
    num_slots = len(slots.requests)
    empty = slots
    slots = results(programs.place, empty, queue, np.zeros(num_slots, np.int32))
    if axis_size("fsdp") == 1:
        for width in FIRST_WIDTHS:
            arrays = next(first_calls({0: ([0] * width, 1)}, num_slots))
            slots = results(programs.read_first, slots, per_layer_params, *arrays)
    compile_extend(programs.turns, slots, per_layer_params, EXTEND_WIDTHS)
