"""Group Relative Policy Optimisation (arXiv:2402.03300) and the family that differs from it in
settings.

loss = - sum_t w_t min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A) + kl_coef sum_t w_t KL_t
rho_t = exp(logprob_t - old_logprob_t), A from the rewards of the group, w_t from the weighting.
Metrics are sums with the same weights: means over tokens where the weights sum to one, as those of
per_token and per_sequence do. One is a maximum (types.Max).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.advantages import standardise
from tunix_lite.algorithms.algorithm import Policy, TaskInterface
from tunix_lite.algorithms.groups import sample_groups
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.types import Batch, Graded, Max, Metrics, Params, RowBatch, TokenScores

# beyond it a ratio is clipped anyway, and exp stays finite
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class GRPO:
    """The settings of the loss; its two functions are `collect` and `loss`."""

    num_generations: int = 8  # completions per prompt, the group
    updates_per_rollout: int = 1  # optimizer updates made from one batch of completions
    advantages: Callable = standardise  # rewards [P, G] -> advantages [P, G]
    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]
    clip_low: float = 0.2  # the ratio is clipped below 1 - clip_low
    clip_high: float = 0.28  # and above 1 + clip_high
    kl_coef: float = 0.0  # weight of the KL to the reference; 0 loads no reference
    # of the ratio: whole: nothing cut off; sampled: of what top_k, top_p ... left to draw
    old_logprobs: str = "whole"

    def __post_init__(self):
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: a completion is judged against the "
                "others of its group, "
                "so it takes at least 2 (8 is usual)"
            )
        if self.updates_per_rollout < 1:
            raise ValueError(f"updates_per_rollout={self.updates_per_rollout} must be at least 1")
        for name in ("clip_low", "clip_high", "kl_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.old_logprobs not in ("whole", "sampled"):
            raise ValueError(f"old_logprobs={self.old_logprobs!r}; it is whole or sampled")
        for name in ("advantages", "weighting"):
            try:
                inspect.signature(getattr(self, name)).bind("an array")
            except TypeError as error:
                raise ValueError(
                    f"{name} is called with one array and its settings: {error}"
                ) from error

    needs_demonstrations = False
    # the loss adds up tokens and nothing else
    reduces = "tokens"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def collect(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        key: jax.Array,
    ) -> tuple[Batch, Metrics, Graded]:
        """Prompts -> completions -> rewards -> advantages -> the batch to learn from; metrics; and
        the graded completions."""
        groups = sample_groups(policy, task, params, examples, key, self.num_generations)
        batch = groups.batch(self.advantages, self.weighting)
        if self.old_logprobs == "sampled":
            batch = batch.replace(old_logprobs=groups.rollout.logprobs)
        if self.needs_reference:
            batch = batch.replace(ref_logprobs=policy.scorers["reference"](batch))
        return batch, groups.metrics, groups.graded

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The loss and its metrics: sums that micro-batches may add up, and a maximum. All [R, W]
        arrays are of rows; the suffix BT says the same of rows that are not packed."""
        # what stands off the completion never matters, whatever its numbers are
        counts_BT = batch.loss_weight > 0
        gap_BT = jnp.where(counts_BT, scores.logprobs - batch.old_logprobs, 0.0)
        ratio_BT = jnp.exp(jnp.clip(gap_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        clipped_BT = jnp.clip(ratio_BT, 1 - self.clip_low, 1 + self.clip_high)
        gain_BT = jnp.minimum(ratio_BT * batch.advantages, clipped_BT * batch.advantages)
        loss = -jnp.sum(batch.loss_weight * gain_BT)

        # where clipping took the gradient
        bound_BT = ratio_BT * batch.advantages > clipped_BT * batch.advantages
        metrics = {
            "train/ratio_outside_clip": jnp.sum(batch.loss_weight * (ratio_BT != clipped_BT)),
            "train/clipped_low": jnp.sum(batch.loss_weight * (bound_BT & (ratio_BT < 1))),
            "train/clipped_high": jnp.sum(batch.loss_weight * (bound_BT & (ratio_BT > 1))),
            "train/sampler_gap": jnp.sum(batch.loss_weight * jnp.abs(gap_BT)),
            "train/sampler_gap_max": Max(jax.lax.stop_gradient(jnp.max(jnp.abs(gap_BT)))),
        }

        # the KL term, per token
        if self.needs_reference:
            ref_gap_BT = jnp.where(counts_BT, batch.ref_logprobs - scores.logprobs, 0.0)
            metrics["train/kl"] = jnp.sum(batch.loss_weight * kl(ref_gap_BT, ratio_BT))
            loss += self.kl_coef * metrics["train/kl"]
        return loss, metrics


def kl(ref_gap_BT: jax.Array, ratio_BT: jax.Array) -> jax.Array:
    """Per-token KL(policy || reference), from ref_gap = ref_logprob - logprob of the sampled token.

    Its value is k3, exp(d) - d - 1, never negative; its gradient is that of k2, d^2 / 2, which in
    expectation is the gradient of the KL (k3's own is not, and k1's is zero). The ratio makes both
    right off-policy as well.
    """
    weight_BT = jax.lax.stop_gradient(ratio_BT)
    d_BT = jnp.clip(jax.lax.stop_gradient(ref_gap_BT), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value_BT = weight_BT * (jnp.exp(d_BT) - d_BT - 1)
    slope_BT = weight_BT * 0.5 * ref_gap_BT**2
    return value_BT + slope_BT - jax.lax.stop_gradient(slope_BT)
