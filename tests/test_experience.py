"""What an update learns from: mini-batches, later rounds of prompts, and the same again after a resume."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.algorithms.algorithm import Needs, Policy
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.learner.rows import RowLayout
from tunix_lite.parallel.mesh import put
from tunix_lite.resolved.run import ResolvedRun
from tunix_lite.runs.experience import FreshExperience
from tunix_lite.runs.reference import MovingReference, find_reference
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Batch, Graded, Rollout


@dataclass(frozen=True)
class Echo:
    """Its batch holds the numbers of the examples that it was given, and the key of the step."""

    updates_per_rollout: int = 1
    mini_batches: int = 1
    max_rounds: int = 1

    @property
    def needs(self):
        return Needs(mini_batches=self.mini_batches, rounds=self.max_rounds)

    def collect(self, policy, task, params, examples, key):
        kept = examples[: len(examples) // self.max_rounds]
        numbers = np.array([[example["n"]] * 4 for example in kept], np.int32)
        mask = np.broadcast_to(np.arange(4) >= 1, numbers.shape)
        drawn = np.full(numbers.shape, float(jax.random.uniform(key)), np.float32)
        texts = [str(example["n"]) for example in kept]
        count = len(kept)
        graded = Graded(
            texts,
            texts,
            np.arange(count, dtype=float),
            np.ones(count, bool),
            texts,
            {},
            np.zeros(count, bool),
            rollout=Rollout(numbers, mask, mask, drawn, np.ones(count, np.int8), drawn),
        )
        metrics = {"seen": [example["n"] for example in examples]}
        return Batch(numbers, np.ones(numbers.shape, bool), mask / 3, old_logprobs=drawn), metrics, graded


def source(algorithm, prompts=2):
    def batch(count, seed, rollout):
        return [{"n": seed % 1000 + rollout * count + i} for i in range(count)], 1

    task = SimpleNamespace(batch=batch, leaves_out=True, at_step=lambda step: task)
    parts = SimpleNamespace(batch=SimpleNamespace(prompts=prompts), rows=RowLayout())
    run = SimpleNamespace(algorithm=algorithm, seed=0, evaluation=None)
    console = SimpleNamespace(say=print)
    session = SimpleNamespace(run=run, task=task, parts=parts, run_dir=None, console=console, stopping=None)
    learner = SimpleNamespace(policy=None, seed_key=jax.random.key(0), overlap=None)
    return FreshExperience(session, learner)


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(set_mesh(1, 1)):
        yield


def numbers(experience):
    return experience.batch.tokens[:, 0].tolist()


def test_each_update_takes_the_next_mini_batch_and_then_goes_through_them_again():
    taken = source(Echo(updates_per_rollout=4, mini_batches=2))
    found = [taken.take(step, None) for step in range(8)]
    assert [numbers(one) for one in found] == [[0, 1], [2, 3]] * 2 + [[4, 5], [6, 7]] * 2
    assert [one.updates_left for one in found] == [4, 3, 2, 1] * 2
    assert [one.graded.completions for one in found[:2]] == [["0", "1"], ["2", "3"]]
    assert [bool(one.metrics) for one in found] == [True, False, False, False] * 2
    np.testing.assert_array_equal(found[1].rows.tokens, found[1].batch.tokens)
    # one rollout, one set of random numbers: the old policy is that of the rollout for all of its updates
    drawn = [float(one.batch.old_logprobs[0, 0]) for one in found]
    assert len(set(drawn[:4])) == 1 and drawn[0] != drawn[4]


def test_a_run_that_resumes_gets_what_it_would_have_got():
    settings = Echo(updates_per_rollout=2, mini_batches=2, max_rounds=3)
    whole = source(settings)
    before = [whole.take(step, None) for step in range(8)]
    again = source(settings)
    for step in range(4, 8):
        jax.tree.map(np.testing.assert_array_equal, again.take(step, None).batch, before[step].batch)


# ---- a reference that follows the policy


@dataclass(frozen=True)
class Scorer:
    params: dict


@dataclass(frozen=True)
class Timed:
    scorer: Scorer


def weight(value):
    return put(np.full((1, 1), value, np.float32), "embed", "embed")


def test_a_mean_of_policies_loses_no_small_step_to_rounding(tmp_path, monkeypatch):
    """A policy that has drifted by 1 % after 100 updates, mix 0.05: in bfloat16 nothing of it would arrive. float64 by
    hand: reference = 0.95 reference + 0.05 policy."""
    run = compose(["training.mixed_precision=bf16", "algorithm.kl_coef=0.1", "algorithm.reference_every=20"])
    whole = SimpleNamespace(needs=run.algorithm.needs, dtype=jnp.bfloat16)
    assert ResolvedRun.reference_dtype.fget(whole) == jnp.bfloat16, "a copy of the policy is scored with as it is"
    mean = replace(run, algorithm=replace(run.algorithm, reference_mix=0.05))
    dtype = ResolvedRun.reference_dtype.fget(SimpleNamespace(needs=mean.algorithm.needs, dtype=jnp.bfloat16))
    reference = MovingReference(RunDir(tmp_path), 1, 0.05, partial(jax.tree.map, lambda x: x.astype(dtype)), 0)
    monkeypatch.setattr("tunix_lite.runs.reference._keep", lambda run_dir, step, params: None)
    policy = Policy(None, None, {"reference": Timed(Scorer({"w": weight(1.0).astype(dtype)}))})
    expected = 1.0
    for step in range(1, 101):
        now = 1 + 1e-4 * step
        policy = reference.follow(policy, step, {"w": weight(now)})
        expected = 0.95 * expected + 0.05 * now
    found = float(policy.scorers["reference"].scorer.params["w"][0, 0])
    assert found - 1 == pytest.approx(expected - 1, rel=1e-3)


def moved(run_dir, mix, last, at, value, before):
    """The reference of a policy at step `at`, whose one weight is `value`."""
    reference = MovingReference(run_dir, 2, mix, partial(jax.tree.map, jnp.copy), last)
    policy = Policy(None, None, {"reference": Timed(Scorer({"w": weight(before)}))})
    found = reference.follow(policy, at, {"w": weight(value)})
    return float(found.scorers["reference"].scorer.params["w"][0, 0])


def test_a_reference_follows_at_its_steps_and_is_kept_for_a_resume(tmp_path):
    run_dir = RunDir(tmp_path)
    assert moved(run_dir, 0.25, 0, 1, 8.0, before=4.0) == 4, "its step has not come"
    assert moved(run_dir, 0.25, 0, 2, 8.0, before=4.0) == 5
    assert moved(run_dir, 1.0, 2, 4, 9.0, before=5.0) == 9
    # the checkpoint of step 3 was the last that was whole: step 4 is made once more
    run = SimpleNamespace(
        algorithm=SimpleNamespace(needs=Needs(reference=True, reference_every=2)), model=None, resume=None
    )
    run_dir.checkpoints.mkdir()
    (run_dir.checkpoints / "3").mkdir()
    found = find_reference(run, None, run_dir, run_dir.checkpoints)
    assert (found.kept, found.is_new) == (2, False) and found.words == "the policy, last taken at step 2"
    assert moved(run_dir, 1.0, found.kept, 4, 7.0, before=5.0) == 7
    assert moved(run_dir, 1.0, 4, 4, 1.0, before=7.0) == 7, "a run that resumes at 4 has it already"
    like = {"w": weight(0.0)}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    assert float(Checkpoints(run_dir.kept_reference).restore_params(like, 4)[1]["w"][0, 0]) == 7
