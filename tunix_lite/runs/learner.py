"""What learns: the state, the policy that acts with it, and the compiled update."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import optax

from tunix_lite.config import RunConfig
from tunix_lite.distributed.stopping import COMPILATION, Stopping
from tunix_lite.errors import error_context
from tunix_lite.learner.policy import STORED, Policy
from tunix_lite.learner.step import TrainStep
from tunix_lite.models import source
from tunix_lite.models.lora import LoraConfig, acting_params
from tunix_lite.planning.at_start import check_at_rest
from tunix_lite.planning.programs import optimizer_of, policy_of, train_step_of
from tunix_lite.planning.resolved import ResolvedRun
from tunix_lite.rollout import memory
from tunix_lite.rollout.engine import make_generate
from tunix_lite.runs import resume
from tunix_lite.runs.reference import reference_of
from tunix_lite.runs.session import Session
from tunix_lite.runs.setup import Parts
from tunix_lite.runs.throughput import timed
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Params, RowBatch, TrainState


@dataclass(frozen=True)
class Learner:
    """A policy that can be updated.

    Example: `update = learner.compile_update(state, rows)`, then
    `state, metrics = update(state, learner.frozen, rows)`: the old state is donated.
    """

    # what an update changes, as it is when the run begins; the first update donates it
    state: TrainState
    # the base that adapters are attached to; None: all weights train
    frozen: Params | None
    lora: LoraConfig | None
    policy: Policy
    # (state, frozen, rows) -> (state, metrics); it knows its compiled program
    train_step: TrainStep
    # what the run comes to on its mesh, with all its choices made
    resolved: ResolvedRun
    stopping: Stopping
    # the seed of sampling; every step folds its number in
    seed_key: jax.Array
    # updates in a row that were skipped until now, because a number was not finite
    skipped: int
    # of the step under way: what parts of collecting took, by the name of their metric
    seconds: Counter = field(default_factory=Counter)

    def policy_params(self, state: TrainState) -> Params:
        """What the policy samples with: the parameters, with adapters attached to their base."""
        return acting_params(self.frozen, state.params, self.lora)

    def compile_update(self, state: TrainState, rows: RowBatch) -> Callable:
        """The update for rows of these shapes. It compiles once; nothing is updated here."""
        with self.stopping.uninterruptible(COMPILATION):
            return self.train_step.compile(state, self.frozen, rows)


def build_learner(session: Session) -> Learner:
    """Load or restore what trains, and make the policy and the update of a run.

    Raises ConfigError, beginning with the setting, where files and settings do not go together.
    """
    run = session.run
    parts = session.parts
    console = session.console

    # Weights: loaded, or restored from the checkpoint that the run goes on from.
    optimizer = optimizer_of(parts.resolved)
    check_at_rest(parts.resolved, console.say)
    console.busy("loading the model…")
    state, frozen, policy, resolved, skipped = initial_state(
        run, parts, session.run_dir, optimizer, console
    )

    # The update: choosing the micro-batch may have compiled it already.
    train_step = parts.train_step
    if train_step is None:
        train_step = train_step_of(resolved, policy)

    # The policy as the loop uses it: a signal ends a rollout, and the reference's time is taken.
    seconds: Counter = Counter()
    generate = partial(policy.generate, between_chunks=session.stopping.check_between_chunks)
    policy = timed(replace(policy, generate=generate), seconds)
    return Learner(
        state=state,
        frozen=frozen,
        lora=parts.model.lora,
        policy=policy,
        train_step=train_step,
        resolved=resolved,
        stopping=session.stopping,
        seed_key=jax.random.key(run.seed),
        skipped=skipped,
        seconds=seconds,
    )


def initial_state(
    run: RunConfig,
    parts: Parts,
    run_dir: RunDir,
    optimizer: optax.GradientTransformation,
    console: Console,
) -> tuple[TrainState, Params | None, Policy, ResolvedRun, int]:
    """(what trains, the frozen base beside it or None, the policy that acts with both, what the
    run comes to with all its choices made, updates skipped in a row until now).

    The reference of the KL term (reference.py) is made of the weights as they are loaded, before a
    checkpoint is read.
    """
    model = parts.model
    resolved = parts.resolved

    # Weights: the reference is made of those that were loaded, before they are replaced.
    with error_context("model.weights"):
        frozen, params = source.load_weights(model, run.seed, STORED[run.training.mixed_precision])
    with error_context("resume"):
        reference = reference_of(run_dir, parts.reference, model, resolved.dtype, frozen, params)
    state, skipped = resume.state_at_start(run, parts, optimizer, params, console)

    # Where the sampler keeps the weights, beside all that is on the devices by now.
    sampling_weights, why = memory.choose_weights(
        acting_params(frozen, state.params, model.lora),
        model.cfg,
        resolved.dtype,
        run.generation,
        run.rollout,
        resolved.slots,
        resolved.rollouts,
    )
    console.say(f"sampling: {resolved.slots} slots, {why}")
    resolved = replace(resolved, sampling_weights=sampling_weights)

    # The policy, which samples and scores.
    generate = make_generate(
        model.cfg,
        run.generation,
        model.tokenizer.eos_ids,
        model.tokenizer.pad_id,
        resolved.dtype,
        resolved.rollout,
        model.tokenizer,
        jnp.dtype(run.training.tp_reduce_dtype),
    )
    return state, frozen, policy_of(resolved, generate, reference), resolved, skipped
