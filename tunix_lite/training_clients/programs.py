"""The compiled programs of a trainer: gradients, which add up over calls, and the step of the
optimizer."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.basics.types import Metrics, Params, RowBatch, TrainState
from tunix_lite.learner.micro_batches import Sums
from tunix_lite.learner.optim import Optimizer, make_optimizer
from tunix_lite.learner.update import TrainStep, apply_for, widen
from tunix_lite.models.lora import LoraConfig
from tunix_lite.models.weights import Table
from tunix_lite.parallel.compiler_options import OptionsByPlatform, options_of_mesh
from tunix_lite.training_clients.losses import TokenLoss

# Programs that are kept of each kind: clients of a server may send ever new settings.
_MOST_KEPT = 32
# (params, frozen, number of the update, batch in rows) -> (gradients, metrics)
Gradients = Callable[[Params, Params | None, jax.Array, RowBatch], Sums]


@jax.jit
def add_gradients(grads: Params, more: Params) -> Params:
    """The sum of two gradients."""
    return jax.tree.map(jnp.add, grads, more)


def optimizer_of_client(
    cfg: Optimizer, table: Table | None, rate: jax.Array | None = None, max_steps: int = 1
) -> optax.GradientTransformation:
    """The chain of these settings, with this learning rate; None: with their schedule over
    max_steps."""
    # Clipping is always in the chain, so that the state of the optimizer is one for any setting.
    clipped = replace(cfg, max_grad_norm=cfg.max_grad_norm or math.inf)
    return make_optimizer(
        clipped, max_steps, table, None if rate is None else lambda count: rate
    )


@dataclass
class TrainerPrograms:
    """What a trainer has compiled.
    Example: TrainerPrograms(policy, seed=0).losses(token_loss("ppo", {}), None)."""

    policy: Policy  # whose scores are those of the targets of data
    seed: int  # of rounding
    max_steps: int = 1  # of the schedule of a run
    # of the gradients, by platform
    compiler_options: OptionsByPlatform = field(default_factory=dict)
    kept: dict[str, OrderedDict] = field(default_factory=dict)

    def gradients(self, loss: TokenLoss, lora: LoraConfig | None, params: Params) -> Gradients:
        """The gradients of a token loss. params: such as it will get."""
        step = TrainStep(self.policy, loss, None, lora, self.seed)
        places = jax.tree.map(lambda x: x.sharding, params)

        def gradients(
            params: Params, frozen: Params | None, number: jax.Array, batch: RowBatch
        ) -> Sums:
            grads, metrics = step.gradients(params, frozen, number, batch, places)
            # in float32: calls add up, and bfloat16 would lose small ones
            return widen(grads), metrics

        def make() -> Gradients:
            options = options_of_mesh(self.compiler_options)
            return jax.jit(gradients, out_shardings=(places, None), compiler_options=options)

        return self.once("gradients", (loss, lora, _shardings_of(params)), make)

    def losses(
        self, loss: TokenLoss, lora: LoraConfig | None
    ) -> Callable[[Params, Params | None, RowBatch], Metrics]:
        """(params, frozen, batch in rows) -> the metrics that `gradients` gives."""
        step = TrainStep(self.policy, loss, None, lora, self.seed)
        return self.once("losses", (loss, lora), lambda: jax.jit(step.metrics))

    def optimizer(
        self, cfg: Optimizer, table: Table | None, state: TrainState
    ) -> Callable[..., tuple[TrainState, Metrics]]:
        """(state, gradients, loss, learning rate or None) -> (state, metrics); it donates the
        state."""
        places = jax.tree.map(lambda x: x.sharding, state)

        def update(
            state: TrainState, grads: Params, loss: jax.Array, rate: jax.Array | None
        ) -> tuple[TrainState, Metrics]:
            # The rate of a schedule is computed inside: outside, its last digit could differ.
            optimizer = optimizer_of_client(cfg, table, rate, self.max_steps)
            return apply_for(state, self.seed)(optimizer, state, grads, loss)

        def make() -> Callable[..., tuple[TrainState, Metrics]]:
            return jax.jit(update, out_shardings=(places, None), donate_argnums=0)

        return self.once("optimizer", (cfg, _shardings_of(state)), make)

    def once(
        self, kind: str, key: Hashable, make: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """The program of this key, made by the first call; the one used longest ago goes."""
        kept = self.kept.setdefault(kind, OrderedDict())
        if key not in kept:
            kept[key] = make()
        # the order is that of use
        kept.move_to_end(key)
        while len(kept) > _MOST_KEPT:
            kept.popitem(last=False)
        return kept[key]


def _shardings_of(tree: Params | TrainState) -> tuple:
    """Form, shapes and places of arrays, as a key."""
    leaves, form = jax.tree.flatten(tree)
    return form, *((x.shape, x.dtype, x.sharding) for x in leaves)
