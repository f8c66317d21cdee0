"""Where a model comes from: bundled, random, a folder in Hugging Face layout, or a name on the hub.

`locate` checks everything but the weights, `download` gets them and checks their headers, and
`load_weights` makes the parameters.
"""

import hashlib
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tunix_lite.errors import error_context
from tunix_lite.files.addresses import check_on_disk
from tunix_lite.files.untrusted import as_path
from tunix_lite.models import decoder, families, hf, hub, peft, weights
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.families import Family
from tunix_lite.models.lora import ADAPTER_SEED, LoraConfig, adapter_weights
from tunix_lite.models.quantize import STORAGE, init_stored, stored_table
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import MeshShape, check_mesh_shape
from tunix_lite.plain_text import shown
from tunix_lite.types import Params

BUNDLED = Path(__file__).parent / "bundled"
# bytes of each end of a file of weights: its header, with names and shapes, and the last tensors
SAMPLE = 1 << 16


@dataclass(frozen=True)
class ModelConfig:
    """Which model, how it is divided over the devices, and which part of it trains."""

    # bundled, random, a folder in Hugging Face layout, or a hub name: google/gemma-3-1b-it
    weights: str = "bundled"
    # [[sizes], [axes]]; one size may be -1, the rest
    mesh_shape: MeshShape = (
        (-1, 1),
        ("fsdp", "tp"),
    )
    # gemma2, gemma3, llama, qwen2, qwen3, or module.NAME; null: as config.json says
    family: str | None = None
    # of random weights; others must agree with it; null: their config.json
    architecture: Architecture | None = None
    # of random weights: bundled, a folder or a hub name; other weights bring their own
    tokenizer: str = "bundled"
    lora: LoraConfig = field(default_factory=LoraConfig)
    # the head is the folder's lm_head.weight, even where its config.json ties it
    untie_head: bool = False

    def __post_init__(self):
        check_mesh_shape(self.mesh_shape)
        check_on_disk("weights", self.weights)
        check_on_disk("tokenizer", self.tokenizer)
        if self.weights == "random" and self.architecture is None:
            raise ValueError(
                "weights=random needs model.architecture; conf/model/random.yaml is an example"
            )
        if self.weights == "random" and self.untie_head:
            raise ValueError(
                "untie_head=true is of a folder's weights; random ones take "
                "model.architecture.tied=false"
            )


@dataclass(frozen=True)
class FoundModel:
    """A model that has been found and looked at, and not yet loaded."""

    cfg: Architecture
    family: Family | None  # None: random weights of no named family
    # None: random weights. Of a hub model, what `locate` needed; after `download` the weights too
    folder: Path | None
    tokenizer: Tokenizer
    lora: LoraConfig | None  # None: all weights train
    name: str  # as the user said it


# callers turn it into a ConfigError, or add their own place
_setting = partial(error_context, kind=ValueError)


def locate(model: ModelConfig) -> FoundModel:
    """Everything about a model short of its weights. Raises ValueError, beginning with the setting,
    if it cannot be."""
    with _setting("model.family"):
        family = None if model.family is None else families.find_family(model.family)
    cfg, folder = model.architecture, None
    with _setting("model.weights"):
        if model.weights != "random":
            folder = _folder(model.weights)
            cfg, family = families.read_config(folder, family)
            cfg = _untied(cfg, model)
            computed = families.as_computed(cfg)
            ours = (
                computed
                if model.architecture is None
                else families.as_computed(_untied(model.architecture, model))
            )
            if differ := families.architecture_differences(ours, computed):
                raise ValueError(
                    f"the config.json of {model.weights} is not the chosen model.architecture: "
                    f"{'; '.join(differ)} "
                    "(there). Choose another model=, or model.architecture=null to take what is "
                    "there"
                )
    if folder is None and family is not None:
        with _setting("model.architecture"):
            families.check_flags(cfg, family)
    with _setting("model.tokenizer" if folder is None else "model.weights"):
        tokenizer = Tokenizer.load(folder or _folder(model.tokenizer))
        if (top := max(*tokenizer.eos_ids, tokenizer.pad_id)) >= cfg.vocab_size:
            raise ValueError(
                f"{tokenizer.folder}: the tokenizer's token {shown(top)} is beyond the model's "
                f"vocab_size={cfg.vocab_size}"
            )
    with _setting("model.lora"):
        lora = model.lora
        if lora.adapter is not None:
            lora = peft.read_adapter_config(lora, cfg, family)
        if lora.rank:
            adapter_weights(decoder.weights(cfg), lora)
            stored_table(decoder.weights(cfg), lora.base)
    return FoundModel(cfg, family, folder, tokenizer, lora if lora.rank else None, model.weights)


def _untied(cfg: Architecture, model: ModelConfig) -> Architecture:
    return replace(cfg, tied=False) if model.untie_head else cfg


def download(source: FoundModel) -> FoundModel:
    """The source with its weights at hand, downloaded if need be, and looked at. Raises ValueError
    as `locate` does.

    Apart from `locate`, so that whatever else can be wrong is found before gigabytes come.
    """
    if source.folder is None:
        return source
    with _setting("model.weights"):
        folder = source.folder
        # of the revision whose config.json and tokenizer are known by now
        if hub.is_hub_name(source.name):
            folder = hub.snapshot(f"{source.name.partition('@')[0]}@{folder.name}")
        hf.check_weights(folder, source.cfg, source.family)
    return replace(source, folder=folder)


def weight_tables(source: FoundModel) -> tuple[Any, Any]:
    """The weights of the frozen base (None: nothing is frozen), and of what trains."""
    table = decoder.weights(source.cfg)
    if source.lora is None:
        return None, table
    return stored_table(table, source.lora.base), adapter_weights(table, source.lora)


def weights_digest(source: FoundModel) -> str:
    """A few characters that tell these weights from others: of files, of their sizes and of what is
    at their ends."""
    if source.folder is None:
        return "random"
    seen = hashlib.sha256()
    for file in sorted(source.folder.glob("*.safetensors")):
        with file.open("rb") as f:
            seen.update(f"{file.name} {file.stat().st_size}".encode() + f.read(SAMPLE))
            f.seek(max(0, file.stat().st_size - SAMPLE))
            seen.update(f.read(SAMPLE))
    return seen.hexdigest()[:16]


def num_adapters(source: FoundModel) -> int:
    """Parameters in adapters; 0: all weights train."""
    return 0 if source.lora is None else weights.num_params(weight_tables(source)[1])


def check_mesh(source: FoundModel, mesh) -> None:
    """Raises ValueError, naming the weight, if the mesh does not divide the model or its
    adapters."""
    for table in weight_tables(source):
        if table is not None:
            weights.check_divisible(table, mesh)


def load_weights(
    source: FoundModel, seed: int = 0, storage: str = "fp32"
) -> tuple[Params | None, Params]:
    """The frozen base (None: nothing is frozen) and what trains, on the current mesh. Raises
    ValueError.

    storage: of what trains, fp32 or bf16; the base has its own in model.lora.base.
    """
    if source.lora is None:
        return None, load_base(source, seed, storage)
    base, adapters = _load_with_adapters(source, seed)
    return base, jax.tree.map(lambda x: x.astype(STORAGE[storage]), adapters)


def _load_with_adapters(source: FoundModel, seed: int) -> tuple[Params, Params]:
    base = load_base(source, seed, source.lora.base)
    key = jax.random.key(seed)
    if source.lora.adapter is not None:
        return base, peft.load_adapters(
            Path(source.lora.adapter), source.cfg, source.family, source.lora
        )
    table = adapter_weights(decoder.weights(source.cfg), source.lora)
    return base, weights.init_params(table, jax.random.fold_in(key, ADAPTER_SEED))


def load_base(source: FoundModel, seed: int, storage: str) -> Params:
    """The model without adapters, stored as fp32, bf16, int8 or nf4."""
    if source.folder is None:
        return init_stored(decoder.weights(source.cfg), jax.random.key(seed), storage)
    return hf.load_params(source.folder, source.cfg, source.family, storage)


def settings_to_keep(model: ModelConfig, found: FoundModel, seed: int) -> dict:
    """Plain values, enough to load what a run trains from wherever a program is started."""

    def whole(name: str) -> str:
        path = as_path(name)
        return str(path.absolute()) if path.is_dir() else name

    lora = replace(found.lora, adapter=None) if found.lora else LoraConfig()
    model = replace(model, architecture=found.cfg, lora=lora)
    model = replace(model, weights=whole(model.weights), tokenizer=whole(model.tokenizer))
    return {"model": asdict(model), "seed": seed}


def _folder(name: str) -> Path:
    """The folder that a setting names; of a hub model, without its weights."""
    if name == "bundled":
        return BUNDLED
    if hub.is_hub_name(name):
        return hub.small_files(name)
    return as_path(name)
