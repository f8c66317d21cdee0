"""The optimizer: clip by global norm, Adam with decoupled weight decay (arXiv:1711.05101), a
schedule over the run."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.typing import DTypeLike

from tunix_lite.types import Params, TrainState

SCHEDULES = ("constant", "linear", "cosine")
# folded into the seed, so that rounding and sampling share no numbers
ROUNDING = 0x70D


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and its learning rate over the run."""

    learning_rate: float = 1e-6  # at its peak
    # after warm-up: constant, or linear or cosine down to end_fraction at max_steps
    schedule: str = "constant"
    warmup_steps: int = 0  # updates over which the rate rises from 0
    end_fraction: float = 0.0  # of learning_rate, reached at the last update of linear and cosine
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.99  # decay of the mean of squared gradients
    eps: float = 1e-8  # added to the root of the latter
    weight_decay: float = 0.0  # per unit of learning rate, on weights of two or more dims only
    max_grad_norm: float = 1.0  # global norm to which gradients are clipped; 0 turns clipping off

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}; it is one of {', '.join(SCHEDULES)}")
        if (
            self.learning_rate < 0
            or self.weight_decay < 0
            or self.max_grad_norm < 0
            or self.warmup_steps < 0
        ):
            raise ValueError(
                "learning_rate, weight_decay, max_grad_norm and warmup_steps must not be negative"
            )
        if self.eps <= 0:
            raise ValueError(f"eps={self.eps} must be above 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.end_fraction <= 1):
            raise ValueError("beta1 and beta2 lie in [0, 1), end_fraction in [0, 1]")


def make_schedule(cfg: OptimizerConfig, max_steps: int) -> optax.Schedule:
    """The learning rate of update number 0, 1, ... max_steps - 1."""
    rest = max(max_steps - 1 - cfg.warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(cfg.learning_rate),
        "linear": optax.linear_schedule(
            cfg.learning_rate, cfg.end_fraction * cfg.learning_rate, rest
        ),
        "cosine": optax.cosine_decay_schedule(cfg.learning_rate, rest, cfg.end_fraction),
    }[cfg.schedule]
    if not cfg.warmup_steps:
        return after
    # the first update already moves: rates 1/w, 2/w ... 1 of the peak
    start = cfg.learning_rate / cfg.warmup_steps
    rise = optax.linear_schedule(start, cfg.learning_rate, max(cfg.warmup_steps - 1, 1))
    return optax.join_schedules([rise, after], [cfg.warmup_steps])


def make_optimizer(cfg: OptimizerConfig, max_steps: int) -> optax.GradientTransformation:
    """The whole chain; `describe` says it in words."""
    adam = optax.adamw(
        make_schedule(cfg, max_steps),
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        mask=decay_mask,
    )
    if not cfg.max_grad_norm:
        return adam
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), adam)


def describe(cfg: OptimizerConfig) -> str:
    """The chain as one line for the start of a run."""
    rate = f"{cfg.learning_rate:g} {cfg.schedule}"
    if cfg.warmup_steps:
        rate += f", warm-up {cfg.warmup_steps}"
    clip = f"clip {cfg.max_grad_norm:g} → " if cfg.max_grad_norm else ""
    decay = f", decay {cfg.weight_decay:g}" if cfg.weight_decay else ""
    return f"{clip}adamw({rate}, betas {cfg.beta1:g} {cfg.beta2:g}{decay})"


def decay_mask(params: Params) -> Params:
    """True for weights that decay: projections, adapters and the embedding, not the scales of norms
    or biases."""
    flat = traverse_util.flatten_dict(params, sep="/")
    return traverse_util.unflatten_dict(
        {path: not path.endswith(("norm", "bias")) for path in flat}, sep="/"
    )


def init_opt_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state, born sharded: its moments lie where their weights lie, its counters
    everywhere."""
    shardings = jax.tree.map(lambda x: x.sharding, opt_state_shapes(optimizer, params))
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def opt_state_shapes(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state as ShapeDtypeStructs, placed; params: arrays, or shapes with places."""
    everywhere = jax.sharding.NamedSharding(
        jax.tree.leaves(params)[0].sharding.mesh, jax.sharding.PartitionSpec()
    )
    places = jax.tree.map(lambda p: p.sharding, params)
    shapes = jax.eval_shape(optimizer.init, params)
    # optax makes small arrays, here and not elsewhere
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        placed = optax.tree_utils.tree_map_params(
            optimizer,
            lambda _, place: place,
            shapes,
            places,
            transform_non_params=lambda _: everywhere,
        )
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, placed
    )


def apply_update(
    optimizer: optax.GradientTransformation, grads: Params, state: TrainState, seed: int
) -> tuple[Params, Any, jax.Array]:
    """The new params, the new state of the optimizer, and the norm of what was added.

    What is kept in bfloat16 (training.mixed_precision=bf16_params) is computed in float32 and
    rounded stochastically (stochastic rounding): up or down at random, to the nearer with the
    higher probability. Rounded to the nearest, an update of less than half a last digit would never
    arrive. The random numbers come from (seed, step), so that they are the same on every mesh.
    """
    # the update, in float32
    params = widen(state.params)
    updates, opt_state = optimizer.update(widen(grads), widen(state.opt_state), params)
    new = optax.apply_updates(params, updates), opt_state

    # and back to what is kept
    key = jax.random.fold_in(jax.random.key(seed), ROUNDING)
    kept = jax.tree.leaves((state.params, state.opt_state))
    leaves, form = jax.tree.flatten(new)
    keys = [jax.random.fold_in(jax.random.fold_in(key, state.step), i) for i in range(len(leaves))]
    rounded = [round_by_chance(x, old.dtype, k) for x, old, k in zip(leaves, kept, keys)]
    new_params, new_opt_state = form.unflatten(rounded)
    return new_params, new_opt_state, optax.tree.norm(updates)


def widen(tree: Any) -> Any:
    """Floating-point arrays in float32 at least."""

    def in_float32(x: jax.Array) -> jax.Array:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float(x) else x

    return jax.tree.map(in_float32, tree)


def num_updates(opt_state: Any) -> int:
    """Updates that were made: those that were skipped (step.TrainStep) do not count."""
    return int(optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1])


def is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def round_by_chance(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """x as dtype. From float32 to bfloat16 it is rounded stochastically: bfloat16 is the upper half
    of float32, and the lower half gives the probability of rounding up."""
    if x.dtype != jnp.float32 or dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = (bits + (jax.random.bits(key, x.shape, jnp.uint16)).astype(jnp.uint32)) >> 16
    rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(dtype))


def learning_rate_at(cfg: OptimizerConfig, max_steps: int, step: int) -> float:
    """The rate that update number `step` (from 0) used."""
    return float(np.float32(make_schedule(cfg, max_steps)(step)))
