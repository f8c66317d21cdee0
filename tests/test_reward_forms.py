"""Formats, length, repetition, ROUGE-L and rewards of other projects, against values worked by hand."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tunix_lite.rewards.scores import CompletionText
from tunix_lite.rewards.similarity import RougeL, common_length
from tunix_lite.rewards.text import Matches, Repetition, Tags, TargetLength

# ---- tags and patterns


@pytest.mark.parametrize(
    ("completion", "all_right", "share"),
    [
        ("<think>3 + 4</think><answer>7</answer>", 1, 1),
        (" <think>3 + 4</think>\n\n<answer>7</answer>\n", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("So: <think>3 + 4</think><answer>7</answer>", 0, 1),
        ("<think>3 + 4</think> so <answer>7</answer>", 0, 1),
        ("<think>3 + 4</think><answer>7</answer> ok", 0, 1),
        ("<answer>7</answer><think>3 + 4</think>", 0, 1),
        ("<think><answer>7</answer></think>", 0, 1),
        ("<think>3 + 4<answer>7</answer>", 0, 0.5),
        ("</think>3 + 4<think><answer>7</answer>", 0, 0.5),
        ("<think>3</think><think>4</think><answer>7</answer>", 0, 0.5),
        ("<answer>7</answer>", 0, 0.5),
        ("7", 0, 0),
        ("", 0, 0),
    ],
)
def test_tags_stand_in_order_and_alone(completion, all_right, share):
    assert Tags()(completion, {}) == all_right
    assert Tags(partial=True)(completion, {}) == share


def test_a_pattern_finds_a_part_or_the_whole():
    assert Matches(r"\d+ apples")("I have 12 apples.", {}) == 1
    assert Matches(r"\d+ apples", whole=True)("I have 12 apples.", {}) == 0
    assert Matches(r".*\d+ apples\.", whole=True)("I have\n12 apples.", {}) == 1
    assert Matches(r".*\d+ apples\.", whole=True, dot_all=False)("I have\n12 apples.", {}) == 0
    assert Matches("APPLES", ignore_case=True)("12 apples", {}) == 1
    assert Matches("APPLES")("12 apples", {}) == 0
    with pytest.raises(ValueError, match=r"pattern='\(' is no regular expression"):
        Matches("(")


def test_a_pattern_that_never_ends_is_ended_and_leaves_no_alarm():
    forever = Matches(r"(a+)+b", seconds=0.2)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the pattern '\(a\+\)\+b' took more than 0.2 seconds"):
        forever("a" * 40, {})
    assert time.monotonic() - began < 2
    time.sleep(0.3)
    assert forever("aab", {}) == 1
    # another thread has no signals; the process is then ended by rewards.timeout
    found = []
    thread = threading.Thread(target=lambda: found.append(forever("aab", {})))
    thread.start()
    thread.join()
    assert found == [1]


# ---- length


@pytest.mark.parametrize(
    ("length", "score"), [(10, 1), (8, 0.5), (12, 0.5), (6, 0), (14, 0), (0, 0), (100, 0), (11, 0.75)]
)
def test_a_target_length(length, score):
    assert TargetLength(10, 4)(CompletionText("", length), {}) == score


@pytest.mark.parametrize(
    ("completion", "n", "score"),
    [
        ("a b a b a b", 2, -0.6),
        ("A b a B a b", 2, -0.6),
        ("a b c d", 2, 0),
        ("a a a a", 1, -0.75),
        ("a b", 3, 0),
        ("", 3, 0),
        ("x x x x", 3, -0.5),
    ],
)
def test_repetition_by_hand(completion, n, score):
    assert Repetition(n)(completion, {}) == pytest.approx(score)
    assert Repetition(n, factor=0.5)(completion, {}) == pytest.approx(score / 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tags(()), "tags is empty"),
        (lambda: Tags(("answer", "answer")), "has a tag twice"),
        (lambda: Tags(("a b",)), "'a b' is not the name of a tag"),
        (lambda: TargetLength(5, 0), "width=0"),
        (lambda: Repetition(0), "n=0"),
        (lambda: Matches("a", seconds=0), "seconds=0"),
        (lambda: RougeL(split="bytes"), "split='bytes'"),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- similarity


def test_common_length_is_that_of_the_table():
    """Against the table of dynamic programming, for texts of few letters, so that much is common."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        first, second = ("".join(rng.choice(list("abc"), rng.integers(0, 80))) for _ in range(2))
        common = np.zeros((len(first) + 1, len(second) + 1), int)
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                common[i + 1, j + 1] = common[i, j] + 1 if a == b else max(common[i, j + 1], common[i + 1, j])
        assert common_length(first, second) == common[-1, -1]


@pytest.mark.parametrize(
    ("completion", "reference", "precision", "recall"),
    [
        ("police kill the gunman", "police killed the gunman", 3 / 4, 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4, 2 / 4),
        ("The cat, on THE mat!", "the cat sat on the mat", 1, 5 / 6),
        ("a", "a b c d", 1, 1 / 4),
        ("x", "a b c d", 0, 0),
        ("", "a", 0, 0),
        ("a", "", 0, 0),
    ],
)
def test_rouge_l_by_hand(completion, reference, precision, recall):
    example = {"answer": reference}
    f = 2 * precision * recall / (precision + recall) if precision else 0
    assert RougeL()(completion, example) == pytest.approx(f)
    assert RougeL()(completion, {"answer": ["zzz", reference]}) == pytest.approx(f), "the best of several"


def test_rouge_l_is_that_of_rouge_score():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)
    rng = np.random.default_rng(1)
    words = np.array(["the", "cat", "Sat", "on", "a-mat", "it's", "naïve", "3.14", "--", "(x)"])
    for _ in range(200):
        texts = [" ".join(rng.choice(words, rng.integers(0, 30))) for _ in range(2)]
        expected = scorer.score(texts[0], texts[1])["rougeL"].fmeasure
        assert RougeL()(texts[1], {"answer": texts[0]}) == pytest.approx(expected, abs=1e-12)


# ---- those of other projects


def test_rewards_of_trl_and_verl_are_called_as_the_page_says(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs" / "extend" / "example")
    import ported_rewards

    assert ported_rewards.of_trl(["so 5", "so 6"], {"question": "2 + 3", "answer": "5"}) == [1.0, 0.0]
    row = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 1}}
    assert ported_rewards.of_verl("so 5", row) == 1.0 and ported_rewards.of_verl("so 6", row) == 0.0
