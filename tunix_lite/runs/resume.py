"""The state that a run begins with: as it was loaded, or as a checkpoint has it."""

import jax
import numpy as np
import optax

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.config import RunConfig
from tunix_lite.errors import error_context
from tunix_lite.learner.optim import init_opt_state, opt_state_shapes
from tunix_lite.parallel.mesh import put
from tunix_lite.runs.curriculum import EveryPrompt, RunCurriculum, curriculum_at_start
from tunix_lite.runs.setup import Parts
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.progress import BytesProgress
from tunix_lite.types import Params, TrainState


def state_at_start(
    run: RunConfig,
    parts: Parts,
    optimizer: optax.GradientTransformation,
    params: Params,
    console: Console,
) -> tuple[TrainState, int]:
    """Returns (state, updates in a row that were skipped until then); with other settings than the
    checkpoint's run, the count begins at 0.

    The loaded `params` and those of the checkpoint are never on the devices together: the former
    are deleted first, and the optimizer's state is made by reading it. So a run that fits can be
    resumed. Whatever needs the loaded ones, such as a copy of them for a reference, must be made
    before. Raises ConfigError.
    """
    step = put(np.int32(0))
    if parts.resume_from is None:
        return TrainState(step, params, init_opt_state(optimizer, params)), 0

    shapes = TrainState(step, params, opt_state_shapes(optimizer, params))
    shapes = jax.tree.map(_shape, shapes)
    for loaded in jax.tree.leaves((step, params)):
        loaded.delete()
    return _restored(run, parts, shapes, console)


def restored_curriculum(run: RunConfig, parts: Parts, step: int) -> RunCurriculum | EveryPrompt:
    """The curriculum as the checkpoint of this step has it; with other settings than the
    checkpoint's run, it begins anew. Raises ConfigError."""
    is_other_run = run.resume.force and parts.differs
    if parts.resume_from is None or not run.curriculum.is_on or is_other_run:
        return curriculum_at_start(run, None)
    with error_context("resume"):
        saved = Checkpoints(parts.resume_from).curriculum(step)
        if saved is None:
            raise ValueError(
                f"step {step} of {parts.resume_from} has no state of a curriculum; "
                "resume.force=true begins the curriculum anew"
            )
        return curriculum_at_start(run, saved)


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _restored(
    run: RunConfig, parts: Parts, shapes: TrainState, console: Console
) -> tuple[TrainState, int]:
    # The newest checkpoint.
    checkpoints = Checkpoints(parts.resume_from)
    loading = BytesProgress(console, "loading", f"a checkpoint of {parts.resume_from}")
    with error_context("resume"), loading:
        state = checkpoints.restore(shapes, parts.resume_step)
        step = int(state.step)
        is_other_run = run.resume.force and parts.differs
        skipped = 0 if is_other_run else checkpoints.skipped_in_a_row(step)

    # What there is to know about it.
    console.begin_at(step)
    console.say(f"resumed from step {step} of {parts.resume_from}")
    if not checkpoints.has_digests(step):
        console.say("its files were not compared with digests: it has none")
    if step == run.training.max_steps:
        console.say("all its steps are made; raise training.max_steps to go on")
    if parts.damaged:
        console.say(parts.damaged, style="red")
    if parts.differs:
        console.say(
            f"settings that differ from the run that it goes on from: {parts.differs}", style="red"
        )
    return state, skipped
