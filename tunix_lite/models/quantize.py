"""Storing frozen weights in one byte (int8) or half a byte (nf4) an element. Every block of inputs
of an output has a scale; norms, biases and the embedding stay in bfloat16."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.basics.types import Params
from tunix_lite.models.weights import (
    NF4_LEVELS,
    Int8,
    Leaf,
    Nf4,
    Table,
    Weight,
    in_blocks,
    init_params,
    is_quantized,
    scales_axes,
    shardings,
    unstacked,
    zeros,
)

# The dtype of the weights that are not quantised.
STORAGE: dict[str, DTypeLike] = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "int8": jnp.bfloat16,
    "nf4": jnp.bfloat16,
}
# At most so many inputs share a scale.
BLOCKS = {"int8": 128, "nf4": 64}


def stored_table(table: Table, storage: str) -> Table:
    """The table of a frozen base kept as `storage`: fp32, bf16, int8 or nf4. Raises ValueError for
    a weight that nf4 cannot pack."""

    def stored(w: Weight) -> Leaf:
        if w.is_exact:
            return w
        if not w.inputs or storage not in BLOCKS:
            return replace(w, dtype=STORAGE[storage])

        # One scale for each block of the last input dim: the largest power of two that divides it.
        dim = w.inputs - 1 + w.num_counted
        block = min(w.shape[dim] & -w.shape[dim], BLOCKS[storage])
        shape = (*w.shape[:dim], w.shape[dim] // block, *w.shape[dim + 1 :])
        axes = scales_axes(w)
        scales = replace(w, shape=shape, axes=axes, init=zeros, inputs=0, dtype=jnp.float32)

        # The codes.
        if storage == "int8":
            return Int8(replace(w, dtype=jnp.int8), scales)
        if w.shape[-1] % 2:
            raise ValueError(
                f"{w.axes[-1]}={w.shape[-1]} is odd, and nf4 packs pairs; model.lora.base could be "
                "int8"
            )
        pairs = (*w.shape[:-1], w.shape[-1] // 2)
        return Nf4(replace(w, shape=pairs, dtype=jnp.uint8), scales)

    return jax.tree.map(stored, table)


def init_stored(
    table: Table,
    key: jax.Array,
    storage: str,
) -> Params:
    """Random parameters, stored as `storage`: the numbers that `init_params` gives, quantised."""
    wanted = stored_table(table, storage)
    if storage not in BLOCKS:
        return init_params(wanted, key)

    def packed(params: Params) -> Params:
        return jax.tree.map(quantize, params, wanted)

    return jax.jit(packed, out_shardings=shardings(wanted))(init_params(table, key))


def quantize(values: jax.Array, like: Leaf) -> Leaf:
    """The values of a weight as the leaf that `stored_table` declares, `like`."""
    if not is_quantized(like):
        return values.astype(like.dtype)
    if like.codes.is_stacked:
        # layer by layer, as scales are of one
        one = jax.tree.map(unstacked, like)
        return jax.vmap(partial(quantize, like=one))(values)
    inputs = like.codes.num_counted + like.codes.inputs
    blocks = in_blocks(values.astype(jnp.float32), like.scales.shape, inputs)
    largest = jnp.max(jnp.abs(blocks), axis=inputs, keepdims=True)
    # In a block of zeros there is nothing to divide by.
    largest = jnp.where(largest > 0, largest, 1.0)
    if isinstance(like, Int8):
        scales = largest / 127
        codes = jnp.round(blocks / scales).astype(jnp.int8)
        return Int8(codes.reshape(values.shape), scales.squeeze(inputs))

    # The nearest level is found by a sum of comparisons, which fuses. The loop of searchsorted
    # exchanges its state over the mesh in every turn.
    middles = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2
    above = sum((blocks / largest > middle).astype(jnp.uint8) for middle in middles)
    codes = above.reshape(values.shape)
    return Nf4(codes[..., 0::2] << 4 | codes[..., 1::2], largest.squeeze(inputs))
