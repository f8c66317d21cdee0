"""One update: loss -> gradient -> new state."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from tunix_lite.models.lora import LoraConfig, attached
from tunix_lite.parallel.mesh import axis_size, constrain

DROPOUT = 0xD0  # folded into the seed, so that dropout and sampling share no numbers


def make_train_step(
    policy,
    algorithm,
    optimizer: optax.GradientTransformation,
    num_micro_batches: int = 1,
    lora: LoraConfig | None = None,
    seed: int = 0,
):
    """train_step(state, frozen, batch) -> (state, metrics), compiled once.

    The old state is donated: do not use it again. `frozen` is the base that `lora` adapts (None: all weights train);
    it stays. `seed` is that of the adapters' dropout.
    """

    def objective(params, frozen, batch, keys_B):
        acting = attached(frozen, params, lora, keys_B)
        return algorithm.loss(policy.logprobs(acting, batch.tokens, batch.token_mask), batch)

    def gradient(params, frozen, part):
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params, frozen, *part)
        return grads, {"train/loss": loss, **metrics}

    def update(state, frozen, batch):
        keys_B = dropout_keys(seed, state.step, len(batch.tokens)) if lora and lora.dropout else None
        grads, metrics = summed(partial(gradient, state.params, frozen), (batch, keys_B), num_micro_batches)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["train/grad_norm"] = optax.tree.norm(grads)
        metrics["train/update_norm"] = optax.tree.norm(updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    compiled = {}

    def train_step(state, frozen, batch):
        if not compiled:  # the state that comes in says where the state that comes out must live
            out_shardings = (jax.tree.map(lambda x: x.sharding, state), None)
            compiled["update"] = jax.jit(update, donate_argnums=0, out_shardings=out_shardings)
        return compiled["update"](state, frozen, batch)

    return train_step


def dropout_keys(seed: int, step, rows: int):
    """One key per sequence of the whole batch, [B]: what is dropped does not depend on micro-batches or the mesh."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DROPOUT), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def summed(fn, batch, parts: int):
    """fn over equal parts of the batch, results added up; exact, because losses and metrics are plain sums.

    Part i takes the i-th share of each fsdp shard's rows, so no row moves between devices.
    """
    if parts == 1:
        return fn(batch)
    shards = axis_size("fsdp")

    def divide(x):
        rows = x.shape[0] // (shards * parts)
        x = x.reshape(shards, parts, rows, *x.shape[1:]).swapaxes(0, 1).reshape(parts, shards * rows, *x.shape[1:])
        return constrain(x, "layers", "batch", *["seq"] * (x.ndim - 2))

    def add(total, part):
        return jax.tree.map(jnp.add, total, fn(part)), None

    divided = jax.tree.map(divide, batch)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, jax.tree.map(lambda x: x[0], divided))
    )
    return jax.lax.scan(add, zeros, divided)[0]
