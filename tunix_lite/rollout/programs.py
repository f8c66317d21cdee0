"""The compiled programs of a rollout, and the arrays that they hand to one another.

prefill      reads a block of prompts, each once, and keeps them in a `PromptCache`
refill       gives every slot whose sequence has ended the next request of the `Queue`
decode       draws `chunk` tokens in every slot, and reports them as a `DecodedChunk`

No program waits for the host: the slots themselves hold which sequences have ended and how many
requests have been taken from the queue. Every program is a function of this module whose first
argument is a `SamplerSpec`; `make_programs` compiles them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.models import attention, decoder, rounding
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.unfused import unfused
from tunix_lite.parallel.compiler_options import FOR_DECODING, JitByPlatform, OptionsByPlatform
from tunix_lite.parallel.mesh import constrain, use_rules
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import sampling
from tunix_lite.rollout.cache import KV
from tunix_lite.rollout.settings import GenerationConfig
from tunix_lite.types import Params

# Elements of the noise of a chunk that a CPU draws before its first step: 16 MiB.
NOISE_AT_ONCE = 2**22


class Ahead(NamedTuple):
    """Values computed before a step. None: the step computes it where it is used.

    Example: step(slots, Ahead()).
    """

    # rotary angles of the tokens that the step reads, by kind of layer
    angles: dict[str, decoder.Angles] | None = None
    # the result of sampling.gumbel_noise for the tokens that the step draws
    noise_BV: jax.Array | None = None


@dataclass(frozen=True)
class SamplerSpec:
    """Static settings of the sampling programs.

    Example: `SamplerSpec(cfg, GenerationConfig(32, 64), end_ids=(1,), pad_id=0, dtype=jnp.float32,
    chunk=16)`.
    """

    cfg: Architecture
    generation: GenerationConfig
    # tokens that end a completion and are part of it
    end_ids: tuple[int, ...]
    # token that slots without a running sequence read
    pad_id: int
    # dtype of the computation
    dtype: DTypeLike
    # tokens that each slot decodes in one call
    chunk: int
    # whether the cache holds int8 codes
    int8: bool = False
    # dtype of sums over tp, for decoder.forward
    tp_reduce_dtype: DTypeLike = jnp.float32
    # whether a slot keeps its sequence when a turn of it has ended, until the host frees the slot
    holds: bool = False
    # whether kernels of our own decode (tunix_lite/kernels)
    fused: bool = False
    # whether it runs on CPUs, whose decode program reads some arrays in another layout
    on_cpu: bool = False
    # whether fused kernels are interpreted, as tests do where there is no GPU
    interpret: bool = False

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt with its longest completion."""
        return self.generation.max_prompt_length + self.generation.max_new_tokens

    @property
    def has_penalty(self) -> bool:
        """Returns whether seen tokens are made less likely, so that slots must remember them."""
        return self.generation.repetition_penalty != 1


@flax.struct.dataclass
class PromptCache:
    """M prompts that have been read, which every fsdp shard holds in full.

    Example: make_prompt_cache(8) has room for 8 prompts; prefill fills 2 of its rows at a time.
    """

    # keys and values of up to max_prompt_length columns, one entry per layer
    cache: list[KV]
    # [M, D] hidden state of the last token: a completion's first token is drawn from it
    hidden: jax.Array
    # [M] tokens of each prompt
    lengths: jax.Array
    # [M, V] bool, the tokens that occur in it; None without a repetition penalty
    seen: jax.Array | None


@flax.struct.dataclass
class Queue:
    """All Q requests of a rollout, in the order in which slots take them, padded to a power of two.

    Example: of 2 prompts with 2 completions each, `rows` is [0, 0, 1, 1, 0, 0, ...].
    """

    # [Q] row of the prompt in the prompt cache
    rows: jax.Array
    # [Q] random keys
    keys: jax.Array
    # [Q] tokens of the completion, at most
    limits: jax.Array


@flax.struct.dataclass
class Slots:
    """The B sequences that are being decoded. Every program donates its slots to the next one.

    Example: make_slots(4) gives four slots with `requests` [-1, -1, -1, -1], none of them running.
    """

    cache: list[KV]
    # [B, D] of the newest token
    hidden: jax.Array
    # [B, V] bool, the tokens of prompt and completion; None without a repetition penalty
    seen: jax.Array | None
    # [B] index in the queue; -1: none yet
    requests: jax.Array
    # [B] random keys
    keys: jax.Array
    # [B] tokens in the cache, which is the position of the next one
    lengths: jax.Array
    # [B] tokens of the completion so far
    num_drawn: jax.Array
    # [B] tokens of the completion, at most
    limits: jax.Array
    # [B] bool
    running: jax.Array
    # [] requests taken from the queue so far
    num_taken: jax.Array


@flax.struct.dataclass
class DecodedChunk:
    """Tokens that one call of decode drew. Every device holds all of it, so that every host can
    read it.

    Example: with chunk=2 and 2 slots, of which the second ended at once, `tokens` is [[5, 1],
    [7, -1]].
    """

    # [chunk, B]; -1: the slot was not running
    tokens: jax.Array
    # [chunk, B] under the distribution that was drawn from
    logprobs: jax.Array
    # [chunk, B] under softmax(logits / temperature)
    full_logprobs: jax.Array
    # [B] index in the queue
    requests: jax.Array
    # [B] bool, after the chunk
    running: jax.Array
    # [] requests taken from the queue so far
    num_taken: jax.Array


@dataclass(frozen=True)
class Programs:
    """The compiled programs of one `SamplerSpec`.

    Example: make_programs(spec).make_prompt_cache(8).
    """

    spec: SamplerSpec
    # (rows) -> PromptCache
    make_prompt_cache: Callable
    # (slots, columns=all) -> Slots
    make_slots: Callable
    # (slots, columns) -> Slots with a new cache of so many columns, or all
    resize: Callable
    # (KV, columns) -> KV: what `resize` calls for each layer; None: it calls nothing
    resize_layer: Callable | None
    # (key, prompts [Q], generations [Q], rows [Q], limits [Q]) -> Queue
    make_queue: Callable
    # (prompt cache, per_layer_params, tokens [M, T], lengths [M], first_row) -> PromptCache;
    # donates the prompt cache
    prefill: Callable
    # (slots, prompt cache, queue, ready, stopped [B]) -> Slots; donates the slots
    refill: Callable
    # (slots, per_layer_params, temperature) -> (Slots, DecodedChunk); donates the slots
    decode: Callable
    # the same for temperature 0, where nothing need be cut off
    decode_greedy: Callable
    # how many times each program was compiled
    compiles: Counter


def make_programs(spec: SamplerSpec) -> Programs:
    """The programs that sample from a decoder. Each compiles when it is first called."""
    compiles = Counter()

    def compiled(function: Callable, **options) -> Callable:
        return counting_jit(function, compiles, partial(function, spec), **options)

    # At temperature 0 cutting off changes no token, so greedy decoding leaves it out.
    decode_program = compiled(decode, compiler_options=FOR_DECODING, donate_argnums=0)
    greedy_program = decode_program
    if spec.generation.has_cutoffs:
        greedy_program = compiled(decode_greedy, compiler_options=FOR_DECODING, donate_argnums=0)

    resize_layer = counting_jit(kv_cache.resize_columns, compiles, static_argnums=1)
    return Programs(
        spec=spec,
        make_prompt_cache=compiled(make_prompt_cache, static_argnums=0),
        make_slots=compiled(make_slots, static_argnums=(0, 1)),
        resize=partial(resize, spec, resize_layer),
        resize_layer=resize_layer,
        make_queue=counting_jit(make_queue, compiles),
        prefill=compiled(prefill, donate_argnums=0),
        refill=compiled(refill, donate_argnums=0),
        decode=decode_program,
        decode_greedy=greedy_program,
        compiles=compiles,
    )


def counting_jit(
    function: Callable,
    compiles: Counter,
    program: Callable | None = None,
    compiler_options: OptionsByPlatform | None = None,
    **options,
) -> Callable:
    """`program`, or `function` itself, under jit with these options, named after `function`.

    `compiles` counts under that name how many times it was compiled. compiler_options: by platform,
    options that only its compiler knows.
    """
    program = function if program is None else program

    def body(*args):
        # jit runs the body of a function only to compile it.
        compiles[function.__name__] += 1
        with use_rules("rollout"):
            return program(*args)

    # Profiles and logs show this name.
    body.__name__ = function.__name__
    if compiler_options is not None:
        return JitByPlatform(body, compiler_options, **options)
    return jax.jit(body, **options)


# ---- what the programs keep on the devices


def at_home(
    state: Any,
    rows_axis: str,
    place: Callable[[Any, tuple[str, ...]], Any] | None = None,
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


def no_tokens_seen(spec: SamplerSpec, rows: int) -> jax.Array | None:
    """[rows, V] bool, all False; None without a repetition penalty."""
    return jnp.zeros((rows, spec.cfg.vocab_size), bool) if spec.has_penalty else None


def make_prompt_cache(spec: SamplerSpec, rows: int) -> PromptCache:
    """Room for `rows` prompts, empty."""
    longest = spec.generation.max_prompt_length
    empty = PromptCache(
        cache=kv_cache.empty_cache(spec.cfg, rows, longest, spec.dtype, spec.int8, "prompts"),
        hidden=jnp.zeros((rows, spec.cfg.embed_dim), spec.dtype),
        lengths=jnp.zeros(rows, jnp.int32),
        seen=no_tokens_seen(spec, rows),
    )
    return at_home(empty, "prompts")


def make_slots(
    spec: SamplerSpec,
    num_slots: int,
    columns: int | None = None,
) -> Slots:
    """Makes slots of which none is running, with a cache of so many columns; None: of all."""
    columns = spec.max_length if columns is None else columns
    zeros = jnp.zeros(num_slots, jnp.int32)
    empty = Slots(
        cache=kv_cache.empty_cache(spec.cfg, num_slots, columns, spec.dtype, spec.int8),
        hidden=jnp.zeros((num_slots, spec.cfg.embed_dim), spec.dtype),
        seen=no_tokens_seen(spec, num_slots),
        requests=zeros - 1,
        keys=jnp.broadcast_to(jax.random.key(0), (num_slots,)),
        lengths=zeros,
        num_drawn=zeros,
        limits=zeros,
        running=jnp.zeros(num_slots, bool),
        num_taken=jnp.int32(0),
    )
    return at_home(empty, "batch")


def resize(
    spec: SamplerSpec,
    resize_layer: Callable,
    slots: Slots,
    columns: int,
) -> Slots:
    """The slots with a cache for sequences of up to `columns` tokens.

    One layer is made after the other, so that no device ever holds two whole caches.
    """
    for layer, kind in enumerate(spec.cfg.kinds):
        wanted = kv_cache.num_columns(spec.cfg, kind, columns)
        if slots.cache[layer].k.shape[2] != wanted:
            slots.cache[layer] = resize_layer(slots.cache[layer], wanted)
    return slots


def make_queue(
    key_data: jax.Array,
    prompts_Q: jax.Array,
    generations_Q: jax.Array,
    rows_Q: jax.Array,
    limits_Q: jax.Array,
) -> Queue:
    """The queue of these requests; key_data: of the random key of the rollout, or of one key for
    each request, which is the rollout that its prompt was drawn for."""
    key = jax.random.wrap_key_data(key_data)
    keys_Q = sampling.row_keys(key, prompts_Q, generations_Q)
    return at_home(Queue(rows_Q, keys_Q, limits_Q), "prompts")


# ---- prefill


def prefill(
    spec: SamplerSpec,
    prompt_cache: PromptCache,
    per_layer_params: Params,
    tokens_MT: jax.Array,
    lengths_M: jax.Array,
    first_row: jax.Array,
) -> PromptCache:
    """Reads M right-padded prompts into the rows of the prompt cache from `first_row` on."""
    M, T = tokens_MT.shape
    tokens_MT = constrain(tokens_MT, "batch", "seq")
    is_token_MT = jnp.arange(T) < lengths_M[:, None]
    meta = attention.one_sequence_per_row(is_token_MT)

    def attend_fn(
        layer: int,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
    ):
        is_local = spec.cfg.kinds[layer] == "local"
        attended_BTNH = attention.xla(spec.cfg, is_local, meta, q_BTNH, k_BTKH, v_BTKH)
        new = kv_cache.to_cache_format(spec.cfg, k_BTKH, v_BTKH, spec.int8)
        columns = prompt_cache.cache[layer].k.shape[2]
        return attended_BTNH, kv_cache.as_ring(new, lengths_M, columns)

    hidden_MTD, new_cache = decoder.forward_by_layer(
        per_layer_params, spec.cfg, tokens_MT, meta.positions, attend_fn, spec.tp_reduce_dtype
    )

    # The repetition penalty covers the tokens of the prompt, too.
    if spec.has_penalty:
        nothing_MV = jnp.zeros((M, spec.cfg.vocab_size), bool)
        seen_MV = nothing_MV.at[jnp.arange(M)[:, None], tokens_MT].max(is_token_MT)

    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first_row, axis=0)
    filled = PromptCache(
        cache=[
            kv_cache.store_rows(old, new, first_row, "prompts")
            for old, new in zip(prompt_cache.cache, new_cache)
        ],
        hidden=put(prompt_cache.hidden, hidden_MTD[jnp.arange(M), lengths_M - 1]),
        lengths=put(prompt_cache.lengths, lengths_M),
        seen=put(prompt_cache.seen, seen_MV) if spec.has_penalty else None,
    )
    return at_home(filled, "prompts")


# ---- refill


def refill(
    spec: SamplerSpec,
    slots: Slots,
    prompt_cache: PromptCache,
    queue: Queue,
    ready: jax.Array,
    stopped_B: jax.Array,
) -> Slots:
    """Every free slot takes the next request of the queue.

    ready: requests whose prompts stand in the prompt cache, []. stopped_B: the requests that the
    host has ended; a slot is free if its sequence has ended or its request is stopped_B. With
    spec.holds a sequence that does not run may go on, so the host alone frees a slot.
    """
    has_ended_B = slots.requests < 0 if spec.holds else ~slots.running
    is_free_B = has_ended_B | (slots.requests == stopped_B)
    request_B = slots.num_taken + jnp.cumsum(is_free_B) - 1
    is_new_B = is_free_B & (request_B < ready)
    request_B = jnp.minimum(request_B, len(queue.rows) - 1)
    row_B = queue.rows[request_B]

    def take(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_new_B.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    refilled = Slots(
        cache=[
            kv_cache.load_rows(kv, prompts, row_B, is_new_B)
            for kv, prompts in zip(slots.cache, prompt_cache.cache)
        ],
        hidden=take(prompt_cache.hidden[row_B], slots.hidden),
        seen=take(prompt_cache.seen[row_B], slots.seen) if spec.has_penalty else None,
        requests=take(request_B, slots.requests),
        keys=take(queue.keys[request_B], slots.keys),
        lengths=take(prompt_cache.lengths[row_B], slots.lengths),
        num_drawn=take(jnp.zeros_like(slots.num_drawn), slots.num_drawn),
        limits=take(queue.limits[request_B], slots.limits),
        running=is_new_B | (slots.running & ~is_free_B),
        num_taken=slots.num_taken + is_new_B.sum(),
    )
    return at_home(refilled, "batch")


# ---- decode


def decode(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    temperature: jax.Array,
) -> tuple[Slots, DecodedChunk]:
    """Draws `spec.chunk` tokens in every slot."""
    return decode_chunk(spec, spec.generation, slots, per_layer_params, temperature)


def decode_greedy(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    temperature: jax.Array,
) -> tuple[Slots, DecodedChunk]:
    """`decode` at temperature 0, with nothing cut off."""
    return decode_chunk(spec, spec.generation.without_cutoffs, slots, per_layer_params, temperature)


def decode_chunk(
    spec: SamplerSpec,
    generation: GenerationConfig,
    slots: Slots,
    per_layer_params: Params,
    temperature: jax.Array,
) -> tuple[Slots, DecodedChunk]:
    """Draws `spec.chunk` tokens in every slot, as `generation` says."""

    def step(slots: Slots, ahead: Ahead) -> tuple[Slots, tuple[jax.Array, ...]]:
        return decode_step(spec, generation, slots, per_layer_params, temperature, ahead)

    slots, drawn = repeat(spec, step, slots)
    report = DecodedChunk(*drawn, slots.requests, slots.running, slots.num_taken)
    return slots, jax.tree.map(lambda x: constrain(x, *["seq"] * x.ndim), report)


def repeat(
    spec: SamplerSpec,
    step: Callable[[Slots, Ahead], tuple[Slots, Any]],
    slots: Slots,
) -> tuple[Slots, Any]:
    """Runs step(slots, ahead) `spec.chunk` times; returns the slots, and the other results of the
    steps, stacked."""
    ahead = computed_ahead(spec, slots) if spec.on_cpu else Ahead()
    return jax.lax.scan(step, slots, ahead, length=spec.chunk)


def computed_ahead(spec: SamplerSpec, slots: Slots) -> Ahead:
    """Computes, on a CPU, the values that all steps of a chunk need, each array with a leading dim
    of `spec.chunk`.

    A slot that runs moves on by one token a step. What a slot that has ended computes is not used.
    """
    # XLA for CPUs would compute sin and cos once more for each head of each layer.
    step_T1 = jnp.arange(spec.chunk)[:, None]
    positions_TB = slots.lengths + step_T1
    angles = decoder.rope_angles_by_kind(spec.cfg, positions_TB[:, :, None])
    if positions_TB.size * spec.cfg.vocab_size > NOISE_AT_ONCE:
        return Ahead(angles)

    # One large array is drawn in threads; the small one of a step is not.
    gumbel_noise = partial(sampling.gumbel_noise, vocab_size=spec.cfg.vocab_size)
    noise_TBV = jax.vmap(gumbel_noise, (None, 0))(slots.keys, slots.num_drawn + step_T1)
    return Ahead(angles, unfused(constrain(noise_TBV, "seq", "batch", "vocab")))


def decode_step(
    spec: SamplerSpec,
    generation: GenerationConfig,
    slots: Slots,
    per_layer_params: Params,
    temperature: jax.Array,
    ahead: Ahead,
) -> tuple[Slots, tuple[jax.Array, jax.Array, jax.Array]]:
    """Draws one token in every slot, then reads it. Also returns (tokens, logprobs, full_logprobs),
    [B] each."""
    if spec.fused:
        token_B, logprobs_B = draw_fused(spec, slots, per_layer_params, temperature)
        full_logprobs_B = logprobs_B
    else:
        logits_BV = next_logits(spec, slots, per_layer_params)
        token_B, logprobs_B, full_logprobs_B = sampling.draw(
            logits_BV,
            slots.keys,
            slots.num_drawn,
            temperature,
            generation,
            slots.seen,
            ahead.noise_BV,
        )
    after, reported_B = read_drawn(spec, slots, per_layer_params, token_B, ahead)
    return after, (reported_B, logprobs_B, full_logprobs_B)


def next_logits(spec: SamplerSpec, slots: Slots, per_layer_params: Params) -> jax.Array:
    """The scores of the next token of every slot, [B, V]."""
    # `hidden` is that of the newest token, of the prompt or of the completion.
    return constrain(decoder.logits(per_layer_params, spec.cfg, slots.hidden), "batch", "vocab")


def draw_fused(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The next token of every slot and its log-probability, [B] each: one kernel, no logits."""
    # Pallas is only imported where it is used.
    from tunix_lite.kernels.fused_draw import fused_draw

    table_VD = rounding.stored(decoder.output_table(per_layer_params, spec.cfg), slots.hidden.dtype)
    return fused_draw(
        spec.cfg,
        slots.hidden,
        table_VD,
        slots.keys,
        slots.num_drawn,
        temperature,
        spec.interpret,
    )


def read_drawn(
    spec: SamplerSpec,
    slots: Slots,
    per_layer_params: Params,
    token_B: jax.Array,
    ahead: Ahead,
) -> tuple[Slots, jax.Array]:
    """The slots after every running one has read the token drawn for it; and these tokens, -1 for
    slots that do not run."""
    token_B = jnp.where(slots.running, token_B, spec.pad_id)

    # Read the new token: its keys and values join the cache.
    attend_fn = attend_fused(spec, slots) if spec.fused else attend_to_cache(spec, slots)
    hidden_B1D, cache = decoder.forward_by_layer(
        per_layer_params,
        spec.cfg,
        token_B[:, None],
        slots.lengths[:, None],
        attend_fn,
        spec.tp_reduce_dtype,
        attend_norms=spec.fused,
        products=products_of(spec),
        angles=ahead.angles,
    )

    # A sequence ends with an end token, or where it has reached its limit.
    num_drawn_B = slots.num_drawn + slots.running
    is_end_B = jnp.isin(token_B, jnp.asarray(spec.end_ids, jnp.int32))
    is_last_B = is_end_B | (num_drawn_B >= slots.limits)
    hidden_BD = hidden_B1D[:, 0]
    seen_BV = slots.seen
    if spec.has_penalty:
        is_new_B1 = slots.running[:, None]
        seen_BV = seen_BV | (is_new_B1 & (token_B[:, None] == np.arange(spec.cfg.vocab_size)))
    after = slots.replace(
        cache=cache,
        hidden=hidden_BD,
        seen=seen_BV,
        lengths=slots.lengths + slots.running,
        num_drawn=num_drawn_B,
        running=slots.running & ~is_last_B,
    )
    return at_home(after, "batch"), jnp.where(slots.running, token_B, -1)


def products_of(spec: SamplerSpec) -> decoder.Products:
    """Returns the multiplication with layers' weights that this sampler uses."""
    if spec.fused:
        from tunix_lite.kernels.decode_products import FusedProducts

        return FusedProducts(spec.tp_reduce_dtype, spec.interpret)
    return decoder.Products(spec.tp_reduce_dtype)


def attend_to_cache(spec: SamplerSpec, slots: Slots) -> Callable:
    """attend_fn(layer, q, k, v) for one new token per slot, as decoder.forward_by_layer takes it.

    It returns what the token attends to and the layer's cache with the token in it.
    """
    cfg = spec.cfg
    newest_B = slots.lengths
    num_columns = {kind: kv.k.shape[2] for kind, kv in zip(cfg.kinds, slots.cache)}
    masks = {
        kind: kv_cache.attended_columns(cfg, kind, newest_B, columns)[:, None]
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
        kv = kv_cache.write_token(slots.cache[layer], new, newest_B)
        attended_BTNH = attention.attend(
            cfg, q_BTNH, kv.k, kv.v, masks[kind], kv.k_scales, kv.v_scales
        )
        return attended_BTNH, kv

    return attend_fn


def attend_fused(spec: SamplerSpec, slots: Slots) -> Callable:
    """attend_fn(layer, q, k, v, weights, angles) for one new token per slot, as
    decoder.forward_by_layer takes it with attend_norms: one kernel a layer."""
    from tunix_lite.kernels.decode_attention import fused_attend

    cfg = spec.cfg

    def attend_fn(
        layer: int,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        weights: dict[str, Any],
        angles: decoder.Angles,
    ):
        norms = (weights["q_norm"], weights["k_norm"]) if cfg.qk_norm else ()
        sin, cos = angles
        old = slots.cache[layer]
        out_BNH, k_BKCH, v_BKCH = fused_attend(
            cfg,
            q_BTNH[:, 0],
            k_BTKH[:, 0],
            v_BTKH[:, 0],
            norms,
            (sin[:, 0, 0], cos[:, 0, 0]),
            slots.lengths,
            old.k,
            old.v,
            spec.interpret,
        )
        return out_BNH[:, None], KV(k_BKCH, v_BKCH)

    return attend_fn
