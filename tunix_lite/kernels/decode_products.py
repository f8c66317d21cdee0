"""The products of a layer for one new token per sequence, as kernels for NVIDIA GPUs (Pallas, which
hands them to Triton). The order of every sum is fixed. Letters beside those of types.py: R rows and
W columns of a program, S what is summed over, O outputs, P parts of the sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tunix_lite.models.decoder import Products
from tunix_lite.models.kernel_choice import FEWEST
from tunix_lite.models.rounding import stored, wide
from tunix_lite.parallel.mesh import spec

# Rows and columns of a program, at most: their sums lie in registers.
_MOST_OF_A_SIDE = 64
AT_ONCE = 64  # numbers that are summed over, at once
_MOST_PARTS = 8
# A kernel has at least so many programs, if it can: half the multiprocessors of an H100. That they
# read its memory about as fast as all is an assumption, which no GPU has measured.
_FEWEST_PROGRAMS = 66


@dataclass(frozen=True)
class _Tile:
    """The part of a product that a program computes: rows and columns, of one of so many parts of
    the sum.
    Example: _Tile(64, 64, 4): with 1,152 columns and up to 64 rows that is 18 x 4 programs."""

    rows: int
    columns: int
    parts: int = 1

    def programs(self, B: int, O: int) -> int:
        """Counts the programs."""
        return pl.cdiv(B, self.rows) * pl.cdiv(O, self.columns) * self.parts


def _tile_of(B: int, S: int, O: int, most_parts: int) -> _Tile:
    """The largest tile with enough programs: of (64, 1024, 1152, most_parts=8) _Tile(64, 64, 4)."""
    # Triton wants powers of two.
    rows = max(FEWEST, min(_MOST_OF_A_SIDE, 1 << (B - 1).bit_length()))
    tile = _Tile(rows, _MOST_OF_A_SIDE)
    while tile.programs(B, O) < _FEWEST_PROGRAMS:
        # Parts first: smaller tiles read the weights or the rows more often, parts do not.
        parts = 2 * tile.parts
        if parts <= most_parts and S % (parts * FEWEST) == 0:
            tile = replace(tile, parts=parts)
        elif tile.columns >= tile.rows and tile.columns > FEWEST:
            # The longer side first: of tiles of one size, a square one reads the least.
            tile = replace(tile, columns=tile.columns // 2)
        elif tile.rows > FEWEST:
            tile = replace(tile, rows=tile.rows // 2)
        else:
            break
    return tile


@dataclass(frozen=True)
class FusedProducts(Products):
    """The kernels in place of plain products, for one token of each sequence.
    Example: FusedProducts(jnp.float32) as `products` of decoder.forward_by_layer."""

    interpret: bool = False  # runs the kernels without a GPU, as tests do

    def qkv(self, x_BTD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, ...]:
        """See Products."""
        named = [w[name] for name in "qkv"]
        axes = [("heads", "head_dim"), *[("kv_heads", "head_dim")] * 2]
        specs = [_spec(a, x.shape[1:]) for a, x in zip(axes, named)]
        rows = _rows(x_BTD)

        def multiply(x_BD: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
            matrices = [x.reshape(len(x), -1) for x in weights]
            out_PBO = _product("decode_qkv", self.interpret, x_BD, matrices, x_BD.dtype)
            # Heads are parted last, so that XLA sees that decode_attention puts them together.
            heads = np.cumsum([x.shape[1] for x in weights])[:-1]
            by_head = out_PBO.reshape(len(x_BD), 1, -1, weights[0].shape[-1])
            return tuple(jnp.split(by_head, heads, axis=2))

        out_specs = tuple(PartitionSpec(rows, None, *s) for s in specs)
        in_specs = (PartitionSpec(rows, None), *[PartitionSpec(None, *s) for s in specs])
        return _on_devices(multiply, in_specs, out_specs)(x_BTD[:, 0], *named)

    def out(self, attended_BTNH: jax.Array, w: dict[str, Any]) -> jax.Array:
        """See Products."""
        return self._to_residual(attended_BTNH, w["o"], "heads")

    def down(self, hidden_BTF: jax.Array, w: dict[str, Any]) -> jax.Array:
        """See Products."""
        return self._to_residual(hidden_BTF, w["down"], "mlp")

    def gated(self, x_BTD: jax.Array, w: dict[str, Any], activation: str) -> jax.Array:
        """See Products."""
        axis = _spec(("mlp",), w["gate"].shape[1:])[0]
        rows = _rows(x_BTD)

        def multiply(x_BD: jax.Array, *weights: jax.Array) -> jax.Array:
            options = {"dtype": x_BD.dtype, "activation": activation}
            return _product("decode_gated", self.interpret, x_BD, weights, **options)[0]

        in_specs = (PartitionSpec(rows, None), *[PartitionSpec(None, axis)] * 2)
        on_devices = _on_devices(multiply, in_specs, PartitionSpec(rows, axis))
        return on_devices(x_BTD[:, 0], w["gate"], w["up"])[:, None]

    def after_layer(self, x_BTD: jax.Array) -> jax.Array:
        """See Products."""
        # Without it XLA keeps x in float32, and computes it again where the layer adds to it.
        return jax.lax.optimization_barrier(x_BTD)

    def _to_residual(self, x: jax.Array, weight: jax.Array, name: str) -> jax.Array:
        """Multiplies x [B, 1, *S] with a weight [*S, D], [B, 1, D]. name: of the first dim of S."""
        axis = _spec((name,), weight.shape[:1])[0]
        rows = _rows(x)
        summed = [axis, *[None] * (x.ndim - 3)]

        def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
            x_BS = x.reshape(len(x), -1)
            matrix = weight.reshape(x_BS.shape[1], -1)
            # A sum that is whole is rounded by the kernel.
            dtype = x.dtype if axis is None else jnp.float32
            parts = _product(
                "decode_product", self.interpret, x_BS, [matrix], dtype, _MOST_PARTS
            )
            out_BO = parts[0] if len(parts) == 1 else parts.sum(axis=0)
            if axis is not None:
                # As `project`: each device's part is rounded if parts travel rounded.
                out_BO = stored(out_BO, jnp.promote_types(self.tp_reduce_dtype, x.dtype))
                out_BO = jax.lax.psum(out_BO, axis)
            return stored(wide(out_BO), x.dtype)

        in_specs = (PartitionSpec(rows, *summed), PartitionSpec(*summed, None))
        on_devices = _on_devices(multiply, in_specs, PartitionSpec(rows, None))
        return on_devices(x[:, 0], weight)[:, None]


def _spec(axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    return spec(axes, shape, jax.sharding.get_abstract_mesh())


def _rows(x_BT: jax.Array) -> str | None:
    """The axis of the mesh over which sequences are divided."""
    return _spec(("batch",), x_BT.shape[:1])[0]


def _on_devices(function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
    # As in decode_attention: kernels do not say over which axes their results vary.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _product(
    name: str,
    interpret: bool,
    x_BS: jax.Array,
    weights_SO: Sequence[jax.Array],
    dtype: DTypeLike,
    most_parts: int = 1,
    activation: str | None = None,
) -> jax.Array:
    """Multiplies x with each weight, side by side, [P, B, O], or activation(x gate) * (x up)."""
    B, S = x_BS.shape
    of_group = 1 if activation is None else 2
    widths = [x.shape[1] for x in weights_SO[::of_group]]
    tile = _tile_of(B, S, sum(widths), most_parts)
    # Parts are added up outside, so they stay unrounded until then.
    if tile.parts != 1:
        dtype = jnp.float32
    out = jax.ShapeDtypeStruct((tile.parts, B, sum(widths)), dtype)
    inputs = (x_BS, *weights_SO)

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda r, s, o: (0,) * len(x.shape))

    # Gate and up are two tiles of a program.
    columns = tile.columns * of_group
    call = pl.pallas_call(
        partial(_kernel, tile, activation),
        # programs by rows, parts of the sum, and pieces of the columns
        grid=(
            pl.cdiv(B, tile.rows),
            tile.parts,
            sum(pl.cdiv(n, tile.columns) for n in widths),
        ),
        in_specs=[whole(x) for x in inputs],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=triton.CompilerParams(
            # 4 groups of 32 threads hold the sums of 64 x 64 with ease
            num_warps=8 if tile.rows * columns > 64 * 64 else 4,
            # turns of the loop that are read ahead, into at most 96 KiB of shared memory
            num_stages=4 if x_BS.dtype.itemsize == 2 else 2,
        ),
        interpret=interpret,
        name=name,
    )
    return call(*inputs)


def _kernel(tile: _Tile, activation: str | None, x_BS: Any, *refs: Any) -> None:
    """A part of the sum of some rows and columns: of one of the weights, or of gate and up."""
    *weights, out_PBO = refs
    dtype = out_PBO.dtype
    part = pl.program_id(1)
    rows_R = pl.program_id(0) * tile.rows + jnp.arange(tile.rows)
    # What lies beyond the last row or column is read as the last one.
    rows_R = jnp.minimum(rows_R, len(x_BS) - 1)[:, None]
    of_part = x_BS.shape[1] // tile.parts
    # A divisor, so that no turn reads beyond the part.
    at_once = int(np.gcd(of_part, AT_ONCE))
    # As in decode_attention: tf32 is too coarse.
    exact = jax.lax.Precision.HIGHEST if x_BS.dtype == jnp.float32 else None

    def write(group: list, piece: Any, first: int) -> None:
        O = group[0].shape[1]
        at_W = piece * tile.columns + jnp.arange(tile.columns)
        # Triton reads 16 bytes at once, and ahead, only of columns that it sees to be in a row.
        at_W = (jnp.minimum(at_W, O - 1) if O % tile.columns else at_W)[None]

        def add(i: jax.Array, sums: tuple) -> tuple:
            at = part * of_part + i * at_once + jnp.arange(at_once)
            x = x_BS[rows_R, at[None]]
            products = [triton.dot(x, w[at[:, None], at_W], precision=exact) for w in group]
            return tuple(a + b for a, b in zip(sums, products))

        nothing = (jnp.zeros((tile.rows, tile.columns), jnp.float32),) * len(group)
        sums = jax.lax.fori_loop(0, of_part // at_once, add, nothing)
        if activation:
            # Rounded as two products by themselves would be.
            gate_RW, up_RW = (x.astype(dtype).astype(jnp.float32) for x in sums)
            if activation == "silu":
                gate_RW = gate_RW / (1 + jnp.exp(-gate_RW))
            else:
                # Triton has exp and no tanh: half of 1 + tanh(y) is 1 - 1 / (exp(2 y) + 1)
                cubed_RW = 0.044715 * gate_RW * gate_RW * gate_RW
                y_RW = np.sqrt(2 / np.pi).astype(np.float32) * (gate_RW + cubed_RW)
                gate_RW = gate_RW * (1 - 1 / (jnp.exp(2 * y_RW) + 1))
            sums = [gate_RW * up_RW]
        out_PBO[part, rows_R, first + at_W] = sums[0].astype(dtype)

    piece = pl.program_id(2)
    if activation or len(weights) == 1:
        return write(weights, piece, 0)
    first_piece = 0
    first_column = 0
    for weight in weights:
        count = pl.cdiv(weight.shape[1], tile.columns)
        is_here = (piece >= first_piece) & (piece < first_piece + count)
        pl.when(is_here)(partial(write, [weight], piece - first_piece, first_column))
        first_piece += count
        first_column += weight.shape[1]
