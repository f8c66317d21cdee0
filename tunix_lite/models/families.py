"""The families of models that are known, and which one a folder is of."""

import re
from dataclasses import replace
from pathlib import Path

from tunix_lite.basics.imports import import_named
from tunix_lite.basics.plain_text import shown
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.config_file import (
    architecture_differences,
    architecture_of,
    as_computed,
    as_json,
)
from tunix_lite.models.decoder import layer_weights, stacks
from tunix_lite.models.family import (
    DELTA_KEYS,
    EXPERT_KEYS,
    FUSED_EXPERTS,
    HYBRID_KINDS,
    KEYS,
    LENGTH,
    MOST,
    NAMES,
    NTH_GLOBAL,
    PER_EXPERT,
    POST_NORMS,
    ROPE_KEYS,
    ROTATIONS,
    SCORERS,
    Family,
    all_local,
    as_object,
    but,
    every_nth,
    gemma4_keys,
)
from tunix_lite.models.gguf_file import is_gguf
from tunix_lite.models.gguf_metadata import small_object

# The defaults of Architecture are those of Gemma 3.
_FULL_ROPE = {"rope_share": 1.0, "global_rope_share": 1.0}
LLAMA_LIKE = _FULL_ROPE | {
    "activation": "silu",
    "embed_scale": False,
    "norm_plus_one": False,
    "post_norms": False,
}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_UNTIED = {"tie_word_embeddings": False, "rope_theta": 10_000.0}
GEMMA2 = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    flags=_FULL_ROPE | {"qk_norm": False, "rope_scaling": None},
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
    kinds=every_nth(2, *NTH_GLOBAL),
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
    flags=_FULL_ROPE,
    names=NAMES | POST_NORMS,
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
    kinds=every_nth(6, *NTH_GLOBAL),
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
# Within model.layers.<i>., of 26B-A4B.
_EXPERTS_OF_GEMMA4 = {
    "router": "router.proj.weight",
    "router_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
    **{ours: name.removeprefix("mlp.") for ours, name in FUSED_EXPERTS.items()},
    "expert_pre_norm": "pre_feedforward_layernorm_2.weight",
    "expert_post_norm": "post_feedforward_layernorm_2.weight",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
}
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
    flags={
        "rope_share": 1.0,
        "norm_plus_one": False,
        "value_norm": True,
        "layer_scalar": True,
        "query_scale": 1,
        "rope_scaling": None,
    },
    names=NAMES | POST_NORMS | _EXPERTS_OF_GEMMA4,
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
    }
    | EXPERT_KEYS
    | {"experts.per_token": "top_k_experts"},
    expert_flags={"router_norm": True, "beside_dense": True},
    fixed=_GELU,
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
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "rope_parameters": _ROPE_OF_GEMMA4,
    },
    kinds=every_nth(6, *NTH_GLOBAL),
    respelled=gemma4_keys,
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
    keys=but(GEMMA4.keys, "per_layer_dim", *EXPERT_KEYS),
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
    keys=KEYS | {"window": "sliding_window"},
    fixed={"hidden_act": "silu"},
    absent=_UNTIED,
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    flags=LLAMA_LIKE | {"rope_scaling": None},
    fixed={"hidden_act": "silu", "attention_bias": False},
)
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    flags=QWEN3.flags | {"pattern": ("global",), "window": None},
    names=NAMES | PER_EXPERT,
    keys=KEYS | EXPERT_KEYS | {"experts.normalised": "norm_topk_prob"},
    # All layers have experts.
    fixed=QWEN3.fixed
    | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    absent=_UNTIED | {"norm_topk_prob": False},
    # transformers writes num_local_experts
    respelled=lambda hf: {key.replace("num_local_", "num_"): x for key, x in hf.items()},
    has_windows=False,
)
QWEN3_5 = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    flags=but(QWEN3.flags, "rope_share", "norm_plus_one") | {"attn_gate": True},
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
    kinds=every_nth(4, "full_attention_interval", types=HYBRID_KINDS),
    types=HYBRID_KINDS,
    wrapper="qwen3_5",
    prefixes=GEMMA4.prefixes,
    # Layers that predict more tokens at once, and the vision part.
    ignored=("mtp.", "model.visual."),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    # There is no dense feed-forward, whose width would be another key.
    keys=QWEN3_5.keys
    | EXPERT_KEYS
    | {
        "mlp_dim": "moe_intermediate_size",
        "experts.shared_dim": "shared_expert_intermediate_size",
    },
    wrapper="qwen3_5_moe",
)
GPT_OSS = replace(
    QWEN2,
    name="gpt_oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    flags=QWEN2.flags | {"out_bias": True, "attn_sinks": True},
    names=NAMES | {"router": "mlp.router.weight"},
    keys=QWEN2.keys
    | EXPERT_KEYS
    | {
        "experts.count": "num_local_experts",
        "experts.mlp_dim": "intermediate_size",
        "experts.limit": "swiglu_limit",
    },
    expert_flags={"softmax_after": True, "biases": True},
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    absent={"tie_word_embeddings": False, "rope_theta": 150_000.0, "swiglu_limit": 7.0},
    kinds=every_nth(2),
    ropes=("yarn",),
    by_turns=True,
    quantised=("mxfp4",),
)
LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    flags=LLAMA_LIKE | {"qk_norm": False, "pattern": ("global",), "window": None},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    absent=_UNTIED,
    has_windows=False,
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    flags=but(LLAMA.flags, "pattern", "window"),
    keys=QWEN2.keys,
    fixed=QWEN2.fixed,
    absent=_UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, MOST: 131_072},
    kinds=all_local,
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
    flags=but(MISTRAL.flags, "rope_share"),
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
    names=NAMES | POST_NORMS,
    fixed=QWEN3.fixed,
    absent=_UNTIED | {"rope_theta": 500_000.0, "sliding_window": 4096},
    kinds=every_nth(4, *NTH_GLOBAL),
    has_windows=True,
    rope_by_kind=True,
    ropes=("default", "yarn"),
)
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    flags=but(LLAMA.flags, "pattern"),
    fixed=LLAMA.fixed | {"use_sliding_window": False},
    absent={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    kinds=every_nth(4, "no_rope_layer_interval", types=ROTATIONS, listed="no_rope_layers"),
    has_windows=True,
    types=ROTATIONS,
    kinds_key="no_rope_layers",
    ropes=("default", "yarn"),
)
_RELATIVES = (MINISTRAL3, MISTRAL, OLMO3, PHI3, SMOLLM3)
FAMILIES = {
    family.name: family
    for family in (
        *(GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, GPT_OSS, LLAMA),
        *_RELATIVES,
        *(QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE),
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
    if named_family is None:
        supported = ", ".join(str(f.model_type) for f in known)
        right = f"supported is {supported} (docs/extend/model says how to add)"
        if family is not None:
            right = f"the family {family.name} has {family.model_type!r}"
        raise ValueError(f"{file}: model_type is {shown(kind)}; {right}")

    # What it gives of a token, by the class in transformers.
    names = str(hf.get("architectures"))
    output = next((output for end, output in SCORERS.items() if end in names), "logits")

    # The architecture. Of a larger model, its text part.
    if kind == named_family.wrapper:
        tied = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        hf = tied | (hf.get("text_config") or {})
    try:
        cfg = architecture_of(as_object(hf, "text_config"), named_family)
        return replace(cfg, output=output), named_family
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        # A message of Architecture, with the keys of config.json in place of its fields.
        share = "partial_rotary_factor"
        keys = named_family.keys | {"rope_share": share, "global_rope_share": share}
        keys |= {"pattern": named_family.kinds_key, "window": "sliding_window"}
        keys = {name.rpartition(".")[2]: key for name, key in keys.items()} | keys
        names = "|".join(sorted(map(re.escape, keys), key=len, reverse=True))
        fields_in_text = rf"\b({names})\b(?==| is not given)"
        message = re.sub(fields_in_text, lambda field: keys[field[1]], str(error))
        # Fields of rope objects are no words of other messages.
        names = "|".join(ROPE_KEYS)
        message = re.sub(rf"\b({names})\b", lambda field: ROPE_KEYS[field[1]], message)
        raise ValueError(f"{file}: {message}") from error


def check_flags(cfg: Architecture, family: Family) -> None:
    """Raises ValueError if `cfg` is not of the family, whose config.json could not hold it."""
    # A config.json that is written and read again must give the same architecture.
    read_back = architecture_of(as_json(cfg, family), family)
    lost = architecture_differences(as_computed(cfg), as_computed(read_back))
    if lost:
        raise ValueError(
            f"a config.json of the family {family.name} cannot hold all of this model: "
            f"{'; '.join(lost)} (read back)"
        )
    for stack, (kind, _) in stacks(cfg).items():
        for name in layer_weights(cfg, kind):
            # an unknown weight would be lost in the file
            if name not in family.names and f"{stack}/{name}" not in family.names:
                raise ValueError(f"the family {family.name} has no name for the weight {name}")


def config_json(cfg: Architecture, family: Family, **more: object) -> dict:
    """The config.json of an architecture, with `more` added. Raises ValueError if it is not of the
    family."""
    check_flags(cfg, family)
    return as_json(cfg, family) | more


def keys_of_output(cfg: Architecture, family: Family) -> dict:
    """The keys of config.json with which transformers reads a reward model."""
    (end,) = (end for end, output in SCORERS.items() if output == cfg.output)
    # transformers has one class for the text model, and one for the larger model that holds it
    text = "Text" if family.model_type.endswith("_text") else ""
    name = family.architecture.removesuffix("ForCausalLM") + text + end
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [name]} | labels


def is_wrapped(folder: Path | None, family: Family | None) -> bool:
    """True if the folder has a larger model of which ours is the text part, as of Gemma 3."""
    if folder is None or family is None or family.wrapper is None:
        return False
    return small_object(folder, "config.json").get("model_type") == family.wrapper
