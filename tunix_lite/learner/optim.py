"""The optimizers: clipping by global norm, then AdamW, Adafactor, Muon, Lion or SGD of optax, and a
schedule over the run.

Weights are stored as stacks of layers, and an optimizer sees each layer as a weight of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_lite.basics.errors import check_choices, check_numbers
from tunix_lite.basics.types import Params
from tunix_lite.models.weights import Table, Weight

SCHEDULES = ("constant", "linear", "cosine")
# dims of a weight that are inputs and outputs of a matrix; or, as optax.partition marks it, none
Matrix = optax.contrib.MuonDimensionNumbers
DIMS = (Matrix, optax.MaskedNode)
# the least root mean square of weights that Adafactor multiplies an update by, as optax has it
LEAST_RMS = 1e-3
# settings that `describe` has words for
DESCRIBED = ("learning_rate", "schedule", "scale_lr_with_devices", "max_grad_norm")


@dataclass(frozen=True)
class LearningRateConfig:
    """Settings that all optimizers share: the learning rate over the run, and the clipping of
    gradients."""

    NAME: ClassVar[str] = "adamw"
    # The usual rate of this optimizer as a multiple of AdamW's.
    TIMES_ADAMW: ClassVar[float] = 1.0

    # Peak learning rate. auto takes the usual one for what trains.
    learning_rate: float | str = 1e-6
    # Rate after warm-up: constant, or linear or cosine decay to end_fraction at max_steps.
    schedule: str = "constant"
    # Updates over which the learning rate rises from 0.
    warmup_steps: int = 0
    # Share of learning_rate that linear and cosine decay towards. They would reach it one update
    # after the last.
    end_fraction: float = 0.0
    # true multiplies learning_rate by the number of data-parallel shards (fsdp).
    scale_lr_with_devices: bool = False
    # Gradients are clipped to this global norm. 0 turns clipping off.
    max_grad_norm: float = 1.0

    def __post_init__(self):
        check_choices(self, {"schedule": SCHEDULES})
        rate = self.learning_rate
        if isinstance(rate, str) and rate != "auto":
            raise ValueError(f"learning_rate={rate!r}; it is a number such as 1e-6, or auto")
        # of whatever optimizer has them
        amounts = "learning_rate weight_decay max_grad_norm warmup_steps clip_rms"
        check_numbers(self, amounts, lambda x: x == "auto" or x >= 0, "must not be negative")
        check_numbers(self, "min_dim_to_factor", lambda x: x >= 2, "must be at least 2")
        check_numbers(self, "ns_steps", lambda x: x >= 1, "must be at least 1")
        check_numbers(self, "eps rms", lambda x: x > 0, "must be above 0")
        decays = "beta1 beta2 momentum"
        check_numbers(self, decays, lambda x: 0 <= x < 1, "must lie in [0, 1)")
        check_numbers(self, "end_fraction", lambda x: 0 <= x <= 1, "must lie in [0, 1]")
        check_numbers(self, "decay_rate", lambda x: 0 < x <= 1, "must lie in (0, 1]")
        if getattr(self, "nesterov", False) and not self.momentum:
            raise ValueError("nesterov=true wants a momentum above 0")


@dataclass(frozen=True)
class OptimizerConfig(LearningRateConfig):
    """AdamW: Adam with decoupled weight decay (arXiv:1711.05101). The default.
    Example: `OptimizerConfig(learning_rate=1e-6, weight_decay=0.1)`."""

    # conf/optimizer/default.yaml explains each setting
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates."""
        return optax.adamw(
            rate,
            b1=self.beta1,
            b2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=_decay_mask,
        )


@dataclass(frozen=True)
class AdafactorConfig(LearningRateConfig):
    """Adafactor (arXiv:1804.04235): the mean of squared gradients as one row and one column of a
    matrix, so that it takes next to no memory. Norms and scales are those of a layer's matrix."""

    # conf/optimizer/adafactor.yaml explains each setting
    NAME: ClassVar[str] = "adafactor"
    TIMES_ADAMW: ClassVar[float] = 25.0

    decay_rate: float = 0.8
    clip_rms: float = 1.0
    scale_by_weights: bool = True
    momentum: float = 0.0
    min_dim_to_factor: int = 128
    eps: float = 1e-30

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates. The parts of optax.adafactor, with norms taken layer by layer."""

        def rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
            return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))

        # optax takes norms over a stack of layers, as if it were one weight
        clip = _per_layer(
            lambda u, p, dims: u / jnp.maximum(1.0, rms(u, dims) / self.clip_rms), table
        )
        times_weights = _per_layer(
            lambda u, p, dims: u * jnp.maximum(rms(p, dims), LEAST_RMS), table
        )
        parts = [
            optax.scale_by_factored_rms(
                decay_rate=self.decay_rate,
                min_dim_size_to_factor=self.min_dim_to_factor,
                epsilon=self.eps,
            )
        ]
        if self.clip_rms:
            parts.append(clip)
        parts.append(optax.scale_by_learning_rate(rate, flip_sign=False))
        if self.scale_by_weights:
            parts.append(times_weights)
        if self.momentum:
            parts.append(optax.ema(self.momentum, debias=False))
        return optax.chain(*parts, optax.scale(-1.0))


@dataclass(frozen=True)
class MuonConfig(LearningRateConfig):
    """Muon (Jordan 2024, arXiv:2502.16982): momentum whose matrix, of each layer, is made nearly
    orthogonal by Newton-Schulz steps. Embedding, head, norms and biases get AdamW."""

    # conf/optimizer/muon.yaml explains each setting
    NAME: ClassVar[str] = "muon"
    TIMES_ADAMW: ClassVar[float] = 2.5

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    rms: float | None = 0.2
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates. table: the weights that train, which says which dims are inputs."""
        if table is None:
            raise ValueError(
                "Muon must know which dims of a weight are inputs: give the table"
            )
        # Not optax.contrib.muon: its AdamW has Nesterov momentum, and decays norms too.

        def dims_of(w: Weight) -> Matrix | optax.MaskedNode:
            # A stack of layers is as many matrices. Muon is not for the embedding and the head.
            if not w.inputs or "vocab" in w.axes:
                return optax.MaskedNode()
            first = w.num_counted
            inputs = tuple(range(first, first + w.inputs))
            return Matrix(inputs, tuple(range(first + w.inputs, len(w.shape))))

        def sized(d: Matrix | optax.MaskedNode, u: jax.Array) -> jax.Array:
            # an orthogonal matrix, with the root mean square of its setting
            if not isinstance(d, Matrix):
                return u
            inputs = math.prod(u.shape[dim] for dim in d.reduction_axis)
            outputs = math.prod(u.shape[dim] for dim in d.output_axis)
            if self.rms is None:
                return math.sqrt(max(1.0, outputs / inputs)) * u
            return math.sqrt(max(inputs, outputs)) * self.rms * u

        dims = jax.tree.map(dims_of, table)

        def is_dims(x: object) -> bool:
            return isinstance(x, DIMS)

        scale_by_shape = optax.stateless(
            lambda updates, params: jax.tree.map(sized, dims, updates, is_leaf=is_dims)
        )
        parts = {
            "matrix": optax.chain(
                optax.contrib.scale_by_muon(
                    ns_steps=self.ns_steps,
                    beta=self.momentum,
                    eps=self.eps,
                    nesterov=self.nesterov,
                    weight_dimension_numbers=dims,
                ),
                scale_by_shape,
            ),
            "rest": optax.scale_by_adam(self.beta1, self.beta2, self.eps),
        }
        names = jax.tree.map(
            lambda d: "matrix" if isinstance(d, Matrix) else "rest", dims, is_leaf=is_dims
        )
        return optax.chain(
            optax.partition(parts, names),
            optax.add_decayed_weights(self.weight_decay, _decay_mask),
            optax.scale_by_learning_rate(rate),
        )


@dataclass(frozen=True)
class LionConfig(LearningRateConfig):
    """Lion (arXiv:2302.06675): the sign of a mean of gradients, so each weight moves by the
    learning rate. It wants a rate 3 to 10 times smaller than AdamW's."""

    # conf/optimizer/lion.yaml explains each setting
    NAME: ClassVar[str] = "lion"
    TIMES_ADAMW: ClassVar[float] = 0.5

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates."""
        return optax.lion(
            rate,
            b1=self.beta1,
            b2=self.beta2,
            weight_decay=self.weight_decay,
            mask=_decay_mask,
        )


@dataclass(frozen=True)
class SGDConfig(LearningRateConfig):
    """Stochastic gradient descent. Without momentum it keeps nothing."""

    # conf/optimizer/sgd.yaml explains each setting
    NAME: ClassVar[str] = "sgd"
    TIMES_ADAMW: ClassVar[float] = 2500.0

    momentum: float = 0.0
    nesterov: bool = False

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates."""
        return optax.sgd(rate, momentum=self.momentum or None, nesterov=self.nesterov)


Optimizer = OptimizerConfig | AdafactorConfig | MuonConfig | LionConfig | SGDConfig


def scaled_for(cfg: LearningRateConfig, num_shards: int) -> LearningRateConfig:
    """The settings with the learning rate for this number of data-parallel shards (fsdp)."""
    if not cfg.scale_lr_with_devices:
        return cfg
    return replace(cfg, learning_rate=cfg.learning_rate * num_shards)


def _make_schedule(cfg: LearningRateConfig, max_steps: int) -> optax.Schedule:
    """The learning rate of update number 0, 1, ... max_steps - 1.

    With w = max(warmup_steps, 1): update w - 1 has the peak, and those before it 1/w, 2/w ... of
    it. A decay begins there and would end at update max_steps, one after the last, as those of
    transformers and optax do: no update has the rate 0. Raises ValueError for learning_rate=auto.
    """
    peak = cfg.learning_rate
    if peak == "auto":
        raise ValueError("learning_rate=auto: give a number, or learner.defaults.with_rate")
    # the peak belongs to an update, the last of the warm-up
    first = max(cfg.warmup_steps, 1) - 1
    rest = max(max_steps - first, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, cfg.end_fraction * peak, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, cfg.end_fraction),
    }[cfg.schedule]
    if not first:
        return after
    rise = optax.linear_schedule(peak / cfg.warmup_steps, peak, first)
    return optax.join_schedules([rise, after], [first])


def make_optimizer(
    cfg: Optimizer,
    max_steps: int,
    table: Table | None = None,
    rate: optax.Schedule | None = None,
) -> optax.GradientTransformation:
    """The whole chain. table: the declared weights that train; None: none is stacked by layer. Muon
    needs it. rate: the learning rate of each update; None: as the settings have it.
    Example: `make_optimizer(OptimizerConfig(learning_rate=4e-5), max_steps=60)`."""
    scale = cfg.scale(_make_schedule(cfg, max_steps) if rate is None else rate, table)
    # A chain of one has another state, and 0 would clip everything to nothing.
    if not cfg.max_grad_norm:
        return scale

    def clip(grads: Params, _: Params | None) -> Params:
        # One product. optax divides and selects, and XLA for CPUs would keep the quotients.
        share = jnp.minimum(1.0, cfg.max_grad_norm / optax.tree.norm(grads))
        return jax.tree.map(lambda g: g * share.astype(g.dtype), grads)

    return optax.chain(optax.stateless(clip), scale)


def describe(cfg: Optimizer, num_shards: int = 1) -> str:
    """The chain as one line for the start of a run, with all settings that are not at their
    default; num_shards: of the batch (fsdp)."""
    rate = f"{cfg.learning_rate:g}"
    if cfg.scale_lr_with_devices:
        rate += f" x {num_shards} shards = {scaled_for(cfg, num_shards).learning_rate:g}"
    others = [
        f"{field.name}={getattr(cfg, field.name)}"
        for field in fields(cfg)
        if field.name not in DESCRIBED and getattr(cfg, field.name) != field.default
    ]
    clip = f"clip {cfg.max_grad_norm:g} → " if cfg.max_grad_norm else ""
    return f"{clip}{cfg.NAME}({', '.join([f'{rate} {cfg.schedule}', *others])})"


def _per_layer(
    change: Callable[[jax.Array, jax.Array, tuple[int, ...]], jax.Array], table: Table | None
) -> optax.GradientTransformation:
    """Applies `change(update, weight, dims)` to each weight, where `dims` are all its dims but the
    one that counts layers."""

    def update(updates: Params, params: Params) -> Params:
        # without a table no weight is a stack
        stacks = jax.tree.map(lambda _: False, params)
        if table is not None:
            stacks = jax.tree.map(lambda w: w.is_stacked, table)

        def of(u: jax.Array, p: jax.Array, is_stacked: bool) -> jax.Array:
            return change(u, p, tuple(range(int(is_stacked), u.ndim)))

        return jax.tree.map(of, updates, params, stacks)

    return optax.stateless(update)


def _decay_mask(params: Params) -> Params:
    """True for weights that decay: projections, adapters and the embedding. Scales of norms,
    biases, scalars of layers and the logarithms of a gated delta net do not."""
    others = ("norm", "bias", "decay", "scalar")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not jax.tree_util.keystr(path[-1:], simple=True).endswith(others),
        params,
    )


def init_opt_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state, born sharded: its moments lie where their weights lie, its counters
    everywhere.

    Example: `TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))`.
    """
    # Moments as large as the weights would not fit on one device first.
    shardings = jax.tree.map(lambda x: x.sharding, opt_state_shapes(optimizer, params))
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def opt_state_shapes(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state as ShapeDtypeStructs, placed; params: arrays, or shapes with places."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    leaves = jax.tree_util.tree_leaves_with_path(params)
    places = {_names(path): p.sharding.spec for path, p in leaves}

    def place(leaf: _StateLeaf) -> jax.ShapeDtypeStruct:
        spec = jax.sharding.PartitionSpec()
        if leaf.weight is not None:
            # A spec may end before its array's last dims, which are whole then.
            whole = (*places[leaf.weight], *[None] * (max(leaf.dims, default=-1) + 1))
            spec = jax.sharding.PartitionSpec(*(whole[dim] for dim in leaf.dims))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape.shape, leaf.shape.dtype, sharding=sharding)

    layout = state_layout(optimizer, params)
    return jax.tree.map(place, layout, is_leaf=lambda x: isinstance(x, _StateLeaf))


@dataclass(frozen=True)
class _StateLeaf:
    """An array of the optimizer's state, and the weight that it lies with. Example: the column of
    Adafactor's mean for a weight [L, D, F] has dims (0, 1)."""

    shape: jax.ShapeDtypeStruct
    # the path of the weight; None: it belongs to none, as a counter does
    weight: tuple[str, ...] | None
    # the dims of the weight that the array has
    dims: tuple[int, ...] = ()


def state_layout(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The leaves of the optimizer's state; params: arrays, or anything with shape and dtype."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    by_path = {_names(path): p.shape for path, p in leaves}
    # optax makes small arrays, here and not on a mesh that may not be there
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        state = jax.eval_shape(optimizer.init, shapes)

    def of(place: tuple, leaf: jax.ShapeDtypeStruct) -> _StateLeaf:
        names = _names(place)
        suffixes = (names[i:] for i in range(len(names)))
        weight = next((suffix for suffix in suffixes if suffix in by_path), None)
        if weight is None:
            return _StateLeaf(leaf, None)
        # all dims of the weight, or all but one (Adafactor)
        whole = by_path[weight]
        every = tuple(range(len(whole)))
        if leaf.shape == whole:
            return _StateLeaf(leaf, weight, every)
        left_out = [d for d in every if whole[:d] + whole[d + 1 :] == leaf.shape]
        if not left_out:
            return _StateLeaf(leaf, None)
        # Of two dims of one size, optax's row leaves out the last of the largest, its column the
        # other.
        drop = left_out[-1] if "v_row" in names else left_out[0]
        return _StateLeaf(leaf, weight, tuple(d for d in every if d != drop))

    return jax.tree_util.tree_map_with_path(of, state)


def _names(path: tuple) -> tuple[str, ...]:
    """The keys and attributes along a path, as text."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def num_updates(opt_state: Any) -> int:
    """Updates of the policy that were made: those that were skipped (update.TrainStep) do not
    count."""
    # the last in their order, which a critic's come before
    return int(optax.tree_utils.tree_get_all_with_path(opt_state, "count")[-1][1])


def learning_rates(cfg: LearningRateConfig, max_steps: int) -> Callable[[int], float]:
    """Returns the number of an update, from 0 -> the rate that it uses."""
    schedule = _make_schedule(cfg, max_steps)
    return lambda step: float(np.float32(schedule(step)))
