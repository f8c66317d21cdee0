"""One update: loss -> `gradients` -> `apply` -> new state. A run compiles both as one program; the
clients of a Trainer compile each by itself (training_clients/programs.py)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import Algorithm, LossAndMetrics, Policy
from tunix_lite.basics.types import Metrics, Params, RowBatch, TrainState
from tunix_lite.learner.micro_batches import Sums, accumulate
from tunix_lite.learner.routing import (
    EXPERTS,
    LOAD,
    NUM_TOKENS,
    ExpertSums,
    RouterLoss,
    with_expert_metrics,
)
from tunix_lite.models.lora import LoraConfig, acting_params
from tunix_lite.models.unfused import unfused
from tunix_lite.models.vocabulary import gradients_added
from tunix_lite.parallel.compiler_options import (
    MANY_WEIGHTS,
    OptionsByPlatform,
    options_of_mesh,
)
from tunix_lite.parallel.compiling import compiled_once

# folded into the seed, so that dropout and sampling share no numbers
DROPOUT = 0xD0
# and rounding
ROUNDING = 0x70D

# numbers of a weight's change that a CPU holds at once for their norm
_AT_ONCE = 2**27

# (optimizer, state, gradients, loss) -> (new state, metrics)
Apply = Callable[..., tuple[TrainState, Metrics]]


@dataclass(frozen=True, eq=False)
class TrainStep:
    """An update, compiled once for arguments of one shape: (state, frozen, batch) -> (state,
    metrics).

    The old state is donated. `frozen` is the base under adapters (None: all weights train); it
    stays. An update whose loss, gradient or change is not finite is not made, on all devices alike:
    train/skipped is 1 then.
    Example: state, metrics = train_step(state, None, rows.lay_out(batch)[0])."""

    policy: Policy
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    lora: LoraConfig | None = None  # the adapters that train; None: all weights do
    seed: int = 0  # of the adapters' dropout and of rounding
    sync_every: int = 1  # micro-batches after which the gradient crosses the mesh
    compiler_options: OptionsByPlatform = field(default_factory=dict)
    # losses of the routers; None: none is added
    router_loss: RouterLoss | None = None

    def __call__(
        self, state: TrainState, frozen: Params | None, batch: RowBatch
    ) -> tuple[TrainState, Metrics]:
        return self.compile(state, frozen, batch)(state, frozen, batch)

    @functools.cached_property
    def compile(self) -> Callable[..., jax.stages.Compiled]:
        """(state, frozen, batch), arrays or their shapes -> the compiled program, which is kept."""
        return compiled_once(lambda *arguments: self.program(*arguments).lower(*arguments))

    def program(
        self, state: TrainState, frozen: Params | None, batch: RowBatch
    ) -> jax.stages.Wrapped:
        """Returns the jitted function for these arguments, or for their shapes."""
        shardings = jax.tree.map(lambda x: x.sharding, (state, frozen, batch))
        # the new state lies where the old one did
        of_state = shardings[0]
        return jax.jit(
            partial(
                self.update, grad_shardings=of_state.params, apply=apply_for(state, self.seed)
            ),
            in_shardings=shardings,
            out_shardings=(of_state, None),
            donate_argnums=0,
            compiler_options=options_of_mesh(self.compiler_options),
        )

    def update(
        self,
        state: TrainState,
        frozen: Params | None,
        batch: RowBatch,
        grad_shardings: Any,
        apply: Apply,
    ) -> tuple[TrainState, Metrics]:
        """The update itself, traced inside of jit. grad_shardings: where each gradient lies. apply:
        as `apply_for` gives it."""
        grads, metrics = self.gradients(
            state.params, frozen, state.step, batch, grad_shardings
        )
        state, moved = apply(self.optimizer, state, grads, metrics["train/loss"])
        return state, metrics | moved

    def gradients(
        self,
        params: Params,
        frozen: Params | None,
        number: jax.Array,
        batch: RowBatch,
        grad_shardings: Any,
    ) -> Sums:
        """The gradient of the whole batch and its metrics, inside of jit: sums over micro-batches,
        as loss_weight is normalised. number: of the update, which dropout depends on.
        grad_shardings: where each gradient lies."""
        if self.lora and self.lora.dropout:
            batch = self.with_dropout(batch, number)
        if self.router_loss is not None:
            batch = self.with_router_totals(params, frozen, batch)

        # Where it can be, each gradient is added to its sum as it arises: otherwise both would be
        # there at once. bfloat16 is not summed in its own type, and `sync_every` sums by shard.
        total = None
        types = [x.dtype for x in jax.tree.leaves(params)]
        is_one_sum = batch.max_micro_batches > 1 and self.sync_every == 1
        if is_one_sum and jnp.bfloat16 not in types:
            zeros = jax.tree.map(jnp.zeros_like, params)
            zeros = jax.lax.with_sharding_constraint(zeros, grad_shardings)
            total = jax.tree.map(jax.new_ref, zeros)

        def gradient(rows: RowBatch) -> Sums:
            def loss(params: Params) -> LossAndMetrics:
                with gradients_added(params, total):
                    return self.objective(params, frozen, rows)

            value, pull, metrics = jax.vjp(loss, params, has_aux=True)
            one = jnp.ones_like(value)
            if total is None:
                return pull(one)[0], metrics
            pull.with_refs(total)(one)
            return None, metrics

        places = grad_shardings if total is None else None
        grads, metrics = accumulate(gradient, batch, places, self.sync_every)
        grads = grads if total is None else jax.tree.map(jax.freeze, total)
        # of a complex weight, jax gives the conjugate of the direction in which the loss rises
        grads = jax.tree.map(jnp.conj, grads)
        return grads, with_expert_metrics(metrics) if EXPERTS in metrics else metrics

    def objective(
        self, params: Params, frozen: Params | None, batch: RowBatch
    ) -> LossAndMetrics:
        """The loss of a micro-batch, and its metrics."""
        acting = acting_params(frozen, params, self.lora, batch.dropout_keys)
        scores = self.policy.scores(acting, batch)
        loss, metrics = self.algorithm.loss(scores, batch)
        if scores.experts is not None:
            loss, metrics = self.with_routers(loss, metrics, scores.experts, batch)
        ours = {"train/loss": loss}
        if scores.entropy is not None:
            ours["train/entropy"] = jnp.sum(batch.loss_weight * scores.entropy)
        return loss, ours | metrics

    def with_routers(
        self, loss: jax.Array, metrics: Metrics, sums: ExpertSums, batch: RowBatch
    ) -> LossAndMetrics:
        """Adds the losses of the routers, if there are some, and what their metrics are made of."""
        if self.router_loss is not None:
            loss += self.router_loss(sums, batch.constants)
        return loss, {**metrics, EXPERTS: jax.lax.stop_gradient(sums)}

    def with_dropout(self, batch: RowBatch, number: jax.Array) -> RowBatch:
        """The batch with a key per sequence, so that what is dropped does not depend on
        micro-batches or the mesh."""
        key = jax.random.fold_in(jax.random.key(self.seed), DROPOUT)
        key = jax.random.fold_in(key, number)
        rows = jnp.arange(len(batch.tokens))
        keys_R = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
        return batch.replace(dropout_keys=keys_R)

    def with_router_totals(
        self, params: Params, frozen: Params | None, batch: RowBatch
    ) -> RowBatch:
        """The batch with what the losses of routers need of all of it, as constants."""

        def load_of(rows: RowBatch) -> Sums:
            acting = acting_params(frozen, params, self.lora, rows.dropout_keys)
            return None, {LOAD: self.policy.scores(acting, rows).experts.load}

        # The busy experts of a batch are known only once all of it was routed: one more forward
        # pass, unless a micro-batch is all of it.
        totals = {}
        if batch.max_micro_batches > 1 and self.router_loss.aux_coef:
            totals = accumulate(load_of, batch, None, self.sync_every)[1]
        totals[NUM_TOKENS] = jnp.sum(batch.segment_ids > 0, dtype=jnp.float32)
        return batch.with_constants((batch.constants or {}) | totals)

    @functools.cached_property
    def compile_metrics(self) -> Callable[..., jax.stages.Compiled]:
        """(params, frozen, batch), arrays or their shapes -> the program of `metrics`, which is
        kept."""
        options = options_of_mesh(self.compiler_options)
        return compiled_once(jax.jit(self.metrics, compiler_options=options).lower)

    def metrics(self, params: Params, frozen: Params | None, batch: RowBatch) -> Metrics:
        """The metrics of a batch, its loss among them, inside of jit: without dropout, and nothing
        is updated."""
        if self.router_loss is not None:
            batch = self.with_router_totals(params, frozen, batch)

        def of_part(rows: RowBatch) -> Sums:
            return None, self.objective(params, frozen, rows)[1]

        _, metrics = accumulate(of_part, batch)
        return with_expert_metrics(metrics) if EXPERTS in metrics else metrics


def apply(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Params, loss: jax.Array
) -> tuple[TrainState, Metrics]:
    """The state after an update with these gradients, in float32, inside of jit. Where the loss, a
    gradient or the change is not finite nothing moves, not even the optimizer's moments; only the
    step is counted."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    is_finite, metrics = _norms_of(grads, updates, loss)
    params = optax.apply_updates(state.params, updates)
    moved = state.replace(params=params, opt_state=opt_state)
    new = jax.tree.map(partial(jnp.where, is_finite), moved, state)
    return new.replace(step=state.step + 1), metrics


def apply_in_place(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Params, loss: jax.Array
) -> tuple[TrainState, Metrics]:
    """`apply` with less memory on a CPU, where XLA would keep all changes and new moments until it
    is known whether they are finite. Here it makes the changes part by part, for their norm
    alone, and makes them again in place: the optimizer is traced three times or more."""

    def on_cpu(
        state: TrainState, grads: Params, loss: jax.Array
    ) -> tuple[TrainState, Metrics]:
        # The changes, for their norm: of each weight as many parts as the largest needs.
        count = -(-max(x.size for x in jax.tree.leaves(grads)) // _AT_ONCE)

        def part(i: int, u: jax.Array) -> jax.Array:
            return unfused(jnp.array_split(jnp.atleast_1d(u), count)[i])

        parts = []
        after = loss
        for i in range(count):
            # Of the same moments as before XLA would compute, and keep, whole changes once.
            opt_state, _ = unfused((state.opt_state, after))
            updates, _ = optimizer.update(grads, opt_state, state.params)
            parts.append(jax.tree.map(partial(part, i), updates))
            after = optax.tree.norm(parts[-1])
        is_finite, metrics = _norms_of(grads, parts, loss)

        def moved(is_finite: jax.Array) -> TrainState:
            # Of the same gradients as above XLA would compute, and keep, the changes once.
            grads_again, _ = unfused((grads, is_finite))
            updates, opt_state = optimizer.update(grads_again, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new = state.replace(params=params, opt_state=opt_state)
            return jax.tree.map(partial(jnp.where, is_finite), new, state)

        # First the weights, then the moments, which the weights read.
        params, after = unfused((moved(is_finite).params, is_finite))
        new = moved(after).replace(params=params)
        return new.replace(step=state.step + 1), metrics

    elsewhere = partial(apply, optimizer)
    return jax.lax.platform_dependent(state, grads, loss, cpu=on_cpu, default=elsewhere)


def _norms_of(grads: Params, updates: Params, loss: jax.Array) -> tuple[jax.Array, Metrics]:
    """Whether an update is made, and its metrics."""
    norm = optax.tree.norm(grads)
    size = optax.tree.norm(updates)
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss) & jnp.isfinite(size)
    return is_finite, {
        "train/grad_norm": norm,
        "train/update_norm": jnp.where(is_finite, size, 0.0),
        "train/skipped": 1.0 - is_finite,
    }


def apply_for(state: TrainState, seed: int) -> Apply:
    """`apply`, or `apply_in_place` of many weights. For a state with arrays in bfloat16
    (training.mixed_precision=bf16_params) one that rounds them by chance: to the nearest, an update
    of less than half a last digit would never arrive. The numbers come from (seed, step), the same
    on every mesh; what has not moved is exact, and stays."""
    num_weights = sum(x.size for x in jax.tree.leaves(state.params))
    # In place it takes more kernels, traffic and collectives, as benchmarks/gate.py counts.
    change = apply_in_place if num_weights >= MANY_WEIGHTS else apply
    if all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(state)):
        return change

    def in_bfloat16(
        optimizer: optax.GradientTransformation,
        state: TrainState,
        grads: Params,
        loss: jax.Array,
    ) -> tuple[TrainState, Metrics]:
        moved, metrics = change(optimizer, widen(state), widen(grads), loss)
        leaves, form = jax.tree.flatten((moved.params, moved.opt_state))
        types = [x.dtype for x in jax.tree.leaves((state.params, state.opt_state))]
        key = jax.random.fold_in(jax.random.key(seed), ROUNDING)
        key = jax.random.fold_in(key, state.step)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        params, opt_state = form.unflatten(map(round_by_chance, leaves, types, keys))
        return moved.replace(params=params, opt_state=opt_state), metrics

    return in_bfloat16


def widen(tree: Any) -> Any:
    """Arrays of bfloat16 as float32; all others as they are."""

    def in_float32(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    return jax.tree.map(in_float32, tree)


def round_by_chance(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """x as dtype. bfloat16 is the upper half of float32, and the lower half gives the probability
    of rounding up."""
    if x.dtype != jnp.float32 or dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = (bits + (jax.random.bits(key, x.shape, jnp.uint16)).astype(jnp.uint32)) >> 16
    rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(dtype))
