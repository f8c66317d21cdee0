"""One update: loss -> gradient -> new state."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from tunix_lite.algorithms.algorithm import Algorithm, Policy, check_loss
from tunix_lite.learner.micro_batches import accumulate
from tunix_lite.learner.optim import apply_update
from tunix_lite.models.lora import LoraConfig, acting_params
from tunix_lite.parallel.compiling import compiled_once

# folded into the seed, so that dropout and sampling share no numbers
DROPOUT = 0xD0


def make_train_step(
    policy: Policy,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
    lora: LoraConfig | None = None,
    seed: int = 0,
    sync_every: int = 1,
):
    """train_step(state, frozen, batch) -> (state, metrics), compiled once.

    An update whose loss or gradient is not finite is not made, on all devices alike: train/skipped
    is 1 then. The old state is donated: do not use it again. `frozen` is the base that `lora`
    adapts (None: all weights train); it stays. `batch` is in rows (types.RowBatch). `seed` is
    that of the adapters' dropout and of rounding. The gradient crosses the mesh once in
    `sync_every` micro-batches. `train_step.program(*args)` is what is compiled, for arguments or
    their shapes, and `train_step.compiled(*args)` is compiled: it knows its memory and what it
    sends.
    """
    check_loss(algorithm)

    def objective(params, frozen, batch, keys_R):
        scores = policy.scores(acting_params(frozen, params, lora, keys_R), batch)
        loss, metrics = algorithm.loss(scores, batch)
        entropy = jnp.sum(batch.loss_weight * scores.entropy)
        return loss, {
            "train/loss": loss,
            "train/entropy": jax.lax.stop_gradient(entropy),
            **metrics,
        }

    def gradient(params, frozen, part):
        grads, metrics = jax.grad(objective, has_aux=True)(params, frozen, *part)
        return grads, metrics

    def update(state, frozen, batch, places):
        keys_R = (
            dropout_keys(seed, state.step, len(batch.tokens)) if lora and lora.dropout else None
        )
        used, batch = batch.num_parts, batch.replace(num_parts=None)
        of_part = partial(gradient, state.params, frozen)
        grads, metrics = accumulate(
            of_part, (batch, keys_R), num_micro_batches, used, places, sync_every
        )
        wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        norm = optax.tree.norm(wide)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(metrics["train/loss"])
        params, opt_state, size = apply_update(optimizer, grads, state, seed)
        # Where a number is not finite nothing moves, not even the optimizer's moments; only the
        # step is counted.
        params, opt_state = jax.tree.map(
            partial(jnp.where, is_finite), (params, opt_state), (state.params, state.opt_state)
        )
        metrics |= {
            "train/grad_norm": norm,
            "train/update_norm": jnp.where(is_finite, size, 0.0),
            "train/skipped": 1.0 - is_finite,
        }
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    def program(*args):
        places = jax.tree.map(lambda x: x.sharding, args)
        # where the state lives that comes in, the one that goes out does, too
        state = places[0]
        with_places = partial(update, places=state.params)
        return jax.jit(
            with_places, in_shardings=places, out_shardings=(state, None), donate_argnums=0
        )

    compiled = compiled_once(lambda *args: program(*args).lower(*args))

    def train_step(state, frozen, batch):
        return compiled(state, frozen, batch)(state, frozen, batch)

    train_step.program, train_step.compiled = program, compiled
    return train_step


def dropout_keys(seed: int, step, rows: int):
    """One key per sequence of the whole batch, [B]: what is dropped does not depend on
    micro-batches or the mesh."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DROPOUT), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
