"""What is computed otherwise on a CPU, because XLA is faster so: it is the same computation."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_random, random_params, set_mesh

from tunix_lite.learner import update as learner_update
from tunix_lite.models import attention, decoder, layer_by_layer
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach
from tunix_lite.models.unfused import matmul, unfused, with_unfused_cotangent
from tunix_lite.models.weights import is_weight
from tunix_lite.parallel.compiler_options import update_options
from tunix_lite.parallel.mesh import put
from tunix_lite.planning import programs as planned_programs
from tunix_lite.resolved.parts import abstract
from tunix_lite.resolved.run import find_model, resolve_run
from tunix_lite.settings.compose import compose


@pytest.mark.parametrize(("R", "I", "O"), [(12, 3, 8), (12, 8, 3), (12, 4, 4), (1, 3, 12), (5, 1, 1)])
def test_the_gradients_of_a_product_are_those_of_numpy(R, I, O):
    rng = np.random.default_rng(0)
    rows, matrix, cotangent = (rng.normal(size=shape) for shape in ((R, I), (I, O), (R, O)))
    out, pull_back = jax.vjp(matmul, *(jnp.asarray(x, jnp.float32) for x in (rows, matrix)))
    of_rows, of_matrix = pull_back(jnp.asarray(cotangent, jnp.float32))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(out, rows @ matrix)
    close(of_rows, cotangent @ matrix.T)
    close(of_matrix, rows.T @ cotangent)


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (64, 32), (32, 32)])
def test_a_gradient_of_a_weight_is_one_of_the_fast_products(rows, columns):
    def loss(x, matrix):
        return jnp.sum(jnp.sin(matmul(x, matrix)))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, rows), (rows, columns))]
    text = jax.jit(jax.grad(loss, 1)).lower(*shapes).compile().as_text()
    summed = re.findall(r" dot\([^)]*\), lhs_contracting_dims=\{(\d)\}", text)
    assert summed and set(summed) == {"1"}, "a product over the first dim is one of Eigen's"


@pytest.mark.parametrize("family", [{}, {"qkv_bias": True, "qk_norm": False}])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_joined_queries_keys_and_values_are_those_of_three_products(cfg, family, has_adapters):
    set_mesh(1, 1)
    cfg = replace(cfg, **family)
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
        layers = layer_by_layer.per_layer_params(params, cfg, jnp.float32, on_cpu)
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


def gradient_program(cfg, options=None, **forward):
    """The compiled gradient of the hidden states of 4 sequences of 64 tokens with respect to all weights."""
    set_mesh(1, 1)
    tokens = np.zeros((4, 64), np.int32)
    meta = attention.one_sequence_per_row(jnp.ones(tokens.shape, bool))

    def loss(params):
        return jnp.sum(jnp.sin(decoder.forward(params, cfg, tokens, meta, **forward)))

    return jax.jit(jax.grad(loss)).lower(random_params(cfg)).compile(compiler_options=options)


def test_save_all_copies_nothing_that_it_keeps(cfg):
    """jax.checkpoint puts a reduce_precision at each array that it keeps, also where none is rounded."""
    save_all, none = (gradient_program(cfg, remat=remat).as_text() for remat in ("save_all", "none"))
    assert " reduce-precision(" in none and " reduce-precision(" not in save_all


def test_the_setting_reaches_the_compiler_of_an_update(monkeypatch):
    seen = []
    monkeypatch.setattr(learner_update, "options_of_mesh", seen.append)
    small = ["model=random", "training.prompts_per_step=1", "algorithm.num_generations=2", "training.packing=none"]
    run = compose([*small, "training.scan_layers=false"])
    case = resolve_run(run, *find_model(run.model), {"fsdp": 1, "tp": 1}, "cpu")
    set_mesh(1, 1)
    loops = planned_programs.lowered(case, abstract(case))["update"]().as_text().count("stablehlo.while")
    assert seen == [update_options(scan_layers=False)]
    run = compose(small)
    case = resolve_run(run, *find_model(run.model), {"fsdp": 1, "tp": 1}, "cpu")
    scanned = planned_programs.lowered(case, abstract(case))["update"]().as_text()
    assert scanned.count("stablehlo.while") == loops + 2 and seen[1] == {}
