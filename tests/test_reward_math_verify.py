"""Answers compared as mathematics (extra `math`), in the processes of the pool: right, wrong, and never silently 0."""

import contextlib
import importlib.util
import time
from functools import partial

import pytest

from tunix_lite.rewards.math_verify import MathVerify
from tunix_lite.rewards.scores import from_json, number
from tunix_lite.workers.pool import Pool, RewardsConfig

CASES = [  # completion, the example's answer, score, and why it is 0 if that is not for a wrong answer
    ("\\boxed{\\frac{1}{2}}", "0.5", 1, ""),
    ("The answer is $x^2+2x+1$", "(x+1)^2", 1, ""),
    ("The answer is $x^2+2x+1$", "$(x-1)^2$", 0, ""),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1, ""),
    ("\\boxed{2}", "2\\sqrt{2}", 0, ""),
    ("$[1,2)$", "[1,2)", 1, ""),
    ("$[1,2]$", "[1,2)", 0, ""),
    ("$\\{1,2\\}$", "\\{2,1\\}", 1, ""),
    ("1,234", "1234", 1, ""),
    ("50%", "0.5", 1, ""),
    ("the answer is 3", "3", 1, ""),
    ("the answer is 4", "3", 0, ""),
    ("0.333333", "1/3", 1, ""),
    ("0.333", "1/3", 0, ""),
    ("<answer>12</answer>", "12", 1, ""),
    ("<answer>13</answer>", "12", 0, ""),
    ("<answer> \\frac{1}{2} </answer>", "0.5", 1, ""),
    ("<answer>x^2+2x+1</answer>", "(x+1)^2", 1, ""),
    ("<answer>$(1, 2)$</answer>", "(1,2)", 1, ""),
    ("<answer>She has 72 clips.</answer>", "72", 1, ""),
    ("<answer>(1, 2)</answer>", "1", 0, ""),
    ("<answer>2\\sqrt{3}</answer>", "2", 0, ""),
    ("\\boxed{12}. No: <answer>13</answer>", "13", 1, ""),
    ("\\boxed{12}. No: <answer>13</answer>", "12", 0, ""),
    ("3 + 4\n#### 7", "7", 1, ""),
    ("The answer is\n$$\n\\frac{1}{2}\n$$", "0.5", 1, ""),
    ("\\boxed{12}. I hope that the answer is clear.", "12", 1, ""),
    ("First I thought \\boxed{12}. But no: it is \\boxed{", "12", 0, "no_answer"),
    ("\\boxed{12} ... the answer is \\boxed{}.", "12", 0, "no_answer"),
    ("<answer>12</answer> No, <answer>", "12", 0, "no_answer"),
    ("#### 12 ... #### ", "12", 0, "no_answer"),
    ("\\boxed{12", "12", 0, "no_answer"),
    ("\\boxed{12}. So the final answer is", "12", 0, "no_answer"),
    ("\\boxed{\\frac{1.5}{2}}", "0.75", 1, ""),
    ("\\boxed{\\frac{1}{-2}}", "-0.5", 1, ""),
    ("nothing here", "3", 0, "no_answer"),
    ("", "3", 0, "no_answer"),
    ("$9^{9^{9^{9}}}$", "3", 0, "stopped"),
]


@pytest.fixture
def pool():
    pytest.importorskip("math_verify")
    settings = RewardsConfig("zero", timeout=20.0)
    with contextlib.closing(Pool({"math": partial(number, MathVerify(seconds=2.0))}, settings)) as pool:
        yield pool


def test_answers_are_compared_as_mathematics(pool):
    found = [pool.submit(completion, {"answer": answer}) for completion, answer, *_ in CASES]
    for (completion, answer, score, why), future in zip(CASES, found):
        kind, value = future.result()["math"]
        value = from_json(value)
        assert kind == "" and value == score, f"{completion} for {answer}: {kind} {value}"
        assert getattr(value, "kind", "") == why, completion


def test_a_hang_in_sympy_costs_its_seconds_and_no_worker(pool):
    assert pool.submit("3", {"answer": "3"}).result()["math"] == ("", 1.0)
    began = time.monotonic()
    kind, value = pool.submit("$9^{9^{9^{9}}}$", {"answer": "3"}).result()["math"]
    assert (kind, from_json(value)) == ("", 0.0)
    assert 2 <= time.monotonic() - began < 15, "the pool would wait for 20"
    assert pool.submit("3", {"answer": "3"}).result()["math"] == ("", 1.0)


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"math-verify is not installed: pip install -e '.\[math\]'"):
        MathVerify()
