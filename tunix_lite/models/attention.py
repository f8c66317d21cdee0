"""Attention among the tokens of a row: who sees whom, and what computes it.

A token sees the tokens of its own segment up to itself, within the window in a local layer. Where completions of a
group share one copy of their prompt, it sees the prompt (branch 0) and its own branch. Three implementations: `xla`
anywhere, `cudnn` on NVIDIA GPUs, `splash` (a Pallas kernel that comes with JAX) on TPUs. `choose` says which one fits
and why.
"""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tunix_lite.parallel.mesh import constrain, parts_of, spec

FAR_BELOW = -1e30  # a masked score: finite, so that a row which sees nothing stays finite
SCORES_AT_ONCE = 2**24  # on a device, float32: 64 MiB; queries of longer rows are worked off in pieces
MOST_PIECES = 16
LANES = 128  # splash attention takes lengths and heads in multiples of it


@flax.struct.dataclass
class Sight:
    """What a row's tokens need to know of each other. All [B, T] int32."""

    positions: jax.Array  # of a token in its own sequence
    segments: jax.Array  # 0: padding
    branches: jax.Array | None = None  # 0: what all branches of a segment see


def whole(token_mask_BT) -> Sight:
    """One sequence a row; padding may stand on either side."""
    positions_BT = jnp.maximum(jnp.cumsum(token_mask_BT, axis=1) - 1, 0)
    return Sight(positions_BT, token_mask_BT.astype(jnp.int32))


def visible(window: int | None, sight: Sight, queries: slice, keys: slice):
    """[B, queries, keys] bool: whether a query may see a key; slices of the columns. window: None means no limit."""
    q, k = jax.tree.map(lambda x: x[:, queries, None], sight), jax.tree.map(lambda x: x[:, None, keys], sight)
    columns = jnp.arange(sight.segments.shape[1])
    seen = (columns[keys] <= columns[queries, None]) & (q.segments == k.segments) & (k.segments > 0)
    if window is not None:
        seen &= q.positions - k.positions < window
    if sight.branches is not None:
        seen &= (k.branches == 0) | (k.branches == q.branches)
    return seen


def attend(cfg, q_BTNH, k_BKSH, v_BKSH, mask_BTS, k_scales_BKS=None, v_scales_BKS=None):
    """Softmax attention, scores and softmax in float32; each key head serves N / K query heads.

    With scales, keys and values are codes (int8) to be multiplied by them, one scale for a head of a token.
    """
    B, T, N, H = q_BTNH.shape
    K, dtype = k_BKSH.shape[1], q_BTNH.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    # Without a dim of size 1 while decoding: with it, XLA's GPU backend makes transposed copies of the cache.
    times, mask = ((T,), mask_BTS[:, None, :, None]) if T > 1 else ((), mask_BTS[:, :, None])
    q = (q_BTNH * jnp.asarray(cfg.query_scale**-0.5, dtype)).reshape(B, *times, K, N // K, H)
    # t, the dots, before q in the scores: the products then need no transposed copies (3x faster on a CPU)
    scores = jnp.einsum("b...kqh,bksh->bk...qs", q, k_BKSH.astype(dtype), preferred_element_type=wide)
    if k_scales_BKS is not None:
        scores = scores * jnp.expand_dims(k_scales_BKS, range(2, scores.ndim - 1))
    if cfg.attn_softcap is not None:
        scores = cfg.attn_softcap * jnp.tanh(scores / cfg.attn_softcap)
    probs = jax.nn.softmax(jnp.where(mask, scores, FAR_BELOW), axis=-1)
    if v_scales_BKS is not None:
        probs = probs * jnp.expand_dims(v_scales_BKS, range(2, probs.ndim - 1))
    return jnp.einsum("bk...qs,bksh->b...kqh", probs.astype(dtype), v_BKSH.astype(dtype)).reshape(B, T, N, H)


def xla(cfg, is_local, sight: Sight, q_BTNH, k_BTKH, v_BTKH):
    """Attention as plain products. Long rows in pieces of their queries, whose scores the backward pass makes again.

    is_local: whether the layer has a window; a bool, or a traced one where layers of both kinds are one program.
    """
    T, k_BKSH, v_BKSH = q_BTNH.shape[1], k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
    if piece_length(q_BTNH) >= T:
        mask_BTS = visible(window_of(cfg, is_local), sight, slice(None), slice(None))
        return attend(cfg, q_BTNH, k_BKSH, v_BKSH, mask_BTS)
    if isinstance(is_local, bool):
        return _in_pieces(cfg, window_of(cfg, is_local), sight, q_BTNH, k_BKSH, v_BKSH)
    if 4 * cfg.window > T or sight.branches is not None:  # a branch would cost more than what the window saves
        return _in_pieces(cfg, window_of(cfg, is_local), sight, q_BTNH, k_BKSH, v_BKSH)
    ways = [partial(_in_pieces, cfg, window_of(cfg, local)) for local in (False, True)]
    return jax.lax.cond(is_local, ways[1], ways[0], sight, q_BTNH, k_BKSH, v_BKSH)


def window_of(cfg, is_local):
    """Tokens that a layer sees: None where it sees all; a number or a traced one otherwise."""
    if isinstance(is_local, bool):
        return cfg.window if is_local else None
    return jnp.where(is_local, cfg.window, jnp.iinfo(jnp.int32).max)


def piece_length(q_BTNH) -> int:
    """How many queries of a row have their scores at once."""
    B, T, N, _ = q_BTNH.shape
    on_a_device = B * N * T // (parts_of("batch") * parts_of("heads"))
    length = max(SCORES_AT_ONCE // on_a_device, -(-T // MOST_PIECES), 1)
    return -(-T // -(-T // length))  # pieces of about one length


def _in_pieces(cfg, window, sight: Sight, q_BTNH, k_BKSH, v_BKSH):
    @partial(jax.checkpoint, static_argnums=(4, 5))
    def piece(q_BTNH, k_BKSH, v_BKSH, sight, queries, keys):
        mask_BTS = visible(window, sight, slice(*queries), slice(*keys))
        return attend(cfg, q_BTNH, k_BKSH, v_BKSH, mask_BTS)

    pieces, T, length = [], q_BTNH.shape[1], piece_length(q_BTNH)
    for start in range(0, T, length):
        stop = min(start + length, T)
        # A branch stands further from its prompt than its positions say, so a window there is no range of columns.
        first = max(0, start - window + 1) if isinstance(window, int) and sight.branches is None else 0
        here = k_BKSH[:, :, first:stop], v_BKSH[:, :, first:stop]
        pieces.append(piece(q_BTNH[:, start:stop], *here, sight, (start, stop), (first, stop)))
    return jnp.concatenate(pieces, axis=1)


def cudnn(cfg, is_local, sight: Sight, q_BTNH, k_BTKH, v_BTKH):
    """cuDNN's flash attention."""
    mask_BNTS = visible(window_of(cfg, is_local), sight, slice(None), slice(None))[:, None]
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, mask=mask_BNTS, scale=cfg.query_scale**-0.5, implementation="cudnn"
    )


def splash(cfg, is_local, sight: Sight, q_BTNH, k_BTKH, v_BTKH, interpret: bool = False):
    """The TPU kernel of jax.experimental.pallas: scores stay on the chip, what a mask hides is skipped."""
    ways = [_splash_program(cfg, local, q_BTNH.shape, k_BTKH.shape, interpret) for local in (False, True)]
    scaled = q_BTNH * jnp.asarray(cfg.query_scale**-0.5, q_BTNH.dtype)
    arrays = *(x.swapaxes(1, 2) for x in (scaled, k_BTKH, v_BTKH)), sight.segments
    if isinstance(is_local, bool):
        return ways[is_local](*arrays).swapaxes(1, 2)
    return jax.lax.cond(is_local, ways[1], ways[0], *arrays).swapaxes(1, 2)


def _splash_program(cfg, is_local: bool, q_shape, k_shape, interpret: bool):
    """(q, k, v [B, N or K, T, H], segments [B, T]) -> [B, N, T, H], each device on its own sequences and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    (B, T, N, H), K, mesh = q_shape, k_shape[2], jax.sharding.get_abstract_mesh()
    one = kernels.LocalMask((T, T), (cfg.window - 1, 0), 0) if is_local else kernels.CausalMask((T, T))
    block = next(size for size in (512, 256, LANES) if T % size == 0)
    kernel = kernels.make_splash_mha(
        kernels.MultiHeadMask([one] * (N // parts_of("heads"))),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=kernels.BlockSizes(**dict.fromkeys(BLOCKS, block)),
        attn_logits_soft_cap=cfg.attn_softcap,
        interpret=interpret,
    )
    queries = spec(("batch", "heads", "seq", "head_dim"), (B, N, T, H), mesh)
    keys = spec(("batch", "kv_heads", "seq", "head_dim"), (B, K, T, H), mesh)

    def on_a_device(q_BNTH, k_BKTH, v_BKTH, segments_BT):
        alone = lambda q, k, v, segments: kernel(q, k, v, kernels.SegmentIds(segments, segments))  # noqa: E731
        return jax.vmap(alone)(q_BNTH, k_BKTH, v_BKTH, segments_BT)

    in_specs = queries, keys, keys, P(queries[0], None)
    return jax.shard_map(on_a_device, in_specs=in_specs, out_specs=queries, check_vma=False)


BLOCKS = (
    *("block_q", "block_kv", "block_kv_compute"),
    *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
)
IMPLEMENTATIONS = {"xla": xla, "cudnn": cudnn, "splash": splash}
NATIVE = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}  # the one made for a platform


def choose(asked: str, cfg, platform: str, dtype, width: int, shares_prompts: bool, tp: int) -> tuple[str, str]:
    """The implementation for rows of `width` tokens, and in words why. ValueError if the one asked for cannot."""
    if asked == "xla":
        return "xla", "as training.attention says"
    native = NATIVE.get(platform)
    if asked == "auto" and native is None:
        return "xla", f"the one for {platform}"
    name = native if asked == "auto" else asked
    reason = obstacle(name, cfg, platform, dtype, width, shares_prompts, tp)
    if asked != "auto":
        if reason:
            raise ValueError(f"attention={asked}: {reason}; auto or xla would do")
        return asked, "as training.attention says"
    return ("xla", f"not {name}: {reason}") if reason else (name, f"the one made for {platform}")


def obstacle(name: str, cfg, platform: str, dtype, width: int, shares_prompts: bool, tp: int) -> str | None:
    """Why an implementation cannot do this; None: it can."""
    if NATIVE.get(platform) != name:
        return f"it does not run on {platform}"
    if name == "cudnn":
        if cfg.attn_softcap is not None:
            return f"it has no soft cap, and the model's attn_softcap is {cfg.attn_softcap}"
        if jnp.dtype(dtype).itemsize != 2:
            return "it computes in bfloat16 only; training.mixed_precision=bf16 would do"
        if cfg.head_dim > 256 or cfg.head_dim % 8:
            return f"it takes heads of up to 256 in multiples of 8, and head_dim is {cfg.head_dim}"
        return _cudnn_fails(cfg, dtype)
    if shares_prompts:
        return "it knows no branches, and training.packing=prefix makes some; packing=sequences would do"
    if width % LANES:
        return f"it takes rows in multiples of {LANES} tokens, and they have {width}"
    if cfg.head_dim % LANES:
        return f"it takes heads in multiples of {LANES}, and head_dim is {cfg.head_dim}"
    if cfg.num_kv_heads % tp and cfg.num_kv_heads > 1:
        return f"tp={tp} divides the query heads and not the {cfg.num_kv_heads} key heads"
    return None


def _cudnn_fails(cfg, dtype) -> str | None:
    """Compiles a small one: whether the library is there, and takes this, only it knows."""
    x = jax.ShapeDtypeStruct((1, LANES, 1, cfg.head_dim), dtype)
    mask = jax.ShapeDtypeStruct((1, 1, LANES, LANES), bool)
    attention = partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.jit(jax.grad(lambda q, k, v, m: attention(q, k, v, mask=m).sum().astype(jnp.float32))).lower(
            x, x, x, mask
        ).compile()
    except Exception as error:  # whatever it is, it is the reason
        return f"a small one does not compile ({str(error).strip().splitlines()[0][:120]})"
    return None


def keep_heads(q_BTNH, k_BTKH, v_BTKH):
    """Queries, keys and values, told how they lie on the mesh: heads over tp."""
    return (
        constrain(q_BTNH, "batch", "seq", "heads", "head_dim"),
        constrain(k_BTKH, "batch", "seq", "kv_heads", "head_dim"),
        constrain(v_BTKH, "batch", "seq", "kv_heads", "head_dim"),
    )
