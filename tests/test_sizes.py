"""The sizes in conf/model/ are the published ones: parameter counts, shapes, and which meshes divide them."""

import importlib
import json
import re
from functools import cache
from pathlib import Path

import jax
import pytest

from tunix_lite.commands.plan import PlanConfig, make_plans
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import as_computed, read_config
from tunix_lite.models.sizes import shape_line, sized
from tunix_lite.models.source import locate, settings_to_keep
from tunix_lite.models.weights import num_params
from tunix_lite.planning.plans import Plans
from tunix_lite.settings.compose import compose

CONF = Path(__file__).parents[1] / "conf" / "model"
NOT_A_SIZE = {"bundled", "random"}


def vision_of_gemma3(embed_dim: int) -> int:
    """Parameters of what the checkpoints from 4b on hold beside the text model: SigLIP, and the way into its stream.

    A tower of 27 layers, 1152 wide, over 64 x 64 patches of 14 x 14 pixels, with biases everywhere; then a norm and a
    projection without bias.
    """
    D, F = 1152, 4304
    patches = 14 * 14 * 3 * D + D + 64 * 64 * D
    layer = 4 * (D * D + D) + (D * F + F) + (F * D + D) + 2 * 2 * D
    return patches + 27 * layer + 2 * D + D + D * embed_dim


def routed(D: int, E: int, inner: int) -> int:
    """Parameters of a router and its experts in one layer, which have no biases."""
    return D * E + E * 3 * D * inner


def text_of_qwen3_5(L: int, D: int, F: int, N: int, K: int, V: int, head: int, E: int = 0) -> int:
    """Parameters of the text model, from the numbers of its config.json: the files hold more, a vision tower and layers
    that predict further tokens. Every fourth layer has attention with a gate per element; head: 1 if it is not the
    embedding. E: experts of width F, beside a shared one of the same width with a gate."""
    attention = D * 256 * (2 * N + 2 * K + N) + 2 * 256
    channels = 2 * 16 * 128 + V * 128
    delta = D * channels + 4 * channels + 2 * D * V * 128 + 2 * D * V + 2 * V + 128
    layers = L // 4 * (attention + 3 * delta) + L * (3 * D * F + 2 * D)
    layers += L * (routed(D, E, F) + D) if E else 0
    return (1 + head) * 248_320 * D + layers + D


def text_of_ministral3(L: int, D: int, F: int, head: int) -> int:
    """Parameters of the text model, from the numbers of its config.json: the files hold a vision tower, too. head: 1 if
    it is not the embedding."""
    layer = 2 * D * 32 * 128 + 2 * D * 8 * 128 + 3 * D * F + 2 * D
    return (1 + head) * 131_072 * D + L * layer + D


def text_of_gemma4(
    L: int,
    D: int,
    F: int,
    N: int,
    K: int,
    K_global: int,
    period: int,
    readers: int = 0,
    wide: int = 1,
    own: int = 0,
    E: int = 0,
    inner: int = 0,
) -> int:
    """Parameters of the text model, from the numbers of its config.json: the files hold towers, too. K_global: heads of
    the one product that is keys and values of global layers; 0: these have two of K. own: width of per-layer inputs. E:
    experts beside the feed-forward, with three more norms, a scale before the router and a factor for each."""
    total = 262_144 * D + D + (262_144 * L * own + D * L * own + own)
    for i in range(L):
        is_global, reads = i % period == period - 1, i >= L - readers
        H = 512 if is_global else 256
        of_kv = 0 if reads else K_global if is_global and K_global else 2 * K
        attention = D * H * (2 * N + of_kv) + (1 if reads else 2) * H
        feed_forward = 3 * D * F * (wide if reads else 1)
        total += attention + feed_forward + 4 * D + 1 + (2 * D * own + D if own else 0)
        total += routed(D, E, inner) + 4 * D + E if E else 0
    return total


# What the hub counts in the safetensors of each size, a head that is the embedding counted once.
PUBLISHED = {
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472 - vision_of_gemma3(2560),
    "gemma3_12b": 12_187_325_040 - vision_of_gemma3(3840),
    "gemma3_27b": 27_432_406_640 - vision_of_gemma3(5376),
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma4_e2b": text_of_gemma4(35, 1536, 6144, 8, 1, 0, 5, readers=20, wide=2, own=256),
    "gemma4_e4b": text_of_gemma4(42, 2560, 10_240, 8, 2, 0, 6, readers=18, own=256),
    "gemma4_12b": text_of_gemma4(48, 3840, 15_360, 16, 8, 1, 6),
    "gemma4_31b": text_of_gemma4(60, 5376, 21_504, 32, 16, 4, 6),
    "gemma4_26b_a4b": text_of_gemma4(30, 2816, 2112, 16, 8, 2, 6, E=128, inner=704),
    "gpt_oss_20b": 20_914_757_184,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "qwen3_0.6b": 751_632_384 - 151_936 * 1024,  # the file holds the embedding a second time, as the head
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3.5_0.8b": text_of_qwen3_5(24, 1024, 3584, 8, 2, 16, 0),
    "qwen3.5_2b": text_of_qwen3_5(24, 2048, 6144, 8, 2, 16, 0),
    "qwen3.5_4b": text_of_qwen3_5(32, 2560, 9216, 16, 4, 32, 0),
    "qwen3.5_9b": text_of_qwen3_5(32, 4096, 12288, 16, 4, 32, 1),
    "qwen3.5_27b": text_of_qwen3_5(64, 5120, 17408, 24, 4, 48, 1),
    "qwen3.5_35b_a3b": text_of_qwen3_5(40, 2048, 512, 16, 2, 32, 1, E=256),
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.3_70b": 70_553_706_496,
    "ministral3_3b": text_of_ministral3(26, 3072, 9216, 0),
    "ministral3_8b": text_of_ministral3(34, 4096, 14336, 1),
    "ministral3_14b": text_of_ministral3(40, 5120, 16384, 1),
    "mistral0.1_7b": 7_241_732_096,
    "mistral0.3_7b": 7_248_023_552,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "phi4_mini": 3_836_021_760,
    "phi4_14b": 14_659_507_200,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
}

# Of tp = 1, 2, 4 and 8, those that do not divide a size's query heads or vocabulary; the feed-forward always divides.
UNDIVIDED = {
    **{"gemma3_270m": (8,), "gemma3_1b": (8,)},  # 4 heads
    **{"qwen2.5_0.5b": (4, 8), "qwen2.5_1.5b": (8,), "qwen2.5_7b": (8,)},  # 14, 12 and 28
    **{"olmo3_7b": (4, 8), "olmo3_32b": (4, 8)},  # 100,278 tokens
    **{"smollm2_360m": (2, 4, 8), "smollm2_135m": (2, 4, 8)},  # 15 and 9 heads
}
REFUSED = {(name, tp) for name, sizes in UNDIVIDED.items() for tp in sizes}


@cache
def model(name: str):
    """The model's settings, its architecture included, with nothing to download."""
    return compose([f"model={name}", "model.weights=random"]).model


def test_every_size_has_a_published_count():
    assert {file.stem for file in CONF.glob("*.yaml")} - NOT_A_SIZE == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_size_has_as_many_parameters_as_published_and_a_mesh_that_does_not_divide_it_is_refused(name):
    cfg = model(name).architecture
    table = decoder.weights(cfg)
    assert weights.num_params(table) == PUBLISHED[name]
    inner = cfg.experts.mlp_dim if cfg.experts else cfg.mlp_dim
    dims = {"heads": cfg.num_heads, "mlp": inner, "vocab": cfg.vocab_size}  # key/value heads may stay whole
    for tp in (1, 2, 4, 8):
        undivided = [f"{dim}={size} is not a multiple of the mesh's tp={tp}" for dim, size in dims.items() if size % tp]
        assert bool(undivided) == ((name, tp) in REFUSED)
        mesh = jax.sharding.AbstractMesh((1, tp), ("fsdp", "tp"))
        if not undivided:
            weights.check_divisible(table, mesh)
            continue
        with pytest.raises(ValueError, match="|".join(undivided)):
            weights.check_divisible(table, mesh)


def test_the_table_of_sizes_says_what_is_published(monkeypatch):
    monkeypatch.syspath_prepend(CONF.parents[1] / "docs")
    rows = importlib.import_module("model_table").render().splitlines()[2:]
    cells = {row.split("`")[1].removeprefix("model="): [cell.strip() for cell in row.split("|")[3:-1]] for row in rows}
    assert {name: int(parameters.replace(",", "")) for name, (parameters, *_) in cells.items()} == PUBLISHED
    for name, (_, tp, *_) in cells.items():
        assert {n for n in (1, 2, 4, 8) if (name, n) not in REFUSED} == set(map(int, tp.split(", "))) & {1, 2, 4, 8}
    # by hand: 7,615,616,512 parameters of Qwen 2.5 7B are 15.23 GB; 28 layers project with 3584 x (3584 + 512 + 512 +
    # 3584 + 3 x 18944) elements each, in int8 8.25 bits and in nf4 4.5 bits each, the rest in 16
    projected = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    rest = 2 * (PUBLISHED["qwen2.5_7b"] - projected)
    said = [f"{(rest + bits / 8 * projected) / 1e9:.2f}" for bits in (16, 8.25, 4.5)]
    assert cells["qwen2.5_7b"][2:] == said


GEMMA3_4B_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MINISTRAL3_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
    "type": "yarn",
}  # fmt: skip
OLMO3_ROPE = {
    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
    "original_max_position_embeddings": 8192, "rope_type": "yarn",
}  # fmt: skip
GPT_OSS_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
    "truncate": False,
}  # fmt: skip
PHI4_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283,
    20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7,
    32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
AS_PUBLISHED = {  # what the hub's config.json says that the decoder reads, in the spelling of the day
    "gemma3_1b": {
        "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "gemma3_4b": {"model_type": "gemma3", "text_config": GEMMA3_4B_TEXT, "vision_config": {"hidden_size": 1152}},
    "qwen2.5_0.5b": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "llama3.2_1b": {
        "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "rope_type": "llama3"} | LLAMA3_ROPE, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "ministral3_8b": {
        "model_type": "mistral3", "vision_config": {"model_type": "pixtral"}, "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
            "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_parameters": MINISTRAL3_ROPE, "sliding_window": None, "tie_word_embeddings": False,
            "vocab_size": 131072,
        },
    },
    "olmo3_7b": {
        "model_type": "olmo3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06, "rope_scaling": OLMO3_ROPE, "rope_theta": 500000, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 100278,
    },
    "phi4_mini": {
        "model_type": "phi3", "attention_bias": False, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": PHI4_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
        "rope_scaling": GPT_OSS_ROPE, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "smollm3_3b": {
        "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 128256,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_a_published_config_json_is_the_size_that_the_yaml_says(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(AS_PUBLISHED[name]))
    cfg, family = read_config(tmp_path)
    run = compose([f"model={name}"])
    assert family.name == run.model.family
    assert as_computed(cfg) == as_computed(run.model.architecture)


# ---- model.target_params: shapes by one rule


@cache
def base() -> Architecture:
    return compose(["model=random"]).model.architecture


def by_hand(cfg: Architecture) -> int:
    """The numbers of a Gemma 3 decoder: an embedding, and in each layer four products of attention, three of the
    feed-forward, four norms of the width and two of a head; one norm at the end."""
    width, heads, kv, dim = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    layer = width * dim * (2 * heads + 2 * kv) + 3 * width * cfg.mlp_dim + 4 * width + 2 * dim
    return cfg.vocab_size * width + cfg.num_layers * layer + width


COUNTS = {"5M": 5e6, "60M": 60e6, "1.2B": 1.2e9, "1M": 1e6, "20m": 20e6, "124M": 124e6, "350000000": 350e6, "7B": 7e9}


@pytest.mark.parametrize("asked", COUNTS)
@pytest.mark.parametrize("vocab", [512, 8192, 49_152])
def test_a_model_has_as_many_parameters_as_asked(asked, vocab):
    if vocab == 49_152 and asked in ("1M", "5M"):  # the embedding alone has as many
        says = f"target_params={asked}: no shape of the rule .* 49,152 tokens; the nearest has .*: model.target_params="
        with pytest.raises(ValueError, match=says) as error:
            sized(base(), asked, vocab)
        nearest = int(re.search(r"model.target_params=(\d+)", str(error.value))[1])
        assert num_params(decoder.weights(sized(base(), nearest, vocab))) == nearest > COUNTS[asked]
        return
    cfg = sized(base(), asked, vocab)
    count = num_params(decoder.weights(cfg))
    assert count == by_hand(cfg) and count == pytest.approx(COUNTS[asked], rel=0.03)
    assert cfg.vocab_size == vocab and cfg.norm_plus_one == base().norm_plus_one and cfg.max_positions == 512
    assert cfg.num_heads * cfg.head_dim == cfg.embed_dim and cfg.num_heads == 4 * cfg.num_kv_heads
    assert 2 * cfg.embed_dim <= cfg.mlp_dim <= 4 * cfg.embed_dim and cfg.query_scale == cfg.head_dim
    assert set(cfg.kinds) == {"global"}, "stories are longer than the window of the bundled model"


def test_a_number_may_be_written_in_any_way():
    shapes = [locate(compose(["model=random", f"model.target_params={x}"]).model).cfg for x in ("5e6", "5000000", "5m")]
    assert shapes[0] == shapes[1] == shapes[2]


def test_depth_and_width_grow_together():
    shapes = [sized(base(), count, 8192) for count in ("5M", "20M", "60M", "350M", "1.2B", "7B")]
    widths, depths = [cfg.embed_dim for cfg in shapes], [cfg.num_layers for cfg in shapes]
    assert widths == sorted(widths) and depths == sorted(depths)
    assert all(32 <= width / depth <= 128 for width, depth in zip(widths, depths))


@pytest.mark.parametrize("family", ["llama3.2_1b", "gemma4_e2b", "qwen3_0.6b", "qwen3.5_0.8b", "smollm2_135m"])
def test_any_family_has_any_size(family):
    model = compose([f"model={family}", "model.weights=random", "model.target_params=5M"]).model
    found = locate(model)
    assert num_params(decoder.weights(found.cfg)) == pytest.approx(5e6, rel=0.03)
    assert found.cfg.activation == model.architecture.activation and found.cfg.vocab_size == 512


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=random", "model.target_params=many"], "model: target_params=many: write a number such as 5M, 1.2B"),
        (["model=random", "model.target_params=0"], "model: target_params=0: write a number such as"),
        (["model=random", "model.target_params=10K"], "the nearest has 67,936: model.target_params=67936"),
        (
            ["model=random", "model.target_params=5M", "model.architecture.num_layers=2", "seed=1"],
            "model.architecture.num_layers=2 would change nothing; write model=random model.target_params=5M seed=1, or",
        ),
        (["model.target_params=5M"], "weights=bundled have a size; model=random model.target_params=5M"),
    ],
)
def test_a_wrong_number_of_parameters_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        locate(compose(words).model)


def test_the_shape_is_shown_and_kept():
    run = compose(["model=random", "model.target_params=5M"])
    found = locate(run.model)
    plans = make_plans(run, PlanConfig(target="h100x1", analytic=True), [])
    count = num_params(decoder.weights(found.cfg))
    lines = "\n".join(Plans(plans.plans).short_form())
    assert f"model      {count:,} parameters" in lines and f"shape      {shape_line(found.cfg)}" in lines
    kept = json.loads(json.dumps(settings_to_keep(run.model, found, 0)))["model"]
    assert kept["target_params"] is None, "a later tokenizer or rule must not change a model that is trained"
    assert kept["architecture"]["num_layers"] == found.cfg.num_layers
