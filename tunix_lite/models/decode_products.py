"""The products of a layer for one new token per sequence, as kernels for NVIDIA GPUs.

As plain products, XLA joins gate and up, writes both in float32, and reads them again for the
activation. A product with few rows has few programs, so XLA splits its sum into parts. It writes
each part in float32 and reads it again. These kernels (Pallas, which hands them to Triton) write
less. `gated` multiplies with gate and up, and writes only activation(gate) * up. One kernel makes
queries, keys and values, and writes them rounded. The two products that end in the residual stream
split their sum only where it pays; XLA adds the parts up in the kernel that reads them. The order
of every sum is fixed, so results repeat.

They round where `decoder` rounds. No GPU has measured them yet, so `rollout.products=auto` stays
with plain products; benchmarks/gpu.py times both.

Letters beside those of types.py: R rows and W columns of a program, S what is summed over, O
outputs, P parts of the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tunix_lite.models.decoder import Architecture, Products
from tunix_lite.models.rounding import stored, wide
from tunix_lite.parallel.mesh import spec

# Tensor cores multiply at least 16 rows with 16 columns; Triton takes powers of two.
FEWEST = 16
# Sums of one program, at most: they lie in registers.
MOST_SUMS = 128 * 128
MOST_OF_A_SIDE = 128
# What is summed over, at once.
AT_ONCE = 64
MOST_PARTS = 8
# What is read ahead lies in shared memory: at most four turns of the loop, and what a program may
# have on every NVIDIA GPU since Ampere (the smaller ones allow 99 KiB).
MOST_STAGES = 4
SHARED_MEMORY = 96 * 1024
# A kernel has at least so many programs, if it can: an H100 has 132 multiprocessors. That half of
# them read its memory about as fast as all of them is an assumption, which no GPU has measured.
FEWEST_PROGRAMS = 66


def choose_products(
    asked: str,
    cfg: Architecture,
    dtype: DTypeLike,
    platform: str,
    tp: int,
    plain_weights: bool = True,
) -> str:
    """What multiplies with the weights of layers while decoding, xla or fused. asked:
    `rollout.products`, auto, xla or fused. plain_weights: the weights have no adapters and are not
    quantised.

    Raises ValueError where the fused kernels are asked for and cannot do it.
    """
    if asked != "fused":
        return "xla"
    reason = _obstacle(cfg, dtype, platform, tp)
    if not plain_weights:
        reason = "they multiply with plain weights, and these have LoRA adapters or are quantised"
    if reason:
        raise ValueError(f"products=fused: {reason}; use auto or xla")
    return "fused"


def _obstacle(cfg: Architecture, dtype: DTypeLike, platform: str, tp: int) -> str | None:
    """Why the kernels cannot multiply with weights of this model; None: they can."""
    if platform not in ("gpu", "cuda"):
        return f"they run on NVIDIA GPUs, not on {platform}"
    if jnp.dtype(dtype).itemsize > 4:
        return f"they compute in float32 or bfloat16, not in {jnp.dtype(dtype).name}"
    summed = {
        "embed_dim": cfg.embed_dim,
        "num_heads x head_dim over tp": cfg.num_heads * cfg.head_dim // tp,
        "mlp_dim over tp": cfg.mlp_dim // tp,
    }
    for name, size in summed.items():
        if size % FEWEST:
            return f"they sum over multiples of {FEWEST} numbers, and {name} is {size}"
    return None


# ---- tiles


@dataclass(frozen=True)
class Tile:
    """What a program of a product computes: so many rows and columns, of one of so many parts of
    the sum.

    Example: Tile(64, 64, 4): with 1,152 columns and up to 64 rows that is 18 x 4 programs.
    """

    rows: int
    columns: int
    parts: int = 1
    # that it multiplies with: gate and up are two
    weights: int = 1

    @property
    def warps(self) -> int:
        """Groups of 32 threads: 4 hold the sums of 64 x 64 with ease."""
        return 8 if self.rows * self.columns * self.weights > 64 * 64 else 4

    def stages(self, itemsize: int) -> int:
        """Turns of the loop that are read ahead, of numbers of so many bytes."""
        of_turn = AT_ONCE * (self.rows + self.columns * self.weights) * itemsize
        return max(1, min(MOST_STAGES, SHARED_MEMORY // of_turn))

    def programs(self, B: int, O: int) -> int:
        """How many there are."""
        return -(-B // self.rows) * -(-O // self.columns) * self.parts

    def moved(self, B: int, S: int, O: int) -> int:
        """Numbers that its programs read and write through the L2, a float32 counted as two."""
        read = -(-B // self.rows) * S * O * self.weights + -(-O // self.columns) * B * S
        written = B * O if self.parts == 1 else 2 * 2 * self.parts * B * O
        return read + written


def tile_of(
    B: int,
    S: int,
    O: int,
    most_parts: int = 1,
    weights: int = 1,
) -> Tile:
    """The tile with which the least goes through the L2, among those with enough programs; if none
    has enough, the one with most of them. Of those within about a tenth, the one with the fewest
    parts: they are read again by the next kernel.

    B rows, a sum over S numbers, O outputs of each of so many weights.

    Example: tile_of(256, 1024, 1152, most_parts=8) is Tile(64, 64, 1).
    """
    most_rows = max(FEWEST, min(MOST_OF_A_SIDE, 1 << (B - 1).bit_length()))
    sides = [FEWEST << i for i in range(4)]
    tiles = [
        Tile(rows, columns, parts, weights)
        for rows in sides
        for columns in sides
        for parts in (1, 2, 4, 8)
        if rows <= most_rows
        and rows * columns * weights <= MOST_SUMS
        and parts <= most_parts
        and S % (parts * FEWEST) == 0
    ]

    def rank(tile: Tile) -> tuple:
        programs = tile.programs(B, O)
        enough = min(programs, FEWEST_PROGRAMS)
        moved = tile.moved(B, S, O)
        return -enough, round(np.log(moved) / np.log(1.1)), tile.parts, moved, programs

    return min(tiles, key=rank)


# ---- the products of a layer


@dataclass(frozen=True)
class FusedProducts(Products):
    """The kernels in place of plain products, for one token of each sequence.

    Example: FusedProducts(jnp.float32) as `products` of decoder.forward_by_layer.
    """

    # runs the kernels without a GPU, as tests do
    interpret: bool = False

    def qkv(self, x_BTD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, ...]:
        """See Products."""
        named = [w[name] for name in "qkv"]
        axes = ("embed", "heads", "head_dim"), *[("embed", "kv_heads", "head_dim")] * 2
        specs = [_spec(a, x.shape) for a, x in zip(axes, named)]
        rows = _rows(x_BTD)
        on_a_device = jax.shard_map(
            partial(_qkv, self.interpret),
            in_specs=(PartitionSpec(rows, None), [PartitionSpec(None, *s[1:]) for s in specs]),
            out_specs=tuple(PartitionSpec(rows, None, *s[1:]) for s in specs),
            check_vma=False,
        )
        return on_a_device(x_BTD[:, 0], named)

    def out(self, attended_BTNH: jax.Array, w: dict[str, Any]) -> jax.Array:
        """See Products."""
        axis = _spec(("heads", "head_dim", "embed"), w["o"].shape)[0]
        return self._to_residual(attended_BTNH, w["o"], axis)

    def down(self, hidden_BTF: jax.Array, w: dict[str, Any]) -> jax.Array:
        """See Products."""
        axis = _spec(("mlp", "embed"), w["down"].shape)[0]
        return self._to_residual(hidden_BTF, w["down"], axis)

    def gated(self, x_BTD: jax.Array, w: dict[str, Any], activation: str) -> jax.Array:
        """See Products."""
        axis = _spec(("embed", "mlp"), w["gate"].shape)[1]
        rows = _rows(x_BTD)
        on_a_device = jax.shard_map(
            partial(_gated, self.interpret, activation),
            in_specs=(PartitionSpec(rows, None), *[PartitionSpec(None, axis)] * 2),
            out_specs=PartitionSpec(rows, axis),
            check_vma=False,
        )
        return on_a_device(x_BTD[:, 0], w["gate"], w["up"])[:, None]

    def after_layer(self, x_BTD: jax.Array) -> jax.Array:
        """See Products. Without the barrier XLA keeps it in float32, and computes it again where
        the layer adds to it."""
        return jax.lax.optimization_barrier(x_BTD)

    def _to_residual(self, x: jax.Array, weight: jax.Array, axis: str | None) -> jax.Array:
        """x [B, 1, *S] times a weight [*S, D], [B, 1, D]. axis: of the mesh, over which the first
        dim of S is divided."""
        rows = _rows(x)
        summed = [axis, *[None] * (x.ndim - 3)]

        def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
            x_BS = x.reshape(len(x), -1)
            matrix_SO = weight.reshape(x_BS.shape[1], -1)
            out_BO = _summed(self.interpret, x_BS, matrix_SO, is_whole=axis is None)
            if axis is not None:
                # As `project`: each device's part is rounded if parts travel rounded.
                out_BO = stored(out_BO, jnp.promote_types(self.tp_reduce_dtype, x.dtype))
                out_BO = jax.lax.psum(out_BO, axis)
            return stored(wide(out_BO), x.dtype)

        on_a_device = jax.shard_map(
            multiply,
            in_specs=(PartitionSpec(rows, *summed), PartitionSpec(*summed, None)),
            out_specs=PartitionSpec(rows, None),
            check_vma=False,
        )
        return on_a_device(x[:, 0], weight)[:, None]


def _spec(axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    return spec(axes, shape, jax.sharding.get_abstract_mesh())


def _rows(x_BT: jax.Array) -> str | None:
    """The axis of the mesh over which sequences are divided."""
    return _spec(("batch",), x_BT.shape[:1])[0]


# ---- on one device


def _qkv(interpret: bool, x_BD: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Queries, keys and values [B, 1, heads, H] of what one device has of the three weights."""
    B, S = x_BD.shape
    matrices = [x.reshape(S, -1) for x in weights]
    widths = [x.shape[1] for x in matrices]
    tile = tile_of(B, S, sum(widths))
    pieces = [-(-width // tile.columns) for width in widths]
    out_BO = _call(
        partial(_multiply_one_of, tile, pieces),
        tile,
        sum(pieces),
        (x_BD, *matrices),
        jax.ShapeDtypeStruct((B, sum(widths)), x_BD.dtype),
        interpret,
        "decode_qkv",
    )
    # Heads are parted last, so that XLA sees that decode_attention puts the same ones together.
    H = weights[0].shape[-1]
    heads = np.cumsum([x.shape[1] for x in weights])[:-1]
    return tuple(x[:, None] for x in jnp.split(out_BO.reshape(B, -1, H), heads, axis=1))


def _gated(
    interpret: bool, activation: str, x_BD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array
) -> jax.Array:
    """activation(gate(x)) * up(x), [B, F], of the columns of one device."""
    B, S = x_BD.shape
    F = gate_DF.shape[1]
    tile = tile_of(B, S, F, weights=2)
    return _call(
        partial(_multiply_gated, tile, activation),
        tile,
        -(-F // tile.columns),
        (x_BD, gate_DF, up_DF),
        jax.ShapeDtypeStruct((B, F), x_BD.dtype),
        interpret,
        "decode_gated",
    )


def _summed(interpret: bool, x_BS: jax.Array, weight_SO: jax.Array, is_whole: bool) -> jax.Array:
    """x times the weight, [B, O]: float32, or rounded where the kernel has the whole sum. is_whole:
    no other device has a part of it."""
    B, S = x_BS.shape
    O = weight_SO.shape[1]
    tile = tile_of(B, S, O, MOST_PARTS)
    dtype = x_BS.dtype if is_whole and tile.parts == 1 else jnp.float32
    parts_PBO = _call(
        partial(_multiply_part, tile),
        tile,
        -(-O // tile.columns),
        (x_BS, weight_SO),
        jax.ShapeDtypeStruct((tile.parts, B, O), dtype),
        interpret,
        "decode_product",
    )
    return parts_PBO[0] if tile.parts == 1 else parts_PBO.sum(axis=0)


def _call(
    kernel: Callable,
    tile: Tile,
    pieces: int,
    inputs: tuple[jax.Array, ...],
    out: jax.ShapeDtypeStruct,
    interpret: bool,
    name: str,
) -> jax.Array:
    """A kernel whose programs are numbered by rows, parts of the sum, and pieces of the columns."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda r, s, o: (0,) * len(x.shape))

    B = len(inputs[0])
    stages = tile.stages(inputs[0].dtype.itemsize)
    call = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(B, tile.rows), tile.parts, pieces),
        in_specs=[whole(x) for x in inputs],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )
    return call(*inputs)


# ---- the kernels. What lies beyond the last row or column is read as the last one; several
# programs then write the same numbers.


def _multiply_part(tile: Tile, x_BS: Any, weight_SO: Any, out_PBO: Any) -> None:
    """A part of the sum of some rows and columns."""
    from jax.experimental import pallas as pl

    rows_R = _rows_of_program(tile, len(x_BS))
    at_W = _columns_of(tile, pl.program_id(2), weight_SO.shape[1])
    part = pl.program_id(1)
    (sums_RW,) = _sums(tile, rows_R, at_W, part, x_BS, weight_SO)
    out_PBO[part, rows_R[:, None], at_W[None]] = sums_RW.astype(out_PBO.dtype)


def _multiply_gated(
    tile: Tile, activation: str, x_BS: Any, gate_SO: Any, up_SO: Any, out_BO: Any
) -> None:
    """activation(gate) * up of some rows and columns."""
    from jax.experimental import pallas as pl

    rows_R = _rows_of_program(tile, len(x_BS))
    at_W = _columns_of(tile, pl.program_id(2), gate_SO.shape[1])
    sums = _sums(tile, rows_R, at_W, 0, x_BS, gate_SO, up_SO)
    dtype = out_BO.dtype
    gate_RW, up_RW = (x.astype(dtype).astype(jnp.float32) for x in sums)
    out_BO[rows_R[:, None], at_W[None]] = (_activated(gate_RW, activation) * up_RW).astype(dtype)


def _multiply_one_of(tile: Tile, pieces: list[int], x_BS: Any, *refs: Any) -> None:
    """Some rows and columns of one of several weights, whose outputs stand side by side."""
    from jax.experimental import pallas as pl

    *weights, out_BO = refs
    rows_R = _rows_of_program(tile, len(x_BS))
    piece = pl.program_id(2)
    first_piece = 0
    first_column = 0
    for weight_SO, count in zip(weights, pieces):
        at_W = _columns_of(tile, piece - first_piece, weight_SO.shape[1])

        @pl.when((piece >= first_piece) & (piece < first_piece + count))
        def _(weight_SO: Any = weight_SO, at_W: Any = at_W, first: int = first_column) -> None:
            (sums_RW,) = _sums(tile, rows_R, at_W, 0, x_BS, weight_SO)
            out_BO[rows_R[:, None], first + at_W[None]] = sums_RW.astype(out_BO.dtype)

        first_piece += count
        first_column += weight_SO.shape[1]


def _rows_of_program(tile: Tile, B: int) -> jax.Array:
    from jax.experimental import pallas as pl

    return jnp.minimum(pl.program_id(0) * tile.rows + jnp.arange(tile.rows), B - 1)


def _columns_of(tile: Tile, piece: jax.Array, O: int) -> jax.Array:
    at_W = piece * tile.columns + jnp.arange(tile.columns)
    # Triton reads 16 bytes at once, and ahead, only of columns that it sees to be in a row.
    return jnp.minimum(at_W, O - 1) if O % tile.columns else at_W


def _sums(
    tile: Tile, rows_R: jax.Array, at_W: jax.Array, part: Any, x_BS: Any, *weights: Any
) -> tuple[jax.Array, ...]:
    """A part of x times each weight, [R, W] float32."""
    from jax.experimental.pallas import triton

    of_part = x_BS.shape[1] // tile.parts
    at_once = int(np.gcd(of_part, AT_ONCE))
    exact = jax.lax.Precision.HIGHEST if x_BS.dtype == jnp.float32 else None

    def add(i: jax.Array, sums: tuple) -> tuple:
        at = part * of_part + i * at_once + jnp.arange(at_once)
        x = x_BS[rows_R[:, None], at[None]]
        return tuple(
            sum_RW + triton.dot(x, weight_SO[at[:, None], at_W[None]], precision=exact)
            for sum_RW, weight_SO in zip(sums, weights)
        )

    nothing = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    return jax.lax.fori_loop(0, of_part // at_once, add, (nothing,) * len(weights))


def _activated(x: jax.Array, activation: str) -> jax.Array:
    """One of ACTIVATIONS. Triton has exp and no tanh, and tanh(y) is 1 - 2 / (exp(2 y) + 1)."""
    if activation == "silu":
        return x / (1 + jnp.exp(-x))
    y = np.sqrt(2 / np.pi).astype(np.float32) * (x + 0.044715 * x * x * x)
    # half of 1 + tanh(y)
    return x * (1 - 1 / (jnp.exp(2 * y) + 1))
