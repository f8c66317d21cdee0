"""The loss of pairs of sequences, chosen and rejected, as a plain sum over tokens.

The two of a pair may lie in different micro-batches, so the update cannot compare them. `batch_of`
does: it scores the batch under today's weights, and the slope of the loss by each score is then a
number, whose negative goes into the batch as the advantage. The update differentiates a plain sum
over tokens, and its gradient is that of the loss, for the first update of a batch: there is only
one (docs/decisions/0019).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.basics.types import Batch, Metrics, RowBatch, TokenScores

# fields of an example, in the order in which the two of a pair stand in a batch
FIELDS = ("chosen", "rejected")


def pairs_of_data(
    read: Callable[..., tuple[np.ndarray, ...]], examples: list[dict]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, np.ndarray], Metrics]:
    """The arrays of both answers of each example, [2 P, T], row 2p the chosen one; the rows of the
    chosen and of the rejected ones; metrics of lengths. read: (examples, name of a field) ->
    arrays, of which the last says which tokens an answer has."""
    arrays = tuple(
        np.stack(pair, axis=1).reshape(2 * len(examples), -1)
        for pair in zip(*(read(examples, name) for name in FIELDS), strict=True)
    )
    lengths = arrays[-1].sum(axis=1)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/mean_length_chosen": float(lengths[0::2].mean()),
        "completions/mean_length_rejected": float(lengths[1::2].mean()),
    }
    chosen = np.arange(0, 2 * len(examples), 2)
    return arrays, (chosen, chosen + 1), metrics


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

    def of_tokens(*values: np.ndarray) -> np.ndarray:
        of_row = np.zeros((len(counts), 1))
        for here, of_pair in zip(rows, values):
            of_row[here, 0] = of_pair
        return np.broadcast_to(of_row, counts.shape).astype(np.float32)

    # the sum over all tokens of a pair, weighted, is the pair's share of the mean
    streams = {name: of_tokens(x / both, x / both) for name, x in logged.items()}
    return batch.replace(advantages=-of_tokens(*slopes), streams=streams)


def loss_of_shares(scores: TokenScores, batch: RowBatch) -> tuple[jax.Array, Metrics]:
    """Returns the loss at today's weights, with its gradient, and the sums of the streams beside
    `pair_loss`, whose names are those of metrics."""
    scores_RW = jnp.where(batch.loss_weight != 0, scores.logprobs, 0.0)
    # 0, with the gradient of the scores
    slope_RW = batch.advantages * (scores_RW - jax.lax.stop_gradient(scores_RW))
    sums = {name: jnp.sum(batch.loss_weight * x) for name, x in batch.streams.items()}
    return sums.pop("pair_loss") - jnp.sum(batch.loss_weight * slope_RW), sums
