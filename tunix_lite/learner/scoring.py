"""Log-probabilities of a batch that `collect` asks for: under frozen weights, such as those of the
reference, or under today's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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

    rows: RowLayout  # layout of its batches
    # (params, batch in rows) -> its compiled program, which it keeps
    program: Callable

    def __call__(self, params: Params, batch: Batch) -> np.ndarray:
        # Other fields of a batch would only make another program.
        read = Batch(batch.tokens, batch.token_mask, batch.loss_weight)
        laid_out, layout = self.rows.lay_out(read)
        return layout.back(self.compiled(params, laid_out)(params, laid_out))

    def compiled(self, params: Params, batch: RowBatch) -> Callable:
        return self.program(params, batch)


@dataclass(frozen=True)
class FrozenScorer:
    """Log-probabilities under frozen weights: an algorithms.algorithm.Scorer.

    Example: policy.scorers["reference"](batch) -> ref_logprobs [B, T].
    """

    params: Params  # on the mesh, never donated
    rescore: Rescore

    def __call__(self, batch: Batch) -> np.ndarray:
        return self.rescore(self.params, batch)

    def compiled(self, batch: RowBatch) -> Callable:
        return self.rescore.compiled(self.params, batch)


def scoring_program(
    scores: Callable[[Params, RowBatch], TokenScores], rows: RowLayout
) -> jax.stages.Wrapped:
    """(params, batch in rows) -> log-probabilities [R, W]: compiled, micro-batch by micro-batch as
    the update is."""
    return on_every_device(lambda params, part: scores(params, part).logprobs, rows)


def on_every_device(
    of_part: Callable[[Params, RowBatch], Any], rows: RowLayout
) -> jax.stages.Wrapped:
    """(params, batch in rows) -> what of_part gives of each micro-batch, a tree of [R, W, ...].

    Every device has all of it, so that every process can read it.
    """

    def score(params: Params, batch: RowBatch) -> Any:
        scores = map_micro_batches(partial(of_part, params), batch, rows.num_parts)
        return jax.tree.map(lambda x: constrain(x, *["seq"] * x.ndim), scores)

    return jax.jit(score)


def map_micro_batches(fn: Callable[[RowBatch], Any], batch: RowBatch, parts: int) -> Any:
    """fn(part) -> [rows, ...], or a tree of such arrays, of every micro-batch, as arrays of all
    rows; zeros for parts that hold nothing."""
    num_used = batch.num_parts
    batch = batch.per_row
    if parts == 1:
        return fn(batch)
    divided = cut(batch, parts)
    shards = axis_size("fsdp")
    like = jax.eval_shape(fn, part_of(divided, 0))

    # parts that hold nothing stay zero
    def empty(x: jax.ShapeDtypeStruct) -> jax.Array:
        start = jnp.zeros((parts, *x.shape), x.dtype)
        return constrain(start, "layers", "batch", *["seq"] * (x.ndim - 1))

    def fill(i: jax.Array, out: Any) -> Any:
        return jax.tree.map(lambda to, x: to.at[i].set(x), out, fn(part_of(divided, i)))

    # back from parts of shards to rows
    def in_rows(out: jax.Array) -> jax.Array:
        out = out.reshape(parts, shards, -1, *out.shape[2:])
        out = out.swapaxes(0, 1)
        out = out.reshape(-1, *out.shape[3:])
        return constrain(out, "batch", *["seq"] * (out.ndim - 1))

    # the number of parts that run is traced, so this is a loop of XLA and not a scan
    start = jax.tree.map(empty, like)
    out = jax.lax.fori_loop(0, parts if num_used is None else num_used, fill, start)
    return jax.tree.map(in_rows, out)
