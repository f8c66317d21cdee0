"""Advantages, weights and losses against hand-worked cases, float64 numpy and another project's vectors."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_lite.algorithms.advantages import centre, leave_one_out, standardise
from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.kl import k3_exact
from tunix_lite.algorithms.sft import SFT
from tunix_lite.algorithms.weighting import per_prompt, per_token, weights_of_learned
from tunix_lite.basics.types import Batch, Rollout, TokenScores
from tunix_lite.settings.compose import compose

REWARDS = np.array([[0.57450044, 0.09968603, 0.7419659], [0.8941783, 0.59656656, 0.45325184]])


def test_advantages_equal_the_vectors_that_tunix_tests():
    grpo = [[0.307498, -1.117636, 0.810138], [1.094526, -0.228671, -0.865855]]
    np.testing.assert_allclose(standardise(REWARDS, eps=1e-6), grpo, atol=2e-6)
    dr_grpo = [[0.10245, -0.372365, 0.269915], [0.246179, -0.051432, -0.194747]]
    np.testing.assert_allclose(centre(REWARDS), dr_grpo, atol=1e-6)
    np.testing.assert_allclose(leave_one_out([[1, 2, 3], [4, 5, 6]]), [[-1.5, 0, 1.5], [-1.5, 0, 1.5]])


def test_the_std_survives_a_group_that_nearly_agrees():
    """One-pass variance gives about -2000 here (notes on NeMo-RL); TRL's two passes give -2.474 and 0.353."""
    np.testing.assert_allclose(standardise([[0.0] + [0.95] * 7])[0], [-2.474] + [0.3534] * 7, atol=1e-3)


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_a_group_that_agrees_teaches_exactly_nothing(reward, size):
    for advantages in (standardise, centre, leave_one_out):
        np.testing.assert_array_equal(advantages(np.full((3, size), reward)), 0.0)


def test_a_short_prompt_counts_as_much_as_a_long_one_among_those_that_are_learned_from():
    """ScaleRL: two completions of 5 tokens beside two of 100; a third prompt agrees, and one of the long ones failed."""
    lengths = np.array([[5, 5], [100, 100], [7, 7]])
    mask = np.arange(100) < lengths.reshape(-1, 1)
    learned = np.array([True, True, True, False, False, False])
    weights = weights_of_learned(per_prompt, mask, learned, np.repeat(np.arange(3), 2), 1)
    sums = weights.sum(axis=1).reshape(3, 2)
    np.testing.assert_allclose(sums, [[1 / 4, 1 / 4], [1 / 2, 0], [0, 0]], rtol=1e-6)
    # two mini-batches, each with a prompt
    halves = weights_of_learned(per_prompt, mask[:4], np.ones(4, bool), np.array([0, 0, 1, 1]), num_parts=2)
    np.testing.assert_allclose(halves.sum(axis=1), [1 / 2] * 4, rtol=1e-6)
    # the preset is that objective
    assert compose(["algorithm=scalerl"]).algorithm.weighting is per_prompt


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens = np.zeros((4, 6), np.int32)
    mask = rng.random((4, 6)) < 0.7
    return Batch(
        tokens=tokens,
        token_mask=np.ones_like(mask),
        loss_weight=per_token(mask),
        advantages=np.broadcast_to(rng.normal(size=(4, 1)), mask.shape).astype(np.float32),
        old_logprobs=rng.normal(-1, 0.5, mask.shape).astype(np.float32),
        ref_logprobs=rng.normal(-1, 0.5, mask.shape).astype(np.float32),
    )


def scores_of(logprobs) -> TokenScores:
    """Scores of a policy whose entropy does not matter here."""
    return TokenScores(logprobs, jnp.zeros_like(logprobs))


def test_the_grpo_loss_and_its_gradient_equal_float64_numpy(batch):
    logprobs = np.random.default_rng(1).normal(-1, 0.5, batch.tokens.shape).astype(np.float32)
    algorithm = GRPO(clip_low=0.2, clip_high=0.28)
    objective = lambda logprobs: algorithm.loss(scores_of(logprobs), batch)  # noqa: E731
    (loss, metrics), slope = jax.value_and_grad(objective, has_aux=True)(jnp.asarray(logprobs))

    w, A, old, new = (
        np.asarray(x, np.float64) for x in (batch.loss_weight, batch.advantages, batch.old_logprobs, logprobs)
    )
    ratio = np.exp(new - old)
    plain, clipped = ratio * A, np.clip(ratio, 0.8, 1.28) * A
    np.testing.assert_allclose(loss, -(w * np.minimum(plain, clipped)).sum(), rtol=1e-5)
    np.testing.assert_allclose(slope, -(w * np.where(plain <= clipped, plain, 0.0)), atol=1e-6)
    assert (plain > clipped)[w > 0].any(), "nothing was clipped; this test shows nothing"
    np.testing.assert_allclose(metrics["train/clipped_high"], w[(A > 0) & (ratio > 1.28)].sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["train/clipped_low"], w[(A < 0) & (ratio < 0.8)].sum(), rtol=1e-5)
    outside = (ratio < 0.8) | (ratio > 1.28)  # whatever the advantage
    np.testing.assert_allclose(metrics["train/ratio_outside_clip"], w[outside].sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["train/sampler_gap_max"].value, np.abs(new - old)[w > 0].max(), rtol=1e-5)
    gap = (new - old)[w > 0]
    expected = {
        "train/ratio_mean": (w * ratio).sum(),
        "train/sampler_mult_prob_error": (w[w > 0] * np.exp(np.abs(gap))).sum(),
        "train/sampler_k3": (w[w > 0] * (np.exp(gap) - gap - 1)).sum(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
    assert float(metrics["train/ratio_max"].value) == pytest.approx(ratio[w > 0].max(), rel=1e-5)
    assert -float(metrics["train/ratio_min"].value) == pytest.approx(ratio[w > 0].min(), rel=1e-5)


def test_on_policy_the_gradient_is_the_policy_gradient(batch):
    slope = jax.grad(lambda lp: GRPO().loss(scores_of(lp), batch)[0])(jnp.asarray(batch.old_logprobs))
    np.testing.assert_allclose(slope, -batch.loss_weight * batch.advantages, rtol=1e-6)


def test_what_stands_off_the_completion_never_matters(batch):
    wild = batch.replace(
        old_logprobs=np.where(batch.loss_weight > 0, batch.old_logprobs, -1e30),
        ref_logprobs=np.where(batch.loss_weight > 0, batch.ref_logprobs, 1e30),
    )
    algorithm, logprobs = GRPO(kl_coef=0.1), jnp.asarray(batch.old_logprobs) + 0.1
    calm, noisy = (
        jax.value_and_grad(lambda lp, b=b: algorithm.loss(scores_of(lp), b)[0])(logprobs) for b in (batch, wild)
    )
    np.testing.assert_allclose(noisy[0], calm[0], rtol=1e-6)
    np.testing.assert_allclose(noisy[1], calm[1], rtol=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_the_kl_term_regularises(seed):
    """Tunix D1: k1 as a loss has zero expected gradient. Ours, summed over a whole small table, has the exact one.

    On-policy and off-policy: tokens come from `sampler`, and E_sampler[ratio * f] = E_policy[f].
    """
    rng = np.random.default_rng(seed)
    theta, ref, other = rng.normal(size=(3, 5))

    def log_softmax(x):
        return x - np.log(np.exp(x).sum())

    p, log_p, log_ref = np.exp(log_softmax(theta)), log_softmax(theta), log_softmax(ref)
    value = (p * (log_p - log_ref)).sum()
    exact = p * (log_p - log_ref - value)  # d KL / d theta

    for sampler in (theta, other):
        q = np.exp(log_softmax(sampler))

        def expected(theta, q=q, sampler=sampler):
            logprobs = jax.nn.log_softmax(theta)
            ratio = jnp.exp(logprobs - log_softmax(sampler))
            return jnp.sum(q * k3_exact(log_ref - logprobs, ratio))

        got_value, got_slope = jax.value_and_grad(expected)(jnp.asarray(theta, jnp.float32))
        np.testing.assert_allclose(got_value, value, rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(got_slope, exact, rtol=2e-4, atol=2e-5)


def test_sft_is_the_weighted_negative_log_likelihood(batch):
    logprobs = jnp.asarray(batch.old_logprobs)
    loss, _ = SFT().loss(scores_of(logprobs), batch)
    np.testing.assert_allclose(loss, -(batch.loss_weight * batch.old_logprobs).sum(), rtol=1e-6)


@pytest.mark.parametrize("chosen", ["whole", "sampled"])
def test_the_ratio_is_to_the_distribution_that_was_chosen(chosen):
    shape = (4, 3)
    said = Rollout(
        *(np.ones(shape, kind) for kind in (int, bool, bool)), np.full(shape, -1.0), np.ones(4), np.full(shape, -2.0)
    )
    graded = SimpleNamespace(rewards=np.array([1.0, 0, 0, 1]), dropped=np.zeros(4, bool), metrics={})
    task = SimpleNamespace(
        grader=lambda group, G: SimpleNamespace(submit=None, results=lambda rollout: graded),
        prompts=lambda examples: None,
    )
    policy = Policy(lambda *_, on_finished: said, None)
    batch, *_ = GRPO(num_generations=2, old_logprobs=chosen).collect(policy, task, None, [{}, {}], None)
    assert (batch.old_logprobs == {"sampled": -1, "whole": -2}[chosen]).all()
