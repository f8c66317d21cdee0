"""Schedules by hand; each optimizer against numpy in float64 or optax; its state, its bytes, its settings."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import TrainState
from tunix_lite.learner.optim import (
    AdafactorConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    describe,
    init_opt_state,
    learning_rates,
    make_optimizer,
    num_updates,
    opt_state_shapes,
    scaled_for,
)
from tunix_lite.learner.update import apply
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.source import locate
from tunix_lite.models.weights import Weight
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.runs.fingerprint import check_same_run, fingerprint
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import abstract, mesh_of_run, optimizer_of
from tunix_lite.settings.resolved_run import find_model, resolve_run
from tunix_lite.tracking.checkpoint import Checkpoints


def rates(max_steps=11, **settings):
    cfg = OptimizerConfig(learning_rate=1.0, **settings)
    return [*map(learning_rates(cfg, max_steps), range(max_steps))]


def test_schedules_by_hand():
    """As transformers and optax: the end is one update after the last, so that the last one still learns."""
    np.testing.assert_allclose(rates(), 1.0)
    part = np.arange(11) / 11
    np.testing.assert_allclose(rates(schedule="linear", end_fraction=0.5), 1 - part / 2, atol=1e-6)
    np.testing.assert_allclose(rates(schedule="cosine"), (1 + np.cos(np.pi * part)) / 2, atol=1e-6)
    # two updates of warm-up, the second at the peak; then 4/5, 3/5, 2/5, 1/5
    np.testing.assert_allclose(rates(6, schedule="linear", warmup_steps=2), [0.5, 1, 0.8, 0.6, 0.4, 0.2], atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 20])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_schedule_spans_the_run(schedule, warmup):
    """Tunix D10: a shipped decay over 10 steps left the rest of every run at learning rate 0. The peak is there once."""
    seen = np.array(rates(max_steps=500, schedule=schedule, warmup_steps=warmup))
    assert 0 < seen[-1] < 0.003 and seen.max() == 1
    assert np.flatnonzero(seen == 1).tolist() == [max(warmup, 1) - 1]


def test_the_chain_equals_adamw_in_float64():
    cfg = OptimizerConfig(learning_rate=0.1, schedule="linear", weight_decay=0.3, max_grad_norm=1.0, beta2=0.9)
    optimizer = make_optimizer(cfg, max_steps=5)
    params = {"layer": {"q": jnp.array([1.0, -2.0]), "q_norm": jnp.array([0.5])}}
    state = optimizer.init(params)
    x, m, v = np.array([1.0, -2.0, 0.5]), np.zeros(3), np.zeros(3)
    rng = np.random.default_rng(0)
    for step in range(5):
        g = rng.normal(size=3) * 3
        grads = {"layer": {"q": jnp.array(g[:2], jnp.float32), "q_norm": jnp.array(g[2:], jnp.float32)}}
        updates, state = optimizer.update(grads, state, params)
        params = {"layer": {k: params["layer"][k] + updates["layer"][k] for k in ("q", "q_norm")}}
        g = g / max(1.0, np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g**2
        direction = (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.9 ** (step + 1))) + 1e-8)
        decay = np.array([0.3, 0.3, 0.0]) * x  # norms do not decay
        x = x - 0.1 * (1 - step / 5) * (direction + decay)
    np.testing.assert_allclose(np.concatenate([params["layer"]["q"], params["layer"]["q_norm"]]), x, rtol=1e-5)


# ---- each optimizer


OPTIMIZERS = ("default", "adafactor", "muon", "lion", "sgd")
# q: 6 inputs, 2 heads of 3; o: the same heads as two dims of inputs
TABLE = {
    "embed": Weight((10, 6), ("vocab", "embed"), inputs=0),
    "head": Weight((6, 10), ("embed", "vocab")),
    "layers": {
        "q": Weight((2, 6, 2, 3), ("layers", "embed", "heads", "head_dim")),
        "o": Weight((2, 2, 3, 8), ("layers", "heads", "head_dim", "embed"), inputs=2),
        "norm": Weight((2, 6), ("layers", "norm"), inputs=0),
    },
}
SHAPES = {path: w.shape for path, w in traverse_util.flatten_dict(TABLE, sep="/").items()}


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {path: scale * rng.normal(size=shape) for path, shape in SHAPES.items()}


def tree(flat):
    return traverse_util.unflatten_dict({k: jnp.asarray(v, jnp.float32) for k, v in flat.items()}, sep="/")


def flat(nested):
    return {k: np.asarray(v, np.float64) for k, v in traverse_util.flatten_dict(nested, sep="/").items()}


def run(cfg, steps=3, table=TABLE):
    """The weights after some updates by `draw(1)`, `draw(2)`, ... from `draw(0)`."""
    optimizer = make_optimizer(cfg, steps, table)
    params = tree(draw(0))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(steps):
        updates, state = update(tree(draw(step + 1)), state, params)
        params = optax.apply_updates(params, updates)
    return flat(params)


def newton_schulz(matrix):
    """Keller Jordan's iteration: X <- a X + (b A + c A A) X with A = X X^T."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize("rms", [0.2, None])
def test_muon_orthogonalises_the_matrix_of_each_layer_and_leaves_the_rest_to_adam(rms):
    rate, decay, mu, steps = 0.01, 0.1, 0.9, 3
    cfg = MuonConfig(learning_rate=rate, momentum=mu, rms=rms, weight_decay=decay, max_grad_norm=0.0)
    found = run(cfg, steps)

    # inputs x outputs of a layer
    matrices = {"layers/q": (6, 6), "layers/o": (6, 8)}
    weights, means = draw(0), {path: np.zeros(shape) for path, shape in SHAPES.items()}
    squares = {path: np.zeros(shape) for path, shape in SHAPES.items()}
    for t in range(1, steps + 1):
        for path, g in draw(t).items():
            w = weights[path]
            if path in matrices:
                means[path] = mu * means[path] + (1 - mu) * g
                ahead = mu * means[path] / (1 - mu ** (t + 1)) + (1 - mu) * g / (1 - mu**t)
                n, m = matrices[path]
                size = np.sqrt(max(n, m)) * rms if rms else np.sqrt(max(1, m / n))
                layers = [newton_schulz(x.reshape(n, m)).reshape(x.shape) for x in ahead]
                weights[path] = w - rate * (size * np.stack(layers) + decay * w)
            else:
                means[path] = 0.9 * means[path] + 0.1 * g
                squares[path] = 0.99 * squares[path] + 0.01 * g**2
                step = (means[path] / (1 - 0.9**t)) / (np.sqrt(squares[path] / (1 - 0.99**t)) + 1e-8)
                weights[path] = w - rate * (step + (0 if path.endswith("norm") else decay) * w)
    for path in SHAPES:
        np.testing.assert_allclose(found[path], weights[path], rtol=2e-4, atol=2e-5, err_msg=path)


def test_muon_takes_both_matrices_of_an_adapter():
    table = adapter_weights(TABLE, LoraConfig(rank=2, targets=".*/(q|o)"))
    optimizer = make_optimizer(MuonConfig(), 3, table)
    params = jax.tree.map(lambda w: jnp.zeros(w.shape), table)
    state = jax.eval_shape(optimizer.init, params)
    # one array a matrix, and none of Adam's two
    sizes = [x.shape for x in jax.tree.leaves(state) if len(x.shape) > 1]
    assert sorted(sizes) == sorted(w.shape for w in jax.tree.leaves(table))


def test_adafactor_on_a_stack_is_optaxs_on_each_layer():
    """optax.adafactor clips and scales a whole leaf: given a leaf a layer, it is the reference."""
    cfg = AdafactorConfig(learning_rate=0.1, min_dim_to_factor=3, momentum=0.5, max_grad_norm=0.0)
    found = run(cfg)
    reference = optax.adafactor(0.1, min_dim_size_to_factor=3, momentum=0.5)

    def by_layer(values):
        apart = {}
        for path, x in values.items():
            parts = list(x) if path.startswith("layers/") else [x]
            apart |= {f"{path}/{i}": jnp.asarray(part, jnp.float32) for i, part in enumerate(parts)}
        return apart

    params = by_layer(draw(0))
    state = reference.init(params)
    update = jax.jit(reference.update)
    for step in range(3):
        updates, state = update(by_layer(draw(step + 1)), state, params)
        params = optax.apply_updates(params, updates)
    for path, x in params.items():
        name, _, layer = path.rpartition("/")
        ours = found[name][int(layer)] if name.startswith("layers/") else found[name]
        np.testing.assert_allclose(ours, x, rtol=1e-5, atol=1e-6, err_msg=path)


def test_lion_and_sgd_by_hand():
    sgd, lion = draw(0), draw(0)
    trace = {path: 0.0 for path in SHAPES}
    means = {path: 0.0 for path in SHAPES}
    for t in range(1, 4):
        for path, g in draw(t).items():
            trace[path] = 0.9 * trace[path] + g
            sgd[path] = sgd[path] - 0.01 * trace[path]
            decay = 0.0 if path.endswith("norm") else 0.1
            lion[path] = lion[path] - 0.01 * (np.sign(0.9 * means[path] + 0.1 * g) + decay * lion[path])
            means[path] = 0.99 * means[path] + 0.01 * g
    of_sgd = run(SGDConfig(learning_rate=0.01, momentum=0.9, max_grad_norm=0.0))
    of_lion = run(LionConfig(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.0))
    for path in SHAPES:
        np.testing.assert_allclose(of_sgd[path], sgd[path], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(of_lion[path], lion[path], rtol=1e-5, atol=1e-6)


# ---- the state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_counts_the_state_as_it_lies_on_a_mesh(name):
    """By formula, and by the shapes that a run makes its state of; adapters, too."""
    for more in ([], ["model.lora.rank=4"], ["training.mixed_precision=bf16_params"]):
        if name == "adafactor":
            more = [*more, "optimizer.min_dim_to_factor=64"]
        settings = compose([f"optimizer={name}", "training.prompts_per_step=16", "training.packing=none", *more])
        resolved = resolve_run(settings, *find_model(settings.model), {"fsdp": 2, "tp": 2}, "cpu")
        with mesh_of_run(resolved, jax.devices()[:4]):
            state = abstract(resolved).state
            arrays = [x for x in jax.tree.leaves(state.opt_state) if x.size > 3]
            counted = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
        assert MemoryEstimate(resolved).resident()["optimizer"] == counted
        moments = {"default": 2, "lion": 1, "sgd": 0}.get(name)
        if moments is not None:
            assert counted == moments * MemoryEstimate(resolved).resident()["parameters"]


@pytest.mark.parametrize(
    "name", ["adafactor", "muon", *(pytest.param(name, marks=pytest.mark.wide) for name in ("default", "lion", "sgd"))]
)
def test_a_checkpoint_of_the_state_goes_on_to_the_bit(name, tmp_path):
    jax.set_mesh(make_mesh(((2, 2), ("fsdp", "tp")), jax.devices()[:4]))
    cfg = compose([f"optimizer={name}", "optimizer.learning_rate=1e-3"]).optimizer
    if name == "adafactor":
        cfg = replace(cfg, min_dim_to_factor=6, momentum=0.5)
    optimizer = make_optimizer(cfg, 9, TABLE)
    axes = traverse_util.flatten_dict(TABLE, sep="/")

    def on_mesh(values):
        placed = {path: put(x.astype(np.float32), *axes[path].axes) for path, x in values.items()}
        return traverse_util.unflatten_dict(placed, sep="/")

    @jax.jit
    def step(state, grads):
        return apply(optimizer, state, grads, jnp.float32(0))[0]

    params = on_mesh(draw(0))
    born = init_opt_state(optimizer, params)
    shapes = opt_state_shapes(optimizer, params)
    for x, declared in zip(jax.tree.leaves(born), jax.tree.leaves(shapes), strict=True):
        assert x.sharding.is_equivalent_to(declared.sharding, x.ndim)
    state = TrainState(put(np.int32(0)), params, born)
    state = step(step(state, on_mesh(draw(1))), on_mesh(draw(2)))
    assert num_updates(state.opt_state) == 2
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.close()
    like = TrainState(put(np.int32(0)), params, shapes)
    restored = Checkpoints(tmp_path).restore(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    )
    for x, y in zip(jax.tree.leaves(step(state, on_mesh(draw(3)))), jax.tree.leaves(step(restored, on_mesh(draw(3))))):
        np.testing.assert_array_equal(x, y)


# ---- settings


@pytest.mark.parametrize(
    "overrides, named",
    [
        (["optimizer=sgd", "optimizer.beta1=0.5"], "optimizer.beta1"),
        (["optimizer=adam"], "adafactor, adamw, default, lion, muon, sgd"),
        (["optimizer=muon", "optimizer.ns_steps=0"], "ns_steps=0"),
        (["optimizer=adafactor", "optimizer.decay_rate=0"], "decay_rate"),
    ],
)
def test_a_setting_that_an_optimizer_does_not_have_is_refused(overrides, named):
    with pytest.raises(ConfigError, match=named) as refused:
        compose(overrides)
    assert "\n" not in str(refused.value)


def test_the_learning_rate_is_scaled_with_the_shards_of_the_batch_only_when_asked():
    plain = compose(["optimizer.learning_rate=4e-5"]).optimizer
    assert scaled_for(plain, 4) is plain and "shards" not in describe(plain, 4)
    asked = replace(plain, learning_rate=1e-4, scale_lr_with_devices=True)
    assert learning_rates(scaled_for(asked, 4), 60)(4) == pytest.approx(4e-4)
    assert "0.0001 x 4 shards = 0.0004 constant" in describe(asked, 4)
    settings = compose(["optimizer.scale_lr_with_devices=true", "training.packing=none"])
    resolved = resolve_run(settings, *find_model(settings.model), {"fsdp": 4, "tp": 2}, "cpu")
    assert resolved.optimizer.learning_rate == pytest.approx(4 * 4e-5)
    optimizer_of(resolved)
    # A run whose rate depends on the mesh goes on only with as many shards.
    two, four = ({"optimizer": fingerprint(settings, locate(settings.model), 4, n)["optimizer"]} for n in (2, 4))
    check_same_run(two, two, "there", force=False)
    with pytest.raises(ValueError, match="optimizer.shards: 4 here, 2 there"):
        check_same_run(four, two, "there", force=False)
