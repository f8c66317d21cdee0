"""Fingerprints a run: the settings its numbers depend on, kept beside its checkpoints. A run
resumes only from a checkpoint of the same run. What never changes an answer is not in it: the mesh,
micro-batches, remat, slots, and how often. Packing is, so that auto goes on as the run began."""

import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import flax
import jax
import jaxlib
import optax

from tunix_lite import __version__
from tunix_lite.basics.plain_text import escaped, shown, without_secrets
from tunix_lite.basics.untrusted import read_object
from tunix_lite.distributed.agreement import digests_of_code
from tunix_lite.learner.rows import PACKING
from tunix_lite.models import source
from tunix_lite.models.source import FoundModel
from tunix_lite.settings.config import RunConfig, plain
from tunix_lite.tasks.hub_rows import HubData, is_hub, pinned
from tunix_lite.tasks.sources import digest_of_data
from tunix_lite.tasks.task import TaskConfig

# differences in a message
_SHOWN = 8
# what may differ, and the start says both values: versions, what held-out numbers are of, the end
# of a decaying learning rate, the dropout of adapters
_SAID = ("versions.", "evaluation.", "training.max_steps", "model.lora.dropout")
# Settings that change no number of a run: how, where and how often it computes and looks, when it
# stops and what stays on the disk. max_steps counts with a schedule, last_batch with epochs, and
# what a batch makes of the sizes is in `prompts_per_step`.
_FREE = {
    "training": "max_steps epochs last_batch prompts_per_step micro_batch_size packing "
    "gradient_accumulation_steps micro_batch_tokens sync_gradients_every remat scan_layers "
    "attention expert_kernels memory_check profile_communication log_interval_steps "
    "save_interval_steps keep_checkpoints keep_best_checkpoints best_metric best_is "
    "early_stopping_patience max_minutes grace_seconds max_skipped_in_a_row max_sampler_gap",
    "evaluation": "interval_steps",
    "rollout": "num_slots chunk weights kernels mesh_shape",
    "rewards": "timeout workers",
    "conversation": "timeout workers",
    # the digests of `data` say which rows there are
    "task": "held_out_every cache",
}
# the end of a difference in a setting that the other file does not name, as files of before may
_NOT_NAMED = " nothing there"
# characters of a value in it
_LONGEST = 400
# settings of a task that may name a data set of the hub, and the split where they name none
HUB_SETTINGS = {"train": "train", "held_out": "test"}


def _counting(run: RunConfig, group: str) -> dict:
    """The settings of a group that change numbers."""
    left_out = (*_FREE[group].split(), "_target_")
    settings = plain(getattr(run, group)).items()
    return {name: value for name, value in settings if name not in left_out}


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

    model_settings = source.settings_to_keep(run.model, model, run.seed)["model"]
    training = run.training
    task = {"_target_": plain(run.task)["_target_"], **_counting(run, "task")}
    # with the commits that were read
    for key, at in HUB_SETTINGS.items():
        if is_hub(task.get(key)):
            task[key] = pinned(task[key], at)
    values = {
        "model": {name: model_settings[name] for name in ("architecture", "lora")},
        "weights": source.weights_digest(model),
        "tokenizer": _digest(repr(sorted(model.tokenizer.vocabulary.items()))),
        "chat_template": None if template is None else _digest(template.text),
        "template": plain(run.model.template),
        "algorithm": plain(run.algorithm),
        "task": task,
        "data": digest_of_data(run.task.source),
        "generation": plain(run.generation),
        "rollout": _counting(run, "rollout"),
        "rewards": _counting(run, "rewards"),
        "optimizer": plain(run.optimizer),
        "training": _counting(run, "training")
        | {
            "prompts_per_step": prompts,
            "packing": training.packing,
            "last_batch": None if training.epochs is None else training.last_batch,
        },
        "evaluation": _counting(run, "evaluation"),
        "seed": run.seed,
        "versions": {
            "tunix_lite": __version__,
            **{one.__name__: one.__version__ for one in (jax, jaxlib, flax, optax)},
            "python": platform.python_version(),
        },
    }

    # What only some runs depend on.
    if frozen_models:
        digests = {name: source.weights_digest(one) for name, one in frozen_models.items()}
        values["frozen_weights"] = digests
    if run.task.environment is not None:
        values["conversation"] = _counting(run, "conversation")
    rollout = run.rollout
    if rollout.is_stale and rollout.overlap == "carry":
        # which tokens are of earlier weights depends on slots and chunks
        slots = rollout.slots(prompts * run.algorithm.num_generations, shards)
        values["rollout"] |= {"slots": slots, "chunk": rollout.chunk}
    if run.optimizer.scale_lr_with_devices:
        values["optimizer"]["shards"] = shards
    if run.optimizer.schedule != "constant":
        values["training"]["max_steps"] = training.max_steps
    code = digests_of_code((values["algorithm"], task))
    if code:
        values["code"] = code
    return without_secrets(values)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    """Returns how the run with this fingerprint, of `file`, packed. Raises ValueError."""
    training = theirs.get("training")
    packing = training.get("packing") if isinstance(training, dict) else None
    if packing not in PACKING:
        raise ValueError(f"{file}: packing={shown(packing)} is not {', '.join(PACKING)}")
    return packing


def with_commits_of(theirs: dict, task: TaskConfig) -> TaskConfig:
    """The task with the commits of the hub's data that the run with this fingerprint read, where
    its settings name the same data set and no commit."""
    before = theirs.get("task")
    pins = {}
    for name in HUB_SETTINGS if isinstance(before, dict) else ():
        names = (getattr(task, name, None), str(before.get(name)))
        if all(map(is_hub, names)):
            here, there = map(HubData.parse, names)
            if here.repo == there.repo and here.revision is None:
                pins[name] = str(here._replace(revision=there.revision))
    return replace(task, **pins) if pins else task


def _differences(ours: dict, theirs: dict, where: str = "") -> Iterator[tuple[str, str]]:
    """(name, "our value here, their value there") of every setting that is not the same in both."""
    for key in ours | theirs:
        name = f"{where}{escaped(key)}"
        here = ours.get(key)
        there = theirs.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            yield from _differences(here, there, f"{name}.")
        elif here != there:
            end = f" {shown(there, _LONGEST)} there" if key in theirs else _NOT_NAMED
            yield name, f"{shown(here, _LONGEST)} here,{end}"


def check_same_run(ours: dict, theirs: dict, folder: Path | str, force: bool) -> str:
    """Raises ValueError, with the differences, unless the two are one run; returns the differences
    that are allowed. Another model cannot be forced: its checkpoint means something else. One that
    only has settings which theirs do not name can."""
    changes = dict(_differences(ours, theirs))
    said = {name: changes.pop(name) for name in [*changes] if name.startswith(_SAID)}
    changes.pop("training.packing", None)
    both = (one.get("training") for one in (ours, theirs))
    ends = [one.get("last_batch") if isinstance(one, dict) else None for one in both]
    if None in ends and changes.pop("training.last_batch", None):
        here, there = ("epochs" if end else "updates" for end in ends)
        changes["training.epochs"] = f"{here} are counted here, {there} there"

    other = {
        name: text
        for name, text in changes.items()
        if name.startswith("model.") and not text.endswith(_NOT_NAMED)
    }
    if other:
        raise ValueError(f"the run in {folder} has another model: {_listed(other)}")
    if changes and not force:
        raise ValueError(
            f"this is not the run in {folder}: {_listed(changes)}. resume.force=true goes on from "
            "its checkpoint all the same; resume=none with another hydra.run.dir begins anew"
        )
    return _listed(changes | said)


def _listed(changes: dict[str, str]) -> str:
    """The first few differences, as one text."""
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return "; ".join(f"{name}: {text}" for name, text in [*changes.items()][:_SHOWN]) + more
