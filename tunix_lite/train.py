"""The training loop. For when completions are made read runs/experience.py, for how
algorithms/groups.py and rollout/generate.py; for an update learner/update.py; for what happens
around a step (evaluation, logs, checkpoints, signals) runs/watch.py."""

from collections.abc import Callable
from pathlib import Path

import jax

from tunix_lite.basics.types import TrainState
from tunix_lite.runs.experience import ExperienceSource, TaskExperience
from tunix_lite.runs.learner import Learner, build_learner
from tunix_lite.runs.session import Job, Session, open_run
from tunix_lite.runs.watch import StepDone, Watch
from tunix_lite.settings.config import RunConfig


def train(
    run: RunConfig,
    folder: str | Path,
    job: Job | None = None,
    make_source: Callable[[Session, Learner], ExperienceSource] = TaskExperience,
) -> TrainState:
    """Train as `run` says, and keep everything in `folder`. Returns the last state.

    job: what the run should know of the job that it is a part of; None: it is on its own.
    make_source: where experience comes from; another one than the task's prompts is an agent.
    Raises ConfigError before anything is written if the settings cannot be right, and later if
    weights cannot be loaded or the run does not fit into memory; RunFailed if data, a reward or a
    function of the user's fails; FloatingPointError if too many updates in a row are not finite;
    DiskError, with how to go on, if the folder can no longer be written.

    Example: `train(compose(["training.max_steps=20"]), "outputs/mine")`."""
    # Once the model is loaded, status.json says how the run ended, however it ends.
    with open_run(run, Path(folder), job) as session:
        learner = build_learner(session)
        source = make_source(session, learner)
        watch = Watch(session, learner, source)
        max_steps = session.run.training.max_steps
        session.state = fit(learner, session.state, source, watch, max_steps)
    return session.state


def fit(
    learner: Learner,
    state: TrainState,
    source: ExperienceSource,
    watch: Watch,
    max_steps: int,
) -> TrainState:
    """The loop. The watch sees every step and may ask to stop; only the update changes the state.

    `step` counts from 0 here: it is the number of updates made before. Messages, metrics.jsonl and
    StepDone.step count from 1: the number of updates made. A signal during sampling or an
    evaluation ends it by StopRun, which open_run takes. The first update donates `state`.
    Example: `fit(learner, state, source, watch, 60)` goes on until 60 updates have been made."""
    watch.before(state)
    for step in range(int(state.step), max_steps):
        with watch.step(step):
            # Experience: prompts -> completions -> rewards -> advantages, in rows on the mesh.
            experience = source.take(step, learner.acting_params(state))
            update = learner.compile_update(state, experience.rows)

            # Update: the old state is donated; where a number is not finite nothing moves.
            with watch.updating(experience, update):
                state, metrics = update(state, learner.frozen, experience.rows)
                # The devices are at it now. Sampling may go on beside it (rollout.overlap).
                metrics |= source.beside_update()
                jax.block_until_ready(state)

        # Everything that is not learning. A reason to stop is a signal, or time that is up.
        done = StepDone(step + 1, state, experience, metrics, is_last=step + 1 == max_steps)
        if watch.after(done):
            break
    return state
