"""Ratios of the likelihood of a token, or of its completion, now to that when it was sampled. A
surrogate is a function of them.

A ratio is chosen by name in YAML (`algorithm.ratio`): (log-ratio of each token [R, W], batch) ->
log-ratio [R, W]. Arrays are 0 where no token counts.
"""

from typing import NamedTuple

import jax

from tunix_lite.algorithms.sequences import sequence_mean
from tunix_lite.basics.types import RowBatch

# beyond it a ratio is clipped anyway, and exp stays finite
MAX_LOG_RATIO = 20.0


def token_ratio(log_ratio_RW: jax.Array, batch: RowBatch) -> jax.Array:
    """Each token has a ratio of its own (PPO, GRPO)."""
    return log_ratio_RW


def sequence_ratio(log_ratio_RW: jax.Array, batch: RowBatch) -> jax.Array:
    """A completion has one ratio, the geometric mean of its tokens' ratios, with the gradient of
    that mean (GSPO, arXiv:2507.18071)."""
    return sequence_mean(log_ratio_RW, batch)


def no_ratio(log_ratio_RW: jax.Array, batch: RowBatch) -> jax.Array:
    """The ratio is 1, with the gradient of the token's log-probability (REINFORCE): right for one
    update per rollout."""
    return log_ratio_RW - jax.lax.stop_gradient(log_ratio_RW)


class TokenTerms(NamedTuple):
    """Inputs of a surrogate, [R, W] each; `batch` for sums over a completion.
    Example: on the first update from a rollout every log_ratio is 0 and every ratio 1."""

    ratio: jax.Array  # exp of log_ratio, which is kept within MAX_LOG_RATIO
    log_ratio: jax.Array  # log of the chosen ratio
    advantages: jax.Array
    logprobs: jax.Array  # log-probabilities of the policy now
    old_logprobs: jax.Array  # Batch.old_logprobs
    gap: jax.Array  # logprobs - old_logprobs of each token, whatever the ratio is
    batch: RowBatch
