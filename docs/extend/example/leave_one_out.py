"""REINFORCE with a leave-one-out baseline (arXiv:2402.14740): what the others of a group got."""

from dataclasses import dataclass

import jax.numpy as jnp

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.algorithms.weighting import per_token


def beyond_the_others(rewards_PG):
    """Each reward less the mean of the other G - 1 rewards of its group."""
    others_PG = rewards_PG.sum(axis=1, keepdims=True) - rewards_PG
    return rewards_PG - others_PG / (rewards_PG.shape[1] - 1)


@dataclass(frozen=True)
class LeaveOneOut:
    num_generations: int = 8
    updates_per_rollout = 1
    needs = Needs()
    loss_reduction = "tokens"

    def batch_of(self, policy, task, params, examples, groups):
        return groups.batch(beyond_the_others, per_token), groups.metrics

    def loss(self, scores, batch):
        return -jnp.sum(batch.loss_weight * batch.advantages * scores.logprobs), {}
