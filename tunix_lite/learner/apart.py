"""An update in two programs, for loops that are written outside: gradients, which add up over
calls, and the step of the optimizer.

They are made of what learner/step.py makes its single program of.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix_lite.learner.micro_batches import Sums, accumulate
from tunix_lite.learner.optim import Optimizer, apply_update, make_optimizer, widen
from tunix_lite.learner.step import TrainStep, dropout_keys
from tunix_lite.models.lora import acting_params
from tunix_lite.models.weights import Table
from tunix_lite.parallel.compiler_options import options_of_mesh
from tunix_lite.types import Metrics, Params, RowBatch, TrainState


def gradient_program(step: TrainStep, params: Params) -> Callable[..., Sums]:
    """(params, frozen, number of the update, batch in rows) -> (gradients, metrics), compiled.

    Gradients are float32 and lie where the parameters lie. params: such as it will get.
    """
    places = jax.tree.map(lambda x: x.sharding, params)
    has_dropout = step.lora is not None and step.lora.dropout > 0

    def gradients(
        params: Params, frozen: Params | None, number: jax.Array, batch: RowBatch
    ) -> Sums:
        keys_R = dropout_keys(step.seed, number, len(batch.tokens)) if has_dropout else None
        of_part = partial(step.gradient, params, frozen, constants=batch.constants)
        grads, metrics = accumulate(
            of_part,
            (batch.per_row, keys_R),
            step.num_micro_batches,
            batch.num_parts,
            places,
            step.sync_every,
        )
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
    its last digit could differ. As in TrainStep, nothing moves where the loss or a gradient is not
    finite. state: such as it will get.
    """
    places = jax.tree.map(lambda x: x.sharding, state)

    def applied(
        state: TrainState, grads: Params, loss: jax.Array, rate: jax.Array | None
    ) -> tuple[TrainState, Metrics]:
        norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        optimizer = optimizer_of_client(cfg, table, rate, max_steps)
        new, size = apply_update(optimizer, grads, state, seed)
        old = state.params, state.opt_state
        params, opt_state = jax.tree.map(partial(jnp.where, is_finite), new, old)
        metrics = {
            "train/grad_norm": norm,
            "train/update_norm": jnp.where(is_finite, size, 0.0),
            "train/skipped": 1.0 - is_finite,
        }
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return jax.jit(applied, out_shardings=(places, None), donate_argnums=0)
