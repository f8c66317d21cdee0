"""Sums and means over a sequence, for losses that are more than a sum over tokens, such as GSPO's
ratio.

A row of a batch is not a sequence: where `training.packing` sets several side by side, a sum over a
row mixes them. The functions here sum over the scored tokens (loss_weight is not 0) of the same
completion, wherever it lies, and give every such token the result. A completion never reaches from
one row into another, so micro-batches and shards of a mesh do not matter. Both have gradients.
"""

import jax
import jax.numpy as jnp

from tunix_lite.basics.types import RowBatch


def sequence_sum(x_RW: jax.Array, batch: RowBatch) -> jax.Array:
    """[R, W] -> [R, W]: at each scored token, the sum of x over the scored tokens of its
    completion; 0 at all other tokens.

    The values of x at other tokens do not matter.
    Example: two completions in one row, x = [1, 2, 5], segment_ids = [1, 1, 2], all tokens
    scored -> [3, 3, 5]."""
    counts_RW = batch.loss_weight != 0
    x_RW = jnp.where(counts_RW, x_RW, 0)
    if batch.scored is None:
        # the rows are the sequences
        total_RW = jnp.broadcast_to(jnp.sum(x_RW, axis=1, keepdims=True), x_RW.shape)
    else:
        # A sequence, or what it does not share with others, stands in neighbouring columns: see
        # packing.py.
        starts_RW = batch.segment_ids != jnp.roll(batch.segment_ids, 1, axis=1)
        if batch.completion_ids is not None:
            starts_RW |= batch.completion_ids != jnp.roll(batch.completion_ids, 1, axis=1)
        total_RW = _of_runs(x_RW, starts_RW.at[:, 0].set(True))
    return jnp.where(counts_RW, total_RW, 0)


def sequence_mean(x_RW: jax.Array, batch: RowBatch) -> jax.Array:
    """[R, W] -> [R, W]: `sequence_sum` over the number of scored tokens of the completion."""
    ones_RW = jnp.ones_like(x_RW)
    return sequence_sum(x_RW, batch) / jnp.maximum(sequence_sum(ones_RW, batch), 1)


@jax.custom_vjp
def _of_runs(x_RW, starts_RW):
    """Sums each run of columns, at each of its columns; `starts` marks the first of each."""

    def add(earlier, later):
        (sum_before, starts_before), (x, starts) = earlier, later
        return jnp.where(starts, x, sum_before + x), starts_before | starts

    # Two passes of additions in a fixed order: what a scatter-add gives on a GPU is another number
    # each time.
    ends_RW = jnp.roll(starts_RW, -1, axis=1)
    until_RW, _ = jax.lax.associative_scan(add, (x_RW, starts_RW), axis=1)
    after_RW, _ = jax.lax.associative_scan(add, (x_RW, ends_RW), axis=1, reverse=True)
    return until_RW + after_RW - x_RW


# Each column has the same share in the sums of its whole run, so the slope of the sums is summed in
# the same way.
_of_runs.defvjp(
    lambda x, starts: (_of_runs(x, starts), starts),
    lambda starts, slope: (_of_runs(slope, starts), None),
)
