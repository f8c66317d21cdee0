"""What the numbers of a run depend on, kept beside its checkpoints: a run goes on only from a
checkpoint of the same run.

What never changes an answer is not in it: the mesh, micro-batches, remat, scan_layers, slots, and
how long and how often. Packing is kept, so that training.packing=auto goes on as the run began; it
may differ.
"""

import dataclasses
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import flax
import jax
import jaxlib
import optax

from tunix_lite import __version__
from tunix_lite.config import RunConfig, plain, with_new_names
from tunix_lite.files.untrusted import read_object
from tunix_lite.learner.rows import PACKING
from tunix_lite.models import source
from tunix_lite.models.source import FoundModel
from tunix_lite.plain_text import escaped, shown
from tunix_lite.tasks.curriculum import source_of_level
from tunix_lite.tasks.row_files import OF_BYTES
from tunix_lite.tasks.sources import digest_of_data

# differences in a message
SHOWN = 8
# characters of a value in it
LONGEST = 400


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
    what they hold are in `data`, `weights` and `frozen_weights`.
    """
    kept = source.settings_to_keep(run.model, model, run.seed)["model"]
    return {
        "model": {"architecture": kept["architecture"], "lora": kept["lora"]},
        "weights": source.weights_digest(model),
        **_frozen_weights(frozen_models),
        "algorithm": plain(run.algorithm),
        "task": _task(run),
        "data": digest_of_data(run.task.source),
        **_curriculum(run),
        "generation": plain(run.generation),
        "rollout": {"cache": run.rollout.cache} | _overlap(run, prompts, shards),
        "rewards": {"on_error": run.rewards.on_error} | _on_none(run),
        **_conversation(run),
        "optimizer": _optimizer(run, shards),
        "training": {
            "prompts_per_step": prompts,
            "mixed_precision": run.training.mixed_precision,
            "packing": run.training.packing,
        }
        | _reduced(run),
        "seed": run.seed,
        "versions": {
            "tunix_lite": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            "python": platform.python_version(),
        },
    }


def _frozen_weights(frozen_models: Mapping[str, FoundModel]) -> dict:
    """Only where there are any: earlier versions kept no such digests."""
    digests = {name: source.weights_digest(found) for name, found in frozen_models.items()}
    return {"frozen_weights": digests} if digests else {}


def _task(run: RunConfig) -> dict:
    """The task; `group` of a reward only where it is true: earlier versions had no such setting."""
    task = plain(run.task)
    for reward in task["rewards"].values():
        if not reward["group"]:
            del reward["group"]
    if task["environment"] is None:
        del task["environment"]
    return task


def _conversation(run: RunConfig) -> dict:
    """Only where there are conversations. How long an environment may take, and in how many
    processes, changes no answer."""
    if run.task.environment is None:
        return {}
    settings = plain(run.conversation)
    for name in ("_target_", "timeout", "workers"):
        del settings[name]
    return {"conversation": settings}


def _curriculum(run: RunConfig) -> dict:
    """Only where there is one, with digests of the data of its levels: earlier versions had no such
    settings."""
    curriculum = run.curriculum
    if not curriculum.is_on:
        return {}
    data = {
        f"level {i + 1}": digest_of_data(source_of_level(run.task.source, curriculum, i))["train"]
        for i in range(len(curriculum.levels))
    }
    return {"curriculum": plain(curriculum) | {"data": data}}


def _on_none(run: RunConfig) -> dict:
    """Only where it is not the default: earlier versions had no such setting."""
    return {} if run.rewards.on_none == "error" else {"on_none": run.rewards.on_none}


def _overlap(run: RunConfig, prompts: int, shards: int) -> dict:
    """Only where updates learn from tokens of earlier weights: which ones depends on slots and
    chunks then, and earlier versions had no such settings."""
    rollout = run.rollout
    if not rollout.is_stale:
        return {}
    found = {"overlap": rollout.overlap, "max_staleness": rollout.max_staleness}
    if rollout.overlap == "carry":
        slots = rollout.slots(prompts * run.algorithm.num_generations, shards)
        found |= {"slots": slots, "chunk": rollout.chunk}
    return found


def _optimizer(run: RunConfig, shards: int) -> dict:
    """The optimizer; the number of shards only where the learning rate depends on it."""
    settings = plain(run.optimizer)
    return settings | {"shards": shards} if run.optimizer.scale_lr_with_devices else settings


def _reduced(run: RunConfig) -> dict:
    """Only what differs from the default: earlier versions had no such settings."""
    chosen = {name: getattr(run.training, name) for name in ("reduce_dtype", "tp_reduce_dtype")}
    return {name: dtype for name, dtype in chosen.items() if dtype != "float32"}


def read_fingerprint(file: Path) -> dict:
    """The fingerprint in this file, its classes by their names of today. Raises ValueError."""
    unknown = "so what made its checkpoints is not known"
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}, {unknown}")
    try:
        found = read_object(file)
    except ValueError as error:
        raise ValueError(f"{error}, {unknown}") from error
    if "model" not in found:
        raise ValueError(f"{file} cannot be read (it names no model), {unknown}")
    return with_new_names(found)


def packing_of(theirs: dict, file: Path) -> str:
    """How the run with this fingerprint, read from `file`, packed its sequences. Runs of earlier
    versions kept nothing of it; their default was none. Raises ValueError."""
    kept = theirs.get("training")
    found = kept.get("packing", "none") if isinstance(kept, dict) else "none"
    if found not in PACKING:
        raise ValueError(f"{file}: packing={shown(found)} is not {', '.join(PACKING)}")
    return found


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
    """Raises ValueError, with what differs, unless the two are one run; returns what differs and
    may.

    Another model cannot be forced: its checkpoint means something else. Other versions of libraries
    only change digits. A setting that an earlier version did not have is compared with its default.
    Of the data, of how special tokens in it are read, and of the weights of teachers, earlier
    versions kept nothing: nothing is compared.
    """
    found = dict(differences(_known_then(ours, theirs), theirs))
    versions = {name: found.pop(name) for name in [*found] if name.startswith("versions.")}
    for name in ("model.lora.dropout", "training.packing"):
        found.pop(name, None)

    other = {name: text for name, text in found.items() if name.startswith("model.")}
    if other:
        raise ValueError(f"the run in {folder} has another model: {_listed(other)}")
    if found and not force:
        raise ValueError(
            f"this is not the run in {folder}: {_listed(found)}. resume.force=true goes on from "
            "its checkpoint all "
            "the same; resume=none with another hydra.run.dir begins anew"
        )
    return _listed(found | versions)


def _known_then(ours: dict, theirs: dict) -> dict:
    """Our fingerprint without what the version that wrote theirs did not keep."""
    kept = _without_new_defaults(ours, theirs)
    task = theirs.get("task")
    if isinstance(task, dict) and "special_tokens_in_data" not in task:
        kept = kept | {"task": _without(kept.get("task", {}), "special_tokens_in_data")}
    kept = _without_digests_of_bytes(kept, theirs)
    # digests that earlier versions did not keep
    for name in ("data", "frozen_weights"):
        kept = kept if name in theirs else _without(kept, name)
    return kept


def _without_digests_of_bytes(ours: dict, theirs: dict) -> dict:
    """Our fingerprint with their digest of a file of which earlier versions looked at some rows
    alone: the two cannot be compared."""
    here = ours.get("data")
    there = theirs.get("data")
    if not isinstance(here, dict) or not isinstance(there, dict):
        return ours
    data = {}
    for name, value in here.items():
        other = there.get(name)
        is_new = value.startswith(OF_BYTES) and isinstance(other, str)
        data[name] = other if is_new and not other.startswith(OF_BYTES) else value
    return ours | {"data": data}


def _without_new_defaults(ours: dict, theirs: dict) -> dict:
    """Our settings without those that a class did not have then, where they have their default."""
    defaults = _defaults(ours.get("_target_")) if theirs.keys() != ours.keys() else {}
    kept = {}
    for name, value in ours.items():
        there = theirs.get(name)
        is_new_default = name not in theirs and name in defaults and defaults[name] == value
        if isinstance(value, dict) and isinstance(there, dict):
            kept[name] = _without_new_defaults(value, there)
        elif not is_new_default:
            kept[name] = value
    return kept


def _defaults(path: str | None) -> dict:
    """The settings of a class, which this run has built, that have a plain default."""
    if path is None:
        return {}
    module, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if not dataclasses.is_dataclass(kind):
        return {}
    fields = dataclasses.fields(kind)
    return {
        field.name: plain(field.default)
        for field in fields
        if field.default is not dataclasses.MISSING
    }


def _without(values: dict, left_out: str) -> dict:
    return {name: value for name, value in values.items() if name != left_out}


def _listed(found: dict[str, str]) -> str:
    """The first few differences, as one text."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(f"{name}: {text}" for name, text in [*found.items()][:SHOWN]) + more
