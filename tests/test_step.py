"""One update: exact under micro-batches, clipped, donated."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import random_params, set_mesh

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sft import SFT
from tunix_lite.algorithms.weighting import per_token
from tunix_lite.basics.types import Batch, Max, RowBatch, TokenScores, TrainState
from tunix_lite.learner import update
from tunix_lite.learner.micro_batches import accumulate
from tunix_lite.learner.optim import OptimizerConfig, SGDConfig, init_opt_state, make_optimizer, num_updates
from tunix_lite.learner.policy import make_policy, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models.vocabulary import token_scores
from tunix_lite.parallel.compiler_options import LEAST_MEMORY
from tunix_lite.parallel.mesh import put


@pytest.fixture(scope="module")
def layer(cfg):
    """A model of one layer, and its weights."""
    cfg = replace(cfg, num_layers=1, pattern=("local",))
    set_mesh(1, 1)
    return cfg, random_params(cfg)


def batch_of(rollout, rows: int = 16, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens, mask, completion = (
        np.asarray(x)[:rows] for x in (rollout.tokens, rollout.token_mask, rollout.completion_mask)
    )
    return Batch(
        tokens=tokens,
        token_mask=mask,
        loss_weight=per_token(completion),
        advantages=np.broadcast_to(rng.normal(size=(rows, 1)), tokens.shape).astype(np.float32),
        old_logprobs=np.asarray(rollout.logprobs)[:rows] + rng.normal(size=tokens.shape).astype(np.float32) * 0.2,
        ref_logprobs=np.asarray(rollout.logprobs)[:rows] + rng.normal(size=tokens.shape).astype(np.float32) * 0.2,
    )


def gradient_in_parts(cfg, params, batch, parts: int, sync_every: int = 1):
    def scores(params, batch):
        logprobs = token_logprobs(params, batch.tokens, batch.token_mask, cfg=cfg)
        return TokenScores(logprobs, jnp.zeros_like(logprobs))

    step = TrainStep(Policy(None, scores), GRPO(kl_coef=0.1), None, sync_every=sync_every)
    places = jax.tree.map(lambda x: x.sharding, params)
    fields = {name: value for name, value in vars(batch).items() if value is not None}
    rows = RowBatch(**fields, max_micro_batches=parts)
    return jax.jit(lambda params, rows: step.gradients(params, None, 0, rows, places))(params, rows)


def relative_difference(a, b) -> float:
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)) / optax.tree.norm(b))


def test_micro_batches_do_not_change_the_gradient(layer, rollout):
    cfg, params = layer
    batch = batch_of(rollout)
    whole, metrics = gradient_in_parts(cfg, params, batch, 1)
    # two micro-batches of a shard are summed first: their gradients are there beside the sum
    summed_up, summed_metrics = gradient_in_parts(cfg, params, batch, 4, sync_every=2)
    # else they are added where they arise, in another order
    in_place, _ = gradient_in_parts(cfg, params, batch, 4)
    assert relative_difference(in_place, summed_up) < 1e-6
    assert relative_difference(summed_up, whole) < 1e-5
    for name in metrics:
        np.testing.assert_allclose(summed_metrics[name], metrics[name], rtol=1e-4, atol=1e-6)


def test_gradients_in_bfloat16_are_summed_in_float32(layer, rollout):
    cfg, params = layer
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    summed_up, _ = gradient_in_parts(cfg, params, batch_of(rollout), 4)
    assert {x.dtype for x in jax.tree.leaves(summed_up)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("shards, every", [(1, 1), (2, 1), (2, 2)])
def test_the_maximum_of_all_is_the_largest_of_micro_batches_and_shards(shards, every):
    """The largest stands in the last micro-batch of one shard, and everything is below zero."""
    set_mesh(shards, 1)
    x = put(-np.arange(8.0, 0.0, -1.0, dtype=np.float32).reshape(8, 1), "batch", "seq")

    def of_part(rows):
        x = rows.tokens
        return {"w": jnp.sum(x)}, {"train/most": Max(jnp.max(x)), "train/sum": jnp.sum(x)}

    places = {"w": put(np.float32(0)).sharding}
    rows = RowBatch(x, x, x, max_micro_batches=4)
    grads, metrics = jax.jit(lambda rows: accumulate(of_part, rows, places, every))(rows)
    assert (float(metrics["train/most"]), float(metrics["train/sum"]), float(grads["w"])) == (-1, -36, -36)


def test_chunks_of_logprobs_do_not_change_them_or_their_gradient(layer, rollout, monkeypatch):
    cfg, params = layer
    score = partial(token_logprobs, cfg=cfg)
    weight = np.asarray(rollout.completion_mask, np.float32)

    def value_and_gradient():
        loss = lambda params: jnp.sum(weight * score(params, rollout.tokens, rollout.token_mask))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    whole = value_and_gradient()
    monkeypatch.setattr("tunix_lite.models.vocabulary.SCORES_AT_ONCE", 20 * 21 * 4)  # 4 entries of the 32 at a time
    chunked = value_and_gradient()
    np.testing.assert_allclose(chunked[0], whole[0], rtol=1e-6)
    assert relative_difference(chunked[1], whole[1]) < 1e-5


@pytest.fixture
def end_tokens(rollout):
    """A mask of the end-of-sequence tokens alone."""
    last = np.asarray(rollout.completion_mask) & ~np.pad(np.asarray(rollout.completion_mask)[:, 1:], ((0, 0), (0, 1)))
    return last & np.asarray(rollout.finished)[:, None]


def test_the_end_of_sequence_token_gets_gradient(rollout, end_tokens):
    """Tunix D3: its completions lost the token that ends them, so nothing taught the model to stop."""
    batch = batch_of(rollout, rows=20)
    assert end_tokens.any() and (batch.loss_weight[end_tokens] > 0).all()
    old = jnp.asarray(batch.old_logprobs)
    slope = jax.grad(lambda logprobs: GRPO().loss(TokenScores(logprobs, logprobs), batch)[0])(old)
    assert (np.asarray(slope)[end_tokens] != 0).all()


def small_problem(max_grad_norm, steps=3, slope=(30.0, -40.0, 0.0), rate=0.1):
    """A policy of one vector, whose gradient is known: loss = - sum_v w_v logprob_v = - w . x."""
    zeros = jnp.zeros((1, 3))
    policy = Policy(generate=None, scores=lambda params, batch: TokenScores(params["x"][None] + zeros, zeros))
    slope = np.array(slope, np.float32)
    batch = RowBatch(tokens=np.zeros((1, 3), np.int32), token_mask=np.ones((1, 3), bool), loss_weight=slope[None])
    batch = jax.tree.map(lambda x: put(x, "batch", "seq"), batch)
    cfg = OptimizerConfig(learning_rate=rate, max_grad_norm=max_grad_norm, beta1=0.0, beta2=0.0, eps=1.0)
    optimizer = make_optimizer(cfg, max_steps=steps)
    params = {"x": jnp.zeros(3)}
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    train_step = TrainStep(policy, SFT(), optimizer)
    return train_step(state, None, batch)


def test_gradients_are_clipped_by_their_global_norm():
    """Tunix D9: max_grad_norm was read and ignored. By hand: |(-30, 40, 0)| = 50, clipped to 1 it is (-.6, .8, 0)."""
    state, metrics = small_problem(max_grad_norm=1.0)
    np.testing.assert_allclose(metrics["train/grad_norm"], 50.0)
    clipped = np.array([-0.6, 0.8, 0.0])
    np.testing.assert_allclose(state.params["x"], -0.1 * clipped / (np.abs(clipped) + 1.0), rtol=1e-5)
    loose, _ = small_problem(max_grad_norm=0.0)
    np.testing.assert_allclose(loose.params["x"], -0.1 * np.array([-30 / 31, 40 / 41, 0.0]), rtol=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"slope": (30.0, np.nan, 0.0)}, {"slope": (30.0, np.inf, 0.0)}, {"rate": 1e38}], ids=str
)
def test_an_update_that_is_not_finite_changes_nothing_but_the_step(wrong, in_place, monkeypatch):
    """A rate of 1e38 gives a change whose norm float32 does not hold."""
    plain, _ = small_problem(max_grad_norm=1.0)
    if in_place:
        monkeypatch.setattr(update, "MANY_WEIGHTS", 1)
    state, metrics = small_problem(max_grad_norm=1.0, **wrong)
    np.testing.assert_array_equal(state.params["x"], np.zeros(3))
    assert num_updates(state.opt_state) == 0 and int(state.step) == 1
    for moment in jax.tree.leaves(state.opt_state):
        np.testing.assert_array_equal(moment, np.zeros_like(moment))
    assert metrics["train/skipped"] == 1 and metrics["train/update_norm"] == 0
    state, metrics = small_problem(max_grad_norm=1.0)
    assert metrics["train/skipped"] == 0 and num_updates(state.opt_state) == 1
    jax.tree.map(np.testing.assert_array_equal, state, plain)


def test_an_update_of_many_weights_has_one_array_as_large_as_they_are(monkeypatch):
    """By its compiler: the sum of gradients, and for a while the change of one of eight weights. With a gradient of each
    micro-batch, or all changes or new moments at once, it is two and more."""
    monkeypatch.setattr(update, "MANY_WEIGHTS", 1)
    params = {str(i): jnp.full(50_000, 0.1) for i in range(8)}

    def scores(params, batch):
        scale = jnp.mean(batch.loss_weight)
        sums = sum(jnp.sum(jnp.sin(scale * x)) for x in params.values())
        return TokenScores(sums * batch.loss_weight, jnp.zeros_like(batch.loss_weight))

    rows = np.ones((2, 3), np.int32)
    fields = (put(x, "batch", "seq") for x in (rows, rows > 0, rows.astype(np.float32)))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1), max_steps=2)
    state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
    train_step = TrainStep(Policy(None, scores), SFT(), optimizer, compiler_options=LEAST_MEMORY)
    compiled = train_step.compile(state, None, RowBatch(*fields, max_micro_batches=2))
    assert compiled.memory_analysis().temp_size_in_bytes < 1.3 * (8 * 50_000 * 4)


def test_in_place_the_change_of_a_weight_is_made_in_parts(monkeypatch):
    """By its compiler: a quarter of the only weight at once. All else is where it lay; and the numbers are those of
    `apply`."""
    monkeypatch.setattr(update, "_AT_ONCE", 5_000)
    set_mesh(1, 1)
    rng = np.random.default_rng(0)
    params, grads = ({"x": jnp.asarray(rng.normal(size=(200, 100)), jnp.float32)} for _ in range(2))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1), max_steps=2)
    state = TrainState(jnp.int32(0), params, init_opt_state(optimizer, params))

    def compiled(change):
        change = jax.jit(partial(change, optimizer), donate_argnums=0, compiler_options=LEAST_MEMORY["cpu"])
        return change.lower(state, grads, jnp.float32(0.0)).compile()

    in_place, plain = compiled(update.apply_in_place), compiled(update.apply)
    weight = 200 * 100 * 4
    assert weight / 4 <= in_place.memory_analysis().temp_size_in_bytes < 0.3 * weight
    both = [change(jax.tree.map(jnp.copy, state), grads, jnp.float32(0.0)) for change in (in_place, plain)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *both)


@pytest.mark.parametrize("most", [None, 7])
def test_a_head_adds_the_gradient_of_its_table_where_the_sum_lies(most, monkeypatch):
    """By its compiler: no array beside the sum is as large as the table, here 8,192 x 64 in 16 blocks. The numbers are
    those of a gradient of the whole table that is added to the sum, to the bit."""
    set_mesh(1, 1)
    rng = np.random.default_rng(0)
    params = {"table": jnp.asarray(rng.normal(size=(8192, 64)), jnp.float32)}
    monkeypatch.setattr("tunix_lite.models.vocabulary.SCORES_AT_ONCE", 8192 * 12 // 16)
    monkeypatch.setattr("tunix_lite.models.vocabulary._LEAST_COLUMNS", 2)
    monkeypatch.setattr("tunix_lite.models.vocabulary.LARGE_HEAD", 1)
    hidden = jnp.asarray(rng.normal(size=(1, 12, 64)), jnp.float32)

    def scores(params, batch):
        scaled = hidden * batch.loss_weight[..., None]
        return token_scores(scaled, params["table"], batch.tokens, None, 1.0, None if most is None else jnp.int32(most))

    tokens = rng.integers(0, 8192, (3, 12)).astype(np.int32)
    weights = rng.random((3, 12)).astype(np.float32)
    batch = RowBatch(*(put(x, "batch", "seq") for x in (tokens, tokens >= 0, weights)), max_micro_batches=3)
    places = jax.tree.map(lambda x: x.sharding, params)

    def compiled():
        step = TrainStep(Policy(None, scores), SFT(), None)
        gradients = lambda params, batch: step.gradients(params, None, 0, batch, places)  # noqa: E731
        return jax.jit(gradients, compiler_options=LEAST_MEMORY["cpu"]).lower(params, batch).compile()

    in_place = compiled()
    monkeypatch.setattr("tunix_lite.learner.update.gradients_added", lambda *_: nullcontext())
    beside = compiled()
    temporaries = [x.memory_analysis().temp_size_in_bytes / (8192 * 64 * 4) for x in (in_place, beside)]
    assert temporaries[0] < 0.2 and temporaries[1] > 1
    jax.tree.map(np.testing.assert_array_equal, in_place(params, batch), beside(params, batch))


@pytest.mark.parametrize("most, size", [(0, 75), (75, 75), (76, 100), (151, 200)])
def test_a_head_computes_the_columns_that_are_read_and_few_others(most, size, monkeypatch):
    """Scores and gradients against float64; what stands behind the least size with room would make them NaN."""
    monkeypatch.setattr("tunix_lite.models.vocabulary._LEAST_COLUMNS", 25)
    monkeypatch.setattr("tunix_lite.models.vocabulary.LARGE_HEAD", 1)
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(2, 200, 8)), rng.normal(size=(32, 8))
    targets, weights = rng.integers(0, 32, (2, 200)), rng.normal(size=(2, 2, 200)) * (np.arange(200) < most)

    def loss(hidden, table, most):
        hidden = hidden.at[:, size:].set(np.nan)
        logprobs, entropy, *_ = token_scores(hidden, table, targets, None, 1.0, most)
        return jnp.sum(weights[0] * logprobs + weights[1] * entropy)

    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(table, jnp.float32)
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arrays, jnp.int32(most))
    logits = hidden @ table.T
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(logprobs)
    entropy = -(p * logprobs).sum(-1)
    expected = weights[0] * np.take_along_axis(logprobs, targets[..., None], 2)[..., 0] + weights[1] * entropy
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-4, atol=1e-4)
    slope = weights[0][..., None] * (np.eye(32)[targets] - p) - weights[1][..., None] * p * (
        logprobs + entropy[..., None]
    )
    np.testing.assert_allclose(gradients[0], slope @ table, atol=1e-4)
    np.testing.assert_allclose(gradients[1], np.einsum("bmv,bmd->vd", slope, hidden), rtol=1e-4, atol=1e-3)


def test_sequences_are_scored_in_parts_of_any_size(layer, rollout):
    """The last part is filled up; parts of 16 sequences are all at once."""
    cfg, params = layer
    batch = batch_of(rollout)
    whole = make_policy(cfg, None, 1.0).rescore(params, batch)
    assert whole.shape == batch.tokens.shape
    for size in (3, 7, 16):
        scored = make_policy(cfg, None, 1.0, num_sequences=size).rescore(params, batch)
        np.testing.assert_allclose(scored, whole, rtol=1e-5, atol=1e-6)


def test_the_old_state_is_donated_and_the_step_counted(layer, rollout):
    cfg, params = layer
    optimizer = optax.adam(1e-3)
    copied = jax.tree.map(jnp.copy, params)
    state = TrainState(jnp.int32(0), copied, optimizer.init(copied))
    train_step = TrainStep(make_policy(cfg, None, 1.0), GRPO(), optimizer)
    batch, _ = RowLayout().lay_out(batch_of(rollout))
    new, _ = train_step(state, None, batch)
    assert int(new.step) == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize(("fsdp", "parts", "sync_every"), [(4, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_complex_weights_learn_over_a_mesh_as_by_hand(fsdp, parts, sync_every):
    """loss = - sum_t a_t (Re(w_k c_k) - |w_k|^2), k the token: it falls along conj(c_k) - 2 w_k, as numpy has it in
    complex128. A weight lies over the mesh, and each device has rows of its own."""
    set_mesh(fsdp, 1)
    rng = np.random.default_rng(0)
    w, c = rng.normal(size=(2, 8)) + 1j * rng.normal(size=(2, 8))
    tokens = rng.integers(0, 8, (8, 5)).astype(np.int32)
    a = rng.uniform(0.5, 1.5, (8, 5)).astype(np.float32)
    a[:, 0] = 0

    def scores(params, batch):
        w_RW = params["w"][batch.tokens]
        logprobs = jnp.real(w_RW * jnp.asarray(c, jnp.complex64)[batch.tokens]) - jnp.abs(w_RW) ** 2
        return TokenScores(logprobs, jnp.zeros_like(logprobs))

    batch = Batch(tokens=tokens, token_mask=np.ones((8, 5), bool), loss_weight=a)
    rows, _ = RowLayout(num_micro_batches=parts).lay_out(batch)
    optimizer = make_optimizer(SGDConfig(learning_rate=0.1, max_grad_norm=3.0), max_steps=3)
    params = {"w": put(w.astype(np.complex64), "embed")}
    state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
    train_step = TrainStep(Policy(None, scores), SFT(), optimizer, sync_every=sync_every)

    before = w
    for _ in range(3):
        state, metrics = train_step(state, None, rows)
        falls = np.zeros(8, np.complex128)
        np.add.at(falls, tokens, a * (np.conj(c) - 2 * w)[tokens])
        norm = np.sqrt((np.abs(falls) ** 2).sum())
        w = w + 0.1 * falls * min(1, 3.0 / norm)
        np.testing.assert_allclose(metrics["train/grad_norm"], norm, rtol=1e-5)
        assert metrics["train/skipped"] == 0
    assert state.params["w"].dtype == np.complex64 and len(state.params["w"].sharding.device_set) == fsdp
    np.testing.assert_allclose(np.asarray(state.params["w"]), w, rtol=1e-5)
    assert np.abs(w - before).max() > 0.1


def test_a_stream_of_an_algorithm_that_is_called_targets_is_not_what_is_scored(layer, rollout):
    """Only clients of a Trainer say with it what a token predicts."""
    cfg, params = layer
    batch = batch_of(rollout)
    scores = make_policy(cfg, None, 1.0).scores
    alone, named = (
        scores(params, RowLayout().lay_out(one)[0]).logprobs
        for one in (batch, batch.replace(streams={"targets": np.zeros_like(batch.tokens)}))
    )
    np.testing.assert_array_equal(named, alone)
