"""Attention among the tokens of a row: which token sees which, and the kernel that computes it:
`xla` anywhere, `cudnn` on NVIDIA GPUs, `splash` (a Pallas kernel of JAX) on TPUs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from tunix_lite.basics.types import RowBatch
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.rounding import at_least_float32, is_rounded, product, stored, wide
from tunix_lite.models.unfused import matrix_first, with_unfused_cotangent
from tunix_lite.parallel.mesh import constrain, current_rules, parts_of, spec, use_rules

# A masked score. It is finite, so that a row that sees nothing stays finite.
FAR_BELOW = -1e30
# Scores on one device at a time, in float32: 64 MiB. Longer rows go in pieces of their queries.
SCORES_AT_ONCE = 2**24
MOST_PIECES = 16
# Queries of a piece where all scores fit: no piece computes those with the keys behind it, which
# takes 4 % of the processor time from updates of SmolLM2 135M with rows of 768 tokens.
CAUSAL_PIECE = 256
# Splash attention takes lengths and heads in multiples of it.
LANES = 128
# Axes of a mask, and of queries, keys and values, by the number of their dims.
_ROW_AXES = {3: ("batch", "seq", "seq"), 4: ("batch", "seq", "heads", "head_dim")}


@flax.struct.dataclass
class AttentionMeta:
    """Tells which tokens may see each other. The arrays are int32, [B, T].

    Example, one row with a prompt of two tokens, two completions of it, and a padding token:

        positions       0 1 | 2 3 | 2 | 0
        segments        1 1 | 1 1 | 1 | 0
        completion_ids  0 0 | 1 1 | 2 | 0
    """

    positions: jax.Array  # position of a token in its own sequence, from 0
    # number of the sequence, or of the group that shares a prompt; 0: padding
    segments: jax.Array
    # number of the completion in its segment; 0: the prompt, which all see. None: none share one
    completion_ids: jax.Array | None = None
    # columns of the shared prompts, which all lanes see (packing.RowShape)
    prefix_columns: int = flax.struct.field(pytree_node=False, default=0)
    # columns of each lane after them; 0: the row has no lanes
    lane_columns: int = flax.struct.field(pytree_node=False, default=0)


def meta_of_rows(batch: RowBatch) -> AttentionMeta:
    """Returns the positions of the tokens of a batch in rows, and what each sees."""
    return AttentionMeta(
        batch.positions,
        batch.segment_ids,
        batch.completion_ids,
        batch.prefix_columns,
        batch.lane_columns,
    )


def one_sequence_per_row(token_mask_BT: jax.Array) -> AttentionMeta:
    """The metadata of rows that hold one sequence each. Padding may be on either side."""
    # Padding on the left would have the position -1.
    positions_BT = jnp.maximum(jnp.cumsum(token_mask_BT, axis=1) - 1, 0)
    return AttentionMeta(positions_BT, token_mask_BT.astype(jnp.int32))


def attention_mask(
    window: int | jax.Array | None,
    q: AttentionMeta,
    k: AttentionMeta,
) -> jax.Array:
    """[B, queries, keys] bool: whether a query may see a key. window: in tokens; None: no limit."""
    q = jax.tree.map(lambda x: x[:, :, None], q)
    k = jax.tree.map(lambda x: x[:, None], k)
    # padding has segment 0, and equals itself
    is_seen = (k.positions <= q.positions) & (q.segments == k.segments) & (k.segments > 0)
    if window is not None:
        is_seen &= q.positions - k.positions < window
    if k.completion_ids is not None:
        # of a shared prompt all of its completions, and of these each only itself
        is_seen &= (k.completion_ids == 0) | (k.completion_ids == q.completion_ids)
    return is_seen


def attend(
    cfg: Architecture,
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    mask_BTS: jax.Array,
    k_scales_BKS: jax.Array | None = None,
    v_scales_BKS: jax.Array | None = None,
    name: str = "scores",
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention, [B, T, N, H], in float32; each key head serves N / K query heads.

    With scales, keys and values are int8 codes. name: of the scores, for a remat policy
    (decoder.REMAT). sinks_N: a score of each head that joins its softmax and has no value.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    dtype = q_BTNH.dtype

    # While decoding, T is 1 and the queries have no such dim: with it, XLA's GPU backend makes
    # transposed copies of the cache.
    if T > 1:
        times = (T,)
        mask = mask_BTS[:, None, :, None]
    else:
        times = ()
        mask = mask_BTS[:, :, None]
    scaled = stored(wide(q_BTNH) * wide(jnp.asarray(cfg.query_scale**-0.5, dtype)), dtype)
    q = scaled.reshape(B, *times, K, N // K, H)

    # Scores have t, the dots, before q: the products then need no transposed copies (3x faster
    # on a CPU).
    to_scores = partial(
        jnp.einsum, "b...kqh,bksh->bk...qs", preferred_element_type=at_least_float32(dtype)
    )
    k = k_BKSH.astype(dtype)
    # XLA for CPUs would transpose all keys for this product.
    if T == 1 and not is_rounded(dtype):
        scores = jax.lax.platform_dependent(
            q, k, cpu=lambda q, k: matrix_first(k, q), default=to_scores
        )
    else:
        scores = to_scores(q, k)
    scores = checkpoint_name(scores, name)
    # After the product: a token has one scale, and many elements.
    if k_scales_BKS is not None:
        scores = scores * jnp.expand_dims(k_scales_BKS, range(2, scores.ndim - 1))
    if cfg.attn_softcap is not None:
        scores = cfg.attn_softcap * jnp.tanh(scores / cfg.attn_softcap)

    scores = jnp.where(mask, scores, FAR_BELOW)
    if sinks_N is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        sinks = sinks_N.astype(scores.dtype).reshape(K, *(1 for _ in times), N // K, 1)
        largest = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
        largest = jax.lax.stop_gradient(largest)
        exps = jnp.exp(scores - largest)
        probs = exps / (exps.sum(axis=-1, keepdims=True) + jnp.exp(sinks - largest))
    if not is_rounded(dtype):
        # In the backward pass a product makes this cotangent. It is faster in its own kernel
        # than in one with the softmax.
        probs = with_unfused_cotangent(probs)
    if v_scales_BKS is not None:
        probs = probs * jnp.expand_dims(v_scales_BKS, range(2, probs.ndim - 1))
    weighted_sum = partial(jnp.einsum, "bk...qs,bksh->b...kqh")
    out = product(weighted_sum, stored(probs, dtype), v_BKSH.astype(dtype), by_conversion=True)
    return out.reshape(B, T, N, H)


# ---- xla: plain products


def xla(
    cfg: Architecture,
    is_local: bool | jax.Array,
    meta: AttentionMeta,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention as plain products, [B, T, N, H]; long rows go in pieces of their queries.

    is_local: whether the layer has a window; traced where one program serves layers of both kinds.
    sinks_N: as of `attend`.
    """

    def of_rows(
        q_meta: AttentionMeta,
        k_meta: AttentionMeta,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
    ) -> jax.Array:
        k_BKSH = k_BSKH.swapaxes(1, 2)
        v_BKSH = v_BSKH.swapaxes(1, 2)
        T = q_BTNH.shape[1]
        S = k_BSKH.shape[1]
        fits = piece_length(q_BTNH, S) >= T
        if fits and (S > T or T < 2 * CAUSAL_PIECE):
            mask_BTS = attention_mask(window_of(cfg, is_local), q_meta, k_meta)
            return attend(cfg, q_BTNH, k_BKSH, v_BKSH, mask_BTS, sinks_N=sinks_N)

        # A window that is known while compiling saves columns. Where the kind of the layer is
        # traced, a branch for each kind costs more than that, unless the window is short; and
        # where the scores are kept, the branches would keep those of both kinds.
        arrays = (sinks_N, q_meta, k_meta, q_BTNH, k_BKSH, v_BKSH)
        is_known = isinstance(is_local, bool)
        if is_known or fits or 4 * cfg.window > S or k_meta.completion_ids is not None:
            return _in_pieces(cfg, window_of(cfg, is_local), *arrays)
        in_global = partial(_in_pieces, cfg, window_of(cfg, False))
        in_local = partial(_in_pieces, cfg, window_of(cfg, True))
        return jax.lax.cond(is_local, in_local, in_global, *arrays)

    return by_lane(of_rows, meta, q_BTNH, k_BTKH, v_BTKH)


def by_lane(
    fn: Callable[..., jax.Array],
    meta: AttentionMeta,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> jax.Array:
    """fn(query metadata, key metadata, q, k, v) of whole rows; where rows have lanes, of the prefix
    and of each lane, whose keys are the prefix and itself."""
    if not meta.lane_columns:
        return fn(meta, meta, q_BTNH, k_BTKH, v_BTKH)
    B = len(q_BTNH)
    prefix = meta.prefix_columns

    def prefix_of(x: jax.Array) -> jax.Array:
        return x[:, :prefix]

    def lanes_of(x: jax.Array) -> jax.Array:
        return x[:, prefix:].reshape(-1, meta.lane_columns, *x.shape[2:])

    def prefix_and_lane_of(x: jax.Array) -> jax.Array:
        lanes = lanes_of(x)
        shared = jnp.broadcast_to(
            x[:, None, :prefix], (B, len(lanes) // B, prefix, *x.shape[2:])
        )
        return jnp.concatenate([shared.reshape(-1, prefix, *x.shape[2:]), lanes], axis=1)

    # The prefix sees itself alone.
    k_prefix = prefix_of(k_BTKH)
    v_prefix = prefix_of(v_BTKH)
    meta_prefix = jax.tree.map(prefix_of, meta)
    out_prefix = fn(meta_prefix, meta_prefix, prefix_of(q_BTNH), k_prefix, v_prefix)

    # Each lane becomes a row, with its own copy of the prefix before its keys.
    out_lanes = fn(
        jax.tree.map(lanes_of, meta),
        jax.tree.map(prefix_and_lane_of, meta),
        lanes_of(q_BTNH),
        prefix_and_lane_of(k_BTKH),
        prefix_and_lane_of(v_BTKH),
    )
    return jnp.concatenate([out_prefix, out_lanes.reshape(B, -1, *q_BTNH.shape[2:])], axis=1)


def window_of(cfg: Architecture, is_local: bool | jax.Array) -> int | jax.Array | None:
    """Tokens that a layer sees; None: all of them. Traced where is_local is."""
    if isinstance(is_local, bool):
        return cfg.window if is_local else None
    return jnp.where(is_local, cfg.window, jnp.iinfo(jnp.int32).max)


def piece_length(q_BTNH: jax.Array, S: int) -> int:
    """Counts the queries of a row whose scores with S keys are computed at once."""
    B, T, N, _ = q_BTNH.shape
    per_query_on_a_device = B * N * S // (parts_of("batch") * parts_of("heads"))
    length = max(SCORES_AT_ONCE // per_query_on_a_device, -(-T // MOST_PIECES), 1)
    # Cut into that many pieces, all are of about one length.
    return -(-T // -(-T // length))


def _in_pieces(
    cfg: Architecture,
    window: int | jax.Array | None,
    sinks_N: jax.Array | None,
    q_meta: AttentionMeta,
    k_meta: AttentionMeta,
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
) -> jax.Array:
    """`attend` for one piece of the queries after the other."""

    def piece(q_meta: AttentionMeta, k_meta: AttentionMeta, *qkv: jax.Array) -> jax.Array:
        mask_BTS = attention_mask(window, q_meta, k_meta)
        # Computed again in the backward pass: of such rows scores are most of what it would keep.
        return attend(cfg, *qkv, mask_BTS, name="scores of a piece", sinks_N=sinks_N)

    T = q_BTNH.shape[1]
    S = k_BKSH.shape[2]
    length = piece_length(q_BTNH, S)
    if length >= T:
        length = CAUSAL_PIECE
    else:
        # Otherwise the backward pass would keep the scores of all pieces at once.
        piece = jax.checkpoint(piece)
    # A completion stands further from its prompt than its positions say, so a window there is no
    # range of columns.
    is_range = isinstance(window, int) and k_meta.completion_ids is None
    pieces = []
    for start in range(0, T, length):
        stop = min(start + length, T)
        first = max(0, S - T + start - window + 1) if is_range else 0
        queries = slice(start, stop)
        # No query sees the keys of a later one.
        keys = slice(first, S - T + stop)
        out = piece(
            jax.tree.map(lambda x, queries=queries: x[:, queries], q_meta),
            jax.tree.map(lambda x, keys=keys: x[:, keys], k_meta),
            q_BTNH[:, queries],
            k_BKSH[:, :, keys],
            v_BKSH[:, :, keys],
        )
        pieces.append(out)
    return jnp.concatenate(pieces, axis=1)


# ---- cudnn: the kernel for NVIDIA GPUs


def cudnn(
    cfg: Architecture,
    is_local: bool | jax.Array,
    meta: AttentionMeta,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> jax.Array:
    """cuDNN's flash attention, [B, T, N, H]. Arguments as of `xla`."""

    def flash(
        q_meta: AttentionMeta,
        k_meta: AttentionMeta,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
    ) -> jax.Array:
        mask_BTS = attention_mask(window_of(cfg, is_local), q_meta, k_meta)
        # Without a division of the batch, a vmap over its shards is around us (micro_batches).
        kernel = _flash_attention if current_rules()["batch"] else _flash_attention_under_vmap
        k_BSKH = _repeat_heads_for_tp(k_BSKH)
        v_BSKH = _repeat_heads_for_tp(v_BSKH)
        return kernel(cfg.query_scale**-0.5, q_BTNH, k_BSKH, v_BSKH, mask_BTS)

    return by_lane(flash, meta, q_BTNH, k_BTKH, v_BTKH)


def _repeat_heads_for_tp(x_BSKH: jax.Array) -> jax.Array:
    """Keys or values with each head repeated, side by side, until tp divides the heads: [B, S, K *
    copies, H]."""
    # The kernels want queries, keys and values divided alike. tp divides the query heads, a number
    # times K * copies, and query head n still uses head n // (N / (K * copies)).
    K = x_BSKH.shape[2]
    parts = parts_of("heads")
    copies = parts // math.gcd(K, parts)
    if copies > 1:
        x_BSKH = jnp.repeat(x_BSKH, copies, axis=2)
    return constrain(x_BSKH, "batch", "seq", "heads", "head_dim")


def _flash_attention(
    scale: float,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
) -> jax.Array:
    """cuDNN's kernel. The mesh divides its rows and heads as it divides those of q."""
    # one mask for all heads: cuDNN broadcasts it
    mask_BNTS = constrain(mask_BTS[:, None], "batch", "seq", "seq", "seq")
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=mask_BNTS, scale=scale, implementation="cudnn"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash_attention_under_vmap(
    scale: float,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
) -> jax.Array:
    """`_flash_attention` where a vmap computes each shard of the batch separately
    (micro_batches)."""
    # JAX's batching rule of the kernel takes no mask that heads share, so the rows of all shards
    # become those of one call. The backward pass runs the forward pass again.
    return _merge_vmapped_rows(partial(_flash_attention, scale))(
        q_BTNH, k_BSKH, v_BSKH, mask_BTS
    )


def _flash_vjp(
    scale: float,
    residuals: tuple,
    cotangent_BTNH: jax.Array,
) -> tuple:
    def cotangents(*arrays: jax.Array) -> tuple:
        *qkv, mask_BTS, cotangent_BTNH = arrays

        def of_qkv(*qkv: jax.Array) -> jax.Array:
            return _flash_attention(scale, *qkv, mask_BTS)

        _, pull_back = jax.vjp(of_qkv, *qkv)
        return pull_back(cotangent_BTNH)

    return *_merge_vmapped_rows(cotangents)(*residuals, cotangent_BTNH), None


_flash_attention_under_vmap.defvjp(
    lambda scale, *arrays: (_flash_attention_under_vmap(scale, *arrays), arrays), _flash_vjp
)


def _merge_vmapped_rows(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps fn of arrays [rows, ...]: under a vmap over shards it is called once, with the rows of
    all."""
    per_shard = jax.custom_batching.custom_vmap(fn)

    @per_shard.def_vmap
    def merged(shards: int, are_batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        arrays = [
            x if is_batched else jnp.broadcast_to(x, (shards, *x.shape))
            for x, is_batched in zip(arrays, are_batched, strict=True)
        ]

        # Outside of the vmap, fsdp divides the rows again.
        with use_rules("train"):
            # q, k, v or an array of their shape, [B, T, heads, H]; or a mask, [B, T, S]
            rows = [x.reshape(-1, *x.shape[2:]) for x in arrays]
            out = fn(*(constrain(x, *_ROW_AXES[x.ndim]) for x in rows))
        out = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return per_shard


# ---- splash: the kernel for TPUs


def splash(
    cfg: Architecture,
    is_local: bool | jax.Array,
    meta: AttentionMeta,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """The TPU kernel of jax.experimental.pallas, [B, T, N, H]. interpret: without a TPU, as tests
    do."""

    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    T = q_BTNH.shape[1]
    # The kernel has no scale of its own.
    scaled = q_BTNH * jnp.asarray(cfg.query_scale**-0.5, q_BTNH.dtype)
    # Queries, keys and values are divided alike.
    k_BTKH = _repeat_heads_for_tp(k_BTKH)
    v_BTKH = _repeat_heads_for_tp(v_BTKH)
    q_BNTH, *kv_BKTH = (x.swapaxes(1, 2) for x in (scaled, k_BTKH, v_BTKH))
    mesh = jax.sharding.get_abstract_mesh()
    qkv_spec = spec(("batch", "heads", "seq", "head_dim"), q_BNTH.shape, mesh)

    def on_devices(is_local: bool) -> Callable[..., jax.Array]:
        # Our window counts the query's own token.
        causal = kernels.CausalMask((T, T))
        mask = kernels.LocalMask((T, T), (cfg.window - 1, 0), 0) if is_local else causal
        # the largest that divides the row: a kernel takes no rest
        block = next(size for size in (512, 256, LANES) if T % size == 0)
        kernel = kernels.make_splash_mha(
            kernels.MultiHeadMask([mask] * (q_BNTH.shape[1] // parts_of("heads"))),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=kernels.BlockSizes(**dict.fromkeys(BLOCKS, block)),
            attn_logits_soft_cap=cfg.attn_softcap,
            interpret=interpret,
        )

        def of_sequence(*arrays: jax.Array) -> jax.Array:
            *qkv, segments_T = arrays
            return kernel(*qkv, kernels.SegmentIds(segments_T, segments_T))

        return jax.shard_map(
            jax.vmap(of_sequence),
            in_specs=(qkv_spec, qkv_spec, qkv_spec, P(qkv_spec[0], None)),
            out_specs=qkv_spec,
            # The results of a kernel do not say over which axes they vary.
            check_vma=False,
        )

    arrays = (q_BNTH, *kv_BKTH, meta.segments)
    if isinstance(is_local, bool):
        return on_devices(is_local)(*arrays).swapaxes(1, 2)
    # Its mask is static, so each kind of layer has a kernel of its own.
    return jax.lax.cond(is_local, on_devices(True), on_devices(False), *arrays).swapaxes(1, 2)


BLOCKS = """
    block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq
    block_kv_dq
""".split()  # noqa: SIM905

# ---- which of them

IMPLEMENTATIONS = {"xla": xla, "cudnn": cudnn, "splash": splash}
# The one made for a platform.
NATIVE = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}


class CannotCompile(ValueError):
    """A kernel that was asked for by name was made for this, but this machine cannot compile it."""


def choose(
    setting: str,
    cfg: Architecture,
    platform: str,
    dtype: DTypeLike,
    width: int,
    shares_prompts: bool,
) -> tuple[str, str]:
    """The implementation for rows of `width` tokens, a name of IMPLEMENTATIONS, and the reason.

    setting: `training.attention`. Raises ValueError if the one asked for cannot do it,
    CannotCompile if only this machine cannot.
    """
    is_auto = setting == "auto"
    name = NATIVE.get(platform, "xla") if is_auto else setting
    why = None
    if name != "xla":
        why = obstacle(name, cfg, platform, dtype, width, shares_prompts)
    if why is not None and is_auto:
        return "xla", f"not {name}: {why}"
    if why is not None:
        raise type(why)(f"attention={setting}: {why}; use auto or xla")
    return name, f"the one for {platform}" if is_auto else "as training.attention says"


def obstacle(
    name: str,
    cfg: Architecture,
    platform: str,
    dtype: DTypeLike,
    width: int,
    shares_prompts: bool,
) -> ValueError | None:
    """Why the implementation `name` cannot compute this here, CannotCompile if only this machine
    cannot; None: it can. Arguments as of `choose`."""
    if NATIVE.get(platform) != name:
        return ValueError(f"it does not run on {platform}")
    H = max(cfg.kv_shape(kind)[1] for kind in cfg.pattern)
    reasons = {
        f"it has no soft cap, and the model's attn_softcap is {cfg.attn_softcap}": (
            cfg.attn_softcap is not None
        ),
        "it computes in bfloat16 only; set training.mixed_precision=bf16": (
            jnp.dtype(dtype).itemsize != 2
        ),
        f"it takes rows of even length, and they have {width}; change "
        "generation.max_prompt_length by 1": width % 2,
        f"it takes heads of up to 256 in multiples of 8, and head_dim is {H}": H > 256
        or H % 8,
    }
    if name == "splash":
        reasons = {
            "it knows no branches, and training.packing=prefix makes some; set "
            "training.packing=sequences": shares_prompts,
            f"it takes rows in multiples of {LANES} tokens, and they have {width}": width
            % LANES,
            f"it takes heads in multiples of {LANES}, and head_dim is {H}": H % LANES,
        }
    reasons = {"it has no attention sinks, and the model has some": cfg.attn_sinks} | reasons
    # the first of them is enough to say
    for reason, is_so in reasons.items():
        if is_so:
            return ValueError(reason)
    error = _cudnn_fails(cfg, dtype) if name == "cudnn" else None
    return None if error is None else CannotCompile(error)


def _cudnn_fails(cfg: Architecture, dtype: DTypeLike) -> str | None:
    """The error of compiling a small kernel, in one line; None: it compiles."""
    H = max(cfg.kv_shape(kind)[1] for kind in cfg.pattern)
    x = jax.ShapeDtypeStruct((1, LANES, 1, H), dtype)
    mask = jax.ShapeDtypeStruct((1, 1, LANES, LANES), bool)
    attention = partial(jax.nn.dot_product_attention, implementation="cudnn")

    def total(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return attention(q, k, v, mask=mask).sum().astype(jnp.float32)

    try:
        # With its gradient, whose kernel may fail alone.
        jax.jit(jax.grad(total)).lower(x, x, x, mask).compile()
    except Exception as error:
        # Whatever the error is, it is the reason.
        return f"a small one does not compile ({str(error).strip().splitlines()[0][:120]})"
    return None
