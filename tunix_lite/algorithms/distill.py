"""On-policy distillation: the policy samples, and a frozen teacher scores each of its tokens
(arXiv:2306.13649).

divergence=token: the gap of the sampled token is its advantage,

loss = - sum_t w_t rho_t A_t, A_t = teacher_coef (teacher_logprob_t - old_logprob_t)
+ reward_coef A, where A comes from the rewards of the group.

The gap has no gradient of its own: in expectation over what the policy samples, the gradient is
that of KL(policy || teacher). As a loss, with its own gradient, it would have no teacher in it.
There is one update per rollout, so that rho_t is 1 where the sampler and the trainer agree.

Any other divergence compares the two distributions that the token could have been drawn from, over
the whole vocabulary, and has a gradient of its own (models/divergence.py):

loss = sum_t w_t (teacher_coef D_t - rho_t reward_coef A)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.advantages import centre
from tunix_lite.algorithms.algorithm import (
    Needs,
    Policy,
    TaskInterface,
    TeacherComparison,
    refuse,
)
from tunix_lite.algorithms.groups import Groups
from tunix_lite.algorithms.ratios import MAX_LOG_RATIO
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.basics.errors import check_choices, check_numbers
from tunix_lite.basics.types import (
    Batch,
    Metrics,
    Params,
    Prompts,
    RowBatch,
    TokenScores,
    left_padded,
    realigned,
)

# comparisons: of the sampled token alone, or of two distributions
DIVERGENCES = ("token", "reverse", "forward", "jensen_shannon")


@dataclass(frozen=True)
class Distill:
    """Learns from a teacher's scores of its own completions.
    Example: Distill(teacher=TeacherConfig("google/gemma-3-4b-it"), num_generations=4)."""

    # conf/algorithm/distill.yaml explains each setting
    teacher: Any = None
    num_generations: int = 4
    divergence: str = "token"
    mix: float = 0.5
    teacher_coef: float = 1.0
    reward_coef: float = 0.0
    advantages: Callable = centre  # rewards [P, G] -> advantages [P, G]
    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]

    def __post_init__(self):
        check_numbers(self, "teacher_coef", lambda x: x > 0, "must be above 0")
        check_numbers(self, "reward_coef", lambda x: x >= 0, "must not be negative")
        check_choices(self, {"divergence": DIVERGENCES})
        check_numbers(self, "num_generations", lambda x: x >= 1, "must be at least 1")
        problems = {
            "teacher is not given: name its weights with algorithm.teacher.weights=FOLDER": (
                self.teacher is None
            ),
            f"mix={self.mix} changes nothing with divergence={self.divergence}; it belongs to "
            "divergence=jensen_shannon": (
                self.divergence != "jensen_shannon" and self.mix != 0.5
            ),
            f"mix={self.mix} must be between 0 and 1; 0 would be divergence=forward, and 1 "
            "divergence=reverse": not 0 < self.mix < 1,
            f"num_generations={self.num_generations} must be at least 2: rewards are compared "
            "within a group": self.reward_coef > 0 and self.num_generations < 2,
        }
        refuse(problems)

    # advantages are those of the policy that sampled, and nothing bounds a ratio
    updates_per_rollout = 1
    loss_reduction = "tokens"

    @property
    def needs(self) -> Needs:
        fresh = None
        if self.divergence == "token":
            # the gradient of the gap needs the gap of the weights that learn
            fresh = (
                "algorithm.divergence=token compares the teacher with the weights that sampled; "
                "set algorithm.divergence=reverse"
            )
        return Needs(
            frozen_models={"teacher": self.teacher},
            comparison=self.comparison,
            fresh=fresh,
            held_out_loss="objective",
        )

    @property
    def comparison(self) -> TeacherComparison | None:
        """Comparison of policy and teacher; None where only the sampled token counts."""
        if self.divergence == "token":
            return None
        return TeacherComparison("teacher", self.divergence, self.mix)

    def batch_of(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        groups: Groups,
    ) -> tuple[Batch, Metrics]:
        """Completions -> what the teacher finds of them -> the batch to learn from."""
        # rewards may not count: a group of one has no others to compare with
        batch = groups.batch(
            self.advantages if self.reward_coef else np.zeros_like, self.weighting
        )
        # The teacher may read the completions after prompts of its own.
        seen = None
        settings = self.teacher
        if getattr(settings, "prompt", None) is not None:
            prompts = task.prompts_with(examples, settings.prompt, settings.max_prompt_length)
            of_each = [prompt for prompt in prompts for _ in range(self.num_generations)]
            first = int(groups.rollout.completion_mask.any(axis=0).argmax())
            seen = after_prompts(batch, first, of_each)
        # the run stores what the teacher finds of them, and the update compares
        if self.comparison is not None:
            batch = batch.replace(advantages=np.float32(self.reward_coef) * batch.advantages)
            return batch.replace(seen=seen), groups.metrics

        # The teacher's share, in float64; tokens that do not count have none.
        counts_BT = np.asarray(batch.loss_weight) != 0
        teacher_BT = np.float64(policy.scorers["teacher"](batch if seen is None else seen))
        if seen is not None:
            teacher_BT = realigned(teacher_BT, seen, batch)
        gap_BT = np.where(counts_BT, teacher_BT - np.float64(batch.old_logprobs), 0.0)
        advantages_BT = self.teacher_coef * gap_BT + self.reward_coef * batch.advantages
        batch = batch.replace(advantages=advantages_BT.astype(np.float32))
        metrics = {
            "train/teacher_kl": float(-gap_BT.sum() / max(counts_BT.sum(), 1)),
            "train/teacher_gap_max": float(np.abs(gap_BT).max()),
        }
        return batch, groups.metrics | metrics

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The loss and its metrics, sums. Arrays are [R, W]."""
        counts_RW = batch.loss_weight != 0
        gap_RW = jnp.where(counts_RW, scores.logprobs - batch.old_logprobs, 0.0)
        # 1 at the first update, with the gradient of the log-probability
        ratio_RW = jnp.exp(jnp.clip(gap_RW, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        loss = -jnp.sum(batch.loss_weight * ratio_RW * batch.advantages)
        metrics = {"train/sampler_gap": jnp.sum(batch.loss_weight * jnp.abs(gap_RW))}
        # the divergence of the distributions, with a gradient of its own
        if self.comparison is not None:
            apart = jnp.sum(batch.loss_weight * scores.divergence)
            loss += self.teacher_coef * apart
            metrics["train/teacher_divergence"] = apart
        return loss, metrics


def after_prompts(batch: Batch, first: int, prompts: Prompts) -> Batch:
    """The completions of a batch after other prompts, one for each sequence: [B, L + T - first]. A
    prompt may have the expected answer: the same weights are a better policy with it
    (arXiv:2601.19897).

    first: the column in which completions begin. prompts: as token ids; L of them are in the
    longest. Only tokens, their mask and their weights are in the batch.
    Example: 5 6 | 7 8 after the prompt 9 -> 9 | 7 8, of the same weights."""
    # prompts end where completions begin, so padding is on the left
    tokens, mask = left_padded(prompts, max(map(len, prompts)))
    weight = np.zeros(tokens.shape, np.float32)

    def joined(before: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.concatenate([before, np.asarray(values)[:, first:]], axis=1)

    return Batch(
        tokens=joined(tokens, batch.tokens),
        token_mask=joined(mask, batch.token_mask),
        loss_weight=joined(weight, batch.loss_weight),
    )
