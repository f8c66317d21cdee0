"""Trains a reward model from pairs (Bradley and Terry 1952; arXiv:2203.02155): the number r that it
gives a conversation becomes larger for the chosen one than for the rejected one.

loss = mean over pairs of - log sigmoid(r_chosen - r_rejected - margin)
       + centering * (r_chosen + r_rejected)^2

r is read at the last token, as transformers reads it (tasks.Task.conversations). The gradient by r
travels with the batch (algorithms/pairs.py).
"""

from dataclasses import dataclass

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Needs, Policy, TaskInterface, refuse
from tunix_lite.algorithms.pairs import FIELDS, loss_of_shares, with_shares
from tunix_lite.basics.plain_text import shortened
from tunix_lite.basics.types import Batch, Graded, Metrics, Params, RowBatch, TokenScores

STREAMS = ("pair_loss", "pair_margin", "pair_is_right", "pair_mean")


@dataclass(frozen=True)
class RewardModelTraining:
    """Learns to give the chosen one of two conversations the larger number.
    Example: RewardModelTraining(margin="margin") wants r_chosen to be larger by that column."""

    # Column with the least difference of the two rewards that is wanted. null wants none.
    margin: str | None = None
    # Weight of (r_chosen + r_rejected)^2, which keeps rewards around 0. 0 leaves it out.
    centering: float = 0.0

    def __post_init__(self):
        refuse({f"centering={self.centering} must not be negative": self.centering < 0})

    num_generations = 2
    # the slopes are those of today's weights, so they serve one update
    updates_per_rollout = 1
    loss_reduction = "tokens"

    @property
    def needs(self) -> Needs:
        return Needs(
            rescore=True,
            demonstrations=FIELDS,
            fields=("advantages",),
            streams=STREAMS,
            held_out_loss="objective",
            output="score",
        )

    def collect(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        key: jax.Array,
    ) -> tuple[Batch, Metrics, Graded | None]:
        """Pairs -> their rewards under today's weights -> the batch."""
        # row 2p is chosen, row 2p + 1 rejected
        both = [task.conversations(examples, name) for name in FIELDS]
        tokens, token_mask = (
            np.stack(pair, axis=1).reshape(2 * len(examples), -1)
            for pair in zip(*both, strict=True)
        )
        lengths = token_mask.sum(axis=1)
        metrics = {
            "completions/mean_length_chosen": float(lengths[0::2].mean()),
            "completions/mean_length_rejected": float(lengths[1::2].mean()),
        }

        # The last token of each row counts.
        weight = np.zeros(tokens.shape, np.float32)
        weight[:, -1] = 1 / len(examples)
        batch = Batch(tokens=tokens, token_mask=token_mask, loss_weight=weight)
        rewards_B = np.float64(policy.rescore(params, batch)[:, -1])
        chosen, rejected = rewards_B[0::2], rewards_B[1::2]
        margins = np.zeros(len(examples))
        for place, example in enumerate(examples if self.margin is not None else ()):
            value = example.get(self.margin)
            if not isinstance(value, int | float) or not np.isfinite(value):
                raise ValueError(
                    f"algorithm.margin={self.margin}: a pair has {shortened(value)} there, which "
                    "is no finite number"
                )
            margins[place] = value

        # Each pair: its loss, and the slopes of that by the two rewards.
        gaps = chosen - rejected - margins
        # log(1 + exp(-x)), which does not overflow
        losses = np.logaddexp(0.0, -gaps) + self.centering * (chosen + rejected) ** 2
        slopes = np.exp(-np.logaddexp(0.0, gaps))
        pulls = 2 * self.centering * (chosen + rejected)
        values = (losses, chosen - rejected, chosen > rejected, (chosen + rejected) / 2)
        rows = np.arange(0, len(tokens), 2), np.arange(1, len(tokens), 2)
        shares = with_shares(
            batch, rows, (pulls - slopes, pulls + slopes), dict(zip(STREAMS, values))
        )
        return shares, metrics, None

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """Returns the loss at today's weights, with its gradient, and its terms: sums."""
        loss, logged = loss_of_shares(scores, batch, STREAMS[0])
        return loss, {
            "train/margin": logged["pair_margin"],
            "train/pair_accuracy": logged["pair_is_right"],
            "train/reward": logged["pair_mean"],
        }
