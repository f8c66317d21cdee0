"""The policy: what it would say, and what it thinks of what was said."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from tunix_lite.models import decoder
from tunix_lite.models.decoder import ModelConfig
from tunix_lite.parallel.mesh import constrain

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}  # of the computation, as training.mixed_precision names it
LOGITS_PER_CHUNK = 2**24  # elements of float32 scores held at once per call: 64 MiB


@dataclass(frozen=True)
class Policy:
    """All that an algorithm may ask of a model. Tests and other engines supply their own.

    generate(params, prompts, key, num_generations, temperature=..., on_finished=None) -> Rollout may call
    on_finished(row, tokens) when a completion has ended; what it does not call it for is judged at the end.
    `params` are what the policy acts with; under LoRA, the frozen base with its adapters attached.
    """

    generate: Callable  # as above
    logprobs: Callable  # (params, tokens, token_mask) -> [B, T]
    ref_logprobs: Callable | None = None  # (tokens, token_mask) -> [B, T]; None: there is no reference


def make_policy(cfg: ModelConfig, generate, temperature: float, dtype=jnp.float32, reference=None) -> Policy:
    """A decoder as a Policy. `reference` are the frozen params of the KL term, or None."""
    logprobs = jax.jit(partial(token_logprobs, cfg=cfg, temperature=temperature, dtype=dtype))
    ref_logprobs = None if reference is None else partial(logprobs, reference)
    return Policy(generate, logprobs, ref_logprobs)


def token_logprobs(params, tokens_BT, token_mask_BT, *, cfg: ModelConfig, temperature: float = 1.0, dtype=jnp.float32):
    """log p(tokens[b, t] | tokens[b, :t]) in float32, [B, T]; position 0, which nothing predicts, is 0.

    The scores [B, T, V] never exist: they are made, and in the backward pass remade, a few columns at a time.
    """
    hidden_BTD = decoder.forward(params, cfg, tokens_BT, token_mask_BT, dtype)[:, :-1]
    targets_BT = tokens_BT[:, 1:]
    B, T = targets_BT.shape
    width = max(1, min(T, LOGITS_PER_CHUNK // (B * cfg.vocab_size)))
    chunks = -(-T // width)
    pad = ((0, 0), (0, chunks * width - T))
    hidden = jnp.pad(hidden_BTD, (*pad, (0, 0))).reshape(B, chunks, width, -1).swapaxes(0, 1)
    targets = jnp.pad(targets_BT, pad).reshape(B, chunks, width).swapaxes(0, 1)

    @jax.checkpoint
    def one_chunk(_, part):
        hidden, targets = part
        scores = constrain(decoder.logits(params, cfg, hidden) / temperature, "batch", "seq", "vocab")
        return None, pick(scores, targets) - jax.nn.logsumexp(scores, axis=-1)

    _, logprobs = jax.lax.scan(one_chunk, None, (hidden, targets))
    logprobs_BT = logprobs.swapaxes(0, 1).reshape(B, -1)[:, :T]
    return jnp.pad(logprobs_BT, ((0, 0), (1, 0)))


def pick(scores, targets):
    """scores[..., targets], written as a masked sum so that a vocabulary divided over tp needs no gather."""
    vocabulary = jnp.arange(scores.shape[-1])
    return jnp.sum(jnp.where(vocabulary == targets[..., None], scores, 0.0), axis=-1)
