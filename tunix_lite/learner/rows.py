"""Lays out the sequences of a batch as rows on the mesh, and brings values back from there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.basics.types import Batch, RowBatch
from tunix_lite.learner import packing
from tunix_lite.learner.packing import Packed, RowShape
from tunix_lite.parallel.mesh import axis_size, put, sharding

PACKING = ("none", "sequences", "prefix")
# axes of a batch's arrays by their number of dims
_AXES = ((), ("seq",), ("batch", "seq"), ("batch", "seq", "seq"))


@dataclass(frozen=True)
class RowLayout:
    """Lays out the sequences of a batch as rows of fixed widths and counts: programs compile once.
    Example: RowLayout("none", 2, 64): a sequence a row, two micro-batches, and the last 64 columns
    hold all scored tokens."""

    # none: a sequence a row; sequences: side by side; prefix: and a group's prompt once
    packing: str = "none"
    # micro-batches; where rows are packed, the most that could ever be needed
    num_micro_batches: int = 1
    # columns at the end of unpacked rows in which all scored tokens are; None: as many as needed
    num_scored: int | None = None
    shape: RowShape | None = None  # shape of packed rows
    rows_per_micro_batch: int = 0  # packed rows in a micro-batch of a shard
    # unpacked rows of an update, empty ones after a batch with fewer sequences; 0: as they come
    num_rows: int = 0

    @property
    def width(self) -> int:
        """Tokens of a packed row; 0 where the rows are the sequences."""
        return self.shape.width if self.shape else 0

    def lay_out(self, batch: Batch) -> tuple[RowBatch, Packed]:
        """The batch in rows on the mesh, and where its tokens went. Raises ValueError where a field
        has another shape than tokens, where tokens count outside of the last `num_scored` columns,
        and as packing.packed and packing.unpacked do."""
        # every value about a token goes where its token goes
        shape = np.shape(batch.tokens)
        for path, value in jax.tree_util.tree_leaves_with_path(batch):
            if np.shape(value)[:2] != shape:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has shape {list(np.shape(value))}, and "
                    f"tokens have {list(shape)}: a batch holds one value per token, [B, T]"
                )
        if self.packing == "none":
            packed = packing.unpacked(batch, self.num_rows, self.num_scored)
        else:
            packed = packing.packed(
                batch,
                self.shape,
                self.rows_per_micro_batch,
                self.num_micro_batches,
                axis_size("fsdp"),
            )
        values = vars(jax.tree.map(packed.place, batch))
        # it is not for the update
        del values["seen"]
        places = packed.places | {"max_micro_batches": self.num_micro_batches}
        return jax.tree.map(on_mesh, RowBatch(**values | places)), packed


def at_scored(x_RW: jax.Array, batch: RowBatch, before: int = 0) -> jax.Array:
    """Values [R, W] or [R, W, K] at the scored tokens: [R, M] or [R, M, K]. before=1: at the tokens
    whose hidden states predict them."""
    if batch.scored is None:
        # the last columns, as a slice: gathers take a CPU twice as long as the head
        stop = x_RW.shape[1] - before
        return x_RW[:, stop - batch.is_scored.shape[1] : stop]
    columns = batch.previous if before else batch.scored
    return jnp.take_along_axis(x_RW, columns[..., None] if x_RW.ndim == 3 else columns, axis=1)


def row_shapes(
    layout: RowLayout,
    num_sequences: int,
    length: int,
    values: Sequence[str],
    streams: Sequence[str] = (),
) -> RowBatch:
    """Returns the shapes that `layout.lay_out` makes of [num_sequences, length], on the current
    mesh: packed rows as many as could ever be needed. values: the fields of float32 that the batch
    has; streams: the names of its streams."""
    is_packed = layout.packing != "none"
    # the most that could ever be needed, so that one program serves every batch
    num_rows = axis_size("fsdp") * layout.num_micro_batches * layout.rows_per_micro_batch
    R = num_rows if is_packed else num_sequences
    W = layout.width if is_packed else length
    M = layout.shape.num_scored if is_packed else layout.num_scored

    def shape(columns: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        place = sharding(("batch", "seq"), (R, columns))
        return jax.ShapeDtypeStruct((R, columns), dtype, sharding=place)

    columns = {"is_scored": shape(M, jnp.bool_)}
    if is_packed:
        columns["scored"] = shape(M, jnp.int32)
        columns["previous"] = shape(M, jnp.int32)
        columns |= layout.shape.lanes
        parts = (layout.num_micro_batches,)
        columns["most_scored"] = jax.ShapeDtypeStruct(
            parts, jnp.int32, sharding=sharding(("seq",), parts)
        )
        columns["num_micro_batches"] = jax.ShapeDtypeStruct(
            (), jnp.int32, sharding=sharding((), ())
        )
    return RowBatch(
        tokens=shape(W, jnp.int32),
        token_mask=shape(W, jnp.bool_),
        **{name: shape(W, jnp.float32) for name in values},
        streams={name: shape(W, jnp.float32) for name in streams},
        **columns,
        segment_ids=shape(W, jnp.int32),
        positions=shape(W, jnp.int32),
        completion_ids=shape(W, jnp.int32) if layout.packing == "prefix" else None,
        max_micro_batches=layout.num_micro_batches,
    )


def at_every_width(rows: RowBatch, layout: RowLayout) -> list[RowBatch]:
    """The shapes that `row_shapes` gives, for every W that a batch may take, the most first."""
    if layout.packing == "none":
        return [rows]

    def cut(columns: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (len(x), columns, *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    names = (
        "is_scored",
        "scored",
        "previous",
        "most_scored",
        "num_micro_batches",
        "constants",
    )
    every = []
    for shape in layout.shape.prefixes:
        # A run compiles them all before its first step, since which one a batch takes is not known.
        narrowed = jax.tree.map(partial(cut, shape.width), rows.per_row)
        as_they_are = {name: getattr(rows, name) for name in names}
        every.append(narrowed.replace(**as_they_are, **shape.lanes))
    return every


def on_mesh(x: np.ndarray | int) -> jax.Array:
    """An array of a batch on the mesh: its rows divided over fsdp; whole on every device where fsdp
    does not divide their number, and where it has no rows. One of jax is there already."""
    return x if isinstance(x, jax.Array) else put(x, *_AXES[np.ndim(x)])
