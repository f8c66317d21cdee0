"""What is computed otherwise on a CPU, because XLA is faster so: it is the same computation."""

import itertools
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_random, random_params, set_mesh

from tunix_lite.learner import update as learner_update
from tunix_lite.models import attention, decoder, vocabulary
from tunix_lite.models.matmul import matmul
from tunix_lite.models.unfused import unfused, with_unfused_cotangent
from tunix_lite.models.weights import Lora
from tunix_lite.parallel.compiler_options import options_of_mesh, update_options
from tunix_lite.parallel.mesh import current_mesh
from tunix_lite.planning import programs as planned_programs
from tunix_lite.resolved.parts import abstract
from tunix_lite.resolved.run import find_model, resolve_run
from tunix_lite.rollout import engine
from tunix_lite.rollout import programs as rollout_programs
from tunix_lite.rollout.programs import SamplerSpec, computed_ahead, make_programs
from tunix_lite.rollout.settings import GenerationConfig
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
def test_joined_queries_keys_and_values_are_those_of_three_products(cfg, family):
    set_mesh(1, 1)
    cfg = replace(cfg, **family)
    params = random_params(cfg)
    tokens = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    meta = attention.one_sequence_per_row(jnp.ones(tokens.shape, bool))

    @partial(jax.jit, static_argnums=1)
    def hidden(params, join_qkv):
        layers = decoder.per_layer_params(params, cfg, jnp.float32, join_qkv)
        assert ("qkv" in layers["layers"][0]) == join_qkv != ("q" in layers["layers"][0])

        def attend(layer, *qkv):
            return attention.xla(cfg, cfg.kinds[layer] == "local", meta, *qkv), None

        return decoder.forward_by_layer(layers, cfg, tokens, meta.positions, attend)[0]

    np.testing.assert_allclose(hidden(params, True), hidden(params, False), rtol=2e-5, atol=2e-6)


def test_only_plain_whole_weights_of_a_cpu_are_joined(cfg):
    set_mesh(1, 1)
    params = random_params(cfg)
    assert decoder.joins_qkv(params, jnp.float32, current_mesh())
    assert not decoder.joins_qkv(params, jnp.bfloat16, current_mesh()), "rounded as the trainer rounds"
    adapted = params | {"layers": params["layers"] | {"q": Lora(params["layers"]["q"], None, None, None, 1.0)}}
    assert not decoder.joins_qkv(adapted, jnp.float32, current_mesh())
    set_mesh(1, 2)
    assert not decoder.joins_qkv(params, jnp.float32, current_mesh()), "heads are divided over tp"
    set_mesh(2, 1)
    prepared = engine.make_prepare(cfg, jnp.float32, gather=False)(random_params(cfg))["layers"][0]["qkv"]
    assert prepared.shape == (16, 4 + 2 + 2, 8) and prepared.sharding.shard_shape(prepared.shape) == (8, 8, 8)


def test_decoding_on_a_cpu_draws_the_same_tokens(cfg):
    set_mesh(1, 1)
    plain, on_cpu = (decode_random(cfg, on_cpu=on_cpu) for on_cpu in (False, True))
    np.testing.assert_array_equal(on_cpu[0], plain[0])
    np.testing.assert_allclose(on_cpu[1:], plain[1:], rtol=1e-5, atol=1e-6)


def test_decoding_on_a_cpu_computes_the_angles_of_a_chunk_once(cfg):
    set_mesh(1, 1)
    spec = SamplerSpec(cfg, GenerationConfig(4, 8), (31,), 0, jnp.float32, 3, on_cpu=True)
    programs = make_programs(spec)
    slots = programs.make_slots(2)
    layers = decoder.per_layer_params(random_params(cfg), cfg, jnp.float32)
    text = programs.decode.lower(slots, layers, np.float32(1)).as_text()
    sines = re.findall(r"stablehlo.sine .*tensor<(\S+)>", text)
    assert sines == ["3x2x1x1x4xf32"] * 2, "of 3 steps and 2 slots, once for each kind of layer"


def test_the_noise_of_a_chunk_is_that_of_its_steps(cfg, monkeypatch):
    set_mesh(1, 1)
    spec = SamplerSpec(cfg, GenerationConfig(4, 8), (31,), 0, jnp.float32, 3, on_cpu=True)
    keys = jax.random.split(jax.random.key(3), 2)
    slots = make_programs(spec).make_slots(2).replace(keys=keys, num_drawn=np.array([0, 5]))
    noise = jax.jit(partial(computed_ahead, spec))(slots).noise_BV
    for step, slot in itertools.product(range(3), range(2)):
        key = jax.random.fold_in(keys[slot], slots.num_drawn[slot] + step)
        np.testing.assert_array_equal(noise[step, slot], jax.random.gumbel(key, (cfg.vocab_size,)))

    monkeypatch.setattr(rollout_programs, "NOISE_AT_ONCE", 3 * 2 * cfg.vocab_size - 1)
    assert jax.eval_shape(partial(computed_ahead, spec), slots).noise_BV is None, "too much to hold"


def test_a_transpose_before_a_gradient_of_a_weight_is_not_fused_with_arithmetic():
    def loss(x, scale, matrix):
        return jnp.sum(jnp.sin(matmul(x * scale, matrix)))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 32), (256, 1), (32, 64))]
    text = jax.jit(jax.grad(loss, 2)).lower(*shapes).compile().as_text()
    assert " call(" in text, "XLA has inlined what must stay apart"
    computations = re.findall(r"^%\S+ \([^)]*\) -> [^{]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    moved = [body for body in computations if re.search(r"f32\[32,256\]\{1,0\} copy\(", body)]
    assert moved and not any(" multiply(" in body for body in moved)


def attended(cfg, q_BTNH, k_BKSH):
    mask = jnp.ones((len(q_BTNH), q_BTNH.shape[1], k_BKSH.shape[2]), bool)
    return attention.attend(cfg, q_BTNH, k_BKSH, k_BKSH, mask).sum()


def test_the_product_before_the_backward_pass_of_a_softmax_is_not_fused_with_it(cfg):
    arrays = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 2, 3, 8))
    text = jax.jit(jax.grad(partial(attended, cfg), 0)).lower(*arrays).as_text()
    assert text.count('inlineable = "false"') >= 1
    assert "inlineable" not in jax.jit(partial(attended, cfg)).lower(*arrays).as_text(), "forward it is as it was"


def test_one_query_is_multiplied_with_the_keys_first(cfg):
    arrays = jnp.ones((5, 1, 4, 8)), jnp.ones((5, 2, 3, 8))
    text = jax.jit(partial(attended, cfg)).lower(*arrays).as_text()
    first = re.search(r"dot_general .*: \(tensor<(\S+)xf32>, tensor<(\S+)xf32>\)", text)
    assert first.groups() == ("5x2x3x8", "5x2x2x8"), "keys [B, K, S, H], then queries [B, K, G, H]"


@pytest.mark.parametrize("groups", [1, 4])
def test_scores_of_one_query_on_a_cpu_are_those_of_numpy(groups):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 2, groups, 8)), rng.normal(size=(3, 2, 5, 8))
    scores = attention._scores_on_cpu(jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32))
    expected = np.zeros((3, 2, groups, 5))
    for b, head, query, key in np.ndindex(expected.shape):
        expected[b, head, query, key] = q[b, head, query] @ k[b, head, key]
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


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


def test_layers_apart_are_no_loop_and_their_angles_are_computed_once(cfg):
    scanned, text = (gradient_program(cfg, scan_layers=scan).as_text() for scan in (True, False))
    assert scanned.count(" while(") == text.count(" while(") + 2, "a loop forward, and one backward"
    assert len(re.findall(r" sine\(", text)) == 4, "for each of two kinds of layers one for sin and one for cos"
    joined = re.findall(r"= f32\[3,16,24\]\S* concatenate\((.*?)\)", text)
    assert [operands.count("%") for operands in joined] == [3, 3], "gradients of gate and up: one part for each layer"


@pytest.mark.parametrize("scan_layers", [True, False])
def test_save_all_copies_nothing_that_it_keeps(cfg, scan_layers):
    """jax.checkpoint puts a reduce_precision at each array that it keeps, also where none is rounded."""
    save_all, none = (
        gradient_program(cfg, remat=remat, scan_layers=scan_layers).as_text() for remat in ("save_all", "none")
    )
    assert " reduce-precision(" in none and " reduce-precision(" not in save_all


def test_the_sum_of_the_entropy_is_not_fused_with_its_product():
    set_mesh(1, 1)

    def entropies(hidden, table):
        return vocabulary.token_scores(hidden, table, jnp.zeros(hidden.shape[:2], jnp.int32), None, 1.0).entropy

    text = jax.jit(entropies).lower(jnp.ones((4, 64, 16)), jnp.ones((256, 16))).compile().as_text()
    kernels = text.split("\n\n")
    are_products = [bool(re.search(r"= f32\[4,64,1,256\]\S* multiply\(", kernel)) for kernel in kernels]
    assert any(are_products)
    assert not any(" reduce(" in kernel for kernel, has in zip(kernels, are_products) if has)


def test_layers_apart_are_compiled_for_little_memory(cfg):
    set_mesh(1, 1)
    options = options_of_mesh(update_options(scan_layers=False))
    assert options_of_mesh(update_options(scan_layers=True)) is None
    usual, small = (gradient_program(cfg, given, scan_layers=False) for given in (None, options))
    used, least = (program.memory_analysis().temp_size_in_bytes for program in (usual, small))
    assert least < used, "XLA has not obeyed"


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


def test_a_feed_forward_of_many_tokens_is_not_one_kernel(cfg):
    def fed(tokens, dtype=jnp.float32):
        w = {"gate": jnp.ones((16, 24), dtype), "up": jnp.ones((16, 24), dtype), "down": jnp.ones((24, 16), dtype)}
        x_BTD = jnp.ones((2, tokens, 16), dtype)
        return jax.jit(partial(decoder.gated_mlp, cfg=cfg)).lower(x_BTD, w).as_text()

    set_mesh(1, 1)
    assert "inlineable" in fed(tokens=3)
    assert "inlineable" not in fed(tokens=1), "decoding is as it was"
    assert "inlineable" not in fed(3, jnp.bfloat16), "rounded values have kernels of their own"
