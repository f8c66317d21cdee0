"""What an update learns from: mini-batches, later rounds of prompts, and the same again after a resume."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.runs.experience import FreshExperience
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
        yes, no = np.ones(count, bool), np.zeros(count, bool)
        rollout = Rollout(numbers, mask, mask, drawn, yes.astype(np.int8), drawn)
        graded = Graded(texts, texts, np.arange(count, dtype=float), yes, texts, {}, no, rollout=rollout)
        metrics = {"seen": [example["n"] for example in examples]}
        return Batch(numbers, np.ones(numbers.shape, bool), mask / 3, old_logprobs=drawn), metrics, graded


def source(algorithm, prompts=2):
    def batch(count, seed, rollout):
        return [{"n": seed % 1000 + rollout * count + i} for i in range(count)], 1

    task = SimpleNamespace(batch=batch, leaves_out=True)
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
