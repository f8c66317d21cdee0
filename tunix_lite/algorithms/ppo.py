"""Proximal Policy Optimisation with a critic (PPO, arXiv:1707.06347), as it is used for language
models (arXiv:2203.02155).

loss = - sum_t w_t min(rho_t A_t, clip(rho_t) A_t) - entropy_coef sum_t w_t H_t
       + value_coef / 2 sum_t w_t max((V_t - R_t)^2, (V'_t - R_t)^2)
V'_t = old V_t + clip(V_t - old V_t, - value_clip, value_clip)

A and R come from algorithms/gae.py, with the values that the critic had when the completions were
sampled. The reward of a completion belongs to its last token, and with kl_coef each token pays
kl_coef (old_logprob - ref_logprob). rho_t and w_t are those of GRPO.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import Critic, Needs, Policy, TaskInterface, refuse
from tunix_lite.algorithms.gae import explained_variance, gae, whitened
from tunix_lite.algorithms.groups import Groups
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.basics.errors import check_numbers
from tunix_lite.basics.types import (
    Batch,
    Metrics,
    Params,
    RowBatch,
    TokenScores,
)

# the streams of its batches: R, and V of the critic before the update
STREAMS = ("returns", "old_values")
CRITICS = ("shared", "own")


@dataclass(frozen=True)
class PPO:
    """Learns from advantages over what a critic expects, token by token, and trains the critic.
    Example: PPO(critic="own", gae_lambda=1.0, kl_coef=0.01, critic_warmup=20)."""

    # conf/algorithm/ppo.yaml explains each setting
    num_generations: int = 8
    updates_per_rollout: int = 1
    mini_batches: int = 1
    critic: str = "shared"
    critic_learning_rate: float | None = None
    critic_warmup: int = 0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    bootstrap_truncated: bool = False
    whiten: bool = True
    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    value_coef: float = 0.5
    value_clip: float | None = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self):
        counts = "num_generations updates_per_rollout mini_batches"
        check_numbers(self, counts, lambda x: x >= 1, "must be at least 1")
        shares = "gamma gae_lambda"
        check_numbers(self, shares, lambda x: 0 <= x <= 1, "must be between 0 and 1")
        # with value_coef=0 no critic would learn
        positive = "critic_learning_rate value_coef value_clip"
        check_numbers(self, positive, lambda x: x > 0, "must be above 0")
        others = "critic_warmup clip_low clip_high kl_coef entropy_coef"
        check_numbers(self, others, lambda x: x >= 0, "must be 0 or more")
        updates = f"updates_per_rollout={self.updates_per_rollout}"
        problems = {
            f"critic={self.critic} must be shared or own": self.critic not in CRITICS,
            f"{updates} must be a multiple of mini_batches={self.mini_batches}": (
                self.updates_per_rollout % self.mini_batches > 0
            ),
        }
        refuse(problems)

    # the loss adds up tokens and nothing else
    loss_reduction = "tokens"

    @property
    def needs(self) -> Needs:
        return Needs(
            reference=self.kl_coef > 0,
            critic=Critic(self.critic == "own", self.critic_learning_rate, self.critic_warmup),
            fields=("advantages", "old_logprobs"),
            streams=STREAMS,
            mini_batches=self.mini_batches,
            fresh="the values of PPO are right only for tokens of the current weights; set "
            "rollout.max_staleness=0",
        )

    def batch_of(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        groups: Groups,
    ) -> tuple[Batch, Metrics]:
        """Graded completions -> values -> advantages -> the batch to learn from. params: of both
        networks."""
        rollout = groups.rollout
        drawn_BT = rollout.completion_mask

        # Where the limit cut a completion off, its last token is no step to learn from: its value,
        # of the state before it, stands for all that would have followed.
        steps_BT = drawn_BT
        if self.bootstrap_truncated:
            last_BT = np.cumsum(drawn_BT, axis=1) == drawn_BT.sum(axis=1, keepdims=True)
            is_cut_B1 = ~rollout.finished[:, None]
            steps_BT = drawn_BT & ~(last_BT & is_cut_B1)
        groups = replace(groups, rollout=rollout.replace(completion_mask=steps_BT))
        batch = groups.batch(np.zeros_like, self.weighting, self.mini_batches)

        # What the critic expects at every token that was drawn, and what the reference finds of it.
        read = batch.replace(loss_weight=drawn_BT.astype(np.float32))
        values_BT = np.float64(policy.values(params, read))
        rewards_BT = token_rewards(groups, steps_BT)
        metrics = dict(groups.metrics)
        if self.kl_coef:
            gap_BT = np.float64(batch.old_logprobs) - policy.scorers["reference"](read)
            k1_BT = np.where(steps_BT, gap_BT, 0.0)
            rewards_BT -= self.kl_coef * k1_BT
            metrics["train/kl"] = float(k1_BT.sum() / max(steps_BT.sum(), 1))

        # Advantages and returns of the whole global batch.
        after_B = np.where(drawn_BT & ~steps_BT, values_BT, 0.0).sum(axis=1)
        advantages_BT, returns_BT = gae(
            rewards_BT, values_BT, steps_BT, self.gamma, self.gae_lambda, after_B
        )
        counts_BT = batch.loss_weight != 0
        returns = returns_BT[counts_BT]
        if returns.size:
            metrics |= {
                "critic/explained_variance": explained_variance(values_BT[counts_BT], returns),
                "critic/value_mean": float(values_BT[counts_BT].mean()),
                "critic/return_mean": float(returns.mean()),
                "critic/return_std": float(returns.std()),
            }
        if self.whiten:
            advantages_BT = whitened(advantages_BT, counts_BT)
        streams = dict(zip(STREAMS, np.float32([returns_BT, values_BT])))
        batch = batch.replace(advantages=advantages_BT.astype(np.float32), streams=streams)
        return batch, metrics

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The loss and its metrics, sums. Arrays are [R, W]."""
        # the policy's part is GRPO's, with advantages of tokens
        policy = GRPO(
            clip_low=self.clip_low, clip_high=self.clip_high, entropy_coef=self.entropy_coef
        )
        loss, metrics = policy.loss(scores, batch.replace(streams={}))

        # The larger of two errors: to come nearer to the return by a jump gains nothing.
        returns_RW, old_RW = (batch.streams[name] for name in STREAMS)
        error_RW = jnp.square(scores.values - returns_RW)
        if self.value_clip is not None:
            moved_RW = jnp.clip(scores.values - old_RW, -self.value_clip, self.value_clip)
            clipped_RW = jnp.square(old_RW + moved_RW - returns_RW)
            is_clipped_RW = clipped_RW > error_RW
            metrics["train/value_clipped"] = jnp.sum(batch.loss_weight * is_clipped_RW)
            error_RW = jnp.maximum(error_RW, clipped_RW)
        metrics["train/value_loss"] = 0.5 * jnp.sum(batch.loss_weight * error_RW)
        return loss + self.value_coef * metrics["train/value_loss"], metrics


def token_rewards(groups: Groups, steps_BT: np.ndarray) -> np.ndarray:
    """The rewards of completions at the last of their steps, [B, T] float64; with
    conversation.credit=turn or discount, what the environment gave for a turn at its last step."""
    rewards_BT = np.zeros(steps_BT.shape)
    for row, parts in enumerate(groups.reward_parts):
        columns = np.flatnonzero(steps_BT[row])
        for end, reward in parts if len(columns) else ():
            # of a turn without any step, the step before it
            place = max(np.searchsorted(columns, end) - 1, 0)
            rewards_BT[row, columns[place]] += reward
    return rewards_BT
