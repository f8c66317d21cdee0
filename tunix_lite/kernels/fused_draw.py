"""The product with the output head and the draw of a token, as one kernel for NVIDIA GPUs. The
noise is that of `jax.random.gumbel`: threefry-2x32 (Salmon et al., 2011) of the row's key and the
token. Letters beside those of types.py: P pieces of the vocabulary, W tokens of a piece, R rows of
a program."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.decoder import softcap
from tunix_lite.models.kernel_choice import FEWEST, PIECE
from tunix_lite.parallel.mesh import spec

# Rows that a program takes, at most: with 64 an H100 has registers for two programs on a
# multiprocessor, of which one reads the head while the other draws.
MOST_ROWS = 64
_MOST_COLUMNS = 64  # of the head that are multiplied at once


def fused_draw(
    cfg: Architecture,
    hidden_BD: jax.Array,
    table_VD: jax.Array,
    keys_B: jax.Array,
    positions_B: jax.Array,
    temperature: jax.Array | float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Tokens and their log-probabilities under softmax(logits / temperature), [B] each. hidden:
    after the final norm. table: the head, or the embedding. interpret: runs it without a GPU, as
    tests do."""
    B, V = len(hidden_BD), len(table_VD)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    key_data_B2 = jax.random.key_data(keys_B)
    temperature_1 = jnp.asarray(temperature, jnp.float32).reshape(1)
    rows, tokens = spec(("batch", "vocab"), (B, V), jax.sharding.get_abstract_mesh())
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32)

    def on_a_device(
        hidden_BD: jax.Array, table_VD: jax.Array, *more: jax.Array
    ) -> list[jax.Array]:
        B, V = len(hidden_BD), len(table_VD)
        # a power of two, as Triton needs it
        R = max(FEWEST, min(MOST_ROWS, 1 << (B - 1).bit_length()))
        warps = 8 if R == MOST_ROWS else 4
        part = 0 if tokens is None else jax.lax.axis_index(tokens)
        inputs = (hidden_BD, table_VD, *more, jnp.full(1, part * V, jnp.int32))
        pieces = pl.cdiv(V, PIECE)
        call = pl.pallas_call(
            partial(_kernel, cfg, R),
            # Programs of one piece of the vocabulary follow each other.
            grid=(pl.cdiv(B, R), pieces),
            in_specs=[pl.BlockSpec(x.shape, lambda r, p, n=x.ndim: (0,) * n) for x in inputs],
            out_specs=[pl.BlockSpec((B, None), lambda r, p: (0, p))] * len(dtypes),
            out_shape=[jax.ShapeDtypeStruct((B, pieces), dtype) for dtype in dtypes],
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=4),
            interpret=interpret,
            name="fused_draw",
        )
        return call(*inputs)

    # Each device draws for its own rows from its own part of the vocabulary.
    in_specs = (P(rows, None), P(tokens, None), P(rows, None), P(None))
    out_specs = P(rows, tokens)
    # As in decode_attention: kernels do not say over which axes their results vary.
    on_devices = jax.shard_map(
        on_a_device, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    # [B, P] each: the best score of a piece, its token and logit, the maximum of the logits, and
    # the sum of exp(logit - maximum).
    *operands, sum_BP = on_devices(hidden_BD, table_VD, key_data_B2, temperature_1)

    def better(left: tuple, right: tuple) -> tuple:
        is_first = (left[0] == right[0]) & (left[1] < right[1])
        is_left = (left[0] > right[0]) | is_first
        chosen = [jnp.where(is_left, a, b) for a, b in zip(left[1:3], right[1:3])]
        # maximum keeps NaN.
        return jnp.maximum(left[0], right[0]), *chosen, jnp.maximum(left[3], right[3])

    # The first of the best tokens, the last one with NaN.
    lowest = jnp.float32(-jnp.inf)
    start = (lowest, jnp.int32(V - 1), lowest, lowest)
    score_B, token_B, logit_B, top_B = jax.lax.reduce(tuple(operands), start, better, (1,))
    token_B = jnp.where(jnp.isnan(score_B), V - 1, token_B)
    sum_B = jnp.sum(sum_BP * jnp.exp(operands[3] - top_B[:, None]), axis=-1)
    return token_B, logit_B - (jnp.log(sum_B) + top_B)


def _kernel(cfg: Architecture, R: int, *refs: Any) -> None:
    """R rows and a piece of the vocabulary. What lies beyond the last is read as the last."""
    hidden_BD, table_VD, key_data_B2, temperature_1, first_1, *out_refs = refs
    B, D = hidden_BD.shape
    V = len(table_VD)
    rows_R = jnp.minimum(pl.program_id(0) * R + jnp.arange(R), B - 1)
    at_W = pl.program_id(1) * PIECE + jnp.arange(PIECE)
    here_W = jnp.minimum(at_W, V - 1)

    # Logits, summed in float32 as in decoder.logits.
    columns = int(np.gcd(D, _MOST_COLUMNS))
    # As in decode_attention: tf32 is too coarse.
    exact = jax.lax.Precision.HIGHEST if hidden_BD.dtype == jnp.float32 else None

    def add_columns(i: jax.Array, sum_RW: jax.Array) -> jax.Array:
        at = i * columns + jnp.arange(columns)
        table = table_VD[here_W[:, None], at[None]]
        hidden = hidden_BD[rows_R[:, None], at[None]]
        # Rows times head: head times rows takes 157 registers of a thread in place of 128.
        return sum_RW + triton.dot(hidden, table, trans_b=True, precision=exact)

    nothing = jnp.zeros((R, PIECE), jnp.float32)
    logits_RW = jax.lax.fori_loop(0, D // columns, add_columns, nothing)
    temperature = temperature_1[0]
    logits_RW = softcap(logits_RW, cfg.final_softcap)
    logits_RW = logits_RW / jnp.where(temperature > 0, temperature, 1.0)

    # Noise. The key and the counter are those of the row and the token in the whole arrays.
    token_1W = (first_1[0] + at_W)[None]
    keys = (key_data_B2[rows_R, 0][:, None], key_data_B2[rows_R, 1][:, None])
    noise_RW = gumbel(keys, token_1W.astype(jnp.uint32))
    scores_RW = logits_RW + jnp.where(temperature > 0, noise_RW, 0.0)

    # Tokens beyond the last have no part in it. Whether there is NaN is asked by itself, since a
    # maximum of Triton may drop it.
    lowest = jnp.float32(-jnp.inf)
    is_token_1W = (at_W < V)[None]
    is_nan_RW = is_token_1W & (scores_RW != scores_RW)
    has_nan_R = jnp.max(is_nan_RW.astype(jnp.int32), axis=1) > 0
    logits_RW = jnp.where(is_token_1W, logits_RW, lowest)
    scores_RW = jnp.where(is_token_1W & ~is_nan_RW, scores_RW, lowest)
    top_R = jnp.max(jnp.where(is_nan_RW, lowest, logits_RW), axis=1)
    # Of a piece of which every logit is -inf the sum is 0.
    base_R = jnp.where(top_R == lowest, 0.0, top_R)
    sum_R = jnp.sum(jnp.exp(logits_RW - base_R[:, None]), axis=1)

    # The first of the best.
    best_R = jnp.max(scores_RW, axis=1)
    last = first_1[0] + V - 1
    is_best_RW = is_token_1W & (scores_RW == best_R[:, None])
    token_R = jnp.min(jnp.where(is_best_RW, token_1W, last), axis=1)
    is_drawn_RW = token_1W == token_R[:, None]
    logit_R = jnp.sum(jnp.where(is_drawn_RW, logits_RW, 0.0), axis=1)
    # By this score the choice among pieces sees that there was a NaN.
    best_R = jnp.where(has_nan_R, jnp.nan, best_R)
    for ref, x in zip(out_refs, (best_R, token_R, logit_R, top_R, sum_R)):
        # Rows beyond the last write the numbers of the last once more.
        ref[rows_R] = x


# How far each of four rounds turns a word, by turns.
_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


def gumbel(keys: tuple[jax.Array, jax.Array], counter: jax.Array) -> jax.Array:
    """Element `counter` of jax.random.gumbel of this key, float32."""
    # The two words of threefry-2x32 with 20 rounds, of the key and (0, counter). The constant of
    # the paper, for which no extended key is all zeros.
    schedule = (*keys, keys[0] ^ keys[1] ^ jnp.uint32(0x1BD11BDA))
    x = keys[0]
    y = counter + keys[1]
    for group in range(5):
        for turn in _TURNS[group % 2]:
            x = x + y
            y = (y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn))
            y = x ^ y
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    # 23 bits as a number from 0 to 1, and in place of 0 the smallest normal number.
    bits = ((x ^ y) >> jnp.uint32(9)).astype(jnp.int32)
    uniform = bits.astype(jnp.float32) * jnp.float32(2.0**-23)
    uniform = jnp.maximum(uniform, jnp.float32(jnp.finfo(jnp.float32).tiny))
    return -jnp.log(-jnp.log(uniform))
