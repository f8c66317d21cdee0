"""PEFT adapters in and out: what PEFT says with them is what we say, and what does not fit is named."""

import json

import jax
import numpy as np
import pytest
from conftest import logits_of, set_mesh

from tunix_lite.models import decoder, hf, peft
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import GEMMA3, QWEN3, config_json, is_wrapped, read_config
from tunix_lite.models.lora import LoraConfig, adapter_weights, attach, pairs
from tunix_lite.models.weights import init_params, is_weight
from tunix_lite.parallel.mesh import put

CFG = Architecture(32, 5, 16, 4, 2, 8, 24, pattern=("local", "global"), window=5, query_scale=8)
LORA = LoraConfig(rank=3, alpha=6.0, targets=".*/(q|o|down)")


def random_adapters(cfg, lora, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: put(rng.normal(0, 0.3, w.shape).astype(np.float32), *w.axes),
        adapter_weights(decoder.weights(cfg), lora),
        is_leaf=is_weight,
    )


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
        (lambda f: (f / peft.CONFIG).write_text("{"), "adapter_config.json is not JSON"),
        (lambda f: change_config(f, peft_type="IA3"), "peft_type is 'IA3'; supported is 'LORA'"),
        (lambda f: change_config(f, use_dora=True), "use_dora=True is not supported"),
        (lambda f: change_config(f, init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (lambda f: change_tensors(f, lambda t: t.update({NAME: t[NAME].astype(np.int8)})), f"dtype: {NAME} is I8"),
        (lambda f: change_config(f, r=4), r"shape: .*lora_A.weight is \[3, 24\], and should be \[4, 24\]"),
        (lambda f: change_tensors(f, lambda t: t.pop(NAME)), f"missing: {NAME} "),
        (lambda f: change_tensors(f, lambda t: t.update(other=np.zeros(2, np.float32))), r"unexpected: other \[2\]"),
        (lambda f: change_tensors(f, lambda t: [t.pop(n) for n in list(t) if ".2.self_attn.q_" in n]),
         "covers only some layers; model.layers.2.self_attn.q_proj has no adapter there"),
        (lambda f: (f / peft.TENSORS).write_bytes((f / peft.TENSORS).read_bytes()[:-9]), "is damaged or cut short"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit_are_refused_by_name(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        peft.read_adapter_config(LoraConfig(adapter=str(folder)), CFG, GEMMA3)


# ---- with PEFT itself


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A tiny Qwen 3 of transformers, on disk."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=97, num_hidden_layers=3, head_dim=16, **sizes)
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


TOKENS = np.random.default_rng(0).integers(0, 97, (2, 20))


def our_logits(params, cfg):
    return logits_of(params, cfg, TOKENS)


def their_logits(model):
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parity
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_of_pefts_says_the_same_here(theirs, tmp_path, use_rslora):
    library, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    config = library.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "o_proj", "up_proj"], use_rslora=use_rslora
    )
    adapted = library.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(tmp_path)
    cfg, family = read_config(theirs)
    lora = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path)), cfg, family)
    base = hf.load_params(theirs, cfg, family)
    ours = our_logits(attach(base, peft.load_adapters(tmp_path, cfg, family, lora), lora), cfg)
    expected = their_logits(adapted)
    assert np.abs(expected - our_logits(base, cfg)).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize("targets", [".*/(q|k|v|o|gate|up|down)", "layers/(v|down)"])
def test_peft_says_the_same_with_ours_and_merged_equals_adapter(theirs, tmp_path, targets):
    library, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    import torch

    cfg, family = read_config(theirs)
    assert family is QWEN3
    lora = LoraConfig(rank=4, alpha=12.0, targets=targets)
    adapters = random_adapters(cfg, lora)
    acting = attach(hf.load_params(theirs, cfg, family), adapters, lora)
    ours = our_logits(acting, cfg)
    peft.save_adapters(adapters, cfg, family, lora, tmp_path, str(theirs))
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    np.testing.assert_allclose(their_logits(library.PeftModel.from_pretrained(model, tmp_path)), ours, atol=1e-4)
    merged = tmp_path / "merged"
    merged.mkdir()
    hf.save_params(acting, cfg, family, merged, "F32")
    (merged / "config.json").write_text(json.dumps(config_json(cfg, family)))
    again = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    np.testing.assert_allclose(their_logits(again), ours, atol=1e-4)


@pytest.mark.parity
def test_adapters_of_a_gemma_3_with_a_vision_tower_are_for_its_text_part(tmp_path):
    library, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    import torch

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "head_dim": 16}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "base")
    cfg, family = read_config(tmp_path / "base")
    assert is_wrapped(tmp_path / "base", family) and not is_wrapped(None, family)
    lora = LoraConfig(rank=4, alpha=12.0)
    (tmp_path / "adapter").mkdir()
    adapters = random_adapters(cfg, lora)
    peft.save_adapters(adapters, cfg, family, lora, tmp_path / "adapter", "base", is_wrapped=True)
    base = hf.load_params(tmp_path / "base", cfg, family)
    ours = our_logits(attach(base, adapters, lora), cfg)
    assert np.abs(ours - our_logits(base, cfg)).max() > 0.1
    adapted = library.PeftModel.from_pretrained(model, tmp_path / "adapter")
    np.testing.assert_allclose(their_logits(adapted), ours, atol=1e-4)
    adapted.save_pretrained(tmp_path / "again")
    read = peft.read_adapter_config(LoraConfig(adapter=str(tmp_path / "again")), cfg, family)
    again = peft.load_adapters(tmp_path / "again", cfg, family, read)
    np.testing.assert_allclose(our_logits(attach(base, again, read), cfg), ours, atol=1e-5)


def test_fresh_adapters_begin_as_pefts_do():
    """b = 0, and a uniform within 1 / sqrt(inputs)."""
    fresh = init_params(adapter_weights(decoder.weights(CFG), LORA), jax.random.key(0))
    for path, (a, b) in pairs(fresh).items():
        weight = decoder.layer_weights(CFG)[path.rsplit("/")[-1]]
        bound = np.prod(weight.shape[: weight.inputs]) ** -0.5
        assert not np.any(b) and 0.9 * bound < np.abs(a).max() <= bound, path
