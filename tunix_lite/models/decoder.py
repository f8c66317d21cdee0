"""A decoder-only transformer of the Gemma 3 kind, as a table of weights and pure functions.

Per layer:  x += norm(attention(norm(x)));  x += norm(down(gelu(gate(norm(x))) * up(norm(x))))
with rms_norm(x) = x / sqrt(mean(x^2) + eps) * (1 + scale), queries and keys normalised per head before rope, and
`pattern` repeating over the layers: "local" layers see the last `window` tokens, "global" ones see all.
Source: Gemma 3 Technical Report (arXiv:2503.19786) and the published checkpoints.

Layers are stored by their place in the pattern, `groups/<place>/<name>` with a leading dim over the repeats, and
`tail/<place>/<name>` for what is left when the pattern does not divide the depth. Training scans over the repeats,
so that compile time does not grow with depth; sampling runs layer by layer on `per_layer` weights.
"""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.models.weights import Weight, fan_in, project, stacked, zeros
from tunix_lite.parallel.mesh import constrain

FAR_BELOW = -1e30  # a masked score: finite, so that a row which sees nothing stays finite


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, in Gemma 3's terms. Sizes count elements unless said otherwise."""

    vocab_size: int  # tokens, padding included
    num_layers: int  # blocks of attention and feed-forward
    embed_dim: int  # width of the residual stream
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; even
    mlp_dim: int  # hidden width of the gated feed-forward
    pattern: tuple[str, ...] = ("local", "local", "local", "local", "local", "global")  # repeats over the layers
    window: int = 512  # tokens that a local layer sees, the current one included
    query_scale: int = 256  # scores are divided by its square root (Gemma: query_pre_attn_scalar)
    rope_theta_local: float = 10_000.0  # base of the rotary wavelengths of local layers
    rope_theta_global: float = 1_000_000.0  # and of global ones
    rope_factor_global: float = 1.0  # positions of global layers are divided by it (linear rope scaling)
    norm_eps: float = 1e-6  # added to the mean square

    def __post_init__(self):
        for field in fields(self):
            if field.name != "pattern" and (value := getattr(self, field.name)) <= 0:
                raise ValueError(f"{field.name}={value} must be above 0")
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
    model = {
        "embed": Weight((cfg.vocab_size, cfg.embed_dim), ("vocab", "embed"), jax.nn.initializers.normal(0.02)),
        "final_norm": Weight((cfg.embed_dim,), ("norm",), zeros),
    }
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
    return {
        "attn_norm": Weight((D,), ("norm",), zeros),
        "q": Weight((D, N, H), ("embed", "heads", "head_dim")),
        "k": Weight((D, K, H), ("embed", "kv_heads", "head_dim")),
        "v": Weight((D, K, H), ("embed", "kv_heads", "head_dim")),
        "q_norm": Weight((H,), ("norm",), zeros),
        "k_norm": Weight((H,), ("norm",), zeros),
        "o": Weight((N, H, D), ("heads", "head_dim", "embed"), fan_in(2), inputs=2),
        "attn_post_norm": Weight((D,), ("norm",), zeros),
        "mlp_norm": Weight((D,), ("norm",), zeros),
        "gate": Weight((D, F), ("embed", "mlp")),
        "up": Weight((D, F), ("embed", "mlp")),
        "down": Weight((F, D), ("mlp", "embed")),
        "mlp_post_norm": Weight((D,), ("norm",), zeros),
    }


def layer_places(cfg: ModelConfig) -> list[tuple[str, int | None]]:
    """For each layer in order: the path of its weights, and its index in their leading dim (None: no such dim)."""
    period = len(cfg.pattern)
    grouped = [(f"groups/{i % period}", i // period) for i in range(cfg.num_groups * period)]
    return grouped + [(f"tail/{place}", None) for place in range(len(cfg.tail))]


def per_layer(params, cfg: ModelConfig, dtype) -> dict:
    """The same parameters as a list of layers in the compute dtype: what sampling runs on."""
    layers = []
    for path, index in layer_places(cfg):
        part, place = path.split("/")
        layers.append(jax.tree.map(lambda w, i=index: w if i is None else w[i], params[part][place]))
    rest = {"embed": params["embed"], "final_norm": params["final_norm"], "layers": layers}
    return jax.tree.map(lambda w: w.astype(dtype), rest)


def forward(params, cfg: ModelConfig, tokens_BT, token_mask_BT, dtype=jnp.float32):
    """Hidden states [B, T, D] of whole sequences, after the final norm. Padding may stand on either side."""
    T = tokens_BT.shape[1]
    positions_BT = jnp.maximum(jnp.cumsum(token_mask_BT, axis=1) - 1, 0)
    view = look(cfg, positions_BT, jnp.arange(T), jnp.arange(T), token_mask_BT)

    def group(x_BTD, w):
        for place, kind in enumerate(cfg.pattern):
            x_BTD, _ = block(x_BTD, w[str(place)], cfg, view[kind])
        return x_BTD, None

    x_BTD = embed(params, cfg, tokens_BT, dtype)
    if cfg.num_groups:
        x_BTD, _ = jax.lax.scan(group, x_BTD, params["groups"])
    for place, kind in enumerate(cfg.tail):
        x_BTD, _ = block(x_BTD, params["tail"][str(place)], cfg, view[kind])
    return rms_norm(x_BTD, params["final_norm"], cfg.norm_eps)


def forward_cached(layered, cfg: ModelConfig, tokens_BT, positions_BT, key_mask_BS, cache, column):
    """Hidden states of the T tokens that stand in columns `column ...`, and the cache with their keys and values.

    `layered` comes from `per_layer`; key_mask_BS marks the columns that hold real tokens, these T included.
    """
    columns_T = column + jnp.arange(tokens_BT.shape[1])
    view = look(cfg, positions_BT, columns_T, jnp.arange(key_mask_BS.shape[1]), key_mask_BS)
    x_BTD = embed(layered, cfg, tokens_BT, layered["embed"].dtype)
    written = []
    for w, kind, kv in zip(layered["layers"], cfg.kinds, cache):
        x_BTD, kv = block(x_BTD, w, cfg, view[kind], kv, column)
        written.append(kv)
    return rms_norm(x_BTD, layered["final_norm"], cfg.norm_eps), written


def look(cfg: ModelConfig, positions_BT, query_columns_T, key_columns_S, key_mask_BS) -> dict:
    """What attention needs to know, by kind of layer: rope's angles and who may see whom."""
    back_TS = query_columns_T[:, None] - key_columns_S[None, :]  # how far back each key stands
    causal_BTS = (back_TS >= 0) & key_mask_BS[:, None, :]
    return {
        "local": (rope_angles(cfg, positions_BT, cfg.rope_theta_local, 1.0), causal_BTS & (back_TS < cfg.window)),
        "global": (rope_angles(cfg, positions_BT, cfg.rope_theta_global, cfg.rope_factor_global), causal_BTS),
    }


def embed(params, cfg: ModelConfig, tokens_BT, dtype):
    scale = jnp.asarray(cfg.embed_dim**0.5, dtype)
    return constrain(params["embed"].astype(dtype)[tokens_BT] * scale, "batch", "seq", "act_embed")


def logits(params, hidden):
    """Float32 scores over the vocabulary, [..., V], by the transposed embedding."""
    table_VD = params["embed"].astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, table_VD, preferred_element_type=at_least_float32(hidden.dtype))


def block(x_BTD, w, cfg: ModelConfig, view, kv=None, column=None):
    """One layer. With `kv`, its keys and values are written there first and attention reads the whole of it."""
    attended_BTD, kv = attention(rms_norm(x_BTD, w["attn_norm"], cfg.norm_eps), w, cfg, view, kv, column)
    x_BTD = x_BTD + rms_norm(attended_BTD, w["attn_post_norm"], cfg.norm_eps)
    x_BTD = constrain(x_BTD, "batch", "seq", "act_embed")
    fed_BTD = gated_mlp(rms_norm(x_BTD, w["mlp_norm"], cfg.norm_eps), w)
    x_BTD = x_BTD + rms_norm(fed_BTD, w["mlp_post_norm"], cfg.norm_eps)
    return constrain(x_BTD, "batch", "seq", "act_embed"), kv


def attention(x_BTD, w, cfg: ModelConfig, view, kv, column):
    angles, mask_BTS = view
    q_BTNH = rope(rms_norm(project(x_BTD, w["q"]), w["q_norm"], cfg.norm_eps), angles)
    k_BTKH = rope(rms_norm(project(x_BTD, w["k"]), w["k_norm"], cfg.norm_eps), angles)
    k_BKSH, v_BKSH = k_BTKH.swapaxes(1, 2), project(x_BTD, w["v"]).swapaxes(1, 2)
    if kv is not None:
        k_BKSH = jax.lax.dynamic_update_slice_in_dim(kv["k"], k_BKSH, column, axis=2)
        v_BKSH = jax.lax.dynamic_update_slice_in_dim(kv["v"], v_BKSH, column, axis=2)
        kv = {"k": k_BKSH, "v": v_BKSH}
    out_BTNH = attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS, cfg.query_scale**-0.5)
    return project(out_BTNH, w["o"], inputs=2), kv


def attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS, scale: float):
    """Softmax attention, scores and softmax in float32; each key head serves N / K query heads."""
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    q_BTKQH = (q_BTNH * jnp.asarray(scale, q_BTNH.dtype)).reshape(B, T, K, N // K, H)
    # t before q in the scores: the matrix products then need no transposed copies (3x faster on a CPU)
    wide = at_least_float32(q_BTNH.dtype)
    scores = jnp.einsum("btkqh,bksh->bktqs", q_BTKQH, k_BKSH, preferred_element_type=wide)
    probs = jax.nn.softmax(jnp.where(mask_BTS[:, None, :, None], scores, FAR_BELOW), axis=-1)
    return jnp.einsum("bktqs,bksh->btkqh", probs.astype(v_BKSH.dtype), v_BKSH).reshape(B, T, N, H)


def gated_mlp(x_BTD, w):
    gate_BTF = jax.nn.gelu(project(x_BTD, w["gate"]), approximate=True)
    hidden_BTF = constrain(gate_BTF * project(x_BTD, w["up"]), "batch", "seq", "mlp")
    return project(hidden_BTF, w["down"])


def rms_norm(x, scale, eps: float):
    wide = x.astype(at_least_float32(x.dtype))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (normed * (1 + scale.astype(wide.dtype))).astype(x.dtype)


def at_least_float32(dtype):
    """The dtype of what must not be rounded to bfloat16: norms, softmax, rope and scores."""
    return jnp.promote_types(dtype, jnp.float32)


def rope_angles(cfg: ModelConfig, positions_BT, theta: float, factor: float):
    """sin and cos, [B, T, 1, H/2] each, float32."""
    half = cfg.head_dim // 2
    inverse_timescale = theta ** -(np.arange(half) / half) / factor
    angle = positions_BT[..., None, None] * jnp.asarray(inverse_timescale, jnp.float32)
    return jnp.sin(angle), jnp.cos(angle)


def rope(x_BTNH, angles):
    """Rotary positions: element i and i + H/2 of a head turn together."""
    sin, cos = angles
    first, second = jnp.split(x_BTNH.astype(at_least_float32(x_BTNH.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)
