"""Sampling completions: each prompt is read once, then all rows decode together, one token a step.

Decoding runs in jitted chunks with a fixed number of steps; between two chunks the host looks whether every row has
finished. (A loop that asks after every token would make a GPU wait for the host after every token.)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.models import decoder
from tunix_lite.models.decoder import ModelConfig
from tunix_lite.parallel.mesh import constrain, gathered
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import sampling
from tunix_lite.types import Prompts, Rollout

STEPS_PER_CHUNK = 16  # at most; the length is divided into chunks as equal as can be


@dataclass(frozen=True)
class Generation:
    """How completions are sampled."""

    max_prompt_length: int = 32  # tokens; a longer prompt is an error
    max_new_tokens: int = 64  # tokens of a completion, the end-of-sequence token included
    temperature: float = 1.0  # scores are divided by it, in sampling and in scoring alike; 0: the best token
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all. Not while training
    top_p: float = 1.0  # draw from the likeliest tokens that hold this much probability. Not while training

    def __post_init__(self):
        for name in ("max_prompt_length", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.temperature < 0 or self.top_k < 0:
            raise ValueError(f"temperature={self.temperature} and top_k={self.top_k} must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")


@flax.struct.dataclass
class Decoding:
    """The rows being decoded, S = prompt + completion columns wide. Donated from chunk to chunk."""

    tokens: jax.Array  # [B, S]
    token_mask: jax.Array  # [B, S]
    logprobs: jax.Array  # [B, S]
    lengths: jax.Array  # [B] real tokens so far
    running: jax.Array  # [B] not finished, and not out of length
    finished: jax.Array  # [B] drew an end-of-sequence token
    keys: jax.Array  # [B]
    cache: Any
    column: jax.Array  # the column that is drawn next


def make_generate(cfg: ModelConfig, generation: Generation, eos_ids: tuple[int, ...], pad_id: int, dtype=jnp.float32):
    """generate(params, prompts, key, num_generations=1, temperature=..., first=0) -> Rollout of P * G rows.

    Row p * G + g is generation g of prompt p. The same key, prompt, g and position draw the same token, whatever
    the mesh, the number of other rows or their order. `first` is the index of the first prompt, where the prompts are
    part of more.
    """
    stream = make_stream(cfg, generation, eos_ids, pad_id, dtype)
    end = generation.max_prompt_length + generation.max_new_tokens

    @jax.jit
    def as_rollout(state: Decoding) -> Rollout:
        tokens, mask, logprobs = (x[:, :end] for x in (state.tokens, state.token_mask, state.logprobs))
        completion = mask & (jnp.arange(end) >= generation.max_prompt_length)
        return Rollout(*(constrain(x, "batch", "seq") for x in (tokens, mask, completion, logprobs)), state.finished)

    def generate(params, prompts: Prompts, key, num_generations=1, temperature=generation.temperature, first=0):
        for state in stream(params, prompts, key, num_generations, temperature, first):
            last = state
        return as_rollout(last)

    return generate


def make_stream(
    cfg: ModelConfig,
    generation: Generation,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype=jnp.float32,
    steps_per_chunk: int = STEPS_PER_CHUNK,
):
    """stream(params, prompts, key, num_generations=1, temperature=...) yields a Decoding after every chunk of steps.

    What was yielded is gone with the next: look at it at once.
    """
    width, new = generation.max_prompt_length, generation.max_new_tokens
    num_chunks = max(1, -(-(new - 1) // steps_per_chunk))
    chunk = -(-(new - 1) // num_chunks)  # the first token comes out of prefill
    columns = width + 1 + num_chunks * chunk

    def put_down(state: Decoding, scores_BV, temperature) -> Decoding:
        """Draw the token of the current column for every row, and write it down for those still running."""
        t = state.column
        drawn_B, logprobs_B = sampling.draw(
            scores_BV, state.keys, t - width, temperature, generation.top_k, generation.top_p
        )
        live_B = state.running
        ended_B = live_B & jnp.isin(drawn_B, jnp.asarray(eos_ids))
        return state.replace(
            tokens=state.tokens.at[:, t].set(jnp.where(live_B, drawn_B, pad_id)),
            token_mask=state.token_mask.at[:, t].set(live_B),
            logprobs=state.logprobs.at[:, t].set(jnp.where(live_B, logprobs_B, 0.0)),
            lengths=state.lengths + live_B,
            running=live_B & ~ended_B & (t + 1 < width + new),
            finished=state.finished | ended_B,
            column=t + 1,
        )

    @partial(jax.jit, static_argnames="num_generations")
    def prefill(layered, prompts: Prompts, key, temperature, num_generations, first):
        P = prompts.tokens.shape[0]
        mask_PS = jnp.pad(prompts.token_mask, ((0, 0), (0, columns - width)))
        positions = jnp.maximum(jnp.cumsum(prompts.token_mask, axis=1) - 1, 0)
        cache = kv_cache.empty_cache(cfg, P, columns, layered["embed"].dtype)
        hidden, cache = decoder.forward_cached(layered, cfg, prompts.tokens, positions, mask_PS, cache, 0)
        repeat = partial(jnp.repeat, repeats=num_generations, axis=0)
        B = P * num_generations
        state = Decoding(
            tokens=repeat(jnp.pad(prompts.tokens, ((0, 0), (0, columns - width)), constant_values=pad_id)),
            token_mask=repeat(mask_PS),
            logprobs=jnp.zeros((B, columns)),
            lengths=repeat(prompts.token_mask.sum(axis=1)),
            running=jnp.ones(B, bool),
            finished=jnp.zeros(B, bool),
            keys=sampling.row_keys(key, P, num_generations, first),
            cache=kv_cache.repeat_rows(cache, num_generations),
            column=jnp.int32(width),
        )
        return put_down(state, repeat(decoder.logits(layered, cfg, hidden[:, -1])), temperature)

    def decode_step(_, carry):
        state, layered, temperature = carry
        newest = state.column - 1
        tokens_B1 = jax.lax.dynamic_slice_in_dim(state.tokens, newest, 1, axis=1)
        positions_B1 = jnp.maximum(state.lengths - 1, 0)[:, None]
        hidden, cache = decoder.forward_cached(
            layered, cfg, tokens_B1, positions_B1, state.token_mask, state.cache, newest
        )
        scores_BV = constrain(decoder.logits(layered, cfg, hidden[:, 0]), "batch", "vocab")
        return put_down(state.replace(cache=cache), scores_BV, temperature), layered, temperature

    @partial(jax.jit, donate_argnums=0)
    def decode_chunk(state: Decoding, layered, temperature) -> Decoding:
        return jax.lax.fori_loop(0, chunk, decode_step, (state, layered, temperature))[0]

    compiled = {}

    def prepare(params):
        """Weights as sampling wants them: by layer, and gathered over fsdp once instead of for every token."""
        leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, params))
        if (place := (treedef, *leaves)) not in compiled:
            by_layer = decoder.by_layer(
                treedef.unflatten(leaves), cfg, lambda s, _: NamedSharding(s.mesh, P(*s.spec[1:]))
            )
            compiled[place] = jax.jit(
                partial(decoder.per_layer, cfg=cfg, dtype=dtype), out_shardings=jax.tree.map(gathered, by_layer)
            )
        return compiled[place](params)

    def stream(params, prompts: Prompts, key, num_generations=1, temperature=generation.temperature, first=0):
        layered = prepare(params)
        temperature = jnp.float32(temperature)
        state = prefill(layered, prompts, key, temperature, num_generations, first)
        yield state
        for _ in range(num_chunks if chunk else 0):
            if not bool(state.running.any()):
                break
            state = decode_chunk(state, layered, temperature)
            yield state

    return stream
