"""Trains a reward model from pairs (Bradley and Terry 1952; arXiv:2203.02155): the number r that it
gives a conversation becomes larger for the chosen one than for the rejected one.

loss = mean over pairs of - log sigmoid(r_chosen - r_rejected - margin)
       + centering * (r_chosen + r_rejected)^2

r is read at the last token, as transformers reads it (tasks.Task.conversations). The gradient by r
travels with the batch (algorithms/pairs.py).
"""

from dataclasses import dataclass

import numpy as np

from tunix_lite.algorithms.algorithm import Needs, Policy, TaskInterface, refuse
from tunix_lite.algorithms.pairs import FIELDS, loss_of_shares, pairs_of_data, with_shares
from tunix_lite.basics.plain_text import shortened
from tunix_lite.basics.types import Batch, Metrics, Params

STREAMS = ("pair_loss", "train/margin", "train/pair_accuracy", "train/reward")


@dataclass(frozen=True)
class RewardModelTraining:
    """Learns to give the chosen one of two conversations the larger number.
    Example: RewardModelTraining(margin="margin") wants r_chosen to be larger by that column."""

    # conf/algorithm/reward_model.yaml explains each setting
    margin: str | None = None
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

    def check_example(self, example: dict) -> None:
        """Raises ValueError for an example without a number in the column of margins."""
        value = 0 if self.margin is None else example.get(self.margin)
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise ValueError(
                f"algorithm.margin={self.margin}: a pair has {shortened(value)} there, which is no "
                "finite number"
            )

    def batch_of(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        groups: None,
    ) -> tuple[Batch, Metrics]:
        """Pairs -> their rewards under today's weights -> the batch."""
        margins = np.zeros(len(examples))
        for place, example in enumerate(examples if self.margin is not None else ()):
            self.check_example(example)
            margins[place] = example[self.margin]
        (tokens, token_mask), rows, metrics = pairs_of_data(task.conversations, examples)
        # The last token of each row counts.
        weight = np.zeros(tokens.shape, np.float32)
        weight[:, -1] = 1 / len(examples)
        batch = Batch(tokens=tokens, token_mask=token_mask, loss_weight=weight)
        rewards_B = np.float64(policy.rescore(params, batch)[:, -1])

        # Each pair: its loss, and the slopes of that by the two rewards.
        chosen, rejected = (rewards_B[of_pairs] for of_pairs in rows)
        total = chosen + rejected
        gaps = chosen - rejected - margins
        # log(1 + exp(-x)), which does not overflow
        losses = np.logaddexp(0.0, -gaps) + self.centering * total**2
        slopes = np.exp(-np.logaddexp(0.0, gaps))
        pulls = 2 * self.centering * total
        values = (losses, chosen - rejected, chosen > rejected, total / 2)
        logged = dict(zip(STREAMS, values))
        batch = with_shares(batch, rows, (pulls - slopes, pulls + slopes), logged)
        return batch, metrics

    loss = staticmethod(loss_of_shares)
