"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`, in and
out."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from flax import traverse_util

from tunix_lite.files.untrusted import as_path, read_object
from tunix_lite.models import decoder, hf
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.families import Family
from tunix_lite.models.lora import LoraConfig, adapter_weights, pairs
from tunix_lite.models.weights import flatten, unstacked
from tunix_lite.parallel.mesh import put
from tunix_lite.plain_text import escaped, shown
from tunix_lite.types import Params

# wider than any matrix that an adapter could stand in for
MOST_RANK = 2**16
# of what float32 can say
MOST_ALPHA = 1e30
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# what PEFT puts before the name of a module
PREFIX = "base_model.model."
# keys of adapter_config.json that are read, or that change nothing about finished adapters; of any
# other, and of those below with their values, a value that is not empty says something that we
# would not do
HARMLESS = {
    *(
        "peft_type",
        "peft_version",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *(
        "r",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
        "exclude_modules",
        "use_rslora",
        "layers_pattern",
    ),
    *(
        "loftq_config",
        "eva_config",
        "corda_config",
        "megatron_core",
        "runtime_config",
        "qalora_group_size",
    ),
}
ALLOWED = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}


def read_adapter_config(lora: LoraConfig, cfg: Architecture, family: Family | None) -> LoraConfig:
    """`lora` with the rank, alpha and targets of the adapter that it names.

    Raises ValueError naming what is missing, not supported, or not as the settings say.
    """
    if family is None:
        raise ValueError(
            "adapter: a PEFT adapter names tensors, so model.family must be given for random "
            "weights"
        )
    folder = as_path(lora.adapter)
    for file in (CONFIG, TENSORS):
        if not (folder / file).is_file():
            raise ValueError(f"adapter: {folder} has no {file}; a folder in PEFT format has one")
    try:
        config = read_object(folder / CONFIG)
        kind, rank, alpha = config["peft_type"], config["r"], config["lora_alpha"]
    except ValueError as error:
        raise ValueError(f"adapter: {error}") from error
    except KeyError as error:
        raise ValueError(
            f"adapter: {folder / CONFIG} is no LoRA configuration: {error} is missing"
        ) from error
    if kind != "LORA":
        raise ValueError(
            f"adapter: {folder / CONFIG}: peft_type is {shown(kind)}; supported is 'LORA'"
        )
    for key, value in config.items():
        if key not in HARMLESS and value and value not in ALLOWED.get(key, ()):
            raise ValueError(
                f"adapter: {folder / CONFIG}: {escaped(key)}={shown(value)} is not supported"
            )
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise ValueError(
            f"adapter: {folder / CONFIG}: r={shown(rank)}; it is a whole number from 1 to "
            f"{MOST_RANK:,}"
        )
    if type(alpha) not in (int, float) or not 0 < alpha <= MOST_ALPHA:
        raise ValueError(
            f"adapter: {folder / CONFIG}: lora_alpha={shown(alpha)}; it is a finite number above 0"
        )
    if lora.rank not in (0, rank):
        raise ValueError(
            f"adapter: {folder} has rank {rank}, and model.lora.rank={lora.rank}; leave rank at 0"
        )
    targets = _targets(folder, cfg, family)
    if config.get("use_rslora"):
        alpha = alpha * rank**0.5
    for name, own in (("alpha", float(alpha)), ("targets", targets)):
        if (said := getattr(lora, name)) not in (getattr(LoraConfig(), name), own):
            raise ValueError(
                f"adapter: {folder} has {name}={own!r}, and model.lora.{name}={said!r}; leave it "
                "out"
            )
    found = replace(lora, rank=rank, alpha=float(alpha), targets=targets, adapter=str(folder))
    _check_tensors(folder, cfg, family, found)
    return found


def load_adapters(folder: Path, cfg: Architecture, family: Family, lora: LoraConfig) -> Params:
    """The adapters in `folder`, in float32 on the current mesh."""
    tensors, loaded = hf.read_tensors(folder / TENSORS), {}
    tensors = {_plain(name, family): value for name, value in tensors.items()}
    for path, weight in flatten(adapter_weights(decoder.weights(cfg), lora)).items():
        one = unstacked(weight)
        parts = [
            np.asarray(tensors[name], np.float32).T.reshape(one.shape)
            for name in _names(path, cfg, family)
        ]
        loaded[path] = put(np.stack(parts) if weight.is_stacked else parts[0], *weight.axes)
    return traverse_util.unflatten_dict(loaded, sep="/")


def save_adapters(
    adapters: Params,
    cfg: Architecture,
    family: Family,
    lora: LoraConfig,
    folder: Path,
    base: str,
    is_wrapped: bool = False,
) -> None:
    """Writes `adapters` so that PEFT and vLLM load them onto the model named `base`.

    is_wrapped: the base is a larger model, and ours its text part: the modules are then named as
    they are there.
    """
    tensors, modules = {}, set()
    for path, (a, b) in pairs(adapters).items():
        for side, value in (("a", a), ("b", b)):
            names = _names(f"{path}/{side}", cfg, family)
            value = np.asarray(value, np.float32)
            flat = (-1, lora.rank) if side == "a" else (lora.rank, -1)
            for name, part in zip(names, value):
                tensors[name] = part.reshape(flat).T
            modules |= {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in names}
    # every layer has them
    targets = sorted({name.rsplit(".", 1)[1] for name in modules})
    # in full: the vision tower has a q_proj, too
    if is_wrapped:
        tensors = {_in_wrapper(name): value for name, value in tensors.items()}
        targets = sorted(_in_wrapper(name) for name in modules)
    hf.write_tensors(folder / TENSORS, tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _names(path: str, cfg: Architecture, family: Family) -> list[str]:
    """The tensors of an adapter's side: layers/q/a ->
    base_model.model.model.layers.0.self_attn.q_proj.lora_A..."""
    weight, side = path.rsplit("/", 1)
    modules = [name.removesuffix(".weight") for name in hf.hf_names(weight, cfg, family)]
    return [f"{PREFIX}{module}.lora_{side.upper()}.weight" for module in modules]


def _in_wrapper(name: str) -> str:
    """model.layers.0... -> model.language_model.layers.0..., as transformers names the text part of
    a larger model."""
    return name.replace("model.layers.", "model.language_model.layers.", 1)


def _plain(name: str, family: Family) -> str:
    """An adapter's tensor as it would be called if ours were the whole model."""
    rest = name.removeprefix(PREFIX)
    inside = (
        f"{PREFIX}model.{rest.removeprefix(p)}" for p in family.prefixes if rest.startswith(p)
    )
    return next(inside, name)


def _header(folder: Path, family: Family) -> dict:
    try:
        found = hf.header(folder / TENSORS)
    except ValueError as error:
        raise ValueError(f"adapter: {error}") from error
    return {_plain(name, family): entry for name, entry in found.items()}


def _modules(folder: Path, family: Family) -> set[str]:
    return {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in _header(folder, family)}


def _targets(folder: Path, cfg: Architecture, family: Family) -> str:
    """The paths of ours that the adapter covers, as a regular expression."""
    present, paths = _modules(folder, family), []
    for path, weight in flatten(decoder.weights(cfg)).items():
        modules = {name.removesuffix(".weight") for name in hf.hf_names(path, cfg, family)}
        if weight.inputs and modules & present:
            if missing := sorted(modules - present):
                raise ValueError(
                    f"adapter: {folder} covers only some layers; {missing[0]} has no adapter there"
                )
            paths.append(path)
    if not paths:
        raise ValueError(
            f"adapter: {folder / TENSORS} has no adapter of a projection of this model"
        )
    return "|".join(paths)


def _check_tensors(folder: Path, cfg: Architecture, family: Family, lora: LoraConfig) -> None:
    found, wanted = _header(folder, family), {}
    for path, weight in flatten(adapter_weights(decoder.weights(cfg), lora)).items():
        one = unstacked(weight)
        rows = one.shape[one.inputs :] if path.endswith("/a") else one.shape[1:]
        columns = one.shape[: one.inputs]
        shape = int(np.prod(rows)), int(np.prod(columns))
        wanted |= dict.fromkeys(_names(path, cfg, family), shape)
    problems = [
        f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in found
    ]
    problems += [
        f"unexpected: {escaped(name)} {list(found[name][0])}"
        for name in sorted(found.keys() - wanted.keys())
    ]
    problems += [
        f"shape: {name} is {list(found[name][0])}, and should be {list(wanted[name])}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name][0] != wanted[name]
    ]
    problems += [
        f"dtype: {escaped(name)} is {dtype}, and should be one of {', '.join(hf.DTYPES)}"
        for name, (_, dtype) in sorted(found.items())
        if dtype not in hf.DTYPES
    ]
    if problems:
        raise ValueError(
            f"adapter: the tensors in {folder} do not fit: {hf.problem_summary(problems)}"
        )
