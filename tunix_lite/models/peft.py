"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`, in and
out."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from flax import traverse_util

from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.basics.types import Params
from tunix_lite.basics.untrusted import as_path, read_object
from tunix_lite.models import decoder, hf
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.family import Family
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.weights import flatten, unstacked
from tunix_lite.parallel.mesh import put

# Wider than any matrix that an adapter is for.
MOST_RANK = 2**16
# Within float32.
_MOST_ALPHA = 1e30
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# PEFT puts it before the name of a module.
_PREFIX = "base_model.model."
# Keys of adapter_config.json that are read, or that change nothing about finished adapters. Any
# other key with a value that is not empty, or not one of ALLOWED, asks for something that is not
# supported.
_HARMLESS = set(
    """
    auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode
    layers_pattern loftq_config lora_alpha lora_dropout megatron_core peft_type peft_version
    qalora_group_size r revision runtime_config target_modules task_type use_rslora
    """.split()  # noqa: SIM905
)
ALLOWED = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


def read_adapter_config(
    lora: LoraConfig,
    cfg: Architecture,
    family: Family | None,
) -> LoraConfig:
    """`lora` with the rank, alpha and targets of the adapter that it names. Raises ValueError
    naming what is missing, not supported, or contradicts the settings."""
    if family is None:
        raise ValueError(
            "adapter: a PEFT adapter names tensors, so model.family must be given for random "
            "weights"
        )
    folder = as_path(lora.adapter)
    for file in (CONFIG, TENSORS):
        if not (folder / file).is_file():
            raise ValueError(
                f"adapter: {folder} has no {file}; a folder in PEFT format has one"
            )
    rank, alpha = _rank_and_alpha(folder)
    try:
        # shapes alone: nothing is read before all is right
        header = hf.header(folder / TENSORS)
    except ValueError as error:
        raise ValueError(f"adapter: {error}") from error
    entries = {_without_wrapper(name, family): entry for name, entry in header.items()}

    # The settings may repeat what the folder says, but not contradict it.
    if lora.rank not in (0, rank):
        raise ValueError(
            f"adapter: {folder} has rank {rank}, and model.lora.rank={lora.rank}; leave rank at 0"
        )
    # What has adapters is what the tensors say: target_modules may be expressions.
    present = {module_of(name) for name in entries}
    paths = []
    table = flatten(decoder.weights(cfg))
    for path, weight in table.items():
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
    targets = "|".join(paths)
    if decoder.stack_of_layers(cfg)[0] is not None:
        # By name if these are all that have it, else by stack, as an expression has a limit.
        names: dict[str, list[str]] = {}
        for stack, name in (path.rsplit("/", 1) for path in paths):
            names.setdefault(stack, []).append(name)
        targets = f".*/({'|'.join(sorted(set().union(*names.values())))})"
        if set(paths) != {path for path in table if re.fullmatch(targets, path)}:
            targets = "|".join(f"{stack}/({'|'.join(of)})" for stack, of in names.items())
    for name, own in (("alpha", alpha), ("targets", targets)):
        setting = getattr(lora, name)
        if setting not in (getattr(LoraConfig(), name), own):
            raise ValueError(
                f"adapter: {folder} has {name}={own!r}, and model.lora.{name}={setting!r}; leave "
                "it out"
            )

    own_lora = replace(lora, rank=rank, alpha=alpha, targets=targets, adapter=str(folder))
    wanted = {}
    for name, weight in hf.hf_weights(cfg, family).items():
        if name.removesuffix(".weight") in present:
            num_outputs, num_inputs = hf.hf_shape(weight)
            wanted |= {
                _side(name, "a"): (rank, num_inputs),
                _side(name, "b"): (num_outputs, rank),
            }
    if problems := hf.misfits(wanted, entries):
        raise ValueError(f"adapter: the tensors in {folder} do not fit: {problems}")
    return own_lora


def _rank_and_alpha(folder: Path) -> tuple[int, float]:
    """Reads adapter_config.json. Raises ValueError for anything in it that is not supported."""
    file = folder / CONFIG
    try:
        config = read_object(file)
        kind = config["peft_type"]
        rank = config["r"]
        alpha = config["lora_alpha"]
    except ValueError as error:
        raise ValueError(f"adapter: {error}") from error
    except KeyError as error:
        raise ValueError(
            f"adapter: {file} is no LoRA configuration: {error} is missing"
        ) from error

    if kind != "LORA":
        raise ValueError(f"adapter: {file}: peft_type is {shown(kind)}; supported is 'LORA'")
    for key, value in config.items():
        if key not in _HARMLESS and value and value not in ALLOWED.get(key, ()):
            raise ValueError(
                f"adapter: {file}: {escaped(key)}={shown(value)} is not supported"
            )
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise ValueError(
            f"adapter: {file}: r={shown(rank)}; it is a whole number from 1 to {MOST_RANK:,}"
        )
    if type(alpha) not in (int, float) or not 0 < alpha <= _MOST_ALPHA:
        raise ValueError(
            f"adapter: {file}: lora_alpha={shown(alpha)}; it is a finite number above 0"
        )
    # rsLoRA divides alpha by the root of the rank; LoraConfig.scale divides it by the rank.
    if config.get("use_rslora"):
        alpha = alpha * rank**0.5
    return rank, float(alpha)


def load_adapters(
    folder: Path,
    cfg: Architecture,
    family: Family,
    lora: LoraConfig,
) -> Params:
    """The adapters in `folder`, in float32 on the current mesh."""
    read = hf.read_tensors(folder / TENSORS)
    tensors = {_without_wrapper(name, family): value for name, value in read.items()}
    return from_tensors(tensors, cfg, family, lora)


def from_tensors(
    tensors: dict[str, np.ndarray],
    cfg: Architecture,
    family: Family,
    lora: LoraConfig,
) -> Params:
    """The adapters of these tensors, which have PEFT's names, in float32 on the current mesh."""
    pairs = flatten(adapter_weights(decoder.weights(cfg), lora))
    of_layers: dict[str, list[np.ndarray]] = {path: [] for path in pairs}
    for name, parts in hf.hf_parts(cfg, family).items():
        for part in (part for part in parts if f"{part.path}/a" in pairs):
            # weights in one tensor share its inputs, and so its `a`; of `b` each has its own rows
            for side, rows in (("a", slice(None)), ("b", part.rows)):
                path = f"{part.path}/{side}"
                tensor = np.asarray(tensors[_side(name, side)][rows], np.float32)
                of_layers[path].append(hf.from_hf(tensor, unstacked(pairs[path])))
    loaded = {}
    for path, weight in pairs.items():
        # parts come layer by layer
        value = np.stack(of_layers[path]) if weight.is_stacked else of_layers[path][0]
        loaded[path] = put(value, *weight.axes)
    return traverse_util.unflatten_dict(loaded, sep="/")


def to_tensors(
    adapters: Params,
    cfg: Architecture,
    family: Family,
    lora: LoraConfig,
) -> dict[str, np.ndarray]:
    """The tensors of adapters by PEFT's names, float32: lora_A [R, inputs], lora_B [outputs, R].
    Raises ValueError for adapters of experts."""
    # The tensors, and the modules that they are for. Where a tensor holds several weights, its one
    # adapter has their pairs side by side, and all adapters get that rank, as PEFT wants it.
    pairs = flatten(adapter_weights(decoder.weights(cfg), lora))
    if of_experts := [path for path, w in pairs.items() if hf.is_of_experts(unstacked(w))]:
        raise ValueError(
            f"{of_experts[0]}: adapters of experts are not written in PEFT's format; export "
            "kind=merged writes the model with them"
        )
    values = {path: np.asarray(x, np.float32) for path, x in flatten(adapters).items()}
    adapted = {}
    for name, parts in hf.hf_parts(cfg, family).items():
        if own := [part for part in parts if f"{part.path}/a" in pairs]:
            adapted[name] = own, parts[-1].rows.stop
    most = max(len(own) for own, _ in adapted.values())
    rank = most * lora.rank
    tensors = {}
    for name, (own, num_outputs) in adapted.items():
        # zeros where a weight has no adapter: they add nothing
        a = np.zeros((rank, hf.hf_shape(own[0].weight)[1]), np.float32)
        b = np.zeros((num_outputs, rank), np.float32)
        for i, part in enumerate(own):
            columns = slice(i * lora.rank, (i + 1) * lora.rank)
            for side, place in (("a", a[columns]), ("b", b[part.rows, columns])):
                path = f"{part.path}/{side}"
                place[:] = hf.to_hf(values[path][part.place], unstacked(pairs[path]))
        tensors |= {_side(name, "a"): a, _side(name, "b"): b}
    return tensors


def save_adapters(
    adapters: Params,
    cfg: Architecture,
    family: Family,
    lora: LoraConfig,
    folder: Path,
    base: str,
    is_wrapped: bool = False,
) -> None:
    """Writes `adapters` so that PEFT and vLLM load them onto the model named `base`. is_wrapped:
    ours is the text part of a larger model, and the modules get the names that they have there."""
    tensors = to_tensors(adapters, cfg, family, lora)
    modules = set(map(module_of, tensors))
    # Where a tensor holds several weights, its adapter is wider: the scale stays.
    rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)

    # All layers have these modules, so their last names are enough. In a larger model the names
    # are in full, because its vision tower has a q_proj, too.
    targets = sorted({name.rsplit(".", 1)[1] for name in modules})
    if is_wrapped:

        def in_wrapper(module: str) -> str:
            return module.replace("model.", "model.language_model.", 1)

        tensors = {
            _PREFIX + in_wrapper(name.removeprefix(_PREFIX)): value
            for name, value in tensors.items()
        }
        targets = sorted(map(in_wrapper, modules))
    hf.write_tensors(folder / TENSORS, tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank // lora.rank * lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _side(name: str, side: str) -> str:
    """The name of an adapter's tensor, side a or b, for the tensor of this name on disk."""
    return f"{_PREFIX}{name.removesuffix('.weight')}.lora_{side.upper()}.weight"


def module_of(name: str) -> str:
    """The module that a tensor of an adapter is for."""
    return name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0]


def _without_wrapper(name: str, family: Family) -> str:
    """The name that a tensor of an adapter has if ours is the whole model."""
    rest = name.removeprefix(_PREFIX)
    for prefix in family.prefixes:
        if rest.startswith(prefix):
            return f"{_PREFIX}model.{rest.removeprefix(prefix)}"
    return name
