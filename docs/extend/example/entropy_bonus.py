"""Policy gradient with an entropy bonus: loss = - sum_t w_t (rho_t A + entropy_coef * H_t).

For one update per rollout: the ratio rho_t is not clipped.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from tunix_lite.algorithms.advantages import standardise
from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.algorithms.weighting import per_token


@dataclass(frozen=True)
class EntropyBonus:
    num_generations: int = 8
    entropy_coef: float = 0.01  # per nat of the distribution that a token is drawn from
    updates_per_rollout = 1
    needs = Needs()
    loss_reduction = "tokens"

    def batch_of(self, policy, task, params, examples, groups):
        return groups.batch(standardise, per_token), groups.metrics

    def loss(self, scores, batch):
        ratio = jnp.exp(scores.logprobs - batch.old_logprobs)
        gain = ratio * batch.advantages + self.entropy_coef * scores.entropy
        return -jnp.sum(batch.loss_weight * gain), {}
