"""A decoder-only transformer as a table of weights and pure functions: Gemma 2 and 3, Qwen 2.5 and 3, Llama 3.

Per layer:  x += norm(attention(norm(x)));  x += norm(down(act(gate(norm(x))) * up(norm(x))))
with rms_norm(x) = x / sqrt(mean(x^2) + eps) * scale, rotary positions, and `pattern` repeating over the layers: "local"
layers see the last `window` tokens, "global" ones see all. What families do differently is a flag of `ModelConfig`.
Sources: arXiv:2408.00118 (Gemma 2), 2503.19786 (Gemma 3), 2412.15115 (Qwen 2.5), 2505.09388 (Qwen 3), 2407.21783 (Llama
3), and the published checkpoints.

Layers are stored by their place in the pattern, `groups/<place>/<name>` with a leading dim over the repeats, and
`tail/<place>/<name>` for what is left when the pattern does not divide the depth. Training scans over the repeats,
so that compile time does not grow with depth; sampling runs layer by layer on `per_layer` weights.
"""

from dataclasses import dataclass, fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.models.weights import Weight, fan_in, is_quantized, ones, project, stacked, zeros
from tunix_lite.parallel.mesh import constrain

EMBED_INIT = jax.nn.initializers.normal(0.02)
FAR_BELOW = -1e30  # a masked score: finite, so that a row which sees nothing stays finite


@dataclass(frozen=True)
class RopeScaling:
    """Longer rotary wavelengths, for sequences beyond those of pretraining.

    With `factor` alone all wavelengths grow by it (linear). With the rest, as Llama 3.1 does: those that fit into
    original_positions / high_freq_factor stay, those beyond original_positions / low_freq_factor grow by it, and
    those between by something between.
    """

    factor: float  # by which wavelengths grow
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_positions: int | None = None  # tokens of the longest sequence before scaling

    def __post_init__(self):
        rest = (self.low_freq_factor, self.high_freq_factor, self.original_positions)
        if any(x is None for x in rest) and any(x is not None for x in rest):
            raise ValueError("give low_freq_factor, high_freq_factor and original_positions, or none of the three")
        if self.factor <= 0 or (rest[0] is not None and not 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError("factor must be above 0, and low_freq_factor between 0 and high_freq_factor")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Sizes count elements unless said otherwise; what is not given is as in Gemma 3."""

    vocab_size: int  # tokens, padding included
    num_layers: int  # blocks of attention and feed-forward
    embed_dim: int  # width of the residual stream
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; even
    mlp_dim: int  # hidden width of the gated feed-forward
    pattern: tuple[str, ...] = ("local", "local", "local", "local", "local", "global")  # repeats over the layers
    window: int | None = 512  # tokens that a local layer sees, the current one included; null: no layer is local
    query_scale: int = 256  # scores are divided by its square root (Gemma: query_pre_attn_scalar)
    rope_theta_local: float = 10_000.0  # base of the rotary wavelengths of local layers
    rope_theta_global: float = 1_000_000.0  # and of global ones
    rope_scaling: RopeScaling | None = None  # of global layers
    norm_eps: float = 1e-6  # added to the mean square
    activation: str = "gelu"  # of the feed-forward: gelu (its tanh form) or silu
    embed_scale: bool = True  # embeddings are multiplied by sqrt(embed_dim)
    norm_plus_one: bool = True  # norms multiply by 1 + scale, not by scale
    post_norms: bool = True  # norms after attention and feed-forward, too
    qk_norm: bool = True  # queries and keys are normalised per head, before rope
    qkv_bias: bool = False  # queries, keys and values have a bias
    tied: bool = True  # the embedding gives the scores, too; otherwise `head` does
    attn_softcap: float | None = None  # attention scores s become cap * tanh(s / cap)
    final_softcap: float | None = None  # and so do the scores over the vocabulary
    max_positions: int = 131_072  # tokens of the longest sequence

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{field.name}={value} must be above 0")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r}; it is {' or '.join(ACTIVATIONS)}")
        if "local" in self.pattern and self.window is None:
            raise ValueError(f"pattern={list(self.pattern)} has local layers, and window is not given")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, and rope turns pairs")
        if not self.pattern or set(self.pattern) - {"local", "global"}:
            raise ValueError(f"pattern={list(self.pattern)}: its entries are 'local' and 'global'")

    @property
    def num_groups(self) -> int:
        """How often the whole pattern repeats."""
        return self.num_layers // len(self.pattern)

    @property
    def tail(self) -> tuple[str, ...]:
        """The kinds of the layers left over after the repeats."""
        return self.pattern[: self.num_layers % len(self.pattern)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer, in order."""
        return self.pattern * self.num_groups + self.tail


def weights(cfg: ModelConfig) -> dict:
    """Every parameter of the model, by name."""
    table = Weight((cfg.vocab_size, cfg.embed_dim), ("vocab", "embed"), EMBED_INIT, inputs=0)
    model = {"embed": table, "final_norm": norm_weight(cfg, cfg.embed_dim)}
    if not cfg.tied:
        model["head"] = table
    layer = layer_weights(cfg)
    if cfg.num_groups:
        model["groups"] = {
            str(place): {name: stacked(w, cfg.num_groups) for name, w in layer.items()}
            for place in range(len(cfg.pattern))
        }
    if cfg.tail:
        model["tail"] = {str(place): layer for place in range(len(cfg.tail))}
    return model


def layer_weights(cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of one layer."""
    D, N, K, H, F = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim
    layer = {
        "attn_norm": norm_weight(cfg, D),
        "q": Weight((D, N, H), ("embed", "heads", "head_dim")),
        "k": Weight((D, K, H), ("embed", "kv_heads", "head_dim")),
        "v": Weight((D, K, H), ("embed", "kv_heads", "head_dim")),
        "o": Weight((N, H, D), ("heads", "head_dim", "embed"), fan_in(2), inputs=2),
        "mlp_norm": norm_weight(cfg, D),
        "gate": Weight((D, F), ("embed", "mlp")),
        "up": Weight((D, F), ("embed", "mlp")),
        "down": Weight((F, D), ("mlp", "embed")),
    }
    if cfg.qkv_bias:
        layer["q_bias"] = Weight((N, H), ("heads", "head_dim"), zeros, inputs=0)
        layer["k_bias"] = layer["v_bias"] = Weight((K, H), ("kv_heads", "head_dim"), zeros, inputs=0)
    if cfg.qk_norm:
        layer["q_norm"] = layer["k_norm"] = norm_weight(cfg, H)
    if cfg.post_norms:
        layer["attn_post_norm"] = layer["mlp_post_norm"] = norm_weight(cfg, D)
    return layer


def norm_weight(cfg: ModelConfig, size: int) -> Weight:
    return Weight((size,), ("norm",), zeros if cfg.norm_plus_one else ones, inputs=0)


def layer_places(cfg: ModelConfig) -> list[tuple[str, int | None]]:
    """For each layer in order: the path of its weights, and its index in their leading dim (None: no such dim)."""
    period = len(cfg.pattern)
    grouped = [(f"groups/{i % period}", i // period) for i in range(cfg.num_groups * period)]
    return grouped + [(f"tail/{place}", None) for place in range(len(cfg.tail))]


def per_layer(params, cfg: ModelConfig, dtype) -> dict:
    """The same parameters as a list of layers, matrices in the compute dtype: what sampling runs on.

    Norms keep their dtype, as they do in training, and quantised weights their codes.
    """

    def cast(leaf):
        return leaf if is_quantized(leaf) or leaf.ndim < 2 else leaf.astype(dtype)

    return jax.tree.map(cast, by_layer(params, cfg, lambda w, i: w[i]), is_leaf=is_quantized)


def per_layer_places(places, cfg: ModelConfig):
    """Where `per_layer` leaves its arrays, given where the parameters live: each where it comes from."""
    return by_layer(places, cfg, lambda place, _: NamedSharding(place.mesh, P(*place.spec[1:])))


def by_layer(tree, cfg: ModelConfig, of_layer) -> dict:
    """A tree of the parameters' form with a list of layers; of_layer(leaf, i) is what layer i has of a stacked leaf."""
    layers = []
    for path, index in layer_places(cfg):
        part, place = path.split("/")
        layers.append(jax.tree.map(lambda leaf, i=index: leaf if i is None else of_layer(leaf, i), tree[part][place]))
    return {name: leaf for name, leaf in tree.items() if name not in ("groups", "tail")} | {"layers": layers}


def forward(params, cfg: ModelConfig, tokens_BT, token_mask_BT, dtype=jnp.float32):
    """Hidden states [B, T, D] of whole sequences, after the final norm. Padding may stand on either side."""
    positions_BT = jnp.maximum(jnp.cumsum(token_mask_BT, axis=1) - 1, 0)
    angles, masks = all_angles(cfg, positions_BT), causal_masks(cfg, token_mask_BT)

    see = {kind: partial(see_each_other, cfg, mask_BTS) for kind, mask_BTS in masks.items()}

    def group(x_BTD, w):
        for place, kind in enumerate(cfg.pattern):
            x_BTD, _ = block(x_BTD, w[str(place)], cfg, angles[kind], see[kind])
        return x_BTD, None

    x_BTD = embed(params, cfg, tokens_BT, dtype)
    if cfg.num_groups:
        x_BTD, _ = jax.lax.scan(group, x_BTD, params["groups"])
    for place, kind in enumerate(cfg.tail):
        x_BTD, _ = block(x_BTD, params["tail"][str(place)], cfg, angles[kind], see[kind])
    return norm(x_BTD, params["final_norm"], cfg)


def forward_by_layer(layered, cfg: ModelConfig, tokens_BT, positions_BT, see) -> tuple[jax.Array, list]:
    """Hidden states [B, T, D] of tokens at these positions, and what each layer keeps. `layered`: from `per_layer`.

    see(layer, q_BTNH, k_BTKH, v_BTKH) -> (attended [B, T, N, H], what the layer keeps) says what the tokens see:
    a cache of earlier keys and values is its business.
    """
    angles = all_angles(cfg, positions_BT)
    x_BTD = embed(layered, cfg, tokens_BT, layered["embed"].dtype)
    kept = []
    for layer, (w, kind) in enumerate(zip(layered["layers"], cfg.kinds)):
        x_BTD, of_layer = block(x_BTD, w, cfg, angles[kind], partial(see, layer))
        kept.append(of_layer)
    return norm(x_BTD, layered["final_norm"], cfg), kept


def all_angles(cfg: ModelConfig, positions_BT) -> dict:
    """rope's angles, by kind of layer."""
    return {kind: rope_angles(cfg, positions_BT, kind) for kind in dict.fromkeys(cfg.pattern)}


def causal_masks(cfg: ModelConfig, token_mask_BT) -> dict:
    """Who may see whom within one sequence, [B, T, T] bool, by kind of layer."""
    columns_T = jnp.arange(token_mask_BT.shape[1])
    back_TS = columns_T[:, None] - columns_T[None, :]  # how far back each key stands
    causal_BTS = (back_TS >= 0) & token_mask_BT[:, None, :]
    kinds = dict.fromkeys(cfg.pattern)
    return {kind: causal_BTS & (back_TS < cfg.window) if kind == "local" else causal_BTS for kind in kinds}


def see_each_other(cfg: ModelConfig, mask_BTS, q_BTNH, k_BTKH, v_BTKH):
    """Attention among the tokens at hand; nothing is kept."""
    k_BKSH, v_BKSH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
    return attend(cfg, q_BTNH, k_BKSH, v_BKSH, mask_BTS), None


def embed(params, cfg: ModelConfig, tokens_BT, dtype):
    x_BTD = params["embed"].astype(dtype)[tokens_BT]
    if cfg.embed_scale:
        x_BTD = x_BTD * jnp.asarray(cfg.embed_dim**0.5, dtype)
    return constrain(x_BTD, "batch", "seq", "act_embed")


def logits(params, cfg: ModelConfig, hidden):
    """Float32 scores over the vocabulary, [..., V], by the transposed embedding or by the head."""
    table_VD = params["embed" if cfg.tied else "head"].astype(hidden.dtype)
    scores = jnp.einsum("...d,vd->...v", hidden, table_VD, preferred_element_type=at_least_float32(hidden.dtype))
    return softcap(scores, cfg.final_softcap)


def softcap(scores, cap: float | None):
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def block(x_BTD, w, cfg: ModelConfig, angles, see):
    """One layer, and what `see(q, k, v)` keeps of it."""
    attended_BTD, kept = attention(norm(x_BTD, w["attn_norm"], cfg), w, cfg, angles, see)
    if cfg.post_norms:
        attended_BTD = norm(attended_BTD, w["attn_post_norm"], cfg)
    x_BTD = constrain(x_BTD + attended_BTD, "batch", "seq", "act_embed")
    fed_BTD = gated_mlp(norm(x_BTD, w["mlp_norm"], cfg), w, cfg)
    if cfg.post_norms:
        fed_BTD = norm(fed_BTD, w["mlp_post_norm"], cfg)
    return constrain(x_BTD + fed_BTD, "batch", "seq", "act_embed"), kept


def attention(x_BTD, w, cfg: ModelConfig, angles, see):
    q_BTNH, k_BTKH, v_BTKH = (project(x_BTD, w[name]) for name in "qkv")
    if cfg.qkv_bias:
        q_BTNH, k_BTKH, v_BTKH = (
            x + w[f"{name}_bias"].astype(x.dtype) for name, x in zip("qkv", (q_BTNH, k_BTKH, v_BTKH))
        )
    if cfg.qk_norm:
        q_BTNH, k_BTKH = norm(q_BTNH, w["q_norm"], cfg), norm(k_BTKH, w["k_norm"], cfg)
    out_BTNH, kept = see(rope(q_BTNH, angles), rope(k_BTKH, angles), v_BTKH)
    return project(out_BTNH, w["o"], inputs=2), kept


def attend(cfg: ModelConfig, q_BTNH, k_BKSH, v_BKSH, mask_BTS, k_scales_BKS=None, v_scales_BKS=None):
    """Softmax attention, scores and softmax in float32; each key head serves N / K query heads.

    With scales, keys and values are codes (int8) to be multiplied by them, one scale for a head of a token.
    """
    B, T, N, H = q_BTNH.shape
    K, dtype = k_BKSH.shape[1], q_BTNH.dtype
    # Without a dim of size 1 while decoding: with it, XLA's GPU backend makes transposed copies of the cache.
    times, mask = ((T,), mask_BTS[:, None, :, None]) if T > 1 else ((), mask_BTS[:, :, None])
    q = (q_BTNH * jnp.asarray(cfg.query_scale**-0.5, dtype)).reshape(B, *times, K, N // K, H)
    # t, the dots, before q in the scores: the products then need no transposed copies (3x faster on a CPU)
    scores = jnp.einsum(
        "b...kqh,bksh->bk...qs", q, k_BKSH.astype(dtype), preferred_element_type=at_least_float32(dtype)
    )
    if k_scales_BKS is not None:
        scores = scores * jnp.expand_dims(k_scales_BKS, range(2, scores.ndim - 1))
    scores = jnp.where(mask, softcap(scores, cfg.attn_softcap), FAR_BELOW)
    probs = jax.nn.softmax(scores, axis=-1)
    if v_scales_BKS is not None:
        probs = probs * jnp.expand_dims(v_scales_BKS, range(2, probs.ndim - 1))
    return jnp.einsum("bk...qs,bksh->b...kqh", probs.astype(dtype), v_BKSH.astype(dtype)).reshape(B, T, N, H)


ACTIVATIONS = {"gelu": partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu}


def gated_mlp(x_BTD, w, cfg: ModelConfig):
    gate_BTF = ACTIVATIONS[cfg.activation](project(x_BTD, w["gate"]))
    hidden_BTF = constrain(gate_BTF * project(x_BTD, w["up"]), "batch", "seq", "mlp")
    return project(hidden_BTF, w["down"])


def norm(x, scale, cfg: ModelConfig):
    """x at a root mean square of 1, times its scale."""
    wide = x.astype(at_least_float32(x.dtype))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + cfg.norm_eps)
    scale = scale.astype(wide.dtype)
    return (normed * (1 + scale if cfg.norm_plus_one else scale)).astype(x.dtype)


def at_least_float32(dtype):
    """The dtype of what must not be rounded to bfloat16: norms, softmax, rope and scores."""
    return jnp.promote_types(dtype, jnp.float32)


def rope_angles(cfg: ModelConfig, positions_BT, kind: str):
    """sin and cos, [B, T, 1, H/2] each, float32."""
    half = cfg.head_dim // 2
    frequency = (cfg.rope_theta_local if kind == "local" else cfg.rope_theta_global) ** -(np.arange(half) / half)
    if kind == "global" and cfg.rope_scaling is not None:
        frequency = rescaled(frequency, cfg.rope_scaling)
    angle = positions_BT[..., None, None] * jnp.asarray(frequency, jnp.float32)
    return jnp.sin(angle), jnp.cos(angle)


def rescaled(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Frequencies (1 / tokens, times 2 pi) for longer sequences."""
    if scaling.original_positions is None:
        return frequency / scaling.factor
    turns = scaling.original_positions * frequency / (2 * np.pi)  # within the original length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rope(x_BTNH, angles):
    """Rotary positions: element i and i + H/2 of a head turn together."""
    sin, cos = angles
    first, second = jnp.split(x_BTNH.astype(at_least_float32(x_BTNH.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)
