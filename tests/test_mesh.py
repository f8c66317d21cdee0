"""The mesh does not matter: same tokens, losses and gradients; each device holds its share."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import collect
from conftest import ragged_prompts, random_params, set_mesh

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.basics.types import Graded, TrainState
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import decoder, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.parallel.mesh import check_mesh_shape, make_mesh, put, resolve_mesh_shape, spec
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig

CFG = Architecture(64, 1, 64, 4, 1, 16, 128, pattern=("local",), window=6, query_scale=16)
STEPS = 2


class EvenTask:
    """The reward is the share of even tokens: no tokenizer, no text."""

    def prompts(self, examples):
        return ragged_prompts(len(examples), CFG.vocab_size)

    def grader(self, group, num_generations=1):
        return SimpleNamespace(submit=lambda row, tokens: None, results=self.results)

    def partner(self, examples, num_generations=1):
        return None

    def results(self, rollout):
        tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.completion_mask)
        rewards = np.array([np.mean(row[keep] % 2 == 0) for row, keep in zip(tokens, mask)])
        return Graded([], [], rewards, rewards > 0, [], {}, np.zeros(len(rewards), bool))


def run(fsdp: int, tp: int):
    """Two GRPO updates on that mesh: tokens, metrics, final state."""
    set_mesh(fsdp, tp)
    generate = make_generate(CFG, GenerationConfig(10, 8), eos_ids=(1,), pad_id=0)
    params = random_params(CFG, scale=0.1)
    rows = RowLayout(num_micro_batches=2, num_scored=8)
    policy = make_policy(CFG, generate, 1.0, rows=rows, reference=jax.tree.map(jnp.copy, params))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), STEPS)
    state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
    # Plain rewards as advantages: centred ones make a loss of zero, of which nothing is a small fraction.
    algorithm = GRPO(num_generations=4, kl_coef=0.1, advantages=lambda rewards_PG: rewards_PG)
    train_step = TrainStep(policy, algorithm, optimizer)
    tokens, seen = [], []
    for step in range(STEPS):
        key = jax.random.fold_in(jax.random.key(0), step)
        batch, *_ = collect(algorithm, policy, EvenTask(), state.params, [{}] * 4, key)
        state, metrics = train_step(state, None, rows.lay_out(batch)[0])
        tokens.append(np.asarray(batch.tokens))
        seen.append({name: float(value) for name, value in metrics.items()})
    return tokens, seen, state


@pytest.fixture(scope="module")
def alone():
    return run(1, 1)


@pytest.mark.parametrize("fsdp, tp", [(2, 2), *(pytest.param(*m, marks=pytest.mark.wide) for m in [(4, 1), (1, 4)])])
def test_sharded_equals_unsharded(alone, fsdp, tp):
    tokens, seen, state = run(fsdp, tp)
    for step in range(STEPS):
        np.testing.assert_array_equal(tokens[step], alone[0][step])
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert abs(alone[1][step][name]) > 0.05
            np.testing.assert_allclose(seen[step][name], alone[1][step][name], rtol=1e-4)
        np.testing.assert_allclose(seen[step]["train/kl"], alone[1][step]["train/kl"], rtol=1e-2, atol=1e-6)
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.params)]) for s in (state, alone[2]))
    assert np.linalg.norm(a - b) < 5e-5 * np.linalg.norm(b)  # Adam divides small differences by small numbers
    for name, part in (("parameters", state.params), ("optimizer", state.opt_state)):
        share = bytes_on_first_device(part) / sum(x.nbytes for x in jax.tree.leaves(part))
        assert share < 0.25 * 1.25, f"{name}: {share:.3f} of the bytes on one of four devices"


def bytes_on_first_device(tree) -> int:
    device = jax.devices()[0]
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device)


def test_random_weights_do_not_depend_on_the_mesh():
    table = decoder.weights(CFG)
    table = {"embed": table["embed"], "layers": {name: table["layers"][name] for name in ("q", "down")}}
    made = []
    for shape in ((1, 1), (2, 2)):
        set_mesh(*shape)
        made.append(jax.tree.map(np.asarray, weights.init_params(table, jax.random.key(0))))
    jax.tree.map(np.testing.assert_array_equal, *made)


def test_specs_follow_the_rules():
    mesh = set_mesh(2, 2)
    P = jax.sharding.PartitionSpec
    assert spec(("embed", "heads", "head_dim"), (8, 4, 4), mesh) == P("fsdp", "tp", None)
    assert spec(("layers", "mlp", "embed"), (3, 6, 8), mesh) == P(None, "tp", "fsdp")
    assert spec(("embed", "kv_heads", "head_dim"), (8, 1, 4), mesh) == P("fsdp", None, None)  # every shard needs it
    with pytest.raises(ValueError, match=r"heads=3 is not a multiple of the mesh's tp=2; tp could be 1, 3"):
        spec(("embed", "heads", "head_dim"), (8, 3, 4), mesh)


@pytest.mark.parametrize(
    "shape, devices, sizes",
    [
        ([[-1, 1], ["fsdp", "tp"]], 8, (8, 1)),
        ([[4, -1], ["fsdp", "tp"]], 8, (4, 2)),
        ([[2, 2], ["tp", "fsdp"]], 4, (2, 2)),
        ([[1, 1], ["fsdp", "tp"]], 4, (1, 1)),
        ([[2], ["tp"]], 3, (1, 2)),
    ],
)
def test_mesh_shapes_resolve(shape, devices, sizes):
    assert tuple(resolve_mesh_shape(shape, devices).values()) == sizes


@pytest.mark.parametrize(
    "shape, message",
    [
        ([[4, 1], ["fsdp"]], "list of sizes and a list of as many names"),
        ([[4, 1], ["fsdp", "model"]], "unknown axis 'model'"),
        ([[-1, -1], ["fsdp", "tp"]], "at most one -1"),
        ([[0, 1], ["fsdp", "tp"]], "must be 1 or more"),
    ],
)
def test_mesh_shapes_that_cannot_be_read(shape, message):
    with pytest.raises(ValueError, match=message):
        check_mesh_shape(shape)


@pytest.mark.parametrize(
    "sizes, needs, pretends",
    [((8, 2), "[[8,2],[fsdp,tp]] needs 16 devices", True), ((-1, 3), "needs a multiple of 3 devices", False)],
)
def test_a_mesh_that_does_not_fit_names_both_numbers_and_one_that_does(sizes, needs, pretends):
    fits = ", but jax sees 4; 'model.mesh_shape=[[2,2],"
    with pytest.raises(ValueError, match=re.escape(needs + fits)) as told:
        make_mesh((sizes, ("fsdp", "tp")))
    pretend = "; JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=16 before the command pretends"
    assert (pretend in str(told.value)) == pretends == ("pretend" in str(told.value))
