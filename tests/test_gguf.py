"""GGUF files: read as the folder of the same model is, damaged ones refused in a line, and written for llama.cpp."""

import json
import os
import struct
import subprocess
import tempfile
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import logits_of, random_params, set_mesh
from flax.traverse_util import unflatten_dict
from model_checks import write_model
from safetensors.numpy import load_file, save_file

from tunix_lite.basics.errors import ConfigError
from tunix_lite.inference import export as exporting
from tunix_lite.inference.language_model import LONG, load
from tunix_lite.models import decoder, hf, peft
from tunix_lite.models.architecture import Architecture, RopeScaling
from tunix_lite.models.families import FAMILIES, as_computed, read_config
from tunix_lite.models.gguf_file import open_gguf
from tunix_lite.models.gguf_out import save_gguf, save_gguf_adapter
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.source import ModelConfig, load_base, locate
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.weights import flatten
from tunix_lite.parallel.mesh import make_mesh

gguf = pytest.importorskip("gguf", reason="needs the gguf extra")

GEMMA = {"pattern": ("local", "global"), "window": 5, "query_scale": 8}
LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 8192)
SIZES = (64, 4, 32, 4, 2, 8, 64)  # vocabulary, layers, width, heads, of keys, their width, feed-forward
CFGS = {
    "gemma2": Architecture(*SIZES, **GEMMA, rope_theta_global=1e4, **FAMILIES["gemma2"].flags, attn_softcap=50.0, final_softcap=30.0),
    "gemma3": Architecture(
        *SIZES, **GEMMA | {"pattern": ("local",) * 4}, rope_scaling=RopeScaling(8.0), **FAMILIES["gemma3"].flags
    ),
    "llama": Architecture(
        *SIZES, query_scale=8, rope_theta_local=5e5, rope_theta_global=5e5, rope_scaling=LLAMA3, tied=False, **FAMILIES["llama"].flags
    ),
    "qwen2": Architecture(*SIZES, query_scale=8, pattern=("global",), window=None, **FAMILIES["qwen2"].flags),
    "qwen3": Architecture(*SIZES, query_scale=8, pattern=("global",), window=None, **FAMILIES["qwen3"].flags),
}  # fmt: skip
BYTES = [f"<0x{i:02X}>" for i in range(256)]
# token, score, type; the lower half of the letters has no token, so that bytes are needed
PIECES = [("<pad>", 0, 3), ("<eos>", 0, 3), ("<bos>", 0, 3), ("<unk>", 0, 2), *[(b, 0, 6) for b in BYTES[:32]]]
PIECES += [(t, -i, 1) for i, t in enumerate(["he", "ll", "llo", "hello", "▁hello", "▁", "h", "e", "l", "o"])]
PIECES += [("<turn>", 0, 4)]
PIECES += [(f"[PAD{i}]", 0, 5) for i in range(len(PIECES), 64)]


def llama_cpp_rows(w: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write(path: Path, arch: str, keys: dict, tensors: dict[str, np.ndarray], types: dict | None = None) -> Path:
    """A GGUF file by the gguf package alone. types: of tensors that are quantised already; others are F32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if value is None:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(key, value)
    for name, x in tensors.items():
        writer.add_tensor(name, x, raw_dtype=(types or {}).get(name, gguf.GGMLQuantizationType.F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(arch: str, cfg: Architecture) -> dict:
    """The metadata that llama.cpp writes of this model, with the vocabulary of PIECES."""
    own = {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_positions,
        "embedding_length": cfg.embed_dim,
        "feed_forward_length": cfg.mlp_dim,
        "attention.head_count": cfg.num_heads,
        "attention.head_count_kv": cfg.num_kv_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "rope.freq_base": cfg.rope_theta_global,
        "attention.sliding_window": cfg.window,
        "attn_logit_softcapping": cfg.attn_softcap,
        "final_logit_softcapping": cfg.final_softcap,
    }
    if cfg.rope_scaling is not None and arch == "gemma3":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    return {f"{arch}.{k}": v for k, v in own.items()} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [t for t, _, _ in PIECES],
        "tokenizer.ggml.scores": [float(s) for _, s, _ in PIECES],
        "tokenizer.ggml.token_type": [k for _, _, k in PIECES],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


def tensors_of(arch: str, cfg: Architecture, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a folder as llama.cpp converts them, under the names of the gguf package."""
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(number, cfg.num_layers)
    made = {}
    for name, x in load_file(folder / "model.safetensors").items():
        if arch == "llama" and "q_proj" in name:
            x = llama_cpp_rows(x, cfg.num_heads)
        if arch == "llama" and "k_proj" in name:
            x = llama_cpp_rows(x, cfg.num_kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            x = x + np.float32(1)
        made[names.get_name(name, (".weight", ".bias"))] = x
    if arch == "llama":
        # llama.cpp's generate_extra_tensors, in its words
        freqs = 1.0 / (5e5 ** (np.arange(0, 8, 2) / 8))
        factors = []
        for freq in freqs:
            wavelen = 2 * np.pi / freq
            smooth = (8192 / wavelen - 1) / (4 - 1)
            middle = 1 / ((1 - smooth) / 8 + smooth)
            factors.append(1 if wavelen < 8192 / 4 else 8 if wavelen > 8192 else middle)
        made["rope_freqs.weight"] = np.array(factors, np.float32)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """For each family a folder, and the GGUF file of the same model."""
    made = {}
    for arch, cfg in CFGS.items():
        set_mesh(1, 1)
        folder = tmp_path_factory.mktemp(arch)
        write_model(folder, random_params(cfg), cfg, FAMILIES[arch])
        file = tmp_path_factory.mktemp(arch) / "model.gguf"
        made[arch] = folder, write(file, arch, keys_of(arch, cfg), tensors_of(arch, cfg, folder))
    return made


# ---- in


@pytest.mark.parametrize("arch", CFGS)
def test_a_gguf_file_is_the_folder_it_was_made_of(models, arch):
    folder, file = models[arch]
    (cfg, family), (of_file, family_too) = read_config(folder), read_config(file)
    assert (of_file, family_too) == (cfg, family)
    hf.check_weights(file, cfg, family)
    theirs, ours = hf.open_tensors(folder, family), hf.open_tensors(file, family)
    assert sorted(ours) == sorted(theirs)
    for name in theirs:
        shape = theirs.shape(name)
        parts = [
            tuple(slice(None) for _ in shape),
            tuple(slice(n // 2, None) for n in shape),
            tuple(slice(0, n // 2) for n in shape),
        ]
        for index in parts:
            expected = theirs.read(name, index)
            # 1 was added and taken away, in float32
            atol = 1.2e-7 if arch.startswith("gemma") and name.endswith("norm.weight") else 0
            np.testing.assert_allclose(ours.read(name, index), expected, rtol=0, atol=atol)


def test_a_folder_with_one_gguf_file_loads_on_a_mesh(models):
    folder, file = models["llama"]
    set_mesh(2, 2)
    located = locate(ModelConfig(weights=str(file.parent)))
    assert located.folder == file and located.tokenizer.eos_ids == (1,)
    expected = hf.load_params(folder, located.cfg, located.family)
    jax.tree.map(np.testing.assert_array_equal, load_base(located, 0, "fp32"), expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                                  "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"])  # fmt: skip
def test_each_quantisation_is_read_as_the_gguf_package_reads_it(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (5, 2 * max(block, 8) // block * size), np.uint8)
    # Any byte is a number but for the halves that are infinite: none has all bits of its exponent.
    blocks &= 0xBB
    metadata = {key: x for key, x in keys_of("qwen2", CFGS["qwen2"]).items() if not key.startswith("tokenizer")}
    write(tmp_path / "x.gguf", "qwen2", metadata, {"token_embd.weight": blocks}, {"token_embd.weight": kind})
    expected = gguf.dequantize(blocks, kind)
    tensors = hf.open_tensors(tmp_path / "x.gguf", FAMILIES["qwen2"])
    name = "model.embed_tokens.weight"
    assert tensors.dtype(name) == (kind.name if kind.name in ("F16", "BF16") else "F32")
    columns = expected.shape[1]
    for rows, start, stop in ((slice(0, 5), 0, columns), (slice(1, 4), 3, columns // 2 + 5), (slice(4, 5), -1, None)):
        index = (rows, slice(start, stop))
        np.testing.assert_array_equal(tensors.read(name, index).astype(np.float32), expected[index])


def test_a_sentencepiece_vocabulary_by_hand(models):
    ids = {t: i for i, (t, _, _) in enumerate(PIECES)}
    for arch in ("gemma3", "llama"):
        tokenizer = Tokenizer.load(models[arch][1])
        assert tokenizer.encode("hello<turn> hello") == [ids["hello"], ids["<turn>"], ids["▁hello"]]
        assert tokenizer.encode("hel") == [ids["he"], ids["l"]]
        assert tokenizer.encode("\n<eos>") == [ids["<0x0A>"], ids["<eos>"]]
        assert tokenizer.decode([ids["hello"], ids["▁hello"], ids["<0x0A>"]]) == "hello hello\n"
        assert (tokenizer.start_ids, tokenizer.eos_ids, tokenizer.pad_id) == ((2,), (1,), 0)


@pytest.mark.parametrize(
    "pre, cut", [("gpt-2", "12a a1"), ("smollm", "1 2 a  a 1"), ("qwen2", "1 2 a  a 1"), ("llama-bpe", "12 a  a 1")]
)
def test_a_vocabulary_of_bytes_is_cut_as_its_pre_says(tmp_path, models, pre, cut):
    texts = ["1", "2", "a", "Ġ", "Ġa", "12", "a1", "<|end|>", "<|turn|>", "x"]
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*texts, *(f"[PAD{i}]" for i in range(len(texts), 64))],
        "tokenizer.ggml.token_type": [1] * 7 + [3, 3, 1] + [5] * 54,
        "tokenizer.ggml.merges": ["1 2", "Ġ a", "a 1"],
        "tokenizer.ggml.bos_token_id": 7,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 8,
        "tokenizer.ggml.unknown_token_id": None,
        "tokenizer.chat_template": "{{ messages[0].content }}<|turn|>",
    }
    arch = "qwen2"
    file = write(
        tmp_path / "x.gguf", arch, keys_of(arch, CFGS[arch]) | tokens, tensors_of(arch, CFGS[arch], models[arch][0])
    )
    tokenizer = Tokenizer.load(file)
    # GPT-2 cuts numbers, words and what is between; where it cuts, no merge reaches across.
    pieces = {"12a a1": ["12", "a", "Ġa", "1"]}.get(cut) or cut.replace("  ", " Ġ").split(" ")
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("12a a1")] == pieces
    assert tokenizer.decode(tokenizer.encode("12a a1<|end|>"), False) == "12a a1<|end|>"
    assert tokenizer.eos_ids == (7, 8) and tokenizer.start_ids == ((7,) if pre == "llama-bpe" else ())
    assert tokenizer.prompt([{"role": "user", "content": "a1"}])[-1] == 8


REFUSED = {
    "another architecture": ({"general.architecture": "phi3"}, "general.architecture='phi3' is not supported"),
    "an adapter": ({"general.type": "adapter"}, "general.type='adapter'; expected is 'model'"),
    "a part": ({"split.count": 3}, "split.count: this is a part"),
    "no layers": ({"qwen2.block_count": None}, "qwen2.block_count is missing"),
    "zero heads": ({"qwen2.attention.head_count": 0}, "qwen2.attention.head_count is 0; expected is 1 or more"),
    "layers as text": ({"qwen2.block_count": "4"}, "qwen2.block_count is '4'; expected is a whole number"),
    "many layers": ({"qwen2.block_count": 2**31}, "num_hidden_layers=2147483648; it is at most 1,024"),
    "eps nan": ({"qwen2.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan; expected is a finite"),
    "other values": ({"qwen2.attention.value_length": 16}, "qwen2.attention.value_length is 16, and heads have 8"),
    "yarn": ({"qwen2.rope.scaling.type": "yarn"}, "qwen2.rope.scaling.type='yarn' is not supported"),
    "another tokenizer": ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5' is not supported"),
    "another pre": ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x"}, "tokenizer.ggml.pre='x' is not supported"),
    "few tokens": ({"tokenizer.ggml.tokens": ["a"]}, "tokenizer.ggml.tokens has 1 items; expected is 64"),
    "tokens twice": ({"tokenizer.ggml.tokens": ["a"] * 64}, r"tokenizer.ggml.tokens\[0\] and \[63\] are both 'a'"),
    "no end": ({"tokenizer.ggml.eos_token_id": None}, "names no end-of-sequence token in its metadata"),
    "end beyond": ({"tokenizer.ggml.eos_token_id": 64}, "tokenizer.ggml.eos_token_id is 64, and there are 64 tokens"),
    "merges of others": ({"tokenizer.ggml.merges": ["x y"]}, "cannot be read .*x"),
    "long tokens": ({"tokenizer.ggml.tokens": ["h" * (i + 1) * 20 for i in range(64)]}, "is too long to be merged"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_with_file_and_key(tmp_path, models, name):
    change, message = REFUSED[name]
    cfg = CFGS["qwen2"]
    keys = keys_of("qwen2", cfg) | change
    file = write(
        tmp_path / "x.gguf",
        keys.pop("general.architecture", "qwen2"),
        keys,
        tensors_of("qwen2", cfg, models["qwen2"][0]),
    )
    with pytest.raises(ValueError, match=message) as error:
        locate(ModelConfig(weights=str(file)))
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_tensors_that_do_not_fit_are_named_as_in_the_file(tmp_path, models):
    cfg = CFGS["qwen2"]
    tensors = tensors_of("qwen2", cfg, models["qwen2"][0])
    tensors["blk.9.attn_q.weight"] = tensors["blk.1.attn_q.weight"]
    tensors["blk.2.ffn_up.weight"] = tensors["blk.2.ffn_up.weight"][:8]
    del tensors["blk.3.ffn_up.weight"]
    file = write(tmp_path / "x.gguf", "qwen2", keys_of("qwen2", cfg), tensors)
    with pytest.raises(ValueError) as error:
        hf.check_weights(file, *read_config(file))
    assert "do not fit its metadata: missing: blk.3.ffn_up.weight [64, 32]" in str(error.value)
    assert "unexpected: blk.9.attn_q.weight [32, 32]" in str(error.value)
    assert "shape: blk.2.ffn_up.weight is [8, 32], and should be [64, 32]" in str(error.value)


def test_an_eps_of_float32_is_that_of_a_config_json(models):
    _, file = models["qwen2"]
    assert open_gguf(file).values["qwen2.attention.layer_norm_rms_epsilon"] == 9.999999974752427e-07
    chosen = ModelConfig(weights=str(file), architecture=replace(CFGS["qwen2"], norm_eps=1e-6))
    assert locate(chosen).cfg.norm_eps == 1e-6


# ---- damaged files


def patched(content: bytes, at: int, form: str, *values) -> bytes:
    part = struct.pack(f"<{form}", *values)
    return content[:at] + part + content[at + len(part) :]


def damaged(content: bytes) -> dict[str, bytes]:
    """At least 60 ways in which a file is not one, by name."""
    cases = {f"cut to {n}": content[:n] for n in (0, 1, 3, 4, 7, 8, 15, 16, 23, 24, 31, 32, 40, 100, 500, 1000, 2000)}
    cases |= {f"without the last {n}": content[:-n] for n in (33, 100, 5000, len(content) // 2)}
    cases |= {f"version {v}": patched(content, 4, "I", v) for v in (0, 1, 4, 2**24 * 3, 2**32 - 1)}
    cases |= {f"{n} tensors": patched(content, 8, "Q", n) for n in (10**6, 2**32, 2**63, 2**64 - 1)}
    cases |= {f"{n} keys": patched(content, 16, "Q", n) for n in (10**5, 2**40, 2**63, 2**64 - 1, 0, 3)}
    cases["another magic"] = b"GGML" + content[4:]
    cases["big-endian"] = content[:4] + struct.pack(">IQQ", 3, 4, 4) + content[24:]

    # a key is its length, its text, its type and its value
    def behind(key: str) -> int:
        return content.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)

    first = behind("general.architecture") - len("general.architecture") - 8
    cases |= {
        f"a first key of {n} bytes": patched(content, first, "Q", n) for n in (2**20 + 1, 2**31, 2**62, 2**64 - 1)
    }
    text = behind("tokenizer.ggml.model")
    cases |= {f"a text of {n} bytes": patched(content, text + 4, "Q", n) for n in (2**21, 2**40, 2**64 - 1)}
    cases |= {f"a value of type {n}": patched(content, text, "I", n) for n in (0, 4, 9, 13, 255, 2**32 - 1)}
    cases["a text that is no UTF-8"] = patched(content, text + 12, "B", 0xFF)
    cases["a key that is no UTF-8"] = patched(content, text - 1, "B", 0xFF)
    tokens = behind("tokenizer.ggml.tokens")
    cases |= {f"{n} tokens": patched(content, tokens + 8, "Q", n) for n in (0, 65, 10**6, 2**40, 2**64 - 1)}
    cases |= {f"tokens of type {n}": patched(content, tokens + 4, "I", n) for n in (0, 6, 9, 12, 77)}
    cases |= {f"a token of {n} bytes": patched(content, tokens + 16, "Q", n) for n in (2**20, 2**40, 2**64 - 1)}
    cases["a token that is no UTF-8"] = patched(content, tokens + 24, "B", 0xFF)
    cases["numbers as an array"] = patched(content, behind("qwen2.block_count"), "I", 9)
    cases["a key twice"] = content.replace(b"qwen2.context_length", b"qwen2.context_lengtX").replace(
        b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id"
    )

    # a tensor is its name, its number of dims, the dims, its type and its offset
    tensor = behind("token_embd.weight")
    cases |= {f"{n} dims": patched(content, tensor, "I", n) for n in (0, 5, 2**31, 2**32 - 1)}
    cases |= {f"a dim of {n}": patched(content, tensor + 4, "Q", n) for n in (0, 33, 2**33, 2**64 - 1)}
    cases["dims of 2^63 bytes"] = patched(content, tensor + 4, "QQ", 2**31, 2**31)
    cases |= {f"a tensor of type {n}": patched(content, tensor + 20, "I", n) for n in (2, 4, 12, 24, 99, 2**32 - 1)}
    cases |= {f"an offset of {n}": patched(content, tensor + 24, "Q", n) for n in (1, 2**14, 2**40, 2**63, 2**64 - 32)}
    cases["a tensor twice"] = content.replace(b"blk.1.attn_k.weight", b"blk.1.attn_v.weight", 1)
    cases["an unknown tensor"] = content.replace(b"blk.1.attn_k.weight", b"blk.1.\x1b[2J.weight", 1)
    cases["numbers that are not"] = content[:-4] + struct.pack("<f", float("nan"))
    return cases


def test_damaged_files_are_refused_in_a_line_and_take_no_room(tmp_path, models):
    good = models["qwen2"][1].read_bytes()
    cases = damaged(good)
    assert len(cases) >= 60
    file = tmp_path / "x.gguf"
    for name, content in cases.items():
        file.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(ValueError) as error:
            located = locate(ModelConfig(weights=str(file)))
            hf.check_weights(file, located.cfg, located.family)
            tensors = hf.open_tensors(file, located.family)
            for each in tensors:
                tensors.read(each, tuple(slice(None) for _ in tensors.shape(each)))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        text = str(error.value)
        assert str(file) in text and text.isprintable() and len(text) < 1000, (name, text)
        assert most < 8 * max(len(content), 2**16), (name, most)


# ---- out


@pytest.mark.parametrize("arch, kind", [*((arch, "f32") for arch in CFGS), ("llama", "q8_0"), ("gemma3", "q8_0"), ("qwen2", "bf16"), ("llama", "f16")])  # fmt: skip
def test_what_is_written_is_what_llama_cpp_converts(tmp_path, models, arch, kind):
    cfg, (folder, file) = CFGS[arch], models[arch]
    tokenizer = Tokenizer.load(file)
    with jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")))):
        save_gguf(random_params(cfg), cfg, FAMILIES[arch], tokenizer, tmp_path / "x.gguf", kind, "mine")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    expected = tensors_of(arch, cfg, folder)
    assert sorted(tensor.name for tensor in reader.tensors) == sorted(expected)
    for tensor in reader.tensors:
        own = gguf.GGMLQuantizationType[kind.upper() if expected[tensor.name].ndim > 1 else "F32"]
        assert tensor.tensor_type == own, tensor.name
        assert tensor.data.tobytes() == gguf.quantize(expected[tensor.name], own).tobytes(), tensor.name
    keys = {key: field.contents() for key, field in reader.fields.items()}
    if arch == "gemma3":
        assert keys.pop("gemma3.attention.sliding_window_pattern") == 5
    for key, value in keys_of(arch, cfg).items():
        # Scores are in the order of the merges; which numbers they are does not matter.
        if value is not None and not key.endswith((".scores", "rope.freq_base")):
            assert keys[key] == (np.float32(value) if isinstance(value, float) else value), key
    # llama.cpp takes the pair whose token has the highest score.
    scores = dict(zip((t for t, _, _ in PIECES), keys["tokenizer.ggml.scores"]))
    order = ["he", "ll", "llo", "hello", "▁hello"]
    assert sorted(order, key=scores.get, reverse=True) == order
    again, family = read_config(tmp_path / "x.gguf")
    assert (as_computed(again), family) == (as_computed(cfg), FAMILIES[arch])
    again = Tokenizer.load(tmp_path / "x.gguf")
    for text in ("hello<turn> hello", "hel", "\n<eos>"):
        assert again.encode(text) == tokenizer.encode(text)
    assert (again.start_ids, again.eos_ids, again.pad_id) == (tokenizer.start_ids, tokenizer.eos_ids, tokenizer.pad_id)


def test_the_bundled_model_and_its_adapters_leave_as_one_file(tmp_path, capsys):
    # programs of several devices would be compiled again for each model
    opened = partial(load, dtype="fp32", mesh_shape=((1, 1), ("fsdp", "tp")))
    own = opened("bundled")
    lora = LoraConfig(rank=2)
    for name, loaded in (("all", own), ("adapted", opened(ModelConfig(lora=lora)))):
        written = exporting.export(loaded, tmp_path / name, "gguf", gguf_type="f32")
        assert written.kind == "gguf" and written.difference < 1e-5
        assert written.serve == f"llama-server -m {tmp_path / name / 'weights.gguf'}"
        theirs = opened(tmp_path / name)
        assert theirs.tokenizer.vocabulary.items() >= own.tokenizer.vocabulary.items()
        assert theirs.tokenizer.prompt("What is 2 + 2?") == own.tokenizer.prompt("What is 2 + 2?")
        assert theirs.tokenizer.eos_ids == own.tokenizer.eos_ids
        for key in ("embed", "final_norm"):
            np.testing.assert_allclose(theirs.params[key], own.params[key], rtol=0, atol=2e-7)
    written = exporting.export(loaded, tmp_path / "alone", "gguf_adapter")
    assert written.difference < 1e-5
    assert written.serve == f"llama-server -m bundled.gguf --lora {tmp_path / 'alone' / 'adapter.gguf'}"
    # From a GGUF file to a folder of Hugging Face.
    exporting.export(opened(tmp_path / "all"), tmp_path / "folder", "full", "fp32")
    again = opened(tmp_path / "folder")
    assert again.cfg == own.cfg and again.tokenizer.prompt("hi") == own.tokenizer.prompt("hi")


@pytest.mark.parametrize("arch", sorted(CFGS))
def test_adapters_alone_add_up_to_the_merged_model_of_llama_cpp(tmp_path, models, arch):
    """As src/llama-adapter.cpp there reads them: W + alpha / rank * lora_b @ lora_a."""
    cfg, family, lora = CFGS[arch], FAMILIES[arch], LoraConfig(rank=2, alpha=3.0)
    draw = np.random.default_rng(0).normal
    shapes = flatten(adapter_weights(decoder.weights(cfg), lora))
    sides = {path: draw(size=weight.shape).astype(np.float32) for path, weight in shapes.items()}
    adapters = peft.to_tensors(unflatten_dict(sides, sep="/"), cfg, family, lora)
    save_gguf_adapter(adapters, cfg, family, lora.alpha, tmp_path / "x.gguf", "mine")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    keys = {"general.architecture": arch, "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 3.0}
    assert {key: reader.fields[key].contents() for key in keys} == keys

    # The merged weights by PEFT's names, and what llama.cpp makes of them.
    folder = tmp_path / "merged"
    folder.mkdir()
    plain = load_file(models[arch][0] / "model.safetensors")
    for name in [name for name in adapters if ".lora_A." in name]:
        of_base = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        b_a = adapters[name.replace(".lora_A.", ".lora_B.")].astype(np.float64) @ adapters[name]
        plain[of_base] = np.ascontiguousarray(plain[of_base] + 1.5 * b_a)
    save_file(plain, folder / "model.safetensors")
    merged, base = tensors_of(arch, cfg, folder), tensors_of(arch, cfg, models[arch][0])
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(written) == 2 * 7 * cfg.num_layers
    for name in {name.rpartition(".lora_")[0] for name in written}:
        a, b = written[f"{name}.lora_a"], written[f"{name}.lora_b"]
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(base[name] + 1.5 * (b @ a), merged[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "has_adapters, how, message",
    [
        (False, {"kind": "gguf", "dtype": "bf16"}, "dtype=bf16: tensors of kind=gguf have a type"),
        (False, {"kind": "gguf", "gguf_type": "q4_k"}, "type='q4_k'; it is f32, f16, bf16, q8_0, or null"),
        (False, {"kind": "full", "gguf_type": "f16"}, "type=f16: type is of kind=gguf"),
        (
            False,
            {"kind": "gguf_adapter"},
            "kind=gguf_adapter: the model has no adapters; give full, or gguf for the families gemma2",
        ),
        (True, {"kind": "gguf_adapter", "gguf_type": "f16"}, "type=f16: adapters are written in float32"),
    ],
)
def test_kinds_and_types_that_are_not_written_are_refused(tmp_path, has_adapters, how, message):
    with pytest.raises(ConfigError, match=message):
        exporting.check_export(has_adapters, tmp_path / "x", **{"dtype": None, "overwrite": False} | how)


@pytest.mark.parametrize("change, message", [({"query_scale": 13}, "query_scale=13 against 8"), ({"mlp_dim": 40}, "rows of blk.0.ffn_down.weight have 40 numbers")])  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_not_kept(tmp_path, models, change, message):
    cfg = replace(CFGS["gemma3"], **change)
    folder = tmp_path / "model"
    folder.mkdir()
    Tokenizer.load(models["gemma3"][1]).backend.save(str(folder / "tokenizer.json"))
    write_model(folder, random_params(cfg), cfg, FAMILIES["gemma3"], eos_token_id=1)
    with pytest.raises(ConfigError, match=message):
        exporting.export(load(folder, dtype="fp32"), tmp_path / "x", "gguf", gguf_type="q8_0")
    assert not (tmp_path / "x").exists()


# ---- other readers


def greedy_of_transformers(file: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    how = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    made = []
    for prompt in prompts:
        # Without a mask, generate takes end tokens within a prompt for padding.
        ids = torch.tensor([prompt])
        made.append(model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist())
    return made


def greedy_of_llama_cpp(file: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Through the npm package node-llama-cpp, installed in the folder that TUNIX_LITE_REAL names."""
    folder = Path(os.environ.get("TUNIX_LITE_REAL", "nowhere"))
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        pytest.skip("npm install node-llama-cpp in the folder that TUNIX_LITE_REAL names")
    program = """
        const [file, prompts, count] = JSON.parse(process.argv[2]);
        const { getLlama } = await import("node-llama-cpp");
        const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
        const model = await llama.loadModel({ modelPath: file });
        const context = await model.createContext({ contextSize: 1024, threads: 2 });
        const all = [];
        for (const prompt of prompts) {
          const sequence = context.getSequence();
          const out = [];
          for await (const token of sequence.evaluate(prompt, { temperature: 0 }))
            if (out.push(token) >= count) break;
          all.push(out);
          sequence.dispose();
        }
        console.log(JSON.stringify(all));
        process.exit(0);
    """
    # A file beside node_modules: started with -e, node-llama-cpp does not find its own library.
    with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=folder) as script:
        script.write(program)
        script.flush()
        words = ["node", script.name, json.dumps([str(file), prompts, count])]
        ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parity
@pytest.mark.parametrize("arch", sorted(CFGS.keys() - {"qwen3"}))  # transformers takes its heads as 128 wide
def test_transformers_reads_the_same_tensors(models, arch):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    _, file = models[arch]
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    theirs = model.state_dict()
    ours = hf.open_tensors(file, FAMILIES[arch])
    for name in ours:
        whole = tuple(slice(None) for _ in ours.shape(name))
        np.testing.assert_array_equal(ours.read(name, whole), theirs[name].numpy(), name)
    if arch == "qwen2":  # transformers leaves out what Llama 3.1 and Gemma scale by
        tokens = np.arange(3, 33)[None]
        logits = logits_of(hf.load_params(file, *read_config(file)), read_config(file)[0], tokens)
        np.testing.assert_allclose(logits, model(torch.tensor(tokens)).logits.detach().numpy(), rtol=0, atol=1e-4)


REAL = ["smollm2-135m-instruct-q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"]
PROMPTS = ["The capital of France is", "Q: What is 12 + 30?\nA:", "Once upon a time"]


@pytest.mark.real
@pytest.mark.skipif("TUNIX_LITE_REAL" not in os.environ, reason="TUNIX_LITE_REAL names no folder of real models")
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_in_and_out_is_that_of_transformers_and_llama_cpp(tmp_path, name):
    """The folder holds gguf/<name>, as shared/real/make_models.py makes it."""
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    file = Path(os.environ["TUNIX_LITE_REAL"]) / "gguf" / name
    if not file.is_file():
        pytest.skip(f"{name} is not there: `make real` fetches SmolLM2 alone")
    ours = load(file, dtype="fp32", mesh_shape=((1, 1), ("fsdp", "tp")))
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    theirs = model.state_dict()
    tensors = hf.open_tensors(file, ours.source.family)
    for each in tensors:
        whole = tuple(slice(None) for _ in tensors.shape(each))
        assert tensors.read(each, whole).tobytes() == theirs[each].numpy().tobytes(), each

    # Both are rounded: logits have up to 46, of which float32 has 4e-6.
    ids = ours.tokenizer.encode(Path(__file__).read_text())
    for count in (5, 17, 64, 400):
        tokens = np.array([ids[:count]])
        expected = model(torch.tensor(tokens)).logits.detach().numpy()
        with jax.set_mesh(ours.mesh):
            logits = logits_of(ours.params, ours.cfg, tokens)
        assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()

    # Greedy tokens: here, of the file that we export, by transformers and by llama.cpp.
    exporting.export(ours, tmp_path / "x", "gguf", gguf_type="f32")
    prompts = [ours.tokenizer.prompt(text) for text in PROMPTS]
    made = [one.tokens for one in ours.generate(PROMPTS, replace(LONG, temperature=0.0, max_new_tokens=64))]
    for read in (greedy_of_transformers, greedy_of_llama_cpp):
        for one, other in zip(made, read(tmp_path / "x" / "weights.gguf", prompts, 64)):
            # llama.cpp does not report the token that ends a completion.
            text = one[:-1] if one[-1] in ours.tokenizer.eos_ids else one
            assert text == other[: len(text)], read.__name__
