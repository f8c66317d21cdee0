"""A mixture of experts drops no token, reads no expert that has none, and is what numpy computes token by token, on every
mesh; the order of a batch changes no bit of a row."""

import importlib.util
import itertools
import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, set_mesh
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from tunix_lite.basics.types import RowBatch
from tunix_lite.learner.micro_batches import accumulate
from tunix_lite.models import attention, decoder, experts, grouped, grouped_kernels, layer_by_layer
from tunix_lite.models import groups as groups_
from tunix_lite.models.architecture import Architecture, Experts
from tunix_lite.models.layer_kind import Surroundings
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach
from tunix_lite.models.quantize import quantize, stored_table
from tunix_lite.models.weights import Int8, Weight, dense, for_compute
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.planning import flops
from tunix_lite.planning.hardware import COMPILERS, devices_of, find_machine
from tunix_lite.planning.kernels import kernels

QWEN3 = Experts(count=6, per_token=2, mlp_dim=8)
FAMILIES = {
    "qwen3": QWEN3,
    "qwen3, not normalised": replace(QWEN3, normalised=False),
    "qwen3.5": replace(QWEN3, shared_dim=4),
    "gemma4": replace(QWEN3, beside_dense=True, router_norm=True),
    "gpt-oss": replace(QWEN3, biases=True, softmax_after=True, limit=0.5),
}
CFG = Architecture(
    32, 2, 16, 4, 2, 8, 12, ("local", "global"), window=5, query_scale=8, activation="silu", experts=QWEN3
)
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 6))
WIDE = pytest.mark.wide


def cfg_of(sizes: Experts) -> Architecture:
    return replace(CFG, experts=sizes)


def layer_of(cfg: Architecture, seed: int = 0) -> dict:
    """Random weights of one layer's mixture, by name."""
    rng, table = np.random.default_rng(seed), decoder.layer_weights(cfg)
    return {name: rng.normal(0, 0.5, w.shape).astype(np.float32) for name, w in table.items()}


# ---- numpy, token by token


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def mlp(x, gate, up, down, limit=None, biases=(0, 0, 0)):
    g, u = x @ gate + biases[0], x @ up + biases[1]
    if limit is None:
        return (g * sigmoid(g) * u) @ down + biases[2]
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return (g * sigmoid(1.702 * g) * (u + 1)) @ down + biases[2]


def rms(x, scale=1.0):
    return x / np.sqrt((x**2).mean() + CFG.norm_eps) * scale


def by_token(x, normed, w, sizes, route=None):
    """(what the mixture gives for one token, its experts), in float64; w: of numpy. Norms of CFG multiply by 1 + scale."""
    read = rms(x) * w["router_scale"] * len(x) ** -0.5 if sizes.router_norm else normed
    logits = read @ w["router"] + w.get("router_bias", 0)
    ids = np.argsort(-logits, kind="stable")[: sizes.per_token] if route is None else route
    weights = softmax(logits[ids]) if sizes.softmax_after else softmax(logits)[ids]
    if sizes.normalised:
        weights = weights / weights.sum()
    seen = rms(x, 1 + w["expert_pre_norm"]) if sizes.beside_dense else normed
    out = 0
    for e, weight in zip(ids, weights):
        biases = [w[f"expert_{name}_bias"][e] for name in ("gate", "up", "down")] if sizes.biases else (0, 0, 0)
        matrices = [w[f"expert_{name}"][e] for name in ("gate", "up", "down")]
        scale = w["expert_scale"][e] if sizes.router_norm else 1
        out = out + weight * scale * mlp(seen, *matrices, sizes.limit, biases)
    if sizes.shared_dim:
        out = out + sigmoid(normed @ w["shared_open"]) * mlp(
            normed, *(w[f"shared_{n}"] for n in ("gate", "up", "down"))
        )
    if sizes.beside_dense:
        of_dense = rms(mlp(normed, w["gate"], w["up"], w["down"]), 1 + w["dense_post_norm"])
        out = of_dense + rms(out, 1 + w["expert_post_norm"])
    return out, ids


@partial(jax.jit, static_argnums=3)
def fed(x, normed, w, cfg, routes=None, is_token=None):
    is_token = jnp.ones(x.shape[:2]) if is_token is None else is_token
    return experts.feed_forward(x, normed, w, cfg, surroundings(is_token, routes=routes))


def surroundings(is_token, tokamax=False, **more):
    sequences = attention.AttentionMeta(None, is_token)
    return Surroundings(decoder.Products(tokamax=tokamax), (), None, sequences=sequences, **more)


def hidden(seed=1, shape=(3, 5, 16)):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_is_that_of_numpy(family):
    cfg, (x, normed) = cfg_of(FAMILIES[family]), hidden()
    w = layer_of(cfg)
    out, routed = fed(x, normed, w, cfg)
    w = {name: value.astype(np.float64) for name, value in w.items()}
    for at in np.ndindex(x.shape[:2]):
        exact, ids = by_token(np.float64(x[at]), np.float64(normed[at]), w, cfg.experts)
        np.testing.assert_array_equal(routed.ids[at], ids)
        np.testing.assert_allclose(out[at], exact, rtol=2e-5, atol=2e-5)


def test_a_given_route_is_taken_and_minus_one_is_the_routers_own():
    x, normed = hidden()
    w = layer_of(CFG)
    _, routed = fed(x, normed, w, CFG)
    routes = np.full((3, 5, 2), -1)
    routes[1, 2] = 4, 0
    out, replayed = fed(x, normed, w, CFG, routes)
    np.testing.assert_array_equal(replayed.ids[1, 2], [4, 0])
    np.testing.assert_array_equal(replayed.native, routed.native)
    expected = np.array(routed.native)
    expected[1, 2] = 4, 0
    np.testing.assert_array_equal(replayed.ids, expected)
    exact, _ = by_token(np.float64(x[1, 2]), np.float64(normed[1, 2]), w, QWEN3, [4, 0])
    np.testing.assert_allclose(out[1, 2], exact, rtol=2e-5, atol=2e-5)
    # by the ids, whatever their number: 15 tokens and 2 choices
    np.testing.assert_array_equal(replayed.load, np.bincount(expected.ravel(), minlength=6))


def test_sums_are_of_real_tokens_and_others_reach_no_expert():
    x, normed = hidden()
    w, is_token = layer_of(CFG), np.ones((3, 5), bool)
    is_token[0, :4] = False
    out, routed = fed(x, normed, w, CFG, None, is_token)
    np.testing.assert_array_equal(out[0, :4], 0)
    np.testing.assert_array_equal(out[1:], fed(x, normed, w, CFG)[0][1:])
    logits = np.float64(normed[is_token]) @ w["router"]
    assert routed.load.sum() == 22
    np.testing.assert_allclose(routed.prob_sum, sum(map(softmax, logits)), rtol=1e-5)
    np.testing.assert_allclose(routed.z_sum, (np.log(np.exp(logits).sum(-1)) ** 2).sum(), rtol=1e-5)


# ---- rows in groups


def test_groups_are_those_of_the_example():
    groups = groups_.group(jnp.array([[1, 0], [1, 2]]), 3, 2)
    # 4 pairs in blocks of 2: 4 / 2 + 3 blocks
    np.testing.assert_array_equal(groups.pair, [1, 4, 0, 2, 3, 4, 4, 4, 4, 4])
    np.testing.assert_array_equal(groups.token, [0, 2, 0, 1, 1, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(groups.row, [[2, 0], [3, 4]])
    np.testing.assert_array_equal(groups.expert, [0, 1, 2, 2, 2])


@pytest.mark.parametrize("case", ["all to one", "none to most", "none to any"])
def test_no_token_is_dropped_however_they_crowd(case):
    """40 tokens with 2 of 6 experts, in blocks of 8: never more than 80 + 6 * 8 rows."""
    rng = np.random.default_rng(2)
    ids = {"all to one": [3, 3], "none to most": [5, 0], "none to any": [6, 6]}[case] * np.ones((40, 1), int)
    groups = groups_.group(jnp.asarray(ids), 6, 8)
    assert len(groups.pair) <= 80 + 6 * 8
    x, w = jnp.float32(rng.normal(size=(40, 4))), jnp.float32(rng.normal(size=(6, 4, 3)))
    rows = grouped.grouped_product(groups_.to_rows(x, groups.token, groups.row), w, groups)
    out = groups_.from_rows(rows, groups.token, groups.row)
    exact = sum(np.einsum("nd,ndi->ni", x, np.concatenate([w, w[:1] * 0])[ids[:, j]]) for j in range(2))
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)


def test_experts_without_tokens_are_not_read():
    x, normed = hidden()
    w = layer_of(CFG)
    routes = np.tile([4, 1], (3, 5, 1))
    out, _ = fed(x, normed, w, CFG, routes)
    for name in ("expert_gate", "expert_up", "expert_down"):
        w[name][[0, 2, 3, 5]] = np.nan
    np.testing.assert_array_equal(fed(x, normed, w, CFG, routes)[0], out)


def test_the_order_of_a_batch_changes_no_bit_of_a_row():
    cfg = replace(CFG, embed_dim=64, experts=Experts(8, 3, 48))
    x, normed = hidden(shape=(16, 24, 64))
    w, order = layer_of(cfg), np.random.default_rng(3).permutation(16)
    out, routed = fed(x, normed, w, cfg)
    assert routed.load.max() > routed.load.min()
    np.testing.assert_array_equal(fed(x[order], normed[order], w, cfg)[0], np.asarray(out)[order])


@pytest.mark.parametrize("base", ["plain", "int8"])
def test_kernels_for_gpus_multiply_as_the_loops_do(base, monkeypatch):
    """By their interpreter: 50 columns and 80 inputs are no whole pieces of 64, and one expert has no rows."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    rng = np.random.default_rng(6)
    ids = jnp.asarray(rng.integers(0, 4, (30, 2)) + np.array([0, 1]))
    groups = groups_.group(jnp.where(ids == 2, 0, ids), 6, 16)
    x, g, w = (jnp.float32(rng.normal(size=s)) for s in ((30, 80), (len(groups.pair), 48), (6, 80, 48)))
    rows = groups_.to_rows(x, groups.token, groups.row)
    # as a mixture has it: a row of no pair counts zero
    g = jnp.where(groups.is_pair, g, 0)
    if base == "int8":
        w = Int8(jnp.int8(rng.integers(-127, 128, (6, 80, 48))), jnp.float32(rng.uniform(0.001, 0.01, (6, 5, 48))))
    found = grouped_kernels.multiply(rows, w, groups)
    np.testing.assert_allclose(found, grouped.grouped_product(rows, w, groups), rtol=1e-5, atol=1e-5)
    found = grouped_kernels.multiply(g, w, groups, is_transposed=True)
    np.testing.assert_allclose(found, grouped._by_expert(g, w, groups, is_transposed=True), rtol=1e-5, atol=1e-5)
    # nothing runs beside the one kernel of each product
    multiply = jax.make_jaxpr(grouped_kernels.multiply)(rows, w, groups)
    assert [equation.primitive.name for equation in multiply.eqns] == ["pallas_call"]
    if base == "plain":
        found = grouped_kernels.weight_gradient(rows, g, groups, jnp.float32)
        np.testing.assert_allclose(found, grouped._of_weight(rows, g, groups), rtol=1e-5, atol=1e-5)
        exact = np.zeros((6, 80, 48))
        for row, pair in enumerate(groups.pair):
            if pair < 60:
                exact[np.asarray(groups.expert)[row // 16]] += np.outer(np.float64(rows[row]), np.float64(g[row]))
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_tokamax_is_asked_for_what_the_loops_multiply(monkeypatch):
    """By tokamax's own reference, as its kernels need a Hopper GPU. The last expert takes the rows that have none."""
    tokamax = pytest.importorskip("tokamax")
    ask = tokamax.ragged_dot_general
    monkeypatch.setattr(tokamax, "ragged_dot_general", lambda *a, **b: ask(*a, **b | {"implementation": "xla"}))
    rng = np.random.default_rng(7)
    groups = groups_.group(jnp.asarray(rng.integers(0, 5, (30, 2))), 6, 16)
    x, g, w = (jnp.float32(rng.normal(size=s)) for s in ((30, 64), (len(groups.pair), 32), (6, 64, 32)))
    rows, g = groups_.to_rows(x, groups.token, groups.row), jnp.where(groups.is_pair, g, 0)
    near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    of_tokamax = groups.replace(tokamax=True)
    filled = int(jnp.sum(groups.count)) * 16
    assert filled < len(rows)
    for given, is_transposed in ((rows, False), (g, True)):
        found = grouped_kernels.multiply(given, w, of_tokamax, is_transposed)
        near(found[:filled], grouped._by_expert(given, w, groups, is_transposed)[:filled])
    near(grouped_kernels.weight_gradient(rows, g, of_tokamax, jnp.float32), grouped._of_weight(rows, g, groups))


@pytest.mark.aot
@pytest.mark.parametrize("tokamax", [False, True])
@pytest.mark.parametrize("shape, dtype", [((64, 1), jnp.bfloat16), ((1, 512), jnp.float32)])
def test_a_mixture_compiles_for_an_h100(tokamax, shape, dtype):
    """A step of decoding, and an update, whose weights are in float32: a kernel for each product."""
    if not any(importlib.util.find_spec(module) for module in COMPILERS["cuda"]):
        pytest.skip("needs the extra plan-gpu")
    if tokamax:
        pytest.importorskip("tokamax")
    cfg = replace(CFG, embed_dim=128, experts=Experts(8, 2, 64))
    table = {n: w for n, w in decoder.layer_weights(cfg).items() if n == "router" or n.startswith("expert_")}
    devices = devices_of(find_machine("h100"))

    def out(w, x):
        w = {name: for_compute(leaf, table[name], jnp.bfloat16) for name, leaf in w.items()}
        around = surroundings(jnp.ones(shape), tokamax)
        return jnp.sum(jnp.sin(experts.feed_forward(x, x, w, cfg, around)[0].astype(jnp.float32)))

    mesh = make_mesh(((1, 1), ("fsdp", "tp")), devices)
    with jax.set_mesh(mesh), jax.default_device(devices[0] if tokamax else None):
        placed = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
        w = {name: placed(weight.shape, jnp.float32 if weight.is_exact else dtype) for name, weight in table.items()}
        program = jax.jit(out if dtype == jnp.bfloat16 else jax.grad(out, (0, 1)))
        text = program.lower(w, placed((*shape, 128), jnp.bfloat16)).compile().as_text()
    called = re.findall(r'custom_call_target="(mosaic_gpu_v2|__gpu\$xla\.gpu\.triton)"', text)
    times = 3 if dtype == jnp.bfloat16 else 9
    assert called == ["mosaic_gpu_v2" if tokamax else "__gpu$xla.gpu.triton"] * times


# ---- the whole model


def meta_of(tokens, packed=False):
    """Rows of one sequence, the first token of row 0 padding; or two sequences in each row. Of the same types, so that one
    program reads both."""
    half, rows = tokens.shape[1] // 2, np.arange(len(tokens))[:, None]
    meta = attention.one_sequence_per_row(np.arange(2 * half) >= (rows == 0))
    if packed:
        segments = np.repeat([1, 2], half) + 0 * rows
        meta = attention.AttentionMeta(np.tile(np.arange(half), 2) + 0 * rows, segments)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), meta)


def dense_mixture(x, ids, weights, w, cfg, *_):
    """The mixture as a sum over all experts, of which those that are not chosen count zero."""
    sizes = cfg.experts
    w = {name: dense(getattr(leaf, "master", leaf), 1, x.dtype) for name, leaf in w.items() if "expert_" in name}
    share = jnp.sum(jnp.where(ids[..., None] == jnp.arange(sizes.count), weights[..., None], 0), axis=-2)
    gate, up = (jnp.einsum("btd,edi->btei", x, w[f"expert_{name}"]) for name in ("gate", "up"))
    if sizes.biases:
        gate, up = gate + w["expert_gate_bias"], up + w["expert_up_bias"]
    out = jnp.einsum("btei,eid->bted", experts.activate(gate, up, cfg), w["expert_down"])
    out = out + w["expert_down_bias"] if sizes.biases else out
    return jnp.einsum("bted,bte->btd", out, share)


def loss_of(params, cfg, tokens, meta, dtype=jnp.float32, **settings):
    h, routed = decoder.forward(params, cfg, tokens, meta, dtype, **settings)
    # real tokens alone, and the router's sums; all of it is a sum over rows
    total = jnp.sum(jnp.sin(h) * (meta.segments > 0)[..., None])
    return total + jnp.sum(routed.prob_sum * jnp.arange(cfg.experts.count)) / 4 + jnp.sum(routed.z_sum) / 16


def on_mesh(table, values):
    return jax.tree.map(lambda w, x: put(np.asarray(x), *w.axes), table, values)


@pytest.fixture(scope="module", params=[pytest.param("qwen3.5", marks=WIDE), "gpt-oss"])
def exact(request):
    """(cfg, weights, gradients in float64 of rows that are not packed, and of packed ones)."""
    cfg = cfg_of(FAMILIES[request.param])
    set_mesh(1, 1)
    params = jax.tree.map(np.asarray, random_params(cfg))
    with jax.enable_x64(True), jax.set_mesh(set_mesh(1, 1)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_mixture", dense_mixture)
        wide = jax.tree.map(np.float64, params)
        of = jax.jit(jax.grad(partial(loss_of, cfg=cfg, tokens=TOKENS, dtype=jnp.float64, remat="save_all")))
        return cfg, params, [jax.tree.map(np.asarray, of(wide, meta=meta_of(TOKENS, p))) for p in (False, True)]


@pytest.mark.parametrize(
    "mesh, parts",
    [((2, 2), 2), *(pytest.param(mesh, 1, marks=WIDE) for mesh in ((1, 1), (2, 2), (4, 1), (1, 4)))],
)
def test_gradients_are_those_of_float64_on_every_mesh_and_in_micro_batches(exact, mesh, parts):
    cfg, params, wanted = exact
    set_mesh(*mesh)
    placed = on_mesh(decoder.weights(cfg), params)

    @jax.jit
    def of(params, rows):
        def gradient(rows):
            meta = attention.meta_of_rows(rows)
            return jax.grad(loss_of)(params, cfg, rows.tokens, meta, remat="block"), {}

        return accumulate(gradient, rows, jax.tree.map(lambda x: x.sharding, placed))[0]

    for packed in (False, True) if mesh == (2, 2) else (False,):
        meta = meta_of(TOKENS, packed)
        counts = meta.segments > 0
        layout = {"segment_ids": meta.segments, "positions": meta.positions, "max_micro_batches": parts}
        found = of(placed, RowBatch(jnp.asarray(TOKENS), counts, counts.astype(np.float32), **layout))
        squares = [
            np.array([np.sum((np.float64(g) - want) ** 2), np.sum(want**2)])
            for g, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted[packed]))
        ]
        # all together, and each
        assert np.sqrt(np.divide(*sum(squares))) < 1e-6
        assert max(np.sqrt(np.divide(*one)) for one in squares) < 2e-6


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=WIDE), "gpt-oss"])
def test_what_memory_holds_in_rows_without_a_pair_reaches_nothing(family, monkeypatch):
    """On a TPU the products begin in memory that nobody has filled: here it has zeros, or no numbers."""
    cfg, x = cfg_of(FAMILIES[family]), hidden()[0]
    w, table, found = layer_of(cfg), decoder.layer_weights(cfg), []

    def loss(w, x):
        w = {name: for_compute(leaf, table[name], jnp.float32) for name, leaf in w.items()}
        return jnp.sum(jnp.sin(experts.feed_forward(x, x, w, cfg, surroundings(jnp.ones(x.shape[:2])))[0]))

    for value in (0, np.nan):
        monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype, value=value: jnp.full(shape, value, dtype))
        grouped._by_expert.clear_cache()
        found.append(jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(w, x)))
    grouped._by_expert.clear_cache()
    for zeros, nans in zip(*found):
        np.testing.assert_array_equal(zeros, nans)


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=WIDE)])
@pytest.mark.parametrize(
    "pattern", [pytest.param(("local", "global"), marks=WIDE), ("unrotated", "unrotated", "global")]
)
def test_sampling_and_scoring_route_alike_and_routes_are_replayed(pattern, scan_layers):
    """Of stacks of several kinds, too, whose layers run in another order than they lie in."""
    cfg = replace(CFG, num_layers=5, pattern=pattern)
    params, meta = random_params(cfg), meta_of(TOKENS)

    @jax.jit
    def both(params, routes):
        h, routed = decoder.forward(params, cfg, TOKENS, meta, routes_LBTk=routes, scan_layers=scan_layers)
        layers = layer_by_layer.per_layer_params(params, cfg, jnp.float32, on_cpu=True)

        def attend(kind, held, of_source, *qkv):
            return attention.xla(cfg, kind == "local", meta, *qkv), None

        given = (layers, cfg, TOKENS, meta.positions, attend)
        sampled, _, by_layer = decoder.forward_by_layer(*given, sequences=meta, routes_LBTk=routes)
        return h, routed, sampled, by_layer

    native = np.full((5, *TOKENS.shape, 2), -1)
    h, routed, sampled, by_layer = both(params, native)
    np.testing.assert_allclose(sampled, h, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(by_layer.ids, routed.ids)
    others = np.random.default_rng(4).permuted(np.tile(np.arange(6), (5, *TOKENS.shape, 1)), axis=-1)[..., :2]
    _, routed, _, by_layer = both(params, others)
    np.testing.assert_array_equal(routed.ids, others)
    np.testing.assert_array_equal(by_layer.ids, others)


@cache
def adapted(base: str):
    """(cfg, lora, stored base, adapters, their loss and gradients over the dequantised base with each update added)."""
    set_mesh(1, 1)
    cfg = replace(CFG, num_layers=1, pattern=("global",))
    lora = LoraConfig(rank=2, alpha=4.0, targets=".*/(q|expert_gate|expert_down)", base=base)
    rng, table = np.random.default_rng(5), decoder.weights(cfg)
    params = random_params(cfg)

    def pack(x, leaf, w):
        if isinstance(leaf, Weight):
            return x
        one = jax.tree.map(lambda s: replace(s, shape=s.shape[1:]), leaf)
        return jax.vmap(partial(quantize, like=one))(x)

    stored = stored_table(table, lora.base)
    base = jax.tree.map(pack, params, stored, table, is_leaf=lambda x: not isinstance(x, dict))
    adapters = jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), adapter_weights(table, lora))
    assert adapters["layers"]["expert_gate"]["a"].shape == (1, 6, 16, 2)

    def by_hand(adapters):
        merged = dict(base["layers"])
        for name, leaf in base["layers"].items():
            inputs = table["layers"][name].num_counted + table["layers"][name].inputs
            merged[name] = dense(leaf, inputs) if hasattr(leaf, "codes") else leaf
        for name, pair in adapters["layers"].items():
            update = pair["a"] @ pair["b"].reshape(*pair["a"].shape[:-2], 2, -1)
            merged[name] = merged[name] + 2.0 * update.reshape(merged[name].shape)
        return loss_of(base | {"layers": merged}, cfg, TOKENS, meta_of(TOKENS))

    return cfg, lora, base, adapters, jax.jit(jax.value_and_grad(by_hand))(adapters)


PAIRS = itertools.product(("int8", "nf4"), ((1, 1), (2, 2), (4, 1)))
IN_SHORT = (("nf4", (2, 2)),)


@pytest.mark.parametrize("base, mesh", [pytest.param(*p, marks=() if p in IN_SHORT else WIDE) for p in PAIRS])
def test_adapters_train_experts_over_a_quantised_base_on_every_mesh(base, mesh):
    """The base is dequantised, and adapters are added to it, for each expert; the base gets no gradient."""
    cfg, lora, base, adapters, wanted = adapted(base)
    set_mesh(*mesh)
    table = decoder.weights(cfg)
    base = on_mesh(stored_table(table, lora.base), base)
    meta = meta_of(TOKENS)

    @jax.jit
    @jax.value_and_grad
    def of(adapters, base):
        return loss_of(attach(base, adapters, lora), cfg, TOKENS, meta)

    found = of(on_mesh(adapter_weights(table, lora), adapters), base)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), found, wanted)


def test_what_experts_cannot_do_is_refused():
    with pytest.raises(ValueError, match="per_token=3 is above experts.count=2"):
        Experts(2, 3, 8)
    with pytest.raises(ValueError, match="experts.count=0 must be above 0"):
        Experts(0, 1, 8)
    with pytest.raises(ValueError, match="adapters of experts have no dropout; set model.lora.dropout=0"):
        adapter_weights(decoder.weights(CFG), LoraConfig(rank=2, targets=".*/expert_up", dropout=0.1))


# ---- what a plan knows, by hand


def test_a_token_counts_the_experts_that_compute_it():
    # q 16*4*8, k and v 16*2*8 each, o as q; the router 16*6; and 2 of 6 experts with 3 matrices of 16*8; two layers
    by_hand = 2 * (2 * 512 + 2 * 256 + 96 + 2 * 3 * 128)
    assert flops.forward_flops(CFG, 1, 0, 0.0) == 2 * by_hand


def test_rows_and_experts_of_so_many_tokens():
    # one token reaches its k experts; 64 tokens with 8 of 128: 128 (1 - (15/16)^64)
    assert groups_.group(jnp.zeros((1, 8), int), 128, 16).expected_touched == 8
    assert groups_.group(jnp.zeros((64, 8), int), 128, 16).expected_touched == pytest.approx(128 * (1 - 0.9375**64))
    # 2,048 tokens with 8 of 64: blocks of 64, and at most one block more for each expert
    assert groups_.block_of(16384, 64) == 64 and groups_.rows_needed(16384, 64) == 16384 + 64 * 64
    # few pairs: a block of 16 for each
    assert groups_.rows_needed(8, 128) == 8 * 16


def test_a_loop_over_experts_turns_as_often_as_is_expected(programs_with_names):
    """4 of 8 experts, 16 tokens: 7.99 have rows, of 8 each, which is one block. Of the product [16, 32] x [32, 48] the
    FLOPs are 2 * 16 * 32 * 48."""
    groups = groups_.group(jnp.tile(jnp.arange(4), (16, 1)), 8, 16)
    x, w = jnp.zeros((len(groups.pair), 32)), jnp.zeros((8, 32, 48))
    text = jax.jit(grouped.grouped_product).lower(x, w, groups).compile().as_text()
    assert sum(k.times * k.flops for k in kernels(text)) == 8 * 2 * 16 * 32 * 48
