"""The losses of docs/extend/example: one number and one gradient in every layout, micro-batch and mesh.

What is right comes from the formulas, sequence by sequence, in float64: nothing of the package but the weights' names.
"""

import importlib.util
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.algorithms.algorithm import Needs, Policy
from tunix_lite.basics.types import Rollout, TokenScores
from tunix_lite.learner.rows import RowLayout

sys.path.append(str(Path(__file__).parent / "eight_devices"))  # the formulas, and an update that is divided somehow
import exactness_worker
from exactness_worker import MODELS, SEQUENCES, Way
from test_exactness import difference, expected, log_probabilities, norm, pulled

EXAMPLE = Path(__file__).parents[1] / "docs" / "extend" / "example"
CLIP = {"clip_low": 0.02, "clip_high": 0.03}  # as many are clipped as not


@cache
def example(name: str):
    """A file of the page, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(batch, slopes):
    """What slopes of the log-probabilities [B, T] make of the weights, in float64, sequence by sequence."""
    with jax.enable_x64(True), jax.set_mesh(set_mesh(1, 1)):
        trained, frozen = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), MODELS["plain"].arrays())
        of_each = [
            pulled(trained, frozen, batch.tokens[b][mask], slopes[b][mask][1:], MODELS["plain"])[1]
            for b, mask in enumerate(np.asarray(batch.token_mask))
        ]
        return jax.tree.map(lambda *xs: np.sum([np.asarray(x) for x in xs], axis=0), *of_each)


def check(way, batch, loss, grads, algorithm):
    """Makes an update in this way, and compares it."""
    found = exactness_worker.update(MODELS["plain"], way, batch, jax.devices()[: way.fsdp * way.tp], algorithm)
    np.testing.assert_allclose(found.metrics["train/loss"], loss, rtol=1e-5, atol=1e-7)
    assert difference(found.grads, grads) < 1e-5


@cache
def of_the_formulas():
    """(batch, loss, gradients): the groups' advantages sum to zero, so a mean over a row of them would be none."""
    known = expected("plain")
    rng, counts = np.random.default_rng(1), known.batch.loss_weight > 0
    lengths = counts.sum(axis=1, keepdims=True)
    weight = np.where(counts, 1 / np.maximum(lengths, 1) / SEQUENCES, 0).astype(np.float32)
    advantages = rng.normal(size=(SEQUENCES // 4, 4))
    advantages = (advantages - advantages.mean(axis=1, keepdims=True)).reshape(-1, 1).astype(np.float32)
    noise = np.where(counts, rng.normal(0, 0.3, counts.shape), 0)
    noise -= noise.sum(axis=1, keepdims=True) / np.maximum(lengths, 1)
    away = noise + rng.choice([-0.06, -0.01, 0.01, 0.06], (SEQUENCES, 1))  # on both sides of both bounds
    old = np.where(counts, known.logprobs - away, 1e30).astype(np.float32)  # what does not count never matters
    batch = replace_all(known.batch, weight, advantages, old)

    losses, slopes, clipped = 0.0, np.zeros(counts.shape), 0
    for b in np.flatnonzero(counts.any(axis=1)):
        real, A = counts[b], float(advantages[b, 0])
        ratio = math.exp(np.mean(known.logprobs[b, real] - np.float64(old[b, real])))
        bounded = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
        share = float(np.float64(weight[b, real]).sum())  # 1 / SEQUENCES, of float32 weights
        losses -= share * min(ratio * A, bounded * A)
        if ratio * A <= bounded * A:
            slopes[b, real] = -share * ratio * A / real.sum()
        else:
            clipped += 1
    assert 3 <= clipped <= SEQUENCES - 4
    return batch, losses, gradients(batch, slopes)


def replace_all(batch, weight, advantages, old):
    wide = np.broadcast_to(advantages, weight.shape).astype(np.float32)
    return replace(batch, loss_weight=weight, advantages=wide, old_logprobs=old, ref_logprobs=None)


WAYS = [Way(2, 2, 4, "sequences"), Way(4, 1, 2, "prefix"), Way(4, 1, 4, "sequences", sync_every=2)]


def named(way: Way) -> str:
    return f"{way.packing}-{way.fsdp}x{way.tp}-{way.parts}" + (f"-sync{way.sync_every}" if way.sync_every > 1 else "")


@pytest.mark.parametrize(
    "way", [WAYS[1], *(pytest.param(way, marks=pytest.mark.wide) for way in (WAYS[0], WAYS[2]))], ids=named
)
def test_a_mean_over_a_completion_is_the_same_in_every_layout(way):
    check(way, *of_the_formulas(), example("gspo").GSPO(**CLIP))


# ---- an entropy bonus


COEF = 0.3  # large enough that the gradient of the entropy is a good part of it all


def entropy_and_logprobs(params, tokens):
    """Of the tokens of one sequence but its first, in float64."""
    full = log_probabilities(params, tokens, MODELS["plain"].cfg, MODELS["plain"].temperature)
    chosen = full[jnp.arange(len(tokens) - 1), tokens[1:]]
    return chosen, -jnp.sum(jnp.exp(full) * full, axis=-1)


@jax.jit
def pulled_by_both(params, tokens, of_logprobs, of_entropy):
    """Both of one sequence, and what slopes of both make of the weights."""
    found, pull = jax.vjp(lambda params: entropy_and_logprobs(params, tokens), params)
    return found, pull((of_logprobs, of_entropy))[0]


@cache
def of_the_entropy_formulas():
    """(batch, loss, gradients, those of the entropy): loss = - sum_t w_t (rho_t A + COEF H_t), in float64."""
    known = expected("plain")
    counts = known.batch.loss_weight > 0
    old = np.where(counts, known.batch.old_logprobs, 0).astype(np.float32)
    batch = replace(known.batch, old_logprobs=old, ref_logprobs=None)
    weight, advantages = (np.float64(x) for x in (batch.loss_weight, batch.advantages))
    ratio = np.exp(known.logprobs - np.float64(old))
    loss = -np.sum(weight * ratio * advantages)
    slopes = -weight * ratio * advantages
    of_each, of_entropies = [], []
    with jax.enable_x64(True), jax.set_mesh(set_mesh(1, 1)):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), MODELS["plain"].arrays()[0])
        for b, mask in enumerate(np.asarray(batch.token_mask)):
            here = weight[b][mask][1:]
            (_, entropy), grads = pulled_by_both(params, batch.tokens[b][mask], slopes[b][mask][1:], -COEF * here)
            loss -= COEF * np.sum(here * np.asarray(entropy))
            of_each.append(jax.tree.map(np.asarray, grads))
            _, grads = pulled_by_both(params, batch.tokens[b][mask], 0 * here, -COEF * here)
            of_entropies.append(jax.tree.map(np.asarray, grads))
    return batch, loss, *(jax.tree.map(lambda *xs: np.sum(xs, axis=0), *found) for found in (of_each, of_entropies))


def test_the_entropy_of_a_loss_has_its_gradient_in_packed_rows():
    batch, loss, grads, of_entropy = of_the_entropy_formulas()
    assert norm(of_entropy) > 0.05 * norm(grads), "the bonus hardly changes the gradient; this test shows nothing"
    check(WAYS[1], batch, loss, grads, example("entropy_bonus").EntropyBonus(8, COEF))


# ---- a leave-one-out baseline


def test_the_leave_one_out_baseline_is_that_of_the_others_by_hand():
    """Of 1 2 6 the others' means are 4, 3.5 and 1.5; of 0 1 (one was dropped) they are 1 and 0."""
    rewards = np.array([1.0, 2.0, 6.0, 0.0, np.nan, 1.0])
    completion = np.array([[False, True, True], [False, True, False]] * 3)
    rollout = Rollout(np.ones((6, 3), int), np.ones((6, 3), bool), completion, None, None, np.zeros((6, 3)))
    graded = SimpleNamespace(rewards=rewards, dropped=np.isnan(rewards), metrics={}, each={}, weights={})
    policy = Policy(lambda *_, **__: rollout, None)
    grader = SimpleNamespace(submit=None, results=lambda rollout: graded)
    task = SimpleNamespace(grader=lambda group, G: grader, prompts=lambda examples: None, partner=lambda examples: None)
    algorithm = example("leave_one_out").LeaveOneOut(num_generations=3)
    batch, metrics, _ = algorithm.collect(policy, task, None, [{}, {}], None)
    np.testing.assert_array_equal(batch.advantages[:, 0], [-3, -1.5, 4.5, -1, 0, 1])
    np.testing.assert_allclose(batch.loss_weight, completion / 7 * ~np.isnan(rewards)[:, None])
    assert metrics["reward/groups_that_agree"] == 0
    logprobs = jnp.full((6, 3), -2.0)
    # tokens that count: two of row 0, 2, one of 1, 3, 5: 2 (-3) - 1.5 + 2 (4.5) - 1 + 1 = 1.5; times 2 / 7
    np.testing.assert_allclose(algorithm.loss(TokenScores(logprobs, logprobs), batch)[0], 2 * 1.5 / 7, rtol=1e-6)


# ---- an algorithm's own values


class WeightedByStreams:
    """loss = - sum_t w_t s_t logprob_t, where s is a value of its own for each token."""

    needs = Needs(streams=("share",))

    def loss(self, scores, batch):
        return -jnp.sum(batch.loss_weight * batch.streams["share"] * scores.logprobs), {}


@cache
def of_the_stream_formulas():
    """(batch, loss, gradients), in float64."""
    known = expected("plain")
    share = np.random.default_rng(2).normal(size=known.logprobs.shape).astype(np.float32)
    batch = replace(known.batch, old_logprobs=None, ref_logprobs=None, advantages=None, streams={"share": share})
    slopes = -np.float64(batch.loss_weight) * np.float64(share)
    return batch, np.sum(slopes * known.logprobs), gradients(batch, slopes)


def test_a_value_of_its_own_goes_where_its_token_goes():
    check(WAYS[1], *of_the_stream_formulas(), WeightedByStreams())


def test_a_stream_has_a_value_for_each_token_of_the_batch():
    batch, *_ = of_the_stream_formulas()
    narrow = replace(batch, streams={"share": batch.streams["share"][:, 1:]})
    with pytest.raises(ValueError, match=r"batch.streams\['share'\] has shape \[16, 31\], and tokens have \[16, 32\]"):
        RowLayout().lay_out(narrow)
