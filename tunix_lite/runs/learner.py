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
from tunix_lite.learner.optim import make_optimizer
from tunix_lite.learner.policy import DTYPES, STORED, Policy, make_policy
from tunix_lite.learner.step import make_train_step
from tunix_lite.models import source
from tunix_lite.models.attention import IMPLEMENTATIONS
from tunix_lite.models.lora import LoraConfig, acting_params
from tunix_lite.planning.at_start import check_at_rest
from tunix_lite.planning.resolved import rollouts_of
from tunix_lite.rollout import memory
from tunix_lite.rollout.engine import MOST_SLOTS, make_generate, round_up_to_shards
from tunix_lite.rollout.settings import RolloutConfig
from tunix_lite.runs import resume
from tunix_lite.runs.reference import reference_of
from tunix_lite.runs.session import Session
from tunix_lite.runs.setup import Parts, planning_case
from tunix_lite.runs.throughput import timed
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Batch, Params, TrainState


@dataclass(frozen=True)
class Learner:
    """A policy that can be updated.

    Example: `update = learner.compiled(state, rows)`, then
    `state, metrics = update(state, learner.frozen, rows)`: the old state is donated.
    """

    # what an update changes, as it is when the run begins
    state: TrainState
    # the base that adapters are attached to; None: all weights train
    frozen: Params | None
    lora: LoraConfig | None
    policy: Policy
    # (state, frozen, rows) -> (state, metrics); it knows its compiled program
    train_step: Callable
    # slots, and where the sampler keeps its weights, as they were chosen
    rollout: RolloutConfig
    stopping: Stopping
    # the seed of sampling; every step folds its number in
    seed_key: jax.Array
    # updates in a row that were skipped until now, because a number was not finite
    skipped: int
    # of the step under way: what parts of collecting took, by the name of their metric
    seconds: Counter = field(default_factory=Counter)

    def acting(self, state: TrainState) -> Params:
        """What the policy acts with: the parameters, with adapters attached to their base."""
        return acting_params(self.frozen, state.params, self.lora)

    def compiled(self, state: TrainState, rows: Batch) -> Callable:
        """The update for rows of these shapes. It compiles once; nothing is updated here."""
        with self.stopping.uninterruptible(COMPILATION):
            return self.train_step.compiled(state, self.frozen, rows)


def build_learner(session: Session) -> Learner:
    """Load or restore what trains, and make the policy and the update of a run.

    Raises ConfigError, beginning with the setting, where files and settings do not go together.
    """
    run = session.run
    parts = session.parts
    console = session.console

    # Weights: loaded, or restored from the checkpoint that the run goes on from.
    optimizer = make_optimizer(run.optimizer, run.training.max_steps)
    check_at_rest(planning_case(run, parts, run.rollout), console.say)
    console.busy("loading the model…")
    state, frozen, policy, rollout, skipped = initial_state(
        run, parts, session.run_dir, optimizer, console
    )

    # The update: choosing the micro-batch may have compiled it already.
    train_step = parts.train_step
    if train_step is None:
        train_step = make_train_step(
            policy,
            run.algorithm,
            optimizer,
            parts.rows.num_parts,
            parts.model.lora,
            run.seed,
            run.training.sync_gradients_every,
        )

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
        rollout=rollout,
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
) -> tuple[TrainState, Params | None, Policy, RolloutConfig, int]:
    """(what trains, the frozen base beside it or None, the policy that acts with both, how it
    samples, updates skipped in a row until now).

    The reference of the KL term (reference.py) is made of the weights as they are loaded, before a
    checkpoint is read.
    """
    model, dtype = parts.model, DTYPES[run.training.mixed_precision]
    with error_context("model.weights"):
        frozen, params = source.load_weights(model, run.seed, STORED[run.training.mixed_precision])
    with error_context("resume"):
        reference = reference_of(run_dir, parts.reference, model, dtype, frozen, params)
    state, skipped = resume.state_at_start(run, parts, optimizer, params, console)
    slots = round_up_to_shards(run.rollout.num_slots or min(MOST_SLOTS, parts.batch.sequences))
    acting, asked = acting_params(frozen, state.params, model.lora), rollouts_of(run, parts.batch)
    weights, why = memory.choose_weights(
        acting, model.cfg, dtype, run.generation, run.rollout, slots, asked
    )
    console.say(f"sampling: {slots} slots, {why}")
    rollout, tokenizer = replace(run.rollout, num_slots=slots, weights=weights), model.tokenizer
    ends = tokenizer.eos_ids, tokenizer.pad_id
    tp_reduce_dtype = jnp.dtype(run.training.tp_reduce_dtype)
    generate = make_generate(
        model.cfg, run.generation, *ends, dtype, rollout, tokenizer, tp_reduce_dtype
    )
    scoring = {"remat": run.training.remat, "attend": IMPLEMENTATIONS[parts.attention[0]]}
    scoring |= {
        "reduce_dtype": jnp.dtype(run.training.reduce_dtype),
        "tp_reduce_dtype": tp_reduce_dtype,
    }
    policy = make_policy(
        model.cfg, generate, run.learning_temperature, dtype, reference, parts.rows, **scoring
    )
    return state, frozen, policy, rollout, skipped
