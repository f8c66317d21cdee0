"""On-policy distillation: the policy samples, and a frozen teacher says of each token how much
likelier or less likely it would have made it (arXiv:2306.13649, with the token's k1 as reward).

loss = - sum_t w_t rho_t A_t, A_t = teacher_coef (teacher_logprob_t - old_logprob_t)
+ reward_coef A, where A comes from the rewards of the group.

The gap to the teacher is an advantage, without a gradient of its own: in expectation over what the
policy samples, the gradient is that of KL(policy || teacher). As a loss, with its own gradient, it
would have no teacher in it. There is one update per rollout, so that rho_t is 1 where the sampler
and the trainer agree. The KL over the whole vocabulary is not offered: a loss sees the
log-probabilities of the sampled tokens alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.advantages import centre
from tunix_lite.algorithms.algorithm import Policy, TaskInterface
from tunix_lite.algorithms.groups import sample_groups
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.types import Batch, Graded, Metrics, Params, RowBatch, TokenScores

# beyond it exp would overflow
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Distill:
    """Learns from what a teacher finds of its own completions.

    Example: Distill(teacher=TeacherConfig("google/gemma-3-4b-it"), num_generations=4).
    """

    # a tunix_lite.models.source.TeacherConfig, which the run loads
    teacher: Any = None
    num_generations: int = 4  # completions per prompt
    teacher_coef: float = 1.0  # weight of the teacher's advantage, which is in nats
    reward_coef: float = 0.0  # weight of the advantage of the task's rewards
    advantages: Callable = centre  # rewards [P, G] -> advantages [P, G]
    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]

    def __post_init__(self):
        if self.teacher is None:
            raise ValueError(
                "teacher is not given: name its weights with algorithm.teacher.weights=FOLDER"
            )
        if self.teacher_coef <= 0:
            raise ValueError(f"teacher_coef={self.teacher_coef} must be above 0")
        if self.reward_coef < 0:
            raise ValueError(f"reward_coef={self.reward_coef} must not be negative")
        least = 2 if self.reward_coef else 1
        if self.num_generations < least:
            raise ValueError(
                f"num_generations={self.num_generations} must be at least {least}"
                + (": rewards are compared within a group" if least == 2 else "")
            )

    # advantages are those of the policy that sampled, and nothing bounds a ratio
    updates_per_rollout = 1
    needs_reference = False
    needs_demonstrations = False
    loss_reduction = "tokens"

    @property
    def frozen_models(self) -> Mapping[str, Any]:
        """The models that the run loads as policy.scorers, by name."""
        return {"teacher": self.teacher}

    @property
    def formula(self) -> list[str]:
        """What is minimised, in lines for the panel of a run."""
        parts = [f"{self.teacher_coef:g} (teacher_logprob_t - old_logprob_t)"]
        if self.reward_coef:
            parts.append(f"{self.reward_coef:g} A of the rewards")
        return ["loss = - sum_t w_t rho_t A_t", f"A_t = {' + '.join(parts)}"]

    def collect(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        key: jax.Array,
    ) -> tuple[Batch, Metrics, Graded]:
        """Prompts -> completions -> what the teacher finds of them -> the batch to learn from."""
        groups = sample_groups(policy, task, params, examples, key, self.num_generations)
        batch = groups.batch(self.advantages if self.reward_coef else zeros, self.weighting)

        # The teacher's share, in float64; tokens that do not count have none.
        counts_BT = np.asarray(batch.loss_weight) != 0
        teacher_BT = np.float64(policy.scorers["teacher"](batch))
        gap_BT = np.where(counts_BT, teacher_BT - np.float64(batch.old_logprobs), 0.0)
        advantages_BT = self.teacher_coef * gap_BT + self.reward_coef * batch.advantages
        batch = batch.replace(advantages=advantages_BT.astype(np.float32))
        found = {
            "train/teacher_kl": float(-gap_BT.sum() / max(counts_BT.sum(), 1)),
            "train/teacher_gap_max": float(np.abs(gap_BT).max()),
        }
        return batch, groups.metrics | found, groups.graded

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The loss and its metrics, sums. Arrays are [R, W]."""
        counts_RW = batch.loss_weight != 0
        gap_RW = jnp.where(counts_RW, scores.logprobs - batch.old_logprobs, 0.0)
        ratio_RW = jnp.exp(jnp.clip(gap_RW, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        loss = -jnp.sum(batch.loss_weight * ratio_RW * batch.advantages)
        return loss, {"train/sampler_gap": jnp.sum(batch.loss_weight * jnp.abs(gap_RW))}


def zeros(rewards_PG: np.ndarray) -> np.ndarray:
    """Advantages of rewards that do not count; a group of one has no others to compare with."""
    return np.zeros(np.shape(rewards_PG))
