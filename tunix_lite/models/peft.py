"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`, in and
out."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from tunix_lite.basics.errors import error_context
from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.basics.types import Params
from tunix_lite.basics.untrusted import as_path, read_object
from tunix_lite.models import decoder, hf
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.family import FUSED_EXPERTS, PER_EXPERT, Family
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.weights import Weight, adapter_pair, flatten
from tunix_lite.parallel.mesh import put

# Wider than any matrix that an adapter is for.
MOST_RANK = 2**16
# Within float32.
_MOST_ALPHA = 1e30
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# PEFT puts it before the name of a module.
_PREFIX = "base_model.model."
# In a router of transformers this is a parameter without a module, as are the experts' matrices.
_ROUTERS = (".mlp.gate.weight", ".mlp.router.weight")
# Keys of adapter_config.json that are read, or that change nothing about finished adapters. Any
# other key with a value that is not empty, or not one of ALLOWED, asks for something that is not
# supported.
_HARMLESS = set(
    """
    auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode
    layers_pattern loftq_config lora_alpha lora_dropout megatron_core peft_type peft_version
    qalora_group_size r revision runtime_config target_modules target_parameters task_type
    use_rslora
    """.split()  # noqa: SIM905
)
ALLOWED = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


@error_context("adapter", ValueError)
def read_adapter_config(
    lora: LoraConfig,
    cfg: Architecture,
    family: Family | None,
) -> LoraConfig:
    """`lora` with the rank, alpha and targets of the adapter that it names. Raises ValueError
    naming what is missing, not supported, or contradicts the settings."""
    if family is None:
        raise ValueError(
            "a PEFT adapter names tensors, so model.family must be given for random weights"
        )
    folder = as_path(lora.adapter)
    for file in (CONFIG, TENSORS):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} has no {file}; a folder in PEFT format has one")
    rank, alpha = _rank_and_alpha(folder)
    family = _as_peft(family)
    # shapes alone: nothing is read before all is right
    entries = _by_own_names(hf.header(folder / TENSORS), family, folder)

    # What has adapters is what the tensors say: target_modules may be expressions.
    present = {module_of(name) for name in entries}
    paths = []
    table = flatten(decoder.weights(cfg))
    for path, weight in table.items():
        modules = {name.removesuffix(".weight") for name in hf.hf_names(path, cfg, family)}
        if weight.inputs and modules & present:
            if missing := sorted(modules - present):
                raise ValueError(
                    f"{folder} covers only some layers; {missing[0]} has no adapter there"
                )
            paths.append(path)
    if not paths:
        raise ValueError(f"{folder / TENSORS} has no adapter of a projection of this model")
    targets = "|".join(paths)
    if decoder.stack_of_layers(cfg)[0] is not None:
        # By name if these are all that have it, else by stack, as an expression has a limit.
        names: dict[str, list[str]] = {}
        for path in paths:
            stack, name = path.rsplit("/", 1)
            names.setdefault(stack, []).append(name)
        all_names = sorted(set().union(*names.values()))
        targets = f".*/({'|'.join(all_names)})"
        if set(paths) != {path for path in table if re.fullmatch(targets, path)}:
            targets = "|".join(f"{stack}/({'|'.join(of)})" for stack, of in names.items())
    # The settings may repeat what the folder says, but not contradict it.
    for name, own in (("rank", rank), ("alpha", alpha), ("targets", targets)):
        setting = getattr(lora, name)
        if setting not in (getattr(LoraConfig(), name), own):
            raise ValueError(
                f"{folder} has {name}={own!r}, and model.lora.{name}={setting!r}; leave it out"
            )

    own_lora = replace(lora, rank=rank, alpha=alpha, targets=targets, adapter=str(folder))
    wanted = _shapes(_adapted(cfg, family, own_lora)[0], rank)
    if problems := hf.misfits(wanted, entries):
        raise ValueError(f"the tensors in {folder} do not fit: {problems}")
    return own_lora


def _rank_and_alpha(folder: Path) -> tuple[int, float]:
    """Reads adapter_config.json. Raises ValueError for anything in it that is not supported."""
    file = folder / CONFIG
    config = read_object(file)
    for key in ("peft_type", "r", "lora_alpha"):
        if key not in config:
            raise ValueError(f"{file} is no LoRA configuration: {key!r} is missing")
    kind = config["peft_type"]
    rank = config["r"]
    alpha = config["lora_alpha"]
    if kind != "LORA":
        raise ValueError(f"{file}: peft_type is {shown(kind)}; supported is 'LORA'")
    for key, value in config.items():
        if key not in _HARMLESS and value and value not in ALLOWED.get(key, ()):
            raise ValueError(f"{file}: {escaped(key)}={shown(value)} is not supported")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise ValueError(
            f"{file}: r={shown(rank)}; it is a whole number from 1 to {MOST_RANK:,}"
        )
    if type(alpha) not in (int, float) or not 0 < alpha <= _MOST_ALPHA:
        raise ValueError(f"{file}: lora_alpha={shown(alpha)}; it is a finite number above 0")
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
    tensors = _by_own_names(hf.read_tensors(folder / TENSORS), family, folder)
    return from_tensors(tensors, cfg, family, lora)


def from_tensors(
    tensors: dict[str, np.ndarray],
    cfg: Architecture,
    family: Family,
    lora: LoraConfig,
) -> Params:
    """The adapters of these tensors, which have the names of `to_tensors`, in float32 on the
    current mesh."""
    pairs = flatten(adapter_weights(decoder.weights(cfg), lora))
    # of layers in their order, and there of experts
    values: dict[str, list[np.ndarray]] = {path: [] for path in pairs}
    for path, _, tensor, weight in _sides(tensors, cfg, family, lora):
        values[path].append(hf.from_hf(tensor.astype(np.float32), weight))
    loaded = {
        path: put(np.stack(values[path]).reshape(weight.shape), *weight.axes)
        for path, weight in pairs.items()
    }
    return traverse_util.unflatten_dict(loaded, sep="/")


def to_tensors(
    adapters: Params,
    cfg: Architecture,
    family: Family,
    lora: LoraConfig,
) -> dict[str, np.ndarray]:
    """The tensors of adapters by the names of their base, as `_side` makes them, float32: lora_A
    [R, inputs], lora_B [outputs, R]. Where a tensor has E experts, they are [E * R, inputs] and
    [outputs, R * E]: PEFT counts the expert first in A, and last in B."""
    values = {path: np.asarray(x, np.float32) for path, x in flatten(adapters).items()}
    # zeros where a weight has no adapter: they add nothing
    shapes = _shapes(*_adapted(cfg, family, lora))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for path, place, tensor, weight in _sides(tensors, cfg, family, lora):
        tensor[...] = hf.to_hf(values[path][place], weight)
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
    adapted, rank = _adapted(cfg, family, lora)
    # Matrices of experts and of most routers are parameters in transformers, and no modules.
    parameters = {x for x in adapted if not x.endswith(".weight") or x.endswith(_ROUTERS)}
    modules = {name.removesuffix(".weight") for name in adapted.keys() - parameters}
    has_both = len({x.rsplit(".", 1)[1] for x in parameters if ".experts." in x}) > 1

    def in_wrapper(name: str) -> str:
        if is_wrapped:
            return name.replace("model.", "model.language_model.", 1)
        return name

    def targets(names: set[str], num_last: int) -> list[str]:
        # All layers have them, so their last names are enough. In a larger model the names are in
        # full, because its vision tower has a q_proj, too.
        if is_wrapped:
            return sorted(map(in_wrapper, names))
        return sorted({".".join(name.split(".")[-num_last:]) for name in names})

    def in_file(name: str) -> str:
        # The module of experts is wrapped once for each parameter, for down_proj last.
        inner = ".experts.base_layer." if has_both else ".experts."
        name = name.removeprefix(_PREFIX).replace(".experts.gate_up_proj.", inner)
        return _PREFIX + in_wrapper(name.replace(".experts.down_proj.", ".experts."))

    tensors = to_tensors(adapters, cfg, family, lora)
    hf.write_tensors(folder / TENSORS, {in_file(name): x for name, x in tensors.items()})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        # Where a tensor holds several weights, its adapter is wider: the scale stays.
        "lora_alpha": rank // lora.rank * lora.alpha,
        # PEFT has none of parameters
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "target_modules": targets(modules, 1),
        "target_parameters": targets(parameters, 2) or None,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _adapted(
    cfg: Architecture, family: Family, lora: LoraConfig
) -> tuple[dict[str, list[hf.TensorPart]], int]:
    """The weights in every tensor that has adapters, and the rank of all: where a tensor holds
    several weights, its one adapter has their pairs side by side."""
    adapted = {}
    most = 0
    for name, parts in hf.hf_parts(cfg, _as_peft(family)).items():
        if paths := _paths(parts, lora):
            adapted[name] = parts
            most = max(most, len(paths))
    return adapted, most * lora.rank


def _paths(parts: list[hf.TensorPart], lora: LoraConfig) -> list[str]:
    """The weights in a tensor that have adapters, in the order of their rows."""
    paths = dict.fromkeys(part.path for part in parts)
    return [path for path in paths if re.fullmatch(lora.targets, path)]


def _as_peft(family: Family) -> Family:
    """The family with the experts of a layer in one tensor, as transformers has them, whatever is
    published."""
    if PER_EXPERT.items() <= family.names.items():
        return replace(family, names=family.names | FUSED_EXPERTS)
    return family


def _shapes(
    adapted: dict[str, list[hf.TensorPart]],
    rank: int,
) -> dict[str, tuple[int, int]]:
    """The shapes of adapters of this rank, by the names of `_side`."""
    shapes = {}
    for name, parts in adapted.items():
        all_ranks = rank * max(1, parts[0].experts)
        shapes[_side(name, "a")] = all_ranks, hf.hf_shape(parts[0].weight)[1]
        shapes[_side(name, "b")] = parts[-1].rows.stop, all_ranks
    return shapes


def _sides(
    tensors: dict[str, np.ndarray], cfg: Architecture, family: Family, lora: LoraConfig
) -> Iterator[tuple[str, tuple[int, ...], np.ndarray, Weight]]:
    """Yields of each side of an adapter, layer by layer and expert by expert, its path, its place
    there, the view of its tensor, and its declaration."""
    for name, parts in _adapted(cfg, family, lora)[0].items():
        a, b = (tensors[_side(name, side)] for side in "ab")
        a_ERI = a.reshape(max(1, parts[0].experts), -1, a.shape[1])
        b_ORE = b.reshape(len(b), -1, len(a_ERI))
        paths = _paths(parts, lora)
        for part in (part for part in parts if part.path in paths):
            # Weights in one tensor share its inputs. As we write them, each has its own ranks; in
            # other files they share `a`.
            first = paths.index(part.path) * lora.rank % a_ERI.shape[1]
            ranks = slice(first, first + lora.rank)
            weight_a, weight_b = adapter_pair(part.weight, lora.rank)
            expert = part.place[-1] if part.experts else 0
            view_b = b_ORE[part.rows, ranks, expert]
            yield f"{part.path}/a", part.place, a_ERI[expert, ranks], weight_a
            yield f"{part.path}/b", part.place, view_b, weight_b


def _side(name: str, side: str) -> str:
    """The name of an adapter's tensor, side a or b, for the tensor of this name on disk."""
    return f"{_PREFIX}{name.removesuffix('.weight')}.lora_{side.upper()}.weight"


def module_of(name: str) -> str:
    """The module that a tensor of an adapter is for."""
    return name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0]


def _by_own_names(entries: dict[str, Any], family: Family, folder: Path) -> dict[str, Any]:
    """The entries by the names that `to_tensors` gives them, as if ours were the whole model."""
    own = {}
    parameters = read_object(folder / CONFIG).get("target_parameters")
    is_down = "down_proj" in str(parameters)
    outer = ".experts.down_proj.lora_" if is_down else ".experts.gate_up_proj.lora_"
    for name, entry in entries.items():
        rest = name.removeprefix(_PREFIX)
        # an adapter of another part of the model keeps its name, and is refused by it
        name = _PREFIX + (hf.without_prefix(rest, family) or rest)
        name = name.replace(".experts.lora_", outer)
        own[name.replace(".experts.base_layer.", ".experts.gate_up_proj.")] = entry
    return own
