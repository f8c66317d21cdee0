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
import numpy as np

from tunix_lite.algorithms import corrections, kl
from tunix_lite.algorithms.advantages import standardise
from tunix_lite.algorithms.algorithm import Policy, TaskInterface
from tunix_lite.algorithms.checks import check_objective
from tunix_lite.algorithms.formula import formula_of
from tunix_lite.algorithms.gains import corrected_gain, gain_of, ratio_metrics
from tunix_lite.algorithms.groups import Groups, sample_groups
from tunix_lite.algorithms.oversampling import sample_mixed_groups
from tunix_lite.algorithms.ratios import TokenTerms, token_ratio, token_terms
from tunix_lite.algorithms.surrogates import Bounds, clip
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
        return () if self.correction is None else (corrections.STREAM_NAME,)

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
        groups = self._sample(policy, task, params, examples, key, self.num_generations)
        metrics = groups.metrics
        groups = self._selected(groups)
        batch = groups.batch(
            self.advantages, self.weighting, self.mini_batches, self.advantage_clip
        )
        batch, found = self._scored(batch, groups, policy, params)
        return batch, metrics | found, groups.graded

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """The loss and its metrics: sums that micro-batches may add up, and a maximum. Arrays are
        [R, W]."""
        # the gain of each token, by its ratio and its advantage
        terms = token_terms(scores, batch, self.ratio)
        bounds = Bounds(self.clip_low, self.clip_high)
        gain = gain_of(self.surrogate, terms, bounds)
        gain, metrics = corrected_gain(self.off_policy_delta, terms, gain)
        loss = -jnp.sum(batch.loss_weight * gain.gain)
        metrics |= ratio_metrics(self.surrogate, terms, bounds, gain)
        if self.needs_reference or self.entropy_coef:
            loss, found = self._with_penalties(loss, terms, scores)
            metrics |= found
        return loss, metrics

    def _with_penalties(
        self, loss: jax.Array, terms: TokenTerms, scores: TokenScores
    ) -> tuple[jax.Array, Metrics]:
        """The loss with its KL term and its entropy bonus, and metrics of them."""
        metrics: Metrics = {}
        weight_RW = terms.batch.loss_weight
        # the KL term, per token
        if self.needs_reference:
            metrics["train/kl"] = jnp.sum(weight_RW * kl.token_kl(self.kl_estimator, terms))
            if self.kl_estimator != kl.IN_REWARD:
                loss += self.kl_coef * metrics["train/kl"]

        # the entropy of what each token is drawn from
        if self.entropy_coef:
            loss -= self.entropy_coef * jnp.sum(weight_RW * scores.entropy)
        return loss, metrics

    @property
    def _sample(self) -> Callable:
        """How groups are sampled: prompts once, or in rounds."""
        if self.agreeing_groups == "replace":
            return partial(sample_mixed_groups, max_rounds=self.max_rounds)
        return sample_groups

    def _selected(self, groups: Groups) -> Groups:
        """The groups with rewards as they are compared, and without what is not learned from."""
        if self.agreeing_groups == "drop":
            groups = groups.learning_from(~groups.agree[:, None])
        if self.shaping is not None:
            groups = groups.with_reward("shaping", self.shaping(groups.lengths))
        if self.mask_truncated:
            finished_PG = np.asarray(groups.rollout.finished).reshape(groups.rewards_PG.shape)
            groups = groups.learning_from(finished_PG)
        return groups

    def _scored(
        self, batch: Batch, groups: Groups, policy: Policy, params: Params
    ) -> tuple[Batch, Metrics]:
        """The batch with the log-probabilities that the settings ask for, and metrics of them."""
        metrics: Metrics = {}
        if self.old_logprobs == "sampled":
            batch = batch.replace(old_logprobs=groups.rollout.logprobs)
        if self.rescores:
            sampler_BT = batch.old_logprobs
            rescored_BT = self._in_parts(partial(policy.rescore, params), batch)
            batch = batch.replace(old_logprobs=rescored_BT)
            batch, metrics = corrections.corrected(self.correction, batch, sampler_BT)
        if self.needs_reference:
            ref_BT = self._in_parts(policy.scorers["reference"], batch)
            batch = batch.replace(ref_logprobs=ref_BT)
        if self.needs_reference and self.kl_estimator == kl.IN_REWARD:
            penalty_B = -self.kl_coef * kl.k1_of_completions(batch)
            groups = groups.with_reward("kl", penalty_B)
            advantages_BT = groups.token_advantages(self.advantages, self.advantage_clip)
            batch = batch.replace(advantages=advantages_BT)
        return batch, metrics

    def _in_parts(self, score: Callable, batch: Batch) -> np.ndarray:
        """[B, T]: what `score` gives, mini-batch by mini-batch, as large as updates are."""
        if self.mini_batches == 1:
            return score(batch)
        rows = np.split(np.arange(len(batch.tokens)), self.mini_batches)
        parts = [score(jax.tree.map(lambda x, part=part: x[part], batch)) for part in rows]
        return np.concatenate(parts)
