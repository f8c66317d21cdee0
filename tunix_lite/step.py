"""One update: loss -> gradient -> new state."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from tunix_lite.parallel.mesh import axis_size, constrain


def make_train_step(policy, algorithm, optimizer: optax.GradientTransformation, num_micro_batches: int = 1):
    """train_step(state, batch) -> (state, metrics), compiled once. The old state is donated: do not use it again."""

    def objective(params, batch):
        return algorithm.loss(policy.logprobs(params, batch.tokens, batch.token_mask), batch)

    def gradient(params, batch):
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params, batch)
        return grads, {"train/loss": loss, **metrics}

    def update(state, batch):
        grads, metrics = summed(partial(gradient, state.params), batch, num_micro_batches)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["train/grad_norm"] = optax.tree.norm(grads)
        metrics["train/update_norm"] = optax.tree.norm(updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    compiled = {}

    def train_step(state, batch):
        if not compiled:  # the state that comes in says where the state that comes out must live
            out_shardings = (jax.tree.map(lambda x: x.sharding, state), None)
            compiled["update"] = jax.jit(update, donate_argnums=0, out_shardings=out_shardings)
        return compiled["update"](state, batch)

    return train_step


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
        return constrain(x, "layers", "batch", "seq")

    def add(total, part):
        return jax.tree.map(jnp.add, total, fn(part)), None

    divided = jax.tree.map(divide, batch)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, jax.tree.map(lambda x: x[0], divided))
    )
    return jax.lax.scan(add, zeros, divided)[0]
