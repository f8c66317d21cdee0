"""Direct preference optimisation (arXiv:2305.18290): of two completions, the chosen one becomes
more likely than the rejected one, against the reference.

loss = mean over pairs of - log sigmoid(beta m), m = s_chosen - s_rejected,
s = sum over the tokens of a completion of logprob - ref_logprob.

The gradient of the loss by a log-probability, -+beta sigmoid(- beta m) / pairs, travels with the
batch (algorithms/pairs.py).
"""

from dataclasses import dataclass

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Needs, Policy, TaskInterface, refuse
from tunix_lite.algorithms.groups import Groups
from tunix_lite.algorithms.pairs import FIELDS, loss_of_shares, pairs_of_data, with_shares
from tunix_lite.basics.types import Batch, Metrics, Params, RowBatch, TokenScores

PAIRS = ("data", "sampled")

# streams with each token's share of its pair's loss, and of the pair's margin and order
STREAMS = ("pair_loss", "train/margin", "train/pair_accuracy")


@dataclass(frozen=True)
class DPO:
    """Learns from pairs of completions: of the data, or made of sampled groups by their rewards.
    Example: DPO(pairs="sampled", num_generations=4) compares the best and the worst of 4."""

    # conf/algorithm/dpo.yaml explains each setting
    pairs: str = "data"
    num_generations: int = 2
    beta: float = 0.1

    def __post_init__(self):
        problems = {
            f"pairs={self.pairs!r}; it is data or sampled": self.pairs not in PAIRS,
            f"beta={self.beta} must be above 0": self.beta <= 0,
            f"num_generations={self.num_generations}: a pair takes at least 2": (
                self.num_generations < 2
            ),
            f"num_generations={self.num_generations} with pairs=data: an example has 2 "
            "completions, `chosen` and `rejected`; leave it at 2, or give pairs=sampled": (
                self.pairs == "data" and self.num_generations != 2
            ),
        }
        refuse(problems)

    # the coefficients are those of today's weights, so they serve one update
    updates_per_rollout = 1
    loss_reduction = "tokens"

    @property
    def needs(self) -> Needs:
        return Needs(
            reference=True,
            rescore=True,
            demonstrations=FIELDS if self.pairs == "data" else (),
            fields=("advantages",),
            streams=STREAMS,
            held_out_loss="objective",
        )

    def batch_of(
        self,
        policy: Policy,
        task: TaskInterface,
        params: Params,
        examples: list[dict],
        groups: Groups | None,
    ) -> tuple[Batch, Metrics]:
        """Pairs -> their margins under today's weights and the reference -> the batch."""
        if groups is None:
            arrays, (chosen, rejected), metrics = pairs_of_data(task.demonstrations, examples)
            if task.long_prompts == "truncate":
                metrics["prompts/truncated"] = task.truncated(examples)
        else:
            rollout = groups.rollout
            arrays = rollout.tokens, rollout.token_mask, rollout.completion_mask
            chosen, rejected = _best_and_worst(groups)
            metrics = groups.metrics | {"reward/pairs": len(chosen) / len(examples)}

        # Only the tokens of pairs count, each as often as its pair.
        tokens, token_mask, completion_mask = arrays
        # A completion that no pair has is in the batch all the same: rows stay as many in each
        # step, and one program serves them all.
        counts = np.zeros(completion_mask.shape, bool)
        paired = np.concatenate([chosen, rejected])
        counts[paired] = completion_mask[paired]
        weight = (counts / max(len(chosen), 1)).astype(np.float32)
        batch = Batch(tokens=tokens, token_mask=token_mask, loss_weight=weight)

        # Two forwards: the policy as it is now, and the reference.
        today = policy.rescore(params, batch)
        reference = policy.scorers["reference"](batch)
        gap = np.float64(today) - np.float64(reference)

        # Each pair: its margin, its loss, and the slope of that.
        scores_B = np.where(counts, gap, 0.0).sum(axis=1)
        margins = scores_B[chosen] - scores_B[rejected]
        # log(1 + exp(-x)), which does not overflow
        losses = np.logaddexp(0.0, -self.beta * margins)
        slopes = self.beta * np.exp(-np.logaddexp(0.0, self.beta * margins))
        logged = dict(zip(STREAMS, (losses, margins, margins > 0)))
        batch = with_shares(batch, (chosen, rejected), (-slopes, slopes), logged)
        return batch, metrics

    def loss(self, scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
        """Returns the loss at today's weights, with its gradient, and its terms: sums."""
        loss, metrics = loss_of_shares(scores, batch)
        return loss, metrics | {"train/dpo_loss": loss}


def _best_and_worst(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the rollout that have the highest and the lowest reward of their group, the first
    of equals; of groups that agree, or have no tokens in the two, none."""
    G = groups.rewards_PG.shape[1]
    lengths = groups.rollout.completion_mask.sum(axis=1)
    # a dropped completion is neither best nor worst
    highest_PG = np.where(groups.kept_PG, groups.rewards_PG, -np.inf)
    lowest_PG = np.where(groups.kept_PG, groups.rewards_PG, np.inf)
    differ_P = (groups.kept_PG.sum(axis=1) >= 2) & (
        highest_PG.max(axis=1) > lowest_PG.min(axis=1)
    )
    # rows of a group stand side by side
    first_P = np.arange(len(differ_P)) * G
    best_P = first_P + highest_PG.argmax(axis=1)
    worst_P = first_P + lowest_PG.argmin(axis=1)
    is_pair_P = differ_P & (lengths[best_P] + lengths[worst_P] > 0)
    return best_P[is_pair_P], worst_P[is_pair_P]
