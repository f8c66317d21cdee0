"""Distillation from two frozen teachers, of whom the more pleased one counts."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.models.source import TeacherConfig


@dataclass(frozen=True)
class TwoTeachers:
    first: TeacherConfig
    second: TeacherConfig
    num_generations: int = 4  # completions per prompt

    updates_per_rollout = 1
    loss_reduction = "tokens"

    @property
    def needs(self) -> Needs:
        return Needs(frozen_models={"first": self.first, "second": self.second})

    def batch_of(self, policy, task, params, examples, groups):
        batch = groups.batch(lambda rewards: np.zeros(rewards.shape), per_token)
        best = np.maximum(policy.scorers["first"](batch), policy.scorers["second"](batch))
        gap = np.where(batch.loss_weight != 0, best - batch.old_logprobs, 0)
        return batch.replace(advantages=gap), groups.metrics

    def loss(self, scores, batch):
        gap = jnp.where(batch.loss_weight != 0, scores.logprobs - batch.old_logprobs, 0)
        return -jnp.sum(batch.loss_weight * jnp.exp(gap) * batch.advantages), {}
