"""What is computed otherwise on a CPU, because XLA is faster so, is the same computation; and gated activations."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_random, random_params, set_mesh

from tunix_lite.learner import update as learner_update
from tunix_lite.models import attention, decoder
from tunix_lite.models.activations import ACTIVATIONS, gated
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach
from tunix_lite.models.unfused import matmul, unfused, with_unfused_cotangent
from tunix_lite.models.weights import is_weight
from tunix_lite.parallel.compiler_options import update_options
from tunix_lite.parallel.mesh import put
from tunix_lite.planning import programs as planned_programs
from tunix_lite.resolved.parts import abstract
from tunix_lite.resolved.run import find_model, resolve_run
from tunix_lite.settings.compose import compose


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


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (64, 32)])
def test_a_gradient_of_a_weight_is_one_of_the_fast_products(rows, columns):
    def loss(x, matrix):
        return jnp.sum(jnp.sin(matmul(x, matrix)))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, rows), (rows, columns))]
    text = jax.jit(jax.grad(loss, 1)).lower(*shapes).compile().as_text()
    summed = re.findall(r" dot\([^)]*\), lhs_contracting_dims=\{(\d)\}", text)
    assert summed and set(summed) == {"1"}, "a product over the first dim is one of Eigen's"


@pytest.mark.parametrize("has_adapters", [False, True])
def test_joined_queries_keys_and_values_are_those_of_three_products(cfg, has_adapters):
    set_mesh(1, 1)
    cfg = replace(cfg, qkv_bias=has_adapters)
    params = random_params(cfg)
    if has_adapters:
        lora = LoraConfig(rank=3, targets=".*/(q|o|up)")
        rng = np.random.default_rng(1)
        declared = adapter_weights(decoder.weights(cfg), lora)
        adapters = jax.tree.map(lambda w: put(rng.normal(0, 0.3, w.shape), *w.axes), declared, is_leaf=is_weight)
        params = attach(params, adapters, lora)
    tokens = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    meta = attention.one_sequence_per_row(jnp.ones(tokens.shape, bool))

    @partial(jax.jit, static_argnums=1)
    def hidden(params, on_cpu):
        layers = decoder.per_layer_params(params, cfg, jnp.float32, on_cpu)
        assert ("qkv" in layers["layers"][0]) == on_cpu != ("q" in layers["layers"][0])

        def attend(layer, *qkv):
            return attention.xla(cfg, cfg.kinds[layer] == "local", meta, *qkv), None

        return decoder.forward_by_layer(layers, cfg, tokens, meta.positions, attend)[0]

    np.testing.assert_allclose(hidden(params, True), hidden(params, False), rtol=2e-5, atol=2e-6)


def test_decoding_on_a_cpu_draws_the_same_tokens(cfg):
    set_mesh(1, 1)
    plain, on_cpu = (decode_random(cfg, on_cpu=on_cpu) for on_cpu in (False, True))
    np.testing.assert_array_equal(on_cpu[0], plain[0])
    np.testing.assert_allclose(on_cpu[1:], plain[1:], rtol=1e-5, atol=1e-6)


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
        return jnp.sum(jnp.sin(decoder.forward(params, cfg, tokens, meta, remat=remat)))

    gradient, params = jax.jit(jax.grad(loss), static_argnums=1), random_params(cfg)
    save_all, none = (gradient.lower(params, remat).compile().as_text() for remat in ("save_all", "none"))
    assert " reduce-precision(" in none and " reduce-precision(" not in save_all


def test_the_setting_reaches_the_compiler_of_an_update(monkeypatch):
    seen = []
    monkeypatch.setattr(learner_update, "options_of_mesh", seen.append)
    small = ["model=random", "training.prompts_per_step=1", "algorithm.num_generations=2", "training.packing=none"]
    loops = []
    set_mesh(1, 1)
    for more in (["training.scan_layers=false"], []):
        run = compose([*small, *more])
        case = resolve_run(run, *find_model(run.model), {"fsdp": 1, "tp": 1}, "cpu")
        text = planned_programs.lowered(case, abstract(case))["update"]().as_text()
        loops.append(text.count("stablehlo.while"))
    assert seen == [update_options(scan_layers=False), {}] and loops[1] == loops[0] + 2


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
