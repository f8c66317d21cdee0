"""What the settings of GRPO make of a rollout, which go together, and that each of them does something.

tests/test_conformance.py compares losses and gradients with formulas in float64.
"""

import dataclasses
import inspect
import itertools
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import as_rows, collect
from hypothesis import given
from hypothesis import strategies as st

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import corrections, distill, kl, ratios, shaping, surrogates, weighting
from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.groups import Groups
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.objective import described
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Graded, Rollout, RowBatch, TokenScores
from tunix_lite.runs.samples import arrays_of_batch
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.grading import group_metrics

WIDTH = 9
NO_BOUNDS = {"clip_low": None, "clip_high": None}


# ---- a batch that may hold anything: masks with gaps, empty completions, ratios of 1e8


@dataclasses.dataclass
class Drawn:
    weight: np.ndarray
    advantages: np.ndarray
    old: np.ndarray
    logprobs: np.ndarray
    ref: np.ndarray
    entropy: np.ndarray

    @property
    def rows(self) -> RowBatch:
        """float32, as an update sees it; what does not count is wild."""
        counts = self.weight > 0
        wild = lambda x: jnp.asarray(np.where(counts, x, 1e30), jnp.float32)  # noqa: E731
        return RowBatch(
            tokens=jnp.zeros(self.weight.shape, jnp.int32),
            token_mask=jnp.ones(self.weight.shape, bool),
            loss_weight=jnp.asarray(self.weight, jnp.float32),
            advantages=jnp.asarray(self.advantages, jnp.float32),
            old_logprobs=wild(self.old),
            ref_logprobs=wild(self.ref),
        )


def drawn(seed: int, spread: float = 0.4) -> Drawn:
    rng = np.random.default_rng(seed)
    shape = (5, WIDTH)  # one shape, so that little is compiled
    mask = rng.random(shape) < 0.7
    mask[rng.integers(0, shape[0])] = False  # an empty completion
    weight = np.where(mask, rng.uniform(0.5, 1.5, shape), 0)
    wide = np.broadcast_to(np.where(rng.random((shape[0], 1)) < 0.2, 0, rng.normal(size=(shape[0], 1))), shape)
    logprobs = -rng.exponential(1.0, shape)
    gap = rng.normal(0, spread, shape)
    gap += np.where(np.abs(np.abs(gap) - 0.2) < 0.01, 0.03, 0)
    as32 = lambda x: np.float64(np.float32(x))  # noqa: E731
    return Drawn(
        *(as32(x) for x in (weight, wide, logprobs - gap, logprobs, logprobs + rng.normal(0, 0.5, shape))),
        as32(rng.uniform(0, 2, shape)),
    )


def value_and_slopes(algorithm: GRPO, d: Drawn, streams=None):
    batch = d.rows.replace(streams=streams or {})
    of = lambda logprobs, entropy: algorithm.loss(TokenScores(logprobs, entropy), batch)  # noqa: E731
    here = jnp.asarray(d.logprobs, jnp.float32), jnp.asarray(d.entropy, jnp.float32)
    (loss, metrics), slopes = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(*here)
    return float(loss), [np.asarray(x) for x in slopes], metrics


@pytest.mark.parametrize(
    "settings",
    [
        {"surrogate": partial(surrogates.clip, dual=1.5)},
        {"surrogate": surrogates.cispo, "clip_low": None, "clip_high": 0.4},
        {"surrogate": surrogates.sapo} | NO_BOUNDS,
        {"surrogate": partial(surrogates.binary_tv, cap=1.1, log_square=0.1)} | NO_BOUNDS,
        {"ratio": ratios.sequence_ratio, "clip_low": 0.1, "clip_high": 0.1},
        {"surrogate": surrogates.geometric_mean} | NO_BOUNDS,
    ],
)
def test_ratios_of_1e8_and_1e_minus_8_give_finite_numbers(settings):
    d = drawn(3, spread=18.0)
    loss, (slopes, _), metrics = value_and_slopes(GRPO(**settings), d)
    assert np.isfinite(loss) and np.isfinite(slopes).all()
    assert all(np.isfinite(np.asarray(jax.tree.leaves(value))).all() for value in metrics.values())
    nothing = dataclasses.replace(d, weight=np.zeros_like(d.weight))  # a batch that counts nothing
    loss, (slopes, _), _ = value_and_slopes(GRPO(**settings), nothing)
    assert loss == 0 and not slopes.any()


def test_metrics_of_the_ratio_are_those_of_float64_numpy():
    d = drawn(1)
    d.weight = d.weight / d.weight.sum()
    _, _, metrics = value_and_slopes(GRPO(clip_low=0.2, clip_high=0.28, kl_coef=0.3, kl_estimator="k3"), d)
    w, A, ratio = d.weight, d.advantages, np.exp(d.logprobs - d.old)
    counts, gap, of_reference = w > 0, (d.logprobs - d.old)[w > 0], d.ref - d.logprobs
    expected = {
        "train/clipped_high": w[(A > 0) & (ratio > 1.28)].sum(),
        "train/clipped_low": w[(A < 0) & (ratio < 0.8)].sum(),
        "train/ratio_outside_clip": w[(ratio < 0.8) | (ratio > 1.28)].sum(),
        "train/ratio_mean": (w * ratio).sum(),
        "train/sampler_mult_prob_error": (w[counts] * np.exp(np.abs(gap))).sum(),
        "train/sampler_k3": (w[counts] * (np.exp(gap) - gap - 1)).sum(),
        "train/kl": (w * (np.exp(of_reference) - of_reference - 1)).sum(),
    }
    for name, value in expected.items():
        assert value > 0
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    largest = {"train/sampler_gap_max": np.abs(gap).max(), "train/ratio_max": ratio[counts].max()}
    for name, value in (largest | {"train/ratio_min": -ratio[counts].min()}).items():
        np.testing.assert_allclose(metrics[name].value, value, rtol=1e-5, err_msg=name)


def test_a_correction_multiplies_the_gain_and_not_the_kl():
    d = drawn(1)
    weights = jnp.asarray(np.random.default_rng(0).uniform(0, 2, d.weight.shape), jnp.float32)
    chosen = {"kl_coef": 0.2, "correction": corrections.truncate_tokens, "old_logprobs": "rescored"}
    loss, _, metrics = value_and_slopes(GRPO(**chosen), d, {corrections.STREAM_NAME: weights})
    rho = np.exp(d.logprobs - d.old)
    gain = np.minimum(rho * d.advantages, np.clip(rho, 0.8, 1.28) * d.advantages)
    np.testing.assert_allclose(loss, 0.2 * metrics["train/kl"] - (d.weight * weights * gain).sum(), rtol=1e-5)
    _, _, plain = value_and_slopes(GRPO(kl_coef=0.2), d)
    assert metrics["train/kl"] == plain["train/kl"]


# ---- advantages


def test_the_std_survives_a_group_that_nearly_agrees():
    """One-pass variance gives about -2000 here (notes on NeMo-RL); TRL's two passes give -2.474 and 0.353."""
    np.testing.assert_allclose(adv.standardise([[0.0] + [0.95] * 7])[0], [-2.474] + [0.3534] * 7, atol=1e-3)


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_a_group_that_agrees_teaches_exactly_nothing(reward, size):
    rewards = np.full((3, size), reward)
    for advantages in (adv.standardise, adv.centre, adv.leave_one_out):
        np.testing.assert_array_equal(advantages(rewards), 0.0)
    whole = adv.WholeBatch(np.arange(3 * size).reshape(3, size) + 1, {"a": rewards}, {"a": 1.0})
    for of_batch in (adv.batch_scaled, adv.whiten, partial(adv.whiten, group_baseline=False), adv.per_reward):
        np.testing.assert_array_equal(of_batch(rewards, whole=whole), 0.0)


def test_a_short_prompt_counts_as_much_as_a_long_one_among_those_that_are_learned_from():
    """ScaleRL: two completions of 5 tokens beside two of 100; a third prompt agrees, and one of the long ones failed."""
    lengths = np.array([[5, 5], [100, 100], [7, 7]])
    mask = np.arange(100) < lengths.reshape(-1, 1)
    prompts = np.array([0, 0, 1, -1, -1, -1])
    weights = weighting.weights_of_learned(weighting.per_prompt, mask, prompts, 1)
    sums = weights.sum(axis=1).reshape(3, 2)
    np.testing.assert_allclose(sums, [[1 / 4, 1 / 4], [1 / 2, 0], [0, 0]], rtol=1e-6)
    # two mini-batches, each with a prompt
    halves = weighting.weights_of_learned(weighting.per_prompt, mask[:4], np.array([0, 0, 1, 1]), num_mini_batches=2)
    np.testing.assert_allclose(halves.sum(axis=1), [1 / 2] * 4, rtol=1e-6)
    # the preset is that objective
    assert compose(["algorithm=scalerl"]).algorithm.weighting is weighting.per_prompt


def test_max_likelihood_takes_rewards_of_0_and_1():
    with pytest.raises(ValueError, match="rewards must be 0 or 1; one is 0.3"):
        adv.max_likelihood([[0.0, 0.3]])


def test_overlong_is_in_tokens_and_rises_over_the_last_share():
    """The table of DAPO's formula for L_max 100, cache 20."""
    found = shaping.overlong(np.array([0, 79, 80, 85, 90, 100, 150]), length=100, buffer=0.2)
    np.testing.assert_allclose(found, [0, 0, 0, -0.25, -0.5, -1, -1], atol=1e-12)


# ---- batch_of


def of_rewards(rewards_PG, lengths=None, finish=None, correct=None):
    """(policy, task) whose completions have these rewards: rounds of P groups, one after the other."""
    rewards_PG = np.asarray(rewards_PG, float)
    state = SimpleNamespace(at=0, keys=[], prompts=[])

    def generate(params, prompts, key, num_generations, **_):
        P, G = len(prompts), num_generations
        state.keys.append(jax.random.key_data(key).tolist())
        state.prompts.append(prompts)
        state.now = rewards_PG[state.at : state.at + P].reshape(-1)
        rows = slice(state.at * G, (state.at + P) * G)
        state.at += P
        B, T = P * G, 6
        tokens = np.arange(B * T, dtype=np.int32).reshape(B, T)
        length = np.full(B, 3) if lengths is None else np.asarray(lengths).reshape(-1)[rows]
        mask = (np.arange(T) >= 1) & (np.arange(T) < 1 + length[:, None])
        finished = np.ones(B, np.int8) if finish is None else np.asarray(finish).reshape(-1)[rows]
        lp = np.where(mask, -1.0 - 0.01 * tokens, 0).astype(np.float32)
        return Rollout(tokens, mask | (np.arange(T) == 0), mask, lp - 0.5, finished.astype(np.int8), lp)

    def results(rollout, G):
        r = state.now
        metrics = {"reward/mean": float(r.mean()), "reward/std": float(r.std()), "time/rewards": 1.0}
        metrics |= group_metrics(r, np.isnan(r), [[*range(row, row + G)] for row in range(0, len(r), G)])
        texts = [str(x) for x in r]
        nothing = [{}] * len(r)
        of_each = {"a": r}, {"a": 1.0}, nothing, rollout, nothing
        return Graded(texts, texts, r, r > 0, texts, metrics, np.isnan(r), *of_each)

    task = SimpleNamespace(
        grader=lambda group, G: SimpleNamespace(submit=None, results=partial(results, G=G)),
        prompts=lambda examples: list(examples),
        partner=lambda examples, G: None,
        long_prompts="error",
    )
    scorer = lambda batch: np.asarray(batch.old_logprobs) - 0.25  # noqa: E731
    rescore = lambda params, batch: np.where(batch.loss_weight != 0, batch.old_logprobs + 0.1, 0)  # noqa: E731
    return Policy(generate, None, {"reference": scorer}, rescore), task, state


def collected(algorithm, rewards_PG, num_prompts=None, **known):
    policy, task, state = of_rewards(rewards_PG, **known)
    count = len(rewards_PG) if num_prompts is None else num_prompts
    examples = [{"n": n} for n in range(count * algorithm.max_rounds)]
    return *collect(algorithm, policy, task, None, examples, jax.random.key(0)), state


MIXED = [[1, 0], [1, 1], [0, 1], [0, 0]]


def test_shaping_mask_and_advantage_clip_by_hand():
    algorithm = GRPO(
        num_generations=2,
        advantages=adv.centre,
        advantage_clip=0.6,
        shaping=partial(shaping.overlong, length=4, buffer=0.5),
        mask_truncated=True,
    )
    batch, metrics, *_ = collected(algorithm, [[1.0, 0.0]], lengths=[[2, 4]], finish=[[1, 0]])
    # rewards 1 and 0 - 1, centred +1 and -1, clipped; the truncated one has no weight
    np.testing.assert_allclose(batch.advantages[:, 0], [0.6, -0.6], rtol=1e-6)
    np.testing.assert_allclose(batch.loss_weight.sum(axis=1), [1, 0])
    assert metrics["reward/mean"] == 0.5, "what is logged is the reward of the task"


def test_groups_of_equal_rewards_can_be_left_out_of_the_denominator():
    batch, metrics, *_ = collected(GRPO(num_generations=2, agreeing_groups="drop"), MIXED)
    np.testing.assert_allclose(batch.loss_weight.sum(axis=1), [0.25, 0.25, 0, 0, 0.25, 0.25, 0, 0])
    assert metrics["reward/groups_that_agree"] == 0.5


def test_mini_batches_have_weights_of_their_own():
    algorithm = GRPO(num_generations=2, mini_batches=2, updates_per_rollout=4)
    batch, *_ = collected(algorithm, MIXED, lengths=[[1, 2], [3, 4], [5, 5], [1, 1]])
    np.testing.assert_allclose(batch.loss_weight[:4].sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(batch.loss_weight[4:].sum(), 1, rtol=1e-6)
    assert batch.loss_weight[0].max() == pytest.approx(1 / 10) and batch.loss_weight[4].max() == pytest.approx(1 / 12)


def test_the_ratio_is_to_the_distribution_that_was_chosen():
    """Of `of_rewards`: under the whole distribution -1 - 0.01 token, under what was drawn from 0.5 less."""
    for chosen, less in (("whole", 0.0), ("sampled", 0.5)):
        batch, *_ = collected(GRPO(num_generations=2, old_logprobs=chosen), MIXED)
        counts = batch.loss_weight > 0
        expected = -1 - 0.01 * batch.tokens - less
        np.testing.assert_allclose(batch.old_logprobs[counts], expected[counts], rtol=1e-6)


def test_the_trainers_own_log_probabilities_and_their_correction():
    algorithm = GRPO(
        num_generations=2, old_logprobs="rescored", correction=partial(corrections.truncate_tokens, cap=1.05)
    )
    assert algorithm.needs.rescore and algorithm.needs.streams == ("correction",)
    batch, metrics, *_ = collected(algorithm, MIXED)
    counts = batch.loss_weight > 0
    plain, *_ = collected(GRPO(num_generations=2), MIXED)
    np.testing.assert_allclose(batch.old_logprobs[counts], plain.old_logprobs[counts] + 0.1, rtol=1e-5)
    np.testing.assert_allclose(batch.streams["correction"], np.where(counts, 1.05, 0), rtol=1e-6)
    assert metrics["sampler/logprob_gap"] == pytest.approx(0.1, rel=1e-5) and metrics["sampler/masked"] == 0
    assert not GRPO().needs.rescore, "nobody pays for a pass that was not asked for"


# ---- the table of what may go with what: each combination is refused, or its gradient is right in expectation


TABLE = {
    "overlap": ("none", "carry", "one_step"),
    "old_logprobs": ("whole", "sampled", "rescored"),
    "correction": (None, corrections.truncate_tokens, corrections.mask_tokens, corrections.mask_sequences),
    "objective": ("clip", "cispo", "sapo", "binary_tv", "geometric_mean", "sequence_ratio", "no_ratio", "distill"),
    "kl_estimator": (None, *kl.ESTIMATORS, kl.IN_REWARD),
}
# off_policy_delta and mask_truncated
TOGETHER = ((None, False), (0.5, True))
APART = ((None, True), (0.5, False))
BASE = compose(["rollout.overlap=none"])
STALE = {name: dataclasses.replace(BASE.rollout, overlap=name) for name in TABLE["overlap"]}


def of_the_table(old_logprobs, correction, objective, kl_estimator, off_policy_delta, mask_truncated):
    """The algorithm of these settings. Raises ValueError where its own checks refuse them."""
    chosen = {"old_logprobs": old_logprobs, "correction": correction, "off_policy_delta": off_policy_delta}
    chosen |= {} if kl_estimator is None else {"kl_coef": 0.3, "kl_estimator": kl_estimator}
    if objective in ("sequence_ratio", "no_ratio"):
        chosen |= NO_BOUNDS | {"ratio": getattr(ratios, objective), "surrogate": surrogates.policy_gradient}
    else:
        chosen |= {"surrogate": getattr(surrogates, objective)}
        chosen |= {} if objective in ("clip", "cispo") else NO_BOUNDS
    return GRPO(advantages=adv.centre, mask_truncated=mask_truncated, **chosen)


# completions of one token over five tokens: the policy now, the weights before, the reference, rewards, unfinished ones
def one_token():
    rng = np.random.default_rng(0)
    now = rng.normal(size=5)
    moved = now + rng.uniform(-0.1, 0.1, 5)
    far = rng.normal(size=5)
    log_softmax = lambda x: x - np.log(np.exp(x).sum())  # noqa: E731
    return *map(log_softmax, (now, moved, far)), rng.normal(size=5), np.array([True, True, False, True, True])


def expected_slope(algorithm, is_stale):
    """By hand: the gradient of the objective by the log-probabilities of the policy now, where each completion is as
    frequent as the weights that drew it have it."""
    log_now, log_before, log_ref, rewards, finished = one_token()
    p = np.exp(log_now)
    learned = finished | (not algorithm.mask_truncated)
    d = log_ref - log_now
    in_reward = algorithm.kl_estimator == "k1_reward"
    if algorithm.kl_coef and in_reward:
        # of all that are compared, learned from or not
        rewards = rewards + algorithm.kl_coef * d
    slope = p * (rewards - rewards.mean())
    if is_stale and algorithm.surrogate is surrogates.sapo and not algorithm.needs.rescore:
        # d/d rho of 4 / tau sigmoid(tau (rho - 1))
        tau = np.where(rewards > rewards.mean(), 1.0, 1.05)
        gate = 1 / (1 + np.exp(-tau * (np.exp(log_now - log_before) - 1)))
        slope = slope * 4 * gate * (1 - gate)
    if algorithm.kl_coef and not in_reward:
        # of KL(policy || reference); k3 has a gradient of its own, of whatever was drawn
        own = np.exp(log_before if is_stale else log_now) * (1 - np.exp(d))
        slope = slope - algorithm.kl_coef * (own if algorithm.kl_estimator == "k3" else -p * d)
    return np.where(learned, slope, 0.0)


@cache
def found_slope(algorithm, is_stale):
    """The same by what the run computes: `GRPO.scored`, then the loss, with each completion once and its frequency as its
    weight."""
    log_now, log_before, log_ref, rewards, finished = one_token()
    drew = log_before if is_stale else log_now
    column = lambda x: np.stack([np.zeros(5), x], axis=1)  # noqa: E731
    mask = column(np.ones(5)).astype(bool)
    old = column(drew)
    rollout = Rollout(column(np.arange(5)).astype(int), mask | True, mask, old, finished.astype(np.int8), old)
    rewards_PG = rewards[None]
    graded = Graded([], [], rewards, rewards > 0, [], {}, np.zeros(5, bool))
    groups = Groups(rollout, graded, rewards_PG, np.ones((1, 5), bool), {})
    groups = algorithm.selected(groups)

    # scorers give nothing where no token counts
    of = lambda values: lambda batch: np.where(np.asarray(batch.loss_weight) != 0, column(values), 0.0)  # noqa: E731
    policy = Policy(None, None, {"reference": of(log_ref)}, lambda params, batch: of(log_now)(batch))
    weights = column(np.exp(drew)) * groups.learned_PG.T
    batch = groups.batch(algorithm.advantages, lambda mask: mask.astype(float))
    batch = batch.replace(loss_weight=weights)
    batch, _ = algorithm.scored(batch, groups, policy, None)
    with jax.enable_x64(True):
        rows = as_rows(jax.tree.map(jnp.asarray, batch))

        def loss(logprobs):
            scores = TokenScores(jnp.stack([jnp.zeros(5), logprobs], axis=1), jnp.zeros((5, 2)))
            return algorithm.loss(scores, rows)[0]

        return -np.asarray(jax.grad(loss)(jnp.asarray(log_now)))


def test_a_nan_that_is_added_to_a_reward_is_refused_as_nan_stands_for_a_dropped_completion():
    column = np.ones((3, 1))
    rollout = Rollout(column.astype(int), column > 0, column > 0, column, np.zeros(3, np.int8), column)
    rewards = np.array([1.0, 0.0, np.nan])
    graded = Graded([], [], rewards, rewards > 0, [], {}, np.isnan(rewards))
    groups = Groups(rollout, graded, rewards[None], ~np.isnan(rewards)[None], {})
    with_kl = groups.with_reward("kl", np.array([0.5, 2.0, np.nan]))
    np.testing.assert_array_equal(
        with_kl.rewards_PG, [[1.5, 2.0, np.nan]], "of one that was dropped it may be anything"
    )
    with pytest.raises(ValueError, match="`kl` is added to the rewards, and it is nan for a completion"):
        groups.with_reward("kl", np.array([0.5, np.nan, 0.0]))


@pytest.mark.parametrize("others", [TOGETHER, pytest.param(APART, marks=pytest.mark.wide)], ids=["together", "apart"])
@pytest.mark.parametrize("overlap", TABLE["overlap"])
@pytest.mark.parametrize("objective", [name for name in TABLE["objective"] if name != "distill"])
def test_every_combination_is_refused_or_its_expected_gradient_is_that_of_the_policy_now(objective, overlap, others):
    accepted = []
    names = ("old_logprobs", "correction", "kl_estimator")
    for *values, (delta, mask) in itertools.product(*(TABLE[name] for name in names), others):
        chosen = dict(zip(names, values), off_policy_delta=delta, mask_truncated=mask)
        try:
            algorithm = of_the_table(objective=objective, **chosen)
        except ValueError:
            # by itself, whatever the rollout is: a correction without rescoring, a clip of what has no ratio
            assert chosen["correction"] is not None and chosen["old_logprobs"] != "rescored"
            continue
        try:
            dataclasses.replace(BASE, algorithm=algorithm, rollout=STALE[overlap])
        except ValueError as error:
            assert overlap != "none" and "set algorithm." in str(error)
            continue
        accepted.append(chosen)
        # what does not meet in the code is computed once: another objective with another KL in the loss
        kinds = [chosen["kl_estimator"] in kl.ESTIMATORS, objective != "clip", chosen["off_policy_delta"] is not None]
        if sum(kinds) > 1:
            continue
        is_stale = overlap != "none"
        slope = found_slope(algorithm, is_stale)
        np.testing.assert_allclose(slope, expected_slope(algorithm, is_stale), atol=1e-6, err_msg=str(chosen))
    # rescored without a correction and three of them; whole and sampled; 6 x 2 others
    if overlap == "none":
        assert len(accepted) == (4 + 2) * 6 * 2
    elif objective == "no_ratio":
        assert not accepted
    else:
        # k2 and k1_reward leave four; rescored stays with two corrections, without a KL or off_policy_delta
        assert len(accepted) == 2 * 4 * 2 + 2


@pytest.mark.parametrize("divergence", distill.DIVERGENCES)
@pytest.mark.parametrize("overlap", TABLE["overlap"])
def test_a_teachers_gap_of_the_sampled_token_is_refused_where_older_weights_drew_it(overlap, divergence):
    algorithm = distill.Distill(teacher="any", divergence=divergence)
    if overlap == "none" or divergence != "token":
        dataclasses.replace(BASE, algorithm=algorithm, rollout=STALE[overlap])
        return
    with pytest.raises(
        ValueError, match="compares the teacher with the weights that sampled; set algorithm.divergence"
    ):
        dataclasses.replace(BASE, algorithm=algorithm, rollout=STALE[overlap])


@pytest.mark.parametrize(
    "given",
    [
        "algorithm.old_logprobs=rescored",
        "algorithm.kl_coef=0.1 algorithm.kl_estimator=k1_reward",
        "algorithm.kl_coef=0.1 algorithm.kl_estimator=k2",
        "algorithm.old_logprobs=rescored algorithm.kl_coef=0.1 "
        "+algorithm.correction._target_=tunix_lite.algorithms.corrections.truncate_tokens",
        "algorithm=distill algorithm.teacher.weights=bundled",
    ],
)
def test_the_line_of_a_refusal_is_accepted(given):
    words = ["rollout.overlap=one_step", *given.split()]
    with pytest.raises(ConfigError, match="rollout.overlap=one_step: algorithm") as error:
        compose(words)
    line = str(error.value).partition("; set ")[2].partition(", or leave rollout.overlap at none")[0]
    keys = {word.partition("=")[0] for word in line.split()}
    compose(
        [word for word in words if word.lstrip("+").partition("._target_")[0].partition("=")[0] not in keys]
        + line.split()
    )


# ---- dynamic sampling


def drawn_in_rounds(rewards_PG, P, rounds, lengths=None, **settings):
    algorithm = GRPO(num_generations=2, agreeing_groups="replace", max_rounds=rounds, **settings)
    return collected(algorithm, rewards_PG, num_prompts=P, lengths=lengths)


def test_replaced_groups_fill_the_batch_exactly_and_stop_when_it_is_full():
    """P = 2, three rounds allowed: 1 mixed, then 2 mixed; the third is not sampled, one mixed group is left over."""
    batch, metrics, graded, state = drawn_in_rounds([[1, 1], [1, 0], [0, 1], [1, 0], [1, 0], [1, 0]], 2, 3)
    assert len(state.keys) == 2 and state.keys[0] != state.keys[1]
    assert len(batch.tokens) == 4 == len(graded.completions)
    np.testing.assert_array_equal(graded.rewards, [1, 0, 0, 1])
    np.testing.assert_array_equal(graded.rollout.tokens, batch.tokens)
    np.testing.assert_allclose(batch.advantages[:, 0], [0.70701, -0.70701, -0.70701, 0.70701], atol=1e-4)
    np.testing.assert_allclose(batch.loss_weight.sum(axis=1), 0.25)
    assert (metrics["prompts/drawn"], metrics["prompts/mixed"], metrics["prompts/kept"]) == (4, 3, 2)
    # of all that was sampled, kept or not
    assert metrics["reward/mean"] == pytest.approx(5 / 8)
    assert metrics["reward/groups_that_agree"] == 0.25 and metrics["time/rewards"] == 2.0
    assert metrics["time/extra_rounds"] >= 0
    assert state.prompts == [[{"n": 0}, {"n": 1}], [{"n": 2}, {"n": 3}]]


def test_a_further_round_shares_no_random_numbers_with_a_completion_of_the_first():
    """Completion b of a rollout draws from fold_in(key, b): no round may have one of those as its own key."""
    *_, state = drawn_in_rounds([[0, 0]] * 8, 2, 4)
    first, *others = state.keys
    key = jax.random.wrap_key_data(np.asarray(first, np.uint32))
    of_completions = [jax.random.key_data(jax.random.fold_in(key, b)).tolist() for b in range(64)]
    assert len(others) == 3 and not any(other in of_completions for other in others)


def test_when_the_rounds_are_used_up_the_others_have_no_weight():
    for rewards, kept in (([[0, 0]] * 6, 0), ([[1, 1]] * 6, 0), ([[0, 0]] * 5 + [[0, 1]], 1)):
        batch, metrics, _, state = drawn_in_rounds(rewards, 2, 3)
        assert len(state.keys) == 3 and len(batch.tokens) == 4, "bounded work, a full batch"
        assert metrics["prompts/drawn"] == 6 and metrics["prompts/kept"] == kept
        np.testing.assert_allclose(batch.loss_weight.sum(), 1.0 if kept else 0.0)
        assert np.isfinite(batch.advantages).all()


def test_groups_are_judged_before_shaping():
    """Else a penalty on length would make every all-wrong group look mixed (rl.md 2.1)."""
    penalty = partial(shaping.overlong, length=4, buffer=1.0)
    _, metrics, *_ = drawn_in_rounds([[0, 0], [1, 0]], 1, 2, lengths=[[2, 4], [2, 4]], shaping=penalty)
    assert metrics["prompts/drawn"] == 2 and metrics["prompts/mixed"] == 1


def test_duplicated_prompts_are_groups_of_their_own():
    """One example twice in a row is graded as two groups."""
    seen = []
    policy, task, _ = of_rewards([[1, 0], [0, 0]])
    grader = task.grader([], 2)
    task.grader = lambda examples, G: seen.append((len(examples), G)) or grader
    twice = {"n": 0}
    batch, *_ = collect(GRPO(num_generations=2), policy, task, None, [twice, twice], jax.random.key(0))
    assert seen == [(2, 2)]
    np.testing.assert_allclose(batch.advantages[2:], 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"surrogate": surrogates.sapo, "clip_high": 0.3}, "clip_high=0.3 would change nothing: surrogate=sapo clips"),
        ({"kl_estimator": "k2"}, "kl_estimator=k2 would change nothing: kl_coef=0, so there is no KL term"),
        ({"agreeing_groups": "replace"}, "agreeing_groups=replace with max_rounds=1 replaces no group"),
        ({"ratio": ratios.no_ratio}, "surrogate=clip is a function of the ratio, which is 1 with ratio=no_ratio"),
        (
            {"ratio": ratios.no_ratio, "surrogate": surrogates.policy_gradient, "updates_per_rollout": 2},
            "only the first update of a rollout uses the policy that sampled",
        ),
        ({"correction": corrections.mask_tokens}, "set old_logprobs=rescored"),
        ({"mini_batches": 2}, "mini_batches=2 must divide updates_per_rollout=1"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator='k1'; it is k3_exact, k3, k3_ratio, k2 or k1_reward"),
        ({"kl_coef": 0.1, "kl_estimator": "k1_reward", "advantages": adv.max_likelihood}, "rewards of 0 and 1 only"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_settings_that_are_wrong_or_idle_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as error:
        GRPO(**settings)
    assert message in str(error.value) and "\n" not in str(error.value)


RESCORED = {"old_logprobs": "rescored"}
KL = {"kl_coef": 0.1}
UNCLIPPED = {"surrogate": surrogates.policy_gradient}
TWICE = {"agreeing_groups": "replace", "max_rounds": 2}
OVERLONG = partial(shaping.overlong, length=5)
# (settings, one of them changed): both must learn something else
CHANGES = {
    "num_generations": ({}, {"num_generations": 4}),
    "mini_batches": ({"updates_per_rollout": 2}, {"updates_per_rollout": 2, "mini_batches": 2}),
    "advantages": ({}, {"advantages": adv.centre}),
    "advantages: batch_scaled": ({}, {"advantages": adv.batch_scaled}),
    "advantages: leave_one_out_std": ({}, {"advantages": adv.leave_one_out_std}),
    "advantage_clip": ({}, {"advantage_clip": 0.2}),
    "weighting": ({}, {"weighting": weighting.per_sequence}),
    "ratio": ({}, {"ratio": ratios.sequence_ratio}),
    "surrogate": ({}, {"surrogate": surrogates.cispo}),
    "clip_low": ({}, {"clip_low": 0.05}),
    "clip_high": ({}, {"clip_high": 0.05}),
    "kl_coef": (KL, {"kl_coef": 0.2}),
    **{f"kl_estimator: {name}": (KL, KL | {"kl_estimator": name}) for name in ("k2", "k3", "k3_ratio", "k1_reward")},
    "entropy_coef": ({}, {"entropy_coef": 0.01}),
    "old_logprobs": ({}, {"old_logprobs": "sampled"}),
    "old_logprobs: rescored": ({}, RESCORED),
    "correction": (RESCORED, RESCORED | {"correction": corrections.truncate_tokens}),
    "off_policy_delta": (UNCLIPPED, UNCLIPPED | {"off_policy_delta": 0.01}),
    "agreeing_groups": ({}, {"agreeing_groups": "drop"}),
    "agreeing_groups: replace": ({}, TWICE),
    "max_rounds": (TWICE, TWICE | {"max_rounds": 3}),
    "shaping": ({}, {"shaping": OVERLONG}),
    "mask_truncated": ({}, {"mask_truncated": True}),
}
# the same of each setting of a piece: (setting of GRPO, the piece, its own settings otherwise)
PIECES = [
    ("advantages", adv.standardise, {"eps": 0.1}),
    ("advantages", adv.batch_scaled, {"eps": 0.1, "mean": "batch"}),
    ("advantages", adv.whiten, {"over": "samples", "group_baseline": False, "eps": 0.1}),
    ("advantages", adv.leave_one_out_std, {"eps": 0.1}),
    ("advantages", adv.per_reward, {"eps": 0.1}),
    ("advantages", adv.max_likelihood, {"eps": 0.1}),
    ("weighting", partial(weighting.constant_length, length=5), {"length": 6}),
    ("surrogate", surrogates.clip, {"dual": 1.3}),
    ("surrogate", surrogates.sapo, {"tau_positive": 2.0, "tau_negative": 2.0}),
    ("surrogate", partial(surrogates.binary_tv, delta_low=0.01, delta_high=0.01), {"delta_low": 1, "delta_high": 1}),
    ("surrogate", surrogates.binary_tv, {"cap": 1.1, "log_square": 0.1}),
    ("surrogate", surrogates.geometric_mean, {"log_clip": 0.1}),
    ("correction", corrections.truncate_tokens, {"cap": 1.01}),
    ("correction", corrections.mask_tokens, {"low": 1.2, "high": 1.01}),
    ("correction", partial(corrections.mask_sequences, high=2.0), {"low": 1.2, "high": 1.05}),
    ("shaping", OVERLONG, {"length": 6, "buffer": 0.9, "factor": 0.5}),
]
for setting, piece, changes in PIECES:
    base = {"num_generations": 4} | (RESCORED if setting == "correction" else {})
    name = getattr(piece, "func", piece).__name__
    for key, value in changes.items():
        pair = (base | {setting: chosen} for chosen in (piece, partial(piece, **{key: value})))
        CHANGES[f"{name}.{key}"] = tuple(pair)


def learned(chosen):
    """(batch, loss, slopes) of these settings: a rollout, then an update of a policy that has moved on."""
    algorithm = GRPO(**({"num_generations": 2} | chosen))
    rewards = [[1, 0], [1, 1], [0, 1], [0, 0], [1, 1], [0, 0], [1, 0], [0, 0]] + [[1, 0]] * 4  # rounds of four
    rewards = np.array(rewards, float).reshape(-1, algorithm.num_generations)
    lengths = np.random.default_rng(0).integers(1, 6, rewards.shape)
    finish = np.random.default_rng(1).integers(0, 2, rewards.shape)
    batch, *_ = collected(algorithm, rewards, len(rewards) // 3, lengths=lengths, finish=finish)
    moved = np.random.default_rng(2).normal(-0.2, 0.3, batch.tokens.shape)
    rows = as_rows(jax.tree.map(jnp.asarray, batch))
    logprobs = jnp.asarray(np.where(batch.loss_weight != 0, batch.old_logprobs + moved, 0), jnp.float32)
    loss, slopes = jax.value_and_grad(lambda lp: algorithm.loss(TokenScores(lp, jnp.ones_like(lp)), rows)[0])(logprobs)
    return arrays_of_batch(batch), float(loss), np.asarray(slopes)


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_changes_the_batch_the_loss_or_its_gradient(name):
    (batch, loss, slopes), (other, other_loss, other_slopes) = map(learned, CHANGES[name])
    is_same = batch.keys() == other.keys() and all(np.array_equal(batch[key], other[key]) for key in batch)
    is_same = is_same and loss == other_loss and np.array_equal(slopes, other_slopes)
    assert not is_same, f"{name} does nothing"
    assert all(np.isfinite(x).all() for x in (*batch.values(), *other.values(), slopes, other_slopes))


def test_the_list_of_changes_has_every_setting_of_every_piece():
    fields = {field.name for field in dataclasses.fields(GRPO)} - {"updates_per_rollout"}  # the loop's: test_experience
    assert fields <= {name.partition(":")[0] for name in CHANGES}
    for module in (adv, surrogates, corrections, shaping, weighting):
        for function in vars(module).values():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                parameters = inspect.signature(function).parameters.values()
                of_yaml = [p.name for p in parameters if isinstance(p.default, int | float | str)]
                assert all(f"{function.__name__}.{name}" in CHANGES for name in of_yaml), function.__name__


def test_settings_that_are_not_at_their_default_are_named_with_the_pieces():
    settings = ["+algorithm.surrogate.dual=3", "algorithm.kl_coef=0.04", "algorithm.clip_high=0.2"]
    text = described(compose(["algorithm=grpo", *settings]).algorithm)
    assert "surrogate=clip(dual=3)" in text and "kl_coef=0.04" in text and "clip_high=0.2" in text
    assert "clip_low" not in text, "0.2 is the default"
    text = described(compose(["algorithm=dapo", "generation.max_new_tokens=100"]).algorithm)
    assert "max_rounds=3, shaping=overlong(length=100, buffer=0.2, factor=1.0)" in text


# ---- pieces of a user (docs/extend/algorithm.md)


def test_pieces_of_a_user_stand_beside_ours(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs" / "extend" / "example")
    import my_pieces

    np.testing.assert_allclose(my_pieces.ranked(np.array([[3.0, 1.0, 1.0], [0, 0, 0]])), [[1, -0.5, -0.5], [0, 0, 0]])
    d = drawn(5)
    algorithm = GRPO(advantages=my_pieces.ranked, surrogate=my_pieces.squashed)
    loss, (slopes, _), _ = value_and_slopes(algorithm, d)
    squashed = np.tanh((d.logprobs - d.old) / 0.3)
    np.testing.assert_allclose(loss, -(d.weight * (1 + 0.3 * squashed) * d.advantages).sum(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slopes, -d.weight * (1 - squashed**2) * d.advantages, rtol=1e-3, atol=1e-5)
    assert "surrogate=squashed" in described(algorithm)
