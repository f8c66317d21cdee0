"""Losses, their gradients, corrections and advantages equal formulas of the papers, in float64 numpy."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objectives import NO_BOUNDS, Drawn, drawn, value_and_slopes

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import corrections, kl, ratios, surrogates
from tunix_lite.algorithms.grpo import GRPO


def sequence_mean(x, d: Drawn):
    counts = d.weight > 0
    return np.where(counts, x, 0).sum(axis=1, keepdims=True) / np.maximum(counts.sum(axis=1, keepdims=True), 1)


# ---- surrogates: name -> (settings, drawn batch -> (gain, its slope in lp)), from the papers


def per_token(gain, slope):
    """A gain of each token alone, and its slope in the log-ratio of that token."""
    return lambda d: (gain(np.exp(d.logprobs - d.old), d), slope(np.exp(d.logprobs - d.old), d))


def clip_gain(low, high, dual=None):
    def gain(rho, d):
        value = np.minimum(rho * d.advantages, np.clip(rho, low, high) * d.advantages)
        if dual is not None:
            value = np.where(d.advantages < 0, np.maximum(value, dual * d.advantages), value)
        return value

    def slope(rho, d):
        A = d.advantages
        inside = np.where(A > 0, rho < high, rho > low)
        if dual is not None:
            inside &= (A >= 0) | (rho < dual)
        return np.where(inside, rho * A, 0.0)

    return per_token(gain, slope)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sapo_gain(positive, negative):
    tau = lambda d: np.where(d.advantages > 0, positive, negative)  # noqa: E731
    gate = lambda rho, d: sigmoid(tau(d) * (rho - 1))  # noqa: E731
    return per_token(
        lambda rho, d: 4 / tau(d) * gate(rho, d) * d.advantages,
        lambda rho, d: 4 * gate(rho, d) * (1 - gate(rho, d)) * rho * d.advantages,
    )


def moved_kept(d, delta):
    moved = np.exp(d.logprobs) - np.exp(d.old)
    return ~((d.advantages > 0) & (moved > delta) | (d.advantages < 0) & (moved < -delta))


def gspo(low, high):
    def both(d):
        s = np.exp(sequence_mean(d.logprobs - d.old, d))
        A = d.advantages
        gain = np.minimum(s * A, np.clip(s, low, high) * A)
        inside = np.where(A > 0, s < high, s > low)
        # every token of a completion moves s by s / its length; all of its tokens' gains move with it
        shared = (d.weight * np.where(inside, s * A, 0.0)).sum(axis=1, keepdims=True)
        lengths = np.maximum((d.weight > 0).sum(axis=1, keepdims=True), 1)
        return gain, np.where(d.weight > 0, shared / lengths, 0) / np.where(d.weight > 0, d.weight, 1)

    return both


def gmpo(limit):
    def both(d):
        log_rho, A = d.logprobs - d.old, d.advantages
        inside = np.where(A > 0, log_rho < limit, log_rho > -limit)
        bounded = np.where(inside, log_rho, np.where(A > 0, limit, -limit))
        s = np.exp(sequence_mean(bounded, d))
        shared = (d.weight * s * A).sum(axis=1, keepdims=True)
        lengths = np.maximum((d.weight > 0).sum(axis=1, keepdims=True), 1)
        return s * A, np.where(inside & (d.weight > 0), shared / lengths, 0) / np.where(d.weight > 0, d.weight, 1)

    return both


SURROGATES = {
    "clip": ({"clip_low": 0.2, "clip_high": 0.28}, clip_gain(0.8, 1.28)),
    "dual": ({"clip_high": 0.2, "surrogate": partial(surrogates.clip, dual=1.5)}, clip_gain(0.8, 1.2, 1.5)),
    "clip above only": ({"clip_low": None, "clip_high": 0.2}, clip_gain(-np.inf, 1.2)),
    "cispo": (
        {"surrogate": surrogates.cispo, "clip_low": None, "clip_high": 0.4},
        per_token(
            lambda rho, d: np.minimum(rho, 1.4) * d.advantages * d.logprobs,
            lambda rho, d: np.minimum(rho, 1.4) * d.advantages,
        ),
    ),
    "cispo as verl": (
        {"surrogate": surrogates.cispo, "clip_low": 0.2, "clip_high": 0.2},
        per_token(
            lambda rho, d: np.clip(rho, 0.8, 1.2) * d.advantages * d.logprobs,
            lambda rho, d: np.clip(rho, 0.8, 1.2) * d.advantages,
        ),
    ),
    "sapo": ({"surrogate": surrogates.sapo} | NO_BOUNDS, sapo_gain(1.0, 1.05)),
    "sapo, other tau": (
        {"surrogate": partial(surrogates.sapo, tau_positive=2.0, tau_negative=3.0)} | NO_BOUNDS,
        sapo_gain(2.0, 3.0),
    ),
    "dppo": (
        {"surrogate": partial(surrogates.binary_tv, delta_low=0.05, delta_high=0.05)} | NO_BOUNDS,
        per_token(
            lambda rho, d: np.where(moved_kept(d, 0.05), rho * d.advantages, 0),
            lambda rho, d: np.where(moved_kept(d, 0.05), rho * d.advantages, 0),
        ),
    ),
    "dppo as prime-rl": (
        {"surrogate": partial(surrogates.binary_tv, log_square=1e-1)} | NO_BOUNDS,
        per_token(
            lambda rho, d: np.where(moved_kept(d, 0.2), rho * d.advantages, 0) - 0.1 * np.log(rho) ** 2,
            lambda rho, d: np.where(moved_kept(d, 0.2), rho * d.advantages, 0) - 0.2 * np.log(rho),
        ),
    ),
    "dppo as verl": (
        {"surrogate": partial(surrogates.binary_tv, cap=1.1)} | NO_BOUNDS,
        per_token(
            lambda rho, d: np.where(moved_kept(d, 0.2), np.minimum(rho, 1.1) * d.advantages * d.logprobs, 0),
            lambda rho, d: np.where(moved_kept(d, 0.2), np.minimum(rho, 1.1) * d.advantages, 0),
        ),
    ),
    "policy gradient": (
        {"surrogate": surrogates.policy_gradient} | NO_BOUNDS,
        per_token(lambda rho, d: rho * d.advantages, lambda rho, d: rho * d.advantages),
    ),
    "reinforce": (
        {"surrogate": surrogates.policy_gradient, "ratio": ratios.no_ratio} | NO_BOUNDS,
        per_token(lambda rho, d: d.advantages, lambda rho, d: d.advantages),
    ),
    "gspo": ({"ratio": ratios.sequence_ratio, "clip_low": 0.1, "clip_high": 0.1}, gspo(0.9, 1.1)),
    "gmpo": ({"surrogate": surrogates.geometric_mean} | NO_BOUNDS, gmpo(0.4)),
}


@pytest.mark.parametrize("name", SURROGATES)
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 100_000))
def test_a_surrogate_and_its_gradient_equal_the_formula(name, seed):
    chosen, formula = SURROGATES[name]
    d = drawn(seed)
    gain, slope = formula(d)
    loss, (slopes, _), _ = value_and_slopes(GRPO(**chosen), d)
    np.testing.assert_allclose(loss, -(d.weight * gain).sum(), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(slopes, -d.weight * slope, rtol=2e-4, atol=2e-5)


# ---- the KL term and the entropy


def kl_of(name, d):
    """(value, slope in lp) per token."""
    gap, rho = d.ref - d.logprobs, np.exp(d.logprobs - d.old)
    value = np.exp(gap) - gap - 1
    slope = 1 - np.exp(gap)
    return {
        "k3": (value, slope),
        "k2": (gap**2 / 2, -gap),
        "k3_ratio": (rho * value, rho * value + rho * slope),
        "k3_exact": (rho * value, -rho * gap),
    }[name]


@pytest.mark.parametrize("name", kl.ESTIMATORS)
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 100_000))
def test_the_kl_and_the_entropy_equal_their_formulas(name, seed):
    d = drawn(seed)
    d.advantages = np.zeros_like(d.advantages)
    value, slope = kl_of(name, d)
    loss, (slopes, of_entropy), metrics = value_and_slopes(GRPO(kl_coef=0.3, kl_estimator=name, entropy_coef=0.05), d)
    np.testing.assert_allclose(metrics["train/kl"], (d.weight * value).sum(), rtol=2e-4, atol=1e-6)
    expected = 0.3 * (d.weight * value).sum() - 0.05 * (d.weight * d.entropy).sum()
    np.testing.assert_allclose(loss, expected, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(slopes, 0.3 * d.weight * slope, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(of_entropy, -0.05 * d.weight, rtol=1e-6)


# ---- corrections


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 100_000))
def test_corrections_equal_their_formulas(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((5, 7)) < 0.7
    mask[2] = False
    log_w = np.where(mask, rng.normal(0, rng.choice([0.01, 0.5]), mask.shape), 0)
    w = np.exp(log_w)
    np.testing.assert_allclose(corrections.truncate_tokens(log_w, mask, cap=1.2), np.minimum(w, 1.2))
    np.testing.assert_allclose(corrections.mask_tokens(log_w, mask, low=0.8, high=1.3), w * ((w >= 0.8) & (w <= 1.3)))
    found = corrections.mask_sequences(log_w, mask, low=0.99, high=1.01)
    for b in range(5):
        mean = np.exp(log_w[b][mask[b]].mean()) if mask[b].any() else 1.0
        assert (found[b] == float(0.99 <= mean <= 1.01)).all()


# ---- advantages


def rewards_of(seed, binary=False):
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 6)), int(rng.integers(2, 7)))
    rewards = rng.integers(0, 2, shape).astype(float) if binary else rng.normal(size=shape)
    rewards[rng.random(shape[0]) < 0.3] = 1.0  # groups that agree
    return rewards, rng.integers(1, 30, shape)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 100_000))
def test_advantages_with_statistics_of_the_batch_equal_their_formulas(seed):
    rewards, lengths = rewards_of(seed)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    whole = adv.WholeBatch(lengths, {"a": rewards, "b": 2 * lengths.astype(float)}, {"a": 1.0, "b": 0.5})
    std = rewards.std(ddof=1) if rewards.max() > rewards.min() else 0.0
    np.testing.assert_allclose(adv.batch_scaled(rewards, whole), centred / (std + 1e-4), atol=1e-9)

    # by hand, as if every token had a row of its own
    for over, counts in (("tokens", lengths), ("samples", np.ones_like(lengths))):
        for baseline, values in ((True, centred), (False, rewards)):
            tokens = np.repeat(values.reshape(-1), counts.reshape(-1))
            found = adv.whiten(rewards, whole, over=over, group_baseline=baseline)
            if values.max() - values.min() > 1e-9 and len(tokens) > 1:
                expected = (values - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
                np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)
            else:
                np.testing.assert_allclose(found, 0.0, atol=1e-3)

    def z(r):
        spread = r.std(axis=1, ddof=1, keepdims=True)
        return (r - r.mean(axis=1, keepdims=True)) / (np.where(np.ptp(r, axis=1, keepdims=True) > 0, spread, 0) + 1e-4)

    total = z(rewards) + 0.5 * z(2.0 * lengths)
    spread = total.std(ddof=1) if np.ptp(total) > 1e-9 else 0.0
    np.testing.assert_allclose(adv.per_reward(rewards, whole), (total - total.mean()) / (spread + 1e-4), atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 100_000))
def test_max_likelihood_divides_by_the_success_rate(seed):
    rewards, _ = rewards_of(seed, binary=True)
    mean = rewards.mean(axis=1, keepdims=True)
    expected = np.where(mean > 0, (rewards - mean) / np.where(mean > 0, mean, 1), 0)
    np.testing.assert_allclose(adv.max_likelihood(rewards), expected, atol=1e-12)
    np.testing.assert_allclose(
        adv.max_likelihood(rewards, eps=0.1), np.where(mean > 0, (rewards - mean) / (mean + 0.1), 0), atol=1e-12
    )
    with pytest.raises(ValueError, match="rewards must be 0 or 1; one is 0.3"):
        adv.max_likelihood([[0.0, 0.3]])
