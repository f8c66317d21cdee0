"""Supervised fine-tuning: make the demonstrated completions likely. loss = - sum_t w_t log
p(token_t)."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import (
    LossAndMetrics,
    Needs,
    Policy,
    TaskInterface,
)
from tunix_lite.algorithms.weighting import per_token, weights_of_learned
from tunix_lite.basics.types import Batch, Metrics, Params, RowBatch, TokenScores


@dataclass(frozen=True)
class SFT:
    """Learns from the task's demonstrations; nothing is sampled.
    Example: SFT(weighting=per_sequence): every demonstration counts the same, however long."""

    weighting: Callable = per_token  # completion mask [B, T] -> loss weights [B, T]

    # a demonstration per prompt
    num_generations = 1
    updates_per_rollout = 1
    needs = Needs(demonstrations=("completion",), held_out_loss="nats", reads_ahead=True)
    # the loss adds up tokens and nothing else
    loss_reduction = "tokens"

    def batch_of(
        self,
        policy: Policy | None,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        groups: None,
    ) -> tuple[Batch, Metrics]:
        """Demonstrations -> the batch to learn from. It asks nothing of the policy."""
        tokens, token_mask, completion_mask = task.demonstrations(examples)
        metrics = {"completions/mean_length": float(completion_mask.sum(axis=1).mean())}
        if task.long_prompts == "truncate":
            metrics["prompts/truncated"] = task.truncated(examples)
        # each is of a prompt of its own
        prompts = np.arange(len(tokens))
        weights = weights_of_learned(self.weighting, completion_mask, prompts, 1)
        batch = Batch(tokens, token_mask, weights, segment_ids=task.segments(examples))
        return batch, metrics

    def loss(self, scores: TokenScores, batch: RowBatch) -> LossAndMetrics:
        metrics = {}
        if scores.is_likeliest is not None:
            metrics["train/token_accuracy"] = jnp.sum(batch.loss_weight * scores.is_likeliest)
        return -jnp.sum(batch.loss_weight * scores.logprobs), metrics
