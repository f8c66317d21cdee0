"""One update of a tiny model, however it is divided: its gradient, its metrics and its compiled program."""

from dataclasses import dataclass, field, replace
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.basics.types import Batch, TrainState
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import decoder, lora
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.lora import LoraConfig
from tunix_lite.parallel.mesh import ShardingConfig, axis_size, make_mesh, put, set_rules

SEQUENCES, PROMPT, NEW = 16, 10, 22
# A lane with a column more than is needed, or eight devices would not divide the row where they divide its columns.
SHAPES = {"none": None, "sequences": RowShape(PROMPT + NEW), "prefix": RowShape(NEW + 1, 2, PROMPT)}
# compiles in half the time; a later XLA may not know it
FAST = {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}


@dataclass(frozen=True)
class Model:
    """What is trained, and how it is scored."""

    cfg: Architecture
    temperature: float = 1.0
    lora: LoraConfig | None = None

    def arrays(self):
        """Random weights of the host, large enough that the model has opinions: (what trains, the frozen base)."""
        base = random_arrays(decoder.weights(self.cfg), 0)
        if self.lora is None:
            return base, None
        return random_arrays(lora.adapter_weights(decoder.weights(self.cfg), self.lora), 1), base


def random_arrays(table, seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), table)


PLAIN = Architecture(56, 2, 16, 8, 2, 4, 32, pattern=("local", "global"), window=5, query_scale=9)
CAPPED = replace(PLAIN, attn_softcap=1.5, final_softcap=4.0)
MODELS = {
    "plain": Model(PLAIN),
    "head": Model(replace(CAPPED, tied=False), temperature=0.7),
    "adapters": Model(CAPPED, temperature=0.7, lora=LoraConfig(rank=2, alpha=3.0)),
}


@dataclass(frozen=True)
class Way:
    """How an update is divided. None of it may change what comes out."""

    fsdp: int = 1
    tp: int = 1
    parts: int = 1
    packing: str = "none"
    remat: str = "none"
    scan_layers: bool = True
    sync_every: int = 1
    rules: dict = field(default_factory=dict)
    wide: bool = False  # float64
    reduce_dtype: str | None = None  # computed in bfloat16, gradients summed over fsdp in this; None: as `wide` says
    stored: str = "float32"  # what trains


@dataclass
class Updated:
    grads: dict  # arrays on the mesh
    metrics: dict
    compiled: jax.stages.Compiled
    bytes_of_state: int  # on the first device


def rows_of(way: Way) -> RowLayout:
    per_part = SEQUENCES // (axis_size("fsdp") * way.parts)  # as many rows as sequences: some stay empty
    return RowLayout(way.packing, way.parts, NEW, SHAPES[way.packing], per_part)


WITH_KL = GRPO(kl_coef=0.1)


def update(model: Model, way: Way, batch: Batch, devices=None, algorithm=WITH_KL, prepare=None) -> Updated:
    """One step of training with an optimizer that keeps the gradient as its state.

    prepare: (policy, rows, batch) -> policy and batch, once there is a mesh; None: both stay."""
    dtype = jnp.float64 if way.wide else jnp.dtype(way.stored)
    computed = dtype if way.reduce_dtype is None else jnp.bfloat16
    jax.set_mesh(make_mesh(((way.fsdp, way.tp), ("fsdp", "tp")), devices))
    set_rules(ShardingConfig(train=way.rules))
    table = decoder.weights(model.cfg)
    trained, frozen = model.arrays()
    params = placed(trained, table if frozen is None else lora.adapter_weights(table, model.lora), dtype)
    frozen = None if frozen is None else placed(frozen, table, dtype)
    optimizer = optax.chain(optax.trace(0.0), optax.scale(0.0))
    kept = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), params)
    state = TrainState(put(np.int32(0)), params, (optax.TraceState(kept), optax.EmptyState()))
    rows = rows_of(way)
    reduced = {} if way.reduce_dtype is None else {"reduce_dtype": jnp.dtype(way.reduce_dtype)}
    forward = {"remat": way.remat, "scan_layers": way.scan_layers, **reduced}
    policy = make_policy(model.cfg, None, model.temperature, computed, rows=rows, **forward)
    policy, batch = (policy, batch) if prepare is None else prepare(policy, rows, batch)
    step = TrainStep(policy, algorithm, optimizer, model.lora, sync_every=way.sync_every)
    floats = jnp.float64 if way.wide else jnp.float32
    laid_out, _ = rows.lay_out(jax.tree.map(lambda x: x.astype(floats) if x.dtype == np.float32 else x, batch))
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    compiled = step.program(state, frozen, laid_out).lower(state, frozen, laid_out).compile(compiler_options=FAST)
    new, metrics = compiled(state, frozen, laid_out)
    return Updated(new.opt_state[0].trace, {name: float(x) for name, x in metrics.items()}, compiled, size)


def placed(arrays, table, dtype):
    lay = lambda w, x: put(x.astype(dtype), *w.axes)  # noqa: E731
    return jax.tree.map(lay, table, arrays)
