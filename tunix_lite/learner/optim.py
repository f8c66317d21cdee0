"""The optimizers: clipping by global norm, then AdamW, Adafactor, Muon, Lion or SGD of optax, and a
schedule over the run.

Weights are stored as stacks of layers, and an optimizer sees each layer as a weight of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.typing import DTypeLike

from tunix_lite.models.weights import Table, Weight, is_weight
from tunix_lite.types import Params, TrainState

SCHEDULES = ("constant", "linear", "cosine")
# folded into the seed, so that rounding and sampling share no numbers
ROUNDING = 0x70D
# the least root mean square of weights that Adafactor multiplies an update by, as optax has it
LEAST_RMS = 1e-3


@dataclass(frozen=True)
class LearningRateConfig:
    """Settings that all optimizers share: the learning rate over the run, and the clipping of
    gradients."""

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
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}; it is one of {', '.join(SCHEDULES)}")
        limits = ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps")
        names = [name for name in limits if hasattr(self, name)]
        rate = self.learning_rate
        if isinstance(rate, str) and rate != "auto":
            raise ValueError(f"learning_rate={rate!r}; it is a number such as 1e-6, or auto")
        numbers = [getattr(self, name) for name in names]
        if any(number < 0 for number in numbers if number != "auto"):
            raise ValueError(f"{', '.join(names[:-1])} and {names[-1]} must not be negative")
        if getattr(self, "eps", 1.0) <= 0:
            raise ValueError(f"eps={self.eps} must be above 0")
        shares = [name for name in ("beta1", "beta2", "momentum") if hasattr(self, name)]
        if not all(0 <= getattr(self, name) < 1 for name in shares):
            raise ValueError(f"{' and '.join(shares)} must lie in [0, 1)")
        if not 0 <= self.end_fraction <= 1:
            raise ValueError(f"end_fraction={self.end_fraction} must lie in [0, 1]")


@dataclass(frozen=True)
class OptimizerConfig(LearningRateConfig):
    """AdamW: Adam with decoupled weight decay (arXiv:1711.05101). The default.

    Example: `OptimizerConfig(learning_rate=1e-6, weight_decay=0.1)`.
    """

    # Decay of the running mean of gradients.
    beta1: float = 0.9
    # Decay of the running mean of squared gradients.
    beta2: float = 0.99
    # Added to the root of the mean squared gradient.
    eps: float = 1e-8
    # Decay of weights per unit of learning rate, for weights of two or more dims. 0 turns it off.
    weight_decay: float = 0.0

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates."""
        return optax.adamw(
            rate,
            b1=self.beta1,
            b2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decay_mask,
        )

    def describe(self, rate: str) -> str:
        """Describes the optimizer."""
        return f"adamw({rate}, betas {self.beta1:g} {self.beta2:g}{_decay(self.weight_decay)})"


@dataclass(frozen=True)
class AdafactorConfig(LearningRateConfig):
    """Adafactor (arXiv:1804.04235): the mean of squared gradients as one row and one column of a
    matrix, so that it takes next to no memory. Norms and scales are those of a layer's matrix."""

    TIMES_ADAMW: ClassVar[float] = 25.0

    # At step t, the mean of squared gradients decays by 1 - t^-decay_rate.
    decay_rate: float = 0.8
    # The update of a matrix is clipped to this root mean square. 0 turns this off.
    clip_rms: float = 1.0
    # true multiplies an update by the root mean square of its weights (at least 1e-3).
    scale_by_weights: bool = True
    # Decay of a running mean of the updates. 0 keeps no mean and needs no memory for it.
    momentum: float = 0.0
    # A matrix with a smaller second-largest dim keeps all of its squared gradients.
    min_dim_to_factor: int = 128
    # Added to squared gradients.
    eps: float = 1e-30

    def __post_init__(self):
        super().__post_init__()
        if self.clip_rms < 0:
            raise ValueError(f"clip_rms={self.clip_rms} must not be negative")
        if self.min_dim_to_factor < 2:
            raise ValueError(f"min_dim_to_factor={self.min_dim_to_factor} must be at least 2")
        if not 0 < self.decay_rate <= 1:
            raise ValueError(f"decay_rate={self.decay_rate} must lie in (0, 1]")

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates. The parts of optax.adafactor, with norms taken layer by layer."""
        parts = [
            optax.scale_by_factored_rms(
                decay_rate=self.decay_rate,
                min_dim_size_to_factor=self.min_dim_to_factor,
                epsilon=self.eps,
            )
        ]
        if self.clip_rms:
            parts.append(_per_layer(_clipped_to_rms, table, self.clip_rms))
        parts.append(optax.scale_by_learning_rate(rate, flip_sign=False))
        if self.scale_by_weights:
            parts.append(_per_layer(_times_rms_of_weights, table, LEAST_RMS))
        if self.momentum:
            parts.append(optax.ema(self.momentum, debias=False))
        return optax.chain(*parts, optax.scale(-1.0))

    def describe(self, rate: str) -> str:
        """Describes the optimizer."""
        more = f", momentum {self.momentum:g}" if self.momentum else ""
        weights = ", times the rms of the weights" if self.scale_by_weights else ""
        clip = f", clip rms {self.clip_rms:g}" if self.clip_rms else ""
        return f"adafactor({rate}, decay {self.decay_rate:g}{clip}{weights}{more})"


@dataclass(frozen=True)
class MuonConfig(LearningRateConfig):
    """Muon (Jordan 2024, arXiv:2502.16982): momentum whose matrix, of each layer, is made nearly
    orthogonal by Newton-Schulz steps. Embedding, head, norms and biases get AdamW."""

    TIMES_ADAMW: ClassVar[float] = 2.5

    # Decay of the running mean of the gradients of a matrix.
    momentum: float = 0.95
    # true adds the new gradient to the mean once more (Nesterov momentum).
    nesterov: bool = True
    # Number of Newton-Schulz iterations.
    ns_steps: int = 5
    # Root mean square of a matrix's update, 0.2 as in AdamW. null scales by sqrt(max(1, outputs /
    # inputs)).
    rms: float | None = 0.2
    # Decay of the mean of gradients in AdamW, which updates all other weights.
    beta1: float = 0.9
    # Decay of the mean of squared gradients in AdamW, which updates all other weights.
    beta2: float = 0.99
    # Added to the root in AdamW, and to the norm that Newton-Schulz divides by.
    eps: float = 1e-8
    # Decay of weights per unit of learning rate, for weights of two or more dims. 0 turns it off.
    weight_decay: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.ns_steps < 1:
            raise ValueError(f"ns_steps={self.ns_steps} must be at least 1")
        if self.rms is not None and self.rms <= 0:
            raise ValueError(f"rms={self.rms} must be above 0, or null")

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates. table: the weights that train, which says which dims are inputs."""
        if table is None:
            raise ValueError("Muon must know which dims of a weight are inputs: give the table")
        # Not optax.contrib.muon: its AdamW has Nesterov momentum, and decays norms too.
        dims = _matrix_dims(table)
        scale_by_shape = _per_matrix(partial(_matrix_size, rms=self.rms), dims)
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
            lambda d: "matrix" if _is_matrix(d) else "rest", dims, is_leaf=_is_dims
        )
        return optax.chain(
            optax.partition(parts, names),
            optax.add_decayed_weights(self.weight_decay, decay_mask),
            optax.scale_by_learning_rate(rate),
        )

    def describe(self, rate: str) -> str:
        """Describes the optimizer."""
        size = "" if self.rms is None else f", rms {self.rms:g}"
        momentum = f"{'nesterov ' if self.nesterov else ''}momentum {self.momentum:g}"
        muon = f"{momentum}, {self.ns_steps} Newton-Schulz steps{size}"
        adam = f"adamw betas {self.beta1:g} {self.beta2:g} for the rest"
        return f"muon({rate}, {muon}, {adam}{_decay(self.weight_decay)})"


@dataclass(frozen=True)
class LionConfig(LearningRateConfig):
    """Lion (arXiv:2302.06675): the sign of a mean of gradients, so each weight moves by the
    learning rate. It wants a rate 3 to 10 times smaller than AdamW's."""

    TIMES_ADAMW: ClassVar[float] = 0.5

    # Share of the running mean in the sign. The rest is the new gradient.
    beta1: float = 0.9
    # Decay of the running mean of gradients.
    beta2: float = 0.99
    # Decay of weights per unit of learning rate, for weights of two or more dims. 0 turns it off.
    weight_decay: float = 0.0

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates."""
        return optax.lion(
            rate, b1=self.beta1, b2=self.beta2, weight_decay=self.weight_decay, mask=decay_mask
        )

    def describe(self, rate: str) -> str:
        """Describes the optimizer."""
        return f"lion({rate}, betas {self.beta1:g} {self.beta2:g}{_decay(self.weight_decay)})"


@dataclass(frozen=True)
class SGDConfig(LearningRateConfig):
    """Stochastic gradient descent. Without momentum it keeps nothing."""

    # An update is as large as its gradient, so the rate says little of what trains.
    TIMES_ADAMW: ClassVar[float] = 2500.0

    # Decay of a running sum of gradients. 0 keeps no sum and needs no memory for it.
    momentum: float = 0.0
    # true adds the new gradient to the sum once more. Needs momentum above 0.
    nesterov: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true wants a momentum above 0")

    def scale(self, rate: optax.Schedule, table: Table | None) -> optax.GradientTransformation:
        """Gradients to updates."""
        return optax.sgd(rate, momentum=self.momentum or None, nesterov=self.nesterov)

    def describe(self, rate: str) -> str:
        """Describes the optimizer."""
        name = "nesterov momentum" if self.nesterov else "momentum"
        return f"sgd({rate}{f', {name} {self.momentum:g}' if self.momentum else ''})"


Optimizer = OptimizerConfig | AdafactorConfig | MuonConfig | LionConfig | SGDConfig


def _decay(weight_decay: float) -> str:
    return f", decay {weight_decay:g}" if weight_decay else ""


def scaled_for(cfg: LearningRateConfig, num_shards: int) -> LearningRateConfig:
    """Returns the settings with the learning rate for this number of data-parallel shards
    (fsdp)."""
    if not cfg.scale_lr_with_devices:
        return cfg
    return replace(cfg, learning_rate=cfg.learning_rate * num_shards)


def make_schedule(cfg: LearningRateConfig, max_steps: int) -> optax.Schedule:
    """The learning rate of update number 0, 1, ... max_steps - 1.

    With w = max(warmup_steps, 1): update w - 1 has the peak, and those before it 1/w, 2/w ... of
    it. A decay begins there and would end at update max_steps, one after the last, as those of
    transformers and optax do: no update has the rate 0.

    Raises ValueError for learning_rate=auto: learner.defaults.with_rate makes it a number.
    """
    peak = cfg.learning_rate
    if peak == "auto":
        raise ValueError("learning_rate=auto: give a number, or learner.defaults.with_rate")
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
    """The whole chain; `describe` says it in words.

    table: the declared weights that train, stacked by layer as they are; None: none is stacked.
    Muon needs it. rate: the learning rate of each update; None: as the settings have it. Raises
    ValueError.

    Example: `make_optimizer(OptimizerConfig(learning_rate=4e-5), max_steps=60)`.
    """
    scale = cfg.scale(make_schedule(cfg, max_steps) if rate is None else rate, table)
    if not cfg.max_grad_norm:
        return scale
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), scale)


def describe(cfg: Optimizer, num_shards: int = 1, max_steps: int | None = None) -> str:
    """The chain as one line for the start of a run; num_shards: of the batch (fsdp). max_steps: of
    the run; None: it is not known."""
    rate = f"{cfg.learning_rate:g} {cfg.schedule}"
    if cfg.scale_lr_with_devices:
        whole = scaled_for(cfg, num_shards).learning_rate
        rate = f"{cfg.learning_rate:g} x {num_shards} shards = {whole:g} {cfg.schedule}"
    if cfg.warmup_steps:
        rate += f", warm-up {cfg.warmup_steps}"
        if max_steps is not None and max_steps < cfg.warmup_steps:
            rate += f" (longer than the run, which ends at {max_steps}/{cfg.warmup_steps} of it)"
    clip = f"clip {cfg.max_grad_norm:g} → " if cfg.max_grad_norm else ""
    return clip + cfg.describe(rate)


# ---- matrices of a layer


def _matrix_dims(table: Table) -> Any:
    """Returns the dims of each weight that are the inputs and the outputs of a matrix; MaskedNode,
    as optax.partition marks it, where Muon has no matrix.

    A stack of layers is as many matrices. The embedding and the head are not meant for Muon.
    """

    def of(w: Weight) -> Any:
        if not w.inputs or "vocab" in w.axes:
            return optax.MaskedNode()
        first = int(w.is_stacked)
        inputs = tuple(range(first, first + w.inputs))
        outputs = tuple(range(first + w.inputs, len(w.shape)))
        return optax.contrib.MuonDimensionNumbers(inputs, outputs)

    return jax.tree.map(of, table, is_leaf=is_weight)


def _is_matrix(dims: Any) -> bool:
    return isinstance(dims, optax.contrib.MuonDimensionNumbers)


def _is_dims(x: Any) -> bool:
    return _is_matrix(x) or isinstance(x, optax.MaskedNode)


def _per_matrix(factor: Callable, dims: Any) -> optax.GradientTransformation:
    """Multiplies each orthogonal matrix by factor(inputs, outputs)."""

    def of(d: Any, u: Any) -> Any:
        if not _is_matrix(d):
            return u
        inputs = math.prod(u.shape[dim] for dim in d.reduction_axis)
        outputs = math.prod(u.shape[dim] for dim in d.output_axis)
        return factor(inputs, outputs) * u

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        return jax.tree.map(of, dims, updates, is_leaf=_is_dims), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _matrix_size(inputs: int, outputs: int, rms: float | None) -> float:
    """Returns the factor of an orthogonal matrix: see MuonConfig.rms."""
    if rms is None:
        return math.sqrt(max(1.0, outputs / inputs))
    return math.sqrt(max(inputs, outputs)) * rms


def _per_layer(
    change: Callable, table: Table | None, limit: float
) -> optax.GradientTransformationExtraArgs:
    """Applies `change(update, weight, dims, limit)` to each weight, where `dims` are all its dims
    but the one that counts layers."""

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        stacks = jax.tree.map(lambda _: False, params)
        if table is not None:
            stacks = jax.tree.map(lambda w: w.is_stacked, table, is_leaf=is_weight)

        def of(u: jax.Array, p: jax.Array, is_stacked: bool) -> jax.Array:
            return change(u, p, tuple(range(int(is_stacked), u.ndim)), limit)

        return jax.tree.map(of, updates, params, stacks), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _clipped_to_rms(u: jax.Array, p: jax.Array, dims: tuple[int, ...], most: float) -> jax.Array:
    return u / jnp.maximum(1.0, _rms(u, dims) / most)


def _times_rms_of_weights(
    u: jax.Array, p: jax.Array, dims: tuple[int, ...], least: float
) -> jax.Array:
    return u * jnp.maximum(_rms(p, dims), least)


def decay_mask(params: Params) -> Params:
    """True for weights that decay: projections, adapters and the embedding, not the scales of norms
    or biases."""
    flat = traverse_util.flatten_dict(params, sep="/")
    return traverse_util.unflatten_dict(
        {path: not path.endswith(("norm", "bias")) for path in flat}, sep="/"
    )


def init_opt_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state, born sharded: its moments lie where their weights lie, its counters
    everywhere.

    Example: `TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))`.
    """
    shardings = jax.tree.map(lambda x: x.sharding, opt_state_shapes(optimizer, params))
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def opt_state_shapes(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state as ShapeDtypeStructs, placed; params: arrays, or shapes with places."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    places = {path: p.sharding.spec for path, p in _by_path(params)}

    def place(leaf: StateLeaf) -> jax.ShapeDtypeStruct:
        spec = jax.sharding.PartitionSpec()
        if leaf.weight is not None:
            # A spec may end before its array's last dims, which are whole then.
            whole = (*places[leaf.weight], *[None] * (max(leaf.dims, default=-1) + 1))
            spec = jax.sharding.PartitionSpec(*(whole[dim] for dim in leaf.dims))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape.shape, leaf.shape.dtype, sharding=sharding)

    layout = state_layout(optimizer, params)
    return jax.tree.map(place, layout, is_leaf=lambda x: isinstance(x, StateLeaf))


@dataclass(frozen=True)
class StateLeaf:
    """An array of the optimizer's state, and the weight that it lies with.

    Example: the column of Adafactor's mean for a weight [L, D, F]: dims (0, 1).
    """

    shape: jax.ShapeDtypeStruct
    # the path of the weight; None: it belongs to none, as a counter does
    weight: tuple[str, ...] | None
    # the dims of the weight that the array has
    dims: tuple[int, ...] = ()


def state_layout(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """The optimizer's state as StateLeafs; params: arrays, or anything with shape and dtype."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    by_path = {path: p.shape for path, p in _by_path(shapes)}
    # optax makes small arrays, here and not on a mesh that may not be there
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        state = jax.eval_shape(optimizer.init, shapes)

    def of(place: tuple, leaf: jax.ShapeDtypeStruct) -> StateLeaf:
        names = _names(place)
        suffixes = (names[i:] for i in range(len(names)))
        weight = next((suffix for suffix in suffixes if suffix in by_path), None)
        dims = None if weight is None else _dims_kept(by_path[weight], leaf.shape, names)
        return StateLeaf(leaf, None) if dims is None else StateLeaf(leaf, weight, dims)

    return jax.tree_util.tree_map_with_path(of, state)


def _dims_kept(
    whole: tuple[int, ...], part: tuple[int, ...], names: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Finds the dims of a weight that an array beside it has: all, or all but one (Adafactor);
    None: it has none of them."""
    every = tuple(range(len(whole)))
    if part == whole:
        return every
    left_out = [d for d in every if whole[:d] + whole[d + 1 :] == part]
    if not left_out:
        return None
    # Of two dims of one size, optax's row leaves out the last of the largest, its column the other.
    drop = left_out[-1] if "v_row" in names else left_out[0]
    return tuple(d for d in every if d != drop)


def _by_path(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    return [(_names(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _names(path: tuple) -> tuple[str, ...]:
    """The keys and attributes along a path, as text."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def apply_update(
    optimizer: optax.GradientTransformation, grads: Params, state: TrainState, seed: int
) -> tuple[tuple[Params, Any], jax.Array]:
    """(the new params, the new state of the optimizer), and the norm of the change. It is computed
    in float32; `seed` is that of rounding to the types of the old ones."""
    params = widen(state.params)
    updates, opt_state = optimizer.update(widen(grads), widen(state.opt_state), params)
    new = optax.apply_updates(params, updates), opt_state
    if dtypes(new) != dtypes((state.params, state.opt_state)):
        new = round_to_kept(new, state, seed)
    return new, optax.tree.norm(updates)


def dtypes(tree: Any) -> list[np.dtype]:
    """The type of each array of a tree."""
    return [x.dtype for x in jax.tree.leaves(tree)]


def round_to_kept(new: tuple[Params, Any], state: TrainState, seed: int) -> tuple[Params, Any]:
    """New params and a new state of the optimizer in the types of the old ones.

    What is kept in bfloat16 (training.mixed_precision=bf16_params) is rounded stochastically: up or
    down at random, to the nearer with the higher probability. Rounded to the nearest, an update of
    less than half a last digit would never arrive. The random numbers come from (seed, step), so
    that they are the same on every mesh.
    """
    key = jax.random.fold_in(jax.random.key(seed), ROUNDING)
    old_leaves = jax.tree.leaves((state.params, state.opt_state))
    leaves, form = jax.tree.flatten(new)
    keys = [jax.random.fold_in(jax.random.fold_in(key, state.step), i) for i in range(len(leaves))]
    rounded = [round_by_chance(x, old.dtype, k) for x, old, k in zip(leaves, old_leaves, keys)]
    return form.unflatten(rounded)


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


def learning_rate_at(cfg: LearningRateConfig, max_steps: int, step: int) -> float:
    """The rate that update number `step` (from 0) used."""
    return float(np.float32(make_schedule(cfg, max_steps)(step)))
