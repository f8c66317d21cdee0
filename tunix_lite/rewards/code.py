"""Code that a model wrote, run against tests: each test in processes of its own, with limits. It
needs Linux. **This is no security boundary** (docs/guide/rewards.md says what each limit does)."""

import re
import sys
import time
from dataclasses import dataclass

from tunix_lite.rewards.code_checks import checks_of
from tunix_lite.rewards.scores import Score, field_of, no_answer
from tunix_lite.workers.sandbox import STOPPED, run_job

# characters of a program that are run
LONGEST = 256 * 1024
TOO_LONG = "took more than total_seconds for all tests"
_FENCE = re.compile(r"^```[^\S\n]*([\w+-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class PassesTests:
    """The share of an example's tests that the completion's code passes; with `all_or_nothing`, 1
    if it passes all, else 0.

    The code is the last block fenced by ``` (of Python, or of no language). A test is a text of
    Python, run after the code and passed if nothing raises; or {input: ..., output: ...}: the code
    as a program gets the input on stdin, and its lines on stdout are compared without space at
    their ends. A completion whose code goes beyond a limit is counted (`rewards/stopped`), one
    without code too (`rewards/no_answer`).
    Example: an example {"tests": ["assert add(1, 2) == 3"]}."""

    field: str = "tests"  # of the example: a list of tests
    all_or_nothing: bool = True
    seconds: float = 2.0  # for one test
    total_seconds: float = 8.0  # for all tests of a completion; below rewards.timeout
    max_tests: int = 32  # the first ones of an example
    memory_mib: int = 1024
    output_kib: int = 1024  # on stdout
    disk_mib: int = 16  # in the folder that the code runs in
    max_processes: int = 8  # threads count, too

    def __post_init__(self):
        for name, value in vars(self).items():
            if name not in ("field", "all_or_nothing") and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")
        if sys.platform != "linux":
            raise ValueError("rewards.code.PassesTests limits code by means of Linux only")

    @property
    def most_seconds(self) -> float:
        """Most seconds that a call may take; rewards.timeout must be above it."""
        return self.total_seconds

    def __call__(self, completion: str, example: dict) -> float:
        """Raises ValueError for tests that are none, RuntimeError if they cannot be run here."""
        tests = field_of(example, self.field)
        if isinstance(tests, str):
            tests = [tests]
        if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
            raise ValueError(
                f"{self.field}={tests!r:.200} of an example is not a list of texts or of "
                "{input: ..., output: ...}"
            )
        tests = tests[: self.max_tests]
        code = code_in(completion)
        if code is None:
            return no_answer("it holds no block of code between ``` and ```")
        deadline = time.monotonic() + self.total_seconds
        passed = 0
        stopped = ""
        for test in tests:
            left = min(self.seconds, deadline - time.monotonic())
            if left <= 0:
                stopped = stopped or TOO_LONG
                break
            is_passed, why = self._passes(code, test, left)
            # The time of all tests was over, not that of this one.
            if why == STOPPED["time"] and left < self.seconds:
                why = TOO_LONG
            passed += is_passed
            stopped = stopped or why
            # Whatever the other tests say, the score is 0.
            if self.all_or_nothing and not is_passed:
                break
        score = float(passed == len(tests)) if self.all_or_nothing else passed / len(tests)
        return Score(score, "stopped", f"its code {stopped}") if stopped else score

    def _passes(self, code: str, test: str | dict, seconds: float) -> tuple[bool, str]:
        """Tells if the code passes a test, and by which limit it was stopped ("": by none)."""
        is_program = isinstance(test, dict)
        checks = checks_of("" if is_program else test)
        verdict = run_job(
            code,
            None if is_program else checks.source,
            test["input"] if is_program else "",
            seconds=seconds,
            memory_mib=self.memory_mib,
            output_bytes=self.output_kib * 1024,
            disk_mib=self.disk_mib,
            processes=self.max_processes,
        )
        if verdict["status"] != "ended":
            return False, STOPPED.get(verdict["status"], verdict["status"])
        is_right = True
        if is_program:
            is_right = _lines(verdict["printed"]) == _lines(test["output"])
        elif checks.checks:
            is_right = checks.are_met(verdict["reports"])
        # The kernel's limit on addresses shows as an error of Python.
        why = STOPPED["memory"] if "MemoryError" in verdict["why"] else ""
        return verdict["is_done"] and is_right, why


def code_in(completion: str) -> str | None:
    """The last fenced block of Python, or of no language; None if there is none."""
    blocks = [
        block
        for language, block in _FENCE.findall(completion[:LONGEST])
        if language.lower() in ("", "python", "py", "python3")
    ]
    return blocks[-1] if blocks else None


def _is_test(test: object) -> bool:
    if isinstance(test, dict):
        return all(isinstance(test.get(name), str) for name in ("input", "output"))
    return isinstance(test, str)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
