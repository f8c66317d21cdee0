"""The gain of each token in the loss: the surrogate, corrected, and what is logged of both."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.corrections import STREAM_NAME
from tunix_lite.algorithms.ratios import MAX_LOG_RATIO, TokenTerms
from tunix_lite.algorithms.sequences import sequence_mean
from tunix_lite.algorithms.surrogates import Bounds, Gain, takes_bounds
from tunix_lite.types import Max, Metrics, smallest


def gain_of(surrogate: Callable, terms: TokenTerms, bounds: Bounds) -> Gain:
    """What the surrogate gives."""
    return surrogate(terms, bounds) if takes_bounds(surrogate) else surrogate(terms)


def ratio_metrics(surrogate: Callable, terms: TokenTerms, bounds: Bounds, gain: Gain) -> Metrics:
    """How far the policy is from the one that sampled, and what the surrogate made of it."""
    weight_RW = terms.batch.loss_weight
    gap_RW = jnp.abs(terms.gap)
    metrics = {
        "train/sampler_gap": jnp.sum(weight_RW * gap_RW),
        "train/sampler_gap_max": Max(jax.lax.stop_gradient(jnp.max(gap_RW))),
    }
    metrics |= distance_metrics(terms)
    if takes_bounds(surrogate):
        is_outside_RW = terms.ratio != bounds.clip(terms.ratio)
        metrics["train/ratio_outside_clip"] = jnp.sum(weight_RW * is_outside_RW)
    if gain.limited is not None:
        is_low_RW = gain.limited & (terms.ratio < 1)
        is_high_RW = gain.limited & (terms.ratio > 1)
        metrics["train/clipped_low"] = jnp.sum(weight_RW * is_low_RW)
        metrics["train/clipped_high"] = jnp.sum(weight_RW * is_high_RW)
    return metrics


def distance_metrics(terms: TokenTerms) -> Metrics:
    """The ratio of the tokens that count, and the gap as NeMo-RL and prime-rl measure it."""
    weight_RW = terms.batch.loss_weight
    counts_RW = weight_RW != 0
    ratio_RW = jax.lax.stop_gradient(terms.ratio)
    gap_RW = jnp.clip(jax.lax.stop_gradient(terms.gap), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3_RW = jnp.expm1(gap_RW) - gap_RW
    return {
        "train/ratio_mean": jnp.sum(weight_RW * ratio_RW),
        "train/ratio_min": smallest(jnp.min(jnp.where(counts_RW, ratio_RW, jnp.inf))),
        "train/ratio_max": Max(jnp.max(jnp.where(counts_RW, ratio_RW, -jnp.inf))),
        "train/sampler_mult_prob_error": jnp.sum(weight_RW * jnp.exp(jnp.abs(gap_RW))),
        "train/sampler_k3": jnp.sum(weight_RW * k3_RW),
    }


def corrected_gain(
    off_policy_delta: float | None, terms: TokenTerms, gain: Gain
) -> tuple[Gain, Metrics]:
    """The gain with the weights of the batch, and without completions that the policy has left; and
    the share of the latter."""
    batch = terms.batch
    metrics: Metrics = {}
    if STREAM_NAME in batch.streams:
        gain = gain._replace(gain=gain.gain * batch.streams[STREAM_NAME])
    if off_policy_delta is not None:
        is_left_RW = left_behind(terms, off_policy_delta)
        gain = gain._replace(gain=jnp.where(is_left_RW, 0.0, gain.gain))
        metrics["train/off_policy_masked"] = jnp.sum(batch.loss_weight * is_left_RW)
    return gain, metrics


def left_behind(terms: TokenTerms, delta: float) -> jax.Array:
    """[R, W] bool: a completion with A < 0 whose mean of old_logprob - logprob is above `delta`
    (off-policy sequence mask, DeepSeek-V3.2, arXiv:2512.02556)."""
    away_RW = sequence_mean(jax.lax.stop_gradient(-terms.gap), terms.batch)
    return (terms.advantages < 0) & (away_RW > delta)
