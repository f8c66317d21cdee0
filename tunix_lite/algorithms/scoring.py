"""Log-probabilities that a batch needs beside those of the sampler: the trainer's own, and those of
the reference."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from tunix_lite.algorithms import corrections, kl
from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.groups import Groups
from tunix_lite.types import Batch, Metrics, Params


def scored(
    algorithm: Any, batch: Batch, groups: Groups, policy: Policy, params: Params
) -> tuple[Batch, Metrics]:
    """Adds the log-probabilities to the batch that the settings of algorithms.grpo.GRPO ask for,
    and returns their metrics. params: the current weights, adapters attached."""
    metrics: Metrics = {}
    # A KL term in the reward is of every completion that is compared, learned from or not.
    in_reward = algorithm.needs.reference and algorithm.kl_estimator == kl.IN_REWARD
    mask_BT = np.asarray(groups.rollout.completion_mask)
    learned_BT = batch.loss_weight
    if in_reward:
        batch = batch.replace(loss_weight=mask_BT.astype(np.float32))
    if algorithm.old_logprobs == "sampled":
        batch = batch.replace(old_logprobs=groups.rollout.logprobs)
    if algorithm.needs.rescore:
        sampler_BT = batch.old_logprobs
        rescored_BT = _in_parts(partial(policy.rescore, params), batch, algorithm.mini_batches)
        batch = batch.replace(old_logprobs=rescored_BT)
    if algorithm.needs.reference:
        ref_BT = _in_parts(policy.scorers["reference"], batch, algorithm.mini_batches)
        batch = batch.replace(ref_logprobs=ref_BT)
    batch = batch.replace(loss_weight=learned_BT)
    if algorithm.needs.rescore:
        batch, metrics = corrections.corrected(algorithm.correction, batch, sampler_BT)

    # it changes the advantages
    if in_reward:
        penalty_B = -algorithm.kl_coef * kl.k1_of_completions(batch, mask_BT)
        groups = groups.with_reward("kl", penalty_B)
        advantages_BT = groups.token_advantages(algorithm.advantages, algorithm.advantage_clip)
        batch = batch.replace(advantages=advantages_BT)
    return batch, metrics


def _in_parts(score: Callable, batch: Batch, num_parts: int) -> np.ndarray:
    """[B, T]: what `score` gives, mini-batch by mini-batch, as large as updates are."""
    if num_parts == 1:
        return score(batch)
    rows = np.split(np.arange(len(batch.tokens)), num_parts)
    parts = [score(jax.tree.map(lambda x, part=part: x[part], batch)) for part in rows]
    return np.concatenate(parts)
