"""Rewards that read a text: answers, mathematics, forms, length, repetition, ROUGE-L, Countdown; values by hand."""

import contextlib
import gc
import importlib.util
import json
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tunix_lite.rewards.answers import ChoiceAnswer, ExactAnswer, NumericAnswer
from tunix_lite.rewards.math import correct
from tunix_lite.rewards.math_verify import MathVerify
from tunix_lite.rewards.scores import CompletionText, Score, from_json, number
from tunix_lite.rewards.similarity import RougeL, common_length
from tunix_lite.rewards.text import Matches, Repetition, Tags, TargetLength
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.puzzles.countdown import reaches_target
from tunix_lite.workers.pool import Pool, RewardsConfig

SCORERS = {
    "number": NumericAnswer(),
    "near": NumericAnswer(tolerance=0.01),
    "nearly": NumericAnswer(relative_tolerance=0.01),
    "text": ExactAnswer(),
    "case": ExactAnswer(ignore_case=False),
    "choice": ChoiceAnswer(),
}


# ---- answers; tests/answer_cases.txt holds the verdicts, by hand


def cases() -> list[tuple]:
    lines = (Path(__file__).parent / "answer_cases.txt").read_text().split("\n")
    found = []
    for line in lines:
        if line and not line.startswith("#"):
            scorer, completion, answer, strict, flexible = line.split(" | ")
            found.append((scorer, json.loads(completion), json.loads(answer), strict, flexible))
    return found


def verdict(score: float) -> str:
    return "-" if isinstance(score, Score) and score == 0 else str(int(score))


@pytest.mark.parametrize("how", ["strict", "flexible"])
def test_answers_are_judged_as_by_hand(how):
    assert len(cases()) >= 200
    wrong = []
    for scorer, completion, answer, *verdicts in cases():
        score = replace(SCORERS[scorer], how=how)(completion, {"answer": answer})
        if verdict(score) != (expected := verdicts[how == "flexible"]):
            wrong.append(f"{scorer} {completion!r} for {answer!r}: {verdict(score)}, not {expected}")
    assert not wrong, "\n".join(["", *wrong])


def test_the_scores_of_the_default_task_are_those_of_rewards_math():
    """The plain scorer stays as it was: it takes the last number, marked or not."""
    assert correct("5. The answer is 7, not 6", {"answer": "6"}) == 1.0
    assert NumericAnswer()("5. The answer is 7, not 6", {"answer": "6"}) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("\\boxed{" * 9000, "\\boxed{" * 4000 + "}" * 4000, "<answer>" * 9000, "answer: " * 9000),
        *("1 " * 40000, "1," * 40000, "1/" * 40000, "5" + " " * 80000 + "x", "answer" + " " * 80000),
        *("$" * 80000, "9" * 80000, "^{" * 40000, "\\text{" * 9000, "is " * 20000),
    ],
    ids=lambda text: text[:8],
)
def test_no_text_takes_long(text):
    # Of this thread alone: those of jax compute beside it. And without the collector, which walks all that other tests
    # have left.
    gc.disable()
    began = time.thread_time()
    for how in ("strict", "flexible"):
        NumericAnswer(how=how)(text, {"answer": 1})
        ExactAnswer(how=how)(text, {"answer": 1})
        ChoiceAnswer(how=how)(text, {"answer": "A"})
    assert time.thread_time() - began < 5


def test_settings_and_examples_that_are_wrong_are_named():
    for wrong in ({"how": "exact"}, {"tolerance": -1.0}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name}="):
            NumericAnswer(**wrong)
    with pytest.raises(ValueError, match="choices="):
        ChoiceAnswer(choices="1234")
    with pytest.raises(ValueError, match=r"answer='seven' of an example is not a number"):
        NumericAnswer()("7", {"answer": "seven"})
    with pytest.raises(ValueError, match=r"answer='F' of an example is none of choices=ABCDE"):
        ChoiceAnswer()("A", {"answer": "F"})
    for scorer in (NumericAnswer(), ExactAnswer(), ChoiceAnswer()):
        with pytest.raises(ValueError, match="an example has no field 'answer': it has question"):
            scorer("7", {"question": "3 + 4"})


# ---- as mathematics (extra `math`): right, wrong, and never silently 0

MATHEMATICS = [  # completion, the example's answer, score, and why it is 0 if that is not for a wrong answer
    ("\\boxed{\\frac{1}{2}}", "0.5", 1, ""),
    ("The answer is $x^2+2x+1$", "(x+1)^2", 1, ""),
    ("0.333333", "1/3", 1, ""),
    ("<answer> \\frac{1}{2} </answer>", "0.5", 1, ""),
    ("<answer>$(1, 2)$</answer>", "(1,2)", 1, ""),
    ("\\boxed{12}. No: <answer>13</answer>", "13", 1, ""),
    ("The answer is\n$$\n\\frac{1}{2}\n$$", "0.5", 1, ""),
    ("First I thought \\boxed{12}. But no: it is \\boxed{", "12", 0, "no_answer"),
    ("\\boxed{\\frac{1.5}{2}}", "0.75", 1, ""),
    ("nothing here", "3", 0, "no_answer"),
]


@pytest.fixture
def math_pool():
    pytest.importorskip("math_verify")
    settings = RewardsConfig("zero", timeout=20.0)
    with contextlib.closing(Pool({"math": partial(number, MathVerify(seconds=2.0))}, settings)) as pool:
        yield pool


def test_answers_are_compared_as_mathematics(math_pool):
    found = [math_pool.submit(completion, {"answer": answer}) for completion, answer, *_ in MATHEMATICS]
    for (completion, answer, score, why), future in zip(MATHEMATICS, found):
        kind, value = future.result()["math"]
        value = from_json(value)
        assert kind == "" and value == score, f"{completion} for {answer}: {kind} {value}"
        assert getattr(value, "kind", "") == why, completion


def test_a_hang_in_sympy_costs_its_seconds_and_no_worker(math_pool):
    assert math_pool.submit("3", {"answer": "3"}).result()["math"] == ("", 1.0)
    began = time.monotonic()
    kind, value = math_pool.submit("$9^{9^{9^{9}}}$", {"answer": "3"}).result()["math"]
    value = from_json(value)
    assert (kind, value, value.kind) == ("", 0.0, "stopped")
    assert 2 <= time.monotonic() - began < 15, "the pool would wait for 20"
    assert math_pool.submit("3", {"answer": "3"}).result()["math"] == ("", 1.0)


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"math-verify is not installed: pip install -e '.\[math\]'"):
        MathVerify()


# ---- tags and patterns


@pytest.mark.parametrize(
    ("completion", "all_right", "share"),
    [
        ("<think>3 + 4</think><answer>7</answer>", 1, 1),
        ("<think>3 + 4</think> so <answer>7</answer>", 0, 1),
        ("<think><answer>7</answer></think>", 0, 1),
        ("<think>3 + 4<answer>7</answer>", 0, 0.5),
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


@pytest.mark.parametrize(("length", "score"), [(10, 1), (8, 0.5), (12, 0.5), (14, 0), (11, 0.75)])
def test_a_target_length(length, score):
    assert TargetLength(10, 4)(CompletionText("", length), {}) == score


@pytest.mark.parametrize(
    ("completion", "n", "score"),
    [
        ("a b a b a b", 2, -0.6),
        ("x x x x", 3, -0.5),
    ],
)
def test_repetition_by_hand(completion, n, score):
    assert Repetition(n)(completion, {}) == pytest.approx(score)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tags(()), "tags is empty"),
        (lambda: Tags(("answer", "answer")), "has a tag twice"),
        (lambda: Repetition(0), "n=0"),
    ],
)
def test_wrong_settings_of_forms_are_named(make, message):
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
        ("The cat, on THE mat!", "the cat sat on the mat", 1, 5 / 6),
        ("a", "a b c d", 1, 1 / 4),
    ],
)
def test_rouge_l_by_hand(completion, reference, precision, recall):
    example = {"answer": reference}
    f = 2 * precision * recall / (precision + recall) if precision else 0
    assert RougeL()(completion, example) == pytest.approx(f)
    assert RougeL()(completion, {"answer": ["zzz", reference]}) == pytest.approx(f), "the best of several"


# ---- Countdown


GIVEN = {"numbers": [3, 7, 7, 50], "target": 64, "use_all": False}
ALL = GIVEN | {"use_all": True}

BY_HAND = [
    (GIVEN, "50 + 7 + 7", 1),
    (GIVEN, "The answer is 7 * (3 + 7) - 50 + 44.", 0),  # 44 is not given
    (GIVEN, "<answer>50 + (7 + 7) = 64</answer>", 1),
    (GIVEN, "50 \u00d7 7 / 7 + 7 + 7", 0),  # 7 four times
    (ALL, "50 + 7 + 7", 0),  # without the 3
    (GIVEN, "50 / (7 - 7)", 0),
    (GIVEN, "__import__('os').getpid()", 0),
    ({"numbers": [1, 3, 8], "target": 24, "use_all": False}, "8 / (1 / 3)", 1),  # exactly, by fractions
    (GIVEN, "(" * 300 + "50" + ")" * 300, 0),
]


@pytest.mark.parametrize("example, completion, right", BY_HAND)
def test_right_and_wrong_by_hand(example, completion, right):
    assert reaches_target(completion, example) == right


def test_problems_are_right_and_the_held_out_ones_are_never_trained_on():
    run = compose(["task=countdown"])
    source = run.task.source
    train = [source.train[i] for i in range(200)]
    held_out = [source.held_out[i] for i in range(len(source.held_out))]
    assert train[:5] == [source.train[i] for i in range(5)] and len(source.train) == 1_000_000
    assert len(source.held_out) == 256 and len({e["question"] for e in train}) > 150
    for example in train:
        assert run.task.correct(example["completion"], example) == run.task.correct(example["answer"], example) == 1
        assert run.task.correct("The answer is 1234567.", example) == 0
    # a space so small that an overlap would show
    few = compose(["task=countdown", "task.source.max_value=9", "task.source.max_numbers=3"]).task.source
    assert not {few.train[i]["question"] for i in range(400)} & {few.held_out[i]["question"] for i in range(200)}
    assert held_out[0]["question"] not in {e["question"] for e in train}
