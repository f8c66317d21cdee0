"""A mixture of experts in the place of the feed-forward. For each token x

    y = sum over its k experts e of w_e down_e(act(gate_e x) * up_e x)

with w the softmax of the router's logits, of the k largest ones. No token is ever dropped. Letters
beside those of types.py: E experts, k experts of a token, I width of an expert.
Sources: arXiv:2505.09388 (Qwen 3), 2508.10925 (gpt-oss).
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tunix_lite.models.activations import gated
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.grouped import grouped_product
from tunix_lite.models.groups import block_of, from_rows, group, to_rows
from tunix_lite.models.layer_kind import Surroundings
from tunix_lite.models.norm import norm, norm_weight
from tunix_lite.models.rounding import added, stored, wide
from tunix_lite.models.weights import (
    ComputeCopy,
    Leaf,
    Lora,
    Weight,
    adapter_pair,
    dense,
    is_quantized,
    ones,
    project,
    zeros,
)
from tunix_lite.parallel.mesh import constrain, current_rules, spec

# gpt-oss: with a limit, the gate is multiplied by the sigmoid of this times the gate.
_SIGMOID_SCALE = 1.702


@flax.struct.dataclass
class Routed:
    """Where the router has sent the tokens of a layer, and its sums over the real ones.

    Example: 2 rows of 8 tokens, 4 of 64 experts each: ids [2, 8, 4], load [64].
    """

    ids: jax.Array  # the experts that have computed, [B, T, k] int32
    native: jax.Array  # those that the router chooses by itself, [B, T, k] int32
    load: jax.Array  # pairs of a token and one of its experts, by expert, [E] float32
    # softmax of the logits over all experts, summed over tokens, [E] float32
    prob_sum: jax.Array
    z_sum: jax.Array  # sum of the squared log-sum-exp of the logits, float32


# ---- the table of weights


def gated_weights(D: int, F: int, of: str = "") -> dict[str, Weight]:
    """The weights of `dense_feed_forward`, from D to F and back. of: what their names begin
    with."""
    inward = Weight((D, F), ("embed", "mlp"))
    outward = Weight((F, D), ("mlp", "embed"))
    return {f"{of}gate": inward, f"{of}up": inward, f"{of}down": outward}


def expert_weights(cfg: Architecture) -> dict[str, Weight]:
    """The weights of the mixture of one layer, by name; none without experts."""
    if (sizes := cfg.experts) is None:
        return {}
    D = cfg.embed_dim
    E = sizes.count
    # A router in fewer bits would send tokens elsewhere than it did in training.
    layer = {"router": Weight((D, E), ("embed", "router"), is_exact=True)}
    if sizes.biases:
        layer["router_bias"] = Weight((E,), ("router",), zeros, inputs=0, is_exact=True)
    for name, one in gated_weights(D, sizes.mlp_dim, "expert_").items():
        layer[name] = Weight((E, *one.shape), ("experts", *one.axes))
        if sizes.biases:
            axes = ("experts", one.axes[1])
            layer[f"{name}_bias"] = Weight((E, one.shape[1]), axes, zeros, inputs=0)
    if sizes.router_norm:
        layer |= {
            "router_scale": Weight((D,), ("norm",), ones, inputs=0, is_exact=True),
            "expert_scale": Weight((E,), ("router",), ones, inputs=0, is_exact=True),
        }
    if sizes.shared_dim:
        layer |= gated_weights(D, sizes.shared_dim, "shared_")
        layer["shared_open"] = Weight((D, 1), ("embed", "router"), is_exact=True)
    if sizes.beside_dense:
        names = ("expert_pre_norm", "expert_post_norm", "dense_post_norm")
        layer |= {name: norm_weight(cfg, D) for name in names}
    return layer


# ---- one layer


def feed_forward(
    x_BTD: jax.Array,
    normed_BTD: jax.Array,
    w: dict[str, Any],
    cfg: Architecture,
    around: Surroundings,
) -> tuple[jax.Array, Routed]:
    """What a layer with experts adds to the residual stream, [B, T, D], and where its tokens went.
    x_BTD: the residual stream; normed_BTD: after the layer's norm. No expert computes padding."""
    sizes = cfg.experts
    is_token_BT = around.sequences.segments > 0
    read_BTD = x_BTD if sizes.router_norm else normed_BTD
    weights_BTk, routed = route(read_BTD, w, cfg, around.routes, is_token_BT)
    inputs_BTD = norm(x_BTD, w["expert_pre_norm"], cfg) if sizes.beside_dense else normed_BTD
    ids_BTk = jnp.where(is_token_BT[..., None], routed.ids, sizes.count)
    fed_BTD = _mixture(inputs_BTD, ids_BTk, weights_BTk, w, cfg, around.products)

    if sizes.shared_dim:
        opened = jax.nn.sigmoid(wide(project(normed_BTD, w["shared_open"])))
        shared_BTD = dense_feed_forward(normed_BTD, w, cfg, around.products, "shared_")
        fed_BTD = stored(wide(fed_BTD) + opened * wide(shared_BTD), fed_BTD.dtype)
    if sizes.beside_dense:
        fed_BTD = norm(fed_BTD, w["expert_post_norm"], cfg)
        dense_BTD = dense_feed_forward(normed_BTD, w, cfg, around.products)
        fed_BTD = added(norm(dense_BTD, w["dense_post_norm"], cfg), fed_BTD)
    return fed_BTD, routed


def dense_feed_forward(
    normed_BTD: jax.Array, w: dict[str, Any], cfg: Architecture, products: Any, of: str = ""
) -> jax.Array:
    """down(activation(gate(x)) * up(x)), [B, T, D]. of: what the names of the weights begin
    with."""
    w = {name: w[of + name] for name in ("gate", "up", "down")}
    hidden_BTF = products.gated(normed_BTD, w, cfg.activation)
    return products.down(constrain(hidden_BTF, "batch", "seq", "mlp"), w)


def route(
    x_BTD: jax.Array,
    w: dict[str, Any],
    cfg: Architecture,
    routes_BTk: jax.Array | None,
    is_token_BT: jax.Array,
) -> tuple[jax.Array, Routed]:
    """The weights of each token's experts, [B, T, k], float32 at least; and which these are. Their
    gradient goes to the router also where `routes_BTk` has chosen them."""
    sizes = cfg.experts
    x_BTD = wide(x_BTD)
    if sizes.router_norm:
        x_BTD = norm(x_BTD, None, cfg) * wide(w["router_scale"]) * cfg.embed_dim**-0.5
    matrix_DE = dense(w["router"], 1, x_BTD.dtype)
    highest = jax.lax.Precision.HIGHEST
    logits_BTE = jnp.einsum("btd,de->bte", x_BTD, matrix_DE, precision=highest)
    if sizes.biases:
        logits_BTE = logits_BTE + wide(w["router_bias"])

    native_BTk = jax.lax.top_k(logits_BTE, sizes.per_token)[1]
    ids_BTk = native_BTk
    if routes_BTk is not None:
        ids_BTk = jnp.where(routes_BTk < 0, native_BTk, routes_BTk)
    # Kept for the backward pass: computed again, two logits that are close could change places.
    ids_BTk = checkpoint_name(ids_BTk, "routes")

    probs_BTE = jax.nn.softmax(logits_BTE)
    if sizes.softmax_after:
        weights_BTk = jax.nn.softmax(jnp.take_along_axis(logits_BTE, ids_BTk, axis=-1))
    else:
        weights_BTk = jnp.take_along_axis(probs_BTE, ids_BTk, axis=-1)
        if sizes.normalised:
            weights_BTk = weights_BTk / jnp.sum(weights_BTk, axis=-1, keepdims=True)
    if sizes.router_norm:
        weights_BTk = weights_BTk * wide(w["expert_scale"])[ids_BTk]

    # Sums over real tokens.
    is_real_BT1 = is_token_BT[..., None]
    is_chosen_BTE = jnp.any(ids_BTk[..., None] == jnp.arange(sizes.count), axis=-2)
    z_BT = jax.nn.logsumexp(logits_BTE, axis=-1) ** 2
    routed = Routed(
        ids=ids_BTk,
        native=native_BTk,
        load=jnp.sum(is_chosen_BTE & is_real_BT1, axis=(0, 1), dtype=jnp.float32),
        prob_sum=jnp.sum(jnp.where(is_real_BT1, probs_BTE, 0), axis=(0, 1)),
        z_sum=jnp.sum(jnp.where(is_token_BT, z_BT, 0)),
    )
    return weights_BTk, routed


def activate(gate: jax.Array, up: jax.Array, cfg: Architecture) -> jax.Array:
    """The hidden values of an expert from its two products, elementwise."""
    if (limit := cfg.experts.limit) is None:
        return gated(cfg.activation, gate, up)
    gate_wide = jnp.minimum(wide(gate), limit)
    up_wide = jnp.clip(wide(up), -limit, limit)
    opened = gate_wide * jax.nn.sigmoid(_SIGMOID_SCALE * gate_wide)
    return stored(opened * (up_wide + 1), gate.dtype)


def _mixture(
    x_BTD: jax.Array,
    ids_BTk: jax.Array,
    weights_BTk: jax.Array,
    w: dict[str, Any],
    cfg: Architecture,
    products: Any,
) -> jax.Array:
    """The weighted sum of each token's experts, [B, T, D]. An id of E is no expert."""
    mesh = jax.sharding.get_abstract_mesh()
    tp = current_rules()["mlp"]
    tp = tp if tp == "tp" and mesh.shape[tp] > 1 else None
    declared = {n: x for n, x in expert_weights(cfg).items() if x.axes[0] == "experts"}
    of_experts = {name: w[name] for name in declared}
    if tp is not None:
        of_experts["expert_down"] = _in_parts(of_experts["expert_down"], mesh.shape[tp])
    specs = {name: _specs(leaf, declared[name], tp) for name, leaf in of_experts.items()}
    tokens = spec(("batch", "seq", "act_embed"), x_BTD.shape, mesh)

    # Each device computes its own tokens, of each expert its own part of the inner width.
    def of_tokens(w: dict[str, Any], *arrays: jax.Array) -> jax.Array:
        x_ND, ids_Nk, weights_Nk = (x.reshape(-1, x.shape[-1]) for x in arrays)
        E = cfg.experts.count
        groups = group(ids_Nk, E, block_of(ids_Nk.size, E)).replace(tokamax=products.tokamax)
        x_RD = to_rows(x_ND, groups.token, groups.row)
        weights_R1 = to_rows(weights_Nk.reshape(-1, 1), groups.pair, groups.row.reshape(-1, 1))
        # Rows that only fill up their block count zero, and so do their gradients.
        weights_R1 = jnp.where(groups.is_pair, weights_R1, 0)

        def multiplied(name: str, rows: jax.Array, times: jax.Array | int = 1) -> jax.Array:
            out = grouped_product(rows, w[f"expert_{name}"], groups)
            if not cfg.experts.biases:
                return out
            bias = times * groups.of_rows(w[f"expert_{name}_bias"])
            return added(out, stored(bias, out.dtype))

        # The name is one of those that decoder.REMAT keeps.
        both = (checkpoint_name(multiplied(name, x_RD), "product") for name in ("gate", "up"))
        # Weighted before the last product: then the gradient of the weights needs no result of it.
        hidden_RI = activate(*both, cfg)
        hidden_RI = stored(wide(hidden_RI) * weights_R1, x_ND.dtype)
        # A bias counts once for all parts.
        is_first = tp is None or jax.lax.axis_index(tp) == 0
        out_RD = multiplied("down", hidden_RI, jnp.where(is_first, weights_R1, 0))
        out_ND = from_rows(out_RD, groups.token, groups.row)
        out_ND = stored(out_ND, jnp.promote_types(products.tp_reduce_dtype, x_ND.dtype))
        return out_ND.reshape(1, *arrays[0].shape)

    on_devices = jax.shard_map(
        of_tokens,
        in_specs=(specs, tokens, tokens, tokens),
        out_specs=P(tp, *tokens),
        # with it, every loop would have to say over which axes its values vary
        check_vma=False,
    )
    parts = on_devices(of_experts, x_BTD, ids_BTk, weights_BTk)
    return stored(jnp.sum(wide(parts), axis=0), x_BTD.dtype)


def _specs(leaf: Leaf, weight: Weight, tp: str | None) -> Any:
    """How devices hold a leaf while they compute: whole, but for the inner width over `tp`; where
    its gradient goes stays divided over fsdp."""
    # of a quantised weight, codes and scales alike
    whole = P(*(tp if axis == "mlp" else None for axis in weight.axes))
    if isinstance(leaf, Lora):
        # of the rank only the axes are read
        a, b = adapter_pair(weight, 1)
        return leaf.replace(
            base=_specs(leaf.base, weight, tp),
            a=_specs(leaf.a, a, tp),
            b=_specs(leaf.b, b, tp),
        )
    if isinstance(leaf, ComputeCopy):
        mesh = jax.sharding.get_abstract_mesh()
        divided = spec(leaf.axes, leaf.master.shape, mesh)
        both = zip(divided, whole)
        master = P(*("fsdp" if axis == "fsdp" else inner for axis, inner in both))
        return leaf.replace(value=whole, master=master)
    return whole


def _in_parts(leaf: Leaf, parts: int) -> Leaf:
    """A leaf [E, I, D] whose scales, if it has some, are of blocks that lie in one of so many parts
    of I."""
    if isinstance(leaf, Lora):
        return leaf.replace(base=_in_parts(leaf.base, parts))
    if not is_quantized(leaf):
        return leaf
    finer = parts // math.gcd(leaf.scales.shape[1], parts)
    return leaf.replace(scales=jnp.repeat(leaf.scales, finer, axis=1))
