"""GSPO (arXiv:2507.18071): a completion has one ratio, the geometric mean of its tokens', and is
clipped as a whole."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sequences import sequence_mean
from tunix_lite.algorithms.weighting import per_sequence


@dataclass(frozen=True)
class GSPO:
    """loss = - sum_t w_t min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), log s the mean of the
    tokens' log-ratios."""

    num_generations: int = 8  # completions per prompt, the group
    updates_per_rollout: int = 1  # optimizer updates made from one batch
    weighting: Callable = per_sequence  # completion mask [B, T] -> loss weights [B, T]
    clip_low: float = 3e-4  # a mean over tokens hardly moves: these are the paper's
    clip_high: float = 4e-4

    needs_reference = False
    needs_demonstrations = False
    # how the loss adds up: within a completion, by sequence_mean
    reduces = "sequences"

    def collect(self, *arguments):
        return GRPO(self.num_generations, weighting=self.weighting).collect(*arguments)

    def loss(self, scores, batch):
        ratio_BT = jnp.exp(sequence_mean(scores.logprobs - batch.old_logprobs, batch))
        clipped_BT = jnp.clip(ratio_BT, 1 - self.clip_low, 1 + self.clip_high)
        gain_BT = jnp.minimum(ratio_BT * batch.advantages, clipped_BT * batch.advantages)
        return -jnp.sum(batch.loss_weight * gain_BT), {}
