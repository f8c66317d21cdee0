"""Log-probabilities of a batch that `collect` asks for: under frozen weights, such as those of the
reference, or under today's."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.learner.micro_batches import cut, part_of
from tunix_lite.learner.rows import RowLayout
from tunix_lite.parallel.mesh import axis_size, constrain
from tunix_lite.types import Batch, Params, RowBatch, TokenScores


@dataclass(frozen=True)
class Rescore:
    """Log-probabilities under weights given with the batch: an algorithms.algorithm.Rescorer.

    Example: policy.rescore(params, batch) -> log-probabilities [B, T] under today's weights.
    """

    rows: RowLayout  # how a batch is laid out for it
    # (params, batch in rows) -> its compiled program, which it keeps
    program: Callable

    def __call__(self, params: Params, batch: Batch) -> np.ndarray:
        """Returns [B, T] float32, an array of the host; 0 where no token counts."""
        # what else a batch holds would only make another program
        read = Batch(batch.tokens, batch.token_mask, batch.loss_weight)
        laid_out, layout = self.rows.lay_out(read)
        return layout.back(self.compiled(params, laid_out)(params, laid_out))

    def compiled(self, params: Params, batch: RowBatch) -> Callable:
        """Returns the compiled program for these weights and this batch in rows, or for their
        shapes."""
        return self.program(params, batch)


@dataclass(frozen=True)
class FrozenScorer:
    """Log-probabilities under frozen weights: an algorithms.algorithm.Scorer.

    Example: policy.scorers["reference"](batch) -> ref_logprobs [B, T].
    """

    params: Params  # on the mesh, never donated
    rows: RowLayout  # how a batch is laid out for it
    # (params, batch in rows) -> its compiled program, which it keeps
    program: Callable

    def __call__(self, batch: Batch) -> np.ndarray:
        """Returns [B, T] float32, an array of the host; 0 where no token counts."""
        return Rescore(self.rows, self.program)(self.params, batch)

    def compiled(self, batch: RowBatch) -> Callable:
        """Returns the compiled program for this batch in rows, or for its shapes."""
        return self.program(self.params, batch)


def scoring_program(
    scores: Callable[[Params, RowBatch], TokenScores], rows: RowLayout
) -> jax.stages.Wrapped:
    """(params, batch in rows) -> log-probabilities [R, W]: compiled, micro-batch by micro-batch as
    the update is.

    Every device has all of them, so that every process can read them.
    """

    def score(params: Params, batch: RowBatch) -> jax.Array:
        logprobs_RW = map_micro_batches(
            lambda part: scores(params, part).logprobs, batch, rows.num_parts
        )
        return constrain(logprobs_RW, "seq", "seq")

    return jax.jit(score)


def map_micro_batches(
    fn: Callable[[RowBatch], jax.Array], batch: RowBatch, parts: int
) -> jax.Array:
    """fn(part) -> [rows, ...] of every micro-batch, as one array of all rows; zeros for parts that
    hold nothing."""
    num_used = batch.num_parts
    batch = batch.replace(num_parts=None)
    if parts == 1:
        return fn(batch)
    divided = cut(batch, parts)
    shards = axis_size("fsdp")
    like = jax.eval_shape(fn, part_of(divided, 0))

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        return out.at[i].set(fn(part_of(divided, i)))

    # the number of parts that run is traced, so this is a loop of XLA and not a scan
    start = jnp.zeros((parts, *like.shape), like.dtype)
    start = constrain(start, "layers", "batch", *["seq"] * (like.ndim - 1))
    out = jax.lax.fori_loop(0, parts if num_used is None else num_used, fill, start)

    # back from parts of shards to rows
    out = out.reshape(parts, shards, -1, *like.shape[1:])
    out = out.swapaxes(0, 1)
    out = out.reshape(-1, *like.shape[1:])
    return constrain(out, "batch", *["seq"] * (like.ndim - 1))
