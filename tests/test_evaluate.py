"""Evaluation: while a run trains, and of any model by `tunix-lite evaluate`."""

import gc
import itertools
import math
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.commands import evaluate as command
from tunix_lite.inference import rollouts
from tunix_lite.inference.language_model import load
from tunix_lite.report.statistics import avg_at_k, compare, estimate, maj_at_k, pass_at_k
from tunix_lite.rewards.similarity import similarity_scores
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.grading import group_metrics


def test_groups_are_counted_by_what_their_rewards_are():
    """By hand: all 0; all 1; mixed; all equal but neither; one kept of two; none kept."""
    total = np.array([0, 0, 1, 1, 0, 1, 0.5, 0.5, 1, 0, 0, 0.0])
    dropped = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1], bool)
    found = group_metrics(total, dropped, [[i, i + 1] for i in range(0, 12, 2)])
    assert found == {
        "reward/groups_all_zero": 1 / 6,
        "reward/groups_all_one": 2 / 6,
        "reward/groups_mixed": 1 / 6,
        "reward/groups_that_agree": 5 / 6,
    }


def test_every_setting_of_rollout_reaches_the_sampler(monkeypatch):
    """Of a model on one device. Only the number of slots and where the weights stay are chosen."""
    got = []
    monkeypatch.setattr(rollouts, "make_generate", lambda *arguments: got.append(arguments[5]))
    monkeypatch.setattr(rollouts, "choose_weights", lambda *_: ("gathered", ""))
    tokenizer = SimpleNamespace(eos_ids=(1,), pad_id=0)
    monkeypatch.setattr(rollouts, "num_params", lambda table: 135_000_000)
    monkeypatch.setattr(rollouts.decoder, "weights", lambda cfg: None)
    model = SimpleNamespace(mesh=set_mesh(1, 1), params={}, cfg=None, dtype=None, tokenizer=tokenizer)
    asked = RolloutConfig(None, 7, "auto", "int8", kernels="fused")
    rollouts.generate_of(model, GenerationConfig(), asked, [(4, 2)])
    assert got == [RolloutConfig(8, 7, "gathered", "int8", kernels="fused")]

    # On a CPU, 160 slots of 135M weights took 9.8 GB, and nothing was graded before nearly all had ended.
    for num_slots, expected in ((None, 16), (40, 40)):
        rollouts.generate_of(model, GenerationConfig(), replace(asked, num_slots=num_slots), [(160, 1)])
        assert got[-1].num_slots == expected


def test_an_evaluation_frees_the_weights_as_they_were_loaded(monkeypatch):
    """It samples with the weights layer by layer, once for both rollouts, so a real model is there once."""
    loaded, seen = [], []

    def opener():
        model = load("bundled")
        loaded.extend(weakref.ref(x) for x in jax.tree.leaves(model.params["layers"]))
        return model

    class Stop(Exception):
        pass

    def evaluate(policy, task, params, *_):
        gc.collect()
        seen.extend((type(params["layers"]), sum(x() is not None for x in loaded)))
        assert policy.generate.prepare(params) is params
        raise Stop

    monkeypatch.setattr(command, "evaluate", evaluate)
    with pytest.raises(Stop):
        command._score(compose([]), command.EvaluateTaskConfig(num_examples=2), opener, "model")
    assert len(loaded) > 5 and seen == [list, 0]


# ---- statistics, against enumeration, by hand, and in simulation


def subsets(n: int, k: int):
    return list(itertools.combinations(range(n), k))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n):
    """Every number of right samples, every k."""
    correct = np.array([[sample < c for sample in range(n)] for c in range(n + 1)])
    for k in range(1, n + 1):
        counted = [np.mean([any(row[list(s)]) for s in subsets(n, k)]) for row in correct]
        np.testing.assert_allclose(pass_at_k(correct, k), counted, rtol=0, atol=1e-15)
    np.testing.assert_allclose(pass_at_k(correct, 1), avg_at_k(correct))


def test_pass_at_k_by_hand_and_beyond_floats():
    assert pass_at_k(np.array([[1, 0, 0, 0]]), 2) == 0.5  # 3 of the 6 pairs hold the first
    many = np.zeros((1, 3000), bool)
    many[0, 0] = True
    assert pass_at_k(many, 1000) == pytest.approx(1 / 3)  # C(3000, 1000) is no float
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k={k} of 2 samples"):
            pass_at_k(np.zeros((4, 2)), k)


def majority_of(answers, right, subset) -> float:
    """Written out: who is most frequent among these, and how right those are."""
    votes = Counter(answers[i] for i in subset if answers[i] is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return float(np.mean([right[answer] for answer in winners])) if winners else 0.0


def test_maj_at_k_is_the_vote_of_all_samples():
    answers = [["7", "7", "9", None, "8", "8"], [None] * 6, ["1", "2", "3", "4", "5", "7"], ["7"] * 6]
    correct = np.array([[answer == "7" for answer in row] for row in answers])
    expected = [majority_of(row, {answer: answer == "7" for answer in row}, range(6)) for row in answers]
    assert expected == [0.5, 0.0, pytest.approx(1 / 6), 1.0]
    np.testing.assert_allclose(maj_at_k(answers, correct), expected, atol=1e-15)


# ---- intervals


def coverage(draw, truth: float, level: float, times: int = 400) -> float:
    """How often the interval of examples that `draw(rng)` gives holds the truth."""
    held = 0
    for i in range(times):
        found = estimate(draw(np.random.default_rng(1000 + i)), level, resamples=400, seed=i)
        held += found.low <= truth <= found.high
    return held / times


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_cover_at_their_level(level):
    """Of 400 simulated evaluations, 100 examples each; a share of 400 is off by sqrt(p (1 - p) / 400) = 1 to 2 %."""
    slack = 3 * math.sqrt(level * (1 - level) / 400)
    covered = coverage(lambda rng: rng.random(100) < 0.3, 0.3, level)
    assert level - slack - 0.01 <= covered <= level + slack + 0.01
    covered = coverage(lambda rng: rng.normal(2.0, 3.0, 100), 2.0, level)
    assert level - slack - 0.01 <= covered <= level + slack


def test_an_interval_is_the_same_every_time_and_has_the_width_of_the_normal_one():
    values = np.arange(256) < 128
    found = estimate(values)
    assert found == estimate(values) and found.value == 0.5
    half = 1.96 * math.sqrt(0.25 / 256)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.005)
    assert estimate(np.ones(9)).low == estimate(np.ones(9)).high == 1.0
    for wrong in (np.zeros(0), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="one number of each example"):
            estimate(wrong)
    with pytest.raises(ValueError, match="level=95"):
        estimate(np.ones(3), level=95)


# ---- two models


def test_two_models_are_compared_example_by_example():
    first, second = np.array([1, 1, 1, 0, 1.0]), np.array([0, 1, 0, 1, 0.0])
    found = compare(first, second)
    assert (found.better, found.worse, found.equal) == (3, 1, 1)
    assert found.difference.value == pytest.approx(0.4)
    # by hand: of the 16 ways to sign 1 1 1 -1, those with |sum| >= 2: 1 + 4 + 4 + 1
    assert found.p_value == pytest.approx(10 / 16, abs=0.02)
    assert compare(first, first).p_value == 1.0
    assert compare(second, first).difference.value == -found.difference.value
    with pytest.raises(ValueError, match="there are 5 and 4"):
        compare(first, second[:4])


def test_a_p_value_of_equal_models_is_small_as_rarely_as_it_says():
    """Both are right with the same chance, which differs between examples: 5 % of p-values are below 5 %."""
    small = 0
    for i in range(300):
        rng = np.random.default_rng(i)
        chance = rng.random(80)
        small += compare(rng.random(80) < chance, rng.random(80) < chance, resamples=300).p_value <= 0.05
    assert small / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


# ---- ROUGE


@pytest.mark.parametrize(
    "text, reference, one, two, longest",
    [
        # Lin's example (2004), by hand; a word counts as often as both have it; texts without words
        ("police kill the gunman", "police killed the gunman", 3 / 4, 1 / 3, 3 / 4),
        ("the gunman kill police", "police killed the gunman", 3 / 4, 1 / 3, 2 / 4),
        ("the the the", "the cat", 2 * 1 / 5, 0.0, 2 * 1 / 5),
        ("", "the cat", 0.0, 0.0, 0.0),
        # recorded of rouge_score
        ("the cat sat on the mat", "the cat was on the mat", 0.833333333333, 0.6, 0.833333333333),
        ("The quick, brown fox!", "a quick brown dog", 0.5, 0.333333333333, 0.5),
        ("Don't stop; can't stop.", "don t stop", 0.666666666667, 0.571428571429, 0.666666666667),
        ("naïve café 東京", "naive cafe tokyo", 0.0, 0.0, 0.0),
    ],
)
def test_rouge_is_that_of_its_paper_and_of_rouge_score(text, reference, one, two, longest):
    """Recorded of rouge_score 0.1.2, use_stemmer=False. Of 2,000 random pairs none was off by more than 2e-16."""
    found = [float(score[0]) for name, score in similarity_scores([text], [reference]).items() if name != "exact_match"]
    assert found == pytest.approx([one, two, longest], abs=1e-11)
