"""What an update sends, in the programs that the compilers of TPUs and GPUs make of it: as much as theory says."""

import importlib.util
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.basics.types import RowBatch, TrainState
from tunix_lite.learner.optim import OptimizerConfig, make_optimizer, opt_state_shapes
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.collectives import collectives
from tunix_lite.parallel.mesh import make_mesh, sharding
from tunix_lite.planning.hardware import COMPILERS, devices_of, find_machine

CFG = Architecture(4096, 8, 512, 8, 4, 128, 2048, window=128, query_scale=128)
SEQUENCES, WIDTH, NEW = 8, 256, 128
SMALL = 1e5  # bytes: norms, metrics, and what XLA passes around at the edges
LAYER = 2 * (512 * 8 * 128 * 2 + 512 * 4 * 128 * 2 + 3 * 512 * 2048)  # bytes of a layer's projections in bfloat16
TABLE = 2 * 4096 * 512


def compiled_for(target, fsdp, tp, remat, reduce_dtype="float32", stored="bfloat16", tp_reduce_dtype="float32"):
    """The update in bfloat16, compiled for four devices that are not there: its collectives."""
    found = find_machine(target)
    if not any(importlib.util.find_spec(module) for module in COMPILERS[found.hardware.platform]):
        pytest.skip(f"the compiler for {target} is not installed")
    mesh = make_mesh(((fsdp, tp), ("fsdp", "tp")), devices_of(found))
    with jax.set_mesh(mesh):
        params = weights.shapes(decoder.weights(CFG), jnp.dtype(stored))
        optimizer = make_optimizer(OptimizerConfig(), 10)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding((), ()))
        state = TrainState(step, params, opt_state_shapes(optimizer, params))

        def rows(dtype, columns=WIDTH):
            shape = (SEQUENCES, columns)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(("batch", "seq"), shape))

        floats = {name: rows(jnp.float32) for name in ("loss_weight", "advantages", "old_logprobs")}
        ints = {name: rows(jnp.int32) for name in ("tokens", "segment_ids", "positions")}
        batch = RowBatch(**floats, **ints, token_mask=rows(jnp.bool_), is_scored=rows(jnp.bool_, NEW))
        scoring = {"rows": RowLayout(num_scored=NEW), "remat": remat, "reduce_dtype": jnp.dtype(reduce_dtype)}
        scoring["tp_reduce_dtype"] = jnp.dtype(tp_reduce_dtype)
        policy = make_policy(CFG, None, 1.0, jnp.bfloat16, **scoring)
        arguments = state, None, batch
        program = TrainStep(policy, GRPO(), optimizer).program(*arguments).lower(*arguments).compile()
    return SimpleNamespace(found=collectives(program.as_text(), dict(mesh.shape)), memory=program.memory_analysis())


def total(found, kinds, axis, in_loop=None) -> int:
    chosen = (c for c in found if c.kind in kinds and c.axis == axis and c.num_bytes > SMALL)
    return sum(c.total_bytes for c in chosen if in_loop is None or c.in_loop == in_loop)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e-4", "h100x4"])
@pytest.mark.parametrize(
    "reduce_dtype, stored",
    [
        ("float32", "float32"),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.wide),
    ],
)
def test_over_fsdp_each_weight_is_gathered_layer_by_layer_and_each_gradient_reduced_once(target, reduce_dtype, stored):
    """A layer's weights once forward and once backward (remat=block needs them there anyway), and the table of scores
    the same; gradients once, in their divided form, the layers' in training.reduce_dtype. Nothing but the lookup of
    tokens reaches a whole stack."""
    update = compiled_for(target, 4, 1, "block", reduce_dtype, stored)
    in_layers = {"float32": 2 * LAYER, "bfloat16": LAYER}[reduce_dtype]
    gathered = total(update.found, ("all-gather",), "fsdp", in_loop=True)
    assert gathered == pytest.approx(2 * (CFG.num_layers * LAYER + TABLE), rel=0.1)
    # A TPU may pass a gradient round in pieces while it is computed: all that moves is then n - 1 of n pieces.
    pieces = total(update.found, ("collective-permute",), "fsdp") * 4 / 3
    reduced = total(update.found, ("reduce-scatter", "all-reduce"), "fsdp", in_loop=True) + pieces
    low, high = CFG.num_layers * in_layers + TABLE, CFG.num_layers * in_layers + 2 * TABLE  # the table's: in float32
    assert 0.9 * low < reduced < 1.1 * high
    scattered = [c.shapes for c in update.found if c.kind == "reduce-scatter" and c.in_loop]
    types = {kind for shapes in scattered for kind in re.findall(r"[a-z]+\d+", shapes)}
    assert types <= ({"f32"} if reduce_dtype == "float32" else {"f32", "bf16"})
    stack = CFG.num_layers * 2 * 512 * 2048  # bytes of the smallest stack of matrices of the feed-forward
    assert not [c for c in update.found if c.kind == "all-gather" and c.num_bytes >= stack]


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e-4", "h100x4"])
@pytest.mark.parametrize(
    "remat, forward, tp_reduce_dtype, width", [("dots", 1, "float32", 2), ("block", 2, "bfloat16", 1)]
)
def test_over_tp_a_layer_sums_twice_each_way(target, remat, forward, tp_reduce_dtype, width):
    """After attention and after the feed-forward, in training.tp_reduce_dtype, and in the backward pass before them, in
    bfloat16; remat=block makes the forward pass again, with both of its sums. Nothing else in the loop over layers goes
    over tp."""
    update = compiled_for(target, 1, 4, remat, tp_reduce_dtype=tp_reduce_dtype)
    residual = 2 * SEQUENCES * WIDTH * CFG.embed_dim  # bytes, in bfloat16
    summed = total(update.found, ("all-reduce",), "tp", in_loop=True)
    halves = total(update.found, ("reduce-scatter", "all-gather"), "tp", in_loop=True) / 2
    assert summed + halves == (2 * width * forward + 2) * CFG.num_layers * residual
    assert update.memory.alias_size_in_bytes > 0.95 * update.memory.output_size_in_bytes
