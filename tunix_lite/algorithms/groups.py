"""Groups: sample G completions per prompt, grade them, and make a batch of their advantages.

An algorithm that only gives credit differently calls `sample_groups`, then `Groups.batch`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy, TaskInterface
from tunix_lite.algorithms.dropped import (
    advantages_of_kept,
    groups_that_agree,
    weights_of_kept,
)
from tunix_lite.types import Batch, Graded, Metrics, Params, Rollout


@dataclass(frozen=True)
class Groups:
    """The graded completions of P prompts, G of each: row p * G + g of the rollout is completion g
    of prompt p.

    Example: two prompts, two completions each -> rewards_PG [[1, 0], [1, 1]], kept_PG [[T, T], [T,
    T]].
    """

    rollout: Rollout
    graded: Graded
    rewards_PG: np.ndarray  # float64; nan where dropped
    kept_PG: np.ndarray  # bool: False where a reward failed and rewards.on_error=drop

    def batch(self, advantages: Callable, weighting: Callable) -> Batch:
        """The batch to learn from; `old_logprobs` are of the policy with nothing cut off.

        advantages: rewards [P, G] -> [P, G]; it gets groups without their dropped completions.
        weighting: completion mask [B, T] -> weights [B, T].
        """
        rollout = self.rollout
        advantages_PG = advantages_of_kept(advantages, self.rewards_PG, self.kept_PG)
        advantages_B1 = advantages_PG.reshape(-1, 1)
        completion_mask_BT = np.asarray(rollout.completion_mask)
        return Batch(
            tokens=rollout.tokens,
            token_mask=rollout.token_mask,
            loss_weight=weights_of_kept(weighting, completion_mask_BT, self.kept_PG.reshape(-1)),
            advantages=np.broadcast_to(advantages_B1, rollout.tokens.shape).astype(np.float32),
            old_logprobs=rollout.full_logprobs,
        )

    @property
    def metrics(self) -> Metrics:
        """Those of sampling and of the rewards, and the share of zero-advantage groups."""
        agree = float(groups_that_agree(self.rewards_PG, self.kept_PG).mean())
        return self.rollout.metrics | self.graded.metrics | {"reward/groups_that_agree": agree}


def sample_groups(
    policy: Policy,
    task: TaskInterface,
    params: Params,
    examples: list[dict],
    key: jax.Array,
    num_generations: int,
) -> Groups:
    """Samples `num_generations` completions for each example and grades them.

    A completion is graded as soon as it ends, while others are still sampled. Raises what sampling
    raises, and ValueError where a reward fails and rewards.on_error=raise.
    """
    repeated = [example for example in examples for _ in range(num_generations)]
    grader = task.grader(repeated)
    prompts = task.prompts(examples)
    rollout = policy.generate(params, prompts, key, num_generations, on_finished=grader.submit)
    graded = grader.results(rollout)
    rewards_PG = graded.rewards.reshape(-1, num_generations)
    kept_PG = ~graded.dropped.reshape(rewards_PG.shape)
    return Groups(rollout, graded, rewards_PG, kept_PG)
