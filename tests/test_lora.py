"""LoRA and QLoRA: fresh adapters change nothing, only adapters learn, and bytes are what they should be."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import logits_of, random_params, set_mesh
from model_checks import check_sampled, random_adapters, sampled
from test_every_family import tiny

from tunix_lite.basics.types import Batch, TrainState
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import make_policy, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach, pairs
from tunix_lite.models.quantize import quantize, stored_table
from tunix_lite.models.weights import Lora, Weight, dense, init_params, nf4_levels, project
from tunix_lite.parallel.mesh import put
from tunix_lite.rollout.generate import make_prepare

CFG = Architecture(64, 2, 64, 4, 2, 16, 128, pattern=("global",), window=None, query_scale=16)
LORA = LoraConfig(rank=4, alpha=8.0, base="fp32")


@cache
def base_in_numpy(storage: str):
    """Random weights stored as a base would be."""
    mesh = set_mesh(1, 1)
    wanted = stored_table(decoder.weights(CFG), storage)

    packed = jax.jit(lambda p: jax.tree.map(quantize, p, wanted))
    with jax.set_mesh(mesh):
        return jax.tree.map(np.asarray, packed(random_params(CFG, 0, 0.15)))


def base_of(storage: str = "fp32"):
    """The same on the current mesh."""
    mesh = jax.sharding.get_mesh()
    values = base_in_numpy(storage)
    jax.set_mesh(mesh)
    return jax.tree.map(jax.device_put, values, weights.shardings(stored_table(decoder.weights(CFG), storage)))


def adapters_of(lora: LoraConfig = LORA):
    return random_adapters(CFG, lora, 0.1)


def logits(params, tokens):
    return logits_of(params, CFG, tokens)


TOKENS = np.random.default_rng(0).integers(0, 64, (4, 12))


@pytest.mark.parametrize("storage", [pytest.param("bf16", marks=pytest.mark.wide), "nf4"])
def test_fresh_adapters_change_nothing_bit_for_bit(storage):
    base = base_of(storage)
    fresh = init_params(adapter_weights(decoder.weights(CFG), LORA), jax.random.key(1))
    with_adapters = attach(base, fresh, LORA)
    np.testing.assert_array_equal(logits(with_adapters, TOKENS), logits(base, TOKENS))


def test_an_adapter_adds_scale_times_a_b():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 2, 6)), rng.normal(size=(2, 6, 4, 5))
    a, b = rng.normal(size=(2, 6, 3)), rng.normal(size=(3, 4, 5))
    expected = np.einsum("bij,ijkl->bkl", x, w + 0.5 * np.einsum("ijr,rkl->ijkl", a, b))
    leaf = Lora(*(jnp.asarray(v) for v in (w, a, b)), scale=0.5)
    np.testing.assert_allclose(project(jnp.asarray(x), leaf, inputs=2), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dense(leaf, 2), w + 0.5 * np.einsum("ijr,rkl->ijkl", a, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape, storage", [pytest.param((1, 4), "int8", marks=pytest.mark.wide), ((2, 2), "nf4")])
def test_the_mesh_does_not_change_what_adapters_say(shape, storage):
    expected = np.asarray(logits(attach(base_of(storage), adapters_of(), LORA), TOKENS))
    set_mesh(*shape)
    np.testing.assert_allclose(logits(attach(base_of(storage), adapters_of(), LORA), TOKENS), expected, atol=2e-5)


@pytest.mark.parametrize(
    "targets, message",
    [
        ("attention/q", "matches no weight; paths look like layers/q, layers/k, layers/v"),
        (".*", "matches embed, which is not a projection"),
        (".*/(q|q_norm)", "which is not a projection"),
    ],
)
def test_targets_that_are_no_projections_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        adapter_weights(decoder.weights(CFG), LoraConfig(rank=2, targets=targets))


# ---- quantised bases


def test_nf4_has_the_levels_that_were_published():
    published = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
                 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip
    np.testing.assert_allclose(nf4_levels(), published, atol=1e-6)


@pytest.mark.parametrize("storage, levels", [("int8", 255), ("nf4", 16)])
def test_every_element_is_the_nearest_level_of_its_block(storage, levels):
    values = np.random.default_rng(0).normal(size=(256, 6)).astype(np.float32)
    values[:64, 0] = 0.0  # a block without a scale
    like = stored_table({"w": Weight(values.shape, ("embed", "mlp"))}, storage)["w"]
    packed = quantize(jnp.asarray(values), like)
    block = {"int8": 128, "nf4": 64}[storage]
    grid = np.arange(-127, 128) / 127 if storage == "int8" else np.asarray(nf4_levels(), np.float64)
    assert len(grid) == levels
    expected = np.empty_like(values)
    for column in range(values.shape[1]):
        for start in range(0, 256, block):
            part = values[start : start + block, column].astype(np.float64)
            largest = np.abs(part).max() or 1.0
            nearest = np.abs(part[:, None] / largest - grid[None]).argmin(axis=1)
            expected[start : start + block, column] = grid[nearest] * largest
    np.testing.assert_allclose(dense(packed, 1), expected, atol=1e-5)
    bits = packed.codes.nbytes * 8 / values.size
    assert bits == {"int8": 8, "nf4": 4}[storage]


# ---- training


def batch(micro_batches: int = 1) -> Batch:
    mask = np.ones_like(TOKENS, bool)
    weight = np.where(np.arange(12) > 4, 1 / 28, 0.0) * np.ones((4, 1))
    whole = Batch(TOKENS.astype(np.int32), mask, weight.astype(np.float32))
    return RowLayout(num_micro_batches=micro_batches).lay_out(whole)[0]


class Likelihood:
    """The negative log-likelihood of the batch."""

    def loss(self, scores, batch):
        return -jnp.sum(batch.loss_weight * scores.logprobs), {}


def one_update(lora: LoraConfig, frozen, micro_batches: int = 1, steps: int = 1, **scoring):
    policy = make_policy(CFG, None, 1.0, **scoring)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), 10)
    params = adapters_of(lora)
    state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
    train_step = TrainStep(policy, Likelihood(), optimizer, lora, seed=5)
    losses = []
    for _ in range(steps):
        state, metrics = train_step(state, frozen, batch(micro_batches))
        losses.append(float(metrics["train/loss"]))
    return state, losses


def test_only_adapters_learn_and_the_base_stays():
    frozen = base_of("nf4")
    before = jax.tree.map(np.asarray, frozen)
    state, losses = one_update(LORA, frozen, steps=3)
    assert losses[2] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, frozen, before)
    for path, (a, b) in pairs(state.params).items():
        first = pairs(adapters_of())[path]
        assert not np.array_equal(a, first[0]) and not np.array_equal(b, first[1]), path
    moments = [x for x in jax.tree.leaves(state.opt_state) if getattr(x, "ndim", 0)]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(state.params))


def test_gradients_of_adapters_are_those_of_the_merged_weight():
    """dL/da = scale * dL/dW b^T and dL/db = scale * a^T dL/dW, by the chain rule from the gradient of plain weights."""
    lora = dataclasses.replace(LORA, targets=".*/gate")
    base, adapters = base_of(), adapters_of(lora)
    mask = np.ones_like(TOKENS, bool)

    def loss(params):
        return -jnp.sum(token_logprobs(params, TOKENS, mask, cfg=CFG))

    def with_gate(gate):
        return base | {"layers": base["layers"] | {"gate": gate}}

    a, b = pairs(adapters)["layers/gate"]
    whole = jax.jit(jax.grad(lambda gate: loss(with_gate(gate))))(base["layers"]["gate"] + lora.scale * a @ b)
    ours = jax.jit(jax.grad(lambda p: loss(attach(base, p, lora))))(adapters)["layers"]["gate"]
    np.testing.assert_allclose(ours["a"], lora.scale * whole @ b.swapaxes(1, 2), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(ours["b"], lora.scale * a.swapaxes(1, 2) @ whole, rtol=1e-3, atol=1e-3)


def test_with_adapters_the_backward_pass_finds_each_product_once():
    """Of each of seven weights the sum of two products, and beside it the thin one, rank numbers of a token. The loop
    over layers hands them on. With both products in place of their sum it would be 1.7 times as much."""
    base, mask = base_of(), np.ones_like(TOKENS, bool)

    def num_kept(params_of, trained):
        loss = lambda params: jnp.sum(token_logprobs(params_of(params), TOKENS, mask, cfg=CFG))  # noqa: E731
        equations = jax.make_jaxpr(jax.grad(loss))(trained).eqns
        loops = [one for one in equations if one.primitive.name == "scan" and one.params["length"] == CFG.num_layers]
        return sum(one.aval.size for one in loops[0].outvars[loops[0].params["num_carry"] :])

    with_adapters = num_kept(lambda params: attach(base, params, LORA), adapters_of())
    assert with_adapters == num_kept(lambda params: params, base) + CFG.num_layers * TOKENS.size * 7 * LORA.rank


def test_dropout_does_not_depend_on_micro_batches_and_differs_by_step():
    dropping = LoraConfig(rank=4, alpha=8.0, base="fp32", dropout=0.5, targets=".*/(q|down)")
    frozen = base_of()
    whole, first = one_update(dropping, frozen, steps=2)
    parts, second = one_update(dropping, frozen, micro_batches=2, steps=2)
    np.testing.assert_allclose(first, second, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole.params, parts.params)
    _, without = one_update(dataclasses.replace(dropping, dropout=0.0), frozen)
    assert abs(first[0] - without[0]) > 1e-3


def test_sampling_and_scoring_agree_under_adapters():
    acting = attach(base_of("nf4"), adapters_of(), LORA)
    rollout = sampled(CFG, acting, eos=tuple(range(1, 12)))
    check_sampled(rollout, jax.jit(partial(token_logprobs, cfg=CFG))(acting, rollout.tokens, rollout.token_mask))


@pytest.mark.parametrize("name, layers", [("qwen3.5_0.8b", [3]), ("qwen3_30b_a3b", [0, 1])])
def test_adapters_of_some_layers_are_prepared_by_themselves(name, layers):
    """As a training client samples: no delta layer has q, k or v, and a mixture's router has no adapter."""
    cfg = tiny(name)
    set_mesh(1, 1)
    declared = adapter_weights(decoder.weights(cfg), LoraConfig(rank=2, targets=".*/(q|k|v)"))
    adapters = init_params(declared, jax.random.key(0))
    by_layer = make_prepare(cfg, jnp.float32, gather=True, may_join=False)(adapters)["layers"]
    assert [i for i, layer in enumerate(by_layer) if layer] == layers and len(by_layer) == cfg.num_layers
    stack = adapters["layers"].get("global", adapters["layers"])
    for place, i in enumerate(layers):
        jax.tree.map(
            lambda one, whole, place=place: np.testing.assert_array_equal(one, whole[place]), by_layer[i], stack
        )
