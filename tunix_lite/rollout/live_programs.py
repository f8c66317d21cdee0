"""The compiled programs of a sampler that requests join and leave at any time.

Prompts are read by `programs.prefill`. Here the host, not a queue on the devices, says which slot
takes which prompt, and every slot draws with settings of its own.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.parallel.compiler_options import FOR_DECODING
from tunix_lite.parallel.mesh import constrain
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import sampling
from tunix_lite.rollout.programs import (
    Ahead,
    DecodedChunk,
    PromptCache,
    SamplerSpec,
    Slots,
    at_home,
    counting_jit,
    make_prompt_cache,
    make_slots,
    next_logits,
    prefill,
    read_drawn,
    repeat,
    resize,
)
from tunix_lite.types import Params

# The likeliest tokens that a chunk reports where one request asks for them.
MOST_TOP = 20


@flax.struct.dataclass
class SlotSampling:
    """Sampling settings of each of the B slots.

    Example: SlotSampling of one slot that is greedy: temperature [0.], top_k [0], top_p [1.],
    min_p [0.].
    """

    # [B] float32; 0 takes the likeliest token
    temperature: jax.Array
    # [B] int32; 0: all tokens
    top_k: jax.Array
    # [B] float32; 1: all tokens
    top_p: jax.Array
    # [B] float32; 0: all tokens
    min_p: jax.Array


@flax.struct.dataclass
class Joining:
    """Names the slots that take a prompt now, [B] each. Arrays of the host.

    Example: of two slots the second takes row 0 of the prompt cache: rows [0, 0], is_new [F, T].
    """

    # the row of the prompt cache
    rows: np.ndarray
    is_new: np.ndarray
    # the number of the request
    requests: np.ndarray
    # seed, then what is folded in: the index of the prompt and of the completion
    seeds: np.ndarray
    generations: np.ndarray
    # tokens, at most
    limits: np.ndarray
    # slots that the host has stopped
    is_stopped: np.ndarray


@flax.struct.dataclass
class TopTokens:
    """The likeliest tokens at each position, under softmax(logits / temperature).

    Example: with MOST_TOP = 20, chunk = 8 and 4 slots both arrays are [8, 4, 20].
    """

    # int32
    tokens: jax.Array
    # float32
    logprobs: jax.Array


@dataclass(frozen=True)
class LivePrograms:
    """The compiled programs of one `SamplerSpec`.

    Example: make_live_programs(spec).make_slots(8, 256).
    """

    spec: SamplerSpec
    # (rows) -> PromptCache
    make_prompt_cache: Callable
    # (slots, columns) -> Slots
    make_slots: Callable
    # (slots, columns) -> Slots with a cache of so many columns
    resize: Callable
    # the same as Programs.prefill
    prefill: Callable
    # (slots, prompt cache, Joining) -> Slots; donates the slots
    admit: Callable
    # (has_cutoffs, has_top, slots, per_layer_params, SlotSampling) -> (Slots, DecodedChunk,
    # TopTokens or None); donates the slots
    decode: Callable
    compiles: Counter


def make_live_programs(spec: SamplerSpec) -> LivePrograms:
    """The programs. Each compiles when it is first called."""
    compiles: Counter = Counter()

    def compiled(function: Callable, **options) -> Callable:
        return counting_jit(function, compiles, partial(function, spec), **options)

    resize_layer = counting_jit(kv_cache.resize_columns, compiles, static_argnums=1)
    return LivePrograms(
        spec=spec,
        make_prompt_cache=compiled(make_prompt_cache, static_argnums=0),
        make_slots=compiled(make_slots, static_argnums=(0, 1)),
        resize=partial(resize, spec, resize_layer),
        prefill=compiled(prefill, donate_argnums=0),
        admit=compiled(admit, donate_argnums=0),
        decode=compiled(
            live_decode,
            compiler_options=FOR_DECODING,
            static_argnums=(0, 1),
            donate_argnums=2,
        ),
        compiles=compiles,
    )


def admit(
    spec: SamplerSpec,
    slots: Slots,
    prompt_cache: PromptCache,
    joining: Joining,
) -> Slots:
    """The slots after some have stopped and some have taken prompts of the prompt cache."""
    is_new_B = joining.is_new
    row_B = joining.rows

    def take(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_new_B.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    # The key of a request is that of its seed: prompt 0 of a rollout with this seed.
    seed_keys_B = jax.vmap(jax.random.key)(joining.seeds)
    fold = jax.vmap(jax.random.fold_in)
    keys_B = fold(fold(seed_keys_B, jnp.zeros_like(joining.generations)), joining.generations)
    joined = Slots(
        cache=[
            kv_cache.load_rows(kv, prompts, row_B, is_new_B)
            for kv, prompts in zip(slots.cache, prompt_cache.cache)
        ],
        hidden=take(prompt_cache.hidden[row_B], slots.hidden),
        seen=None,
        requests=take(joining.requests, slots.requests),
        keys=take(keys_B, slots.keys),
        lengths=take(prompt_cache.lengths[row_B], slots.lengths),
        num_drawn=take(jnp.zeros_like(slots.num_drawn), slots.num_drawn),
        limits=take(joining.limits, slots.limits),
        running=is_new_B | (slots.running & ~joining.is_stopped),
        num_taken=slots.num_taken,
    )
    return at_home(joined, "batch")


def live_decode(
    spec: SamplerSpec,
    has_cutoffs: bool,
    has_top: bool,
    slots: Slots,
    per_layer_params: Params,
    how: SlotSampling,
) -> tuple[Slots, DecodedChunk, TopTokens | None]:
    """Draws `spec.chunk` tokens in every slot."""
    temperature_B1 = how.temperature[:, None]

    def step(slots: Slots, ahead: Ahead) -> tuple[Slots, tuple]:
        logits_BV = next_logits(spec, slots, per_layer_params)
        token_B, logprobs_B, full_logprobs_B = sampling.draw(
            logits_BV,
            slots.keys,
            slots.num_drawn,
            temperature_B1,
            spec.generation,
            noise_BV=ahead.noise_BV,
        )
        top = None
        full_BV = logits_BV / jnp.where(temperature_B1 > 0, temperature_B1, 1.0)
        if has_cutoffs:
            token_B, logprobs_B, full_logprobs_B = draw_cut_off(slots, full_BV, how, ahead)
        if has_top:
            top = likeliest_tokens(full_BV)
        after, reported_B = read_drawn(spec, slots, per_layer_params, token_B, ahead)
        return after, (reported_B, logprobs_B, full_logprobs_B, top)

    slots, (*drawn, top) = repeat(spec, step, slots)
    report = DecodedChunk(*drawn, slots.requests, slots.running, slots.num_taken)
    report, top = jax.tree.map(lambda x: constrain(x, *["seq"] * x.ndim), (report, top))
    return slots, report, top


def draw_cut_off(
    slots: Slots,
    full_BV: jax.Array,
    how: SlotSampling,
    ahead: Ahead,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws like `sampling.draw`, with each slot's own cutoffs. full_BV: logits over the
    temperature."""
    is_random_B1 = how.temperature[:, None] > 0
    cut_BV = sampling.apply_row_cutoffs(
        full_BV, how.top_k[:, None], how.top_p[:, None], how.min_p[:, None]
    )
    left_BV = jnp.where(is_random_B1, cut_BV, full_BV)
    noise_BV = ahead.noise_BV
    if noise_BV is None:
        noise_BV = sampling.gumbel_noise(slots.keys, slots.num_drawn, full_BV.shape[1])
    scores_BV = left_BV + jnp.where(is_random_B1, noise_BV, 0.0)
    token_B, full_logprobs_B = jax.lax.platform_dependent(
        scores_BV, full_BV, cpu=sampling.best_on_cpu, default=sampling.best
    )
    return token_B, sampling.logprobs_of(left_BV, token_B), full_logprobs_B


def likeliest_tokens(full_BV: jax.Array) -> TopTokens:
    """The MOST_TOP likeliest tokens of each row, or all of a smaller vocabulary."""
    logprobs_BV = jax.nn.log_softmax(full_BV, axis=-1)
    logprobs, tokens = jax.lax.top_k(logprobs_BV, min(MOST_TOP, full_BV.shape[-1]))
    return TopTokens(tokens, logprobs)
