"""Answers are read as a person would read them: tests/answer_cases.txt holds the verdicts, by hand."""

import gc
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tunix_lite.rewards.answers import ChoiceAnswer, ExactAnswer, NumericAnswer
from tunix_lite.rewards.math import correct
from tunix_lite.rewards.scores import Score

SCORERS = {
    "number": NumericAnswer(),
    "near": NumericAnswer(tolerance=0.01),
    "nearly": NumericAnswer(relative_tolerance=0.01),
    "text": ExactAnswer(),
    "case": ExactAnswer(ignore_case=False),
    "choice": ChoiceAnswer(),
}


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
        *("\\boxed{" * 9000, "\\boxed{" * 4000 + "}" * 4000, "<answer>" * 9000, "answer: " * 9000, "answer is " * 6000),
        *("1 " * 40000, "- " * 40000, "1," * 40000, "1/" * 40000, "5" + " " * 80000 + "x", "answer" + " " * 80000),
        *("$" * 80000, "*" * 80000, "#" * 80000, "9" * 80000, "^{" * 40000, "\\text{" * 9000, "is " * 20000),
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
