"""Micro-batches: a batch in rows, cut into parts that run one after the other and are only ever
added up.

A part is `rows_per_micro_batch` rows of each shard of the batch (fsdp), so no row moves between
devices. Where sequences are packed, the number of rows that hold something differs from batch to
batch, and so does the number of parts that run. That number travels with the batch: nothing
compiles again.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.basics.types import Max, Metrics, RowBatch
from tunix_lite.parallel.mesh import axis_size, constrain, use_rules

# a pytree of arrays
Tree = Any
# gradients, a pytree like the parameters, and metrics
Sums = tuple[Tree, Metrics]
# rows of a micro-batch -> its gradients and metrics
OfPart = Callable[[Tree], Sums]
# applies a function to each value of a sum, of which a Max is one
map_sums = partial(jax.tree.map, is_leaf=Max.is_one)


def cut(batch: RowBatch) -> RowBatch:
    """The rows [R, ...] of a batch as micro-batches [parts, rows, ...] with equal shares of every
    shard. Example: 8 rows on 2 shards in 2 parts -> rows 0 1 4 5 and rows 2 3 6 7."""
    sizes = axis_size("fsdp"), batch.max_micro_batches

    def divide(x: jax.Array) -> jax.Array:
        inner = x.shape[1:]
        # no row may leave its shard: that would be communication in every part
        x = x.reshape(*sizes, -1, *inner).swapaxes(0, 1).reshape(sizes[1], -1, *inner)
        return constrain(x, "layers", "batch", *["seq"] * len(inner))

    return jax.tree.map(divide, batch.per_row).replace(most_scored=batch.most_scored)


def accumulate(
    fn: OfPart,
    batch: RowBatch,
    grad_shardings: Tree | None = None,
    sync_every: int = 1,
) -> Sums:
    """The sums of fn over the micro-batches of a batch: (grads, metrics), exact, as both are plain
    sums. Of a `Max` among the metrics it is the largest.

    fn(rows) -> (grads, metrics). grad_shardings: where each gradient lies; None where fn gives None
    for grads. Gradients cross the mesh once in `sync_every` micro-batches."""

    def of_rows(rows: RowBatch) -> Sums:
        return fn(rows.with_constants(batch.constants))

    def place(sums: Sums) -> Sums:
        # Gradients lie as the parameters do, so that each device only ever reduces its share.
        grads, metrics = sums
        return jax.lax.with_sharding_constraint(grads, grad_shardings), metrics

    if batch.max_micro_batches == 1:
        sums = place(fn(batch))
    elif sync_every > 1:
        sums = _sum_per_shard(of_rows, batch, grad_shardings, sync_every, place)
    else:
        sums = _sum_parts(of_rows, cut(batch), batch.num_used, place)
    return map_sums(Max.number_of, sums)


def _sum_parts(
    fn: OfPart,
    batch: Tree,
    num_micro_batches: int | jax.Array,
    place: Callable[[Sums], Sums],
) -> Sums:
    """The sums of fn over the first parts of a batch, arrays [parts, ...], one after the other."""

    def add(i: jax.Array, sums: Sums) -> Sums:
        return map_sums(operator.add, sums, place(fn(part_of(batch, i))))

    # of shapes alone: nothing is computed twice
    start = place(map_sums(Max.start_of, jax.eval_shape(fn, part_of(batch, 0))))
    # a traced number of parts: a loop of XLA, and not a scan
    return jax.lax.fori_loop(0, num_micro_batches, add, start)


def part_of(batch: Tree, i: int | jax.Array) -> Tree:
    """Part i of arrays [parts, ...]."""
    return jax.tree.map(lambda x: x[i], batch)


def _sum_per_shard(
    fn: OfPart,
    batch: RowBatch,
    grad_shardings: Tree | None,
    sync_every: int,
    place: Callable[[Sums], Sums],
) -> Sums:
    """The sums of fn over all parts, `sync_every` of which are summed on each shard first, and over
    the shards only then. While this lasts, each device holds the sum of its own gradient, not
    divided over fsdp."""

    def divide(x: jax.Array) -> jax.Array:
        # [R, ...] -> [parts, sync_every, shards, rows, ...]
        parts = batch.max_micro_batches // sync_every
        x = x.reshape(axis_size("fsdp"), parts, sync_every, -1, *x.shape[1:])
        x = jnp.moveaxis(x, 0, 2)
        spec = P(None, None, "fsdp", *[None] * (x.ndim - 3))
        return jax.lax.with_sharding_constraint(x, spec)

    def of_one_shard(part: Tree) -> Sums:
        # all rows of a shard are its own
        with use_rules("train", batch=None):
            return fn(part)

    # vmap over shards keeps their gradients apart, so that nothing is summed over the mesh here.
    # They have one number of scored tokens, or XLA would compute the head for each size.
    shards = jax.tree.map(lambda x: 0, batch.per_row)
    of_shards = jax.vmap(of_one_shard, (shards,), spmd_axis_name="fsdp")

    def keep_on_shard(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        # a gradient of each shard: its first dim over fsdp, the others as tp divides them
        others = (None if entry == "fsdp" else entry for entry in sharding.spec)
        return jax.lax.with_sharding_constraint(x, P("fsdp", *others))

    def keep_on_shards(sums: Sums) -> Sums:
        grads, metrics = sums
        return jax.tree.map(keep_on_shard, grads, grad_shardings), metrics

    def reduce(x: jax.Array | Max) -> jax.Array | Max:
        # [shards, ...] -> that of all shards
        if Max.is_one(x):
            return x.replace(value=jnp.max(x.value, axis=0))
        return jnp.sum(x, axis=0)

    def sum_of_parts(parts: Tree) -> Sums:
        total = _sum_parts(of_shards, parts, sync_every, keep_on_shards)
        return map_sums(reduce, total)

    larger = jax.tree.map(divide, batch.per_row)
    if batch.most_scored is not None:
        larger = larger.replace(most_scored=batch.most_scored.reshape(-1, sync_every))
    return _sum_parts(sum_of_parts, larger, -(-batch.num_used // sync_every), place)
