"""A decoder-only model as a table of weights and pure functions. Per layer: x +=
norm(attention(norm(x))); x += norm(down(act(gate(norm(x))) * up(norm(x)))). Sources:
arXiv:2408.00118 (Gemma 2), 2503.19786 (Gemma 3), 2412.15115 and 2505.09388 (Qwen), 2407.21783
(Llama 3)."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from tunix_lite.basics.imports import import_named
from tunix_lite.basics.types import Params
from tunix_lite.models import attention, experts
from tunix_lite.models.activations import gated
from tunix_lite.models.architecture import READER, Architecture, repeated
from tunix_lite.models.attention import AttentionMeta
from tunix_lite.models.experts import Routed
from tunix_lite.models.gated_delta_net import GATED_DELTA_NET
from tunix_lite.models.layer_kind import Angles, LayerKind, Surroundings
from tunix_lite.models.norm import norm, norm_weight
from tunix_lite.models.rope import ROTATED, rope, rope_angles_by_kind
from tunix_lite.models.rounding import added, at_least_float32, is_rounded, stored, wide
from tunix_lite.models.scalar_head import scalar_head
from tunix_lite.models.unfused import matrix_first, unfused_on_cpu
from tunix_lite.models.weights import (
    Weight,
    fan_in,
    for_compute,
    ones,
    project,
    stacked,
    unstacked,
    zeros,
)
from tunix_lite.parallel.mesh import constrain, constrain_gradient, move

_EMBED_INIT = jax.nn.initializers.normal(0.02)
# The axes of hidden states between layers.
_RESIDUAL = ("batch", "residual_seq", "act_embed")
# The axes of hidden states that a part of a layer reads.
_LAYER_INPUT = ("batch", "seq", "act_embed")

# The axes of the embedding, and of a head of its own.
_TABLE_AXES = ("vocab", "embed")


# ---- the table of weights, and other forms of the parameters


def weights(cfg: Architecture) -> dict:
    """Every parameter of the model, by name: a nested dict of `Weight`."""
    table = Weight((cfg.vocab_size, cfg.embed_dim), _TABLE_AXES, _EMBED_INIT, inputs=0)
    model = {"embed": table, "final_norm": norm_weight(cfg, cfg.embed_dim)}
    if cfg.output != "logits":
        model |= scalar_head(cfg, cfg.output == "biased_score")
    elif not cfg.tied:
        model["head"] = table
    layers = {}
    for stack, (kind, count) in stacks(cfg).items():
        layers[stack] = {
            name: stacked(w, count) for name, w in layer_weights(cfg, kind).items()
        }
    # where all layers are of one shape, their stack has no name of its own
    model["layers"] = layers.get(None, layers)
    if P := cfg.per_layer_dim:
        L = cfg.num_layers
        model["per_layer"] = {
            "table": Weight((cfg.vocab_size, L * P), _TABLE_AXES, _EMBED_INIT, inputs=0),
            "project": Weight((cfg.embed_dim, L, P), ("embed", "per_layer", "per_layer")),
            "norm": norm_weight(cfg, P),
        }
    return model


def kind_of_layer(name: str) -> LayerKind:
    """A kind by its name in LAYER_KINDS, or one of your own by its dotted path. Raises
    ValueError."""
    kind = LAYER_KINDS[name] if name in LAYER_KINDS else import_named(name)
    if not isinstance(kind, LayerKind):
        raise ValueError(f"pattern: {name} is not a LayerKind (docs/extend/model)")
    return kind


@cache
def stack_of_layers(cfg: Architecture) -> tuple[str | None, ...]:
    """The stack in which each layer lies: the name of its kind; None where one stack has them
    all."""
    kinds = {*cfg.pattern, *cfg.kinds_of_weights}
    tables = [layer_weights(cfg, kind) for kind in kinds]
    # In one stack, layers differ by their windows and angles only, which are data of the scan.
    if kinds <= ROTATED and all(table == tables[0] for table in tables):
        return (None,) * cfg.num_layers
    return tuple(kind.rsplit(".", 1)[-1] for kind in cfg.kinds_of_weights)


def stacks(cfg: Architecture) -> dict[str | None, tuple[str, int]]:
    """The stacks by name: the kind of a layer in it, and how many there are."""
    # Layers whose weights have the same shapes lie in one stack, with a leading dim over them.
    names = stack_of_layers(cfg)
    kinds = dict(zip(names, cfg.kinds_of_weights))
    return {name: (kinds[name], count) for name, count in Counter(names).items()}


def layer_weights(cfg: Architecture, kind: str = "global") -> dict[str, Weight]:
    """The parameters of one layer of this kind, by name."""
    D = cfg.embed_dim
    F = cfg.mlp_dim * (2 if cfg.wide_readers and kind.endswith(READER) else 1)
    layer = {
        "attn_norm": norm_weight(cfg, D),
        **kind_of_layer(kind).weights(cfg),
        "mlp_norm": norm_weight(cfg, D),
    }
    if cfg.experts is None or cfg.experts.beside_dense:
        layer |= experts.gated_weights(D, F)
    layer |= experts.expert_weights(cfg)
    if not cfg.pre_norms:
        del layer["attn_norm"], layer["mlp_norm"]
    if cfg.post_norms:
        layer["attn_post_norm"] = norm_weight(cfg, D)
        layer["mlp_post_norm"] = norm_weight(cfg, D)
    if P := cfg.per_layer_dim:
        layer["per_layer_gate"] = Weight((D, P), ("embed", "per_layer"))
        layer["per_layer_out"] = Weight((P, D), ("per_layer", "embed"))
        layer["per_layer_norm"] = norm_weight(cfg, D)
    if cfg.layer_scalar:
        # exact: it is part of the architecture, and no update may round it
        layer["layer_scalar"] = Weight((1,), ("norm",), ones, inputs=0, is_exact=True)
    return layer


def attention_weights(cfg: Architecture, kind: str = "global") -> dict[str, Weight]:
    """The weights of attention in one layer of this kind, by name."""
    D = cfg.embed_dim
    N = cfg.num_heads
    K, H = cfg.kv_shape(kind)
    layer = {
        # with a gate, each head has its queries and then its gate
        "q": Weight((D, N, 2 * H if cfg.attn_gate else H), ("embed", "heads", "head_dim")),
        "k": Weight((D, K, H), ("embed", "kv_heads", "head_dim")),
        "v": Weight((D, K, H), ("embed", "kv_heads", "head_dim")),
        "o": Weight((N, H, D), ("heads", "head_dim", "embed"), fan_in(2), inputs=2),
    }
    is_reader = kind.endswith(READER)
    if is_reader or (cfg.keys_as_values and kind == "global"):
        del layer["v"]
    if is_reader:
        del layer["k"]

    # What only some families have.
    if cfg.qkv_bias:
        layer["q_bias"] = Weight(layer["q"].shape[1:], ("heads", "head_dim"), zeros, inputs=0)
        layer["k_bias"] = Weight((K, H), ("kv_heads", "head_dim"), zeros, inputs=0)
        layer["v_bias"] = Weight((K, H), ("kv_heads", "head_dim"), zeros, inputs=0)
    if cfg.out_bias:
        layer["o_bias"] = Weight((D,), ("norm",), zeros, inputs=0)
    if cfg.attn_sinks:
        layer["sinks"] = Weight((N,), ("heads",), zeros, inputs=0)
    if cfg.qk_norm:
        layer["q_norm"] = norm_weight(cfg, N * H if cfg.qk_norm_whole else H)
        if not is_reader:
            layer["k_norm"] = norm_weight(cfg, K * H if cfg.qk_norm_whole else H)
    return layer


def copy_to_score(
    params: Params,
    cfg: Architecture,
    dtype: DTypeLike,
) -> Params:
    """Copies the parameters to score with: what `for_compute` would cast is cast."""

    def kept_dtype(weight: Weight) -> DTypeLike:
        is_kept = weight.is_exact or len(unstacked(weight).shape) == 1
        return weight.dtype if is_kept else dtype

    def copy(x: jax.Array, to: DTypeLike) -> jax.Array:
        # A copy in any case, as the next update donates the original.
        if x.dtype == to:
            return jnp.copy(x)
        return x.astype(to)

    # norms stay in float32, as in training
    dtypes = jax.tree.map(kept_dtype, weights(cfg))
    return jax.tree.map(copy, params, dtypes)


# ---- whole rows


def forward(
    params: Params,
    cfg: Architecture,
    tokens_BT: jax.Array,
    meta: AttentionMeta,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    attend: Callable[..., jax.Array] = attention.xla,
    reduce_dtype: DTypeLike = jnp.float32,
    tp_reduce_dtype: DTypeLike = jnp.float32,
    scan_layers: bool = True,
    tokamax: bool = False,
    routes_LBTk: jax.Array | None = None,
) -> tuple[jax.Array, Routed | None]:
    """Hidden states [B, T, D] of whole rows, after the final norm; and where tokens were routed, by
    layer ([L, ...]), None without experts. Padding may be on either side.

    remat: a name of REMAT. attend: one of attention.IMPLEMENTATIONS. reduce_dtype: as
    weights.for_compute takes it; tp_reduce_dtype: as weights.project takes it. scan_layers: the
    program has one layer and runs it in a loop; else it has all of them. tokamax: multiplies the
    experts of GPUs. routes_LBTk: the experts of each token, as experts.feed_forward takes them.
    """
    angles = rope_angles_by_kind(cfg, meta.positions)
    if not scan_layers:
        # Else XLA for CPUs would compute sines and cosines again in each layer.
        angles = jax.tree.map(unfused_on_cpu, angles)
    declared = {kind: layer_weights(cfg, kind) for kind in set(cfg.kinds_of_weights)}

    def layer(
        kind: str,
        is_local: bool | jax.Array,
        is_source: bool,
        x_BTD: jax.Array,
        w: dict[str, Any],
        per_layer_BTP: jax.Array | None = None,
        routes_BTk: jax.Array | None = None,
        of_source: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None, Routed | None]:
        w = {
            name: for_compute(leaf, declared[kind][name], dtype, reduce_dtype)
            for name, leaf in w.items()
        }

        def attend_fn(
            q: jax.Array, *own: jax.Array, **sinks: jax.Array
        ) -> tuple[jax.Array, Any]:
            kv = own if of_source is None else of_source
            return attend(cfg, is_local, meta, q, *kv, **sinks), kv if is_source else None

        if isinstance(is_local, bool):
            angles_of_kind = angles["local" if is_local else "global"]
        else:
            angles_of_kind = jax.tree.map(
                partial(jnp.where, is_local), angles["local"], angles["global"]
            )
        around = Surroundings(
            Products(tp_reduce_dtype, tokamax),
            angles_of_kind,
            attend_fn,
            sequences=meta,
            per_layer=per_layer_BTP,
            routes=routes_BTk,
        )
        return block(x_BTD, w, cfg, kind_of_layer(kind).mix, around)

    x_BTD = embed(params, cfg, tokens_BT, dtype)
    per_layer_LBTP = None
    if cfg.per_layer_dim:
        w = dict(params["per_layer"])
        one = weights(cfg)["per_layer"]["project"]
        # the others are tables and norms, which are read as they are
        w["project"] = for_compute(w["project"], one, dtype, reduce_dtype)
        per_layer_LBTP = per_layer_inputs(w, cfg, tokens_BT, x_BTD)
    x_BTD = constrain(x_BTD, *_RESIDUAL)
    if scan_layers:
        inputs = (per_layer_LBTP, routes_LBTk)
        x_BTD, routed = _scan_layers(layer, x_BTD, cfg, params["layers"], inputs, REMAT[remat])
    else:
        # Each layer has a place of its own in the program, and its kind is known there.
        of_layer = cache(partial(_one_layer, layer, REMAT[remat]))
        keys_and_values = {}
        routed_by_layer = []
        for i, w in enumerate(by_layer(params["layers"], cfg)):
            one = of_layer(cfg.kinds_of_weights[i], i in cfg.sources.values())
            own = jax.tree.map(lambda x, i=i: x[i], (per_layer_LBTP, routes_LBTk))
            of_source = keys_and_values.get(cfg.sources.get(i))
            x_BTD, keys_and_values[i], routed = one(x_BTD, w, *own, of_source)
            routed_by_layer.append(routed)
        routed = jax.tree.map(lambda *xs: jnp.stack(xs), *routed_by_layer)
    return norm(move(x_BTD, _RESIDUAL, _LAYER_INPUT), params["final_norm"], cfg), routed


def _split(leaf: jax.Array, count: int) -> list[jax.Array]:
    """The layers of a leaf [count, ...]."""
    # The gradient of a split is one concatenation. That of x[i] is an array of zeros for each.
    return [x.squeeze(0) for x in jax.lax.split(leaf, [1] * count)]


def by_layer(
    layers: Params, cfg: Architecture, parts: Callable[[Any, int], Sequence[Any]] = _split
) -> list[Params]:
    """What each layer has of a tree of the layers. parts: of a leaf, for so many layers."""
    of_stacks = {}
    for stack, (_, count) in stacks(cfg).items():
        # Adapters may be those of some stacks only.
        of_stack = layers if stack is None else layers.get(stack, {})
        leaves, structure = jax.tree.flatten(of_stack)
        by_number = [()] * count
        if leaves:
            by_number = zip(*(parts(x, count) for x in leaves))
        of_stacks[stack] = map(structure.unflatten, by_number)
    return [next(of_stacks[stack]) for stack in stack_of_layers(cfg)]


def _one_layer(
    layer: Callable[..., tuple[jax.Array, Any, Routed | None]],
    policy: Callable[..., bool] | None,
    kind: str,
    is_source: bool,
) -> Callable[..., tuple[jax.Array, Any, Routed | None]]:
    """`layer` of this kind, which a policy of REMAT computes again in the backward pass."""
    fn = partial(layer, kind, is_local(kind), is_source)
    if policy is None:
        return fn
    return jax.checkpoint(fn, policy=policy)


def _scan_layers(
    layer: Callable[..., tuple[jax.Array, Any, Routed | None]],
    x_BTD: jax.Array,
    cfg: Architecture,
    layers: Params,
    inputs: tuple[jax.Array | None, ...],
    policy: Callable[..., bool] | None,
) -> tuple[jax.Array, Routed | None]:
    """The hidden states after all layers, by scans over them, and where tokens were routed. layer:
    as `forward` makes it. inputs: what each layer has of its own, [L, ...]."""

    # Where all layers of a stack are of one kind, it is known while compiling.
    is_mixed = len(set(cfg.kinds_of_weights)) > len(stacks(cfg))

    def body(
        kind: str,
        x_BTD: jax.Array,
        of_layer: tuple,
        of_source: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, Routed | None]:
        w, own, is_local_here = of_layer
        here = is_local_here if is_mixed else is_local(kind)
        x_BTD, _, routed = layer(kind, here, False, x_BTD, w, *own, of_source)
        return x_BTD, routed

    def body_of(kind: str) -> Callable[..., tuple[jax.Array, Routed | None]]:
        if policy is None:
            return partial(body, kind)
        # prevent_cse is for code outside of loops, where the compiler could undo the repetition.
        return jax.checkpoint(partial(body, kind), policy=policy, prevent_cse=False)

    bodies = {stack: body_of(kind) for stack, (kind, _) in stacks(cfg).items()}
    if None in bodies:
        are_local = np.array([kind == "local" for kind in cfg.kinds])
        return jax.lax.scan(bodies[None], x_BTD, (layers, inputs, are_local))

    # Of each stack the weights and inputs, [count, ...].
    names = stack_of_layers(cfg)
    trees = {}
    for stack in layers:
        numbers = np.array([i for i, name in enumerate(names) if name == stack])
        of_stack = jax.tree.map(lambda x, numbers=numbers: x[numbers], inputs)
        trees[stack] = (layers[stack], of_stack)
    take = _taking(trees)

    # Layers whose keys and values others read stand outside of loops, where these are arrays.
    first_source = min(cfg.sources.values(), default=cfg.num_layers)
    first_reader = cfg.num_layers - cfg.kv_readers
    before = names[:first_source]
    x_BTD, by_part = _scan_periods(bodies, before, x_BTD, take(before))
    for i, kind in enumerate(cfg.kinds[first_source:first_reader], first_source):
        w, own = jax.tree.map(lambda leaf: leaf[0], take([names[i]])[names[i]])
        of_layer = _one_layer(layer, policy, kind, i in cfg.sources.values())
        x_BTD, of_source, routed = of_layer(x_BTD, w, *own)
        by_part.append(jax.tree.map(lambda x: x[None], routed))
        if of_source is not None:
            bodies[kind + READER] = partial(bodies[kind + READER], of_source=of_source)
    readers = names[first_reader:]
    x_BTD, of_readers = _scan_periods(bodies, readers, x_BTD, take(readers))
    return x_BTD, jax.tree.map(lambda *xs: jnp.concatenate(xs), *by_part, *of_readers)


def _taking(trees: Params) -> Callable[[Sequence[str]], Params]:
    """take(stacks of the next layers) -> their part of the trees, which are by stack."""
    done = Counter()

    def take(names: Sequence[str]) -> Params:
        taken = {
            stack: jax.tree.map(lambda leaf, a=done[stack], n=n: leaf[a : a + n], trees[stack])
            for stack, n in Counter(names).items()
        }
        done.update(names)
        return taken

    return take


def _scan_periods(
    bodies: dict[str, Callable[..., tuple[jax.Array, Routed | None]]],
    names: tuple[str, ...],
    x_BTD: jax.Array,
    trees: Params,
) -> tuple[jax.Array, list[Routed | None]]:
    """The hidden states after layers of these stacks, by scans, and where tokens were routed, part
    by part. bodies, trees: of one layer, by stack."""
    if not names:
        return x_BTD, []

    def in_order(
        part: tuple[str, ...], x_BTD: jax.Array, trees: Params
    ) -> tuple[jax.Array, Routed | None]:
        take = _taking(trees)
        by_part = []
        # neighbours of one stack run in one loop, and so compile once
        for stack, neighbours in itertools.groupby(part):
            arrays = take(list(neighbours))[stack]
            x_BTD, routed = jax.lax.scan(bodies[stack], x_BTD, (*arrays, None))
            by_part.append(routed)
        return x_BTD, jax.tree.map(lambda *xs: jnp.concatenate(xs), *by_part)

    # Whole periods in a scan, within which neighbours of one kind are another; then what is left.
    period = repeated(names)
    num_periods = len(names) // len(period)
    take = _taking(trees)
    of_periods = jax.tree.map(
        lambda leaf: leaf.reshape(num_periods, -1, *leaf.shape[1:]), take(period * num_periods)
    )
    x_BTD, routed = jax.lax.scan(partial(in_order, period), x_BTD, of_periods)
    by_part = [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routed)]
    if rest := names[num_periods * len(period) :]:
        x_BTD, routed = in_order(rest, x_BTD, take(rest))
        by_part.append(routed)
    return x_BTD, by_part


KEPT = jax.checkpoint_policies.save_only_these_names


def _and_kernels(policy: Callable[..., bool]) -> Callable[..., bool]:
    """Also keeps what cuDNN's attention needs, whose forward pass would run twice without it."""
    return jax.checkpoint_policies.save_from_both_policies(
        policy,
        lambda primitive, *_, **__: primitive.name.startswith("dot_product_attention_fwd"),
    )


# What the forward pass keeps for the backward pass, which computes the rest again. With save_all
# that is the activation of the feed-forward alone (activations.gated). The others compute at least
# norms, activations and weights in the compute dtype: gathered over fsdp, layer after layer, these
# would be the whole model.
REMAT = {
    # Everything, also weights as they were gathered and cast. None has no jax.checkpoint, which
    # would copy each kept array once more.
    "save_all": None,
    # every product
    "none": _and_kernels(KEPT("product", "out", "scores", "attended", "routes")),
    # every product but attention's scores and what o makes of its values
    "save_most": _and_kernels(KEPT("product", "attended", "routes")),
    # products with weights, nothing within attention
    "dots": KEPT("product", "out", "routes"),
    # inputs and outputs of attention
    "save_qkv_out": _and_kernels(KEPT("q", "k", "v", "attended", "routes")),
    # the input of each layer, and which experts its tokens have
    "block": KEPT("routes"),
}


# ---- layer by layer


def forward_by_layer(
    params: Params,
    cfg: Architecture,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend_fn: Callable[..., tuple[jax.Array, Any]],
    tp_reduce_dtype: DTypeLike = jnp.float32,
    attend_norms: bool = False,
    products: "Products | None" = None,
    angles: dict[str, Angles] | None = None,
    sequences: AttentionMeta | None = None,
    states: Sequence[Any] | None = None,
    routes_LBTk: jax.Array | None = None,
) -> tuple[jax.Array, list, Routed | None]:
    """Hidden states [B, T, D] of tokens at these positions, after the final norm; what each layer
    keeps; and where tokens were routed, as `forward` has it.

    params: from `per_layer_params`. attend_fn(kind, held, of_source, q_BTNH, k_BTKH, v_BTKH) ->
    (attended, what the layer keeps). held: its entry of `states`. A layer that reads the keys and
    values of another one gives q alone; `held` is then of that other layer, and of_source what that
    one keeps. angles, products: None: they are made here. attend_norms, sequences, states: as
    Surroundings has them, states by layer.
    """
    products = Products(tp_reduce_dtype) if products is None else products
    angles = rope_angles_by_kind(cfg, positions_BT) if angles is None else angles

    # Under jit of its own, Python runs this once for all layers of a kind. XLA inlines the calls.
    @partial(jax.jit, static_argnums=0)
    def layer(kind, x_BTD, w, state, of_source, per_layer_BTP, routes_BTk):
        around = Surroundings(
            products,
            angles["local" if is_local(kind) else "global"],
            partial(attend_fn, kind.removesuffix(READER), state, of_source),
            attend_norms,
            sequences,
            state,
            per_layer_BTP,
            routes_BTk,
        )
        return block(x_BTD, w, cfg, kind_of_layer(kind).mix, around)

    x_BTD = embed(params, cfg, tokens_BT, params["embed"].dtype)
    per_layer_LBTP = None
    if cfg.per_layer_dim:
        per_layer_LBTP = per_layer_inputs(params["per_layer"], cfg, tokens_BT, x_BTD)
    # no loop over layers: each has a cache of its own, and may be of another shape
    kept_by_layer = []
    routed_by_layer = []
    for i, (w, kind) in enumerate(zip(params["layers"], cfg.kinds_of_weights)):
        source = cfg.sources.get(i)
        of_source = None if source is None else kept_by_layer[source]
        state = None if states is None else states[i if source is None else source]
        own = jax.tree.map(lambda x, i=i: x[i], (per_layer_LBTP, routes_LBTk))
        x_BTD, kept_of_layer, routed = layer(kind, x_BTD, w, state, of_source, *own)
        kept_by_layer.append(kept_of_layer)
        routed_by_layer.append(routed)
    routed = jax.tree.map(lambda *xs: jnp.stack(xs), *routed_by_layer)
    return norm(x_BTD, params["final_norm"], cfg), kept_by_layer, routed


# ---- embedding and logits


def embed(
    params: Params,
    cfg: Architecture,
    tokens_BT: jax.Array,
    dtype: DTypeLike,
) -> jax.Array:
    """The embeddings of tokens, [B, T, D], in `dtype`."""
    x_BTD = stored(lookup(params["embed"], tokens_BT), dtype)
    if cfg.embed_scale:
        # As in transformers, the factor itself is rounded, too.
        x_BTD = stored(wide(x_BTD) * wide(jnp.asarray(cfg.embed_dim**0.5, dtype)), dtype)
    return constrain(x_BTD, *_LAYER_INPUT)


def per_layer_inputs(
    w: dict[str, Any], cfg: Architecture, tokens_BT: jax.Array, x_BTD: jax.Array
) -> jax.Array:
    """What each layer has of its own for each token, [L, B, T, P]: a row of a table, and a
    projection of x.

    w: table, project (ready for `project`) and norm.
    """
    dtype = x_BTD.dtype
    P = cfg.per_layer_dim
    rows = wide(stored(lookup(w["table"], tokens_BT), dtype)) * P**0.5
    context_BTLP = wide(project(x_BTD, w["project"])) * cfg.embed_dim**-0.5
    context_BTLP = norm(stored(context_BTLP, dtype), w["norm"], cfg)
    both = (wide(context_BTLP) + rows.reshape(context_BTLP.shape)) * 2**-0.5
    by_layer = jnp.moveaxis(stored(both, dtype), 2, 0)
    return constrain(by_layer, "layers", "batch", "seq", "per_layer")


def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """The rows of the table, [B, T, D]. Their gradient is summed in float32 at least."""
    if jnp.finfo(table_VD.dtype).bits >= 32:
        # Its gradient is a sum in float32 by itself.
        return table_VD[tokens_BT]
    return _lookup(table_VD, tokens_BT)


@jax.custom_vjp
def _lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    return table_VD[tokens_BT]


def _lookup_backward(residuals: tuple, cotangent_BTD: jax.Array) -> tuple[jax.Array, None]:
    table_VD, tokens_BT = residuals
    # A frequent token has thousands of summands, which bfloat16 would lose.
    zeros_VD = jnp.zeros(table_VD.shape, at_least_float32(table_VD.dtype))
    gradient_VD = zeros_VD.at[tokens_BT].add(cotangent_BTD.astype(zeros_VD.dtype))
    return constrain_gradient(gradient_VD, _TABLE_AXES).astype(table_VD.dtype), None


# The backward pass reads only the shape and the dtype of the table.
_lookup.defvjp(lambda *arrays: (_lookup(*arrays), arrays), _lookup_backward)


def output_table(params: Params, cfg: Architecture) -> jax.Array:
    """The matrix of the logits, [V, D]: the embedding, or the head. Raises ValueError for a reward
    model, which has none."""
    if cfg.output != "logits":
        raise ValueError(
            "the model is a reward model: it gives a text a number, and no tokens; take it as "
            "'+task.rewards.rm={_target_: tunix_lite.rewards.model.RewardModel, "
            "weights: FOLDER}'"
        )
    return params["embed" if cfg.tied else "head"]


def logits(
    params: Params,
    cfg: Architecture,
    hidden: jax.Array,
) -> jax.Array:
    """Logits of hidden states [..., D] over the vocabulary, [..., V], float32."""
    table_VD = stored(output_table(params, cfg), hidden.dtype)
    product = partial(
        jnp.einsum, "...d,vd->...v", preferred_element_type=at_least_float32(hidden.dtype)
    )
    # one token of each sequence: with so few rows a CPU is faster with the matrix first
    if hidden.ndim == 2 and not is_rounded(hidden.dtype):
        uncapped = jax.lax.platform_dependent(
            hidden,
            table_VD,
            cpu=lambda hidden_BD, table_VD: matrix_first(table_VD, hidden_BD),
            default=product,
        )
    else:
        uncapped = product(hidden, table_VD)
    return softcap(uncapped, cfg.final_softcap)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); x, if there is no cap."""
    if cap is None:
        return x
    return cap * jnp.tanh(x / cap)


# ---- one layer


@dataclass(frozen=True)
class Products:
    """Multiplies activations with the weights of a layer; kernels/decode_products.py has another
    one.

    Example: Products().qkv(x_BTD, w), where `w` are the weights of a layer, ready for `project`.
    """

    # What the two sums of a layer over tp are taken in, as weights.project takes it.
    tp_reduce_dtype: DTypeLike = jnp.float32
    # whether tokamax multiplies experts on GPUs
    tokamax: bool = False

    def qkv(self, x_BTD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, ...]:
        """Queries [B, T, N, H], keys and values [B, T, K, H]; not those that the layer lacks."""
        return tuple(project(x_BTD, w[name]) for name in "qkv" if name in w)

    def out(self, attended_BTNH: jax.Array, w: dict[str, Any]) -> jax.Array:
        """Returns the output of attention for the residual stream, [B, T, D]."""
        return project(attended_BTNH, w["o"], 2, self.tp_reduce_dtype, "out")

    def gated(self, x_BTD: jax.Array, w: dict[str, Any], activation: str) -> jax.Array:
        """activation(gate(x)) * up(x), [B, T, F]."""
        gated_BTF = gated(activation, project(x_BTD, w["gate"]), project(x_BTD, w["up"]))
        # On a CPU one kernel for this and the products gate, up and down is slower than several.
        one_token = x_BTD.shape[1] == 1
        if one_token or is_rounded(x_BTD.dtype):
            return gated_BTF
        return unfused_on_cpu(gated_BTF)

    def down(self, hidden_BTF: jax.Array, w: dict[str, Any]) -> jax.Array:
        """Returns the output of the feed-forward for the residual stream, [B, T, D]."""
        return project(hidden_BTF, w["down"], 1, self.tp_reduce_dtype)

    def after_layer(self, x_BTD: jax.Array) -> jax.Array:
        """The residual stream as the next layer reads it."""
        return x_BTD


def block(
    x_BTD: jax.Array,
    w: dict[str, Any],
    cfg: Architecture,
    mix: Callable[..., tuple[jax.Array, Any]],
    around: Surroundings,
) -> tuple[jax.Array, Any, Routed | None]:
    """The hidden states after one layer, [B, T, D], what its kind keeps, and where its experts had
    tokens from. mix: of its LayerKind."""
    # Attention, or what is in its place.
    normed_BTD = norm(x_BTD, w["attn_norm"], cfg) if cfg.pre_norms else x_BTD
    # With sequence parallelism the tokens are gathered here, and their gradient is scattered.
    normed_BTD = move(normed_BTD, _RESIDUAL, _LAYER_INPUT)
    mixed_BTD, extra = mix(normed_BTD, w, cfg, around)
    mixed_BTD = constrain(mixed_BTD, *_RESIDUAL)
    if cfg.post_norms:
        mixed_BTD = norm(mixed_BTD, w["attn_post_norm"], cfg)
    x_BTD = constrain(added(x_BTD, mixed_BTD), *_RESIDUAL)

    # Feed-forward.
    normed_BTD = norm(x_BTD, w["mlp_norm"], cfg) if cfg.pre_norms else x_BTD
    normed_BTD = move(normed_BTD, _RESIDUAL, _LAYER_INPUT)
    routed = None
    if cfg.experts is None:
        fed_BTD = experts.dense_feed_forward(normed_BTD, w, cfg, around.products)
    else:
        read_BTD = move(x_BTD, _RESIDUAL, _LAYER_INPUT)
        fed_BTD, routed = experts.feed_forward(read_BTD, normed_BTD, w, cfg, around)
    fed_BTD = constrain(fed_BTD, *_RESIDUAL)
    if cfg.post_norms:
        fed_BTD = norm(fed_BTD, w["mlp_post_norm"], cfg)
    x_BTD = constrain(added(x_BTD, fed_BTD), *_RESIDUAL)

    # The layer's own input of each token, and its scalar.
    if around.per_layer is not None:
        gate_BTP = project(move(x_BTD, _RESIDUAL, _LAYER_INPUT), w["per_layer_gate"])
        gated_BTP = gated(cfg.activation, gate_BTP, around.per_layer)
        own_BTD = constrain(project(gated_BTP, w["per_layer_out"]), *_RESIDUAL)
        own_BTD = norm(own_BTD, w["per_layer_norm"], cfg)
        x_BTD = constrain(added(x_BTD, own_BTD), *_RESIDUAL)
    if cfg.layer_scalar:
        scalar = wide(jax.lax.stop_gradient(w["layer_scalar"]))
        x_BTD = stored(wide(x_BTD) * scalar, x_BTD.dtype)
    return around.products.after_layer(x_BTD), extra, routed


def attention_part(
    x_BTD: jax.Array,
    w: dict[str, Any],
    cfg: Architecture,
    around: Surroundings,
    is_rotated: bool = True,
) -> tuple[jax.Array, Any]:
    """Attention of one layer, from normed hidden states to what is added to the residual stream,
    [B, T, D]; and what `attend_fn` keeps. is_rotated: queries and keys have rotary positions."""
    products = around.products
    angles = around.angles
    if "qkv" in w:
        joined = project(x_BTD, w["qkv"])
        ends = (cfg.num_heads, (cfg.num_heads + joined.shape[2]) // 2)
        q_BTNH, *kv = jnp.split(joined, ends, axis=2)
    else:
        q_BTNH, *kv = products.qkv(x_BTD, w)
    # Keys may be the values, too. A layer that has neither reads those of another one.
    if len(kv) == 1:
        kv = kv * 2
    if cfg.qkv_bias:
        q_BTNH, *kv = (
            # The bias is repeated for all tokens and then rounded, so that its gradient is summed
            # over the tokens in the dtype of the bias, not in that of x.
            added(x, stored(jnp.broadcast_to(w[f"{name}_bias"], x.shape), x.dtype))
            for name, x in zip("qkv", (q_BTNH, *kv))
        )
    gate_BTNH = None
    if cfg.attn_gate:
        q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
    if around.attend_norms:
        out_BTNH, extra = around.attend_fn(q_BTNH, *kv, w, angles)
        return products.out(out_BTNH, w), extra
    if cfg.qk_norm:
        q_BTNH = _norm_heads(q_BTNH, w["q_norm"], cfg)
        if kv:
            kv = [_norm_heads(kv[0], w["k_norm"], cfg), kv[1]]
    if cfg.value_norm and kv:
        kv = [kv[0], norm(kv[1], None, cfg)]
    if is_rotated:
        sin_cos, query_scale = angles[:2], angles[2:]
        q_BTNH = rope(q_BTNH, sin_cos)
        if kv:
            kv = [rope(kv[0], sin_cos), kv[1]]
        if query_scale:
            q_BTNH = stored(wide(q_BTNH) * query_scale[0], q_BTNH.dtype)

    # Heads over tp. The names are those that REMAT keeps.
    q_BTNH = constrain(q_BTNH, "batch", "seq", "heads", "head_dim")
    kv = [constrain(x, "batch", "seq", "kv_heads", "head_dim") for x in kv]
    q_BTNH, *kv = (checkpoint_name(x, name) for x, name in zip((q_BTNH, *kv), "qkv"))

    sinks = {"sinks_N": w["sinks"]} if cfg.attn_sinks else {}
    out_BTNH, extra = around.attend_fn(q_BTNH, *kv, **sinks)
    out_BTNH = checkpoint_name(
        constrain(out_BTNH, "batch", "seq", "heads", "head_dim"), "attended"
    )
    if gate_BTNH is not None:
        opened = wide(out_BTNH) * jax.nn.sigmoid(wide(gate_BTNH))
        out_BTNH = stored(opened, out_BTNH.dtype)
    out_BTD = products.out(out_BTNH, w)
    if cfg.out_bias:
        # repeated and then rounded, as the biases of queries are
        o_bias = jnp.broadcast_to(w["o_bias"], out_BTD.shape)
        out_BTD = added(out_BTD, stored(o_bias, out_BTD.dtype))
    return out_BTD, extra


# Kinds of layers. A local layer has a window, a global one sees all tokens before, and an unrotated
# one sees them without rotary positions.
ATTENTION = ROTATED | {"unrotated"}
LAYER_KINDS = {
    kind + end: LayerKind(partial(attention_weights, kind=kind + end), attention_part)
    for kind in ROTATED
    for end in ("", READER)
} | {
    "unrotated": LayerKind(attention_weights, partial(attention_part, is_rotated=False)),
    "delta": GATED_DELTA_NET,
}


def is_local(kind: str) -> bool:
    """Whether layers of this kind see a window of tokens."""
    return kind.removesuffix(READER) == "local"


def _norm_heads(x_BTNH: jax.Array, scale: jax.Array, cfg: Architecture) -> jax.Array:
    """`norm` of queries or keys: over each head, or over all heads together."""
    if not cfg.qk_norm_whole:
        return norm(x_BTNH, scale, cfg)
    flat = x_BTNH.reshape(*x_BTNH.shape[:-2], -1)
    return norm(flat, scale, cfg).reshape(x_BTNH.shape)
