"""The one switch of the fused kernels: what they cannot do, who says so, and when."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from conftest import set_mesh
from test_decode_products import CFG

from tunix_lite.errors import ConfigError
from tunix_lite.inference.live import live_engine
from tunix_lite.kernels.choice import check_fused
from tunix_lite.models import decoder, weights
from tunix_lite.models.lora import LoraConfig, acting_params, adapter_weights
from tunix_lite.models.quantize import init_stored
from tunix_lite.models.weights import init_params
from tunix_lite.resolved.run import check_decode_kernels
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose

GIVEN = {"cfg": CFG, "dtype": jnp.bfloat16, "platform": "cuda", "tp": 1}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"platform": "cpu"}, "they run on NVIDIA GPUs, not on cpu"),
        ({"dtype": jnp.float64}, "they compute in float32 or bfloat16, not in float64"),
        ({"int8": True}, "they read no int8 cache, and rollout.cache is int8"),
        ({"plain_weights": False}, "they multiply with plain weights, and these have LoRA adapters or are quantised"),
        ({"tp": 4}, "they need a tp that divides the 2 key heads, and it is 4"),
        ({"cfg": replace(CFG, head_dim=96)}, "they take heads of 32, 64, 128 or 256, and head_dim is 96"),
        ({"cfg": replace(CFG, num_heads=34)}, "they take up to 16 query heads of one key head, and the model has 17"),
        ({"cfg": replace(CFG, embed_dim=40)}, "they sum over multiples of 16 numbers, and embed_dim is 40"),
        (
            {"tp": 2, "cfg": replace(CFG, mlp_dim=48)},
            "they sum over multiples of 16 numbers, and mlp_dim over tp is 24",
        ),
        ({"has_cutoffs": True}, "they draw from all tokens, and generation.top_k, top_p or min_p cuts some off"),
        ({"penalty": 1.5}, "they change no logits, and generation.repetition_penalty is 1.5"),
    ],
)
def test_what_the_kernels_cannot_do_is_one_line(changes, reason):
    check_fused(**GIVEN)
    with pytest.raises(ValueError) as error:
        check_fused(**GIVEN | changes)
    assert str(error.value) == f"kernels=fused: {reason}; use auto or xla"


@pytest.mark.parametrize(
    "option, value",
    [
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
        ("jax_high_dynamic_range_gumbel", True),
    ],
)
def test_another_generator_is_refused(option, value):
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        with pytest.raises(ValueError, match="they draw the noise of JAX's default generator, and jax.config has"):
            check_fused(**GIVEN)
    finally:
        jax.config.update(option, before)


def test_auto_never_asks_for_them():
    assert RolloutConfig(kernels="fused").is_fused
    assert not RolloutConfig().is_fused and not RolloutConfig(kernels="xla").is_fused
    with pytest.raises(ValueError, match="kernels='fussed'; it is auto, xla or fused"):
        RolloutConfig(kernels="fussed")


def test_a_sampler_on_a_cpu_and_a_server_refuse_them_before_they_compute_anything():
    set_mesh(1, 1)
    how = RolloutConfig(kernels="fused")
    sample = make_sampler(CFG, GenerationConfig(6, 4), (95,), 0, rollout=how)
    with pytest.raises(ValueError, match="kernels=fused: they run on NVIDIA GPUs, not on cpu"):
        next(sample({}, [[1]], jax.random.key(0)))

    class Model:
        cfg = CFG

    with pytest.raises(ValueError, match="rollout.kernels=fused: each request says what is cut off"):
        live_engine(Model(), GenerationConfig(), how)


def test_a_run_with_adapters_or_cut_offs_refuses_them_before_it_starts():
    settings = ["model=gemma3_1b", "training.mixed_precision=bf16", "rollout.kernels=fused"]
    for more, reason in (
        ([], None),
        (["model.lora.rank=8"], "these have LoRA adapters"),
        (["rollout.cache=int8"], "they read no int8 cache"),
    ):
        run = compose([*settings, *more])
        if reason is None:
            check_decode_kernels(run, run.model.architecture, "cuda", 1)
            cut = replace(run, generation=replace(run.generation, top_p=0.9))
            with pytest.raises(ValueError, match="they draw from all tokens"):
                check_decode_kernels(cut, run.model.architecture, "cuda", 1)
            continue
        with pytest.raises(ValueError, match=reason):
            check_decode_kernels(run, run.model.architecture, "cuda", 1)


def test_weights_with_adapters_or_codes_are_not_plain(monkeypatch):
    set_mesh(1, 1)
    base = init_params(decoder.weights(CFG), jax.random.key(0))
    lora = LoraConfig(rank=2)
    adapters = init_params(adapter_weights(decoder.weights(CFG), lora), jax.random.key(0))
    assert weights.are_plain(base)
    assert not weights.are_plain(acting_params(base, adapters, lora))
    coded = init_stored(decoder.weights(CFG), jax.random.key(0), "int8")
    assert not weights.are_plain(coded)
    monkeypatch.setattr("tunix_lite.rollout.generate.current_platform", lambda: "cuda")
    sample = make_sampler(CFG, GenerationConfig(6, 4), (95,), 0, rollout=RolloutConfig(kernels="fused"))
    with pytest.raises(ValueError, match="these have LoRA adapters or are quantised"):
        next(sample(coded, [[1]], jax.random.key(0)))


@pytest.mark.parametrize("name", ["attention", "head", "products"])
def test_each_of_the_three_keys_that_went_says_what_to_type(name):
    with pytest.raises(ConfigError, match=f"rollout.{name}: there is no such setting; write rollout.kernels=fused"):
        compose([f"rollout.{name}=fused"])
