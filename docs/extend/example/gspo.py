"""GSPO (arXiv:2507.18071): a completion has one ratio, the geometric mean of its tokens' ratios."""

from dataclasses import dataclass

import jax.numpy as jnp

from tunix_lite.algorithms.advantages import standardise
from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.algorithms.sequences import sequence_mean
from tunix_lite.algorithms.weighting import per_sequence


@dataclass(frozen=True)
class GSPO:
    num_generations: int = 8
    updates_per_rollout: int = 1
    clip_low: float = 3e-4  # a mean over tokens hardly moves: these are the paper's
    clip_high: float = 4e-4
    needs = Needs()
    loss_reduction = "sequences"

    def batch_of(self, policy, task, params, examples, groups):
        return groups.batch(standardise, per_sequence), groups.metrics

    def loss(self, scores, batch):
        ratio = jnp.exp(sequence_mean(scores.logprobs - batch.old_logprobs, batch))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        gain = jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)
        return -jnp.sum(batch.loss_weight * gain), {}
