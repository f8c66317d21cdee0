"""Writes GGUF files for llama.cpp and Ollama: a model with tokenizer and chat template, or adapters
alone (convert_lora_to_gguf.py, src/llama-adapter.cpp in llama.cpp)."""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.basics.plain_text import shown
from tunix_lite.basics.types import Params
from tunix_lite.models import gguf_metadata, hf
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.family import Family
from tunix_lite.models.gguf_file import import_gguf, open_gguf
from tunix_lite.models.gguf_tensors import (
    gguf_names,
    has_plus_one,
    has_turned_rows,
    rows_of_halves,
    rows_of_pairs,
)
from tunix_lite.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    DIGITS,
    GPT2,
    NORMAL,
    PATTERNS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from tunix_lite.models.peft import module_of
from tunix_lite.models.tokenizer import Tokenizer

# Type of the matrices -> general.file_type, and the type from which they are made.
TYPES = {"f32": (0, "F32"), "f16": (1, "F16"), "bf16": (32, "BF16"), "q8_0": (7, "F32")}


def save_gguf(
    params: Params,
    cfg: Architecture,
    family: Family,
    tokenizer: Tokenizer,
    file: Path,
    kind: str,
    name: str,
    on_bytes: hf.OnBytes | None = None,
) -> None:
    """Writes the file, one tensor at a time. kind: a key of TYPES. name: of the model. on_bytes: is
    called after each tensor. Raises ValueError for a family or a tokenizer that llama.cpp does not
    know, and for rows that q8_0 cannot divide into blocks."""
    gguf = import_gguf(file)
    file_type, dtype = TYPES[kind]
    metadata = {"general.type": "model", "general.name": name, "general.file_type": file_type}
    if kind == "q8_0":
        metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    metadata |= _config(cfg, family) | _tokenizer(tokenizer, cfg.vocab_size)
    names = gguf_names(family, cfg.num_layers)
    made = hf.tensors_of(params, cfg, family)

    def tensor(hf_name: str) -> np.ndarray:
        has_rows = len(shapes[hf_name]) > 1
        value = made(hf_name, dtype if has_rows else "F32")
        if has_turned_rows(family, names[hf_name]):
            value = rows_of_pairs(value, cfg.head_dim)
        if has_plus_one(family, names[hf_name]):
            value = value + np.float32(1)
        if kind == "q8_0" and has_rows:
            value = gguf.quantize(value, gguf.GGMLQuantizationType.Q8_0)
        return value

    tensors = {}
    if cfg.rope_scaling is not None and cfg.rope_scaling.original_positions is not None:
        scaling, theta = cfg.rope_scaling, cfg.rope_theta_global
        divisors = gguf_metadata.rope_divisors(scaling, theta, cfg.head_dim)
        tensors[gguf_metadata.ROPE_DIVISORS] = (divisors.shape, "F32", lambda: divisors)
    shapes = hf.hf_shapes(cfg, family)
    for hf_name, shape in shapes.items():
        # As convert_hf_to_gguf.py has it, tensors of one dim stay in float32.
        own = kind.upper() if len(shape) > 1 else "F32"
        tensors[names[hf_name]] = (shape, own, partial(tensor, hf_name))
    _write(file, family, metadata, tensors, on_bytes)


def _write(
    file: Path,
    family: Family,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], str, Callable[[], np.ndarray]]],
    on_bytes: hf.OnBytes | None = None,
) -> None:
    """Writes a file. tensors: by name, the shape, the type and what makes it. Raises ValueError for
    a family that llama.cpp does not know."""
    gguf = import_gguf(file)
    if family.name not in gguf_metadata.MODEL_TYPES:
        raise ValueError(
            f"the family {family.name} has no GGUF format here; those that have one are "
            f"{', '.join(gguf_metadata.MODEL_TYPES)}"
        )
    writer = gguf.GGUFWriter(file, family.name)
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    add |= {str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        add[type(value)](key, value)

    # The header names all tensors before the first one is made.
    num_bytes = {}
    for name, (shape, kind, _) in tensors.items():
        own = gguf.GGMLQuantizationType[kind]
        block, _ = gguf.GGML_QUANT_SIZES[own]
        if shape[-1] % block:
            raise ValueError(
                f"type={kind.lower()}: the rows of {name} have {shape[-1]} numbers, which blocks "
                f"of {block} do not divide; give type=f16"
            )
        in_bytes = gguf.quant_shape_to_byte_shape(shape, own)
        num_bytes[name] = int(np.prod(in_bytes))
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), num_bytes[name], own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()

    # one tensor at a time: the whole model in float32 would not fit beside itself
    num_written = 0
    for name, (_, _, make) in tensors.items():
        writer.write_tensor_data(np.ascontiguousarray(make()).view(np.uint8))
        num_written += num_bytes[name]
        if on_bytes is not None:
            on_bytes(num_written, sum(num_bytes.values()))
    writer.close()


def save_gguf_adapter(
    tensors: dict[str, np.ndarray],
    cfg: Architecture,
    family: Family,
    alpha: float,
    file: Path,
    name: str,
) -> None:
    """Writes adapters in float32. tensors: as peft.to_tensors returns them. name: of the base.
    Raises ValueError for a family that llama.cpp does not know."""
    metadata = {"general.type": "adapter", "general.name": name, "adapter.type": "lora"}
    # llama.cpp divides it by the rank, as PEFT does
    metadata["adapter.lora.alpha"] = float(alpha)
    values = {}
    for own, (name, is_turned) in _adapter_names(tensors, cfg, family).items():
        value = tensors[own]
        if is_turned:
            value = rows_of_pairs(value, cfg.head_dim)
        values[name] = (value.shape, "F32", lambda value=value: value)
    _write(file, family, metadata, values)


def read_gguf_adapter(
    file: Path, tensors: Iterable[str], cfg: Architecture, family: Family
) -> dict[str, np.ndarray]:
    """The tensors of these names of PEFT, from a file that `save_gguf_adapter` wrote."""
    opened = open_gguf(file)
    read = {}
    for own, (name, is_turned) in _adapter_names(tensors, cfg, family).items():
        about = opened.tensors[name]
        value = opened.content(about, slice(0, about.shape[0])).view(np.float32)
        if is_turned:
            value = rows_of_halves(value, cfg.head_dim)
        read[own] = value
    return read


def _adapter_names(
    tensors: Iterable[str], cfg: Architecture, family: Family
) -> dict[str, tuple[str, bool]]:
    """By PEFT's name of a tensor, its name in the file, and whether llama.cpp turns its rows."""
    names = gguf_names(family, cfg.num_layers)
    made = {}
    for own in tensors:
        of_base = names[f"{module_of(own)}.weight"]
        side = "b" if own.endswith(".lora_B.weight") else "a"
        # The rows of B are the outputs.
        is_turned = side == "b" and has_turned_rows(family, of_base)
        made[own] = f"{of_base}.lora_{side}", is_turned
    return made


def _config(cfg: Architecture, family: Family) -> dict[str, Any]:
    """The metadata of an architecture."""
    by_key = {key: getattr(cfg, own) for own, key in family.keys.items()}
    by_key |= {"head_dim": cfg.head_dim, "rope_theta": cfg.rope_theta_global}
    keys = gguf_metadata.KEYS | gguf_metadata.OPTIONAL_KEYS
    if family.name in gguf_metadata.LAYERS_OF_27B:
        keys |= gguf_metadata.GEMMA_KEYS
        # llama.cpp takes every nth layer as global, and no list
        by_key["sliding_window_pattern"] = [*cfg.kinds, "global"].index("global") + 1
        by_key["rope_local_base_freq"] = cfg.rope_theta_local
    values = {}
    for key, (own, kind) in keys.items():
        if by_key.get(key):
            values[own] = kind(by_key[key])
    values |= {"attention.value_length": cfg.head_dim, "vocab_size": cfg.vocab_size}
    values |= {"rope.dimension_count": cfg.head_dim}
    if cfg.rope_scaling is not None and cfg.rope_scaling.original_positions is None:
        values |= {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": cfg.rope_scaling.factor,
        }
    return {f"{family.name}.{own}": value for own, value in values.items()}


# ---- the tokenizer


def _tokenizer(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata of a tokenizer and its template. Raises ValueError for one that llama.cpp has
    not."""
    made = json.loads(tokenizer.backend.to_str())
    model = made["model"]
    where = f"{tokenizer.folder}: the tokenizer"
    if model["type"] != "BPE":
        raise ValueError(f"{where} is {shown(model['type'])}; GGUF files are written of BPE")
    steps = made["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    is_of_bytes = any(step.get("type") == "ByteLevel" for step in steps)
    if not is_of_bytes and not model["byte_fallback"]:
        raise ValueError(f"{where} has no tokens for bytes; llama.cpp needs them")
    values = {"model": "gpt2" if is_of_bytes else "llama", "pre": "default"}
    if is_of_bytes:
        # The name that llama.cpp has for how a text is cut.
        cut = GPT2
        for step in steps:
            if step["type"] == "Digits" and step["individual_digits"]:
                cut = DIGITS
            elif step["type"] == "Split" and "Regex" in step["pattern"]:
                cut = step["pattern"]["Regex"]
            elif step["type"] != "ByteLevel" or step["add_prefix_space"]:
                cut = None
        known = [name for name, pattern in PATTERNS.items() if pattern == cut]
        if not known:
            raise ValueError(f"{where} cuts texts in a way that llama.cpp has no name for")
        values["pre"] = known[0]

    # Each row of the embedding needs a token.
    tokens = {i: text for text, i in tokenizer.vocabulary.items()}
    types = {i: NORMAL for i in tokens}
    for i, text in tokens.items():
        if not is_of_bytes and re.fullmatch("<0x[0-9A-F]{2}>", text):
            types[i] = BYTE
    for i, token in tokenizer.backend.get_added_tokens_decoder().items():
        types[i] = CONTROL if token.special else USER_DEFINED
    if not is_of_bytes:
        unknown = tokenizer.vocabulary.get(model["unk_token"])
        if unknown is not None:
            types[unknown] = UNKNOWN
        for i, token_type in types.items():
            # llama.cpp looks for these in the text, before its spaces are ▁.
            if token_type == USER_DEFINED:
                tokens[i] = tokens[i].replace("▁", " ")
    values["tokens"] = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    values["token_type"] = [types.get(i, UNUSED) for i in range(vocab_size)]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    values["merges"] = [" ".join(merge) for merge in merges]
    if not is_of_bytes:
        # llama.cpp merges two tokens into that of the highest score first.
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault("".join(merge), rank)
        values["scores"] = [float(-ranks.get(text, 0)) for text in values["tokens"]]
        texts = json.dumps([made["normalizer"], steps])
        values["add_space_prefix"] = (
            '"Prepend"' in texts or '"prepend_scheme": "first"' in texts
        )

    # Special tokens, and the template.
    ids = dict(zip(gguf_metadata.ENDS, tokenizer.eos_ids))
    if len(tokenizer.eos_ids) > len(ids):
        raise ValueError(
            f"{tokenizer.folder}: {len(tokenizer.eos_ids)} tokens end a completion; a GGUF file "
            f"names {len(ids)}"
        )
    named = {"bos": "bos_token", "unknown": "unk_token"}
    for key, name in named.items():
        number = tokenizer.vocabulary.get(tokenizer.special.get(name, ""))
        if number is not None:
            ids[key] = number
    ids["padding"] = tokenizer.pad_id
    if tokenizer.start_ids:
        ids["bos"] = tokenizer.start_ids[0]
    values |= {f"{key}_token_id": number for key, number in ids.items() if number < vocab_size}
    values |= {"add_bos_token": bool(tokenizer.start_ids), "add_eos_token": False}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if tokenizer.template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.template.standalone
    return metadata
