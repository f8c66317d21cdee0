"""Llama's relatives: yarn and longrope by hand-worked numbers, OLMo 3 and SmolLM 3 in rows, slots and on a mesh, and
the fused tensors of Phi."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import logits_of, random_params, set_mesh
from model_checks import check_sampled, groups, layout_of, publish, random_adapters, sampled, write_model
from test_every_family import SIZES

from tunix_lite.learner.policy import batch_scores, token_logprobs
from tunix_lite.models import hf, peft, rope
from tunix_lite.models.architecture import Architecture, LongRope, Yarn
from tunix_lite.models.families import FAMILIES, LLAMA, as_computed, config_json, read_config
from tunix_lite.models.lora import LoraConfig
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import check_generation

PLAIN = SIZES | LLAMA.flags | {"num_layers": 3, "tied": False, "rope_theta_local": 1e4, "rope_theta_global": 1e4}
OLMO3 = Architecture(
    **PLAIN
    | {
        "post_norms": True,
        "pre_norms": False,
        "qk_norm": True,
        "qk_norm_whole": True,
        "yarn": Yarn(8.0, 8, amplitude=1.2),
    }
    | {"pattern": ("local", "global"), "window": 6}
)
SMOLLM3 = Architecture(**PLAIN | {"pattern": ("global", "unrotated")})
LONG = LongRope((1.0, 1.5, 2.0), (1.0, 8.0, 30.0), 16, 64, 1.1)
PHI3 = Architecture(**PLAIN | {"num_layers": 2, "max_positions": 16, "rope_share": 0.75, "longrope": LONG})
MINISTRAL3 = Architecture(**PLAIN | {"yarn": Yarn(4.0, 16, amplitude=1.5, query_growth=0.1)})


# ---- rotary positions


def test_yarn_slows_pairs_that_turn_seldom():
    """Wavelengths of 4 pairs to base 10,000: frequencies 1, 0.1, 0.01, 0.001. Over 2,048 tokens 32 turns belong to pair
    1.008 and one turn to pair 2.513, so the slower turning begins at pair 1 and is whole at pair 3."""
    slowed = Yarn(4.0, 2048).scaled(np.array([1, 0.1, 0.01, 0.001]), 10_000.0)
    np.testing.assert_allclose(slowed, [1, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.001 / 4], rtol=1e-12)


def test_angles_of_yarn_are_longer_and_queries_grow_with_their_position():
    positions = np.array([[0, 3, 15, 16, 48]])
    sin, cos, growth = rope.rope_angles(MINISTRAL3, positions, "global")
    frequency, _ = MINISTRAL3.rope("global")
    angles = positions[..., None, None] * frequency
    np.testing.assert_allclose(sin, 1.5 * np.sin(angles), atol=1e-6)
    np.testing.assert_allclose(cos, 1.5 * np.cos(angles), atol=1e-6)
    expected = [1, 1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(4)]
    np.testing.assert_allclose(np.ravel(growth), expected, rtol=1e-6)


@pytest.mark.parametrize("most, factors", [(16, [1.0, 1.5, 2.0]), (17, [1.0, 8.0, 30.0])])
def test_longrope_takes_its_list_by_the_longest_sequence_of_the_architecture(most, factors):
    cfg = Architecture(**{**vars(PHI3), "max_positions": most})
    frequency, amplitude = cfg.rope("global")
    expected = [1e4 ** (-pair / 3) / factor for pair, factor in enumerate(factors)]
    np.testing.assert_allclose(frequency, expected, rtol=1e-12)
    assert amplitude == 1.1


def test_a_run_that_is_too_long_for_the_short_factors_is_refused_with_the_setting():
    run = compose(["model=phi4_mini", "generation.max_prompt_length=4000", "generation.max_new_tokens=97"])
    with pytest.raises(ValueError, match="made for 4096; model.architecture.max_positions=131072 takes factors of"):
        check_generation(run, run.model.architecture)


# ---- rows, slots and a mesh


# test_every_family.py (make wide) has the other families and meshes.
def test_shared_prompts_are_alone_and_a_mesh_changes_nothing():
    cfg, batch = OLMO3, groups()
    scored = jax.jit(partial(token_logprobs, cfg=cfg))(random_params(cfg), batch.tokens, batch.token_mask)
    set_mesh(1, 4)  # tp divides the heads, which the norms of OLMo 3 go over
    rows, packed = layout_of("prefix").lay_out(batch)
    scores = jax.jit(lambda params: batch_scores(params, rows, cfg=cfg, temperature=1.0, dtype=jnp.float32).logprobs)
    counts = batch.loss_weight > 0
    np.testing.assert_allclose(packed.back(scores(random_params(cfg)))[counts], np.asarray(scored)[counts], atol=1e-5)


def test_what_is_sampled_is_what_is_scored():
    params = random_params(OLMO3)
    rollout = sampled(OLMO3, params, generations=1)
    check_sampled(rollout, jax.jit(partial(token_logprobs, cfg=OLMO3))(params, rollout.tokens, rollout.token_mask))


def test_unrotated_layers_do_not_know_positions_and_rotated_ones_do():
    """Two tokens before the last change places: only rotation tells which was first."""
    tokens = np.array([[5, 6, 7], [6, 5, 7]])
    for kind, is_rotated in (("unrotated", False), ("global", True)):
        cfg = Architecture(**vars(SMOLLM3) | {"pattern": (kind,), "num_layers": 1})
        one, other = logits_of(random_params(cfg), cfg, tokens)[:, -1]
        assert (np.abs(one - other).max() > 1e-3) == is_rotated
        assert is_rotated or np.abs(one - other).max() < 1e-5


# ---- files


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_fused_tensors_are_rows_of_queries_keys_and_values_and_shards_read_their_slices(mesh, tmp_path):
    set_mesh(*mesh)
    params = random_params(PHI3)
    write_model(tmp_path, params, PHI3, FAMILIES["phi3"])
    held, layers = hf.read_tensors(tmp_path / hf.SINGLE), params["layers"]
    rows = [np.asarray(layers[name][1]).reshape(16, -1).T for name in ("q", "k", "v")]
    np.testing.assert_array_equal(held["model.layers.1.self_attn.qkv_proj.weight"], np.concatenate(rows))
    rows = [np.asarray(layers[name][1]).T for name in ("gate", "up")]
    np.testing.assert_array_equal(held["model.layers.1.mlp.gate_up_proj.weight"], np.concatenate(rows))
    assert not [name for name in held if "q_proj" in name or ("up_proj" in name and "gate_up" not in name)]
    cfg, family = read_config(tmp_path)
    assert as_computed(cfg) == as_computed(PHI3) and cfg.max_positions == 16
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, cfg, family), params)


def test_adapters_of_fused_tensors_are_one_pair_that_computes_the_same(tmp_path):
    lora = LoraConfig(rank=2, alpha=6.0, targets=".*/(q|v|o|up)")
    adapters = random_adapters(PHI3, lora, 1.0)
    peft.save_adapters(adapters, PHI3, FAMILIES["phi3"], lora, tmp_path, "base")
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert config["target_modules"] == ["gate_up_proj", "o_proj", "qkv_proj"]
    assert (config["r"], config["lora_alpha"]) == (4, 12.0)  # the same scale, 3
    tensors = hf.read_tensors(tmp_path / peft.TENSORS)

    def merged(module: str) -> np.ndarray:
        name = f"base_model.model.model.layers.1.{module}"
        return tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]

    def own(name: str, layer: int, of=adapters) -> np.ndarray:
        pair = of["layers"][name]
        a, b = (np.asarray(pair[side][layer]) for side in "ab")
        return (a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)).T

    # 32 rows of queries, 16 of keys, 16 of values; 24 of gate, 24 of up.
    np.testing.assert_allclose(merged("self_attn.qkv_proj")[:32], own("q", 1), atol=1e-5)
    np.testing.assert_array_equal(merged("self_attn.qkv_proj")[32:48], 0)
    np.testing.assert_allclose(merged("self_attn.qkv_proj")[48:], own("v", 1), atol=1e-5)
    np.testing.assert_array_equal(merged("mlp.gate_up_proj")[:24], 0)
    np.testing.assert_allclose(merged("mlp.gate_up_proj")[24:], own("up", 1), atol=1e-5)
    np.testing.assert_allclose(merged("self_attn.o_proj"), own("o", 1), atol=1e-5)

    # Read again, every weight of a fused tensor has a pair.
    read = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path)), PHI3, FAMILIES["phi3"])
    assert read.targets == "layers/q|layers/k|layers/v|layers/o|layers/gate|layers/up" and read.scale == 3
    again = peft.load_adapters(tmp_path, PHI3, FAMILIES["phi3"], read)
    for name in ("q", "v", "o", "up"):
        np.testing.assert_allclose(own(name, 0, again), own(name, 0), atol=1e-5)
    np.testing.assert_array_equal(own("k", 0, again), 0)


def test_ministral_is_read_for_its_text_part(tmp_path):
    params = random_params(MINISTRAL3)
    write_model(tmp_path, params, MINISTRAL3, FAMILIES["ministral3"])
    others = ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight")
    publish(tmp_path, others, "language_model.", model_type="mistral3")
    cfg, family = read_config(tmp_path)
    assert as_computed(cfg) == as_computed(MINISTRAL3)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, cfg, family), params)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("mistral", {"rope_parameters": YARN}, "rope_type 'yarn' is not supported; supported is default"),
        ("ministral3", {"sliding_window": 8}, "sliding_window=8 is not supported"),
        (
            "ministral3",
            {"rope_parameters": YARN, "original_max_position_embeddings": 8},
            "are one setting in two places",
        ),
        ("mistral", {"is_causal": False}, "is_causal: a token sees those before it only"),
        ("phi3", {"rope_parameters": LONGROPE | {"long_factor": 3}}, "long_factor=3; it is a list of numbers"),
        (
            "phi3",
            {"rope_parameters": LONGROPE},
            "its lists have 3 numbers, and partial_rotary_factor=1.0 of head_dim=8",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must hold 3 entries, each 1 or 0"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "layer_types: sliding_attention is not supported"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": YARN | {"factor": 2.0}, "full_attention": YARN}},
            "of layers w",
        ),
    ],
)
def test_what_is_not_computed_is_refused_with_file_and_key(name, change, message, tmp_path):
    cfgs = {"ministral3": MINISTRAL3, "phi3": PHI3, "smollm3": SMOLLM3, "olmo3": OLMO3}
    cfg = cfgs.get(name, Architecture(**PLAIN))
    (tmp_path / "config.json").write_text(json.dumps(config_json(cfg, FAMILIES[name]) | change))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "keys, amplitude",
    [
        ({}, 1 + 0.1 * math.log(4)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (1 + 0.2 * math.log(4)) / (1 + 0.05 * math.log(4))),
        ({"attention_factor": 1.25, "mscale": 2.0, "mscale_all_dim": 0.5}, 1.25),
    ],
)
def test_the_amplitude_of_yarn_follows_from_its_keys(keys, amplitude, tmp_path):
    change = {"rope_parameters": YARN | keys}
    (tmp_path / "config.json").write_text(json.dumps(config_json(MINISTRAL3, FAMILIES["ministral3"]) | change))
    np.testing.assert_allclose(read_config(tmp_path)[0].yarn.amplitude, amplitude, rtol=1e-12)
