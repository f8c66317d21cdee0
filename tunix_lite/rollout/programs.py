"""What runs on the devices while sampling: three compiled programs, and the arrays that they hand
to one another.

prefill      reads prompts, once each, and keeps them in a `PromptCache` of prompts that wait to be
continued refill       gives every slot whose sequence has ended the next request of the `Queue`
decode       draws `chunk` tokens in every slot, and reports what it drew

None of them waits for the host: who has ended, and how far the queue has been worked off, they know
by themselves.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import attention, decoder, rounding
from tunix_lite.models.decoder import Architecture
from tunix_lite.parallel.mesh import constrain, use_rules
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import sampling
from tunix_lite.rollout.cache import KV
from tunix_lite.rollout.settings import GenerationConfig


@flax.struct.dataclass
class PromptCache:
    """Prompts that have been read, M of them, whole on every fsdp shard."""

    cache: list[KV]  # of up to max_prompt_length columns
    hidden: jax.Array  # [M, D] of the last token: the first one drawn comes from it
    lengths: jax.Array  # [M] tokens
    seen: jax.Array | None  # [M, V] bool, the tokens in it; only for a repetition penalty


@flax.struct.dataclass
class Queue:
    """All requests of a rollout, in the order in which slots take them; padded to one of a few
    lengths."""

    rows: jax.Array  # [Q] of the shelf, where the prompt will stand
    keys: jax.Array  # [Q]
    limits: jax.Array  # [Q] tokens of the completion, at most


@flax.struct.dataclass
class Slots:
    """The sequences being decoded. Donated from program to program."""

    cache: list[KV]
    hidden: jax.Array  # [B, D] of the newest token
    seen: jax.Array | None  # [B, V] bool
    requests: jax.Array  # [B] index in the queue; -1: none yet
    keys: jax.Array  # [B]
    lengths: jax.Array  # [B] tokens in the cache, which is the position of the next one
    drawn: jax.Array  # [B] tokens of the completion so far
    limits: jax.Array  # [B]
    running: jax.Array  # [B]
    head: jax.Array  # [] requests taken from the queue so far


@flax.struct.dataclass
class DecodedChunk:
    """What one chunk drew: whole on every device, so that every host sees all of it."""

    tokens: jax.Array  # [chunk, B]; -1: the slot was not running
    logprobs: jax.Array  # [chunk, B] under the distribution that was drawn from
    full_logprobs: jax.Array  # [chunk, B] under softmax(scores / temperature)
    requests: jax.Array  # [B]
    running: jax.Array  # [B] after the chunk
    head: jax.Array  # []


@dataclass(frozen=True)
class Programs:
    """The compiled programs for one model and one way of sampling."""

    make_prompt_cache: Callable  # (rows) -> PromptCache
    make_slots: Callable  # (slots, columns=all) -> Slots
    # (slots, columns) -> Slots; their cache has no more columns than these, or all; it is made anew
    resize: Callable
    make_queue: Callable  # (key, prompts [Q], generations [Q], rows [Q], limits [Q]) -> Queue
    # (prompt cache, per_layer_params, tokens [M, T], lengths [M], first_row) -> PromptCache; the
    # old one is donated
    prefill: Callable
    refill: Callable  # (slots, shelf, queue, ready, stopped [B]) -> Slots; the slots are donated
    # (slots, per_layer_params, temperature) -> (Slots, DecodedChunk); the slots are donated
    decode: Callable
    decode_greedy: Callable  # the same for temperature 0, where nothing need be cut off
    compiles: Counter  # by program, how many times it was compiled


def at_home(
    state: Any, rows_axis: str, place: Callable[[Any, tuple[str, ...]], Any] | None = None
) -> Any:
    """A Slots, PromptCache or Queue, each array placed on the mesh: from program to program at the
    same place.

    rows_axis: the logical axis of its rows. place(x, logical axes) places an array, or its shape;
    None: `constrain`, inside jit.
    """
    place = _constrained if place is None else place

    def place_rows(x: Any) -> Any:
        return place(x, (rows_axis, *["seq"] * x.ndim)[: x.ndim])

    def place_any(x: Any) -> Any:
        if isinstance(x, KV):
            return jax.tree.map(lambda part: place(part, kv_cache.logical_axes(part, rows_axis)), x)
        return place_rows(x)

    placed = jax.tree.map(place_any, state, is_leaf=lambda x: isinstance(x, KV))
    # Tokens that a row has seen lie as the scores do that they change.
    if getattr(state, "seen", None) is not None:
        placed = placed.replace(seen=place(state.seen, (rows_axis, "vocab")))
    return placed


def _constrained(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return constrain(x, *axes)


def make_programs(
    cfg: Architecture,
    generation: GenerationConfig,
    end_ids,
    pad_id: int,
    dtype,
    chunk: int,
    int8: bool,
    tp_reduce_dtype=jnp.float32,
) -> Programs:
    """The programs that sample from a decoder. `end_ids` end a completion and are part of it.

    tp_reduce_dtype: as decoder.forward takes it.
    """
    forward = partial(decoder.forward_by_layer, tp_reduce_dtype=tp_reduce_dtype)
    prompt, length = (
        generation.max_prompt_length,
        generation.max_prompt_length + generation.max_new_tokens,
    )
    penalises, vocabulary = generation.repetition_penalty != 1, np.arange(cfg.vocab_size)
    compiles = Counter()

    def counted(function, **options):
        """Compiled, and counted each time that it is: jit runs the body of a function only to
        compile it."""

        def body(*args):
            compiles[function.__name__] += 1
            with use_rules("rollout"):
                return function(*args)

        # what profiles and logs call it
        body.__name__ = function.__name__
        return jax.jit(body, **options)

    def seen(*shape):
        return jnp.zeros((*shape, cfg.vocab_size), bool) if penalises else None

    def make_prompt_cache(rows):
        cache = kv_cache.empty_cache(cfg, rows, prompt, dtype, int8, "prompts")
        hidden, lengths = jnp.zeros((rows, cfg.embed_dim), dtype), jnp.zeros(rows, jnp.int32)
        return at_home(PromptCache(cache, hidden, lengths, seen(rows)), "prompts")

    def make_slots(slots, columns=length):
        zeros = jnp.zeros(slots, jnp.int32)
        state = Slots(
            cache=kv_cache.empty_cache(cfg, slots, columns, dtype, int8),
            hidden=jnp.zeros((slots, cfg.embed_dim), dtype),
            seen=seen(slots),
            requests=zeros - 1,
            keys=jnp.broadcast_to(jax.random.key(0), (slots,)),
            lengths=zeros,
            drawn=zeros,
            limits=zeros,
            running=jnp.zeros(slots, bool),
            head=jnp.int32(0),
        )
        return at_home(state, "batch")

    def make_queue(key_data, prompts_Q, generations_Q, rows_Q, limits_Q):
        key = jax.random.wrap_key_data(key_data)
        return at_home(
            Queue(rows_Q, sampling.row_keys(key, prompts_Q, generations_Q), limits_Q), "prompts"
        )

    def prefill(
        shelf: PromptCache, per_layer_params, tokens_MT, lengths_M, first_row
    ) -> PromptCache:
        M, T = tokens_MT.shape
        tokens_MT = constrain(tokens_MT, "batch", "seq")
        is_token_MT = jnp.arange(T) < lengths_M[:, None]
        meta = attention.one_sequence_per_row(is_token_MT)

        def see(layer, q_BTNH, k_BTKH, v_BTKH):
            attended = attention.xla(cfg, cfg.kinds[layer] == "local", meta, q_BTNH, k_BTKH, v_BTKH)
            kept = kv_cache.to_cache_format(cfg, k_BTKH, v_BTKH, int8)
            return attended, kv_cache.as_ring(kept, lengths_M, shelf.cache[layer].k.shape[2])

        hidden_MTD, kept = forward(per_layer_params, cfg, tokens_MT, meta.positions, see)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first_row, axis=0)
        if penalises:
            in_it_MV = (
                jnp.zeros((M, cfg.vocab_size), bool)
                .at[jnp.arange(M)[:, None], tokens_MT]
                .max(is_token_MT)
            )
        filled = PromptCache(
            [
                kv_cache.store_rows(old, new, first_row, "prompts")
                for old, new in zip(shelf.cache, kept)
            ],
            put(shelf.hidden, hidden_MTD[jnp.arange(M), lengths_M - 1]),
            put(shelf.lengths, lengths_M),
            put(shelf.seen, in_it_MV) if penalises else None,
        )
        return at_home(filled, "prompts")

    def refill(slots: Slots, shelf: PromptCache, queue: Queue, ready, stopped_B) -> Slots:
        """`ready` requests have their prompts on the shelf; a slot whose request is stopped_B ends
        here."""
        is_free_B = ~slots.running | (slots.requests == stopped_B)
        request_B = slots.head + jnp.cumsum(is_free_B) - 1
        is_new_B = is_free_B & (request_B < ready)
        request_B = jnp.minimum(request_B, len(queue.rows) - 1)
        row_B = queue.rows[request_B]

        def take(new, old):
            return jnp.where(is_new_B.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        state = Slots(
            cache=[
                kv_cache.load_rows(kv, kept, row_B, is_new_B)
                for kv, kept in zip(slots.cache, shelf.cache)
            ],
            hidden=take(shelf.hidden[row_B], slots.hidden),
            seen=take(shelf.seen[row_B], slots.seen) if penalises else None,
            requests=take(request_B, slots.requests),
            keys=take(queue.keys[request_B], slots.keys),
            lengths=take(shelf.lengths[row_B], slots.lengths),
            drawn=take(jnp.zeros_like(slots.drawn), slots.drawn),
            limits=take(queue.limits[request_B], slots.limits),
            running=is_new_B | ~is_free_B,
            head=slots.head + is_new_B.sum(),
        )
        return at_home(state, "batch")

    def decode(slots: Slots, per_layer_params, temperature) -> tuple[Slots, DecodedChunk]:
        return decode_chunk(slots, per_layer_params, temperature, generation)

    def decode_greedy(slots: Slots, per_layer_params, temperature) -> tuple[Slots, DecodedChunk]:
        return decode_chunk(slots, per_layer_params, temperature, generation.uncut)

    def decode_chunk(
        slots: Slots, per_layer_params, temperature, generation: GenerationConfig
    ) -> tuple[Slots, DecodedChunk]:
        step = partial(
            decode_step,
            per_layer_params=per_layer_params,
            temperature=temperature,
            generation=generation,
        )
        slots, drawn = jax.lax.scan(step, slots, None, length=chunk)
        report = DecodedChunk(*drawn, slots.requests, slots.running, slots.head)
        return slots, jax.tree.map(lambda x: constrain(x, *["seq"] * x.ndim), report)

    def decode_step(slots: Slots, _, per_layer_params, temperature, generation: GenerationConfig):
        """Draw a token, then read it: the newest token's scores come from `hidden`, of a prompt as
        of a completion."""
        scores_BV = constrain(decoder.logits(per_layer_params, cfg, slots.hidden), "batch", "vocab")
        token_B, *logprobs = sampling.draw(
            scores_BV, slots.keys, slots.drawn, temperature, generation, slots.seen
        )
        is_live_B, newest_B = slots.running, slots.lengths
        token_B = jnp.where(is_live_B, token_B, pad_id)
        num_columns = {kind: kv.k.shape[2] for kind, kv in zip(cfg.kinds, slots.cache)}
        masks = {
            kind: kv_cache.attended_columns(cfg, kind, newest_B, columns)[:, None]
            for kind, columns in num_columns.items()
        }

        def see(layer, q_BTNH, k_BTKH, v_BTKH):
            kind = cfg.kinds[layer]
            kv = kv_cache.write_token(
                slots.cache[layer], kv_cache.to_cache_format(cfg, k_BTKH, v_BTKH, int8), newest_B
            )
            seen, mask_B1C = kv, masks[kind]
            is_ring = kind == "local" and num_columns[kind] == cfg.window
            # summed in the order in which the trainer sums: see rounding.py
            if is_ring and rounding.is_rounded(dtype):
                ring = kv, mask_B1C, newest_B
                seen, mask_B1C = jax.lax.platform_dependent(
                    *ring, cpu=kv_cache.in_position_order, default=lambda *x: x[:2]
                )
            return attention.attend(
                cfg, q_BTNH, seen.k, seen.v, mask_B1C, seen.k_scales, seen.v_scales
            ), kv

        hidden_B1D, cache = forward(per_layer_params, cfg, token_B[:, None], newest_B[:, None], see)
        drawn_B = slots.drawn + is_live_B
        is_last_B = jnp.isin(token_B, jnp.asarray(end_ids, jnp.int32)) | (drawn_B >= slots.limits)
        after = slots.replace(
            cache=cache,
            hidden=hidden_B1D[:, 0],
            seen=slots.seen | (is_live_B[:, None] & (token_B[:, None] == vocabulary))
            if penalises
            else None,
            lengths=newest_B + is_live_B,
            drawn=drawn_B,
            running=is_live_B & ~is_last_B,
        )
        return at_home(after, "batch"), (jnp.where(is_live_B, token_B, -1), *logprobs)

    resize_layer = counted(kv_cache.resize_columns, static_argnums=1)

    def resize(slots: Slots, columns: int) -> Slots:
        for layer, kind in enumerate(cfg.kinds):
            wanted = kv_cache.num_columns(cfg, kind, columns)
            # one layer after the other: there are never two caches
            if slots.cache[layer].k.shape[2] != wanted:
                slots.cache[layer] = resize_layer(slots.cache[layer], wanted)
        return slots

    compiled_decode = counted(decode, donate_argnums=0)
    return Programs(
        make_prompt_cache=counted(make_prompt_cache, static_argnums=0),
        make_slots=counted(make_slots, static_argnums=(0, 1)),
        resize=resize,
        make_queue=counted(make_queue),
        prefill=counted(prefill, donate_argnums=0),
        refill=counted(refill, donate_argnums=0),
        decode=compiled_decode,
        decode_greedy=counted(decode_greedy, donate_argnums=0)
        if generation.cuts
        else compiled_decode,
        compiles=compiles,
    )
