"""Micro-batches: a batch in rows, cut into parts that are worked off one after the other and only
ever added up.

A part is `rows_per_part` rows of each shard of the batch (fsdp), so no row moves between devices.
Where sequences are packed, the rows that hold something differ from batch to batch, and so does the
number of parts that run: it travels with the batch, and nothing is compiled again.
"""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tunix_lite.learner import packing
from tunix_lite.learner.packing import Layout, RowShape
from tunix_lite.parallel.mesh import axis_size, constrain, put, use_rules
from tunix_lite.types import Batch, Max

PACKING = ("none", "sequences", "prefix")


@dataclass(frozen=True)
class Rows:
    """How the sequences of a batch become rows. Widths and counts are fixed, so that programs
    compile once."""

    # none: a sequence a row; sequences: side by side; prefix: and a group's prompt once
    packing: str = "none"
    num_parts: int = 1  # micro-batches; where rows are packed, as many as could ever be needed
    # last columns of unpacked rows, where the tokens that count are; None: as needed
    num_scored: int | None = None
    shape: RowShape | None = None  # of packed rows
    rows_per_part: int = 0  # packed rows in a micro-batch of a shard

    @property
    def width(self) -> int:
        """Tokens of a packed row; 0 where the rows are the sequences."""
        return self.shape.width if self.shape else 0

    def lay_out(self, batch: Batch) -> tuple[Batch, Layout]:
        """The batch in rows on the mesh, and where its tokens went."""
        tokens, mask = np.asarray(batch.tokens), np.asarray(batch.token_mask)
        counts = np.asarray(batch.loss_weight) != 0
        if self.packing == "none":
            layout = packing.unpacked(mask, counts)
        else:
            sizes = self.shape, self.rows_per_part, self.num_parts, axis_size("fsdp")
            layout = packing.packed(tokens, mask, counts, *sizes)
        placed = {
            field.name: None
            if getattr(batch, field.name) is None
            else layout.place(getattr(batch, field.name))
            for field in fields(Batch)
            if field.name not in (*LAYOUT, *STATIC)
        }
        placed |= {name: getattr(layout, name) for name in LAYOUT}
        if self.packing == "none":
            last = counts[:, counts.shape[1] - self._last_columns(counts) :]
            placed |= {"scored": None, "previous": None, "is_scored": last, "num_parts": None}
        arrays = {name: None if x is None else on_mesh(x) for name, x in placed.items()}
        return Batch(**arrays, **self.static), layout

    @property
    def static(self) -> dict:
        """What of a batch in rows is known while compiling."""
        shape = self.shape if self.packing == "prefix" else RowShape(0)
        return dict(zip(STATIC, (shape.lead, shape.lane)))

    def _last_columns(self, counts) -> int:
        """How many columns at the end of the rows have all tokens that count."""
        width = counts.shape[1]
        needed = width - int(counts.any(axis=0).argmax()) if counts.any() else 1
        # in quarters of a row, so that few programs are compiled
        if self.num_scored is None:
            return min(width - 1, -(-needed // -(-width // 4)) * -(-width // 4))
        if needed > self.num_scored:
            raise ValueError(
                f"tokens count in the last {needed} columns, and {self.num_scored} are foreseen"
            )
        return self.num_scored


STATIC = ("lead", "lane")
LAYOUT = ("segment_ids", "positions", "branches", "scored", "previous", "is_scored", "num_parts")


def on_mesh(x) -> jax.Array:
    """An array of a batch: rows divided over fsdp, a number everywhere."""
    return put(x, *("batch", "seq")[: np.ndim(x)]) if np.ndim(x) else put(np.int32(x))


def cut(batch, parts: int):
    """Rows [R, ...] as parts [parts, rows, ...], each with an equal share of every shard's rows."""
    shards = axis_size("fsdp")

    def divide(x):
        rows = x.shape[0] // (shards * parts)
        x = (
            x.reshape(shards, parts, rows, *x.shape[1:])
            .swapaxes(0, 1)
            .reshape(parts, shards * rows, *x.shape[1:])
        )
        return constrain(x, "layers", "batch", *["seq"] * (x.ndim - 2))

    return jax.tree.map(divide, batch)


def mapped(fn, batch: Batch, parts: int):
    """fn(part) -> [rows, ...] of every micro-batch, as one array of all rows; zeros for parts that
    hold nothing."""
    used, batch = batch.num_parts, batch.replace(num_parts=None)
    if parts == 1:
        return fn(batch)
    divided, shards = cut(batch, parts), axis_size("fsdp")
    like = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], divided))

    def fill(i, out):
        return out.at[i].set(fn(jax.tree.map(lambda x: x[i], divided)))

    start = constrain(
        jnp.zeros((parts, *like.shape), like.dtype), "layers", "batch", *["seq"] * (like.ndim - 1)
    )
    out = jax.lax.fori_loop(0, parts if used is None else used, fill, start)
    out = (
        out.reshape(parts, shards, -1, *like.shape[1:]).swapaxes(0, 1).reshape(-1, *like.shape[1:])
    )
    return constrain(out, "batch", *["seq"] * (like.ndim - 1))


def summed(fn, batch, parts: int, used=None, places=None, every: int = 1):
    """The sums of fn over the parts of a batch: (grads, metrics); exact, because both are plain
    sums. A `Max` among the metrics comes out as the largest of the parts'.

    fn(part) -> (grads, metrics). used: how many parts hold something, a traced number; None: all.
    places: where each gradient lies (None: wherever the compiler likes). Gradients cross the mesh
    once in `every` parts.
    """
    if every > 1 and axis_size("fsdp") > 1:
        fn, parts, used = (
            _apart(fn, every, places),
            parts // every,
            None if used is None else -(-used // every),
        )
        batch = jax.tree.map(lambda x: _by_shard(x, parts, every), batch)
    elif parts == 1:
        return _plain(_settled(fn(batch), places))
    else:
        batch = cut(batch, parts)
    like = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], batch))
    start = _settled(_nothing(like), places)

    def add(i, total):
        part = fn(jax.tree.map(lambda x: x[i], batch))
        return _together(total, _settled(part, places))

    return _plain(jax.lax.fori_loop(0, parts if used is None else used, add, start))


def _is_max(leaf) -> bool:
    return isinstance(leaf, Max)


def _nothing(like):
    """What sums and maxima of these shapes start from."""

    def of(x):
        if _is_max(x):
            return Max(jnp.full(x.value.shape, -jnp.inf, x.value.dtype))
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    return jax.tree.map(of, like, is_leaf=_is_max)


def _together(total, part):
    def both(x, y):
        return Max(jnp.maximum(x.value, y.value)) if _is_max(x) else x + y

    return jax.tree.map(both, total, part, is_leaf=_is_max)


def _plain(sums):
    """The same with numbers for maxima."""
    return jax.tree.map(lambda x: x.value if _is_max(x) else x, sums, is_leaf=_is_max)


def _over_shards(x):
    """A gradient or a metric of each shard, [shards, ...], as that of all."""
    return Max(jnp.max(x.value, axis=0)) if _is_max(x) else jnp.sum(x, axis=0)


def _settled(sums, places):
    """Gradients, told where they lie: as the parameters do, so that what is reduced is only ever a
    share."""
    grads, metrics = sums
    if places is not None:
        grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, places)
    return grads, metrics


def _by_shard(x, syncs: int, every: int):
    """[R, ...] -> [syncs, every, shards, rows, ...]"""
    shards = axis_size("fsdp")
    x = x.reshape(shards, syncs, every, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 0, 2)
    return jax.lax.with_sharding_constraint(x, P(None, None, "fsdp", *[None] * (x.ndim - 3)))


def _apart(fn, every: int, places):
    """fn over `every` parts of each shard, summed shard by shard, and over the shards only then.

    Each device holds the sum of its own gradient, not divided over fsdp, while it lasts.
    """

    def alone(part):
        # a shard's rows are all its own
        with use_rules("train", batch=None):
            return fn(part)

    of_shards = jax.vmap(alone, spmd_axis_name="fsdp")

    def own(
        x, place
    ):  # a gradient of each shard: its first dim over fsdp, the others as tp divides them
        kept = (None if entry == "fsdp" else entry for entry in place.spec)
        return jax.lax.with_sharding_constraint(x, P("fsdp", *kept))

    def lie_apart(sums):
        grads, metrics = sums
        return (grads if places is None else jax.tree.map(own, grads, places)), metrics

    def together(parts):
        like = jax.eval_shape(of_shards, jax.tree.map(lambda x: x[0], parts))
        start = lie_apart(_nothing(like))

        def add(i, total):
            return _together(total, lie_apart(of_shards(jax.tree.map(lambda x: x[i], parts))))

        total = jax.lax.fori_loop(0, every, add, start)
        return jax.tree.map(_over_shards, total, is_leaf=_is_max)

    return together
