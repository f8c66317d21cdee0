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
    # denominator of the ratio: the log-probability before (whole) or after (sampled) top_k,
    # top_p and min_p cut the distribution off
    old_logprobs: str = "whole"

    def __post_init__(self):
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: a completion is compared with the "
                "others of its group, so it takes at least 2 (8 is usual)"
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
    loss_reduction = "tokens"

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
        """The loss and its metrics: sums that micro-batches may add up, and a maximum. Arrays are
        [R, W]."""
        # Tokens without weight do not matter, whatever their numbers are.
        counts_RW = batch.loss_weight != 0
        gap_RW = jnp.where(counts_RW, scores.logprobs - batch.old_logprobs, 0.0)
        ratio_RW = jnp.exp(jnp.clip(gap_RW, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        clipped_RW = jnp.clip(ratio_RW, 1 - self.clip_low, 1 + self.clip_high)
        gain_RW = jnp.minimum(ratio_RW * batch.advantages, clipped_RW * batch.advantages)
        loss = -jnp.sum(batch.loss_weight * gain_RW)

        # where clipping took the gradient
        bound_RW = ratio_RW * batch.advantages > clipped_RW * batch.advantages
        metrics = {
            "train/ratio_outside_clip": jnp.sum(batch.loss_weight * (ratio_RW != clipped_RW)),
            "train/clipped_low": jnp.sum(batch.loss_weight * (bound_RW & (ratio_RW < 1))),
            "train/clipped_high": jnp.sum(batch.loss_weight * (bound_RW & (ratio_RW > 1))),
            "train/sampler_gap": jnp.sum(batch.loss_weight * jnp.abs(gap_RW)),
            "train/sampler_gap_max": Max(jax.lax.stop_gradient(jnp.max(jnp.abs(gap_RW)))),
        }

        # the KL term, per token
        if self.needs_reference:
            ref_gap_RW = jnp.where(counts_RW, batch.ref_logprobs - scores.logprobs, 0.0)
            metrics["train/kl"] = jnp.sum(batch.loss_weight * kl(ref_gap_RW, ratio_RW))
            loss += self.kl_coef * metrics["train/kl"]
        return loss, metrics


def kl(ref_gap_RW: jax.Array, ratio_RW: jax.Array) -> jax.Array:
    """Per-token KL(policy || reference), from ref_gap = ref_logprob - logprob of the sampled token.

    Its value is k3, exp(d) - d - 1, never negative; its gradient is that of k2, d^2 / 2, which in
    expectation is the gradient of the KL (k3's own is not, and k1's is zero). The ratio makes both
    right off-policy as well.
    """
    weight_RW = jax.lax.stop_gradient(ratio_RW)
    d_RW = jnp.clip(jax.lax.stop_gradient(ref_gap_RW), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value_RW = weight_RW * (jnp.exp(d_RW) - d_RW - 1)
    slope_RW = weight_RW * 0.5 * ref_gap_RW**2
    return value_RW + slope_RW - jax.lax.stop_gradient(slope_RW)
