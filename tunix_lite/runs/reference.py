"""The reference of the KL term: the policy that training starts from, however often it resumes.
Where settings cannot name it (an adapter, another run's checkpoint) the run keeps it in
`reference/<step>/`, and `reference.json` says which one it is."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.basics.types import Params, TrainState
from tunix_lite.basics.untrusted import read_object
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.models import decoder
from tunix_lite.models.lora import attach
from tunix_lite.models.source import FoundModel, ModelConfig
from tunix_lite.parallel.mesh import put
from tunix_lite.settings.config import RunConfig
from tunix_lite.settings.resolved_parts import placed
from tunix_lite.tracking.checkpoint import Checkpoints, shapes_of
from tunix_lite.tracking.rundir import RunDir

# characters of what a folder says of its reference
_LONGEST = 1000


@dataclass(frozen=True)
class Reference:
    """Names the reference policy. Example: Reference("the weights that training starts from") where
    no folder is needed to have it again."""

    words: str  # for people
    # the step in `reference/`; None: the model of the settings, without adapters
    kept: int | None = None
    checkpoints: Path | None = None  # the run that training starts from
    is_new: bool = True  # this start decides which it is; else an earlier one has


def find_reference(
    run: RunConfig, model: FoundModel, run_dir: RunDir, resume_from: Path | None
) -> Reference | None:
    """The reference of a run that goes on from the checkpoints `resume_from`, or begins; None: it
    has no KL term. Raises ValueError, with the remedy, if it was another one than can be had now,
    or is not known."""
    if not run.algorithm.needs.reference:
        return None
    if resume_from == run_dir.checkpoints:
        file = run_dir.reference
        if file.is_file():
            # An earlier start has decided which it is.
            folder = run_dir.kept_reference
            begin = (
                f"resume={run_dir.path} with another hydra.run.dir goes on with its newest "
                "checkpoint as the reference"
            )
            try:
                content = read_object(file)
                text = content.get("reference")
                step = content.get("kept", "")
                if not isinstance(text, str) or (step is not None and type(step) is not int):
                    raise ValueError(
                        f"{file} holds reference={shown(text)} and kept={shown(step)}, which are "
                        "not a text and a step"
                    )
            except ValueError as error:
                raise ValueError(f"{error}, so the reference is not known; {begin}") from error
            text = escaped(text, _LONGEST)
            if step is not None and step not in Checkpoints(folder).steps():
                raise ValueError(
                    f"{folder / shown(step)} is gone, which held the reference of the run "
                    f"({text}); {begin}"
                )
            return Reference(text, step, is_new=False)
        if not run.resume.force:
            named = _of_the_settings(run.model, model).words
            raise ValueError(
                f"{run_dir.path} has no {run_dir.reference.name}: the run had no KL term. "
                f"resume.force=true takes {named} as its reference; resume={run_dir.path} "
                "with another hydra.run.dir takes the newest checkpoint"
            )
    elif resume_from is not None:
        step = Checkpoints(resume_from).latest_step()
        whose = f"checkpoint {step} of {resume_from.parent}"
        description = (
            f"the base with the adapters of {whose}"
            if model.lora
            else f"the weights of {whose}"
        )
        return Reference(description, step, resume_from)
    return _of_the_settings(run.model, model)


def _of_the_settings(settings: ModelConfig, model: FoundModel) -> Reference:
    if model.lora is None:
        return Reference(f"the weights of {settings.weights}")
    if settings.lora.adapter is None:
        # fresh adapters add nothing to it
        return Reference("the base")
    return Reference(f"the base with the adapters of {settings.lora.adapter}", kept=0)


def reference_of(
    run_dir: RunDir,
    chosen: Reference | None,
    model: FoundModel,
    dtype: DTypeLike,
    frozen: Params | None,
    params: Params,
) -> Params | None:
    """The frozen params of the KL term, None without one. What is kept of a new one is on disk when
    it returns. params: what the settings of the model give, as it was loaded; they may be deleted
    afterwards. Beside them and the reference, another run's weights are on the devices for a
    moment. Raises ValueError and OSError as Checkpoints does."""
    if chosen is None:
        return None
    copied = partial(decoder.copy_to_score, cfg=model.cfg, dtype=dtype)
    if model.lora:
        # a copy, since the update donates what trains
        copied = partial(jax.tree.map, jnp.copy)
    if chosen.kept is None:
        trained = None if model.lora else copied(params)
    elif chosen.is_new:
        if chosen.checkpoints is not None:
            checkpoints = Checkpoints(chosen.checkpoints)
            _, params = checkpoints.restore_params(shapes_of(params), chosen.kept)
        trained = copied(params)
        # A start that made no checkpoint may have left one.
        if run_dir.is_first:
            Checkpoints(run_dir.kept_reference).clear()
        allgather_values(None)
        checkpoints = Checkpoints(run_dir.kept_reference)
        checkpoints.save(TrainState(put(np.int32(chosen.kept)), trained, {}))
        checkpoints.close()
    else:
        shardings = jax.tree.map(lambda x: x.sharding, params)
        like = placed(jax.eval_shape(copied, params), shardings)
        trained = Checkpoints(run_dir.kept_reference).restore_params(like, chosen.kept)[1]
    if chosen.is_new:
        run_dir.write_json(run_dir.reference, {"reference": chosen.words, "kept": chosen.kept})
    if frozen is None:
        return trained
    if trained is None:
        return frozen
    return attach(frozen, trained, model.lora)
