"""`config.json` as an `Architecture`, and back. What it asks for and the decoder does not compute
is an error."""

import math
from dataclasses import fields, replace
from typing import Any, get_type_hints

import numpy as np

from tunix_lite.basics.plain_text import shown
from tunix_lite.models.architecture import (
    MOST_LAYERS,
    Architecture,
    DeltaNet,
    Experts,
    LongRope,
    RopeScaling,
    Yarn,
    repeated,
)
from tunix_lite.models.family import (
    LENGTH,
    MOST,
    ROPES,
    Family,
    as_number,
    as_object,
    local_by_list,
)

# Fields of Architecture that hold fields of their own.
PARTS = {"delta": DeltaNet, "experts": Experts}


def architecture_of(hf: dict, family: Family) -> Architecture:
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
    if quantised := hf.get("quantization_config"):
        method = as_object(quantised, "quantization_config").get("quant_method")
        if method not in family.quantised:
            but = f", but for {' or '.join(family.quantised)}" if family.quantised else ""
            raise ValueError(
                f"quantization_config: quantised weights cannot be read{but}; model.lora.base "
                "quantises other weights"
            )

    # Keys that are missing, and sizes that later ones are derived from.
    config = hf
    # transformers leaves out what has its default there
    hf = family.absent | hf
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if as_number(hf[key], key, int) < 1:
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
    types = {of: get_type_hints(kind) for of, kind in {"": Architecture, **PARTS}.items()}
    values = {}
    for name, key in family.keys.items():
        part, _, inner = name.rpartition(".")
        # only some models of Gemma 4 have experts
        if part == "experts" and not hf.get("enable_moe_block", True):
            continue
        value = as_number(hf[key], key, types[part][inner])
        holder = values.setdefault(part, {}) if part else values
        holder[inner] = value
    for part, kind in PARTS.items():
        if part in values:
            own = family.expert_flags if part == "experts" else {}
            values[part] = kind(**values[part], **own)
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


def _rope(config: dict, family: Family, kinds: list[str]) -> dict[str, Any]:
    """The rope settings of a config.json, in the newer spelling or the older one."""
    newer = (family.absent | config).get("rope_parameters")
    newer = as_object(newer or {}, "rope_parameters")
    scaling = as_object(config.get("rope_scaling") or {}, "rope_scaling")
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
    share = as_number(share, key, float)
    scaled = _scaling(of_global, config, family)
    of_windows = _scaling(of_local, config, family) if "local" in kinds else {}
    if "yarn" in of_windows and of_windows == scaled:
        scaled = {"yarn": replace(scaled["yarn"], in_windows=True)}
    elif of_windows.keys() - {"longrope"}:
        raise ValueError("rope scaling of layers with sliding attention is not supported")
    return {
        "rope_theta_local": as_number(of_local["rope_theta"], "rope_theta", float),
        "rope_theta_global": as_number(of_global["rope_theta"], "rope_theta", float),
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
        newer = as_object(newer[kind], f"rope_parameters.{kind}")
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
    if not newer:
        return {"rope_theta": family.absent[theta_key]} | older
    return newer | older


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
    if "rope_type" not in rope and (stretches or kind not in ropes):
        key = min(stretches, default="rope_theta")
        raise ValueError(
            f"{key}={shown(rope.get(key))} has no rope_type beside it; add that key, which is "
            f"{names}"
        )
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

    if kind not in ROPES:
        return {}
    # What follows from other numbers where the file leaves it out.
    if kind == "longrope":
        # Phi writes the length beside the rope object, too, and there it counts.
        beside = family.absent | config
        lengths = {key: as_number(beside[key], key, int) for key in (LENGTH, MOST)}
        if lengths[LENGTH] < 2:
            raise ValueError(f"{LENGTH}={lengths[LENGTH]}; it is 2 or more")
        rope = {"factor": lengths[MOST] / lengths[LENGTH]} | rope | lengths
    grown = math.log(max(as_number(rope["factor"], "factor", float), 1))
    if kind == "longrope":
        rope = {"attention_factor": math.sqrt(1 + grown / math.log(lengths[LENGTH]))} | rope
    if kind == "yarn":
        scales = [as_number(rope.get(x) or 0, x, float) for x in ("mscale", "mscale_all_dim")]
        if not all(scales):
            scales = [1, 0]
        one, other = (1 + 0.1 * scale * grown for scale in scales)
        absent = {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.0}
        rope = absent | {"attention_factor": one / other, "truncate": True} | rope
    field, keys = ROPES[kind]
    of_field = {"rope_scaling": RopeScaling, "yarn": Yarn, "longrope": LongRope}[field]
    types = get_type_hints(of_field)
    numbers = {n: as_number(rope[key], key, types[n]) for n, key in keys.items()}
    return {field: of_field(**numbers)}


def as_computed(cfg: Architecture) -> Architecture:
    """The architecture without what no layer uses, so that two that compute the same are equal."""
    pattern = repeated(cfg.kinds)
    # the layers compute the same, whatever is read of them
    unused = {"output": "logits"}
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
    if cfg.experts is not None and not cfg.experts.beside_dense:
        unused["mlp_dim"] = cfg.experts.mlp_dim
    return replace(cfg, pattern=pattern, **unused)


def as_json(cfg: Architecture, family: Family) -> dict:
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    for name, key in family.keys.items():
        part, _, inner = name.rpartition(".")
        holder = getattr(cfg, part) if part else cfg
        hf[key] = None if holder is None else getattr(holder, inner)
    hf |= {key: value for key, value in family.fixed.items() if value is not None}
    if "global_head_dim" in family.keys:
        hf["num_global_key_value_heads"], hf["global_head_dim"] = cfg.kv_shape("global")
    if "per_layer_dim" in family.keys:
        hf["vocab_size_per_layer_input"] = cfg.vocab_size
        hf["enable_moe_block"] = cfg.experts is not None
    if family.has_windows:
        names = {kind: name for name, kind in family.types.items()}
        hf[family.kinds_key] = [names[kind] for kind in cfg.kinds]
        if "use_sliding_window" not in family.fixed and family.kinds is local_by_list:
            hf["use_sliding_window"] = "local" in cfg.kinds

    # Rope, in the newer keys.
    of_local = {"rope_type": "default", "rope_theta": cfg.rope_theta_local}
    of_global = {"rope_type": "default", "rope_theta": cfg.rope_theta_global}
    if cfg.rope_share < 1:
        of_global["partial_rotary_factor"] = cfg.rope_share
    if cfg.global_rope_share < 1:
        of_global["rope_type"] = "proportional"
        of_global["partial_rotary_factor"] = cfg.global_rope_share
    for kind, (field, keys) in ROPES.items():
        written = {key: getattr(getattr(cfg, field), name, None) for name, key in keys.items()}
        if None not in written.values():
            # Only Ministral has query_growth, and only gpt-oss does not truncate.
            usual = {"llama_4_scaling_beta": 0, "truncate": True}
            of_global["rope_type"] = kind
            of_global |= {
                key: list(x) if isinstance(x, tuple) else x
                for key, x in written.items()
                if usual.get(key) != x
            }
    if cfg.yarn is not None and cfg.yarn.in_windows:
        of_local = of_global | {"rope_theta": cfg.rope_theta_local}
    if (long := cfg.longrope) is not None:
        hf |= {LENGTH: long.original_positions, MOST: of_global.pop(MOST)}
    by_kind = {"sliding_attention": of_local, "full_attention": of_global}
    hf["rope_parameters"] = by_kind if family.rope_by_kind else of_global
    return hf


def architecture_differences(one: Architecture, other: Architecture) -> list[str]:
    """The fields in which two architectures differ, floats in float32: "head_dim=64 against
    128"."""

    # Some files hold floats so: 1e-06 is 9.999999974752427e-07 there.
    def as_float32(value: object) -> object:
        if isinstance(value, float):
            return np.float32(value)
        return value

    values = (
        (f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(Architecture)
    )
    return [
        f"{name}={here!r} against {there!r}"
        for name, here, there in values
        if as_float32(here) != as_float32(there)
    ]
