"""Fingerprints a run: the settings its numbers depend on, kept beside its checkpoints. A run
resumes only from a checkpoint of the same run. What never changes an answer is not in it: the mesh,
micro-batches, remat, slots, and how often. Packing is, so that auto goes on as the run began."""

import ast
import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType

import flax
import jax
import jaxlib
import optax

from tunix_lite import __version__
from tunix_lite.basics.plain_text import escaped, shown, without_secrets
from tunix_lite.basics.untrusted import read_object
from tunix_lite.learner.rows import PACKING
from tunix_lite.models import source
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.source import FoundModel
from tunix_lite.settings.config import RunConfig, plain
from tunix_lite.tasks.hub_rows import HubData, is_hub, pinned
from tunix_lite.tasks.sources import digest_of_data
from tunix_lite.tasks.task import TaskConfig

# a setting as YAML has it
Plain = dict | list | tuple | str | int | float | None
# differences in a message
SHOWN = 8
# what may differ, and the start says both values: versions, what held-out numbers are of, the end
# of a decaying learning rate, the dropout of adapters
SAID = ("versions.", "evaluation.", "training.max_steps", "model.lora.dropout")
# fields of the architecture that runs of before do not have, which are left out at these values
_LATER_NAMES = """
    attn_gate rope_share delta output experts yarn longrope pre_norms qk_norm_whole out_bias
    attn_sinks global_head_dim global_kv_heads global_rope_share keys_as_values value_norm
    kv_readers wide_readers per_layer_dim layer_scalar
    """.split()  # noqa: SIM905
LATER = {f.name: f.default for f in fields(Architecture) if f.name in _LATER_NAMES}
LATER_OF_YARN = {"truncate": True, "in_windows": False}
# characters of a value in it
LONGEST = 400
# settings of a task that may name a data set of the hub, and the split where they name none
HUB_SETTINGS = {"train": "train", "held_out": "test"}


def _without(settings: dict, later: dict) -> dict:
    """The settings without those of `later` that have its values."""
    return {k: v for k, v in settings.items() if k not in later or v != later[k]}


def fingerprint(
    run: RunConfig,
    model: FoundModel,
    prompts: int,
    shards: int = 1,
    frozen_models: Mapping[str, FoundModel] = MappingProxyType({}),
) -> dict:
    """Plain values by the names of the settings; `versions`, `weights` and `data` beside them.
    prompts: of an update. shards: of the batch (fsdp). frozen_models: those of the algorithm, such
    as a teacher. Settings have only the names of data files and of folders with weights; digests of
    what they hold are in `data`, `weights` and `frozen_weights`. Secrets are hidden."""
    template = model.tokenizer.template

    # What every run has. Steps and rates that others do not depend on are left out.
    model_settings = source.settings_to_keep(run.model, model, run.seed)["model"]
    training = run.training
    evaluation = plain(run.evaluation)
    # how often a run looks changes nothing of what it learns
    del evaluation["_target_"], evaluation["interval_steps"]
    # the digests of `data` say which rows there are
    left_out = ("held_out_every", "cache")
    task = {name: value for name, value in plain(run.task).items() if name not in left_out}
    # with the commits that were read
    task |= {k: pinned(task[k], at) for k, at in HUB_SETTINGS.items() if is_hub(task.get(k))}
    for reward in task.get("rewards", {}).values():
        if not reward["group"]:
            del reward["group"]
    architecture = _without(model_settings["architecture"], LATER)
    if "yarn" in architecture:
        architecture["yarn"] = _without(architecture["yarn"], LATER_OF_YARN)
    values = {
        "model": {
            "architecture": architecture,
            "lora": model_settings["lora"],
        },
        "weights": source.weights_digest(model),
        "tokenizer": _digest(repr(sorted(model.tokenizer.vocabulary.items()))),
        "chat_template": None if template is None else _digest(template.text),
        "algorithm": plain(run.algorithm),
        "task": task,
        "data": digest_of_data(run.task.source),
        "generation": plain(run.generation),
        "rollout": {"cache": run.rollout.cache},
        "rewards": {"on_error": run.rewards.on_error},
        "optimizer": plain(run.optimizer),
        "training": {
            "prompts_per_step": prompts,
            "mixed_precision": training.mixed_precision,
            "packing": training.packing,
        },
        "evaluation": evaluation,
        "seed": run.seed,
        "versions": {
            "tunix_lite": __version__,
            **{one.__name__: one.__version__ for one in (jax, jaxlib, flax, optax)},
            "python": platform.python_version(),
        },
    }

    # What only some runs have, where their numbers depend on it.
    if run.model.template:
        values["template"] = plain(run.model.template)
    if frozen_models:
        digests = {name: source.weights_digest(one) for name, one in frozen_models.items()}
        values["frozen_weights"] = digests
    if run.task.environment is None:
        task.pop("environment", None)
    else:
        # time limits and processes of environments change no answer
        left_out = ("_target_", "timeout", "workers")
        conversation = plain(run.conversation)
        values["conversation"] = {
            name: value for name, value in conversation.items() if name not in left_out
        }
    rollout = run.rollout
    if rollout.is_stale:
        # which tokens are of earlier weights depends on slots and chunks
        for name in ("overlap", "max_staleness"):
            values["rollout"][name] = getattr(rollout, name)
        if rollout.overlap == "carry":
            slots = rollout.slots(prompts * run.algorithm.num_generations, shards)
            values["rollout"] |= {"slots": slots, "chunk": rollout.chunk}
    if run.rewards.on_none != "error":
        values["rewards"]["on_none"] = run.rewards.on_none
    if run.optimizer.scale_lr_with_devices:
        values["optimizer"]["shards"] = shards
    if run.optimizer.schedule != "constant":
        values["training"]["max_steps"] = training.max_steps
    if training.epochs is not None:
        values["training"]["last_batch"] = training.last_batch
    losses = ("router_aux_loss_coef", "router_z_loss_coef")
    for name in ("reduce_dtype", "tp_reduce_dtype", *losses):
        if getattr(training, name) not in ("float32", 0):
            values["training"][name] = getattr(training, name)
    if model.cfg.experts is not None:
        values["rollout"]["replay_routes"] = rollout.replay_routes
    code = _digests_of_code((values["algorithm"], task))
    if code:
        values["code"] = code
    return without_secrets(values)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digests_of_code(settings: Plain) -> dict[str, str]:
    """Returns digests, by module, of the user's own code that plain settings name by dotted path,
    rewards above all. Comments and blank lines do not count."""
    if isinstance(settings, dict | list | tuple):
        values = settings.values() if isinstance(settings, dict) else settings
        digests: dict[str, str] = {}
        for value in values:
            digests |= _digests_of_code(value)
        return digests
    if not isinstance(settings, str) or not all(map(str.isidentifier, settings.split("."))):
        return {}
    name = settings.rpartition(".")[0]
    # a class in a class: the module is what was imported
    while name and name not in sys.modules:
        name = name.rpartition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)
    is_ours = name.partition(".")[0] == "tunix_lite"
    # what is installed has a version
    if (
        file is None
        or is_ours
        or Path(file).suffix != ".py"
        or "site-packages" in Path(file).parts
    ):
        return {}
    return {name: _digest(ast.dump(ast.parse(Path(file).read_bytes())))}


def read_fingerprint(file: Path) -> dict:
    """The fingerprint in this file. Raises ValueError."""
    unknown = "so what made its checkpoints is not known"
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}, {unknown}")
    try:
        values = read_object(file)
    except ValueError as error:
        raise ValueError(f"{error}, {unknown}") from error
    if "model" not in values:
        raise ValueError(f"{file} cannot be read (it names no model), {unknown}")
    return without_secrets(values)


def packing_of(theirs: dict, file: Path) -> str:
    """Returns how the run with this fingerprint, read from `file`, packed its sequences. Raises
    ValueError."""
    training = theirs.get("training")
    packing = training.get("packing") if isinstance(training, dict) else None
    if packing not in PACKING:
        raise ValueError(f"{file}: packing={shown(packing)} is not {', '.join(PACKING)}")
    return packing


def with_commits_of(theirs: dict, task: TaskConfig) -> TaskConfig:
    """The task with the commits of the hub's data that the run with this fingerprint read, where
    its settings name the same data and no commit."""
    before = theirs.get("task")
    pins = {}
    for name in HUB_SETTINGS if isinstance(before, dict) else ():
        ours = getattr(task, name, None)
        if is_hub(ours) and HubData.parse(ours).may_be(str(before.get(name))):
            pins[name] = before[name]
    return replace(task, **pins) if pins else task


def differences(ours: dict, theirs: dict, where: str = "") -> Iterator[tuple[str, str]]:
    """(name, "our value here, their value there") of every setting that is not the same in both."""
    for key in dict.fromkeys((*ours, *theirs)):
        name = f"{where}{escaped(key)}"
        here = ours.get(key)
        there = theirs.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            yield from differences(here, there, f"{name}.")
        elif here != there:
            yield name, f"{shown(here, LONGEST)} here, {shown(there, LONGEST)} there"


def check_same_run(ours: dict, theirs: dict, folder: Path | str, force: bool) -> str:
    """Raises ValueError, with the differences, unless the two are one run; returns the differences
    that are allowed. Another model cannot be forced: its checkpoint means something else. What SAID
    names may differ."""
    changes = dict(differences(ours, theirs))
    said = {name: changes.pop(name) for name in [*changes] if name.startswith(SAID)}
    changes.pop("training.packing", None)
    both = (one.get("training") for one in (ours, theirs))
    ends = [one.get("last_batch") if isinstance(one, dict) else None for one in both]
    if None in ends and changes.pop("training.last_batch", None):
        here, there = ("epochs" if end else "updates" for end in ends)
        changes["training.epochs"] = f"{here} are counted here, {there} there"
    # runs of before have no digest of a model's own template
    if "chat_template" in changes and "chat_template" not in theirs:
        said["chat_template"] = changes.pop("chat_template")

    other = {name: text for name, text in changes.items() if name.startswith("model.")}
    if other:
        raise ValueError(f"the run in {folder} has another model: {_listed(other)}")
    if changes and not force:
        raise ValueError(
            f"this is not the run in {folder}: {_listed(changes)}. resume.force=true goes on from "
            "its checkpoint all "
            "the same; resume=none with another hydra.run.dir begins anew"
        )
    return _listed(changes | said)


def _listed(changes: dict[str, str]) -> str:
    """The first few differences, as one text."""
    more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return "; ".join(f"{name}: {text}" for name, text in [*changes.items()][:SHOWN]) + more
