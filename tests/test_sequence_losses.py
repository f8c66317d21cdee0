"""The losses of docs/extend/example: one number and one gradient in every layout of rows.

What is right comes from the formulas, sequence by sequence, in float64. That a sum over rows is the same in micro-batches
and on a mesh is in eight_devices/test_exactness.py and test_conformance.py.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import collect
from model_checks import groups, layout_of

from tunix_lite.algorithms.algorithm import Needs, Policy
from tunix_lite.basics.types import Graded, Rollout, TokenScores
from tunix_lite.learner.rows import RowLayout

EXAMPLE = Path(__file__).parents[1] / "docs" / "extend" / "example"
LAYOUTS = pytest.mark.parametrize("layout", ["none", "sequences", "prefix"])
BATCH = groups()
COUNTS = BATCH.loss_weight > 0  # of six sequences of eight
WEIGHT = np.float64(BATCH.loss_weight)


@cache
def example(name: str):
    """A file of the page, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(seed: int) -> np.ndarray:
    """A value of each token that counts, which float32 has."""
    values = np.random.default_rng(seed).normal(size=COUNTS.shape)
    return np.float64(np.float32(np.where(COUNTS, values, 0)))


def check(algorithm, layout: str, logprobs, loss: float, slopes, of_entropy=None, **values) -> None:
    """Compares the loss and its slopes by the log-probabilities [B, T], and by the entropies, which are logprobs ** 2.
    values: fields of the batch."""
    values = {name: x.astype(np.float32) if name != "streams" else x for name, x in values.items()}
    rows, packed = layout_of(layout).lay_out(BATCH.replace(**values))
    scores = [jnp.asarray(packed.place(x.astype(np.float32))) for x in (logprobs, logprobs**2)]
    value_and_slopes = jax.jit(jax.value_and_grad(lambda *x: algorithm.loss(TokenScores(*x), rows)[0], (0, 1)))
    found, (of_logprobs, of_entropies) = value_and_slopes(*scores)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(packed.back(of_logprobs), slopes, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(packed.back(of_entropies), 0 if of_entropy is None else of_entropy, rtol=1e-6)


@LAYOUTS
def test_a_mean_over_a_completion_is_the_same_in_every_layout(layout):
    """The mean of all advantages is none of theirs, and of six completions at least two are clipped and two are not."""
    low, high = 0.02, 0.03
    rng = np.random.default_rng(3)
    logprobs, advantages = drawn(0), np.zeros(COUNTS.shape)
    old, slopes, loss, clipped = np.full(COUNTS.shape, 1e30), np.zeros(COUNTS.shape), 0.0, 0
    for b, away in zip(np.flatnonzero(COUNTS.any(axis=1)), (-0.06, -0.01, 0.01, 0.06, -0.06, 0.06)):
        real = COUNTS[b]
        A = advantages[b] = np.float64(np.float32(rng.normal()))
        noise = rng.normal(0, 0.3, real.sum())
        old[b, real] = np.float32(logprobs[b, real] - away - noise + noise.mean())
        ratio = np.exp(np.mean(logprobs[b, real] - old[b, real]))
        bounded = min(max(ratio, 1 - low), 1 + high)
        share = WEIGHT[b, real].sum()
        loss -= share * min(ratio * A, bounded * A)
        if ratio * A <= bounded * A:
            slopes[b, real] = -share * ratio * A / real.sum()
        else:
            clipped += 1
    assert 2 <= clipped <= 4
    gspo = example("gspo").GSPO(clip_low=low, clip_high=high)
    # what does not count never matters
    check(gspo, layout, logprobs, loss, slopes, advantages=advantages, old_logprobs=old)


@LAYOUTS
def test_the_entropy_of_a_loss_has_its_gradient_in_packed_rows(layout):
    """loss = - sum_t w_t (rho_t A + c H_t), c = 0.3 and H = logprob ** 2."""
    logprobs, old, advantages, c = drawn(2), drawn(3), drawn(4), 0.3
    ratio = np.exp(logprobs - old)
    loss = -np.sum(WEIGHT * (ratio * advantages + c * logprobs**2))
    bonus = example("entropy_bonus").EntropyBonus(8, c)
    values = {"advantages": advantages, "old_logprobs": old}
    check(bonus, layout, logprobs, loss, -WEIGHT * ratio * advantages, -c * WEIGHT, **values)


# ---- a leave-one-out baseline


def test_the_leave_one_out_baseline_is_that_of_the_others_by_hand():
    """Of 1 2 6 the others' means are 4, 3.5 and 1.5; of 0 1 (one was dropped) they are 1 and 0."""
    rewards = np.array([1.0, 2.0, 6.0, 0.0, np.nan, 1.0])
    completion = np.array([[False, True, True], [False, True, False]] * 3)
    rollout = Rollout(np.ones((6, 3), int), np.ones((6, 3), bool), completion, None, None, np.zeros((6, 3)))
    graded = Graded([], [], rewards, rewards > 0, [], {}, np.isnan(rewards))
    policy = Policy(lambda *_, **__: rollout, None)
    grader = SimpleNamespace(submit=None, results=lambda rollout: graded)
    task = SimpleNamespace(
        grader=lambda group, G: grader, prompts=lambda examples: None, partner=lambda examples, G: None
    )
    algorithm = example("leave_one_out").LeaveOneOut(num_generations=3)
    batch, _, _ = collect(algorithm, policy, task, None, [{}, {}], None)
    np.testing.assert_array_equal(batch.advantages[:, 0], [-3, -1.5, 4.5, -1, 0, 1])
    np.testing.assert_allclose(batch.loss_weight, completion / 7 * ~np.isnan(rewards)[:, None])
    logprobs = jnp.full((6, 3), -2.0)
    # tokens that count: two of row 0, 2, one of 1, 3, 5: 2 (-3) - 1.5 + 2 (4.5) - 1 + 1 = 1.5; times 2 / 7
    np.testing.assert_allclose(algorithm.loss(TokenScores(logprobs, logprobs), batch)[0], 2 * 1.5 / 7, rtol=1e-6)


# ---- an algorithm's own values


class WeightedByStreams:
    """loss = - sum_t w_t s_t logprob_t, where s is a value of its own for each token."""

    needs = Needs(streams=("share",))

    def loss(self, scores, batch):
        return -jnp.sum(batch.loss_weight * batch.streams["share"] * scores.logprobs), {}


@LAYOUTS
def test_a_value_of_its_own_goes_where_its_token_goes(layout):
    logprobs, share = drawn(5), drawn(6)
    loss = -np.sum(WEIGHT * share * logprobs)
    check(WeightedByStreams(), layout, logprobs, loss, -WEIGHT * share, streams={"share": np.float32(share)})


def test_a_stream_has_a_value_for_each_token_of_the_batch():
    narrow = BATCH.replace(streams={"share": np.zeros((8, 22), np.float32)})
    with pytest.raises(ValueError, match=r"batch.streams\['share'\] has shape \[8, 22\], and tokens have \[8, 23\]"):
        RowLayout().lay_out(narrow)
