"""Sources of models: bundled, random, a Hugging Face folder, a GGUF file, or a name on the hub.
`locate` checks all but the weights, `download` gets them, `load_weights` makes the parameters."""

import difflib
import hashlib
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from tunix_lite.basics.addresses import is_address
from tunix_lite.basics.buckets import bring
from tunix_lite.basics.errors import error_context
from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.basics.types import Params
from tunix_lite.basics.untrusted import as_path, read_text
from tunix_lite.distributed.host_memory import give_back_freed_memory
from tunix_lite.models import decoder, families, hf, hub, peft, sizes, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.chat_template import PRESETS, ChatTemplate
from tunix_lite.models.family import Family
from tunix_lite.models.gguf_file import is_gguf
from tunix_lite.models.lora import (
    ADAPTER_SEED,
    LoraConfig,
    adapter_weights,
    trained_weights,
)
from tunix_lite.models.quantize import STORAGE, init_stored, stored_table
from tunix_lite.models.scalar_head import HEAD
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.weights import Table
from tunix_lite.parallel.mesh import MeshShape, MeshSizes, check_mesh_shape

BUNDLED = Path(__file__).parent / "bundled"
# Bytes that the digest reads at each end of a file of weights: its header, with names and shapes,
# and the last tensors.
_SAMPLE = 1 << 16
# Bytes of freed memory that the process may keep while weights are loaded.
_MOST_UNUSED = 256 << 20


@dataclass(frozen=True)
class ModelConfig:
    """Selects the model, its division over the devices, and the part of it that trains.

    Example: `ModelConfig(weights="google/gemma-3-1b-it", mesh_shape=((4, 1), ("fsdp", "tp")))`.
    """

    # conf/model/parts/common.yaml explains each setting
    weights: str = "bundled"
    mesh_shape: MeshShape = ((-1, 1), ("fsdp", "tp"))
    family: str | None = None
    architecture: Architecture | None = None
    tokenizer: str = "bundled"
    target_params: str | int | float | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    chat_template: str | None = None
    template: dict = field(default_factory=dict)

    def __post_init__(self):
        check_mesh_shape(self.mesh_shape)
        if self.weights == "random" and self.architecture is None:
            raise ValueError(
                "weights=random needs model.architecture; conf/model/random.yaml is an example"
            )
        if self.target_params is not None:
            sizes.count_in(self.target_params)
            if self.weights != "random":
                raise ValueError(
                    f"target_params={self.target_params} is of random weights, and weights="
                    f"{self.weights} have a size; model=random model.target_params="
                    f"{self.target_params}"
                )


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen model that scores what another one has sampled, token by token.

    Example: TeacherConfig("google/gemma-3-4b-it", storage="int8").
    """

    # conf/algorithm/distill.yaml explains each setting
    weights: str
    family: str | None = None
    # of a hub name that a plan is made for; null: config.json
    architecture: Architecture | None = None
    storage: str = "bf16"
    prompt: str | None = None
    max_prompt_length: int | None = None

    def __post_init__(self):
        if self.max_prompt_length is not None and self.prompt is None:
            raise ValueError(
                f"max_prompt_length={self.max_prompt_length} has no effect without prompt=...: "
                "the teacher reads the prompts of the policy"
            )
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length={self.max_prompt_length} must be at least 1")
        if self.weights == "random":
            raise ValueError(
                "weights=random: a teacher needs trained weights; give its folder"
            )
        if self.storage not in STORAGE:
            raise ValueError(f"storage={self.storage!r}; it is {', '.join(STORAGE)}")

    def as_model(self) -> ModelConfig:
        """The same as the settings of a model."""
        return ModelConfig(self.weights, family=self.family, architecture=self.architecture)


@dataclass(frozen=True)
class FoundModel:
    """A model that is located and checked, but not yet loaded.

    Example: locate(ModelConfig()) is the bundled model, ready for `load_weights`.
    """

    cfg: Architecture
    family: Family | None  # None: random weights of no named family
    # None: random weights. Of a hub model, the folder holds no weights before `download`. It may be
    # a GGUF file, too.
    folder: Path | None
    tokenizer: Tokenizer
    lora: LoraConfig | None  # None: all weights train
    name: str  # model.weights, as the user wrote it


# Callers turn it into a ConfigError, or put another setting in front.
_setting = partial(error_context, kind=ValueError)


def locate(model: ModelConfig) -> FoundModel:
    """Everything about a model short of its weights: config.json, the tokenizer, adapters. Raises
    ValueError, beginning with the setting.

    Example: `locate(ModelConfig()).cfg.num_layers` is that of the bundled model.
    """
    with _setting("model.family"):
        family = None if model.family is None else families.find_family(model.family)

    # The architecture and the family: of the folder, or of the settings.
    cfg = model.architecture
    folder = None
    if model.weights != "random":
        with _setting("model.weights"):
            folder = folder_of(model.weights)
            cfg, family = families.read_config(folder, family)
            if model.architecture is not None:
                differ = families.architecture_differences(
                    families.as_computed(model.architecture), families.as_computed(cfg)
                )
                if differ:
                    config = "metadata" if is_gguf(folder) else "config.json"
                    raise ValueError(
                        f"the {config} of {model.weights} is not the chosen model.architecture: "
                        f"{'; '.join(differ)} (there). Choose another model=, or "
                        "model.architecture=null to take what is there"
                    )
                # A reward model may begin with the weights of a model of another kind.
                if model.architecture.output != "logits":
                    cfg = replace(cfg, output=model.architecture.output)
                # Its factors depend on this number, which the user may choose.
                if cfg.longrope is not None:
                    cfg = replace(cfg, max_positions=model.architecture.max_positions)
    elif family is not None:
        with _setting("model.architecture"):
            families.check_flags(cfg, family)

    # The tokenizer: of the folder, or of the settings.
    with _setting("model.tokenizer" if folder is None else "model.weights"):
        tokenizer = Tokenizer.load(folder or folder_of(model.tokenizer))
    if model.target_params is not None:
        with _setting("model"):
            cfg = sizes.sized(cfg, model.target_params, tokenizer.num_tokens)
    with _setting("model.chat_template"):
        if model.chat_template is not None:
            tokenizer = _with_template(tokenizer, model.chat_template)
    with _setting("model.template"):
        if model.template and not tokenizer.has_chat_template:
            raise ValueError(
                f"{model.weights} has no chat template; model.chat_template=chatml gives it one"
            )
        if model.template:
            template = tokenizer.template.with_variables(model.template)
            tokenizer = tokenizer.with_template(template)
    with _setting("model.tokenizer" if folder is None else "model.weights"):
        largest = max(*tokenizer.eos_ids, *tokenizer.start_ids, tokenizer.pad_id)
        if largest >= cfg.vocab_size:
            raise ValueError(
                f"{tokenizer.folder}: the tokenizer's token {shown(largest)} is beyond the model's "
                f"vocab_size={cfg.vocab_size}"
            )
        tokenizer = replace(tokenizer, vocab_size=cfg.vocab_size)

    # The adapters. Their tables are made to raise what is wrong with targets and base.
    with _setting("model.lora"):
        lora = model.lora
        if lora.adapter is not None:
            lora = peft.read_adapter_config(lora, cfg, family)
        if lora.rank:
            adapter_weights(decoder.weights(cfg), lora)
            stored_table(decoder.weights(cfg), lora.base)
    return FoundModel(
        cfg, family, folder, tokenizer, lora if lora.rank else None, model.weights
    )


def locate_teacher(teacher: TeacherConfig, student: FoundModel) -> FoundModel:
    """`locate` for a model that scores the student's tokens. ValueError if it has others."""
    located = locate(teacher.as_model())
    # the teacher scores the very token ids that the policy sampled
    if located.tokenizer.vocabulary != student.tokenizer.vocabulary:
        raise ValueError(
            f"weights={teacher.weights} has another tokenizer than model.weights={student.name}: "
            "the same token is another text there; use a teacher of the same family"
        )
    # A larger one is fine: models of a family differ in how many rows pad the table.
    if located.cfg.vocab_size < student.cfg.vocab_size:
        raise ValueError(
            f"weights={teacher.weights} has vocab_size={located.cfg.vocab_size}, and "
            f"model.weights={student.name} may sample any of {student.cfg.vocab_size} tokens"
        )
    return located


def download(located: FoundModel) -> FoundModel:
    """The same model with its weights on this machine, and their headers checked. Raises as
    `locate`."""
    if located.folder is None:
        return located
    with _setting("model.weights"):
        folder = located.folder
        if hub.is_hub_name(located.name):
            # The name of the folder is the revision whose config.json and tokenizer were read.
            folder = hub.snapshot(f"{located.name.partition('@')[0]}@{folder.name}")
        if is_address(located.name):
            bring(located.name)
        hf.check_weights(folder, located.cfg, located.family)
    return replace(located, folder=folder)


def with_score(located: FoundModel) -> FoundModel:
    """A reward model whose weights are on this machine, with its bias if the file has one. Raises
    ValueError if the folder holds no reward model."""
    folder = located.folder
    names = () if folder is None else set(hf.open_tensors(folder, located.family))
    if hf.SCORES[0] not in names:
        raise ValueError(
            f"{located.name} has no {hf.SCORES[0]}, so it is no reward model; a folder of "
            "transformers' AutoModelForSequenceClassification has one, and algorithm=reward_model "
            "trains one"
        )
    output = "biased_score" if hf.SCORES[1] in names else "score"
    return replace(located, cfg=replace(located.cfg, output=output))


def weight_tables(located: FoundModel) -> tuple[Table | None, Table]:
    """The table of the frozen base (None: nothing is frozen), and that of trained weights."""
    table = decoder.weights(located.cfg)
    if located.lora is None:
        return None, table
    return stored_table(table, located.lora.base), trained_weights(table, located.lora)


def weights_digest(located: FoundModel) -> str:
    """16 characters of a hash of the sizes of the files and the bytes at their ends; "random" of
    random ones."""
    if located.folder is None:
        return "random"
    digest = hashlib.sha256()
    is_file = is_gguf(located.folder)
    # in the order of names, which is the same everywhere
    for file in [located.folder] if is_file else sorted(located.folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as f:
            # both ends: reading all of a large model takes minutes, and training changes every part
            # of it
            digest.update(f"{file.name} {size}".encode() + f.read(_SAMPLE))
            f.seek(max(0, size - _SAMPLE))
            digest.update(f.read(_SAMPLE))
    return digest.hexdigest()[:16]


def check_mesh(located: FoundModel, mesh: MeshSizes) -> None:
    """Raises ValueError, naming the weight, if the mesh does not divide the model."""
    for table in weight_tables(located):
        if table is not None:
            weights.check_divisible(table, mesh)


def load_weights(
    located: FoundModel,
    seed: int = 0,
    storage: str = "fp32",
    on_bytes: hf.OnBytes | None = None,
) -> tuple[Params | None, Params]:
    """The frozen base (None: nothing is frozen) and the weights that train, on the current mesh.

    seed: of random weights and new adapters. storage: of what trains, fp32 or bf16. on_bytes: gets
    the bytes read so far, and those of all. Raises ValueError for weights that do not fit.

    Example: `base, params = load_weights(locate(ModelConfig()))`; base is None without adapters.
    """
    if located.lora is None:
        return None, load_base(located, seed, storage, on_bytes)
    base = load_base(located, seed, located.lora.base, on_bytes)
    # after the base: what is frozen takes the most memory, and may not fit
    adapters = load_new_adapters(located, seed)
    adapters = jax.tree.map(lambda x: x.astype(STORAGE[storage]), adapters)
    # copies, since an update donates what trains
    return base, adapters | {name: jnp.copy(base[name]) for name in HEAD if name in base}


def load_new_adapters(located: FoundModel, seed: int) -> Params:
    """The adapters that training starts from: those of model.lora.adapter, or random ones."""
    if located.lora.adapter is not None:
        folder = Path(located.lora.adapter)
        return peft.load_adapters(folder, located.cfg, located.family, located.lora)
    table = adapter_weights(decoder.weights(located.cfg), located.lora)
    return weights.init_params(table, jax.random.fold_in(jax.random.key(seed), ADAPTER_SEED))


def load_base(
    located: FoundModel,
    seed: int,
    storage: str,
    on_bytes: hf.OnBytes | None = None,
) -> Params:
    """The model without adapters, stored as fp32, bf16, int8 or nf4."""
    # Reading a tokenizer of 262,144 tokens takes 0.4 GB, of which 0.07 stay in use.
    give_back_freed_memory(_MOST_UNUSED, keeps_addresses=True)
    if located.folder is None:
        return init_stored(decoder.weights(located.cfg), jax.random.key(seed), storage)
    return hf.load_params(located.folder, located.cfg, located.family, storage, on_bytes)


def settings_to_keep(model: ModelConfig, located: FoundModel, seed: int) -> dict:
    """Plain values, enough to load what a run trains from any working directory."""

    def absolute(name: str) -> str:
        if is_address(name):
            return name
        path = as_path(name)
        if path.exists():
            return str(path.absolute())
        return name

    template = model.chat_template
    settings = replace(
        model,
        architecture=located.cfg,
        # it has given the architecture
        target_params=None,
        # The folder is not needed again: the checkpoint has the adapters.
        lora=replace(located.lora, adapter=None) if located.lora else LoraConfig(),
        weights=absolute(model.weights),
        tokenizer=absolute(model.tokenizer),
        chat_template=template if template in (None, *PRESETS) else absolute(template),
    )
    return {"model": asdict(settings), "seed": seed}


def _with_template(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """The tokenizer with the chat template of a file or a preset. Raises ValueError."""

    def preset(name: str) -> Tokenizer:
        text = PRESETS[name].read_text(encoding="utf-8")
        return tokenizer.with_template(ChatTemplate.compile(text, name))

    if name not in PRESETS:
        if not (file := as_path(name)).is_file():
            near = difflib.get_close_matches(name, PRESETS, n=1) or ["chatml"]
            raise ValueError(
                f"{name} is not a file, and none of {', '.join(PRESETS)}; write "
                f"model.chat_template=FILE.jinja or model.chat_template={near[0]}"
            )
        return tokenizer.with_template(ChatTemplate.compile(read_text(file), str(file)))
    if not preset(name).ends_of_turns:
        fit = [f"model.chat_template={one}" for one in PRESETS if preset(one).ends_of_turns]
        raise ValueError(
            f"{name} ends a turn with what is no token of {tokenizer.folder}, so that the model "
            f"would not learn to end; write {' or '.join(fit) or 'a FILE.jinja of your own'}"
        )
    return preset(name)


def folder_of(name: str) -> Path:
    """The folder that a setting names, or its GGUF file; of a hub model, without its weights."""
    if name == "bundled":
        return BUNDLED
    # `download` brings the weights.
    path = bring(name, (*hub.SMALL, "*.gguf")) if is_address(name) else as_path(name)
    if is_gguf(path):
        if not path.is_file():
            raise ValueError(f"{shown(name)} is not a file; give a GGUF file or a folder")
        return path
    if hub.is_hub_name(name):
        return hub.small_files(name)
    # a folder with a config.json is of the other format
    files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(
            f"{path} has {len(files)} GGUF files; give one of them: {escaped(str(files[0]))}"
        )
    return files[0] if files else path
