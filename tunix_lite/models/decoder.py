"""A decoder-only transformer as a table of weights and pure functions: Gemma 2 and 3, Qwen 2.5 and
3, Llama 3.

Per layer:  x += norm(attention(norm(x)));  x += norm(down(act(gate(norm(x))) * up(norm(x)))) with
rms_norm(x) = x / sqrt(mean(x^2) + eps) * scale, rotary positions, and `pattern` repeating over the
layers: "local" layers see the last `window` tokens, "global" ones see all. What families do
differently is a flag of `Architecture`. Sources: arXiv:2408.00118 (Gemma 2), 2503.19786 (Gemma 3),
2412.15115 (Qwen 2.5), 2505.09388 (Qwen 3), 2407.21783 (Llama 3), and the published checkpoints.

All layers lie stacked, `layers/<name>` with a leading dim over them, and which kind each one is
goes beside them as data: training scans over single layers, so that compile time grows neither with
depth nor with the pattern. Sampling runs layer by layer on `per_layer_params` weights.
"""

from dataclasses import dataclass, fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.models import attention
from tunix_lite.models.attention import AttentionMeta
from tunix_lite.models.rounding import (
    added,
    at_least_float32,
    inverse_root,
    mean_square,
    stored,
    wide,
)
from tunix_lite.models.weights import (
    Weight,
    fan_in,
    for_compute,
    is_quantized,
    is_weight,
    ones,
    project,
    stacked,
    zeros,
)
from tunix_lite.parallel.mesh import constrain, divided, move

EMBED_INIT = jax.nn.initializers.normal(0.02)
# published models have up to 126; files of strangers say 10**9
MOST_LAYERS = 1024
# elements of one dim of a weight; published ones have up to 262,208
MOST_OF_A_DIM = 2**26
# the axes of what runs between layers
RESIDUAL = ("batch", "residual_seq", "act_embed")
# and of what a layer reads
WHOLE = ("batch", "seq", "act_embed")


@dataclass(frozen=True)
class RopeScaling:
    """Longer rotary wavelengths, for sequences beyond those of pretraining.

    With `factor` alone all wavelengths grow by it (linear). With the rest, as Llama 3.1 does: those
    that fit into original_positions / high_freq_factor stay, those beyond original_positions /
    low_freq_factor grow by it, and those between by something between.
    """

    factor: float  # by which wavelengths grow
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_positions: int | None = None  # tokens of the longest sequence before scaling

    def __post_init__(self):
        rest = (self.low_freq_factor, self.high_freq_factor, self.original_positions)
        if any(x is None for x in rest) and any(x is not None for x in rest):
            raise ValueError(
                "give low_freq_factor, high_freq_factor and original_positions, or none of the "
                "three"
            )
        if self.factor <= 0 or (
            rest[0] is not None and not 0 < self.low_freq_factor < self.high_freq_factor
        ):
            raise ValueError(
                "factor must be above 0, and low_freq_factor between 0 and high_freq_factor"
            )


@dataclass(frozen=True)
class Architecture:
    """The architecture. Sizes count elements unless said otherwise; what is not given is as in
    Gemma 3."""

    vocab_size: int  # tokens, padding included
    num_layers: int  # blocks of attention and feed-forward
    embed_dim: int  # width of the residual stream
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; even
    mlp_dim: int  # hidden width of the gated feed-forward
    # repeats over the layers
    pattern: tuple[str, ...] = (
        "local",
        "local",
        "local",
        "local",
        "local",
        "global",
    )
    # tokens that a local layer sees, the current one included; null: no layer is local
    window: int | None = 512
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
            if isinstance(value, int) and value > (
                most := MOST_LAYERS if field.name == "num_layers" else MOST_OF_A_DIM
            ):
                raise ValueError(f"{field.name}={value} is beyond {most:,}, which no model has")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r}; it is {' or '.join(ACTIVATIONS)}")
        if "local" in self.pattern and self.window is None:
            raise ValueError(
                f"pattern={list(self.pattern)} has local layers, and window is not given"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, and rope turns pairs")
        if not self.pattern or set(self.pattern) - {"local", "global"}:
            raise ValueError(f"pattern={list(self.pattern)}: its entries are 'local' and 'global'")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer, in order."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))


# of the embedding, and of a head of its own
TABLE_AXES = ("vocab", "embed")


def weights(cfg: Architecture) -> dict:
    """Every parameter of the model, by name."""
    table = Weight((cfg.vocab_size, cfg.embed_dim), TABLE_AXES, EMBED_INIT, inputs=0)
    model = {"embed": table, "final_norm": norm_weight(cfg, cfg.embed_dim)}
    if not cfg.tied:
        model["head"] = table
    model["layers"] = {name: stacked(w, cfg.num_layers) for name, w in layer_weights(cfg).items()}
    return model


def layer_weights(cfg: Architecture) -> dict[str, Weight]:
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
        layer["k_bias"] = layer["v_bias"] = Weight(
            (K, H), ("kv_heads", "head_dim"), zeros, inputs=0
        )
    if cfg.qk_norm:
        layer["q_norm"] = layer["k_norm"] = norm_weight(cfg, H)
    if cfg.post_norms:
        layer["attn_post_norm"] = layer["mlp_post_norm"] = norm_weight(cfg, D)
    return layer


def norm_weight(cfg: Architecture, size: int) -> Weight:
    return Weight((size,), ("norm",), zeros if cfg.norm_plus_one else ones, inputs=0)


def copy_to_score(params, cfg: Architecture, dtype):
    """A copy of the parameters that only scores and never trains: what `for_compute` casts is kept
    in the compute dtype."""
    kept = jax.tree.map(
        lambda w: w.dtype if w.axes[-1] == "norm" else dtype, weights(cfg), is_leaf=is_weight
    )
    return jax.tree.map(lambda x, to: jnp.copy(x) if x.dtype == to else x.astype(to), params, kept)


def per_layer_params(params, cfg: Architecture, dtype) -> dict:
    """The same parameters as a list of layers, matrices in the compute dtype: what sampling runs
    on.

    Norms keep their dtype, as they do in training, and quantised weights their codes.
    """

    def cast(leaf):
        return leaf if is_quantized(leaf) or leaf.ndim < 2 else stored(leaf, dtype)

    return jax.tree.map(cast, by_layer(params, cfg, lambda w, i: w[i]), is_leaf=is_quantized)


def per_layer_shardings(places, cfg: Architecture):
    """The shardings of what `per_layer_params` returns, given those of the parameters."""
    return by_layer(places, cfg, lambda place, _: NamedSharding(place.mesh, P(*place.spec[1:])))


def by_layer(tree, cfg: Architecture, of_layer) -> dict:
    """A tree of the parameters' form with a list of layers; of_layer(leaf, i) is what layer i has
    of a stacked leaf."""
    layers = [
        jax.tree.map(lambda leaf, i=i: of_layer(leaf, i), tree["layers"])
        for i in range(cfg.num_layers)
    ]
    return tree | {"layers": layers}


def forward(
    params,
    cfg: Architecture,
    tokens_BT,
    meta: AttentionMeta,
    dtype=jnp.float32,
    remat="none",
    attend=attention.xla,
    reduce_dtype=jnp.float32,
    tp_reduce_dtype=jnp.float32,
):
    """Hidden states [B, T, D] of whole rows, after the final norm. Padding may stand on either
    side.

    remat: what the backward pass finds kept, a name of REMAT. attend: one of
    attention.IMPLEMENTATIONS. reduce_dtype: what the gradients of the layers are summed in over the
    mesh, as weights.for_compute takes it. tp_reduce_dtype: what the two sums of a layer over tp are
    taken in, as weights.project takes it.
    """
    angles = all_angles(cfg, meta.positions)
    declared = layer_weights(cfg)
    are_local = np.array([kind == "local" for kind in cfg.kinds])
    of_one_kind = bool(are_local.all() or not are_local.any())

    def layer(x_BTD, of_layer):
        w, is_local = of_layer
        # known while compiling, where all are alike
        is_local = bool(are_local[0]) if of_one_kind else is_local
        w = {
            name: for_compute(leaf, declared[name], dtype, reduce_dtype) for name, leaf in w.items()
        }
        attend_fn = lambda *qkv: (attend(cfg, is_local, meta, *qkv), None)  # noqa: E731
        return block(x_BTD, w, cfg, of_kind(angles, is_local), attend_fn, tp_reduce_dtype)

    # prevent_cse is for code outside of loops, where the compiler could undo the repetition
    layer = jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False)
    x_BTD = constrain(embed(params, cfg, tokens_BT, dtype), *RESIDUAL)
    x_BTD, _ = jax.lax.scan(layer, x_BTD, (params["layers"], are_local))
    return norm(move(x_BTD, RESIDUAL, WHOLE), params["final_norm"], cfg)


def of_kind(of_kinds: dict, is_local):
    """What the layer's kind has: chosen now if the kind is known, and otherwise where the program
    runs."""
    if isinstance(is_local, bool):
        return of_kinds["local" if is_local else "global"]
    return jax.tree.map(partial(jnp.where, is_local), of_kinds["local"], of_kinds["global"])


KEPT = jax.checkpoint_policies.save_only_these_names


def _and_kernels(policy):
    """The policy, and what cuDNN's attention keeps for its own backward pass; else its forward pass
    would run twice."""
    return jax.checkpoint_policies.save_from_both_policies(
        policy, lambda primitive, *_, **__: primitive.name.startswith("dot_product_attention_fwd")
    )


# What is kept from the forward pass for the backward pass, which makes the rest again: at least
# norms, activations and whatever else is cheap. Weights are never kept as they are used: whole over
# fsdp, one after the other, they would be the model.
REMAT = {
    # every product
    "none": _and_kernels(KEPT("product", "scores", "attended")),
    # with weights, nothing within attention
    "dots": KEPT("product"),
    # into attention and out of it
    "save_qkv_out": _and_kernels(KEPT("q", "k", "v", "attended")),
    # the input of each layer
    "block": jax.checkpoint_policies.nothing_saveable,
}


def forward_by_layer(
    params, cfg: Architecture, tokens_BT, positions_BT, attend_fn, tp_reduce_dtype=jnp.float32
) -> tuple[jax.Array, list]:
    """Hidden states [B, T, D] of tokens at these positions, and what each layer keeps. `params`:
    from `per_layer_params`.

    attend_fn(layer, q_BTNH, k_BTKH, v_BTKH) -> (attended [B, T, N, H], what the layer keeps) says
    what the tokens see: a cache of earlier keys and values is its business. tp_reduce_dtype: as
    `forward` takes it.
    """
    angles = all_angles(cfg, positions_BT)
    x_BTD = embed(params, cfg, tokens_BT, params["embed"].dtype)
    kept = []
    for layer, (w, kind) in enumerate(zip(params["layers"], cfg.kinds)):
        x_BTD, of_layer = block(
            x_BTD, w, cfg, angles[kind], partial(attend_fn, layer), tp_reduce_dtype
        )
        kept.append(of_layer)
    return norm(x_BTD, params["final_norm"], cfg), kept


def all_angles(cfg: Architecture, positions_BT) -> dict:
    """rope's angles, by kind of layer."""
    return {kind: rope_angles(cfg, positions_BT, kind) for kind in dict.fromkeys(cfg.pattern)}


def embed(params, cfg: Architecture, tokens_BT, dtype):
    x_BTD = stored(looked_up(params["embed"], tokens_BT), dtype)
    if cfg.embed_scale:
        x_BTD = stored(wide(x_BTD) * wide(jnp.asarray(cfg.embed_dim**0.5, dtype)), dtype)
    return constrain(x_BTD, *WHOLE)


def looked_up(table_VD, tokens_BT):
    """Rows of the table; its gradient is summed in float32 at least, whatever the table is stored
    in."""
    return (
        table_VD[tokens_BT]
        if jnp.finfo(table_VD.dtype).bits >= 32
        else _looked_up(table_VD, tokens_BT)
    )


@jax.custom_vjp
def _looked_up(table_VD, tokens_BT):
    return table_VD[tokens_BT]


def _scattered(kept, slope_BTD):
    """Of the table only its shape and type are looked at."""
    table_VD, tokens_BT = kept
    zeros_VD = jnp.zeros(table_VD.shape, at_least_float32(table_VD.dtype))
    whole_VD = zeros_VD.at[tokens_BT].add(slope_BTD.astype(zeros_VD.dtype))
    return divided(whole_VD, TABLE_AXES).astype(table_VD.dtype), None


_looked_up.defvjp(
    lambda table_VD, tokens_BT: (table_VD[tokens_BT], (table_VD, tokens_BT)), _scattered
)


def output_table(params, cfg: Architecture):
    """What hidden states are multiplied with for scores, [V, D]: the embedding, or the head."""
    return params["embed" if cfg.tied else "head"]


def logits(params, cfg: Architecture, hidden):
    """Float32 scores over the vocabulary, [..., V], by the transposed embedding or by the head."""
    table_VD = stored(output_table(params, cfg), hidden.dtype)
    scores = jnp.einsum(
        "...d,vd->...v", hidden, table_VD, preferred_element_type=at_least_float32(hidden.dtype)
    )
    return softcap(scores, cfg.final_softcap)


def softcap(scores, cap: float | None):
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def block(x_BTD, w, cfg: Architecture, angles, attend_fn, tp_reduce_dtype=jnp.float32):
    """One layer, and what `attend_fn(q, k, v)` keeps of it."""
    normed_BTD = move(norm(x_BTD, w["attn_norm"], cfg), RESIDUAL, WHOLE)
    attended_BTD, kept = attention_part(normed_BTD, w, cfg, angles, attend_fn, tp_reduce_dtype)
    if cfg.post_norms:
        attended_BTD = norm(attended_BTD, w["attn_post_norm"], cfg)
    x_BTD = constrain(added(x_BTD, attended_BTD), *RESIDUAL)
    normed_BTD = move(norm(x_BTD, w["mlp_norm"], cfg), RESIDUAL, WHOLE)
    fed_BTD = gated_mlp(normed_BTD, w, cfg, tp_reduce_dtype)
    if cfg.post_norms:
        fed_BTD = norm(fed_BTD, w["mlp_post_norm"], cfg)
    return constrain(added(x_BTD, fed_BTD), *RESIDUAL), kept


def attention_part(x_BTD, w, cfg: Architecture, angles, attend_fn, tp_reduce_dtype=jnp.float32):
    q_BTNH, k_BTKH, v_BTKH = (project(x_BTD, w[name]) for name in "qkv")
    if cfg.qkv_bias:
        q_BTNH, k_BTKH, v_BTKH = (
            # Of all tokens, and rounded then: the gradient is summed over them as the bias is, not
            # as x is.
            added(x, stored(jnp.broadcast_to(w[f"{name}_bias"], x.shape), x.dtype))
            for name, x in zip("qkv", (q_BTNH, k_BTKH, v_BTKH))
        )
    if cfg.qk_norm:
        q_BTNH, k_BTKH = norm(q_BTNH, w["q_norm"], cfg), norm(k_BTKH, w["k_norm"], cfg)
    q_BTNH, k_BTKH, v_BTKH = attention.keep_heads(
        rope(q_BTNH, angles), rope(k_BTKH, angles), v_BTKH
    )
    q_BTNH, k_BTKH, v_BTKH = (
        checkpoint_name(x, name) for name, x in zip("qkv", (q_BTNH, k_BTKH, v_BTKH))
    )
    out_BTNH, kept = attend_fn(q_BTNH, k_BTKH, v_BTKH)
    out_BTNH = checkpoint_name(constrain(out_BTNH, "batch", "seq", "heads", "head_dim"), "attended")
    return constrain(project(out_BTNH, w["o"], 2, tp_reduce_dtype), *RESIDUAL), kept


ACTIVATIONS = {"gelu": partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu}


def gated_mlp(x_BTD, w, cfg: Architecture, tp_reduce_dtype=jnp.float32):
    gate_BTF = ACTIVATIONS[cfg.activation](wide(project(x_BTD, w["gate"])))
    hidden_BTF = stored(gate_BTF * wide(project(x_BTD, w["up"])), x_BTD.dtype)
    hidden_BTF = constrain(hidden_BTF, "batch", "seq", "mlp")
    return constrain(project(hidden_BTF, w["down"], 1, tp_reduce_dtype), *RESIDUAL)


def norm(x, scale, cfg: Architecture):
    """x at a root mean square of 1, times its scale."""
    whole = wide(x)
    normed = whole * inverse_root(mean_square(x) + cfg.norm_eps, x.dtype)
    scale = scale.astype(whole.dtype)
    return stored(normed * (1 + scale if cfg.norm_plus_one else scale), x.dtype)


def rope_angles(cfg: Architecture, positions_BT, kind: str):
    """sin and cos, [B, T, 1, H/2] each, float32 (float64 where JAX has it)."""
    half = cfg.head_dim // 2
    frequency = (cfg.rope_theta_local if kind == "local" else cfg.rope_theta_global) ** -(
        np.arange(half) / half
    )
    if kind == "global" and cfg.rope_scaling is not None:
        frequency = rescaled(frequency, cfg.rope_scaling)
    # at least float32
    angle = positions_BT[..., None, None] * jnp.asarray(frequency)
    return jnp.sin(angle), jnp.cos(angle)


def rescaled(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Frequencies (1 / tokens, times 2 pi) for longer sequences."""
    if scaling.original_positions is None:
        return frequency / scaling.factor
    # within the original length
    turns = scaling.original_positions * frequency / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rope(x_BTNH, angles):
    """Rotary positions: element i and i + H/2 of a head turn together."""
    sin, cos = angles
    first, second = jnp.split(wide(x_BTNH), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return stored(turned, x_BTNH.dtype)
