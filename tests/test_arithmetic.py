"""What is computed otherwise to be faster is the same computation; sums are in float32; rotary angles are exact."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_random, random_params, set_mesh

from tunix_lite.models import attention, decoder, layer_by_layer, rope
from tunix_lite.models.activations import ACTIVATIONS, gated
from tunix_lite.models.architecture import Architecture, RopeScaling
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach
from tunix_lite.models.unfused import matmul, unfused, with_unfused_cotangent
from tunix_lite.models.weights import Lora, Weight, for_compute, project
from tunix_lite.parallel.mesh import put


@pytest.mark.parametrize(("R", "I", "O"), [(12, 3, 8), (12, 8, 3), (1, 3, 12)])
def test_the_gradients_of_a_product_are_those_of_numpy(R, I, O):
    rng = np.random.default_rng(0)
    rows, matrix, cotangent = (rng.normal(size=shape) for shape in ((R, I), (I, O), (R, O)))
    out, pull_back = jax.vjp(matmul, *(jnp.asarray(x, jnp.float32) for x in (rows, matrix)))
    of_rows, of_matrix = pull_back(jnp.asarray(cotangent, jnp.float32))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(out, rows @ matrix)
    close(of_rows, cotangent @ matrix.T)
    close(of_matrix, rows.T @ cotangent)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_joined_queries_keys_and_values_are_those_of_three_products(cfg, has_adapters):
    set_mesh(1, 1)
    cfg = replace(cfg, qkv_bias=has_adapters)
    params = random_params(cfg)
    if has_adapters:
        lora = LoraConfig(rank=3, targets=".*/(q|o|up)")
        rng = np.random.default_rng(1)
        declared = adapter_weights(decoder.weights(cfg), lora)
        adapters = jax.tree.map(lambda w: put(rng.normal(0, 0.3, w.shape), *w.axes), declared)
        params = attach(params, adapters, lora)
    tokens = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    meta = attention.one_sequence_per_row(jnp.ones(tokens.shape, bool))

    @partial(jax.jit, static_argnums=1)
    def hidden(params, on_cpu):
        layers = layer_by_layer.per_layer_params(params, cfg, jnp.float32, on_cpu)
        assert ("qkv" in layers["layers"][0]) == on_cpu != ("q" in layers["layers"][0])

        def attend(kind, held, of_source, *qkv):
            return attention.xla(cfg, kind == "local", meta, *qkv), None

        return decoder.forward_by_layer(layers, cfg, tokens, meta.positions, attend)[0]

    np.testing.assert_allclose(hidden(params, True), hidden(params, False), rtol=2e-5, atol=2e-6)


def test_decoding_on_a_cpu_draws_the_same_tokens(cfg):
    set_mesh(1, 1)
    plain, on_cpu = (decode_random(cfg, on_cpu=on_cpu) for on_cpu in (False, True))
    np.testing.assert_array_equal(on_cpu[0], plain[0])
    np.testing.assert_allclose(on_cpu[1:3], plain[1:3], rtol=1e-5, atol=1e-6)


def test_what_is_not_fused_keeps_its_value_and_its_gradient():
    x = jnp.asarray([[1.0, -2.0], [jnp.nan, jnp.inf]])
    np.testing.assert_array_equal(unfused(x), x)
    np.testing.assert_array_equal(jax.vmap(unfused)(x), x)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(with_unfused_cotangent(x))))(jnp.asarray([0.0, 1.0]))
    np.testing.assert_allclose(gradient, np.cos([0.0, 1.0]), rtol=1e-6)


def test_save_all_copies_nothing_that_it_keeps(cfg):
    """jax.checkpoint puts a reduce_precision at each array that it keeps, also where none is rounded."""
    set_mesh(1, 1)
    tokens, meta = np.zeros((4, 64), np.int32), attention.one_sequence_per_row(jnp.ones((4, 64), bool))

    def loss(params, remat):
        return jnp.sum(jnp.sin(decoder.forward(params, cfg, tokens, meta, remat=remat)[0]))

    gradient, params = jax.jit(jax.grad(loss), static_argnums=1), random_params(cfg)
    save_all, none = (gradient.lower(params, remat).compile().as_text() for remat in ("save_all", "none"))
    assert " reduce-precision(" in none and " reduce-precision(" not in save_all


# ---- the activation of a gated feed-forward, against numpy in float64


def activated(activation, x):
    """In float64: gelu with tanh as published, and silu."""
    if activation == "gelu":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def slope_of(activation, x):
    return (activated(activation, x + 1e-4) - activated(activation, x - 1e-4)) / 2e-4


# half a unit in the last of 8 bits, where values are rounded once
@pytest.mark.parametrize("dtype, rtol, atol", [("float32", 2e-6, 2e-6), ("bfloat16", 2**-8 * 1.001, 4e-6)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_activation_and_its_gradient_are_those_of_numpy(activation, dtype, rtol, atol):
    rng = np.random.default_rng(0)
    gate = np.concatenate([np.linspace(-12, 12, 481), [-88.0, 88.0]])
    arrays = [jnp.asarray(x, dtype) for x in (gate, *rng.normal(size=(2, len(gate))))]
    out, pull_back = jax.vjp(lambda *x: gated(activation, *x), *arrays[:2])
    gate, up, slope = (np.asarray(x, np.float64) for x in arrays)
    value = activated(activation, gate)
    expected = (value * up, slope * up * slope_of(activation, gate), slope * value)
    for found, exact in zip((out, *pull_back(arrays[2])), expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("activation, dtype", [("gelu", "float32"), ("silu", "bfloat16")])
def test_the_backward_pass_keeps_gate_and_up_alone(activation, dtype):
    def kept(gate, up):
        return jax.vjp(lambda *x: gated(activation, *x), gate, up)[1]

    given = jax.ShapeDtypeStruct((8, 16), dtype)
    found = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(jax.eval_shape(kept, given, given))]
    assert found == [((8, 16), dtype)] * 2


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_far_from_zero_gradients_keep_their_digits(activation):
    """Where the activation is nearly 0, its slope is no difference of numbers near 1."""
    gate = np.array([-4.0, -6.0]) if activation == "gelu" else np.array([-12.0, -30.0])
    _, pull_back = jax.vjp(lambda *x: gated(activation, *x), *jnp.ones((2, 2), jnp.float32).at[0].set(gate))
    slope = slope_of(activation, gate)
    if activation == "gelu":
        # 1 + tanh loses its digits in float64, too: half of it is sigmoid(2 u)
        u = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        share = 1 / (1 + np.exp(-2 * u))
        slope = share + gate * share * (1 - share) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * gate**2)
    np.testing.assert_allclose(pull_back(jnp.ones(2))[0], slope, rtol=2e-5)


# ---- gradients of what is computed in bfloat16 are summed in float32, over tokens and over the mesh


ROWS, EMBED, HEADS, SIZE = 64, 8, 2, 4
WEIGHT = Weight((EMBED, HEADS, SIZE), ("embed", "heads", "head_dim"))


def off(got, wanted) -> float:
    return np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)


def of_a_projection(reduce_dtype: str) -> tuple[jax.Array, np.ndarray, float]:
    """The gradient of a weight over four shards, the same in float64, and how far that of its input is from float64."""
    set_mesh(4, 1)
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.normal(size=(ROWS, EMBED)), jnp.bfloat16))
    slope = np.asarray(jnp.asarray(rng.normal(size=(ROWS, HEADS, SIZE)), jnp.bfloat16))
    w = jnp.asarray(rng.normal(size=WEIGHT.shape), "float32")

    def product(w, x):
        return project(x, for_compute(w, WEIGHT, jnp.bfloat16, jnp.dtype(reduce_dtype)))

    placed = put(np.asarray(w), *WEIGHT.axes), put(x, "batch", "act_embed")
    pull = jax.jit(lambda w, x, slope: jax.vjp(product, w, x)[1](slope))
    of_w, of_x = pull(*placed, put(slope, "batch", "heads", "head_dim"))
    x, slope, used = (np.asarray(a, np.float64) for a in (x, slope, jnp.asarray(w, jnp.bfloat16)))
    wanted_x = np.einsum("rhk,ehk->re", slope, used)
    return of_w, np.einsum("re,rhk->ehk", x, slope), off(of_x, wanted_x)


def test_the_gradient_of_a_projection_is_summed_in_float32():
    wide, wanted, of_x = of_a_projection("float32")
    assert off(wide, wanted) < 3e-7 and of_x < 4e-3 and wide.dtype == jnp.float32
    rounded, _, of_x_too = of_a_projection("bfloat16")
    assert off(rounded, wanted) > 1e-3 and of_x_too == of_x


def test_adapters_hear_their_gradient_in_float32_and_a_frozen_base_has_no_way_for_one():
    leaf = Lora(*(jnp.ones(shape, jnp.float32) for shape in (WEIGHT.shape, (EMBED, 2), (2, HEADS, SIZE))))
    ready = for_compute(leaf, WEIGHT, jnp.bfloat16)
    assert [part.master.dtype for part in (ready.a, ready.b)] == [jnp.float32] * 2
    assert isinstance(ready.base, jax.Array) and ready.base.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "stored, reduce_dtype, narrow",
    [("bfloat16", "float32", set()), ("float32", "bfloat16", {"dot_general", "reduce_sum"})],
)
def test_no_gradient_of_a_layer_is_summed_in_bfloat16(cfg, stored, reduce_dtype, narrow):
    """Unless it is asked for. Read from the program before any compiler sees it: what comes of tokens and is of none."""
    cfg = replace(cfg, qkv_bias=True)
    params = jax.tree.map(lambda x: x.astype(stored), random_params(cfg))
    tokens, meta = np.ones((4, 9), np.int32), attention.one_sequence_per_row(np.ones((4, 9), bool))

    def loss(params):
        hidden = decoder.forward(params, cfg, tokens, meta, jnp.bfloat16, reduce_dtype=jnp.dtype(reduce_dtype))[0]
        return jnp.sum(hidden.astype(jnp.float32))

    sums = {}

    def of_tokens(x) -> bool:
        return x.shape[:2] == (4, 9) or x.shape[:1] == (36,)

    def look(jaxpr):
        live, used = set(jaxpr.outvars), []
        for equation in reversed(jaxpr.eqns):  # what nobody uses is never computed: compilers leave it out
            if live & set(equation.outvars):
                used.append(equation)
                live |= {v for v in equation.invars if not hasattr(v, "val")}
        for equation in used:
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    look(inner)
            if equation.primitive.name in ("dot_general", "reduce_sum", "scatter-add"):
                out = equation.outvars[0].aval
                if any(of_tokens(v.aval) for v in equation.invars) and not of_tokens(out):
                    sums.setdefault(equation.primitive.name, set()).add(str(out.dtype))

    look(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    assert set(sums) == {"dot_general", "reduce_sum", "scatter-add"}
    assert {name for name, dtypes in sums.items() if "bfloat16" in dtypes} == narrow


# ---- rotary angles are exact at every position, and with them the scores of long rows


# No layer has a window here: "local" layers have one that is longer than every row.
LLAMA3 = Architecture(
    64, 2, 32, 4, 2, 16, 48, pattern=("local", "global"), window=2**20, query_scale=16, post_norms=False,
    norm_plus_one=False, activation="silu", embed_scale=False, rope_theta_local=100.0, rope_theta_global=5e5,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
)  # fmt: skip
LINEAR = replace(
    LLAMA3, post_norms=True, norm_plus_one=True, rope_theta_local=1e4, rope_theta_global=1e6, rope_scaling=RopeScaling(8.0)
)  # fmt: skip
BOTH = pytest.mark.parametrize("cfg", [LLAMA3, LINEAR], ids=["llama3", "linear"])


def frequencies(cfg: Architecture, kind: str) -> np.ndarray:
    """Radians a token, as the papers write them: theta^(-2i/H), and what Llama 3.1 makes of them."""
    theta = cfg.rope_theta_local if kind == "local" else cfg.rope_theta_global
    plain = np.array([theta ** (-2 * i / cfg.head_dim) for i in range(cfg.head_dim // 2)])
    if kind == "local":
        return plain
    if cfg.rope_scaling.original_positions is None:
        return plain / 8
    wavelength = 2 * np.pi / plain
    smooth = (8192 / wavelength - 1) / (4 - 1)
    between = (1 - smooth) * plain / 8 + smooth * plain
    return np.where(wavelength < 8192 / 4, plain, np.where(wavelength > 8192, plain / 8, between))


@pytest.mark.parametrize("kind", ["local", "global"])
@BOTH
def test_sine_and_cosine_are_exact_to_float32_at_every_position(cfg, kind):
    """To a last place of 1 (2^-23): a product of float32 is off by 0.0002 at 4,096 and by 0.008 at 131,072."""
    positions = np.r_[0:70_000, 131_000:131_073, 2**20, 2**26 - 1].astype(np.int32)[None]
    found = jax.jit(partial(rope.rope_angles, cfg, kind=kind))(positions)
    angle = positions[..., None, None].astype(np.float64) * frequencies(cfg, kind)
    for got, wanted in zip(found, (np.sin(angle), np.cos(angle))):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2.0**-23)


# ---- whole models


def scores(params, cfg, tokens, positions):
    """The logits by the formulas, [T, V], in the dtype of the weights."""

    def rms(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale if cfg.norm_plus_one else scale)

    def turned(x, kind):
        angle = positions[:, None, None] * frequencies(cfg, kind)
        first, second = jnp.split(x, 2, axis=-1)
        sin, cos = np.sin(angle), np.cos(angle)
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

    after = rms if cfg.post_norms else lambda x, _: x
    x = params["embed"][tokens]
    for i, kind in enumerate(cfg.kinds):
        w = {"attn_post_norm": None, "mlp_post_norm": None}
        w |= {name: stacked[i] for name, stacked in params["layers"].items()}
        normed = rms(x, w["attn_norm"])
        q, k, v = (jnp.einsum("td,dnh->tnh", normed, w[name]) for name in "qkv")
        q, k = turned(rms(q, w["q_norm"]), kind), turned(rms(k, w["k_norm"]), kind)
        k, v = (jnp.repeat(x, cfg.num_heads // cfg.num_kv_heads, axis=1) for x in (k, v))
        of_pairs = jnp.einsum("tnh,snh->nts", q, k) / np.sqrt(cfg.query_scale)
        seen = positions[:, None] >= positions
        attended = jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(seen, of_pairs, -np.inf)), v)
        x = x + after(jnp.einsum("tnh,nhd->td", attended, w["o"]), w["attn_post_norm"])
        normed = rms(x, w["mlp_norm"])
        x = x + after((jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"], w["mlp_post_norm"])
    return rms(x, params["final_norm"]) @ params["embed"].T


def mean_loss(logits, tokens):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(tokens) - 1), tokens[1:]].mean()


def distance(got, wanted) -> float:
    """Norm of the difference, in norms of what is wanted."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    squares = [
        np.sum([(np.asarray(a, np.float64) - b) ** 2, np.asarray(b) ** 2], axis=tuple(range(1, b.ndim + 1)))
        for a, b in pairs
    ]
    return float(np.sqrt(np.divide(*np.sum(squares, axis=0))))


@BOTH
def test_logits_and_gradients_of_long_rows_are_those_of_float64(cfg):
    """By norm to a few roundings of float32 (6e-8 each). With angles in float32, it was 1e-5 and 7e-4."""
    positions = np.arange(0, 131_072, 769)
    set_mesh(1, 1)
    params = jax.tree.map(np.asarray, random_params(cfg, scale=0.2))
    if not cfg.norm_plus_one:
        params = jax.tree_util.tree_map_with_path(lambda path, x: x + ("norm" in jax.tree_util.keystr(path)), params)
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, len(positions))
    row = attention.AttentionMeta(positions[None].astype(np.int32), np.ones((1, len(positions)), np.int32))

    def loss(score, params):
        logits = score(params)
        return mean_loss(logits, tokens), logits

    def both(score, params):
        (_, logits), grads = jax.jit(jax.value_and_grad(partial(loss, score), has_aux=True))(params)
        return np.asarray(logits), jax.tree.map(np.asarray, grads)

    found = both(lambda p: decoder.logits(p, cfg, decoder.forward(p, cfg, tokens[None], row)[0])[0], params)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), params)
        wanted = both(lambda p: scores(p, cfg, tokens, positions), wide)
    off = [distance(got, right) for got, right in zip(found, wanted)]
    assert off[0] < 1e-6 and off[1] < 2e-6, off
