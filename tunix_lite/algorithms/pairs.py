"""The loss of pairs of sequences, chosen and rejected, as a plain sum over tokens.

The two of a pair may lie in different micro-batches, so the update cannot compare them. `collect`
does: it scores the batch under today's weights, and the slope of the loss by each score is then a
number, whose negative goes into the batch as the advantage. The update differentiates a plain sum
over tokens, and its gradient is that of the loss, for the first update of a batch: there is only
one (docs/decisions/0019).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.basics.types import Batch, Metrics, RowBatch, TokenScores

# fields of an example, in the order in which the two of a pair stand in a batch
FIELDS = ("chosen", "rejected")


def with_shares(
    batch: Batch,
    rows: tuple[np.ndarray, np.ndarray],
    slopes: tuple[np.ndarray, np.ndarray],
    logged: Mapping[str, np.ndarray],
) -> Batch:
    """The batch with all that the update needs to know of its pairs: advantages and streams.

    rows: of the chosen and of the rejected sequences, [pairs] int each. slopes: of the loss of a
    pair by a score of either. logged: numbers of a pair by the name of their stream, whose mean
    over pairs is a metric. loss_weight is 1 / pairs on the tokens that count."""
    # They go to all tokens of the two: each token has to know its share.
    counts = np.asarray(batch.loss_weight) != 0
    lengths = counts.sum(axis=1)
    both = np.maximum(lengths[rows[0]] + lengths[rows[1]], 1)

    def of_tokens(values: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        of_row = np.zeros(len(counts))
        for here, of_pair in zip(rows, values):
            of_row[here] = of_pair
        return np.broadcast_to(of_row[:, None], counts.shape).astype(np.float32)

    # the sum over all tokens of a pair, weighted, is the pair's share of the mean
    streams = {name: of_tokens((x / both, x / both)) for name, x in logged.items()}
    advantages = of_tokens((-slopes[0], -slopes[1]))
    return batch.replace(advantages=advantages, streams=streams)


def loss_of_shares(
    scores: TokenScores, batch: RowBatch, of_loss: str
) -> tuple[jax.Array, Metrics]:
    """Returns the loss at today's weights, with its gradient, and the sum of each stream by its
    name. of_loss: the stream of the losses."""
    scores_RW = jnp.where(batch.loss_weight != 0, scores.logprobs, 0.0)
    # 0, with the gradient of the scores
    slope_RW = batch.advantages * (scores_RW - jax.lax.stop_gradient(scores_RW))
    sums = {name: jnp.sum(batch.loss_weight * x) for name, x in batch.streams.items()}
    return sums[of_loss] - jnp.sum(batch.loss_weight * slope_RW), sums
