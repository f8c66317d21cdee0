"""What the numbers of a run depend on, kept beside its checkpoints: whoever goes on from one must
mean the same run.

Not in it is what never changes an answer: the mesh, micro-batches, packing, remat, slots, and how
long and how often.
"""

import platform
from collections.abc import Iterator
from pathlib import Path

import flax
import jax
import jaxlib
import optax

from tunix_lite import __version__
from tunix_lite.config import RunConfig, plain, with_new_names
from tunix_lite.files.untrusted import read_object
from tunix_lite.models import source
from tunix_lite.models.source import FoundModel
from tunix_lite.plain_text import escaped, shown
from tunix_lite.tasks.sources import digest_of_data

# differences in a message
SHOWN = 8
# characters of a value in it
LONGEST = 400


def fingerprint(run: RunConfig, model: FoundModel, prompts: int) -> dict:
    """Plain values by the names of the settings; `versions`, `weights` and `data` beside them.
    prompts: of an update.

    Settings have only the names of data files, and what stands in them is in `data`.
    """
    kept = source.settings_to_keep(run.model, model, run.seed)["model"]
    return {
        "model": {"architecture": kept["architecture"], "lora": kept["lora"]},
        "weights": source.weights_digest(model),
        "algorithm": plain(run.algorithm),
        "task": _task(run),
        "data": digest_of_data(run.task.source),
        "generation": plain(run.generation),
        "rollout": {"cache": run.rollout.cache},
        "rewards": {"on_error": run.rewards.on_error},
        "optimizer": plain(run.optimizer),
        "training": {"prompts_per_step": prompts, "mixed_precision": run.training.mixed_precision}
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


def _task(run: RunConfig) -> dict:
    """The task; `group` of a reward only where it is true: earlier versions had no such setting."""
    task = plain(run.task)
    for reward in task["rewards"].values():
        if not reward["group"]:
            del reward["group"]
    return task


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
        said = read_object(file)
    except ValueError as error:
        raise ValueError(f"{error}, {unknown}") from error
    if "model" not in said:
        raise ValueError(f"{file} cannot be read (it names no model), {unknown}")
    return with_new_names(said)


def differences(ours: dict, theirs: dict, where: str = "") -> Iterator[tuple[str, str]]:
    """(name, "our value here, their value there") of every setting that is not the same in both."""
    for key in dict.fromkeys((*ours, *theirs)):
        name, here, there = f"{where}{escaped(key)}", ours.get(key), theirs.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            yield from differences(here, there, f"{name}.")
        elif here != there:
            yield name, f"{shown(here, LONGEST)} here, {shown(there, LONGEST)} there"


def check_same_run(ours: dict, theirs: dict, folder, force: bool) -> str:
    """Raises ValueError, with what differs, unless the two are one run; returns what differs and
    may.

    Another model cannot be forced: its checkpoint means something else. Other versions of libraries
    only change digits. Of the data, and of how special tokens in it are read, earlier versions of
    ours kept nothing: nothing is compared.
    """
    if isinstance(theirs.get("task"), dict) and "special_tokens_in_data" not in theirs["task"]:
        read = {
            name: value
            for name, value in ours.get("task", {}).items()
            if name != "special_tokens_in_data"
        }
        ours = ours | {"task": read}
    if "data" not in theirs:
        ours = {name: value for name, value in ours.items() if name != "data"}
    found = dict(differences(ours, theirs))
    versions = {name: found.pop(name) for name in [*found] if name.startswith("versions.")}
    found.pop("model.lora.dropout", None)
    if other := {name: text for name, text in found.items() if name.startswith("model.")}:
        raise ValueError(f"the run in {folder} has another model: {_listed(other)}")
    if found and not force:
        raise ValueError(
            f"this is not the run in {folder}: {_listed(found)}. resume.force=true goes on from "
            "its checkpoint all "
            "the same; resume=none with another hydra.run.dir begins anew"
        )
    return _listed(found | versions)


def _listed(found: dict[str, str]) -> str:
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(f"{name}: {text}" for name, text in [*found.items()][:SHOWN]) + more
