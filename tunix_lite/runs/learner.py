"""The learner of a run: its state, the policy that acts with it, and the compiled update."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from tunix_lite.distributed.stopping import COMPILATION, Stopping
from tunix_lite.errors import error_context
from tunix_lite.learner.policy import STORED, Policy
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import source
from tunix_lite.models.lora import acting_params
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.compiling import compiled_together
from tunix_lite.planning.at_start import check_at_rest
from tunix_lite.resolved.parts import optimizer_of, policy_of, train_step_of
from tunix_lite.resolved.run import ResolvedRun
from tunix_lite.rollout import memory
from tunix_lite.rollout.conversations import make_generate_with_partner
from tunix_lite.rollout.engine import Sampling
from tunix_lite.runs import resume
from tunix_lite.runs.curriculum import EveryPrompt, RunCurriculum
from tunix_lite.runs.overlap import Overlap, overlap_of
from tunix_lite.runs.reference import reference_of
from tunix_lite.runs.session import Session
from tunix_lite.runs.setup import Parts
from tunix_lite.runs.throughput import timed
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.progress import BytesProgress
from tunix_lite.types import Params, RowBatch, TrainState


@dataclass(frozen=True)
class Learner:
    """A policy that can be updated.

    Example: `update = learner.compile_update(state, rows)`, then
    `state, metrics = update(state, learner.frozen, rows)`: the old state is donated.
    """

    # the state at the start of the run; the first update donates it
    state: TrainState
    # the base that adapters are attached to; None: all weights train
    frozen: Params | None
    policy: Policy
    # (state, frozen, rows) -> (state, metrics); it knows its compiled program
    train_step: TrainStep
    # the resolved run on its mesh, with all its choices made
    resolved: ResolvedRun
    stopping: Stopping
    # the policy's sampler
    sampler: Sampling
    # the seed of sampling; every step folds its number in
    seed_key: jax.Array
    # updates in a row that were skipped until now, because a number was not finite
    skipped: int
    # chooses the prompts
    curriculum: RunCurriculum | EveryPrompt
    # rollouts kept for later updates; None: none are (rollout.overlap=none)
    overlap: Overlap | None = None
    # seconds of collecting in the current step, by the name of their metric
    seconds: Counter = field(default_factory=Counter)

    def policy_params(self, state: TrainState) -> Params:
        """Returns the parameters to sample with: adapters attached to their base."""
        return acting_params(self.frozen, state.params, self.train_step.lora)

    def compile_update(self, state: TrainState, rows: RowBatch) -> Callable:
        """The update for rows of these shapes. It compiles once; nothing is updated here."""
        with self.stopping.uninterruptible(COMPILATION):
            return self.train_step.compile(state, self.frozen, rows)

    def compile_sampler(self, state: TrainState) -> None:
        """Compiles every program that rollouts and evaluations of the run can need at any length.
        Nothing is sampled here."""
        run = self.resolved.run
        params = self.policy_params(state)
        about = {"converses": self.resolved.converses}
        if self.resolved.converses:
            about["max_turn_tokens"] = run.conversation.max_turn_tokens

        # To learn from.
        calls = []
        if self.overlap is not None:
            calls.append(partial(self.overlap.compile_ahead, self.sampler, params, **about))
        elif not run.algorithm.needs.demonstrations:
            num_prompts = self.resolved.batch.prompts * run.algorithm.needs.mini_batches
            size = (num_prompts, run.algorithm.num_generations)
            calls.append(partial(self.sampler.compile_ahead, params, *size, **about))

        # To evaluate: greedy completions, and samples.
        settings = run.evaluation
        compile_it = partial(self.sampler.compile_ahead, params, settings.num_examples, **about)
        if settings.num_examples:
            calls.append(partial(compile_it, 1, temperature=0.0))
        if settings.num_examples and settings.num_samples:
            calls.append(
                partial(compile_it, settings.num_samples, temperature=settings.temperature)
            )
        compiled_together(calls)


def build_learner(session: Session) -> Learner:
    """Loads or restores the state, and makes the policy and the update of a run.

    Raises ConfigError, beginning with the setting, where files and settings do not go together.
    """
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
            session.run_dir, parts.reference, model, resolved.reference_dtype, frozen, params
        )
    state, skipped = resume.state_at_start(run, parts, optimizer_of(resolved), params, console)
    curriculum = resume.restored_curriculum(run, parts, int(state.step))

    # The policy, which samples and scores, and the update.
    acting = acting_params(frozen, state.params, model.lora)
    resolved = _with_sampling_weights(resolved, acting, console.say)
    sampler = sampler_of_run(resolved, model.tokenizer)
    policy = policy_of(resolved, sampler, reference, _load_frozen(parts, console))
    overlap = overlap_of(session, resolved, int(state.step))
    train_step = parts.train_step or train_step_of(resolved, policy)
    seconds: Counter = Counter()
    return Learner(
        state=state,
        frozen=frozen,
        policy=_watched(policy, session.stopping, seconds),
        train_step=train_step,
        resolved=resolved,
        stopping=session.stopping,
        sampler=sampler,
        seed_key=jax.random.key(run.seed),
        skipped=skipped,
        curriculum=curriculum,
        overlap=overlap,
        seconds=seconds,
    )


def _load_frozen(parts: Parts, console: Console) -> dict[str, Params]:
    """The weights of the algorithm's frozen models, such as a teacher. Raises ConfigError."""
    weights = {}
    for name, model in parts.frozen_models.items():
        with error_context(f"algorithm.{name}"):
            storage = parts.resolved.frozen_models[name].storage
            with BytesProgress(console, "loading", f"the {name} {model.name}") as on_bytes:
                seed = parts.resolved.run.seed
                weights[name] = source.load_base(model, seed, storage, on_bytes)
    return weights


def sampler_of_run(resolved: ResolvedRun, tokenizer: Tokenizer) -> Sampling:
    """Builds the sampler of a run."""
    return make_generate_with_partner(
        resolved.cfg,
        resolved.run.generation,
        tokenizer.eos_ids,
        tokenizer.pad_id,
        resolved.dtype,
        resolved.rollout,
        tokenizer,
        jnp.dtype(resolved.run.training.tp_reduce_dtype),
    )


def _with_sampling_weights(
    resolved: ResolvedRun, params: Params, say: Callable[[str], None]
) -> ResolvedRun:
    """Chooses whether the sampler gathers the weights over fsdp, which does not change results.
    Call it after all resident arrays are allocated."""
    sampling_weights, why = memory.choose_weights(
        params,
        resolved.cfg,
        resolved.dtype,
        resolved.run.generation,
        resolved.run.rollout,
        resolved.slots,
        resolved.rollouts,
    )
    say(f"sampling: {resolved.slots} slots, {why}")
    return replace(resolved, sampling_weights=sampling_weights)


def _watched(policy: Policy, stopping: Stopping, seconds: Counter) -> Policy:
    """Wraps the policy: a signal ends its rollouts, and the time of scorers goes into `seconds`."""
    generate = partial(policy.generate, between_chunks=stopping.check_between_chunks)
    return timed(replace(policy, generate=generate), seconds)
