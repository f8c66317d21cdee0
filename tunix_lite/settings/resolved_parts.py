"""Builds the components of a resolved run: state in shapes, batch in rows, policy, optimizer and
update. A plan and a run make them alike."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix_lite.algorithms.algorithm import Generate
from tunix_lite.basics.types import Params, RowBatch, TrainState, policy_part
from tunix_lite.learner.comparison import (
    hidden_states,
    with_divergence,
    with_hidden_states,
)
from tunix_lite.learner.critic import both_optimizers, token_values, with_values
from tunix_lite.learner.optim import make_optimizer, opt_state_shapes
from tunix_lite.learner.policy import Policy, make_policy, on_every_device
from tunix_lite.learner.routing import RouterLoss
from tunix_lite.learner.rows import row_shapes
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import attention, decoder, weights
from tunix_lite.models.lora import acting_params
from tunix_lite.models.quantize import stored_table
from tunix_lite.models.routes import no_routes
from tunix_lite.parallel.compiler_options import for_updates
from tunix_lite.parallel.compiling import compiled_once
from tunix_lite.parallel.mesh import make_mesh, part_of_mesh, set_rules, sharding
from tunix_lite.settings.resolved_run import ResolvedRun


@dataclass(frozen=True)
class Shapes:
    """The arrays that a run holds between its programs, as ShapeDtypeStructs with shardings.
    Example: with mesh_of_run(resolved, devices): abstract(resolved).state.params."""

    state: TrainState
    # the base under adapters; None: all weights train
    frozen: Params | None
    # the reference of the KL term, under LoRA the frozen base itself; None: no KL term
    reference: Params | None
    # the algorithm's models that score, by name
    frozen_models: dict[str, Params]

    def acting(self, resolved: ResolvedRun) -> Params:
        """Returns the parameters to sample with, and to learn with those of a critic."""
        return acting_params(self.frozen, self.state.params, resolved.lora)


@contextlib.contextmanager
def mesh_of_run(resolved: ResolvedRun, devices: list) -> Iterator[None]:
    """Inside, the run's mesh over these devices is the current one. The run's sharding rules become
    those of the process, and stay so."""
    set_rules(resolved.run.sharding)
    mesh_shape = resolved.mesh_shape
    with jax.set_mesh(make_mesh((tuple(mesh_shape.values()), tuple(mesh_shape)), devices)):
        yield


def abstract(resolved: ResolvedRun) -> Shapes:
    """The state of a run, its frozen base and its reference, on the current mesh."""
    # What is stored of the weights.
    table = resolved.tables
    params = weights.shapes(table.networks)
    frozen = None if table.frozen is None else weights.shapes(table.frozen)

    # The reference: a copy in the type of the computation, or the base.
    reference = None
    if resolved.needs.reference:
        reference = frozen
        if frozen is None:
            copy = partial(decoder.copy_to_score, cfg=resolved.cfg, dtype=resolved.dtype)
            of_policy = policy_part(params)
            shardings = jax.tree.map(lambda x: x.sharding, of_policy)
            reference = placed(jax.eval_shape(copy, of_policy), shardings)
        # the reference then begins with other adapters than those that train
        if resolved.copies_adapters:
            reference = acting_params(frozen, policy_part(params), resolved.lora)

    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding((), ()))
    opt_state = opt_state_shapes(optimizer_of(resolved), params)
    frozen_models = {}
    for name, model in resolved.frozen_models.items():
        with part_of_mesh(model.mesh_shape):
            stored = stored_table(decoder.weights(model.cfg), model.storage)
            frozen_models[name] = weights.shapes(stored)
    return Shapes(TrainState(step, params, opt_state), frozen, reference, frozen_models)


def placed(shapes: Params, shardings: Params) -> Params:
    """A tree of shapes with the shardings of another tree like it."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def batch_shapes(resolved: ResolvedRun) -> RowBatch:
    """The batch in rows of an update; of packed rows as many, and as wide, as could ever come."""
    algorithm = resolved.run.algorithm
    values = ["loss_weight", *algorithm.needs.batch_fields]
    rows = _row_shapes(resolved, values, algorithm.needs.streams)
    # what comparing adds to it
    teacher = resolved.teacher
    if teacher is None:
        return rows
    theirs = resolved.frozen_models[teacher.comparison.model]
    table = stored_table(decoder.weights(theirs.cfg), theirs.storage)
    return teacher.shapes(rows, decoder.output_table(table, theirs.cfg), resolved.dtype)


def scored_batch_shapes(resolved: ResolvedRun) -> RowBatch:
    """The batch in rows that scorers read: of its values only the weights of tokens."""
    return _row_shapes(resolved, ["loss_weight"])


def _row_shapes(resolved: ResolvedRun, values: list[str], *streams: Any) -> RowBatch:
    # no batch is wider
    longest = sum(resolved.lengths)
    rows = row_shapes(resolved.rows, resolved.batch.sequences, longest, values, *streams)
    if not resolved.replays_routes:
        return rows
    of_one = no_routes(resolved.cfg)
    shape = (*rows.tokens.shape, of_one.size)
    place = sharding(("batch", "seq", "seq"), shape)
    return rows.replace(routes=jax.ShapeDtypeStruct(shape, of_one.dtype, sharding=place))


def optimizer_of(resolved: ResolvedRun) -> optax.GradientTransformation:
    """The run's optimizer; with a critic, one for each network."""
    max_steps = resolved.run.training.max_steps
    critic = resolved.needs.critic
    if critic is None:
        return make_optimizer(resolved.optimizer, max_steps, resolved.tables.trained)
    of_policy = partial(make_optimizer, resolved.optimizer, resolved.policy_updates)
    of_critic = partial(make_optimizer, resolved.critic_optimizer, max_steps)
    return both_optimizers(critic, of_policy, of_critic, resolved.tables.networks)


def policy_of(
    resolved: ResolvedRun,
    generate: Generate | None = None,
    reference: Params | None = None,
    frozen_models: dict[str, Params] | None = None,
    seconds: Counter | None = None,
) -> Policy:
    """The run's policy. generate: how it samples, None where it only scores. reference: the frozen
    params of the KL term, None where there is none or it is not loaded. frozen_models: those of the
    algorithm, which become scorers by their names; None where they are not loaded. seconds: gets
    those of scoring, as of make_policy."""
    training = resolved.run.training
    policy = make_policy(
        resolved.cfg,
        generate,
        resolved.run.learning_temperature,
        resolved.dtype,
        reference,
        resolved.rows,
        num_sequences=resolved.batch.sequences,
        seconds=seconds,
        remat=training.remat,
        attend=attention.IMPLEMENTATIONS[resolved.attention],
        reduce_dtype=jnp.dtype(training.reduce_dtype),
        tp_reduce_dtype=jnp.dtype(training.tp_reduce_dtype),
        tokamax=training.expert_kernels == "tokamax",
        scan_layers=training.scan_layers,
    )
    scorers = dict(policy.scorers)
    for name, params in (frozen_models or {}).items():
        # routes are those of the policy, and this is another model
        theirs = policy_of(resolved.as_scorer(name), seconds=seconds)
        rescore = replace(theirs.rescore, replays=False)
        if resolved.compares(name):
            describe = description_of(resolved, name)
            rescore = replace(rescore, compiled=compiled_once(describe.lower))
        scorers[name] = rescore.under(params, f"time/{name}")
    policy = replace(policy, scorers=scorers)
    if (critic := resolved.needs.critic) is not None:
        of_rows = partial(token_values, policy.scores, critic)
        program = compiled_once(on_every_device(of_rows, resolved.rows).lower)
        values = replace(policy.rescore, compiled=program, metric="time/values")
        policy = replace(policy, scores=with_values(policy.scores, critic), values=values)
    if (teacher := resolved.teacher) is None:
        return policy

    # Compared with a teacher: the update needs no more than what travels with the batch. Where the
    # teacher is loaded, its table stays where it is, on the mesh.
    policy = replace(policy, scores=with_divergence(policy.scores, teacher))
    # a plan loads no weights, and needs the program alone
    if frozen_models is None:
        return policy
    name = teacher.comparison.model
    table = decoder.output_table(frozen_models[name], resolved.frozen_models[name].cfg)
    # a larger teacher's other tokens are left out
    if len(table) != teacher.vocabulary:
        table = table[: teacher.vocabulary]
    return replace(policy, compare=partial(with_hidden_states, scorers[name], table))


def description_of(resolved: ResolvedRun, name: str) -> jax.stages.Wrapped:
    """Builds the program that records the teacher's hidden states of a batch in rows."""
    theirs = resolved.as_scorer(name)
    return on_every_device(partial(policy_of(theirs).scores, head=hidden_states), theirs.rows)


def train_step_of(resolved: ResolvedRun, policy: Policy | None = None) -> TrainStep:
    """The run's update; policy: None means one that only scores."""
    training = resolved.run.training
    router = RouterLoss(training.router_aux_loss_coef, training.router_z_loss_coef)
    return TrainStep(
        policy_of(resolved) if policy is None else policy,
        resolved.run.algorithm,
        optimizer_of(resolved),
        resolved.lora,
        resolved.run.seed,
        training.sync_gradients_every if resolved.fsdp > 1 else 1,
        for_updates(weights.num_params(decoder.weights(resolved.cfg))),
        None if router == RouterLoss() else router,
    )
