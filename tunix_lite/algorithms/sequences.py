"""Sums and means over a sequence, for losses that are more than a sum over tokens, such as GSPO's
ratio.

A row of a batch is not a sequence: where `training.packing` sets several side by side, a sum over a
row mixes them. The functions here sum over the tokens that count (loss_weight is not 0) of the same
completion, wherever it lies, and give every such token the result. A completion never reaches from
one row into another, so micro-batches and shards of a mesh do not matter. Both have gradients.
"""

import jax
import jax.numpy as jnp

from tunix_lite.types import RowBatch


def sequence_sum(x_BT: jax.Array, batch: RowBatch) -> jax.Array:
    """[B, T] -> [B, T]: at each token that counts, the sum of x over those of its completion; 0 at
    all others.

    What x holds at tokens that do not count never matters.

    Example: two completions in a row, x = [1, 2, 5], segment_ids = [1, 1, 2], all count -> [3, 3,
    5].
    """
    counts_BT = batch.loss_weight != 0
    return jnp.where(counts_BT, _total(jnp.where(counts_BT, x_BT, 0), batch), 0)


def sequence_mean(x_BT: jax.Array, batch: RowBatch) -> jax.Array:
    """[B, T] -> [B, T]: as `sequence_sum`, divided by how many tokens of the completion count."""
    ones_BT = jnp.ones_like(x_BT)
    return sequence_sum(x_BT, batch) / jnp.maximum(sequence_sum(ones_BT, batch), 1)


# ---- small print


def _total(x_BT, batch: RowBatch):
    """The sum over the sequence, at each of its tokens."""
    # the rows are the sequences
    if batch.scored is None:
        return jnp.broadcast_to(jnp.sum(x_BT, axis=1, keepdims=True), x_BT.shape)
    # A sequence, or what it does not share with others, stands in neighbouring columns: see
    # packing.py.
    starts_BT = batch.segment_ids != jnp.roll(batch.segment_ids, 1, axis=1)
    if batch.completion_ids is not None:
        starts_BT |= batch.completion_ids != jnp.roll(batch.completion_ids, 1, axis=1)
    return _of_runs(x_BT, starts_BT.at[:, 0].set(True))


@jax.custom_vjp
def _of_runs(x_BT, starts_BT):
    """At each column, the sum over its run of columns; `starts` marks the first of each.

    Two passes of additions in a fixed order: what a scatter-add gives on a GPU is another number
    each time.
    """

    def add(earlier, later):
        (sum_before, starts_before), (x, starts) = earlier, later
        return jnp.where(starts, x, sum_before + x), starts_before | starts

    ends_BT = jnp.roll(starts_BT, -1, axis=1)
    until_BT, _ = jax.lax.associative_scan(add, (x_BT, starts_BT), axis=1)
    after_BT, _ = jax.lax.associative_scan(add, (x_BT, ends_BT), axis=1, reverse=True)
    return until_BT + after_BT - x_BT


# Each column has the same share in the sums of its whole run, so the slope of the sums is summed in
# the same way.
_of_runs.defvjp(
    lambda x, starts: (_of_runs(x, starts), starts),
    lambda starts, slope: (_of_runs(slope, starts), None),
)
