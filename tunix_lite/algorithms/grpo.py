"""Group Relative Policy Optimisation (arXiv:2402.03300) and the family that differs from it in
settings.

loss = - sum_t w_t gain(rho_t, A) + kl_coef sum_t w_t KL_t - entropy_coef sum_t w_t H_t
rho_t = exp(logprob_t - old_logprob_t), A from the rewards of the group, w_t from the weighting; the
gain is min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A) or another surrogate.
Metrics are sums with the same weights: means over tokens where the weights sum to one, as those of
per_token and per_sequence do. One is a maximum (types.Max).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms import kl
from tunix_lite.algorithms.algorithm import (
    LossAndMetrics,
    Needs,
    Policy,
    TaskInterface,
)
from tunix_lite.algorithms.corrections import STREAM_NAME, corrected, corrected_gain
from tunix_lite.algorithms.groups import Groups
from tunix_lite.algorithms.objective import Objective
from tunix_lite.algorithms.pieces import takes
from tunix_lite.algorithms.ratios import MAX_LOG_RATIO, TokenTerms
from tunix_lite.algorithms.surrogates import Bounds, ratio_metrics
from tunix_lite.basics.types import Batch, Metrics, Params, RowBatch, TokenScores


@dataclass(frozen=True)
class GRPO(Objective):
    """The two functions `batch_of` and `loss`; Objective has the settings.
    Example: GRPO(num_generations=16, clip_high=0.2, kl_coef=0.01): groups of 16, and a KL term to
    the reference."""

    # some of its pieces sum over a completion, all of those by algorithms/sequences.py
    loss_reduction = "sequences"

    @property
    def needs(self) -> Needs:
        return Needs(
            reference=self.kl_coef > 0,
            rescore=self.old_logprobs == "rescored",
            streams=() if self.correction is None else (STREAM_NAME,),
            mini_batches=self.mini_batches,
            rounds=self.max_rounds,
            fresh=self.refusal_of_stale(),
        )

    def batch_of(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        groups: Groups,
    ) -> tuple[Batch, Metrics]:
        """Graded completions -> advantages -> the batch to learn from, and metrics."""
        # Settings beside the default: what is not learned from, and what is added to the rewards.
        if self.agreeing_groups == "drop" or self.shaping or self.mask_truncated:
            groups = self.selected(groups)
        batch = groups.batch(self.advantages, self.weighting, self.mini_batches)

        # And log-probabilities that sampling does not give.
        metrics = groups.metrics
        if self.old_logprobs != "whole" or self.kl_coef:
            batch, metrics = self.scored(batch, groups, policy, params)
        if (limit := self.advantage_clip) is not None:
            batch = batch.replace(advantages=np.clip(batch.advantages, -limit, limit))
        return batch, metrics

    def selected(self, groups: Groups) -> Groups:
        """Gives no weight where nothing is learned, and adds to the rewards that are compared."""
        if self.agreeing_groups == "drop":
            groups = groups.learning_from(~groups.agree[:, None])
        if self.shaping is not None:
            groups = groups.with_reward("shaping", self.shaping(groups.lengths))
        if self.mask_truncated:
            finished_PG = groups.rollout.finished.reshape(groups.rewards_PG.shape)
            groups = groups.learning_from(finished_PG)
        return groups

    def scored(
        self, batch: Batch, groups: Groups, policy: Policy, params: Params
    ) -> tuple[Batch, Metrics]:
        """Adds the log-probabilities that sampling does not give: the trainer's own, and those of
        the reference. params: the current weights, adapters attached."""
        # A KL term in the reward is of every completion that is compared, learned from or not.
        mask_BT = groups.rollout.completion_mask
        read = batch
        metrics = groups.metrics
        if self.is_kl_reward:
            read = batch.replace(loss_weight=mask_BT.astype(np.float32))
        if self.kl_coef:
            batch = batch.replace(ref_logprobs=policy.scorers["reference"](read))
        if self.old_logprobs == "sampled":
            batch = batch.replace(old_logprobs=groups.rollout.logprobs)
        if self.old_logprobs == "rescored":
            sampler_BT = batch.old_logprobs
            batch = batch.replace(old_logprobs=policy.rescore(params, read))
            # also without a correction: its metrics say how far sampler and trainer are apart
            batch, of_correction = corrected(self.correction, batch, sampler_BT)
            metrics = metrics | of_correction
        if self.is_kl_reward:
            # k1 of each completion: the sum over its tokens, learned from or not
            gap_BT = np.float64(batch.old_logprobs) - np.float64(batch.ref_logprobs)
            k1_B = np.where(mask_BT, gap_BT, 0.0).sum(axis=1)
            groups = groups.with_reward("kl", -self.kl_coef * k1_B)
            batch = batch.replace(advantages=groups.token_advantages(self.advantages))
        return batch, metrics

    def loss(self, scores: TokenScores, batch: RowBatch) -> LossAndMetrics:
        """The loss and its metrics: sums that micro-batches may add up, and a maximum. Arrays are
        [R, W]."""
        # 0 at tokens that do not count, whatever fills them: a mean over a completion adds them up
        counts_RW = batch.loss_weight != 0
        logprobs_RW = jnp.where(counts_RW, scores.logprobs, 0.0)
        old_logprobs_RW = jnp.where(counts_RW, batch.old_logprobs, 0.0)
        gap_RW = logprobs_RW - old_logprobs_RW
        log_ratio_RW = self.ratio(gap_RW, batch)
        ratio_RW = jnp.exp(jnp.clip(log_ratio_RW, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        terms = TokenTerms(
            ratio_RW,
            log_ratio_RW,
            batch.advantages,
            logprobs_RW,
            old_logprobs_RW,
            gap_RW,
            batch,
        )

        # the gain of each token, by its ratio and its advantage
        bounds = []
        if takes(self.surrogate, "bounds"):
            bounds = [Bounds(self.clip_low, self.clip_high)]
        gain = self.surrogate(terms, *bounds)
        metrics = ratio_metrics(terms, gain, *bounds)
        if batch.streams or self.off_policy_delta is not None:
            gain, of_correction = corrected_gain(self.off_policy_delta, terms, gain)
            metrics |= of_correction
        loss = -jnp.sum(batch.loss_weight * gain.gain)
        if self.kl_coef or self.entropy_coef:
            loss, of_penalties = self.penalised(loss, terms, scores)
            metrics |= of_penalties
        return loss, metrics

    def penalised(
        self, loss: jax.Array, terms: TokenTerms, scores: TokenScores
    ) -> LossAndMetrics:
        """Adds the KL term, and takes off the entropy of what each token is drawn from."""
        weight_RW = terms.batch.loss_weight
        metrics = {}
        if self.kl_coef:
            kl_RW = kl.token_kl(self.kl_estimator, terms)
            metrics["train/kl"] = jnp.sum(weight_RW * kl_RW)
            if not self.is_kl_reward:
                loss += self.kl_coef * metrics["train/kl"]
        if self.entropy_coef:
            loss -= self.entropy_coef * jnp.sum(weight_RW * scores.entropy)
        return loss, metrics
