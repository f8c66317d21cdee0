"""The one switch of the fused kernels: what they cannot do, who says so, and when."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from conftest import set_mesh
from test_decode_products import CFG

from tunix_lite.models.architecture import Yarn
from tunix_lite.models.kernel_choice import check_fused
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import _check_decode_kernels

OTHERS = (
    *(replace(CFG, attn_gate=True), replace(CFG, rope_share=0.75), replace(CFG, qk_norm_whole=True, pre_norms=False)),
    *(
        replace(CFG, value_norm=True),
        replace(CFG, yarn=Yarn(4.0, 16, query_growth=0.1)),
        replace(CFG, layer_scalar=True),
    ),
    replace(CFG, pattern=("global", "unrotated")),
)
GIVEN = {"cfg": CFG, "dtype": jnp.bfloat16, "platform": "cuda", "tp": 1}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"platform": "cpu"}, "they run on NVIDIA GPUs, not on cpu"),
        ({"int8": True}, "they read no int8 cache, and rollout.cache is int8"),
        ({"plain_weights": False}, "they multiply with plain weights, and these have LoRA adapters or are quantised"),
        ({"tp": 4}, "they need a tp that divides the 2 key heads, and it is 4"),
        ({"cfg": replace(CFG, head_dim=96)}, "they take heads of 32, 64, 128 or 256, and head_dim is 96"),
        ({"cfg": replace(CFG, embed_dim=40)}, "they sum over multiples of 16 numbers, and embed_dim is 40"),
        ({"tp": 2, "cfg": replace(CFG, mlp_dim=48)}, "they sum over multiples of 16 numbers, and mlp_dim over tp is 2"),
        *(({"cfg": cfg}, "they compute attention without gate") for cfg in OTHERS),
        ({"has_cutoffs": True}, "they draw from all tokens, and generation.top_k, top_p or min_p cuts some off"),
    ],
)
def test_what_the_kernels_cannot_do_is_one_line(changes, reason):
    check_fused(**GIVEN)
    with pytest.raises(ValueError) as error:
        check_fused(**GIVEN | changes)
    text = str(error.value)
    assert text.startswith(f"kernels=fused: {reason}") and text.endswith("; use auto or xla")


@pytest.mark.parametrize(
    "option, value",
    [
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
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


def test_a_sampler_on_a_cpu_refuses_them_before_it_computes_anything():
    set_mesh(1, 1)
    how = RolloutConfig(kernels="fused")
    sample = make_sampler(CFG, GenerationConfig(6, 4), (95,), 0, rollout=how)
    with pytest.raises(ValueError, match="kernels=fused: they run on NVIDIA GPUs, not on cpu"):
        next(sample({}, [[1]], jax.random.key(0)))


def test_a_run_with_adapters_or_cut_offs_refuses_them_before_it_starts():
    settings = ["model=gemma3_1b", "training.mixed_precision=bf16", "rollout.kernels=fused"]
    run = compose(settings)
    cfg = run.model.architecture
    _check_decode_kernels(run, cfg, "cuda", 1)
    cut = replace(run, generation=replace(run.generation, top_p=0.9))
    adapted, int8 = (compose([*settings, more]) for more in ("model.lora.rank=8", "rollout.cache=int8"))
    for other, reason in ((cut, "draw from all"), (adapted, "these have LoRA"), (int8, "read no int8")):
        with pytest.raises(ValueError, match=reason):
            _check_decode_kernels(other, cfg, "cuda", 1)
