"""Learn from the best: sample a group, then make its best completions likely. loss = - sum_t w_t
log p(token_t)."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.basics.types import Batch


@dataclass(frozen=True)
class BestOfGroup:
    """Settings are fields; what a run must know of any algorithm are the other three."""

    num_generations: int = 8  # completions per prompt, the group
    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]

    # optimizer updates made from one batch
    updates_per_rollout = 1
    # nothing special: no KL term, so no second copy of the model, and completions are sampled. Its
    # loss reads neither advantages nor old log-probabilities.
    needs = Needs(fields=())
    # how the loss adds up: over tokens alone, so that they may be packed into rows
    loss_reduction = "tokens"

    def batch_of(self, policy, task, params, examples, groups):
        """Graded completions of the examples -> (batch to learn from, metrics)."""
        rollout = groups.rollout
        rewards_PG = groups.rewards_PG
        best_PG = (rewards_PG == rewards_PG.max(axis=1, keepdims=True)) & (
            rewards_PG > rewards_PG.min(axis=1)[:, None]
        )
        learned_BT = np.asarray(rollout.completion_mask) & best_PG.reshape(-1, 1)
        batch = Batch(
            tokens=rollout.tokens,
            token_mask=rollout.token_mask,
            loss_weight=self.weighting(learned_BT),
        )
        return batch, groups.metrics | {"reward/best_share": float(best_PG.mean())}

    def loss(self, scores, batch):
        """A sum weighted by loss_weight, so that micro-batches and shards may add it up; and its
        metrics, sums too."""
        return -jnp.sum(batch.loss_weight * scores.logprobs), {}
