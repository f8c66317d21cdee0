"""PPO: advantages from values, the loss of the critic, and the second network that trains beside the policy."""

import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import collect
from conftest import random_params, set_mesh
from test_train import SHORT, lines, without_time

from tunix_lite.algorithms.algorithm import Critic, Policy
from tunix_lite.algorithms.gae import explained_variance, gae, whitened
from tunix_lite.algorithms.ppo import PPO, STREAMS
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import (
    CRITIC,
    POLICY,
    Batch,
    Conversation,
    Graded,
    Rollout,
    SampledTurn,
    TokenScores,
    TrainState,
    TurnReply,
)
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.inference.language_model import load
from tunix_lite.learner.critic import both_optimizers, token_values, with_critic, with_values
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer, num_updates
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import batch_scores, make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import attention, decoder
from tunix_lite.models.architecture import Experts
from tunix_lite.models.lora import LoraConfig, attach
from tunix_lite.parallel.mesh import put
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import abstract, mesh_of_run
from tunix_lite.settings.resolved_run import find_model, resolve_run
from tunix_lite.train import train

RETURNS, OLD_VALUES = STREAMS

# ---- GAE


def test_advantages_by_hand():
    """gamma = 0.9, lambda = 0.5: A_3 = 1 - 0.5, A_2 = 0.9 * 0.5 - 0.4 + 0.45 A_3, A_1 = 0.9 * 0.4 - 0.2 + 0.45 A_2. A
    hole of two tokens between the first and the second changes nothing."""
    values = np.array([[0.2, 0.4, 0.5]])
    rewards = np.array([[0.0, 0.0, 1.0]])
    advantages, returns = gae(rewards, values, np.ones((1, 3), bool), 0.9, 0.5)
    np.testing.assert_allclose(advantages, [[0.28375, 0.275, 0.5]], rtol=1e-12)
    np.testing.assert_allclose(returns, [[0.48375, 0.675, 1.0]], rtol=1e-12)
    # what follows is worth 0.6: A_3 = 1 + 0.54 - 0.5
    advantages, _ = gae(rewards, values, np.ones((1, 3), bool), 0.9, 0.5, np.array([0.6]))
    np.testing.assert_allclose(advantages, [[0.3931, 0.518, 1.04]], rtol=1e-12)

    # the values at a hole, and at padding, are nobody's
    places = [1, 4, 5]
    wide = np.full((2, 1, 8), 7.0)
    wide[0, :, places], wide[1, :, places] = rewards.T, values.T
    drawn = np.isin(np.arange(8), places)[None]
    advantages, returns = gae(*wide, drawn, 0.9, 0.5)
    expected = np.zeros((2, 8))
    expected[:, places] = [[0.28375, 0.275, 0.5], [0.48375, 0.675, 1.0]]
    np.testing.assert_allclose([advantages[0], returns[0]], expected, rtol=1e-12)


@pytest.mark.parametrize("lam", [0.9, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.9, 0.95, 1.0])
def test_advantages_are_the_sums_of_the_paper(gamma, lam):
    """A_t = sum_l (gamma lambda)^l delta_{t+l} (equation 16 of the paper), over the drawn tokens alone."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 6, 20))
    drawn = rng.random((6, 20)) < [[0.0], [0.2], [0.5], [0.7], [0.9], [1.0]]
    after = rng.normal(size=6) * [0, 1, 0, 1, 0, 1]
    advantages, returns = gae(rewards, values, drawn, gamma, lam, after)
    assert not drawn[0].any()
    for row, drawn_T in enumerate(drawn):
        v = [*values[row][drawn_T], after[row]]
        deltas = [r + gamma * v[t + 1] - v[t] for t, r in enumerate(rewards[row][drawn_T])]
        sums = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
        np.testing.assert_allclose(advantages[row][drawn_T], sums, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(returns[row][drawn_T], np.array(sums) + v[:-1], rtol=1e-10, atol=1e-12)
        assert not advantages[row][~drawn_T].any() and not returns[row][~drawn_T].any()


def test_advantages_are_whitened_over_all_tokens_and_variance_is_explained_by_hand():
    """1, 2, 3 have mean 2 and variance 1; a token that does not count is not among them."""
    mask = np.array([[True, True, False], [True, False, False]])
    white = whitened(np.array([[1.0, 2.0, 99.0], [3.0, 99.0, 0.0]]), mask)
    np.testing.assert_allclose(white, [[-1, 0, 0], [1, 0, 0]], atol=1e-7)
    assert (whitened(np.ones((1, 2)), np.array([[True, False]])) == [[1, 0]]).all()
    returns = np.array([0.0, 0.0, 1.0, 1.0])
    assert explained_variance(returns + 5, returns) == 1
    assert explained_variance(np.full(4, 0.3), returns) == 0
    assert explained_variance(np.array([0, 0, 0.5, 0.5]), returns) == 0.75
    assert explained_variance(returns, np.ones(4)) == 0


# ---- collecting


def collected(algorithm: PPO, rollout: Rollout, rewards, credit: str = "end", values=None, reference=None):
    """What `batch_of` makes of these completions, each of which answers a prompt of its own."""
    talks = () if rollout.conversations is None else rollout.conversations
    turns = [[one.reply.reward for one in talk.turns] for talk in talks]
    count = len(rollout.tokens)
    graded = Graded(
        [""] * count,
        [""] * count,
        np.array(rewards, float),
        np.ones(count, bool),
        [None] * count,
        {},
        np.isnan(rewards),
        turn_rewards=turns,
        turn_discount=ConversationConfig(credit=credit).turn_discount,
    )
    task = SimpleNamespace(
        prompts=lambda examples: [[1]] * len(examples),
        partner=lambda examples, G: None,
        grader=lambda examples, count: SimpleNamespace(submit=None, results=lambda rollout: graded),
    )

    def give(values, batch):
        # as scorers do: 0 where no token counts
        return np.where(batch.loss_weight != 0, values, 0).astype(np.float32)

    policy = Policy(
        lambda params, *_, **__: rollout,
        None,
        {"reference": partial(give, reference)},
        values=lambda params, batch: give(values, batch),
    )
    batch, metrics, _ = collect(algorithm, policy, task, {}, [{}] * count, jax.random.key(0))
    return batch, metrics


def two_completions(finish, conversations=None) -> Rollout:
    """A prompt of one token, and completions of four and three; in the first, column 2 was not sampled."""
    mask = np.array([[False, True, False, True, True], [False, True, True, True, False]])
    arrays = np.zeros((2, 5), np.float32)
    return Rollout(
        np.ones((2, 5), np.int32),
        np.array([[True] * 5, [True] * 4 + [False]]),
        mask,
        arrays,
        np.array(finish, np.int8),
        arrays,
        conversations=conversations,
    )


PLAIN = PPO(num_generations=1, whiten=False, gae_lambda=1.0)
VALUES = np.array([[9, 0.1, 9, 0.2, 0.3], [9, 0.4, 0.5, 0.6, 9]], np.float32)


def test_a_cut_completion_ends_or_goes_on_in_what_the_critic_expects():
    """Rewards 1 and 0.5 at the last tokens. The first completion was cut off, the second ended by itself. With a
    bootstrap, the last token of the first is not learned from: its value, 0.3, is what follows."""
    batch, metrics = collected(PLAIN, two_completions([0, 1]), [1.0, 0.5], values=VALUES)
    np.testing.assert_allclose(batch.advantages, [[0, 0.9, 0, 0.8, 0.7], [0, 0.1, 0, -0.1, 0]], atol=1e-6)
    np.testing.assert_allclose(batch.streams[RETURNS], [[0, 1, 0, 1, 1], [0, 0.5, 0.5, 0.5, 0]], atol=1e-6)
    assert metrics["critic/return_mean"] == pytest.approx(0.75)
    assert metrics["critic/value_mean"] == pytest.approx(0.35)

    bootstrap = replace(PLAIN, bootstrap_truncated=True)
    batch, _ = collected(bootstrap, two_completions([0, 1]), [1.0, 0.5], values=VALUES)
    np.testing.assert_allclose(batch.advantages, [[0, 1.2, 0, 1.1, 0], [0, 0.1, 0, -0.1, 0]], atol=1e-6)
    assert (batch.loss_weight != 0).tolist() == [[False, True, False, True, False], [False, True, True, True, False]]
    np.testing.assert_allclose(batch.loss_weight.sum(), 1)
    # nothing is cut off: nothing changes
    ended, _ = collected(bootstrap, two_completions([1, 1]), [1.0, 0.5], values=VALUES)
    assert (ended.loss_weight != 0).sum() == 6


def test_each_token_pays_for_its_distance_from_the_reference():
    """Sampled at log-probability 0 each, under the reference at -2 and -1: k1 is 2 and 1, and beta 0.1."""
    reference = np.array([[0, -2, 0, -1, 0], [0, 0, 0, 0, 0]], np.float32)
    algorithm = replace(PLAIN, kl_coef=0.1)
    batch, metrics = collected(
        algorithm, two_completions([1, 1]), [1.0, 0.0], values=np.zeros((2, 5)), reference=reference
    )
    np.testing.assert_allclose(batch.streams[RETURNS][0], [0, 0.7, 0, 0.9, 1], atol=1e-6)
    assert metrics["train/kl"] == pytest.approx(3 / 6)
    assert algorithm.needs.reference and not PLAIN.needs.reference


def test_turns_are_rewarded_where_they_end():
    """A conversation of two turns, rewarded with 0.25 and 1, and 0.5 from another function beside them."""

    def talk(row):
        turns = [SampledTurn(1, 2, TurnReply(reward=0.25)), SampledTurn(3, 5 - row, TurnReply(reward=1.0))]
        return Conversation(turns, "done")

    conversations = np.empty(2, object)
    conversations[:] = [talk(0), talk(1)]
    rollout = two_completions([1, 1], conversations)
    zeros = np.zeros((2, 5))
    batch, _ = collected(PLAIN, rollout, [1.75, 1.75], "turn", zeros)
    np.testing.assert_allclose(batch.streams[RETURNS], [[0, 1.75, 0, 1.5, 1.5], [0, 1.75, 1.5, 1.5, 0]])
    batch, _ = collected(replace(PLAIN, gae_lambda=0.0), rollout, [1.75, 1.75], "turn", zeros)
    np.testing.assert_allclose(batch.streams[RETURNS], [[0, 0.25, 0, 0, 1.5], [0, 0.25, 0, 1.5, 0]])
    batch, _ = collected(PLAIN, rollout, [1.75, 1.75], "end", zeros)
    np.testing.assert_allclose(batch.streams[RETURNS], [[0, 1.75, 0, 1.75, 1.75], [0, 1.75, 1.75, 1.75, 0]])


def test_what_was_dropped_is_not_learned_from():
    batch, metrics = collected(
        replace(PLAIN, whiten=True), two_completions([1, 1]), [np.nan, 0.5], values=np.zeros((2, 5))
    )
    assert not batch.loss_weight[0].any() and not batch.advantages[0].any()
    assert metrics["critic/return_mean"] == 0.5


# ---- the loss


def rows_of(**arrays) -> Batch:
    names = (RETURNS, OLD_VALUES)
    fields = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items() if name not in names}
    streams = {name: jnp.asarray(arrays[name], jnp.float32) for name in names}
    return Batch(None, None, streams=streams, **fields)


def test_the_loss_of_values_is_the_larger_of_two_errors():
    """Old value 0.5, return 1, clip 0.2. V = 0.6: 0.4^2 either way. V = 0.9: clipped to 0.7, so 0.3^2 and not 0.1^2,
    without a gradient. V = 0: clipped to 0.3, but 1^2 is larger. A token without weight is nothing."""
    values = jnp.array([[0.6, 0.9, 0.0, 99.0]])
    weight = np.array([[0.25, 0.25, 0.5, 0.0]])
    zeros = np.zeros((1, 4))
    batch = rows_of(
        loss_weight=weight,
        advantages=zeros,
        old_logprobs=zeros,
        returns=np.ones((1, 4)) * [1, 1, 1, 0],
        old_values=np.ones((1, 4)) * [0.5, 0.5, 0.5, 0],
    )

    def loss(values, algorithm):
        return algorithm.loss(TokenScores(jnp.zeros((1, 4)), jnp.zeros((1, 4)), values=values), batch)

    expected = 0.5 * (0.25 * 0.4**2 + 0.25 * 0.3**2 + 0.5 * 1)
    (total, metrics), slope = jax.value_and_grad(loss, has_aux=True)(values, PPO(value_coef=3.0))
    assert float(metrics["train/value_loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(total) == pytest.approx(3 * expected, rel=1e-6)
    assert float(metrics["train/value_clipped"]) == pytest.approx(0.25)
    np.testing.assert_allclose(slope, [[3 * 0.25 * -0.4, 0, 3 * 0.5 * -1, 0]], atol=1e-6)
    whole, _ = loss(values, PPO(value_coef=1.0, value_clip=None))
    assert float(whole) == pytest.approx(0.5 * (0.25 * 0.4**2 + 0.25 * 0.1**2 + 0.5), rel=1e-6)


def test_the_policy_part_of_the_loss_is_the_clipped_gain():
    """Ratio e^0.5 = 1.65 with advantage 2 is clipped to 1.2; with -1 it is not."""
    logprobs = jnp.array([[0.5, 0.5]])
    zeros = np.zeros((1, 2))
    batch = rows_of(
        loss_weight=[[0.5, 0.5]], advantages=[[2.0, -1.0]], old_logprobs=zeros, returns=zeros, old_values=zeros
    )
    total, metrics = PPO(entropy_coef=0.1).loss(TokenScores(logprobs, jnp.ones((1, 2)), values=zeros), batch)
    assert float(total) == pytest.approx(-0.5 * 1.2 * 2 + 0.5 * np.exp(0.5) - 0.1, rel=1e-6)
    assert float(metrics["train/clipped_high"]) == 0.5


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"critic": "two"}, "critic=two must be shared or own"),
        ({"gamma": 1.1}, "gamma=1.1 must be between 0 and 1"),
        ({"value_coef": 0}, "value_coef=0 must be above 0"),
        ({"mini_batches": 2}, "updates_per_rollout=1 must be a multiple of mini_batches=2"),
        ({"critic_warmup": -1}, "critic_warmup=-1 must be 0 or more"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        PPO(**settings)


def test_runs_that_cannot_be_right_are_refused_with_a_line_to_paste():
    with pytest.raises(ConfigError, match="set conversation.credit=turn, and algorithm.gamma=0.99"):
        compose(["algorithm=ppo", "task=guessing", "conversation.credit=discount"])
    with pytest.raises(ConfigError, match="rollout.overlap=one_step: .*set rollout.max_staleness=0"):
        compose(["algorithm=ppo", "rollout.overlap=one_step", "rollout.max_staleness=1"])
    with pytest.raises(ConfigError, match="leaves none to the policy; set training.max_steps=40"):
        compose(["algorithm=ppo", "algorithm.critic_warmup=20", "training.max_steps=20"])


# ---- the second network


SCORING = {"temperature": 1.0, "dtype": jnp.float32}


@pytest.fixture(scope="module")
def layer(cfg):
    """A model of one layer."""
    return replace(cfg, num_layers=1, pattern=("global",))


@pytest.fixture(scope="module")
def weights(layer):
    set_mesh(1, 1)
    return random_params(layer)


def batch_to_value(rollout, rows: int = 8) -> Batch:
    rng = np.random.default_rng(1)
    tokens, mask, completion = (
        np.asarray(x)[:rows] for x in (rollout.tokens, rollout.token_mask, rollout.completion_mask)
    )
    noise = rng.normal(size=(3, *tokens.shape)).astype(np.float32)
    return Batch(
        tokens,
        mask,
        (completion / completion.sum()).astype(np.float32),
        noise[0],
        np.asarray(rollout.full_logprobs)[:rows],
        streams={RETURNS: noise[1], OLD_VALUES: noise[2] / 9},
    )


def networks(cfg, params, critic: Critic, seed: int = 3):
    """The policy and a critic with random numbers in its head, and in layers of its own."""
    both = with_critic(critic, cfg, random_params(cfg, seed) if critic.is_own else params, "fp32")
    rng = np.random.default_rng(seed)
    head = {
        name: put(rng.normal(size=x.shape).astype(np.float32), "norm")
        for name, x in both[CRITIC].items()
        if "score" in name
    }
    return {POLICY: params, CRITIC: both[CRITIC] | head}


# Of a critic of its own, what routers did is compared in short, too.
SHARED = [False, pytest.param(True, marks=pytest.mark.wide)]


@pytest.mark.parametrize("is_own", SHARED)
def test_a_value_is_read_where_its_token_is_predicted(layer, weights, rollout, is_own):
    """V of tokens[b, t] is score . h[b, t - 1] + bias of the hidden states of the critic's layers, and the policy's
    scores are those that it has without a critic."""
    critic = Critic(is_own)
    both = networks(layer, weights, critic)
    batch = batch_to_value(rollout)
    rows, layout = RowLayout().lay_out(batch)
    scores = partial(batch_scores, cfg=layer, **SCORING)
    valued = jax.jit(with_values(scores, critic))(both, rows)
    alone = jax.jit(scores)(weights, rows)
    np.testing.assert_array_equal(valued.logprobs, alone.logprobs)

    layers = both[CRITIC] if is_own else weights
    meta = attention.one_sequence_per_row(batch.token_mask)
    hidden = np.float64(jax.jit(lambda p: decoder.forward(p, layer, batch.tokens, meta, jnp.float32)[0])(layers))
    expected = hidden @ np.float64(both[CRITIC]["score"]) + np.float64(both[CRITIC]["score_bias"])
    expected = np.where(batch.loss_weight != 0, np.roll(expected, 1, axis=1), 0)
    np.testing.assert_allclose(layout.back(valued.values), expected, atol=2e-5)
    at_collect = jax.jit(partial(token_values, scores, critic))(both, rows)
    np.testing.assert_allclose(at_collect, valued.values, atol=1e-6)


@pytest.mark.parametrize(
    "output", ["own", *(pytest.param(name, marks=pytest.mark.wide) for name in ("shared", "score"))]
)
def test_what_routers_did_comes_with_every_score(layer, rollout, output):
    """An update adds it to the losses of routers: of the policy beside a critic, and of a reward model."""
    cfg = replace(layer, experts=Experts(4, 2, 8))
    params = random_params(cfg)
    rows, _ = RowLayout().lay_out(batch_to_value(rollout))
    scores = partial(batch_scores, cfg=cfg, **SCORING)
    alone = jax.jit(scores)(params, rows)
    if output == "score":
        scores = make_policy(replace(cfg, output="score"), None, 1.0).scores
        found = jax.jit(scores)(params | {"score": jnp.ones(cfg.embed_dim)}, rows)
    else:
        critic = Critic(output == "own")
        found = jax.jit(with_values(scores, critic))(networks(cfg, params, critic), rows)
    assert alone.experts.load.sum() > 0
    jax.tree.map(np.testing.assert_array_equal, found.experts, alone.experts)


@pytest.mark.parametrize("is_own", SHARED)
def test_recorded_routes_are_for_the_layers_of_the_policy_alone(layer, rollout, is_own):
    """A shared critic reads hidden states of the policy, at its experts. A critic of its own has routers of its own."""
    cfg = replace(layer, experts=Experts(4, 2, 8))
    critic, batch = Critic(is_own), batch_to_value(rollout)
    both = networks(cfg, random_params(cfg), critic)
    scores = partial(batch_scores, cfg=cfg, **SCORING)
    native = RowLayout().lay_out(batch)[0]
    replayed = RowLayout().lay_out(batch.replace(routes=np.tile(np.uint8([3, 1]), (*batch.tokens.shape, 1))))[0]
    valued = jax.jit(with_values(scores, critic))
    of_native, of_replayed = valued(both, native), valued(both, replayed)
    assert np.abs(of_replayed.logprobs - of_native.logprobs).max() > 1e-3
    at_collect = jax.jit(partial(token_values, scores, critic))(both, replayed)
    np.testing.assert_allclose(at_collect, of_replayed.values, atol=1e-6)
    moved = np.abs(of_replayed.values - of_native.values).max()
    assert moved == 0 if is_own else moved > 1e-3


def train_step(cfg, critic: Critic, algorithm: PPO, rate: float = 1e-3) -> TrainStep:
    scores = partial(batch_scores, cfg=cfg, **SCORING)
    optimizer = partial(make_optimizer, OptimizerConfig(learning_rate=rate, max_grad_norm=1e9), 100)
    tables = {POLICY: None, CRITIC: None}
    both = both_optimizers(critic, optimizer, optimizer, tables)
    return TrainStep(Policy(None, with_values(scores, critic)), algorithm, both)


def state_of(step: TrainStep, params) -> TrainState:
    params = jax.tree.map(jnp.copy, params)
    return TrainState(put(np.int32(0)), params, init_opt_state(step.optimizer, params))


@pytest.mark.parametrize("is_own", [False, True])
def test_the_head_gets_the_gradient_of_the_value_loss(layer, weights, rollout, is_own):
    """dL/dscore = coef sum_t w_t (V_t - R_t) h_t: a value head that is detached has none. The layers that the critic
    reads get theirs, too: the policy's own, where they are shared."""
    critic = Critic(is_own)
    algorithm = PPO(value_coef=0.7, value_clip=None)
    batch = batch_to_value(rollout).replace(advantages=np.zeros(rollout.tokens[:8].shape, np.float32))
    rows, _ = RowLayout().lay_out(batch)
    both = networks(layer, weights, critic)
    step = train_step(layer, critic, algorithm)
    places = jax.tree.map(lambda x: x.sharding, both)
    grads, _ = jax.jit(lambda params: step.gradients(params, None, 0, rows, places))(both)

    layers = both[CRITIC] if is_own else weights
    meta = attention.one_sequence_per_row(batch.token_mask)
    hidden = np.float64(jax.jit(lambda p: decoder.forward(p, layer, batch.tokens, meta, jnp.float32)[0])(layers))
    before = np.roll(hidden, 1, axis=1)
    value = before @ np.float64(both[CRITIC]["score"]) + np.float64(both[CRITIC]["score_bias"])
    slope = 0.7 * np.float64(batch.loss_weight) * (value - batch.streams[RETURNS])
    np.testing.assert_allclose(grads[CRITIC]["score"], np.einsum("bt,btd->d", slope, before), rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(grads[CRITIC]["score_bias"], [slope.sum()], rtol=2e-4)
    # the advantages are 0: whatever the policy's layers get comes from the critic
    of_policy = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(grads[POLICY]))
    assert (of_policy > 1e-4) != is_own


@pytest.mark.parametrize("packing", [pytest.param("sequences", marks=pytest.mark.wide), "prefix"])
def test_packed_rows_have_the_loss_and_the_gradient_of_single_ones(layer, weights, rollout, packing, monkeypatch):
    # the head computes only the columns that a micro-batch needs
    monkeypatch.setattr("tunix_lite.models.vocabulary._LEAST_COLUMNS", 2)
    monkeypatch.setattr("tunix_lite.models.vocabulary.LARGE_HEAD", 1)
    critic = Critic()
    batch = batch_to_value(rollout)
    both = networks(layer, weights, critic)
    step = train_step(layer, critic, PPO())
    width = batch.tokens.shape[1]
    new = rollout.completion_mask[:8].any(axis=0).sum()
    shape = RowShape(2 * width) if packing == "sequences" else RowShape(int(new), 4, width - int(new))
    packed, _ = RowLayout(packing, 1, None, shape, rows_per_micro_batch=8).lay_out(batch)
    single, _ = RowLayout().lay_out(batch)
    places = jax.tree.map(lambda x: x.sharding, both)
    gradient = jax.jit(lambda params, rows: step.gradients(params, None, 0, rows, places))
    (a, of_single), (b, of_packed) = gradient(both, single), gradient(both, packed)
    for name in ("train/loss", "train/value_loss", "train/value_clipped"):
        np.testing.assert_allclose(of_packed[name], of_single[name], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-6), b, a)


def test_while_the_critic_warms_up_the_policy_stays(layer, weights, rollout):
    """Two updates of the head alone, to the bit; then both move. The policy's rate begins at its own first update."""
    critic = Critic(warmup=2)
    step = train_step(layer, critic, PPO())
    rows, _ = RowLayout().lay_out(batch_to_value(rollout))
    state = state_of(step, with_critic(critic, layer, weights, "fp32"))
    losses = []
    for number in range(3):
        before = jax.tree.map(np.asarray, state.params)
        state, metrics = step(state, None, rows)
        losses.append(float(metrics["train/value_loss"]))
        same = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), state.params, before)
        assert all(jax.tree.leaves(same[POLICY])) == (number < 2)
        assert not any(jax.tree.leaves(same[CRITIC]))
        assert num_updates(state.opt_state) == max(0, number - 1)
    assert losses[2] < losses[1] < losses[0]


def test_a_critic_begins_with_zeros_on_the_layers_of_the_policy(layer, weights):
    own = with_critic(Critic(is_own=True), layer, weights, "fp32")
    assert own[CRITIC].keys() - weights.keys() == {"score", "score_bias"}
    assert not own[CRITIC]["score"].any() and own[POLICY] is weights
    # the update donates both: no buffer may stand in both
    assert own[CRITIC]["embed"] is not weights["embed"]
    np.testing.assert_array_equal(own[CRITIC]["embed"], weights["embed"])


def test_adapters_of_both_stand_on_one_base(params):
    adapters = {"layers": {"q": {"a": 1, "b": 2}}}
    critic = {"layers": {"q": {"a": 3, "b": 4}}, "score": 5}
    both = attach(params, {POLICY: adapters, CRITIC: critic}, LoraConfig(rank=1))
    assert both[POLICY]["layers"]["q"].base is both[CRITIC]["layers"]["q"].base
    assert (both[CRITIC]["layers"]["q"].a, both[CRITIC]["score"]) == (3, 5) and "score" not in both[POLICY]


# ---- runs


RUN = [
    *SHORT,
    *("algorithm=ppo", "algorithm.updates_per_rollout=2", "algorithm.mini_batches=2", "algorithm.critic_warmup=2"),
    *("algorithm.critic_learning_rate=1e-3", "evaluation.num_examples=4", "tracking.tensorboard=false"),
]
OWN = ["algorithm.critic=own", "algorithm.kl_coef=0.01", "algorithm.bootstrap_truncated=true"]


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(OWN, marks=pytest.mark.wide), pytest.param([*OWN, "model.lora.rank=2"], marks=pytest.mark.wide)],
)
def test_a_run_that_resumes_equals_one_that_never_stopped(tmp_path, more):
    """To the bit: both networks and their optimizers. What samples, evaluates and is loaded is the policy alone."""
    run = compose([*RUN, *more])
    whole = train(run, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "4")
    cut = train(run, tmp_path / "cut")
    jax.tree.map(np.testing.assert_array_equal, cut, whole)
    assert whole.params.keys() == {POLICY, CRITIC}
    rows, again = ([without_time(row) for row in lines(tmp_path / name)] for name in ("whole", "cut"))
    assert rows == again
    assert {"critic/explained_variance", "train/value_loss", "train/value_clipped"} <= rows[-2].keys() | rows[-1].keys()

    model = load(tmp_path / "whole")
    loaded = jax.tree.leaves(model.params)
    assert len(loaded) >= len(jax.tree.leaves(whole.params[POLICY]))
    if "model.lora.rank=2" not in more:
        jax.tree.map(np.testing.assert_array_equal, model.params, whole.params[POLICY])


@pytest.mark.parametrize("more", [[], ["algorithm.critic=own"], ["algorithm.critic=own", "model.lora.rank=2"]])
def test_the_plan_counts_the_critic(more):
    run = compose(["algorithm=ppo", "training.packing=none", *more])
    resolved = resolve_run(run, *find_model(run.model), {"fsdp": 1, "tp": 1}, "cpu")
    parts = MemoryEstimate(resolved).resident()
    with mesh_of_run(resolved, jax.devices()[:1]):
        state = abstract(resolved).state

    def size(tree) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    assert parts["parameters"] == size(state.params[POLICY])
    assert parts["critic"] == size(state.params[CRITIC])
    counters = [x for x in jax.tree.leaves(state.opt_state) if not x.ndim]
    assert parts["optimizer"] == size(state.opt_state) - size(counters)
    if more:
        others = parts["parameters"] + 4 * (resolved.cfg.embed_dim + 1)
        assert parts["critic"] == others
    set_mesh(1, 1)
