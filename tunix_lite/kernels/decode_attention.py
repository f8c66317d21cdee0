"""The attention of one new token per sequence, as one kernel for NVIDIA GPUs (Pallas, which hands
it to Triton): each program serves one sequence and one key head, with an online softmax
(arXiv:1805.02867). Letters beside those of types.py: C columns of the cache, G query heads of one
key head."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.attention import FAR_BELOW
from tunix_lite.models.kernel_choice import FEWEST
from tunix_lite.parallel.mesh import spec

# Columns that a program reads at once.
_COLUMNS_AT_ONCE = 64


def fused_attend(
    cfg: Architecture,
    q_BNH: jax.Array,
    k_BKH: jax.Array,
    v_BKH: jax.Array,
    norms: tuple[jax.Array, ...],
    angles: tuple[jax.Array, jax.Array],
    newest_B: jax.Array,
    k_BKCH: jax.Array,
    v_BKCH: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(attended [B, N, H], the cache's keys and values with the new token in them). q, k, v: as
    projected. norms: the scales [H] of queries and keys, or none. angles: sin and cos, [B, H/2]
    each. newest_B: the position of the new token. interpret: runs it without a GPU, as tests do."""
    mesh = jax.sharding.get_abstract_mesh()
    heads = spec(("batch", "heads", "head_dim"), q_BNH.shape, mesh)
    of_cache = spec(("batch", "kv_heads", "seq", "head_dim"), k_BKCH.shape, mesh)
    qkv = (heads, *[P(of_cache[0], of_cache[1], None)] * 2)

    def on_a_device(
        qkv: tuple, norms: tuple, angles: tuple, newest_B: jax.Array, cache: tuple
    ):
        B, K, C, H = cache[0].shape
        N = qkv[0].shape[1]
        # As one array, so that XLA ends the product that makes them in one kernel and not in three.
        together = jnp.concatenate(qkv, axis=1)
        inputs = (*[together] * 3, *angles, newest_B, *norms, *cache)

        # What program (b, k) sees of each array.
        queries = pl.BlockSpec((None, N // K, H), lambda b, k: (b, k, 0))
        key = pl.BlockSpec((None, None, H), lambda b, k: (b, N + k, 0))
        value = pl.BlockSpec((None, None, H), lambda b, k: (b, N + K + k, 0))
        columns = pl.BlockSpec((None, None, C, H), lambda b, k: (b, k, 0, 0))
        half = pl.BlockSpec((None, H // 2), lambda b, k: (b, 0))
        newest = pl.BlockSpec((None,), lambda b, k: (b,))
        scales = [pl.BlockSpec((H,), lambda b, k: (0,))] * len(norms)
        call = pl.pallas_call(
            partial(_kernel, cfg),
            grid=(B, K),
            in_specs=[queries, key, value, half, half, newest, *scales, columns, columns],
            out_specs=[queries, columns, columns],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (qkv[0], *cache)],
            # The cache is updated in place.
            input_output_aliases={len(inputs) - 2: 1, len(inputs) - 1: 2},
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="decode_attention",
        )
        return tuple(call(*inputs))

    # Each device computes its own sequences and heads.
    of_angles = (P(of_cache[0], None),) * 2
    in_specs = (qkv, (P(None),) * len(norms), of_angles, P(of_cache[0]), (of_cache, of_cache))
    out_specs = (heads, of_cache, of_cache)
    # The results of a kernel do not say over which axes they vary, so jax cannot check it.
    on_devices = jax.shard_map(
        on_a_device, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return on_devices((q_BNH, k_BKH, v_BKH), norms, angles, newest_B, (k_BKCH, v_BKCH))


def _kernel(cfg: Architecture, *refs: Any) -> None:
    """One sequence and one key head. The arrays without their first two dims."""
    q_ref, k_ref, v_ref, sin_ref, cos_ref, newest_ref, *rest = refs
    *norm_refs, k_CH, v_CH, out_ref, new_k_CH, new_v_CH = rest
    dtype = q_ref.dtype
    G, H = q_ref.shape
    C = k_CH.shape[0]
    first = pl.ds(0, H // 2)
    second = pl.ds(H // 2, H // 2)
    # The last query head fills the rows of a tensor core up; all its rows write the same result.
    rows = jnp.minimum(jnp.arange(FEWEST), G - 1)

    # The two halves of a head turn together, so they stay apart up to the scores.
    angles = (sin_ref[...][None], cos_ref[...][None])
    scales = [(ref[first], ref[second]) for ref in norm_refs] or [None, None]
    q = _normed_and_turned(cfg, (q_ref[rows, first], q_ref[rows, second]), scales[0], angles)
    k = _normed_and_turned(cfg, (k_ref[first][None], k_ref[second][None]), scales[1], angles)
    by = _rounded(jnp.full((1, 1), cfg.query_scale**-0.5, jnp.float32), dtype)
    q = [_rounded(x * by, dtype) for x in q]

    # The new token joins the cache, and is the first that the queries see.
    newest = newest_ref[...]
    column = newest % C
    new_k_CH[pl.ds(column, 1), first] = k[0].astype(dtype)
    new_k_CH[pl.ds(column, 1), second] = k[1].astype(dtype)
    v = v_ref[...][None]
    new_v_CH[pl.ds(column, 1), :] = v
    top = _capped(cfg, jnp.sum(q[0] * k[0] + q[1] * k[1], axis=1))
    total = jnp.ones_like(top)
    summed = jnp.zeros((FEWEST, H), jnp.float32) + v.astype(jnp.float32)

    # Then those that are in the cache, except the one whose column the new token takes.
    q = [x.astype(dtype) for x in q]
    held = jnp.minimum(newest, C)
    # By default a GPU multiplies float32 as tf32, with a mantissa of 10 bits.
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def add_columns(i: jax.Array, carry: tuple) -> tuple:
        top, total, summed = carry
        at = i * _COLUMNS_AT_ONCE + jnp.arange(_COLUMNS_AT_ONCE)
        # The last block goes beyond the cache; what it reads there is masked below.
        here = jnp.minimum(at, C - 1)
        scores = triton.dot(q[0], k_CH[here, first], trans_b=True, precision=exact)
        scores += triton.dot(q[1], k_CH[here, second], trans_b=True, precision=exact)
        is_seen = (at < held) & (at != column)
        scores = jnp.where(is_seen[None], _capped(cfg, scores), FAR_BELOW)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        rescale = jnp.exp(top - new_top)
        probs = jnp.exp(scores - new_top[:, None])
        values = triton.dot(probs.astype(dtype), v_CH[here, :], precision=exact)
        return (
            new_top,
            total * rescale + jnp.sum(probs, axis=1),
            summed * rescale[:, None] + values,
        )

    blocks = pl.cdiv(held, _COLUMNS_AT_ONCE)
    _, total, summed = jax.lax.fori_loop(0, blocks, add_columns, (top, total, summed))
    out_ref[rows, :] = (summed / total[:, None]).astype(dtype)


def _normed_and_turned(
    cfg: Architecture, halves: tuple, scales: tuple | None, angles: tuple
) -> list[jax.Array]:
    """The halves of heads, [rows, H/2] each, after norm and rotation, rounded where the decoder
    rounds."""
    dtype = halves[0].dtype
    first, second = (x.astype(jnp.float32) for x in halves)
    if scales is not None:
        squares = jnp.sum(first * first + second * second, axis=1, keepdims=True)
        inverse = jax.lax.rsqrt(squares / cfg.head_dim + cfg.norm_eps)
        plus = 1.0 if cfg.norm_plus_one else 0.0
        by = [plus + scale.astype(jnp.float32)[None] for scale in scales]
        first = _rounded(first * inverse * by[0], dtype)
        second = _rounded(second * inverse * by[1], dtype)
    sin, cos = angles
    turned = (first * cos - second * sin, second * cos + first * sin)
    return [_rounded(x, dtype) for x in turned]


def _rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 numbers as `dtype` keeps them. Triton keeps such a pair of conversions."""
    return x.astype(dtype).astype(jnp.float32)


def _capped(cfg: Architecture, scores: jax.Array) -> jax.Array:
    """The scores under the model's soft cap, if it has one."""
    cap = cfg.attn_softcap
    if cap is None:
        return scores
    # Triton has exp and no tanh.
    return cap * (1 - 2 / (jnp.exp(2 * scores / cap) + 1))
