"""Sampling completions: prompts are read once each, a fixed number of slots decode, and who ends
makes room.

`make_sampler` yields completions while they grow, `make_generate` makes a `Rollout` of them. What
runs on the devices stands in programs.py, what the host does meanwhile in work.py.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models import decoder
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import axis_size, gathered_sharding
from tunix_lite.rollout import settings
from tunix_lite.rollout.programs import SamplerSpec, make_programs
from tunix_lite.rollout.requests import Request, check_limits, check_prompts
from tunix_lite.rollout.scheduler import RolloutScheduler, padded_width, prompt_widths

# MOST_SLOTS: until train.py asks RolloutConfig.slots.
from tunix_lite.rollout.settings import (  # noqa: F401
    MOST_SLOTS,
    GenerationConfig,
    RolloutConfig,
)
from tunix_lite.types import FINISH, Metrics, Prompts, Rollout


def make_sampler(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype=jnp.float32,
    rollout: RolloutConfig | None = None,
    tp_reduce_dtype=jnp.float32,
) -> Callable:
    """sample(params, prompts, key, num_generations=1, temperature=..., indices=None, limits=None,
    tokenizer=None).

    It yields, after every chunk, the list of `Request` that got new tokens, and returns the metrics
    of the rollout at the end. prompts: token ids of each; limits: tokens of each completion, [P *
    G], up to max_new_tokens, the default. The same key, prompt index (of `indices`, or its place in
    the list), generation and position draw the same token, whatever the mesh, the number of slots,
    the chunk, or the order and number of other requests. `tokenizer` is needed for generation.stop,
    and otherwise only makes messages readable. tp_reduce_dtype: as decoder.forward takes it.
    """
    rollout = RolloutConfig() if rollout is None else rollout
    generation.check_fits(cfg.vocab_size)
    chunk = min(rollout.chunk, generation.max_new_tokens)
    ends = {token: "stop" for token in generation.stop_token_ids} | {
        token: "eos" for token in eos_ids
    }
    int8 = rollout.cache == "int8"
    spec = SamplerSpec(cfg, generation, tuple(ends), pad_id, dtype, chunk, int8, tp_reduce_dtype)
    programs = make_programs(spec)
    prepare = make_prepare(cfg, dtype, rollout.weights != "sharded")
    widths = prompt_widths(generation.max_prompt_length)

    def sample(
        params,
        prompts: Prompts,
        key,
        num_generations: int = 1,
        temperature: float = generation.temperature,
        indices: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Iterator[list[Request]]:
        if generation.stop and tokenizer is None:
            raise ValueError(
                f"stop={list(generation.stop)}: stop texts need a tokenizer, and there is none"
            )
        check_prompts(prompts, cfg, generation, tokenizer)
        limits = check_limits(limits, len(prompts) * num_generations, generation)
        indices = range(len(prompts)) if indices is None else indices
        # the widest first: if memory does not suffice, that shows at once
        order = sorted(range(len(prompts)), key=lambda p: -padded_width(len(prompts[p]), widths))
        asked = [
            Request(p, indices[p], g, limits[p * num_generations + g])
            for p in order
            for g in range(num_generations)
        ]
        work = RolloutScheduler(programs, prepare(params), np.float32(temperature), asked, chunk)
        slots = rollout.slots(len(asked), axis_size("fsdp"))
        work.plan_blocks(
            [prompts[p] for p in order], num_generations, widths, slots, generation.max_new_tokens
        )
        work.enqueue(key)
        work.fill_slots(slots)
        while (drawn := work.next_chunk()) is not None:
            yield work.absorb(drawn, ends, generation.stop, tokenizer, prompts)
        return work.metrics()

    return sample


def make_generate(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype=jnp.float32,
    rollout: RolloutConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tp_reduce_dtype=jnp.float32,
) -> Callable:
    """generate(params, prompts, key, num_generations=1, temperature=..., limits=None,
    on_finished=None, between_chunks=None)

    -> Rollout of P * G rows: row p * G + g is generation g of prompt p. on_finished(row, tokens) is
    called as soon as a completion has ended, while others still decode; between_chunks() after each
    chunk, of which all processes run the same: what it raises ends the rollout. The rest is as in
    `make_sampler`.
    """
    sample = make_sampler(cfg, generation, eos_ids, pad_id, dtype, rollout, tp_reduce_dtype)
    width, new = generation.max_prompt_length, generation.max_new_tokens

    def generate(
        params,
        prompts: Prompts,
        key,
        num_generations: int = 1,
        temperature: float = generation.temperature,
        limits: Sequence[int] | None = None,
        on_finished: Callable | None = None,
        between_chunks: Callable[[], None] | None = None,
    ) -> Rollout:
        B = len(prompts) * num_generations
        tokens, completion_mask = (
            np.full((B, width + new), pad_id, np.int32),
            np.zeros((B, width + new), bool),
        )
        logprobs, full_logprobs = np.zeros((2, B, width + new), np.float32)
        finish, seconds = np.zeros(B, np.int8), np.zeros((B, 2), np.float32)
        metrics: Metrics = {}

        def chunks():
            options = {"limits": limits, "tokenizer": tokenizer}
            metrics.update(
                (yield from sample(params, prompts, key, num_generations, temperature, **options))
            )

        for touched in chunks():
            for answer in touched:
                if answer.reason is not None:
                    row, count = (
                        answer.prompt * num_generations + answer.generation,
                        len(answer.tokens),
                    )
                    here = np.s_[row, width : width + count]
                    tokens[here], completion_mask[here] = answer.tokens, True
                    logprobs[here], full_logprobs[here] = answer.logprobs, answer.full_logprobs
                    finish[row], seconds[row] = (
                        FINISH.index(answer.reason),
                        (answer.began, answer.ended),
                    )
                    if on_finished is not None:
                        on_finished(row, answer.tokens)
            if between_chunks is not None:
                between_chunks()
        for p, row in enumerate(prompts):
            tokens[p * num_generations : (p + 1) * num_generations, width - len(row) : width] = row
        token_mask = completion_mask.copy()
        token_mask[:, :width] = np.repeat(left_padded(prompts, width), num_generations, axis=0)
        return Rollout(
            tokens, token_mask, completion_mask, logprobs, finish, full_logprobs, seconds, metrics
        )

    return generate


def make_prepare(cfg: Architecture, dtype, gather: bool) -> Callable:
    """prepare(params) -> weights as sampling wants them: by layer, in the type of the computation,
    and, where asked, gathered over fsdp, once instead of for every token."""
    compiled = {}

    def prepare(params):
        leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, params))
        if (place := (treedef, *leaves)) not in compiled:
            places = decoder.per_layer_shardings(treedef.unflatten(leaves), cfg)
            places = jax.tree.map(gathered_sharding, places) if gather else places
            compiled[place] = jax.jit(
                partial(decoder.per_layer_params, cfg=cfg, dtype=dtype), out_shardings=places
            )
        return compiled[place](params)

    return prepare


def round_up_to_shards(num_slots: int) -> int:
    """As settings.round_up_to_shards, on the current mesh."""
    return settings.round_up_to_shards(num_slots, axis_size("fsdp"))


def left_padded(rows: Prompts, width: int) -> np.ndarray:
    """Which of `width` columns the rows fill, [P, width] bool, when they end in the last one."""
    return np.arange(width) >= width - np.array([len(row) for row in rows])[:, None]
