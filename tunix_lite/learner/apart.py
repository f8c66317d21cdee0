"""Splits an update into two programs, for loops that are written outside: gradients, which add up
over calls, and the step of the optimizer.

They are made of what learner/step.py makes its single program of.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix_lite.learner.micro_batches import Sums
from tunix_lite.learner.optim import Optimizer, make_optimizer, widen
from tunix_lite.learner.step import TrainStep, applied
from tunix_lite.models.lora import acting_params
from tunix_lite.models.weights import Table
from tunix_lite.parallel.compiler_options import options_of_mesh
from tunix_lite.types import Metrics, Params, RowBatch, TrainState


def gradient_program(step: TrainStep, params: Params) -> Callable[..., Sums]:
    """(params, frozen, number of the update, batch in rows) -> (gradients, metrics), compiled.

    Gradients are float32 and lie where the parameters lie. params: such as it will get.
    """
    places = jax.tree.map(lambda x: x.sharding, params)

    def gradients(
        params: Params, frozen: Params | None, number: jax.Array, batch: RowBatch
    ) -> Sums:
        grads, metrics = step.gradients(params, frozen, number, batch, places)
        return widen(grads), metrics

    options = options_of_mesh(step.compiler_options)
    return jax.jit(gradients, out_shardings=(places, None), compiler_options=options)


def loss_program(step: TrainStep) -> Callable[..., Metrics]:
    """(params, frozen, batch in rows) -> the metrics that `gradient_program` gives, compiled."""

    def losses(params: Params, frozen: Params | None, batch: RowBatch) -> Metrics:
        scores = step.policy.scores(acting_params(frozen, params, step.lora), batch)
        loss, metrics = step.algorithm.loss(scores, batch)
        entropy = jnp.sum(batch.loss_weight * scores.entropy)
        return {"train/loss": loss, "train/entropy": entropy, **metrics}

    return jax.jit(losses)


@jax.jit
def add_gradients(grads: Params, more: Params) -> Params:
    """The sum of two gradients."""
    return jax.tree.map(jnp.add, grads, more)


def optimizer_of_client(
    cfg: Optimizer, table: Table | None, rate: Any = None, max_steps: int = 1
) -> optax.GradientTransformation:
    """The chain of these settings, with this learning rate, a number or a traced one; None: with
    their schedule over max_steps. Its state has the same form whether gradients are clipped or
    not."""
    clipped = replace(cfg, max_grad_norm=cfg.max_grad_norm or math.inf)
    schedule = None if rate is None else lambda count: rate
    return make_optimizer(clipped, max_steps, table, schedule)


def optimizer_program(
    cfg: Optimizer, table: Table | None, seed: int, state: TrainState, max_steps: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """(state, gradients, loss, learning rate) -> (state, metrics), compiled; it donates the state.

    A learning rate of None is that of the schedule. It is computed inside, as in a run: outside,
    its last digit could differ. As in TrainStep, nothing moves where the loss, a gradient or
    the change is not finite. state: such as it will get.
    """
    places = jax.tree.map(lambda x: x.sharding, state)

    def update(
        state: TrainState, grads: Params, loss: jax.Array, rate: jax.Array | None
    ) -> tuple[TrainState, Metrics]:
        return applied(optimizer_of_client(cfg, table, rate, max_steps), state, grads, loss, seed)

    return jax.jit(update, out_shardings=(places, None), donate_argnums=0)
