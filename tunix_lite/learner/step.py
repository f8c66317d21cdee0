"""One update: loss -> gradient -> new state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix_lite.algorithms.algorithm import Algorithm, Policy, check_loss
from tunix_lite.learner.micro_batches import accumulate
from tunix_lite.learner.optim import apply_update
from tunix_lite.models.lora import LoraConfig, acting_params
from tunix_lite.parallel.compiling import compiled_once
from tunix_lite.types import Metrics, Params, RowBatch, TrainState

# folded into the seed, so that dropout and sampling share no numbers
DROPOUT = 0xD0


@dataclass(frozen=True, eq=False)
class TrainStep:
    """An update that is compiled once for arguments of one shape.

    train_step(state, frozen, batch) -> (state, metrics). The old state is donated: do not use it
    again. `frozen` is the base under adapters (None: all weights train); it stays.

    Example: state, metrics = train_step(state, None, rows.lay_out(batch)[0]).
    """

    # (state, frozen, batch, grad_shardings) -> (state, metrics)
    update: Callable
    # (state, frozen, batch), arrays or their shapes -> the compiled program, which is kept: its
    # memory and its collectives can be read from it
    compiled: Callable

    def __call__(
        self, state: TrainState, frozen: Params | None, batch: RowBatch
    ) -> tuple[TrainState, Metrics]:
        return self.compiled(state, frozen, batch)(state, frozen, batch)

    def program(
        self, state: TrainState, frozen: Params | None, batch: RowBatch
    ) -> jax.stages.Wrapped:
        """What is compiled for these arguments, or for their shapes."""
        return _program(self.update, state, frozen, batch)


def make_train_step(
    policy: Policy,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
    lora: LoraConfig | None = None,
    seed: int = 0,
    sync_every: int = 1,
) -> TrainStep:
    """The update of a run.

    An update whose loss or gradient is not finite is not made, on all devices alike: train/skipped
    is 1 then. `lora`: the adapters that train; None: all weights do. `seed` is that of the
    adapters' dropout and of rounding. The gradient crosses the mesh once in `sync_every`
    micro-batches. Raises ValueError for a loss with the signature of earlier
    versions, loss(logprobs, batch).
    """
    check_loss(algorithm)
    gradient = _make_gradient(policy, algorithm, lora)

    def update(
        state: TrainState, frozen: Params | None, batch: RowBatch, grad_shardings: Any
    ) -> tuple[TrainState, Metrics]:
        # Gradient: micro-batches are summed. Nothing is divided, because loss_weight is normalised
        # over the whole batch.
        has_dropout = lora is not None and lora.dropout
        keys_R = dropout_keys(seed, state.step, len(batch.tokens)) if has_dropout else None
        num_used = batch.num_parts
        parts = batch.replace(num_parts=None), keys_R
        grads, metrics = accumulate(
            partial(gradient, state.params, frozen),
            parts,
            num_micro_batches,
            num_used,
            grad_shardings,
            sync_every,
        )
        wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        norm = optax.tree.norm(wide)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(metrics["train/loss"])

        # Where a number is not finite nothing moves, not even the optimizer's moments; only the
        # step is counted.
        params, opt_state, size = apply_update(optimizer, grads, state, seed)
        params, opt_state = jax.tree.map(
            partial(jnp.where, is_finite), (params, opt_state), (state.params, state.opt_state)
        )
        metrics |= {
            "train/grad_norm": norm,
            "train/update_norm": jnp.where(is_finite, size, 0.0),
            "train/skipped": 1.0 - is_finite,
        }
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    compiled = compiled_once(lambda *arguments: _program(update, *arguments).lower(*arguments))
    return TrainStep(update, compiled)


def _make_gradient(policy: Policy, algorithm: Algorithm, lora: LoraConfig | None) -> Callable:
    """(params, frozen, (batch, dropout keys)) -> (gradient of the loss, metrics)."""

    def objective(
        params: Params, frozen: Params | None, batch: RowBatch, keys_R: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        scores = policy.scores(acting_params(frozen, params, lora, keys_R), batch)
        loss, metrics = algorithm.loss(scores, batch)
        entropy = jnp.sum(batch.loss_weight * scores.entropy)
        return loss, {
            "train/loss": loss,
            "train/entropy": jax.lax.stop_gradient(entropy),
            **metrics,
        }

    def gradient(params: Params, frozen: Params | None, part: tuple) -> tuple[Params, Metrics]:
        return jax.grad(objective, has_aux=True)(params, frozen, *part)

    return gradient


def _program(
    update: Callable, state: TrainState, frozen: Params | None, batch: RowBatch
) -> jax.stages.Wrapped:
    shardings = jax.tree.map(lambda x: x.sharding, (state, frozen, batch))
    # the new state lies where the old one did
    of_state = shardings[0]
    return jax.jit(
        partial(update, grad_shardings=of_state.params),
        in_shardings=shardings,
        out_shardings=(of_state, None),
        donate_argnums=0,
    )


def dropout_keys(seed: int, step: jax.Array, rows: int) -> jax.Array:
    """One key per sequence of the whole batch, [B]: what is dropped does not depend on
    micro-batches or the mesh."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DROPOUT), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
