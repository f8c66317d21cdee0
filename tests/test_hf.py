"""Tensors in Hugging Face layout: read in slices, written back the same, refused with a reason."""

import gc
import json
import re
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import random_params, set_mesh
from model_checks import write_model
from safetensors.numpy import load_file, save_file

from tunix_lite.models import attention, decoder, hf
from tunix_lite.models.architecture import Architecture, RopeScaling
from tunix_lite.models.families import FAMILIES, GEMMA3, LLAMA, config_json, read_config
from tunix_lite.models.quantize import stored_table
from tunix_lite.models.weights import num_bytes
from tunix_lite.settings.compose import compose

CFG = Architecture(32, 5, 16, 4, 2, 8, 24, pattern=("local", "global"), window=5, query_scale=8)


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path, random_params(CFG), CFG, GEMMA3)
    return tmp_path


def test_what_is_written_reads_back_on_any_mesh(folder):
    expected = jax.tree.map(np.asarray, random_params(CFG))
    assert read_config(folder) == (CFG, GEMMA3)
    for shape in ((1, 1), (2, 2), (4, 1)):
        set_mesh(*shape)
        jax.tree.map(np.testing.assert_array_equal, hf.load_params(folder, CFG, GEMMA3), expected)
    # a file cut short is never half a model
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        hf.load_params(folder, CFG, GEMMA3)


def test_each_device_reads_only_its_slice(folder, monkeypatch):
    set_mesh(2, 2)
    read, original = [], hf._read_slice

    def counting(tensor, weight, *where):
        part = original(tensor, weight, *where)
        read.append((part.size, np.prod(weight.shape), weight.axes))
        return part

    monkeypatch.setattr(hf, "_read_slice", counting)
    hf.load_params(folder, CFG, GEMMA3)
    assert all(4 * size == whole for size, whole, axes in read if "mlp" in axes or "heads" in axes)


@pytest.mark.parametrize("storage, mesh", [pytest.param("bf16", (2, 2), marks=pytest.mark.wide), ("nf4", (2, 2))])
def test_loading_holds_one_tensor_beside_what_is_loaded(tmp_path, monkeypatch, storage, mesh):
    set_mesh(*mesh)
    cfg = Architecture(64, 6, 64, 4, 2, 32, 128, query_scale=32, **LLAMA.flags)
    hf.save_params(random_params(cfg), cfg, LLAMA, tmp_path)
    allowed, total = {}, 0  # tensor -> bytes of its leaf and those before it
    for path, leaf in hf.flatten(stored_table(decoder.weights(cfg), storage)).items():
        total += num_bytes(leaf)
        allowed |= {name: total for name in hf.hf_names(path, cfg, LLAMA)}

    def held():
        return sum(x.nbytes for x in jax.live_arrays())

    gc.collect()
    before, read, write, seen = held(), hf.Tensors.read, hf._write, set()

    def reading(tensors, name, index):  # no other piece is alive, and no second copy of a leaf
        assert held() - before <= allowed[name], name
        return read(tensors, name, index)

    def writing(whole, piece, layer, leaf, *rest):  # in place, with no more than the piece as float32 beside it
        if whole is not None and leaf not in seen:
            seen.add(leaf)
            memory = write.lower(whole, piece, layer, leaf, *rest).compile().memory_analysis()
            assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 100  # pointers, if there are several
            assert memory.temp_size_in_bytes <= 5 * piece.size, piece.shape
        return write(whole, piece, layer, leaf, *rest)

    monkeypatch.setattr(hf.Tensors, "read", reading)
    monkeypatch.setattr(hf, "_write", writing)
    hf.load_params(tmp_path, cfg, LLAMA, storage)
    assert seen


def test_several_files_with_an_index_read_as_one(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # One file saved over several leaves the index and perhaps the shards, and which of the two is newer nobody says.
    with pytest.raises(ValueError, match=r"weights twice: delete model.safetensors or model.safetensors.index.json"):
        hf.check_weights(folder, CFG, GEMMA3)
    (folder / "model.safetensors").unlink()
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(folder, CFG, GEMMA3), random_params(CFG))
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"the index names b.safetensors, which is not there"):
        hf.load_params(folder, CFG, GEMMA3)


@pytest.mark.parametrize(
    "listed, message",
    [
        ({"a": 5}, "a is said to be in 5, which is not the name of a file beside it"),
        ({"a": "model.safetensors"}, "the index says that a is in model.safetensors, and it is not"),
        ([1], "weight_map=.*; it is an object"),
    ],
)
def test_an_index_that_lies_is_refused(folder, listed, message):
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(ValueError, match=message):
        hf.check_weights(folder, CFG, GEMMA3)


def test_every_tensor_that_does_not_fit_is_listed(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.4.mlp.up_proj.weight")
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros(17, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        hf.check_weights(folder, CFG, GEMMA3)
    assert "missing: model.layers.4.mlp.up_proj.weight [24, 16]" in str(error.value)
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in str(error.value)
    assert "shape: model.norm.weight is [17], and should be [16]" in str(error.value)


def test_folders_without_what_is_needed(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(CFG, GEMMA3)))
    with pytest.raises(ValueError, match="has no weights: neither model.safetensors nor"):
        hf.check_weights(tmp_path, CFG, GEMMA3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported is gemma2, gemma3_text, gemma4_text, gemma4_unified_text, gpt_oss, llama"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0; it is 1 or more"),
        ({"hidden_size": "32"}, "hidden_size='32'; it is a finite int"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; it is a finite float"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; it is true or false"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]; it is an object"),
        ({"quantization_config": {"bits": 4}}, "quantised weights cannot be read"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}, "full_attention": {"rope_theta": 1e6}}},
         "rope scaling of layers with sliding attention"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}, "full_attention": {"rope_theta": 1e4, "rope_type": "yarn"}}},
         "rope_type 'yarn' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must hold 5 entries"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
)  # fmt: skip
def test_what_the_decoder_does_not_do_is_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(config_json(CFG, GEMMA3) | change))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LISTS = {"rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    "model, change, message",
    [
        ("ministral3_3b", {"rope_parameters": YARN | {"factor": -1.0}},
         "yarn: factor, original_max_position_embeddings, beta_slow and attention_factor must be above 0"),
        ("ministral3_3b", {"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta=1.0 with yarn; it is above 1"),
        ("ministral3_3b", {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}}, "factor=4.0 has no rope_type beside it"),
        ("llama3.2_1b", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"factor": 8.0}},
         "factor=8.0 has no rope_type beside it; add that key, which is default, linear or llama3"),
        ("phi4_mini", {"rope_parameters": LISTS}, "long_factor=.* has no rope_type beside it"),
        ("phi4_mini", {"rope_parameters": LISTS | {"rope_type": "longrope"}}, "longrope: short_factor has 1 numbers, and long_factor 2"),
        ("qwen2.5_0.5b", {"use_sliding_window": "x"}, "use_sliding_window='x'; it is true or false"),
        ("qwen2.5_0.5b", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers='x'; it is a finite int"),
        ("gemma4_e2b", {"num_global_key_value_heads": 3}, "num_global_key_value_heads=3 beside attention_k_eq_v=false"),
    ],
)  # fmt: skip
def test_a_setting_that_would_do_nothing_is_refused_in_the_words_of_config_json(tmp_path, model, change, message):
    found = compose([f"model={model}", "model.weights=random"]).model
    (tmp_path / "config.json").write_text(json.dumps(config_json(found.architecture, FAMILIES[found.family]) | change))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_config(tmp_path)


LINEAR = {"rope_type": "linear", "factor": 8.0}
ROPE = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6, **LINEAR}}


@pytest.mark.parametrize(
    "agree, differs, words",
    [
        ({"rope_theta": 1e6}, {"rope_theta": 5e5}, "rope_parameters.rope_theta=1000000.0 and rope_theta=500000.0"),
        ({"rope_local_base_freq": 1e4}, {"rope_local_base_freq": 5e5}, "and rope_local_base_freq=500000.0"),
        ({"rope_scaling": LINEAR}, {"rope_scaling": LINEAR | {"factor": 4.0}}, "factor=8.0 and rope_scaling.factor=4.0"),
        ({"rope_scaling": {"type": "linear"}}, {"rope_scaling": {"type": "yarn"}}, "and rope_scaling.rope_type='yarn'"),
    ],
)  # fmt: skip
def test_of_two_spellings_of_a_setting_none_is_lost(tmp_path, agree, differs, words):
    """Where they agree, nothing changes; where they do not, neither wins in silence."""
    scaled = replace(CFG, rope_scaling=RopeScaling(8.0))
    values = config_json(scaled, GEMMA3) | {"rope_parameters": ROPE} | agree
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path)[0] == scaled
    (tmp_path / "config.json").write_text(json.dumps(values | differs))
    with pytest.raises(ValueError, match=f"{re.escape(words)}.* one setting in two spellings"):
        read_config(tmp_path)


# ---- a head in a folder whose config.json ties it to the embedding

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def with_head(folder, change, dtype=np.float32):
    """The folder with a head beside its embedding, which is rounded to bfloat16: the embedding after `change`."""
    held = load_file(folder / "model.safetensors")
    held[EMBED] = held[EMBED].astype(ml_dtypes.bfloat16).astype(np.float32)
    head = held[EMBED].copy()
    change(head)
    save_file(held | {HEAD: head.astype(dtype)}, folder / "model.safetensors")
    return held[EMBED], head


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_on_one_device_a_table_is_loaded_by_rows(folder, monkeypatch, storage):
    """Of 32 rows, 7 at a time: whole, the table would be there as it is in the file, too."""
    monkeypatch.setattr(hf, "AT_ONCE", 7 * 4 * 4 * CFG.embed_dim)
    read, rows = hf.Tensors.read, []

    def seen(tensors, name, index):
        part = read(tensors, name, index)
        rows.extend([len(part)] if name == EMBED else [])
        return part

    monkeypatch.setattr(hf.Tensors, "read", seen)
    set_mesh(1, 1)
    embed = hf.load_params(folder, CFG, GEMMA3, storage)["embed"]
    assert rows == [7, 7, 7, 7, 4]
    in_file = load_file(folder / "model.safetensors")[EMBED]
    np.testing.assert_array_equal(embed, in_file.astype(hf.DTYPES[storage.upper().replace("FP", "F")]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_head_that_is_a_copy_of_the_tied_embedding_is_taken(folder, dtype):
    embed, _ = with_head(folder, lambda head: None, dtype)
    set_mesh(2, 2)
    np.testing.assert_array_equal(hf.load_params(folder, CFG, GEMMA3)["embed"], embed)


@pytest.mark.parametrize("rows, mesh", [(3, (1, 1)), (1000, (2, 2))])
def test_a_head_that_is_not_the_tied_embedding_is_refused(folder, monkeypatch, rows, mesh):
    """transformers does not tie such a head: with the embedding in its place, logits were 6.95 off, and no word said."""

    def change(head):
        head[30, 1] -= 0.125

    with_head(folder, change)
    monkeypatch.setattr(hf, "AT_ONCE", rows * 8 * CFG.embed_dim)
    set_mesh(*mesh)
    with pytest.raises(ValueError, match=f'{HEAD} is not {EMBED}; to .* write "tie_word_embeddings": false there'):
        hf.load_params(folder, CFG, GEMMA3)


def test_an_untied_head_gives_the_scores(folder):
    """By hand, in float64: hidden @ head.T, and not hidden @ embed.T."""
    embed, head = with_head(folder, lambda head: head.__imul__(np.linspace(-2, 2, 32, dtype=np.float32)[:, None]))
    cfg = replace(CFG, tied=False)
    params = hf.load_params(folder, cfg, GEMMA3)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 7))
    row = attention.one_sequence_per_row(np.ones_like(tokens, bool))
    hidden = jax.jit(decoder.forward, static_argnums=1)(params, cfg, tokens, row)[0]
    np.testing.assert_array_equal(params["embed"], embed)
    by_hand = np.float64(hidden) @ np.float64(head).T
    np.testing.assert_allclose(decoder.logits(params, cfg, hidden), by_hand, rtol=1e-5, atol=1e-5)
    assert np.abs(by_hand - np.float64(hidden) @ np.float64(embed).T).max() > 1
