"""Micro-batches: a batch in rows, cut into parts that run one after the other and are only ever
added up.

A part is `rows_per_part` rows of each shard of the batch (fsdp), so no row moves between devices.
Where sequences are packed, the number of rows that hold something differs from batch to batch, and
so does the number of parts that run. That number travels with the batch: nothing compiles again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tunix_lite.parallel.mesh import axis_size, constrain, use_rules
from tunix_lite.types import Max, Metrics

# gradients, a pytree like the parameters, and metrics
Sums = tuple[Any, Metrics]


def cut(batch: Any, parts: int) -> Any:
    """Arrays of rows [R, ...] as parts [parts, rows, ...]; each part has an equal share of the rows
    of every shard.

    Example: 8 rows on 2 shards in 2 parts -> rows 0 1 4 5 and rows 2 3 6 7.
    """
    shards = axis_size("fsdp")

    def divide(x: jax.Array) -> jax.Array:
        rows = x.shape[0] // (shards * parts)
        x = x.reshape(shards, parts, rows, *x.shape[1:])
        x = x.swapaxes(0, 1)
        x = x.reshape(parts, shards * rows, *x.shape[3:])
        return constrain(x, "layers", "batch", *["seq"] * (x.ndim - 2))

    return jax.tree.map(divide, batch)


def accumulate(
    fn: Callable[[Any], Sums],
    batch: Any,
    parts: int,
    num_used: jax.Array | None = None,
    grad_shardings: Any = None,
    sync_every: int = 1,
) -> Sums:
    """The sums of fn over the parts of a batch: (grads, metrics). They are exact, because both are
    plain sums. A `Max` among the metrics comes out as the largest of the parts' values.

    fn(part) -> (grads, metrics). num_used: how many parts hold something, a traced number; None:
    all. grad_shardings: where each gradient lies; None: wherever the compiler likes. Gradients
    cross the mesh once in `sync_every` parts.
    """
    place = partial(_constrain_grads, grad_shardings=grad_shardings)
    if sync_every > 1 and axis_size("fsdp") > 1:
        fn, batch, parts, num_used = _by_shard(
            fn, batch, parts, num_used, grad_shardings, sync_every
        )
    elif parts == 1:
        return _values_of(place(fn(batch)))
    else:
        batch = cut(batch, parts)
    return _values_of(_sum_parts(fn, batch, parts if num_used is None else num_used, place))


def _by_shard(
    fn: Callable[[Any], Sums],
    batch: Any,
    parts: int,
    num_used: jax.Array | None,
    grad_shardings: Any,
    sync_every: int,
) -> tuple[Callable[[Any], Sums], Any, int, jax.Array | None]:
    """Groups the parts into larger ones, which each shard adds up by itself: (fn, batch, parts,
    num_used)."""
    parts = parts // sync_every
    num_used = None if num_used is None else -(-num_used // sync_every)
    batch = jax.tree.map(lambda x: _split_by_shard(x, parts, sync_every), batch)
    return _sum_per_shard(fn, sync_every, grad_shardings), batch, parts, num_used


def _sum_parts(
    fn: Callable[[Any], Sums], batch: Any, num_parts: int | jax.Array, place: Callable[[Sums], Sums]
) -> Sums:
    """The sums of fn over the first parts of a batch, arrays [parts, ...], one after the other.
    `place` keeps gradients on the devices where they belong."""
    like = jax.eval_shape(fn, part_of(batch, 0))

    def add(i: jax.Array, total: Sums) -> Sums:
        return _add_up(total, place(fn(part_of(batch, i))))

    # a traced number of parts: a loop of XLA, and not a scan
    return jax.lax.fori_loop(0, num_parts, add, place(_empty_sums(like)))


def part_of(batch: Any, i: int | jax.Array) -> Any:
    """Part i of arrays [parts, ...]."""
    return jax.tree.map(lambda x: x[i], batch)


def _is_max(leaf: Any) -> bool:
    return isinstance(leaf, Max)


def _empty_sums(like: Sums) -> Sums:
    """Returns the start values of sums and maxima of these shapes."""

    def start_of(x: Any) -> Any:
        if _is_max(x):
            return x.replace(value=jnp.full(x.value.shape, -jnp.inf, x.value.dtype))
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    return jax.tree.map(start_of, like, is_leaf=_is_max)


def _add_up(total: Sums, part: Sums) -> Sums:
    """Sums of both; of a `Max`, the larger."""

    def both(x: Any, y: Any) -> Any:
        if _is_max(x):
            return x.replace(value=jnp.maximum(x.value, y.value))
        return x + y

    return jax.tree.map(both, total, part, is_leaf=_is_max)


def _values_of(sums: Sums) -> Sums:
    """The same with a number for each `Max`."""

    def value_of(x: Any) -> Any:
        if not _is_max(x):
            return x
        return -x.value if x.of_negative else x.value

    return jax.tree.map(value_of, sums, is_leaf=_is_max)


def _reduce_shards(x: Any) -> Any:
    """A gradient or a metric of each shard, [shards, ...], as that of all shards."""
    if _is_max(x):
        return x.replace(value=jnp.max(x.value, axis=0))
    return jnp.sum(x, axis=0)


def _constrain_grads(sums: Sums, grad_shardings: Any) -> Sums:
    """Gradients lie as the parameters do, so that each device only ever reduces its share."""
    grads, metrics = sums
    if grad_shardings is not None:
        grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, grad_shardings)
    return grads, metrics


def _split_by_shard(x: jax.Array, syncs: int, sync_every: int) -> jax.Array:
    """[R, ...] -> [syncs, sync_every, shards, rows, ...]"""
    shards = axis_size("fsdp")
    x = x.reshape(shards, syncs, sync_every, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 0, 2)
    return jax.lax.with_sharding_constraint(x, P(None, None, "fsdp", *[None] * (x.ndim - 3)))


def _sum_per_shard(
    fn: Callable[[Any], Sums], sync_every: int, grad_shardings: Any
) -> Callable[[Any], Sums]:
    """fn over `sync_every` parts, summed on each shard first, and over the shards only then.

    While this lasts, each device holds the sum of its own gradient, not divided over fsdp.
    """

    def of_one_shard(part: Any) -> Sums:
        # all rows of a shard are its own
        with use_rules("train", batch=None):
            return fn(part)

    of_shards = jax.vmap(of_one_shard, spmd_axis_name="fsdp")

    def keep_on_shard(x: jax.Array, sharding: Any) -> jax.Array:
        # a gradient of each shard: its first dim over fsdp, the others as tp divides them
        others = (None if entry == "fsdp" else entry for entry in sharding.spec)
        return jax.lax.with_sharding_constraint(x, P("fsdp", *others))

    def keep_on_shards(sums: Sums) -> Sums:
        grads, metrics = sums
        if grad_shardings is not None:
            grads = jax.tree.map(keep_on_shard, grads, grad_shardings)
        return grads, metrics

    def sum_of_parts(parts: Any) -> Sums:
        total = _sum_parts(of_shards, parts, sync_every, keep_on_shards)
        return jax.tree.map(_reduce_shards, total, is_leaf=_is_max)

    return sum_of_parts
