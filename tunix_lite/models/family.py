"""What a family of models is: the fields of its `config.json`, the names of its tensors, and the
kinds of its layers. models/families.py has the families."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin

from tunix_lite.basics.plain_text import shown

# Entry of the list of layers in config.json -> kind of a layer. Where there is no list, the second
# kind is that of every nth layer.
KINDS = {"sliding_attention": "local", "full_attention": "global"}
ROTATIONS = {1: "global", 0: "unrotated"}
HYBRID_KINDS = {"linear_attention": "delta", "full_attention": "global"}
LENGTH = "original_max_position_embeddings"
MOST = "max_position_embeddings"
# rope_type -> the field of Architecture that it fills, and the keys of a rope object by its fields.
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
ROPES = {
    "linear": ("rope_scaling", {"factor": "factor"}),
    "llama3": (
        "rope_scaling",
        dict(zip(_LLAMA3_FIELDS, _LLAMA3_FIELDS)) | {"original_positions": LENGTH},
    ),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "original_positions": LENGTH,
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "amplitude": "attention_factor",
            "query_growth": "llama_4_scaling_beta",
            "truncate": "truncate",
        },
    ),
    "longrope": (
        "longrope",
        {
            "short_factors": "short_factor",
            "long_factors": "long_factor",
            "original_positions": LENGTH,
            "long_positions": MOST,
            "amplitude": "attention_factor",
        },
    ),
}
# Field that a message of Architecture, or of what it holds, names -> key of a rope object.
ROPE_KEYS = {
    field: key for _, keys in ROPES.values() for field, key in keys.items() if field != key
} | {"rope_theta_global": "rope_theta", "rope_theta_local": "rope_theta"}
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
# A tensor for each expert, or the experts of a layer in one; * is the number of an expert.
PER_EXPERT = {
    "expert_gate": "mlp.experts.*.gate_proj.weight",
    "expert_up": "mlp.experts.*.up_proj.weight",
    "expert_down": "mlp.experts.*.down_proj.weight",
}
FUSED_EXPERTS = {
    "expert_gate": "mlp.experts.gate_up_proj",
    "expert_up": "mlp.experts.gate_up_proj",
    "expert_down": "mlp.experts.down_proj",
    "expert_gate_bias": "mlp.experts.gate_up_proj_bias",
    "expert_up_bias": "mlp.experts.gate_up_proj_bias",
    "expert_down_bias": "mlp.experts.down_proj_bias",
}
# Within model.layers.<i>., as most families have them.
NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
    # of layers whose kind is delta
    "delta/qkv": "linear_attn.in_proj_qkv.weight",
    "delta/z": "linear_attn.in_proj_z.weight",
    "delta/b": "linear_attn.in_proj_b.weight",
    "delta/a": "linear_attn.in_proj_a.weight",
    "delta/conv": "linear_attn.conv1d.weight",
    "delta/decay": "linear_attn.A_log",
    "delta/step_bias": "linear_attn.dt_bias",
    "delta/norm": "linear_attn.norm.weight",
    "delta/o": "linear_attn.out_proj.weight",
    # the feed-forward, or its experts
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.router.bias",
    **FUSED_EXPERTS,
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_open": "mlp.shared_expert_gate.weight",
    # the layer's own input of each token
    "per_layer_gate": "per_layer_input_gate.weight",
    "per_layer_out": "per_layer_projection.weight",
    "per_layer_norm": "post_per_layer_input_norm.weight",
    "layer_scalar": "layer_scalar",
}
POST_NORMS = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
DELTA_KEYS = {
    "delta.num_key_heads": "linear_num_key_heads",
    "delta.num_value_heads": "linear_num_value_heads",
    "delta.key_dim": "linear_key_head_dim",
    "delta.value_dim": "linear_value_head_dim",
    "delta.taps": "linear_conv_kernel_dim",
}
EXPERT_KEYS = {
    "experts.count": "num_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.mlp_dim": "moe_intermediate_size",
}


def as_number(value: object, key: str, kind: type | UnionType | GenericAlias) -> Any:
    """The value as an int, a finite float or a bool, as None where its type says so, or as a tuple
    of such. Raises ValueError, naming the key."""
    if parts := get_args(kind):
        if get_origin(kind) is not tuple:
            if value is None:
                return None
            return as_number(value, key, parts[0])
        if not isinstance(value, list):
            raise ValueError(f"{key}={shown(value)}; it is a list of numbers")
        return tuple(as_number(one, key, parts[0]) for one in value)
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


def as_object(value: object, key: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{key}={shown(value)}; it is an object")
    return value


def local_by_list(hf: dict) -> list[str]:
    """The kind of every layer: of `layer_types` if given, else of Qwen's two keys, else global."""
    count = hf["num_hidden_layers"]
    has_windows = as_number(hf.get("use_sliding_window") or False, "use_sliding_window", bool)
    first_local = count
    if has_windows:
        first_local = as_number(hf.get("max_window_layers", count), "max_window_layers", int)
    by_number = ["global" if i < first_local else "local" for i in range(count)]
    return _listed(hf) or by_number


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


def all_local(hf: dict) -> list[str]:
    """The kind of every layer of Mistral: local, if there is a window that hides a token."""
    window = hf["sliding_window"]
    is_local = window is not None and window < hf[MOST]
    return ["local" if is_local else "global"] * hf["num_hidden_layers"]


def every_nth(
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
        named = [key for key in intervals if hf.get(key) is not None]
        every = n
        if named:
            every = as_number(hf[named[0]], named[0], int)
            if every < 1:
                raise ValueError(f"{named[0]}={every}; it is 1 or more")
        numbers = range(1, hf["num_hidden_layers"] + 1)
        by_interval = [others if number % every else nth for number in numbers]
        return _listed(hf, types, listed) or by_interval

    return kinds


# Gemma and Olmo: these keys say n, where they are there.
NTH_GLOBAL = ("sliding_window_pattern", "_sliding_window_pattern")


def gemma4_keys(hf: dict) -> dict:
    """A config.json of Gemma 4 with the kinds of its layers, and what differs by kind under one
    spelling.

    transformers writes `per_layer_config`, an object by the number of a layer. Raises ValueError.
    """
    as_number(hf["enable_moe_block"], "enable_moe_block", bool)
    kinds = every_nth(6, *NTH_GLOBAL)(hf)
    if hf.get("layer_types") and kinds[-1] == "local":
        raise ValueError("layer_types: the last layer must be full_attention")
    # transformers takes the last one as global.
    kinds = [*kinds[:-1], "global"]
    wide = [str(i) for i, kind in enumerate(kinds) if kind == "global"]
    types = ("sliding_attention", "full_attention")
    hf = hf | {"layer_types": [types[str(i) in wide] for i in range(len(kinds))]}
    if "per_layer_config" in hf:
        by_layer = as_object(hf.pop("per_layer_config") or {}, "per_layer_config")
        # 05 is layer 5 of 10 or more
        by_layer = {number.lstrip("0") or "0": own for number, own in by_layer.items()}
        own = as_object(by_layer.get(wide[0], {}), "per_layer_config")
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
    # fields of Architecture that all its models share, where they are not its defaults, or where
    # config.json may say otherwise
    flags: dict[str, Any]
    # our name of a layer's weight -> the tensor's, within model.layers.<i>.; some may have no use
    names: dict[str, str] = field(default_factory=lambda: NAMES)
    keys: dict[str, str] = field(default_factory=lambda: KEYS)
    # key -> the value that it must have if config.json has it
    fixed: dict[str, Any] = field(default_factory=dict)
    # key -> its value where config.json leaves it out
    absent: dict[str, Any] = field(default_factory=dict)
    # config.json -> the kind of every layer
    kinds: Callable[[dict], list[str]] = local_by_list
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
    # config.json -> the same, with what has several spellings in that of `keys`
    respelled: Callable[[dict], dict] = dict
    # fields of Experts that all its models share; a model of it without experts has none
    expert_flags: dict[str, Any] = field(default_factory=dict)
    # Tensors with all experts of a layer are [experts, inputs, outputs], and gate and up take turns
    # in them; else they are [experts, outputs, inputs], and up follows gate.
    by_turns: bool = False
    quantised: tuple[str, ...] = ()  # values of quantization_config.quant_method that are read


def but(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same without these names."""
    return {name: value for name, value in values.items() if name not in names}
