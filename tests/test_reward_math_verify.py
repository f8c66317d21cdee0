"""Answers compared as mathematics (extra `math`), in the processes of the pool: right, wrong, and never silently 0."""

import contextlib
import importlib.util
import time

import pytest

from tunix_lite.rewards.math_verify import MathVerify
from tunix_lite.rewards.pool import Pool, RewardsConfig

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
    ("nothing here", "3", 0, "no_answer"),
    ("", "3", 0, "no_answer"),
    ("$9^{9^{9^{9}}}$", "3", 0, "stopped"),
]


@pytest.fixture
def pool():
    pytest.importorskip("math_verify")
    settings = RewardsConfig("zero", timeout=20.0)
    with contextlib.closing(Pool({"math": MathVerify(seconds=2.0)}, settings)) as pool:
        yield pool


def test_answers_are_compared_as_mathematics(pool):
    found = [pool.submit(completion, {"answer": answer}) for completion, answer, *_ in CASES]
    for (completion, answer, score, why), future in zip(CASES, found):
        kind, value = future.result()["math"]
        assert kind == "" and value == score, f"{completion} for {answer}: {kind} {value}"
        assert getattr(value, "kind", "") == why or not hasattr(value, "kind")


def test_an_answer_of_an_example_that_is_no_mathematics_is_an_error(pool):
    for answer in ("", "!!"):
        kind, how = pool.submit("3", {"answer": answer}).result()["math"]
        assert kind == "error" and f"math-verify cannot parse the answer {answer!r} of an example" in how


def test_a_hang_in_sympy_costs_its_seconds_and_no_worker(pool):
    assert pool.submit("3", {"answer": "3"}).result()["math"] == ("", 1.0)
    began = time.monotonic()
    assert pool.submit("$9^{9^{9^{9}}}$", {"answer": "3"}).result()["math"] == ("", 0.0)
    assert 2 <= time.monotonic() - began < 6
    assert pool.submit("3", {"answer": "3"}).result()["math"] == ("", 1.0)


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"math-verify is not installed: pip install 'tunix_lite\[math\]'"):
        MathVerify()
