"""The Hugging Face layout of each family of models: its `config.json`, and the names of its
tensors. What a config.json asks for and the decoder does not compute is an error."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from tunix_lite.basics.imports import import_named
from tunix_lite.basics.plain_text import shown
from tunix_lite.models.architecture import (
    MOST_LAYERS,
    Architecture,
    DeltaNet,
    LongRope,
    RopeScaling,
    Yarn,
    repeated,
)
from tunix_lite.models.decoder import layer_weights, stacks
from tunix_lite.models.gguf_file import is_gguf
from tunix_lite.models.gguf_metadata import small_object

# Entry of the list of layers in config.json -> kind of a layer. Where there is no list, the second
# kind is that of every nth layer.
KINDS = {"sliding_attention": "local", "full_attention": "global"}
ROTATIONS = {1: "global", 0: "unrotated"}
HYBRID_KINDS = {"linear_attention": "delta", "full_attention": "global"}
LENGTH = "original_max_position_embeddings"
MOST = "max_position_embeddings"
# Field of Yarn -> key of a rope object of config.json.
YARN_KEYS = {
    "factor": "factor",
    "original_positions": LENGTH,
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "amplitude": "attention_factor",
    "query_growth": "llama_4_scaling_beta",
}
# Field that a message of Architecture, or of what it holds, names -> key of a rope object.
ROPE_KEYS = {field: key for field, key in YARN_KEYS.items() if field != key} | {
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "long_positions": MOST,
    "rope_theta_global": "rope_theta",
    "rope_theta_local": "rope_theta",
}
# Field of Architecture -> key of config.json.
KEYS = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}
TOP_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
    "score_bias": "score.bias",
    "per_layer/table": "model.embed_tokens_per_layer.weight",
    "per_layer/project": "model.per_layer_model_projection.weight",
    "per_layer/norm": "model.per_layer_projection_norm.weight",
}
# End of a class of transformers -> Architecture.output.
SCORERS = {"ForSequenceClassification": "score", "ForTokenClassification": "biased_score"}
# Within model.layers.<i>.
NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
QK_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
DELTA = {  # of layers whose kind is delta
    "delta/qkv": "linear_attn.in_proj_qkv.weight",
    "delta/z": "linear_attn.in_proj_z.weight",
    "delta/b": "linear_attn.in_proj_b.weight",
    "delta/a": "linear_attn.in_proj_a.weight",
    "delta/conv": "linear_attn.conv1d.weight",
    "delta/decay": "linear_attn.A_log",
    "delta/step_bias": "linear_attn.dt_bias",
    "delta/norm": "linear_attn.norm.weight",
    "delta/o": "linear_attn.out_proj.weight",
}
DELTA_KEYS = {
    "delta.num_key_heads": "linear_num_key_heads",
    "delta.num_value_heads": "linear_num_value_heads",
    "delta.key_dim": "linear_key_head_dim",
    "delta.value_dim": "linear_value_head_dim",
    "delta.taps": "linear_conv_kernel_dim",
}
QKV_BIASES = {f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
POST_NORMS = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
PER_LAYER = {
    "per_layer_gate": "per_layer_input_gate.weight",
    "per_layer_out": "per_layer_projection.weight",
    "per_layer_norm": "post_per_layer_input_norm.weight",
}
# Fields of Architecture, and what they are where all layers are of one shape.
ONE_SHAPE = {
    "global_head_dim": None,
    "global_kv_heads": None,
    "global_rope_share": 1.0,
    "keys_as_values": False,
    "value_norm": False,
    "kv_readers": 0,
    "wide_readers": False,
    "per_layer_dim": 0,
    "layer_scalar": False,
}


def _local_by_list(hf: dict) -> list[str]:
    """The kind of every layer: of `layer_types` if given, else of Qwen's two keys, else global."""
    count = hf["num_hidden_layers"]
    has_windows = _number(hf.get("use_sliding_window") or False, "use_sliding_window", bool)
    first_local = count
    if has_windows:
        first_local = _number(hf.get("max_window_layers", count), "max_window_layers", int)
    return _listed(hf) or ["global" if i < first_local else "local" for i in range(count)]


def _listed(hf: dict, kinds: dict = KINDS, key: str = "layer_types") -> list[str] | None:
    """The kinds of `layer_types`, or of another key; None without it. kinds: what each type is."""
    count = hf["num_hidden_layers"]
    types = hf.get(key)
    if types is None:
        return None
    is_list = isinstance(types, list) and len(types) == count
    # An entry may be a list, which a dict cannot look up.
    if not is_list or any(t not in list(kinds) for t in types):
        names = " or ".join(map(str, kinds))
        raise ValueError(f"{key} must hold {count} entries, each {names}")
    return [kinds[t] for t in types]


def _all_local(hf: dict) -> list[str]:
    """The kind of every layer of Mistral: local, if there is a window that hides a token."""
    window = hf["sliding_window"]
    is_local = window is not None and window < hf[MOST]
    return ["local" if is_local else "global"] * hf["num_hidden_layers"]


def _every_nth(
    n: int,
    *intervals: str,
    types: dict = KINDS,
    listed: str = "layer_types",
) -> Callable[[dict], list[str]]:
    """The kind of every layer: of the list `listed`; without it every nth layer is of the last of
    `types`. intervals: the keys of config.json that say n, if it has one."""
    others, nth = types.values()

    def kinds(hf: dict) -> list[str]:
        if listed != "layer_types" and "local" in (_listed(hf) or []):
            raise ValueError("layer_types: sliding_attention is not supported in this family")
        key = next((key for key in intervals if hf.get(key) is not None), None)
        every = n if key is None else _number(hf[key], key, int)
        if every < 1:
            raise ValueError(f"{key}={every}; it is 1 or more")
        count = hf["num_hidden_layers"]
        by_interval = [others if i % every else nth for i in range(1, count + 1)]
        return _listed(hf, types, listed) or by_interval

    return kinds


# Gemma and Olmo: these keys say n, where they are there.
_NTH_GLOBAL = ("sliding_window_pattern", "_sliding_window_pattern")


def _gemma4_keys(hf: dict) -> dict:
    """A config.json of Gemma 4 with the kinds of its layers, and what differs by kind under one
    spelling.

    transformers writes `per_layer_config`, an object by the number of a layer. Raises ValueError.
    """
    kinds = _every_nth(6, *_NTH_GLOBAL)(hf)
    if hf.get("layer_types") and kinds[-1] == "local":
        raise ValueError("layer_types: the last layer must be full_attention")
    # transformers takes the last one as global.
    wide = [str(i) for i, kind in enumerate([*kinds[:-1], "global"]) if kind == "global"]
    types = ("sliding_attention", "full_attention")
    hf = hf | {"layer_types": [types[str(i) in wide] for i in range(len(kinds))]}
    if "per_layer_config" in hf:
        by_layer = _object(hf.pop("per_layer_config") or {}, "per_layer_config")
        # 05 is layer 5 of 10 or more
        by_layer = {number.lstrip("0") or "0": own for number, own in by_layer.items()}
        own = _object(by_layer.get(wide[0], {}), "per_layer_config")
        if by_layer and by_layer != dict.fromkeys(wide, own):
            raise ValueError(
                "per_layer_config must have the same for each layer with full_attention, and no "
                "other layers"
            )
        if odd := own.keys() - {"head_dim", "num_key_value_heads"}:
            raise ValueError(f"per_layer_config.{wide[0]}: {shown(min(odd))} is not supported")
        hf["global_head_dim"] = own.get("head_dim", hf["head_dim"])
        hf["num_global_key_value_heads"] = own.get("num_key_value_heads")
    elif not hf["attention_k_eq_v"]:
        # transformers takes num_key_value_heads then, whatever this key says.
        heads = hf["num_key_value_heads"]
        if (own := hf["num_global_key_value_heads"]) not in (None, heads):
            raise ValueError(
                f"num_global_key_value_heads={shown(own)} beside attention_k_eq_v=false, with "
                f"which these layers have num_key_value_heads={shown(heads)}; delete that key"
            )
        hf["num_global_key_value_heads"] = None
    if (both := hf.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise ValueError(
            f"use_bidirectional_attention={shown(both)} is not supported; null and 'vision' are"
        )
    rows = hf.get("vocab_size_per_layer_input", 262_144)
    if hf.get("hidden_size_per_layer_input") and rows != hf["vocab_size"]:
        raise ValueError(
            f"vocab_size_per_layer_input={shown(rows)} is not vocab_size={shown(hf['vocab_size'])}"
        )
    return hf


@dataclass(frozen=True, eq=False)
class Family:
    """The layout of one family. A new one that needs no new computation is just an object of this
    class.

    Example: `LLAMA`, below.
    """

    name: str
    model_type: str  # in config.json
    architecture: str  # the class in transformers
    flags: dict[str, Any]  # fields of Architecture that all its models share
    # our name of a layer's weight -> the tensor's, within model.layers.<i>.
    names: dict[str, str]
    keys: dict[str, str] = field(default_factory=lambda: KEYS)
    # key -> the value that it must have if config.json has it
    fixed: dict[str, Any] = field(default_factory=dict)
    # key -> its value where config.json leaves it out
    absent: dict[str, Any] = field(default_factory=dict)
    # config.json -> the kind of every layer
    kinds: Callable[[dict], list[str]] = _local_by_list
    has_windows: bool = True  # config.json lists the kinds of layers
    types: dict[Any, str] = field(default_factory=lambda: KINDS)  # under these names
    kinds_key: str = "layer_types"  # in this list
    rope_by_kind: bool = False  # config.json gives rope settings for each kind of layer
    ropes: tuple[str, ...] = ("default", "linear", "llama3")  # values of rope_type
    wrapper: str | None = (
        None  # model_type of models that hold one of this family as text part
    )
    # beginnings of the tensor names of such models, in place of our "model."
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # beginnings of the names of tensors of their other parts
    optional: frozenset[str] = frozenset()  # of names, those that not all models have
    # config.json -> the same, with what has several spellings in that of `keys`
    respelled: Callable[[dict], dict] = dict


def _but(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same without these names."""
    return {name: value for name, value in values.items() if name not in names}


LLAMA_LIKE = {
    "activation": "silu",
    "embed_scale": False,
    "norm_plus_one": False,
    "post_norms": False,
    "attn_softcap": None,
    "final_softcap": None,
    "attn_gate": False,
    "rope_share": 1.0,
    "delta": None,
} | ONE_SHAPE
GEMMA = _but(LLAMA_LIKE, "attn_softcap", "final_softcap") | {
    "activation": "gelu",
    "embed_scale": True,
    "norm_plus_one": True,
    "post_norms": True,
    "qkv_bias": False,
}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_UNTIED = {"tie_word_embeddings": False, "rope_theta": 10_000.0}
GEMMA2 = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    flags=GEMMA | {"qk_norm": False, "rope_scaling": None},
    names=NAMES | POST_NORMS,
    keys=KEYS
    | {
        "window": "sliding_window",
        "query_scale": "query_pre_attn_scalar",
        "attn_softcap": "attn_logit_softcapping",
        "final_softcap": "final_logit_softcapping",
    },
    fixed=_GELU | {"use_bidirectional_attention": False},
    absent=_UNTIED | {"tie_word_embeddings": True},
    kinds=_every_nth(2, *_NTH_GLOBAL),
)
# The config.json of published models may have only values that differ from these.
_OF_GEMMA = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
GEMMA3 = Family(
    name="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    flags=GEMMA | {"qk_norm": True, "attn_softcap": None, "final_softcap": None},
    names=NAMES | POST_NORMS | QK_NORMS,
    keys=KEYS | {"window": "sliding_window", "query_scale": "query_pre_attn_scalar"},
    fixed=_GELU
    | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    absent=_OF_GEMMA
    | {
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    kinds=_every_nth(6, *_NTH_GLOBAL),
    rope_by_kind=True,
    wrapper="gemma3",
    prefixes=("language_model.model.", "model.language_model."),
    ignored=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
_ROPE_OF_GEMMA4 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
GEMMA4 = Family(
    name="gemma4",
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    flags=_but(GEMMA, *ONE_SHAPE)
    | {
        "norm_plus_one": False,
        "qk_norm": True,
        "value_norm": True,
        "layer_scalar": True,
        "query_scale": 1,
        "attn_softcap": None,
        "rope_scaling": None,
    },
    names=NAMES | POST_NORMS | QK_NORMS | PER_LAYER | {"layer_scalar": "layer_scalar"},
    optional=frozenset({*PER_LAYER, "k", "v", "k_norm"}),
    keys=KEYS
    | {
        "window": "sliding_window",
        "final_softcap": "final_logit_softcapping",
        "global_head_dim": "global_head_dim",
        "global_kv_heads": "num_global_key_value_heads",
        "keys_as_values": "attention_k_eq_v",
        "kv_readers": "num_kv_shared_layers",
        "wide_readers": "use_double_wide_mlp",
        "per_layer_dim": "hidden_size_per_layer_input",
    },
    # Experts are those of 26B-A4B.
    fixed=_GELU | {"enable_moe_block": False},
    absent=_OF_GEMMA
    | {
        "vocab_size": 262_144,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "rope_parameters": _ROPE_OF_GEMMA4,
    },
    kinds=_every_nth(6, *_NTH_GLOBAL),
    respelled=_gemma4_keys,
    rope_by_kind=True,
    wrapper="gemma4",
    prefixes=("model.language_model.",),
    ignored=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)
# The form of 12B, whose images and sounds have no towers.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    flags=GEMMA4.flags | {"per_layer_dim": 0},
    names=_but(GEMMA4.names, *PER_LAYER),
    keys=_but(GEMMA4.keys, "per_layer_dim"),
    fixed=_GELU,
    absent=GEMMA4.absent
    | {
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
        "hidden_size_per_layer_input": 0,
    },
    wrapper="gemma4_unified",
    ignored=(*GEMMA4.ignored, "model.vision_embedder."),
)
QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    flags=LLAMA_LIKE | {"qkv_bias": True, "qk_norm": False, "rope_scaling": None},
    names=NAMES | QKV_BIASES,
    keys=KEYS | {"window": "sliding_window"},
    fixed={"hidden_act": "silu"},
    absent=_UNTIED,
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    flags=QWEN2.flags | {"qkv_bias": False, "qk_norm": True},
    names=NAMES | QK_NORMS,
    fixed={"hidden_act": "silu", "attention_bias": False},
)
QWEN3_5 = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    flags=_but(QWEN3.flags, "rope_share", "delta")
    | {"norm_plus_one": True, "attn_gate": True},
    names=NAMES | QK_NORMS | DELTA,
    keys=KEYS | DELTA_KEYS,
    fixed=QWEN3.fixed | {"attn_output_gate": True},
    absent=_UNTIED
    | {
        "partial_rotary_factor": 0.25,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    kinds=_every_nth(4, "full_attention_interval", types=HYBRID_KINDS),
    types=HYBRID_KINDS,
    wrapper="qwen3_5",
    prefixes=GEMMA4.prefixes,
    # Layers that predict more tokens at once, and the vision part.
    ignored=("mtp.", "model.visual."),
)
LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    flags=LLAMA_LIKE
    | {"qkv_bias": False, "qk_norm": False, "pattern": ("global",), "window": None},
    names=NAMES,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    absent=_UNTIED,
    has_windows=False,
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    flags=_but(LLAMA.flags, "pattern", "window"),
    keys=QWEN2.keys,
    fixed=QWEN2.fixed,
    absent=_UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, MOST: 131_072},
    kinds=_all_local,
    ropes=("default",),
)
MINISTRAL3 = replace(
    LLAMA,
    name="ministral3",
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    fixed=QWEN2.fixed | {"sliding_window": None},
    absent=_UNTIED | {"num_key_value_heads": 8, "head_dim": 128},
    ropes=("yarn",),
    wrapper="mistral3",
    prefixes=GEMMA3.prefixes,
    ignored=GEMMA3.ignored,
)
PHI3 = replace(
    MISTRAL,
    name="phi3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    flags=_but(MISTRAL.flags, "rope_share"),
    # Several weights in one tensor: the rows of the first, then those of the next.
    names=NAMES
    | dict.fromkeys("qkv", "self_attn.qkv_proj.weight")
    | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight"),
    fixed=LLAMA.fixed | {"lm_head_bias": False},
    absent=_UNTIED | {MOST: 4096, LENGTH: 4096},
    ropes=("default", "longrope"),
)
OLMO3 = replace(
    MISTRAL,
    name="olmo3",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    flags=MISTRAL.flags
    | {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True},
    names=_but(NAMES | POST_NORMS | QK_NORMS, "attn_norm", "mlp_norm"),
    fixed=QWEN3.fixed,
    absent=_UNTIED | {"rope_theta": 500_000.0, "sliding_window": 4096},
    kinds=_every_nth(4, *_NTH_GLOBAL),
    has_windows=True,
    rope_by_kind=True,
    ropes=("default", "yarn"),
)
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    flags=_but(LLAMA.flags, "pattern"),
    fixed=LLAMA.fixed | {"use_sliding_window": False},
    absent={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    kinds=_every_nth(4, "no_rope_layer_interval", types=ROTATIONS, listed="no_rope_layers"),
    has_windows=True,
    types=ROTATIONS,
    kinds_key="no_rope_layers",
    ropes=("default", "yarn"),
)
_RELATIVES = (MINISTRAL3, MISTRAL, OLMO3, PHI3, SMOLLM3)
FAMILIES = {
    family.name: family
    for family in (
        *(GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, LLAMA),
        *_RELATIVES,
        *(QWEN2, QWEN3, QWEN3_5),
    )
}


def find_family(name: str) -> Family:
    """A family by its name here, or the user's own by its dotted path. Raises ValueError."""
    if name in FAMILIES:
        return FAMILIES[name]
    try:
        family = import_named(name)
    except ValueError as error:
        raise ValueError(
            f"{name!r} is neither one of {', '.join(FAMILIES)} nor importable ({error})"
        ) from error
    if not isinstance(family, Family):
        raise ValueError(f"{name} is not a Family (docs/extend/model)")
    return family


# ---- config.json


def read_config(
    folder: str | Path, family: Family | None = None
) -> tuple[Architecture, Family]:
    """The architecture of the model in `folder`, or in a GGUF file, and its family: the one given,
    or that of its model_type.

    Raises ValueError naming what is missing, not supported, or not of that family.
    """
    folder = Path(folder)
    file = folder if is_gguf(folder) else folder / "config.json"
    if not file.parent.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not file.is_file():
        raise ValueError(
            f"{folder} has no config.json; a model folder in Hugging Face format has one"
        )
    hf = small_object(folder, "config.json")

    # The family.
    kind = hf.get("model_type")
    known = [family] if family else FAMILIES.values()
    named_family = next(
        (f for f in known if kind in (f.model_type, f.wrapper) and kind is not None), None
    )
    if named_family is None and family is not None:
        raise ValueError(
            f"{file}: model_type is {shown(kind)}; the family {family.name} has "
            f"{family.model_type!r}"
        )
    if named_family is None:
        supported = ", ".join(str(f.model_type) for f in known)
        raise ValueError(
            f"{file}: model_type is {shown(kind)}; supported is {supported} (docs/extend/model "
            "says how to add)"
        )

    # What it gives of a token, by the class in transformers.
    classes = hf.get("architectures")
    is_class = isinstance(classes, list) and classes and isinstance(classes[0], str)
    ends = [end for end in SCORERS if is_class and classes[0].endswith(end)]
    output = SCORERS[ends[0]] if ends else "logits"

    # The architecture. Of a larger model, its text part.
    if kind == named_family.wrapper:
        tied = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        hf = tied | (hf.get("text_config") or {})
    try:
        cfg = _config_from(_object(hf, "text_config"), named_family)
        return replace(cfg, output=output), named_family
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        # A message of Architecture, with the keys of config.json in place of its fields.
        share = "partial_rotary_factor"
        keys = named_family.keys | {"rope_share": share, "global_rope_share": share}
        keys |= {"pattern": named_family.kinds_key, "window": "sliding_window"}
        keys |= {name.rpartition(".")[2]: key for name, key in keys.items()}
        names = "|".join(sorted(map(re.escape, keys), key=len, reverse=True))
        fields_in_text = rf"\b({names})\b(?==| is not given)"
        message = re.sub(fields_in_text, lambda field: keys[field[1]], str(error))
        # Fields of rope objects are no words of other messages.
        names = "|".join(ROPE_KEYS)
        message = re.sub(rf"\b({names})\b", lambda field: ROPE_KEYS[field[1]], message)
        raise ValueError(f"{file}: {message}") from error


def _config_from(hf: dict, family: Family) -> Architecture:
    """The architecture that a config.json, `hf`, describes.

    Raises ValueError for a value that is not supported, and KeyError for a key that is missing.
    """
    for key, wanted in family.fixed.items():
        if hf.get(key, wanted) not in (wanted, wanted or None):
            raise ValueError(
                f"{key}={shown(hf[key])} is not supported; supported is {wanted!r}"
            )
    if hf.get("is_causal", True) is not True:
        raise ValueError("is_causal: a token sees those before it only; supported is true")
    if hf.get("quantization_config"):
        raise ValueError(
            "quantization_config: quantised weights cannot be read; model.lora.base quantises "
            "other weights"
        )

    # Keys that are missing, and sizes that later ones are derived from.
    config = hf
    # transformers leaves out what has its default there
    hf = family.absent | hf
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if _number(hf[key], key, int) < 1:
            raise ValueError(f"{key}={shown(hf[key])}; it is 1 or more")
    # Checked before a list of so many layers is made.
    if hf["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers={shown(hf['num_hidden_layers'])}; it is at most {MOST_LAYERS:,}"
        )
    hf = family.respelled(hf)
    if hf.get("num_key_value_heads") is None:
        hf["num_key_value_heads"] = hf["num_attention_heads"]
    if hf.get("head_dim") is None:
        hf["head_dim"] = hf["hidden_size"] // hf["num_attention_heads"]
    # Where a layer is local and needs it, Architecture raises an error.
    hf.setdefault("sliding_window", None)
    types = get_type_hints(Architecture)
    values = {}
    for name, key in family.keys.items():
        part, _, inner = name.rpartition(".")
        kinds = get_args(types[name]) if not part else ()
        is_absent = hf[key] is None and type(None) in kinds
        kind = (*kinds, int if part else types[name])[0]
        value = None if is_absent else _number(hf[key], key, kind)
        (values.setdefault(part, {}) if part else values)[inner] = value
    if "delta" in values:
        values["delta"] = DeltaNet(**values["delta"])
    if "query_scale" not in family.flags:
        values.setdefault("query_scale", hf["head_dim"])
    kinds = family.kinds(hf)
    values["pattern"] = repeated(kinds)
    if "local" not in kinds:
        values["window"] = None
    values |= _rope(config, family, kinds)
    if (long := values["longrope"]) is not None:
        values["max_positions"] = min(long.original_positions, long.long_positions)

    # The flags of the family are not in config.json, but fields that are must agree with them.
    for name in sorted(values.keys() & family.flags.keys()):
        if values[name] != family.flags[name]:
            raise ValueError(
                f"{name}={values[name]!r} is not supported; the family {family.name} has "
                f"{family.flags[name]!r}"
            )
    return Architecture(**(values | family.flags))


def _number(value: object, key: str, kind: type) -> Any:
    """The value as an int, a finite float or a bool. Raises ValueError, naming the key."""
    if type(value) is kind and (kind is not float or math.isfinite(value)):
        return value
    # A larger one may be beyond every float.
    if kind is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    # Gemma writes some whole numbers as 256.0.
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    expected = "true or false" if kind is bool else f"a finite {kind.__name__}"
    raise ValueError(f"{key}={shown(value)}; it is {expected}")


def _object(value: object, key: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{key}={shown(value)}; it is an object")
    return value


def _rope(config: dict, family: Family, kinds: list[str]) -> dict[str, Any]:
    """The rope settings of a config.json, in the newer spelling or the older one."""
    newer = (family.absent | config).get("rope_parameters")
    newer = _object(newer or {}, "rope_parameters")
    scaling = _object(config.get("rope_scaling") or {}, "rope_scaling")
    of_global = _one_rope(config, family, newer, "full_attention", "rope_theta", scaling)
    of_local = of_global
    # Newer, one object for each kind; older, a key of its own for the local layers.
    local_key = "rope_local_base_freq"
    if "full_attention" in newer or family.rope_by_kind or local_key in config:
        theta_key = local_key if local_key in family.absent else "rope_theta"
        of_local = _one_rope(config, family, newer, "sliding_attention", theta_key, {})

    # Proportional: the lowest frequencies are zero. Another form turns only part of a head.
    is_proportional = of_global.get("rope_type") == "proportional"
    if is_proportional and "global_rope_share" not in family.flags:
        of_global = of_global | {"rope_type": "linear" if "factor" in of_global else "default"}
    else:
        is_proportional = False
    key = "partial_rotary_factor"
    share = of_global.get(key, (family.absent | config).get(key, 1.0))
    share = _number(share, key, float)
    scaled = _scaling(of_global, config, family)
    of_windows = _scaling(of_local, config, family) if "local" in kinds else {}
    if of_windows.keys() - {"longrope"}:
        raise ValueError("rope scaling of layers with sliding attention is not supported")
    return {
        "rope_theta_local": _number(of_local["rope_theta"], "rope_theta", float),
        "rope_theta_global": _number(of_global["rope_theta"], "rope_theta", float),
        **dict.fromkeys(("rope_scaling", "yarn", "longrope")),
        "rope_share": 1.0 if is_proportional else share,
        "global_rope_share": share if is_proportional else 1.0,
        **scaled,
    }


def _one_rope(
    config: dict, family: Family, newer: dict, kind: str, theta_key: str, scaling: dict
) -> dict:
    """The rope object of one kind of layer, out of both spellings. Raises ValueError if they
    differ."""
    # Programs that read config.json do not agree on which one counts.
    if "full_attention" in newer:
        newer = _object(newer[kind], f"rope_parameters.{kind}")
    # both spellings may stand in one file, the newer for transformers, the older for other programs
    older = {"rope_theta": config.get(theta_key), **scaling}
    newer, older = (
        {
            {"type": "rope_type"}.get(k, k): value
            for k, value in rope.items()
            if value is not None
        }
        for rope in (newer, older)
    )
    for key in newer.keys() & older.keys():
        if newer[key] != older[key]:
            old_name = theta_key if key == "rope_theta" else f"rope_scaling.{key}"
            raise ValueError(
                f"rope_parameters.{key}={shown(newer[key])} and {old_name}={shown(older[key])} are "
                "one setting in two spellings; delete the one that does not hold"
            )
    # A default is for what neither names.
    return ({} if newer else {"rope_theta": family.absent[theta_key]}) | newer | older


def _scaling(rope: dict, config: dict, family: Family) -> dict[str, Any]:
    """The field of Architecture that stretches wavelengths as a rope object says; {}: nothing
    does."""
    kind = rope.get("rope_type", "default")
    ropes = family.ropes
    if family.flags.get("rope_scaling", ropes) is None:
        ropes = tuple(name for name in ropes if name not in ("linear", "llama3"))
    *most, last = ropes
    names = f"{', '.join(most)} or {last}" if most else last
    stretches = rope.keys() & {"factor", "short_factor", "long_factor"}
    if stretches and "rope_type" not in rope:
        key = min(stretches)
        raise ValueError(
            f"{key}={shown(rope[key])} has no rope_type beside it; add that key, which is {names}"
        )
    if "rope_type" not in rope and kind not in ropes:
        raise ValueError(f"rope_parameters has no rope_type; add it, which is {names}")
    if kind not in ropes:
        raise ValueError(f"rope_type {shown(kind)} is not supported; supported is {names}")
    # transformers takes the length beside the rope object before the one in it.
    if kind in ("yarn", "llama3") and (beside := config.get(LENGTH)) is not None:
        if rope.get(LENGTH, beside) != beside:
            raise ValueError(
                f"{LENGTH}={shown(beside)} and rope_parameters.{LENGTH}={shown(rope[LENGTH])} are "
                "one setting in two places; delete the one that does not hold"
            )
        rope = rope | {LENGTH: beside}

    def number(key: str, kind: type = float) -> Any:
        return _number(rope[key], key, kind)

    if kind == "linear":
        return {"rope_scaling": RopeScaling(number("factor"))}
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor")
        return {"rope_scaling": RopeScaling(*map(number, keys), number(LENGTH, int))}
    if kind == "yarn":
        if rope.get("truncate", True) is not True:
            raise ValueError("truncate: yarn is supported with true alone")
        grown = 0.1 * math.log(max(number("factor"), 1))
        amplitude = 1 + grown
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            amplitude = (1 + number("mscale") * grown) / (1 + number("mscale_all_dim") * grown)
        absent = {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.0}
        rope = absent | {"attention_factor": amplitude} | rope
        types = get_type_hints(Yarn)
        return {"yarn": Yarn(**{n: number(key, types[n]) for n, key in YARN_KEYS.items()})}
    if kind == "longrope":
        # Phi writes the length beside the rope object, too, and there it counts.
        beside = family.absent | config
        lengths = [_number(beside[key], key, int) for key in (LENGTH, MOST)]
        if lengths[0] < 2:
            raise ValueError(f"{LENGTH}={lengths[0]}; it is 2 or more")
        rope = {"factor": lengths[1] / lengths[0]} | rope
        grown = math.log(max(number("factor"), 1)) / math.log(lengths[0])
        rope = {"attention_factor": math.sqrt(1 + grown)} | rope
        lists = []
        for key in ("short_factor", "long_factor"):
            if not isinstance(rope[key], list):
                raise ValueError(f"{key}={shown(rope[key])}; it is a list of numbers")
            lists.append(tuple(_number(value, key, float) for value in rope[key]))
        return {"longrope": LongRope(*lists, *lengths, number("attention_factor"))}
    return {}


def check_flags(cfg: Architecture, family: Family) -> None:
    """Raises ValueError if `cfg` is not of the family, whose config.json could not hold it."""
    for name, value in family.flags.items():
        if getattr(cfg, name) != value:
            raise ValueError(
                f"{name}={getattr(cfg, name)!r}, but in the family {family.name} it is {value!r}"
            )
    expected = set(family.names)
    # an optional weight may be missing, an unknown one would be lost in the file
    names = set()
    for stack, (kind, _) in stacks(cfg).items():
        own = {name: f"{stack}/{name}" for name in layer_weights(cfg, kind)}
        names |= {full if full in expected else name for name, full in own.items()}
    if names - expected or expected - names - family.optional:
        raise ValueError(
            f"layers have {sorted(names)}, but in the family {family.name} {sorted(expected)}"
        )

    # A config.json that is written and read again must give the same architecture.
    read_back = _config_from(_as_json(cfg, family), family)
    lost = architecture_differences(as_computed(cfg), as_computed(read_back))
    if lost:
        raise ValueError(
            f"a config.json of the family {family.name} cannot hold all of this model: "
            f"{'; '.join(lost)} (read back)"
        )


def as_computed(cfg: Architecture) -> Architecture:
    """The architecture without what no layer uses, so that two that compute the same are equal."""
    pattern = repeated(cfg.kinds)
    # the layers compute the same, whatever is read of them
    unused: dict[str, Any] = {"output": "logits"}
    if cfg.longrope is not None:
        unused["max_positions"] = cfg.longrope.original_positions
    if "local" not in pattern:
        unused |= {"window": None, "rope_theta_local": cfg.rope_theta_global}
    # a size that is written out and equals the other is no difference
    heads, head_dim = cfg.kv_shape("global")
    unused["global_kv_heads"] = None if heads == cfg.num_kv_heads else heads
    unused["global_head_dim"] = None if head_dim == cfg.head_dim else head_dim
    if not cfg.kv_readers:
        unused["wide_readers"] = False
    return replace(cfg, pattern=pattern, **unused)


def config_json(cfg: Architecture, family: Family, **more: object) -> dict:
    """The config.json of an architecture, with `more` added. Raises ValueError if it is not of the
    family."""
    check_flags(cfg, family)
    return _as_json(cfg, family) | more


def keys_of_output(cfg: Architecture, family: Family) -> dict:
    """The keys of config.json with which transformers reads a reward model; {} for another one."""
    ends = [end for end, output in SCORERS.items() if output == cfg.output]
    if not ends:
        return {}
    # transformers has one class for the text model, and one for the larger model that holds it
    text = "Text" if family.model_type.endswith("_text") else ""
    name = family.architecture.removesuffix("ForCausalLM") + text + ends[0]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [name]} | labels


def _as_json(cfg: Architecture, family: Family) -> dict:
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    hf |= {key: attrgetter(name)(cfg) for name, key in family.keys.items()}
    hf |= {key: value for key, value in family.fixed.items() if value is not None}
    if "global_head_dim" in family.keys:
        hf["num_global_key_value_heads"], hf["global_head_dim"] = cfg.kv_shape("global")
    if "per_layer_dim" in family.keys:
        hf["vocab_size_per_layer_input"] = cfg.vocab_size
    if family.has_windows:
        names = {kind: name for name, kind in family.types.items()}
        hf[family.kinds_key] = [names[kind] for kind in cfg.kinds]
        if "use_sliding_window" not in family.fixed and family.kinds is _local_by_list:
            hf["use_sliding_window"] = "local" in cfg.kinds

    # Rope, in the newer keys.
    of_local = {"rope_type": "default", "rope_theta": cfg.rope_theta_local}
    of_global = {"rope_type": "default", "rope_theta": cfg.rope_theta_global}
    if cfg.rope_share < 1:
        of_global["partial_rotary_factor"] = cfg.rope_share
    if cfg.global_rope_share < 1:
        of_global["rope_type"] = "proportional"
        of_global["partial_rotary_factor"] = cfg.global_rope_share
    if (scaling := cfg.rope_scaling) is not None:
        of_global |= {"rope_type": "linear", "factor": scaling.factor}
        if scaling.original_positions is not None:
            of_global |= {
                "rope_type": "llama3",
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                LENGTH: scaling.original_positions,
            }
    if (yarn := cfg.yarn) is not None:
        written = {key: getattr(yarn, name) for name, key in YARN_KEYS.items()}
        # Only Ministral knows the last one, which is 0 in the others.
        of_global |= {"rope_type": "yarn"} | {key: x for key, x in written.items() if x}
    if (long := cfg.longrope) is not None:
        lists = {
            "short_factor": list(long.short_factors),
            "long_factor": list(long.long_factors),
        }
        of_global |= {"rope_type": "longrope", LENGTH: long.original_positions} | lists
        of_global["attention_factor"] = long.amplitude
        hf |= {LENGTH: long.original_positions, MOST: long.long_positions}
    by_kind = {"sliding_attention": of_local, "full_attention": of_global}
    hf["rope_parameters"] = by_kind if family.rope_by_kind else of_global
    return hf


def architecture_differences(one: Architecture, other: Architecture) -> list[str]:
    """The fields in which two architectures differ, floats in float32: "head_dim=64 against
    128"."""

    # Some files hold floats so: 1e-06 is 9.999999974752427e-07 there.
    def as_float32(value: object) -> object:
        return np.float32(value) if isinstance(value, float) else value

    values = (
        (f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(Architecture)
    )
    return [
        f"{name}={here!r} against {there!r}"
        for name, here, there in values
        if as_float32(here) != as_float32(there)
    ]


def is_wrapped(folder: Path | None, family: Family | None) -> bool:
    """True if the folder has a larger model of which ours is the text part, as of Gemma 3."""
    if folder is None or family is None or family.wrapper is None:
        return False
    return small_object(folder, "config.json").get("model_type") == family.wrapper
