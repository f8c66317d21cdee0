"""The small files of a model: those in its folder or, of a GGUF file, what its metadata say in
their place.

So a GGUF file is read by the code that reads a folder. Which key means what is defined by
llama.cpp (gguf-py/gguf/constants.py, src/llama-model.cpp, src/llama-vocab.cpp there).
"""

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tunix_lite.files.plain_text import escaped, shown
from tunix_lite.files.untrusted import read_object
from tunix_lite.models.architecture import RopeScaling
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

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the pattern by which a text is cut before merges; DIGITS, GPT2: as there
DIGITS, GPT2 = "each digit alone", "as GPT-2"
PATTERNS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
    "deepseek-r1-qwen": _LLAMA3.replace("{1,3}", ""),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "gpt-2": GPT2,
}
# Derived merges per token, at most. SentencePiece vocabularies have 2.
_MOST_MERGES = 8
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def small_object(model: Path, name: str) -> dict[str, Any]:
    """The JSON object in a small file of a model; {} without it.

    model: a folder, or a GGUF file. Raises ValueError, naming the file and what is wrong.
    """
    if is_gguf(model):
        made = {
            "config.json": _config,
            "tokenizer_config.json": _tokenizer_config,
            "generation_config.json": _generation_config,
        }
        return made[name](open_gguf(model)) if name in made else {}
    return read_object(model / name) if (model / name).is_file() else {}


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
    config: dict[str, Any] = {"model_type": MODEL_TYPES[name]}
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
    config = {k: float(str(np.float32(v))) if type(v) is float else v for k, v in config.items()}

    # What follows from others, or has to agree with them.
    width = config["hidden_size"] // config["num_attention_heads"]
    head_dim = config.setdefault("head_dim", width)
    for own in ("attention.value_length", "rope.dimension_count"):
        if (size := file.value(f"{name}.{own}", int, head_dim)) != head_dim:
            raise ValueError(
                f"{file.path}: {name}.{own} is {size}, and heads have {head_dim}: that is not "
                "supported"
            )
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
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return {}
    if name == "llama" and tensor.type == "F32" and tensor.shape == (head_dim // 2,):
        divisors = file.content(tensor, slice(0, 1)).view("<f4")
        for scaling in LLAMA3_SCALINGS:
            if np.allclose(divisors, rope_divisors(scaling, theta, head_dim), rtol=1e-5, atol=0):
                return {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": scaling.factor,
                        "low_freq_factor": scaling.low_freq_factor,
                        "high_freq_factor": scaling.high_freq_factor,
                        "original_max_position_embeddings": scaling.original_positions,
                    }
                }
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
    ends = [file.value(f"tokenizer.ggml.{end}_token_id", int, None) for end in _ENDS]
    ids["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return {name: value for name, value in ids.items() if value is not None}


# end of a sequence, of a turn, of a message
_ENDS = ("eos", "eot", "eom")


def _generation_config(file: GgufFile) -> dict[str, Any]:
    return _token_ids(file)


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The special tokens by name, and the chat template."""
    tokens = file.array("tokenizer.ggml.tokens", str)
    config = {}
    for name, key in _SPECIAL.items():
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


# ---- the tokenizer


def gguf_tokenizer(path: str) -> tokenizers.Tokenizer:
    """The tokenizer that the metadata of a GGUF file describe, as transformers makes it.

    Two kinds are read: `llama`, as SentencePiece makes them, and `gpt2`, of bytes. Raises
    ValueError for another one, and an Exception of the tokenizers library for merges that are not
    of the vocabulary.
    """
    file = open_gguf(Path(path))
    kind = file.value("tokenizer.ggml.model", str)
    if kind not in ("llama", "gpt2"):
        raise ValueError(
            f"{path}: tokenizer.ggml.model={shown(kind)} is not supported; supported is llama or "
            "gpt2"
        )
    num_tokens = small_object(file.path, "config.json")["vocab_size"]
    tokens = file.array("tokenizer.ggml.tokens", str, num_tokens)
    types = file.array("tokenizer.ggml.token_type", int, num_tokens)
    # Gemma's runs of spaces are spelled with spaces, and are merged as others are.
    is_gemma = kind == "llama" and file.value("general.architecture", str).startswith("gemma")
    if is_gemma:
        tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < num_tokens:
        i, token = next((i, t) for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise ValueError(
            f"{path}: tokenizer.ggml.tokens[{i}] and [{vocabulary[token]}] are both {shown(token)}"
        )
    config = _tokenizer_config(file)
    if kind == "gpt2":
        made = _bytes_tokenizer(file, vocabulary)
    else:
        made = _sentencepiece_tokenizer(file, vocabulary, is_gemma, config.get("unk_token"))
    for special, number in ((True, CONTROL), (False, USER_DEFINED)):
        made.add_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=special)
                for token, own in zip(tokens, types)
                if own == number and not (is_gemma and token.strip("▁") == "")
            ]
        )

    # What is added to each text.
    adds_bos = kind == "llama" or PATTERNS[file.value("tokenizer.ggml.pre", str)] is _LLAMA3
    ids = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        is_added = file.value(f"tokenizer.ggml.add_{name}_token", bool, default)
        if is_added and f"{name}_token" in config:
            ids[name] = config[f"{name}_token"]
    if ids:
        made.post_processor = processors.TemplateProcessing(
            single=[token for token in (ids.get("bos"), "$A", ids.get("eos")) if token],
            special_tokens=[(token, vocabulary[token]) for token in ids.values()],
        )
    return made


def _bytes_tokenizer(file: GgufFile, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """A BPE tokenizer of bytes, whose text is first cut as tokenizer.ggml.pre says."""
    pre = file.value("tokenizer.ggml.pre", str)
    if pre not in PATTERNS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre={shown(pre)} is not supported; supported is "
            f"{', '.join(PATTERNS)}"
        )
    pattern = PATTERNS[pre]
    # The tokenizer of Llama 3 takes a word that is a token as that token.
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, _merges(file), ignore_merges=pattern is _LLAMA3)
    )
    is_cut_by_pattern = pattern not in (DIGITS, GPT2)
    before = []
    if pattern is DIGITS:
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif is_cut_by_pattern:
        before = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_cut_by_pattern)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, of_bytes])
    if is_cut_by_pattern and pattern is not _LLAMA3:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece_tokenizer(
    file: GgufFile, vocabulary: dict[str, int], is_gemma: bool, unknown: str | None
) -> tokenizers.Tokenizer:
    """A BPE tokenizer of characters, with spaces as ▁ and a token for each byte."""
    if "tokenizer.ggml.merges" in file.values:
        merges = _merges(file)
    elif is_gemma:
        # Gemma's scores are not the order of its merges, and the numbers of its tokens are.
        merges = _derived_merges(file, vocabulary, [-i for i in range(len(vocabulary))])
    else:
        scores = file.array("tokenizer.ggml.scores", float, len(vocabulary))
        merges = _derived_merges(file, vocabulary, scores)
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        has_prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
        scheme = "first" if has_prefix else "never"
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        decoding += [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(decoding)
    return made


def _merges(file: GgufFile) -> list[tuple[str, ...]]:
    merges = [tuple(text.split(" ")) for text in file.array("tokenizer.ggml.merges", str)]
    for i, merge in enumerate(merges):
        if len(merge) != 2:
            text = escaped(" ".join(merge))
            raise ValueError(f"{file.path}: tokenizer.ggml.merges[{i}]={text!r} is no pair")
    return merges


def _derived_merges(
    file: GgufFile, vocabulary: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: each cut of a token into two others, by the score of
    the token and then by the length of the first part, both falling, as in transformers."""
    same = {token: token for token in vocabulary}
    merges = []
    num_tried = 0
    for score, token in zip(scores, vocabulary):
        num_tried += len(token)
        for i in range(1, len(token)):
            left = same.get(token[:i])
            if left is not None and (right := same.get(token[i:])) is not None:
                merges.append((score, i, len(right), left, right))
        if len(token) > 512 or len(merges) > _MOST_MERGES * len(vocabulary):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.tokens: the merges of these tokens are too many, or "
                f"{shown(token)} is too long to find them"
            )
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]
