"""The small files of a model: those in its folder or, of a GGUF file, what its metadata say in
their place (llama.cpp: gguf-py/gguf/constants.py, src/llama-model.cpp, src/llama-vocab.cpp)."""

from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.basics.plain_text import shown
from tunix_lite.basics.untrusted import read_object
from tunix_lite.models.architecture import RopeScaling
from tunix_lite.models.family import ROPES
from tunix_lite.models.gguf_file import GgufFile, is_gguf, open_gguf

# general.architecture -> model_type of a config.json
MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# Key of config.json -> key of the metadata behind that of the architecture, and its type.
KEYS = {
    "num_hidden_layers": ("block_count", int),
    "hidden_size": ("embedding_length", int),
    "intermediate_size": ("feed_forward_length", int),
    "num_attention_heads": ("attention.head_count", int),
    "max_position_embeddings": ("context_length", int),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
}
OPTIONAL_KEYS = {
    "num_key_value_heads": ("attention.head_count_kv", int),
    "head_dim": ("attention.key_length", int),
    "rope_theta": ("rope.freq_base", float),
}
# Gemma's own. llama.cpp computes with the same where they are absent.
GEMMA_KEYS = {
    "sliding_window": ("attention.sliding_window", int),
    "sliding_window_pattern": ("attention.sliding_window_pattern", int),
    "rope_local_base_freq": ("rope.freq_base_swa", float),
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
}
# The models of 27B divide attention scores by the root of embedding_length / head_count: their
# block_count, by architecture. llama.cpp knows them by it, too.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# The rope scaling of Llama 3.1 to 3.3. A GGUF file has only the divisors that follow from it.
LLAMA3_SCALINGS = tuple(RopeScaling(x, 1.0, 4.0, 8192) for x in (8.0, 32.0))
ROPE_DIVISORS = "rope_freqs.weight"
# Ends of a sequence, of a turn, of a message.
ENDS = ("eos", "eot", "eom")
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def small_object(model: Path, name: str) -> dict[str, Any]:
    """The JSON object in a small file of a model, a folder or a GGUF file; {} without it. Raises
    ValueError."""
    if is_gguf(model):
        made = {
            "config.json": _config,
            "tokenizer_config.json": _special_tokens,
            "generation_config.json": _token_ids,
        }
        if name in made:
            return made[name](open_gguf(model))
        return {}
    if (model / name).is_file():
        return read_object(model / name)
    return {}


def _config(file: GgufFile) -> dict[str, Any]:
    """The config.json that says the same as the metadata."""
    name = file.value("general.architecture", str)
    if name not in MODEL_TYPES:
        raise ValueError(
            f"{file.path}: general.architecture={shown(name)} is not supported; supported is "
            f"{', '.join(MODEL_TYPES)}"
        )
    if (kind := file.value("general.type", str, "model")) != "model":
        raise ValueError(f"{file.path}: general.type={shown(kind)}; expected is 'model'")
    if file.value("split.count", int, 1) > 1:
        raise ValueError(
            f"{file.path}: split.count: this is a part of a model; join the parts with "
            "llama-gguf-split --merge"
        )

    # Numbers that have a key of their own.
    config = {"model_type": MODEL_TYPES[name]}
    for key, (own, kind) in KEYS.items():
        config[key] = file.value(f"{name}.{own}", kind)
    optional = OPTIONAL_KEYS | (GEMMA_KEYS if name in LAYERS_OF_27B else {})
    for key, (own, kind) in optional.items():
        if (value := file.value(f"{name}.{own}", kind, None)) is not None:
            config[key] = value
    for key, (own, kind) in (KEYS | optional).items():
        if kind is int and config.get(key) == 0:
            raise ValueError(f"{file.path}: {name}.{own} is 0; expected is 1 or more")
    # 9.999999974752427e-07 is the float32 that means 1e-06.
    config = {
        k: float(str(np.float32(v))) if type(v) is float else v for k, v in config.items()
    }

    # What follows from others, or has to agree with them.
    width = config["hidden_size"] // config["num_attention_heads"]
    head_dim = config.setdefault("head_dim", width)
    for own in ("attention.value_length", "rope.dimension_count"):
        if (size := file.value(f"{name}.{own}", int, head_dim)) != head_dim:
            raise ValueError(
                f"{file.path}: {name}.{own} is {size}, and heads have {head_dim}: that is not "
                "supported"
            )
    # Where a file has no head, the embedding is the head, too.
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path}: the tensor token_embd.weight is missing")
    config["vocab_size"] = embedding.shape[0]
    if name in LAYERS_OF_27B:
        is_27b = config["num_hidden_layers"] == LAYERS_OF_27B[name]
        config["query_pre_attn_scalar"] = width if is_27b else head_dim
    config |= _rope_scaling(file, name, head_dim, config.get("rope_theta", 10_000.0))
    return config | _token_ids(file)


def _rope_scaling(file: GgufFile, name: str, head_dim: int, theta: float) -> dict[str, Any]:
    """The rope_scaling of a config.json: linear by its keys, as of Llama 3 by its divisors."""
    kind = file.value(f"{name}.rope.scaling.type", str, "none")
    if kind == "linear":
        factor = file.value(f"{name}.rope.scaling.factor", float)
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "none":
        raise ValueError(
            f"{file.path}: {name}.rope.scaling.type={shown(kind)} is not supported; supported is "
            "none or linear"
        )
    # llama.cpp keeps the divisors, and not the settings that they come from: the known settings are
    # tried.
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return {}
    if name == "llama" and tensor.type == "F32" and tensor.shape == (head_dim // 2,):
        divisors = file.content(tensor, slice(0, 1)).view("<f4")
        for scaling in LLAMA3_SCALINGS:
            if np.allclose(
                divisors, rope_divisors(scaling, theta, head_dim), rtol=1e-5, atol=0
            ):
                keys = ROPES["llama3"][1].items()
                rope = {key: getattr(scaling, name) for name, key in keys}
                return {"rope_scaling": {"rope_type": "llama3"} | rope}
    raise ValueError(
        f"{file.path}: the tensor {ROPE_DIVISORS} is not that of Llama 3.1 to 3.3, and others are "
        "not supported"
    )


def rope_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """What each rotary frequency is divided by, [head_dim / 2], float32."""
    frequency = theta ** -(np.arange(head_dim // 2) / (head_dim // 2))
    return (frequency / scaling.scaled(frequency)).astype(np.float32)


def _token_ids(file: GgufFile) -> dict[str, Any]:
    """The ids of special tokens, as config.json has them."""
    keys = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    ids = {name: file.value(f"tokenizer.ggml.{key}", int, None) for name, key in keys.items()}
    ends = [file.value(f"tokenizer.ggml.{end}_token_id", int, None) for end in ENDS]
    ids["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return {name: value for name, value in ids.items() if value is not None}


def _special_tokens(file: GgufFile) -> dict[str, Any]:
    """The special tokens by name, and the chat template."""
    # the format has numbers where others have texts
    tokens = file.array("tokenizer.ggml.tokens", str)
    config = {}
    for name, key in SPECIAL.items():
        if (number := file.value(f"tokenizer.ggml.{key}", int, None)) is not None:
            if number >= len(tokens):
                raise ValueError(
                    f"{file.path}: tokenizer.ggml.{key} is {number}, and there are {len(tokens)} "
                    "tokens"
                )
            config[name] = tokens[number]
    if (template := file.value("tokenizer.chat_template", str, None)) is not None:
        config["chat_template"] = template
    return config
