"""PEFT adapters in and out: what PEFT says with them is what we say, and what does not fit is named."""

import json

import jax
import numpy as np
import pytest
from conftest import logits_of, set_mesh
from model_checks import random_adapters, write_model
from test_every_family import tiny

from tunix_lite.models import decoder, hf, peft
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import FAMILIES, GEMMA3, is_wrapped, read_config
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach, pairs
from tunix_lite.models.weights import init_params

CFG = Architecture(32, 5, 16, 4, 2, 8, 24, pattern=("local", "global"), window=5, query_scale=8)
LORA = LoraConfig(rank=3, alpha=6.0, targets=".*/(q|o|down)")


@pytest.fixture
def folder(tmp_path):
    peft.save_adapters(random_adapters(CFG, LORA), CFG, GEMMA3, LORA, tmp_path, "base")
    return tmp_path


def test_adapters_come_back_as_they_went(folder):
    read = peft.read_adapter_config(LoraConfig(adapter=str(folder)), CFG, GEMMA3)
    assert (read.rank, read.alpha) == (3, 6.0)
    for shape in ((1, 1), (2, 2)):
        set_mesh(*shape)
        again = peft.load_adapters(folder, CFG, GEMMA3, read)
        jax.tree.map(np.testing.assert_array_equal, again, jax.tree.map(np.asarray, random_adapters(CFG, LORA)))
    assert sorted(json.loads((folder / peft.CONFIG).read_text())["target_modules"]) == ["down_proj", "o_proj", "q_proj"]


def change_config(folder, **values):
    file = folder / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder, change):
    tensors = hf.read_tensors(folder / peft.TENSORS)
    change(tensors)
    hf.write_tensors(folder / peft.TENSORS, tensors)


NAME = "base_model.model.model.layers.4.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / peft.TENSORS).unlink(), "has no adapter_model.safetensors; a folder in PEFT format has one"),
        (lambda f: change_config(f, init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (lambda f: change_tensors(f, lambda t: t.update({NAME: t[NAME].astype(np.int8)})), f"dtype: {NAME} is I8"),
        (lambda f: change_config(f, r=4), r"shape: .*lora_A.weight is \[3, 24\], and should be \[4, 24\]"),
        (lambda f: change_tensors(f, lambda t: t.pop(NAME)), f"missing: {NAME} "),
        (lambda f: change_tensors(f, lambda t: [t.pop(n) for n in list(t) if ".2.self_attn.q_" in n]),
         "covers only some layers; model.layers.2.self_attn.q_proj has no adapter there"),
        (lambda f: (f / peft.TENSORS).write_bytes((f / peft.TENSORS).read_bytes()[:-9]), "is damaged or cut short"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit_are_refused_by_name(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        peft.read_adapter_config(LoraConfig(adapter=str(folder)), CFG, GEMMA3)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "gpt_oss_20b"])
@pytest.mark.parametrize("targets", ["q|expert_gate|expert_up|expert_down", "expert_up", "expert_down"])
def test_adapters_of_experts_have_pefts_layout_and_come_back(name, targets, tmp_path):
    """PEFT counts experts first in A and last in B (its ParamWrapper.get_delta_weight), and wraps their module once for
    each parameter, for down_proj last."""
    cfg = tiny(name)
    family = FAMILIES["qwen3_moe" if "qwen3" in name else "gpt_oss"]
    lora = LoraConfig(rank=3, alpha=6.0, targets=f".*/({targets})")
    adapters = random_adapters(cfg, lora)
    peft.save_adapters(adapters, cfg, family, lora, tmp_path, "base")
    tensors, config = hf.read_tensors(tmp_path / peft.TENSORS), json.loads((tmp_path / peft.CONFIG).read_text())
    parameters = [f"experts.{x}_proj" for x in ("down", "gate_up") if x.split("_")[-1] in targets]
    assert config["target_parameters"] == parameters
    assert config["target_modules"] == (["q_proj"] if targets[0] == "q" else [])

    experts = "base_model.model.model.layers.0.mlp.experts"
    gate_up = f"{experts}.base_layer" if "|" in targets else experts
    of_layer = hf.flatten(adapters)
    for own in [x for x in targets.split("|") if x != "q"]:
        a, b = (tensors[f"{gate_up if own != 'expert_down' else experts}.lora_{side}.weight"] for side in "AB")
        a, b = a.reshape(cfg.experts.count, config["r"], -1), b.reshape(len(b), config["r"], cfg.experts.count)
        delta = np.einsum("ore,eri->eio", b, a) * config["lora_alpha"] / config["r"]
        if own != "expert_down":
            half = delta.shape[2] // 2
            rows = {
                "expert_gate": [slice(half), slice(0, None, 2)],
                "expert_up": [slice(half, None), slice(1, None, 2)],
            }
            delta = delta[..., rows[own][family.by_turns]]
        path = next(path for path in of_layer if path.endswith(f"{own}/a"))
        ours = np.asarray(of_layer[path][0]) @ np.asarray(of_layer[f"{path[:-1]}b"][0]) * lora.scale
        np.testing.assert_allclose(delta, ours, rtol=1e-5, atol=1e-6)

    read = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path)), cfg, family)
    again = peft.load_adapters(tmp_path, cfg, family, read)
    pairs_again = pairs(again)
    for path, (a, b) in pairs(adapters).items():
        if "expert_" in path:
            other = np.matmul(*map(np.asarray, pairs_again[path])) * read.scale
            np.testing.assert_allclose(
                other, np.matmul(np.asarray(a), np.asarray(b)) * lora.scale, rtol=1e-5, atol=1e-6
            )


# ---- with PEFT itself


SIZES = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {f"linear_{name}": size for name, size in [("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8)]}
DELTA |= {"linear_value_head_dim": 12, "rms_norm_eps": 1e-3}
DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA_MODULES = r".*layers\.\d+\.(self_attn\.q_proj|linear_attn\.(in_proj_qkv|out_proj))"
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
VISION_OF_QWEN = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 40}
VISION_OF_QWEN |= {"num_position_embeddings": 16, "patch_size": 4}
MIXTURE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "rms_norm_eps": 1e-3,
}
OF_GPT = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "pad_token_id": 0, "rms_norm_eps": 1e-3}
OF_GPT |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150.0, "factor": 8.0, "truncate": False}}
OF_GPT["rope_parameters"] |= {"original_max_position_embeddings": 16}
OF_GEMMA4 = {"top_k_experts": 2, "enable_moe_block": True, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
OF_GEMMA4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# class of transformers, settings of the text model, and of the vision tower around it; modules and parameters that PEFT
# adapts
BASES = {
    "Qwen3ForCausalLM": ({"head_dim": 16}, None, ["q_proj", "o_proj", "up_proj"]),
    "Phi3ForCausalLM": ({"pad_token_id": 0}, None, ["qkv_proj", "gate_up_proj", "down_proj"]),
    "Gemma3ForConditionalGeneration": (
        {"head_dim": 16, "sliding_window": 5},
        VISION,
        r".*language_model.*(q|down)_proj",
    ),
    "Qwen3_5ForCausalLM": ({"head_dim": 16} | DELTA, None, DELTA_MODULES),
    "Qwen3_5ForConditionalGeneration": ({"head_dim": 16} | DELTA, VISION_OF_QWEN, DELTA_MODULES),
    "Qwen3MoeForCausalLM": (MIXTURE, None, ["q_proj"], [*EXPERTS, "mlp.gate.weight"]),
    "GptOssForCausalLM": (OF_GPT, None, ["q_proj", "o_proj"], EXPERTS),
    "Qwen3_5MoeForConditionalGeneration": (
        MIXTURE | DELTA | {"shared_expert_intermediate_size": 16},
        VISION_OF_QWEN,
        DELTA_MODULES,
        ["experts.gate_up_proj"],
    ),
    "Gemma4ForCausalLM": (MIXTURE | OF_GEMMA4, None, ["q_proj"], ["experts.down_proj"]),
}
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 80))  # longer than a chunk of a delta net


@pytest.mark.parity
@pytest.mark.parametrize("name", BASES)
def test_peft_says_the_same_with_our_adapters_merged_or_not_and_we_with_its(name, tmp_path):
    """Of a text model, and of a larger one around it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    library = pytest.importorskip("peft")
    text, vision, modules, *parameters = BASES[name]
    kind = getattr(transformers, name)
    text = text | SIZES | {"vocab_size": 97, "num_hidden_layers": 3}
    torch.manual_seed(0)
    config = kind.config_class(**text) if vision is None else kind.config_class(text_config=text, vision_config=vision)
    model = kind(config).eval()

    def draw(model, having: str, spread: float) -> None:
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if having in parameter_name:
                    parameter.add_(torch.randn_like(parameter) * spread)

    def says(model) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.tensor(TOKENS)).logits.numpy()

    draw(model, "", 0.1)
    model.save_pretrained(tmp_path / "base")
    cfg, family = read_config(tmp_path / "base")
    assert is_wrapped(tmp_path / "base", family) == (vision is not None) and not is_wrapped(None, family)
    base = hf.load_params(tmp_path / "base", cfg, family)

    # Ours, read by PEFT, and merged.
    lora = LoraConfig(
        rank=4, alpha=12.0, targets=".*/(q|k|v|qkv|z|b|a|o|gate|up|down|router|expert_gate|expert_up|expert_down)"
    )
    adapters = random_adapters(cfg, lora, 0.2)
    acting = attach(base, adapters, lora)
    ours = logits_of(acting, cfg, TOKENS)
    assert np.abs(ours - logits_of(base, cfg, TOKENS)).max() > 0.1
    (tmp_path / "ours").mkdir()
    peft.save_adapters(adapters, cfg, family, lora, tmp_path / "ours", "base", is_wrapped=vision is not None)
    np.testing.assert_allclose(says(library.PeftModel.from_pretrained(model, tmp_path / "ours")), ours, atol=2e-4)
    (tmp_path / "merged").mkdir()
    write_model(tmp_path / "merged", acting, cfg, family, pad_token_id=0)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    np.testing.assert_allclose(says(merged), ours, atol=2e-4)

    # PEFT's, read here.
    for use_rslora in (False, True):
        fresh = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)
        targets = {"target_modules": modules, "target_parameters": parameters[0] if parameters else None}
        made = library.LoraConfig(r=3, lora_alpha=6, use_rslora=use_rslora, **targets)
        adapted = library.get_peft_model(fresh, made)
        draw(adapted, "lora_", 0.2)
        adapted.save_pretrained(tmp_path / "theirs")
        read = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path / "theirs")), cfg, family)
        loaded = peft.load_adapters(tmp_path / "theirs", cfg, family, read)
        np.testing.assert_allclose(logits_of(attach(base, loaded, read), cfg, TOKENS), says(adapted), atol=2e-4)


def test_fresh_adapters_begin_as_pefts_do():
    """b = 0, and a uniform within 1 / sqrt(inputs)."""
    fresh = init_params(adapter_weights(decoder.weights(CFG), LORA), jax.random.key(0))
    for path, (a, b) in pairs(fresh).items():
        weight = decoder.layer_weights(CFG)[path.rsplit("/")[-1]]
        bound = np.prod(weight.shape[: weight.inputs]) ** -0.5
        assert not np.any(b) and 0.9 * bound < np.abs(a).max() <= bound, path
