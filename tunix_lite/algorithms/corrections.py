"""Weights that correct for the slightly different probabilities that sampler and trainer give a
token, chosen by name in YAML (`algorithm.correction`).

A correction is (log_weight [B, T], mask [B, T]) -> weights [B, T] in float64, once per rollout on
the host. log_weight = log-probability by the trainer - by the sampler, both of the policy that
sampled. The gain of a token is multiplied by its weight; the loss weights, and with them the
denominator of the loss, stay as they are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.ratios import MAX_LOG_RATIO, TokenTerms
from tunix_lite.algorithms.sequences import sequence_mean
from tunix_lite.algorithms.surrogates import Gain
from tunix_lite.basics.types import Batch, Metrics

# the stream of a batch that holds the weights
STREAM_NAME = "correction"


def truncate_tokens(
    log_weight_BT: np.ndarray, mask_BT: np.ndarray, cap: float = 2.0
) -> np.ndarray:
    """min(w, cap) (truncated importance sampling, TIS)."""
    _check_above("cap", cap, 0)
    return np.minimum(np.exp(log_weight_BT), cap)


def mask_tokens(
    log_weight_BT: np.ndarray, mask_BT: np.ndarray, low: float = 0.5, high: float = 5.0
) -> np.ndarray:
    """w where low <= w <= high, else 0 (IcePop, arXiv:2510.18855)."""
    _check_above("high", high, low)
    weight_BT = np.exp(log_weight_BT)
    return np.where((weight_BT >= low) & (weight_BT <= high), weight_BT, 0.0)


def mask_sequences(
    log_weight_BT: np.ndarray, mask_BT: np.ndarray, low: float = 0.99, high: float = 1.01
) -> np.ndarray:
    """1 for a completion whose geometric mean of w is within [low, high], else 0
    (arXiv:2512.23075)."""
    _check_above("high", high, low)
    lengths_B1 = np.maximum(mask_BT.sum(axis=1, keepdims=True), 1)
    sums_B1 = np.where(mask_BT, log_weight_BT, 0.0).sum(axis=1, keepdims=True)
    # A mean, since a product over tokens would grow with the length, and a fixed bound on it would
    # leave out long completions.
    mean_B1 = np.exp(sums_B1 / lengths_B1)
    is_kept_B1 = (mean_B1 >= low) & (mean_B1 <= high)
    return np.broadcast_to(is_kept_B1, mask_BT.shape).astype(np.float64)


def _check_above(name: str, value: float, least: float) -> None:
    if value <= least:
        raise ValueError(f"correction.{name}={value} must be above {least}")


def corrected(
    correction: Callable[..., np.ndarray] | None, batch: Batch, sampler_BT: np.ndarray
) -> tuple[Batch, Metrics]:
    """Adds the weights of the correction to the batch as a stream, and measures how far trainer and
    sampler are apart. Batch.old_logprobs are the trainer's; correction: None for the metrics
    alone."""
    mask_BT = np.asarray(batch.loss_weight) != 0
    gap_BT = np.float64(batch.old_logprobs) - np.float64(sampler_BT)
    # exp of the gap must stay finite, or one odd token would spoil the whole batch
    gap_BT = np.clip(np.where(mask_BT, gap_BT, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # a batch may have nothing to learn from
    count = max(int(mask_BT.sum()), 1)
    metrics = {
        "sampler/logprob_gap": float(np.abs(gap_BT).sum() / count),
        "sampler/logprob_gap_max": float(np.abs(gap_BT).max()),
    }
    if correction is None:
        return batch, metrics
    weight_BT = np.where(mask_BT, correction(gap_BT, mask_BT), 0.0)
    metrics |= {
        "sampler/weight_mean": float(weight_BT.sum() / count),
        "sampler/weight_max": float(weight_BT.max()),
        "sampler/masked": float((mask_BT & (weight_BT == 0)).sum() / count),
    }
    streams = {STREAM_NAME: weight_BT.astype(np.float32)}
    return batch.replace(streams=batch.streams | streams), metrics


# ---- in the loss


def corrected_gain(
    off_policy_delta: float | None, terms: TokenTerms, gain: Gain
) -> tuple[Gain, Metrics]:
    """Multiplies the gain by the weights of the batch, without completions that the policy has left
    (off-policy sequence mask, DeepSeek-V3.2, arXiv:2512.02556); and returns the share of the
    latter."""
    batch = terms.batch
    metrics = {}
    if STREAM_NAME in batch.streams:
        gain = gain._replace(gain=gain.gain * batch.streams[STREAM_NAME])
    if off_policy_delta is not None:
        # a completion with A < 0 whose mean of old_logprob - logprob is above the limit
        away_RW = sequence_mean(jax.lax.stop_gradient(-terms.gap), batch)
        is_left_RW = (terms.advantages < 0) & (away_RW > off_policy_delta)
        gain = gain._replace(gain=jnp.where(is_left_RW, 0.0, gain.gain))
        metrics["train/off_policy_masked"] = jnp.sum(batch.loss_weight * is_left_RW)
    return gain, metrics
