"""Fingerprints a run: the settings its numbers depend on, kept beside its checkpoints. A run
resumes only from a checkpoint of the same run.

What never changes an answer is not in it: the mesh, micro-batches, remat, scan_layers, slots, and
how often. Packing is kept, so that training.packing=auto goes on as the run began; it may differ.
What people change on purpose in the middle of a run may differ, too, and is said (SAID).
"""

import ast
import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import flax
import jax
import jaxlib
import optax

from tunix_lite import __version__
from tunix_lite.config import RunConfig, plain
from tunix_lite.files.untrusted import read_object
from tunix_lite.learner.rows import PACKING
from tunix_lite.models import source
from tunix_lite.models.source import FoundModel
from tunix_lite.plain_text import escaped, shown, without_secrets
from tunix_lite.tasks.curriculum import source_of_level
from tunix_lite.tasks.sources import digest_of_data

# differences in a message
SHOWN = 8
# what may differ, and the start says both values: versions, what held-out numbers are of, the end
# of a decaying learning rate, the dropout of adapters
SAID = ("versions.", "evaluation.", "training.max_steps", "model.lora.dropout")
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
    what they hold are in `data`, `weights` and `frozen_weights`. Secrets are hidden.
    """
    model_settings = source.settings_to_keep(run.model, model, run.seed)["model"]
    named: dict[str, Any] = {}
    if run.model.chat_template is not None:
        named["chat_template"] = _digest(model.tokenizer.template.text)
    if frozen_models:
        digests = {name: source.weights_digest(frozen) for name, frozen in frozen_models.items()}
        named["frozen_weights"] = digests
    on_none = {} if run.rewards.on_none == "error" else {"on_none": run.rewards.on_none}
    values = {
        "model": {"architecture": model_settings["architecture"], "lora": model_settings["lora"]},
        "weights": source.weights_digest(model),
        "tokenizer": _digest(repr(sorted(model.tokenizer.vocabulary.items()))),
        **named,
        "algorithm": plain(run.algorithm),
        "task": _task(run),
        "data": digest_of_data(run.task.source),
        **_curriculum(run),
        "generation": plain(run.generation),
        "rollout": {"cache": run.rollout.cache} | _overlap(run, prompts, shards),
        "rewards": {"on_error": run.rewards.on_error} | on_none,
        **_conversation(run),
        "optimizer": _optimizer(run, shards),
        "training": {
            "prompts_per_step": prompts,
            "mixed_precision": run.training.mixed_precision,
            "packing": run.training.packing,
        }
        | _reduced(run)
        | _decay(run),
        "evaluation": _evaluation(run),
        **_code(run),
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
    return without_secrets(values)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _task(run: RunConfig) -> dict:
    """The task; `group` of a reward only where it is true."""
    task = plain(run.task)
    for reward in task["rewards"].values():
        if not reward["group"]:
            del reward["group"]
    if task["environment"] is None:
        del task["environment"]
    return task


def _conversation(run: RunConfig) -> dict:
    """Returns the settings of conversations, if the run has any. Time limits and processes of
    environments change no answer."""
    if run.task.environment is None:
        return {}
    settings = plain(run.conversation)
    for name in ("_target_", "timeout", "workers"):
        del settings[name]
    return {"conversation": settings}


def _curriculum(run: RunConfig) -> dict:
    """Returns the curriculum, if the run has one, with digests of the data of its levels."""
    curriculum = run.curriculum
    if not curriculum.is_on:
        return {}
    data = {
        f"level {i + 1}": digest_of_data(source_of_level(run.task.source, curriculum, i))["train"]
        for i in range(len(curriculum.levels))
    }
    return {"curriculum": plain(curriculum) | {"data": data}}


def _overlap(run: RunConfig, prompts: int, shards: int) -> dict:
    """Returns the settings of overlap, if updates learn from tokens of earlier weights: which
    tokens those are depends on slots and chunks."""
    rollout = run.rollout
    if not rollout.is_stale:
        return {}
    settings = {"overlap": rollout.overlap, "max_staleness": rollout.max_staleness}
    if rollout.overlap == "carry":
        slots = rollout.slots(prompts * run.algorithm.num_generations, shards)
        settings |= {"slots": slots, "chunk": rollout.chunk}
    return settings


def _optimizer(run: RunConfig, shards: int) -> dict:
    """The optimizer; the number of shards only where the learning rate depends on it."""
    settings = plain(run.optimizer)
    return settings | {"shards": shards} if run.optimizer.scale_lr_with_devices else settings


def _decay(run: RunConfig) -> dict:
    """The last step, only where the learning rate of the others depends on it."""
    return {} if run.optimizer.schedule == "constant" else {"max_steps": run.training.max_steps}


def _evaluation(run: RunConfig) -> dict:
    """Returns the settings of held-out numbers and the best checkpoint, without the interval."""
    settings = plain(run.evaluation)
    del settings["_target_"], settings["interval_steps"]
    return settings


def _code(run: RunConfig) -> dict:
    """Returns digests, by module, of the user's own code that the settings name, rewards above all;
    only where there is any. Comments and blank lines do not count."""
    digests = {}
    for path in _named((plain(run.algorithm), plain(run.task), plain(run.curriculum))):
        name = path.rpartition(".")[0]
        while name and name not in sys.modules:
            name = name.rpartition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        is_ours = name.partition(".")[0] == "tunix_lite"
        # what is installed has a version
        if file is None or is_ours or "site-packages" in Path(file).parts:
            continue
        if Path(file).suffix == ".py" and name not in sys.builtin_module_names:
            tree = ast.dump(ast.parse(Path(file).read_bytes()))
            digests[name] = _digest(tree)
    return {"code": digests} if digests else {}


def _named(values: Any) -> Iterator[str]:
    """Every dotted path in plain settings."""
    if isinstance(values, dict):
        values = [*values.values()]
    if isinstance(values, list | tuple):
        for value in values:
            yield from _named(value)
    elif isinstance(values, str) and all(part.isidentifier() for part in values.split(".")):
        yield values


def _reduced(run: RunConfig) -> dict:
    """Returns only the settings that differ from the default."""
    chosen = {name: getattr(run.training, name) for name in ("reduce_dtype", "tp_reduce_dtype")}
    return {name: dtype for name, dtype in chosen.items() if dtype != "float32"}


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
    that are allowed.

    Another model cannot be forced: its checkpoint means something else. What SAID names may
    differ.
    """
    changes = dict(differences(ours, theirs))
    said = {name: changes.pop(name) for name in [*changes] if name.startswith(SAID)}
    changes.pop("training.packing", None)

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
