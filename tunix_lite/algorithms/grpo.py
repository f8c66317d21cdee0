"""Group Relative Policy Optimisation (arXiv:2402.03300) and the family that differs from it in
settings.

loss = - sum_t w_t gain(rho_t, A) + kl_coef sum_t w_t KL_t - entropy_coef sum_t w_t H_t
rho_t = exp(logprob_t - old_logprob_t), A from the rewards of the group, w_t from the weighting; the
gain is min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A) or another surrogate.
Metrics are sums with the same weights: means over tokens where the weights sum to one, as those of
per_token and per_sequence do. One is a maximum (types.Max).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.advantages import standardise
from tunix_lite.algorithms.algorithm import Needs, Policy, TaskInterface
from tunix_lite.algorithms.checks import check_objective, refusal_of_stale
from tunix_lite.algorithms.corrections import STREAM_NAME, corrected_gain
from tunix_lite.algorithms.formula import formula_of
from tunix_lite.algorithms.groups import sample_groups
from tunix_lite.algorithms.kl import with_kl
from tunix_lite.algorithms.oversampling import sample_mixed_groups
from tunix_lite.algorithms.ratios import token_ratio, token_terms
from tunix_lite.algorithms.scoring import scored
from tunix_lite.algorithms.selection import selected
from tunix_lite.algorithms.surrogates import Bounds, clip, gain_of, ratio_metrics
from tunix_lite.algorithms.variants import apply_variant
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.types import Batch, Graded, Metrics, Params, RowBatch, TokenScores


@dataclass(frozen=True)
class GRPO:
    """The settings of the loss; its two functions are `collect` and `loss`.

    Example: GRPO(num_generations=16, clip_high=0.2, kl_coef=0.01): groups of 16, and a KL term to
    the reference.
    """

    # Completions sampled for each prompt, called its group. At least 2.
    num_generations: int = 8
    # Optimizer updates made from one rollout, a multiple of mini_batches.
    updates_per_rollout: int = 1
    # Parts that a rollout is split into. Each update trains on the next part. 1 does not split it.
    mini_batches: int = 1
    advantages: Callable = standardise  # rewards [P, G] -> advantages [P, G]
    # Limits every advantage to the range from -x to x. null sets no limit.
    advantage_clip: float | None = None
    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]
    ratio: Callable = token_ratio  # log-ratios of tokens -> log-ratios (algorithms/ratios.py)
    surrogate: Callable = clip  # what is maximised per token (algorithms/surrogates.py)
    # Lower clip of the ratio, at 1 - clip_low. null does not clip it from below.
    clip_low: float | None = 0.2
    # Upper clip of the ratio, at 1 + clip_high. null does not clip it from above.
    clip_high: float | None = 0.28
    # Weight of the KL divergence from the reference model. 0 loads no reference.
    kl_coef: float = 0.0
    # Estimator of that KL: k3_exact, k3, k3_ratio or k2 in the loss, k1_reward in the reward.
    kl_estimator: str = "k3_exact"
    # Steps between two updates of the reference model. 0 keeps it as it was at the start.
    reference_every: int = 0
    # Share of the policy in an updated reference, from 0 to 1. 1 copies the policy.
    reference_mix: float = 1.0
    # Weight of the entropy bonus. 0 adds none.
    entropy_coef: float = 0.0
    # Old log-probabilities in the ratio: whole (sampler, full softmax), sampled (sampler, after
    # top_k, top_p and min_p) or rescored (computed again by the trainer).
    old_logprobs: str = "whole"
    # Function that reweights tokens where trainer and sampler differ. Needs old_logprobs=rescored.
    correction: Callable | None = None
    # Drops a completion with negative advantage whose mean log-probability fell by more than this,
    # in nats per token. null drops none.
    off_policy_delta: float | None = None
    # What happens to a group of equal rewards: keep, drop (weight 0) or replace (draw another
    # prompt).
    agreeing_groups: str = "keep"
    # Most draws of prompts for one batch, used by agreeing_groups=replace.
    max_rounds: int = 1
    # Function of completion lengths that is added to the rewards. null adds nothing.
    shaping: Callable | None = None
    # true gives no weight to completions that reached max_new_tokens without an end.
    mask_truncated: bool = False
    # Framework whose form of the objective is used, such as trl, verl or prime_rl. null uses ours.
    variant: str | None = None

    def __post_init__(self):
        apply_variant(self)
        check_objective(self)

    # some of its pieces sum over a completion, all of those by algorithms/sequences.py
    loss_reduction = "sequences"

    @property
    def needs(self) -> Needs:
        return Needs(
            reference=self.kl_coef > 0,
            reference_every=self.reference_every,
            reference_mix=self.reference_mix,
            rescore=self.old_logprobs == "rescored",
            streams=() if self.correction is None else (STREAM_NAME,),
            mini_batches=self.mini_batches,
            rounds=self.max_rounds,
            fresh=refusal_of_stale(self),
        )

    @property
    def formula(self) -> list[str]:
        """Writes the loss that is minimised, with its constants, in lines for the panel of a
        run."""
        return formula_of(self)

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
        sample = sample_groups
        if self.agreeing_groups == "replace":
            sample = partial(sample_mixed_groups, max_rounds=self.max_rounds)
        groups = sample(policy, task, params, examples, key, self.num_generations)
        metrics = groups.metrics

        # Settings beside the default: what is not learned from, and what is added to the rewards.
        if self.agreeing_groups == "drop" or self.shaping or self.mask_truncated:
            groups = selected(self, groups)
        batch = groups.batch(
            self.advantages, self.weighting, self.mini_batches, self.advantage_clip
        )

        # And log-probabilities that sampling does not give.
        if self.old_logprobs != "whole" or self.kl_coef:
            batch, of_scoring = scored(self, batch, groups, policy, params)
            metrics |= of_scoring
        return batch, metrics, groups.graded

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The loss and its metrics: sums that micro-batches may add up, and a maximum. Arrays are
        [R, W]."""
        # the gain of each token, by its ratio and its advantage
        terms = token_terms(scores, batch, self.ratio)
        bounds = Bounds(self.clip_low, self.clip_high)
        gain = gain_of(self.surrogate, terms, bounds)
        metrics = ratio_metrics(self.surrogate, terms, bounds, gain)
        if batch.streams or self.off_policy_delta is not None:
            gain, of_correction = corrected_gain(self.off_policy_delta, terms, gain)
            metrics |= of_correction
        loss = -jnp.sum(batch.loss_weight * gain.gain)

        # the KL term, and the entropy of what each token is drawn from
        if self.kl_coef:
            loss, metrics["train/kl"] = with_kl(loss, terms, self.kl_estimator, self.kl_coef)
        if self.entropy_coef:
            loss -= self.entropy_coef * jnp.sum(batch.loss_weight * scores.entropy)
        return loss, metrics
