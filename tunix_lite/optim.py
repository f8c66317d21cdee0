"""The optimizer: clip by global norm, Adam with decoupled weight decay (arXiv:1711.05101), a schedule over the run."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
from flax import traverse_util

from tunix_lite.types import Params

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and its learning rate over the run."""

    learning_rate: float = 1e-6  # at its peak
    schedule: str = "constant"  # after warm-up: constant, or linear or cosine down to end_fraction at max_steps
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
        if self.learning_rate < 0 or self.weight_decay < 0 or self.max_grad_norm < 0 or self.warmup_steps < 0:
            raise ValueError("learning_rate, weight_decay, max_grad_norm and warmup_steps must not be negative")
        if self.eps <= 0:
            raise ValueError(f"eps={self.eps} must be above 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.end_fraction <= 1):
            raise ValueError("beta1 and beta2 lie in [0, 1), end_fraction in [0, 1]")


def make_schedule(cfg: OptimizerConfig, max_steps: int) -> optax.Schedule:
    """The learning rate of update number 0, 1, ... max_steps - 1."""
    rest = max(max_steps - 1 - cfg.warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(cfg.learning_rate),
        "linear": optax.linear_schedule(cfg.learning_rate, cfg.end_fraction * cfg.learning_rate, rest),
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
        mask=is_matrix,
    )
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), adam) if cfg.max_grad_norm else adam


def describe(cfg: OptimizerConfig) -> str:
    """The chain as one line for the start of a run."""
    rate = f"{cfg.learning_rate:g} {cfg.schedule}" + (f", warm-up {cfg.warmup_steps}" if cfg.warmup_steps else "")
    clip = f"clip {cfg.max_grad_norm:g} → " if cfg.max_grad_norm else ""
    decay = f", decay {cfg.weight_decay:g}" if cfg.weight_decay else ""
    return f"{clip}adamw({rate}, betas {cfg.beta1:g} {cfg.beta2:g}{decay})"


def is_matrix(params: Params) -> Params:
    """True for weights that decay: projections, adapters and the embedding, not the scales of norms or biases."""
    flat = traverse_util.flatten_dict(params, sep="/")
    return traverse_util.unflatten_dict({path: not path.endswith(("norm", "bias")) for path in flat}, sep="/")


def init_opt_state(optimizer: optax.GradientTransformation, params: Params):
    """The optimizer's state, born sharded: its moments lie where their weights lie, its counters everywhere."""
    leaf = jax.tree.leaves(params)[0]
    everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
    shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        jax.tree.map(lambda p: p.sharding, params),
        transform_non_params=lambda _: everywhere,
    )
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def learning_rate_at(cfg: OptimizerConfig, max_steps: int, step: int) -> float:
    """The rate that update number `step` (from 0) used."""
    return float(np.float32(make_schedule(cfg, max_steps)(step)))
