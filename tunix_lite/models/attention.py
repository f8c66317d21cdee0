"""Attention among the tokens of a row: who sees whom, and what computes it.

A token sees the tokens of its own segment up to itself, within the window in a local layer. Where
completions of a group share one copy of their prompt, it sees the prompt (branch 0) and its own
branch. Three implementations: `xla` anywhere, `cudnn` on NVIDIA GPUs, `splash` (a Pallas kernel
that comes with JAX) on TPUs. `choose` says which one fits and why.
"""

import math
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tunix_lite.models.rounding import (
    at_least_float32,
    by_rows,
    one_by_one,
    product,
    softmax,
    stored,
    wide,
)
from tunix_lite.parallel.mesh import constrain, current_rules, parts_of, spec, use_rules

# a masked score: finite, so that a row which sees nothing stays finite
FAR_BELOW = -1e30
# on a device, float32: 64 MiB; queries of longer rows are worked off in pieces
SCORES_AT_ONCE = 2**24
MOST_PIECES = 16
# splash attention takes lengths and heads in multiples of it
LANES = 128


@flax.struct.dataclass
class AttentionMeta:
    """What tokens need to know of each other. All [B, T] int32."""

    positions: jax.Array  # of a token in its own sequence
    segments: jax.Array  # 0: padding
    branches: jax.Array | None = None  # 0: what all branches of a segment see
    # columns that all lanes see (packing.RowShape)
    lead: int = flax.struct.field(pytree_node=False, default=0)
    # columns of each lane after them; 0: there are none
    lane: int = flax.struct.field(pytree_node=False, default=0)


def one_sequence_per_row(token_mask_BT) -> AttentionMeta:
    """One sequence a row; padding may stand on either side."""
    positions_BT = jnp.maximum(jnp.cumsum(token_mask_BT, axis=1) - 1, 0)
    return AttentionMeta(positions_BT, token_mask_BT.astype(jnp.int32))


def attention_mask(window: int | None, q: AttentionMeta, k: AttentionMeta):
    """[B, queries, keys] bool: whether a query may see a key. window: None means no limit."""
    q, k = jax.tree.map(lambda x: x[:, :, None], q), jax.tree.map(lambda x: x[:, None], k)
    seen = (k.positions <= q.positions) & (q.segments == k.segments) & (k.segments > 0)
    if window is not None:
        seen &= q.positions - k.positions < window
    if k.branches is not None:
        seen &= (k.branches == 0) | (k.branches == q.branches)
    return seen


def attend(
    cfg, q_BTNH, k_BKSH, v_BKSH, mask_BTS, k_scales_BKS=None, v_scales_BKS=None, name="scores"
):
    """Softmax attention, scores and softmax in float32; each key head serves N / K query heads.

    With scales, keys and values are codes (int8) to be multiplied by them, one scale for a head of
    a token. name: of the scores, for those who choose what is kept for a backward pass
    (decoder.REMAT).
    """
    B, T, N, H = q_BTNH.shape
    K, dtype = k_BKSH.shape[1], q_BTNH.dtype
    # Without a dim of size 1 while decoding: with it, XLA's GPU backend makes transposed copies of
    # the cache.
    times, mask = ((T,), mask_BTS[:, None, :, None]) if T > 1 else ((), mask_BTS[:, :, None])
    scaled = stored(wide(q_BTNH) * wide(jnp.asarray(cfg.query_scale**-0.5, dtype)), dtype)
    q = scaled.reshape(B, *times, K, N // K, H)

    def attended(q):
        # t, the dots, before q in the scores: the products then need no transposed copies (3x
        # faster on a CPU)
        to_scores = partial(
            jnp.einsum, "b...kqh,bksh->bk...qs", preferred_element_type=at_least_float32(dtype)
        )
        scores = checkpoint_name(to_scores(q, k_BKSH.astype(dtype)), name)
        if k_scales_BKS is not None:
            scores = scores * jnp.expand_dims(k_scales_BKS, range(2, scores.ndim - 1))
        if cfg.attn_softcap is not None:
            scores = cfg.attn_softcap * jnp.tanh(scores / cfg.attn_softcap)
        probs = softmax(jnp.where(mask, scores, FAR_BELOW), dtype)
        if v_scales_BKS is not None:
            probs = probs * jnp.expand_dims(v_scales_BKS, range(2, probs.ndim - 1))
        sums = partial(jnp.einsum, "bk...qs,bksh->b...kqh")
        return product(sums, stored(probs, dtype), v_BKSH.astype(dtype), one_by_one)

    return (by_rows(attended, q, 2) if T == 1 else attended(q)).reshape(B, T, N, H)


def xla(cfg, is_local, meta: AttentionMeta, q_BTNH, k_BTKH, v_BTKH):
    """Attention as plain products. Long rows in pieces of their queries, whose scores the backward
    pass makes again.

    is_local: whether the layer has a window; a bool, or a traced one where layers of both kinds are
    one program.
    """
    return by_lane(partial(_xla, cfg, is_local), meta, q_BTNH, k_BTKH, v_BTKH)


def by_lane(fn, meta: AttentionMeta, q_BTNH, k_BTKH, v_BTKH):
    """fn(metadata of the queries, metadata of the keys, q, k, v) of whole rows or, where they have
    lanes, of the lead and of each lane.

    A lane's queries see the lead and that lane, so its keys are these two: what the lead costs is
    never multiplied by the other lanes.
    """
    if not meta.lane:
        return fn(meta, meta, q_BTNH, k_BTKH, v_BTKH)
    B, lead, lane = len(q_BTNH), meta.lead, meta.lane

    def own(x):
        return x[:, lead:].reshape(-1, lane, *x.shape[2:])

    def seen(x):
        lanes = own(x)
        shared = jnp.broadcast_to(x[:, None, :lead], (B, len(lanes) // B, lead, *x.shape[2:]))
        return jnp.concatenate([shared.reshape(-1, lead, *x.shape[2:]), lanes], axis=1)

    def of(cut, *trees):
        return (jax.tree.map(cut, tree) for tree in trees)

    k_first, v_first = k_BTKH[:, :lead], v_BTKH[:, :lead]
    (first,) = of(lambda x: x[:, :lead], meta)
    out_lead = fn(first, first, q_BTNH[:, :lead], k_first, v_first)
    out_lanes = fn(*of(own, meta), *of(seen, meta), *of(own, q_BTNH), *of(seen, k_BTKH, v_BTKH))
    return jnp.concatenate([out_lead, out_lanes.reshape(B, -1, *q_BTNH.shape[2:])], axis=1)


def _xla(cfg, is_local, queries: AttentionMeta, keys: AttentionMeta, q_BTNH, k_BSKH, v_BSKH):
    arrays = queries, keys, q_BTNH, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    if piece_length(q_BTNH, S) >= T:
        mask_BTS = attention_mask(window_of(cfg, is_local), queries, keys)
        return attend(cfg, *arrays[2:], mask_BTS)
    if isinstance(is_local, bool):
        return _in_pieces(cfg, window_of(cfg, is_local), *arrays)
    # a branch would cost more than what the window saves
    if 4 * cfg.window > S or keys.branches is not None:
        return _in_pieces(cfg, window_of(cfg, is_local), *arrays)
    ways = [partial(_in_pieces, cfg, window_of(cfg, local)) for local in (False, True)]
    return jax.lax.cond(is_local, ways[1], ways[0], *arrays)


def window_of(cfg, is_local):
    """Tokens that a layer sees: None where it sees all; a number or a traced one otherwise."""
    if isinstance(is_local, bool):
        return cfg.window if is_local else None
    return jnp.where(is_local, cfg.window, jnp.iinfo(jnp.int32).max)


def piece_length(q_BTNH, S: int) -> int:
    """How many queries of a row have their scores with S keys at once."""
    B, T, N, _ = q_BTNH.shape
    on_a_device = B * N * S // (parts_of("batch") * parts_of("heads"))
    length = max(SCORES_AT_ONCE // on_a_device, -(-T // MOST_PIECES), 1)
    # pieces of about one length
    return -(-T // -(-T // length))


def _in_pieces(cfg, window, queries: AttentionMeta, keys: AttentionMeta, q_BTNH, k_BKSH, v_BKSH):
    @jax.checkpoint
    def piece(queries, keys, *qkv):
        return attend(cfg, *qkv, attention_mask(window, queries, keys), name="scores of a piece")

    T, S = q_BTNH.shape[1], k_BKSH.shape[2]
    pieces, length = [], piece_length(q_BTNH, S)
    for start in range(0, T, length):
        stop = min(start + length, T)
        # A branch stands further from its prompt than its positions say, so a window there is no
        # range of columns.
        first = (
            max(0, S - T + start - window + 1)
            if isinstance(window, int) and keys.branches is None
            else 0
        )
        # no query sees the keys of a later one
        of, to = (
            slice(start, stop),
            slice(first, S - T + stop),
        )
        sights = (
            jax.tree.map(lambda x, of=of: x[:, of], queries),
            jax.tree.map(lambda x, to=to: x[:, to], keys),
        )
        pieces.append(piece(*sights, q_BTNH[:, of], k_BKSH[:, :, to], v_BKSH[:, :, to]))
    return jnp.concatenate(pieces, axis=1)


def cudnn(cfg, is_local, meta: AttentionMeta, q_BTNH, k_BTKH, v_BTKH):
    """cuDNN's flash attention."""

    def flash(queries, keys, q_BTNH, k_BSKH, v_BSKH):
        mask_BTS = attention_mask(window_of(cfg, is_local), queries, keys)
        attend = flash_attention if current_rules()["batch"] else flash_of_shards
        return attend(
            cfg.query_scale**-0.5,
            q_BTNH,
            for_every_shard(k_BSKH),
            for_every_shard(v_BSKH),
            mask_BTS,
        )

    return by_lane(flash, meta, q_BTNH, k_BTKH, v_BTKH)


def for_every_shard(x_BSKH):
    """Keys or values with each head so often, side by side, that tp divides them: [B, S, K *
    copies, H].

    The kernels want queries, keys and values divided alike. tp divides the query heads and they are
    a multiple of K, so they are one of K * copies, too, and query head n still uses head n // (N /
    (K * copies)).
    """
    K, parts = x_BSKH.shape[2], parts_of("heads")
    copies = parts // math.gcd(K, parts)
    x_BSKH = jnp.repeat(x_BSKH, copies, axis=2) if copies > 1 else x_BSKH
    return constrain(x_BSKH, "batch", "seq", "heads", "head_dim")


def flash_attention(scale: float, q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """cuDNN's kernel. Its rows and heads are divided over the mesh as those of q are."""
    mask_BNTS = constrain(mask_BTS[:, None], "batch", "seq", "seq", "seq")
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=mask_BNTS, scale=scale, implementation="cudnn"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_of_shards(scale: float, q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """The same where each shard of the batch is worked off apart (micro_batches), under a vmap over
    the shards.

    JAX's batching rule of the kernel takes no mask that heads share, so the rows of all shards
    become those of one call. Its backward pass runs the forward pass once more, as nothing that the
    kernel keeps can be passed on.
    """
    return rows_together(partial(flash_attention, scale))(q_BTNH, k_BSKH, v_BSKH, mask_BTS)


def _flash_slopes(scale: float, kept, slope_BTNH):
    def slopes(q_BTNH, k_BSKH, v_BSKH, mask_BTS, slope_BTNH):
        _, pull = jax.vjp(
            lambda *qkv: flash_attention(scale, *qkv, mask_BTS), q_BTNH, k_BSKH, v_BSKH
        )
        return pull(slope_BTNH)

    return *rows_together(slopes)(*kept, slope_BTNH), None


flash_of_shards.defvjp(
    lambda scale, *arrays: (flash_of_shards(scale, *arrays), arrays), _flash_slopes
)


def rows_together(fn):
    """fn of arrays [rows, ...]; under a vmap over shards of rows it is called once, with the rows
    of all shards."""
    alone = jax.custom_batching.custom_vmap(fn)

    @alone.def_vmap
    def together(shards: int, are_divided, *arrays):
        pairs = zip(arrays, are_divided, strict=True)
        arrays = [
            x if is_divided else jnp.broadcast_to(x, (shards, *x.shape)) for x, is_divided in pairs
        ]
        # in which rows are divided over fsdp again
        with use_rules("train"):
            out = fn(*(_lying_as_rows(x.reshape(-1, *x.shape[2:])) for x in arrays))
        out = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return alone


def _lying_as_rows(x):
    """q, k, v or what looks like them, [B, T, heads, H], or a mask [B, T, S]."""
    return constrain(
        x, *("batch", "seq", "heads", "head_dim") if x.ndim == 4 else ("batch", "seq", "seq")
    )


def splash(cfg, is_local, meta: AttentionMeta, q_BTNH, k_BTKH, v_BTKH, interpret: bool = False):
    """The TPU kernel of jax.experimental.pallas: scores stay on the chip, what a mask hides is
    skipped."""

    def way(is_local: bool):
        return _splash_program(cfg, is_local, q_BTNH.shape, interpret)

    scaled = q_BTNH * jnp.asarray(cfg.query_scale**-0.5, q_BTNH.dtype)
    k_BTKH, v_BTKH = for_every_shard(k_BTKH), for_every_shard(v_BTKH)
    arrays = *(x.swapaxes(1, 2) for x in (scaled, k_BTKH, v_BTKH)), meta.segments
    if isinstance(is_local, bool):
        return way(is_local)(*arrays).swapaxes(1, 2)
    return jax.lax.cond(is_local, way(True), way(False), *arrays).swapaxes(1, 2)


def _splash_program(cfg, is_local: bool, q_shape, interpret: bool):
    """(q, k, v [B, N or K, T, H], segments [B, T]) -> [B, N, T, H], each device on its own
    sequences and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    (B, T, N, H), mesh = q_shape, jax.sharding.get_abstract_mesh()
    one = (
        kernels.LocalMask((T, T), (cfg.window - 1, 0), 0)
        if is_local
        else kernels.CausalMask((T, T))
    )
    block = next(size for size in (512, 256, LANES) if T % size == 0)
    kernel = kernels.make_splash_mha(
        kernels.MultiHeadMask([one] * (N // parts_of("heads"))),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=kernels.BlockSizes(**dict.fromkeys(BLOCKS, block)),
        attn_logits_soft_cap=cfg.attn_softcap,
        interpret=interpret,
    )
    # queries, and keys, too: for_every_shard
    lie = spec(("batch", "heads", "seq", "head_dim"), (B, N, T, H), mesh)

    def on_a_device(q_BNTH, k_BKTH, v_BKTH, segments_BT):
        alone = lambda q, k, v, segments: kernel(q, k, v, kernels.SegmentIds(segments, segments))  # noqa: E731
        return jax.vmap(alone)(q_BNTH, k_BKTH, v_BKTH, segments_BT)

    in_specs = lie, lie, lie, P(lie[0], None)
    return jax.shard_map(on_a_device, in_specs=in_specs, out_specs=lie, check_vma=False)


BLOCKS = (
    *("block_q", "block_kv", "block_kv_compute"),
    *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
)
IMPLEMENTATIONS = {"xla": xla, "cudnn": cudnn, "splash": splash}
# the one made for a platform
NATIVE = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}


def choose(
    asked: str, cfg, platform: str, dtype, width: int, shares_prompts: bool
) -> tuple[str, str]:
    """The implementation for rows of `width` tokens, and in words why. ValueError if the one asked
    for cannot."""
    if asked == "xla":
        return "xla", "as training.attention says"
    native = NATIVE.get(platform)
    if asked == "auto" and native is None:
        return "xla", f"the one for {platform}"
    name = native if asked == "auto" else asked
    reason = obstacle(name, cfg, platform, dtype, width, shares_prompts)
    if asked != "auto":
        if reason:
            raise ValueError(f"attention={asked}: {reason}; auto or xla would do")
        return asked, "as training.attention says"
    return ("xla", f"not {name}: {reason}") if reason else (name, f"the one made for {platform}")


def obstacle(name: str, cfg, platform: str, dtype, width: int, shares_prompts: bool) -> str | None:
    """Why an implementation cannot do this; None: it can."""
    if NATIVE.get(platform) != name:
        return f"it does not run on {platform}"
    if name == "cudnn":
        if cfg.attn_softcap is not None:
            return f"it has no soft cap, and the model's attn_softcap is {cfg.attn_softcap}"
        if jnp.dtype(dtype).itemsize != 2:
            return "it computes in bfloat16 only; training.mixed_precision=bf16 would do"
        if width % 2:
            return (
                f"it takes rows of even length, and they have {width}; another "
                "generation.max_prompt_length would do"
            )
        if cfg.head_dim > 256 or cfg.head_dim % 8:
            return f"it takes heads of up to 256 in multiples of 8, and head_dim is {cfg.head_dim}"
        return _cudnn_fails(cfg, dtype)
    if shares_prompts:
        return (
            "it knows no branches, and training.packing=prefix makes some; packing=sequences "
            "would do"
        )
    if width % LANES:
        return f"it takes rows in multiples of {LANES} tokens, and they have {width}"
    if cfg.head_dim % LANES:
        return f"it takes heads in multiples of {LANES}, and head_dim is {cfg.head_dim}"
    return None


def _cudnn_fails(cfg, dtype) -> str | None:
    """Compiles a small one: whether the library is there, and takes this, only it knows."""
    x = jax.ShapeDtypeStruct((1, LANES, 1, cfg.head_dim), dtype)
    mask = jax.ShapeDtypeStruct((1, 1, LANES, LANES), bool)
    attention = partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.jit(
            jax.grad(lambda q, k, v, m: attention(q, k, v, mask=m).sum().astype(jnp.float32))
        ).lower(x, x, x, mask).compile()
    except Exception as error:
        # whatever it is, it is the reason
        return f"a small one does not compile ({str(error).strip().splitlines()[0][:120]})"
    return None


def keep_heads(q_BTNH, k_BTKH, v_BTKH):
    """Queries, keys and values, told how they lie on the mesh: heads over tp."""
    return (
        constrain(q_BTNH, "batch", "seq", "heads", "head_dim"),
        constrain(k_BTKH, "batch", "seq", "kv_heads", "head_dim"),
        constrain(v_BTKH, "batch", "seq", "kv_heads", "head_dim"),
    )
