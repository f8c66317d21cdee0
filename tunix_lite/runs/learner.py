"""The learner of a run: its state, the policy that acts with it, and the compiled update."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
import optax

from tunix_lite.basics.errors import error_context
from tunix_lite.basics.types import Params, RowBatch, TrainState, policy_part
from tunix_lite.distributed.stopping import COMPILATION, Stopping
from tunix_lite.learner.critic import with_critic
from tunix_lite.learner.optim import init_opt_state, opt_state_shapes
from tunix_lite.learner.policy import STORED, Policy
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import source
from tunix_lite.models.lora import acting_params
from tunix_lite.parallel.compiling import compiled_together
from tunix_lite.parallel.mesh import part_of_mesh, put
from tunix_lite.planning.at_start import check_at_rest
from tunix_lite.rollout.generate import GenerateFunction, make_generate, make_sampler
from tunix_lite.rollout.memory import choose_weights
from tunix_lite.rollout.slot_choice import choose_slots
from tunix_lite.runs.overlap import Overlap, overlap_of
from tunix_lite.runs.reference import reference_of
from tunix_lite.runs.separate_sampling import arguments_of_sampler
from tunix_lite.runs.session import Session
from tunix_lite.runs.setup import Parts
from tunix_lite.settings.resolved_parts import optimizer_of, policy_of, train_step_of
from tunix_lite.settings.resolved_run import ResolvedRun
from tunix_lite.tasks.reward_models import RewardScorer
from tunix_lite.tracking.checkpoint import Checkpoints, shapes_of
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.progress import BytesProgress


@dataclass(frozen=True)
class Learner:
    """A policy that can be updated. Example: `update = learner.compile_update(state, rows)`, then
    `state, metrics = update(state, learner.frozen, rows)`: the old state is donated."""

    # the base that adapters are attached to; None: all weights train
    frozen: Params | None
    policy: Policy
    # (state, frozen, rows) -> (state, metrics); it knows its compiled program
    train_step: TrainStep
    # the resolved run on its mesh, with all its choices made
    resolved: ResolvedRun
    stopping: Stopping
    # the policy's sampler
    generate: GenerateFunction
    # the seed of sampling; every step folds its number in
    seed_key: jax.Array
    # rollouts kept for later updates; None: none are (rollout.overlap=none)
    overlap: Overlap | None = None
    # seconds of collecting in the current step, by the name of their metric
    seconds: Counter = field(default_factory=Counter)

    def acting_params(self, state: TrainState) -> Params:
        """Returns the parameters to sample with: adapters attached to their base; with a critic
        those of both networks."""
        return acting_params(self.frozen, state.params, self.train_step.lora)

    def compile_update(self, state: TrainState, rows: RowBatch) -> jax.stages.Compiled:
        """The update for rows of these shapes. It compiles once; nothing is updated here."""
        with self.stopping.uninterruptible(COMPILATION):
            return self.train_step.compile(state, self.frozen, rows)

    def compile_sampler(self, state: TrainState) -> None:
        """Compiles every program that rollouts and evaluations of the run can need at any length.
        Nothing is sampled here."""
        run = self.resolved.run
        params = policy_part(self.acting_params(state))
        about = {"converses": self.resolved.converses}
        if self.resolved.converses:
            about["max_turn_tokens"] = run.conversation.max_turn_tokens

        compile_it = partial(self.generate.compile_ahead, params, **about)

        # To learn from, and for the loss of held-out prompts, where the algorithm samples.
        calls = []
        needs = run.algorithm.needs
        count = run.algorithm.num_generations
        if self.overlap is not None:
            calls.append(partial(self.overlap.compile_ahead, self.generate, params, **about))
        elif needs.is_sampled:
            num_prompts = self.resolved.batch.prompts * needs.mini_batches
            calls.append(partial(compile_it, num_prompts, count))
        if run.loss_examples and needs.is_sampled:
            calls.append(partial(compile_it, run.loss_examples, count))

        # To evaluate: greedy completions, and samples.
        settings = run.evaluation
        if settings.num_examples:
            calls.append(partial(compile_it, settings.num_examples, 1, temperature=0.0))
        if settings.num_examples and settings.num_samples:
            size = (settings.num_examples, settings.num_samples)
            calls.append(partial(compile_it, *size, temperature=settings.temperature))
        compiled_together(calls)


def build_learner(session: Session) -> Learner:
    """Loads or restores the state, session.state, and makes the policy and the update of a run. It
    also gives the session's parts what is known by then: slots, and reward models of the task.
    Raises ConfigError, beginning with the setting, where files and settings do not go together."""
    run = session.run
    parts = session.parts
    model = parts.model
    resolved = parts.resolved
    console = session.console
    check_at_rest(resolved, console.say)

    # Weights: the reference of the KL term is made of those that are loaded. Then a checkpoint, if
    # the run goes on from one, replaces them.
    loading = BytesProgress(console, "loading", model.name, patience=0.0)
    with error_context("model.weights"), loading as on_bytes:
        stored = STORED[run.training.mixed_precision]
        frozen, params = source.load_weights(model, run.seed, stored, on_bytes)
    with error_context("resume"):
        reference = reference_of(
            session.run_dir, parts.reference, model, resolved.dtype, frozen, params
        )
    if (critic := resolved.needs.critic) is not None:
        params = with_critic(critic, resolved.cfg, params, stored)
    state, session.skipped = _state_at_start(parts, optimizer_of(resolved), params, console)
    session.state = state

    # The models that only score, such as a teacher or a reward model.
    frozen_models = {}
    for name, teacher in parts.frozen_models.items():
        loading = BytesProgress(console, "loading", f"the {name} {teacher.name}")
        where = run.scoring_models[name].where
        declared = resolved.frozen_models[name]
        place = part_of_mesh(declared.mesh_shape)
        with error_context(where), place, loading as on_bytes:
            loaded = source.load_base(teacher, run.seed, declared.storage, on_bytes)
        frozen_models[name] = loaded

    # Whether the sampler gathers the weights over fsdp, which changes no result: all that stays on
    # the devices is there by now.
    acting = acting_params(frozen, policy_part(state.params), model.lora)
    slots_are = ""
    if run.rollout.num_slots == "auto":
        slots, why = choose_slots(
            resolved.sampling_memory,
            acting,
            lambda place: make_sampler(
                *arguments_of_sampler(
                    replace(resolved, sampling_weights=place), model.tokenizer
                )
            ),
        )
        resolved = replace(resolved, slots=slots)
        slots_are = f" ({why})"
    sampling_weights, why = choose_weights(acting, resolved.sampling_memory)
    console.say(f"sampling: {resolved.slots} slots{slots_are}, {why}")
    # the sampler and the plan must speak of the same copy
    resolved = replace(resolved, sampling_weights=sampling_weights)

    # The policy, which samples and scores, and the update. A signal ends its rollouts, and the
    # time of scorers goes into `seconds`.
    generate = make_generate(*arguments_of_sampler(resolved, model.tokenizer))
    # between two chunks a rollout can be given up, and the state is whole
    watched = partial(generate, between_chunks=session.stopping.check_between_chunks)
    seconds = Counter()
    policy = policy_of(resolved, watched, reference, frozen_models, seconds)
    scorers = {}
    for name, settings in run.task.reward_models.items():
        called = f"reward_{name}"
        num_rows = resolved.as_scorer(called).batch.sequences
        read_with = (parts.task.text, parts.frozen_models[called])
        with error_context(run.scoring_models[called].where):
            scorer = policy.scorers[called]
            scorers[name] = RewardScorer.of(settings, *read_with, scorer, num_rows)
    task = replace(parts.task, scorers=scorers) if scorers else parts.task
    session.parts = replace(parts, resolved=resolved, task=task)
    return Learner(
        frozen=frozen,
        policy=policy,
        train_step=train_step_of(resolved, policy),
        resolved=resolved,
        stopping=session.stopping,
        generate=generate,
        seed_key=jax.random.key(run.seed),
        overlap=overlap_of(session, policy.generate),
        seconds=seconds,
    )


def _state_at_start(
    parts: Parts, optimizer: optax.GradientTransformation, params: Params, console: Console
) -> tuple[TrainState, int]:
    """Returns (state, updates in a row that were skipped until then); with other settings than the
    checkpoint's run, the count begins at 0.

    The loaded `params` and those of the checkpoint are never on the devices together: the former
    are deleted first, and the optimizer's state is made by reading it. So a run that fits can be
    resumed. Whatever needs the loaded ones, such as a copy of them for a reference, must be made
    before. Raises ConfigError."""
    run = parts.resolved.run
    step = put(np.int32(0))
    if parts.resume_from is None:
        return TrainState(step, params, init_opt_state(optimizer, params)), 0

    # The newest checkpoint, in the place of what was loaded.
    shapes = shapes_of(TrainState(step, params, opt_state_shapes(optimizer, params)))
    for loaded in jax.tree.leaves((step, params)):
        # before the checkpoint comes: both together may not fit
        loaded.delete()
    checkpoints = Checkpoints(parts.resume_from)
    loading = BytesProgress(console, "loading", f"a checkpoint of {parts.resume_from}")
    with error_context("resume"), loading:
        state = checkpoints.restore(shapes)
        number = int(state.step)
        is_other_run = run.resume.force and parts.differs
        # other settings may be the remedy, so they begin with a clean count
        skipped = 0 if is_other_run else checkpoints.skipped(number)

    # What there is to know about it.
    console.begin_at(number)
    console.say(f"resumed from step {number} of {parts.resume_from}")
    if not checkpoints.has_digests(number):
        console.say("its files were not compared with digests: it has none")
    if number == run.training.max_steps:
        console.say("all its steps are made; raise training.max_steps to go on")
    if parts.damaged:
        console.say(parts.damaged, style="red")
    if parts.differs:
        console.say(
            f"settings that differ from the run that it goes on from: {parts.differs}",
            style="red",
        )
    return state, skipped
