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
from tunix_lite.algorithms.algorithm import Policy, TaskInterface
from tunix_lite.algorithms.checks import check_objective
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

    num_generations: int = 8  # completions per prompt, the group
    updates_per_rollout: int = 1  # optimizer updates made from one batch of completions
    # a rollout is for so many updates' prompts, and each update takes the next part of them
    mini_batches: int = 1
    advantages: Callable = standardise  # rewards [P, G] -> advantages [P, G]
    advantage_clip: float | None = None  # advantages are kept within +- this; None: as they are
    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]
    ratio: Callable = token_ratio  # log-ratios of tokens -> log-ratios (algorithms/ratios.py)
    surrogate: Callable = clip  # what is maximised per token (algorithms/surrogates.py)
    clip_low: float | None = 0.2  # the ratio is clipped below 1 - clip_low; None: not below
    clip_high: float | None = 0.28  # and above 1 + clip_high; None: not above
    kl_coef: float = 0.0  # weight of the KL to the reference; 0 loads no reference
    kl_estimator: str = "k3_exact"  # k3_exact, k3, k3_ratio, k2, or k1_reward
    reference_every: int = 0  # steps after which the reference follows the policy; 0: it stays
    reference_mix: float = 1.0  # share of the policy in it then; 1: it becomes the policy
    entropy_coef: float = 0.0  # weight of the entropy, which is then raised
    # denominator of the ratio: the log-probability before (whole) or after (sampled) top_k, top_p
    # and min_p cut the distribution off; rescored: the trainer's own
    old_logprobs: str = "whole"
    # weights for what trainer and sampler disagree about (algorithms/corrections.py)
    correction: Callable | None = None
    # completions with A < 0 that the policy has left so far, in nats a token, are left out
    off_policy_delta: float | None = None
    # groups of equal rewards: keep; drop: no weight; replace: draw other prompts
    agreeing_groups: str = "keep"
    max_rounds: int = 1  # of agreeing_groups=replace: how often prompts are drawn, at most
    shaping: Callable | None = None  # lengths [B] -> what is added to the rewards (shaping.py)
    mask_truncated: bool = False  # nothing is learned from a completion that ran out of length
    variant: str | None = None  # the objective as another framework defines it (variants.py)

    def __post_init__(self):
        apply_variant(self)
        check_objective(self)

    needs_demonstrations = False
    # some of its pieces sum over a completion, all of those by algorithms/sequences.py
    loss_reduction = "sequences"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def rescores(self) -> bool:
        """Whether collect asks for the trainer's own log-probabilities of what was sampled."""
        return self.old_logprobs == "rescored"

    @property
    def streams(self) -> tuple[str, ...]:
        return () if self.correction is None else (STREAM_NAME,)

    @property
    def formula(self) -> list[str]:
        """What is minimised, with its constants, in lines for the panel of a run."""
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
        if self.old_logprobs != "whole" or self.needs_reference:
            batch, found = scored(self, batch, groups, policy, params)
            metrics |= found
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
            gain, found = corrected_gain(self.off_policy_delta, terms, gain)
            metrics |= found
        loss = -jnp.sum(batch.loss_weight * gain.gain)

        # the KL term, and the entropy of what each token is drawn from
        if self.needs_reference:
            loss, metrics["train/kl"] = with_kl(loss, terms, self.kl_estimator, self.kl_coef)
        if self.entropy_coef:
            loss -= self.entropy_coef * jnp.sum(batch.loss_weight * scores.entropy)
        return loss, metrics
