"""Answers compared as mathematics, by the package math-verify: `pip install -e '.[math]'`."""

import functools
import importlib.util
import logging
from dataclasses import dataclass
from types import ModuleType

from tunix_lite.rewards.answers import is_sentence, marked_answers
from tunix_lite.rewards.numbers import number_in, number_of
from tunix_lite.rewards.scores import Score, field_of, no_answer
from tunix_lite.workers.limits import call_with_limits, time_limit

# characters of a completion that are parsed: its last ones
LONGEST = 16 * 1024


@dataclass(frozen=True)
class MathVerify:
    """1 if the completion's answer equals the example's as mathematics (numbers, fractions,
    expressions, intervals, sets), else 0. Of a completion with marks (see rewards.answers), what
    the last one holds is compared.

    math-verify itself turns all that goes wrong into "wrong". Here it is 0 and counted: a
    completion without an expression that can be parsed or compared (`rewards/no_answer`), and one
    that takes longer than `seconds` (`rewards/stopped`). An example's answer that cannot be parsed
    is an error of the reward, which rewards.on_error treats.
    Example: an example {"answer": "\\frac{1}{2}"} and the completion "$0.5$" give 1."""

    field: str = "answer"  # of the example: LaTeX, or a plain number or expression
    decimals: int = 6  # that numbers are rounded to before they are compared
    digits: int = 15  # that expressions are computed to
    seconds: float = 5.0  # for one completion; below rewards.timeout

    def __post_init__(self):
        if self.seconds <= 0:
            raise ValueError(f"seconds={self.seconds} must be above 0")
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "the package math-verify is not installed: pip install -e '.[math]'"
            )

    def __call__(self, completion: str, example: dict) -> float:
        """Raises ValueError for an example's answer that cannot be parsed."""
        # the import is no part of what is limited
        _package()
        expected = _expected(str(field_of(example, self.field)), self.seconds)
        compare = functools.partial(self._compare, expected, completion[-LONGEST:])
        try:
            return call_with_limits(compare, self.seconds, "math-verify")
        except (TimeoutError, MemoryError) as error:
            return Score(0.0, "stopped", str(error))

    def _compare(self, expected: tuple, completion: str) -> float:
        package = _package()
        # it is given no timeouts: those are signals as well, and would end ours
        parsed = (package.parse(text, parsing_timeout=None) for text in _texts_of(completion))
        answer = next(filter(_holds_mathematics, parsed), [])
        if not answer:
            return no_answer("it holds no expression that could be parsed")
        try:
            is_right = package.verify(
                list(expected),
                answer,
                float_rounding=self.decimals,
                numeric_precision=self.digits,
                timeout_seconds=None,
                raise_on_error=True,
            )
        # Of the limit around this call, and no failure to compare.
        except TimeoutError:
            raise
        except Exception as error:
            return no_answer(f"its answer could not be compared: {type(error).__name__}")
        return float(is_right)


@functools.lru_cache(maxsize=1024)
def _expected(answer: str, seconds: float) -> tuple:
    """The parsed answer of an example, as LaTeX; marks of mathematics may stand around it."""
    for text in _readings(answer):
        with time_limit(seconds, "math-verify"):
            parsed = _package().parse(text, parsing_timeout=None)
        if _holds_mathematics(parsed):
            return tuple(parsed)
    raise ValueError(f"math-verify cannot parse the answer {answer[:200]!r} of an example")


def _readings(answer: str) -> tuple[str, ...]:
    """The texts that an answer is parsed as, the first that is mathematics: without dollars,
    math-verify takes a number out of LaTeX, of 2\\sqrt{2} the first 2."""
    if any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\[")):
        return (answer,)
    # a plain number is parsed as it stands, and so are words
    is_plain = number_of(answer) is not None or number_in(answer) is not None
    return (answer, f"${answer}$") if is_plain else (f"${answer}$", answer)


def _texts_of(completion: str) -> tuple[str, ...]:
    """The texts of a completion that are parsed: those in its last mark, or all of it."""
    marks = marked_answers(completion)
    if not marks or is_sentence(marks[-1], completion):
        return (completion,)
    *_, mark = marks
    is_empty = not mark.text.strip("*_$ \n")
    if mark.kind == "words":
        # a formula may go on over several lines
        if is_empty:
            return (completion[mark.place :],)
        return (completion[mark.place :], completion)
    if is_empty:
        return ()
    if mark.kind == "boxed":
        return (f"\\boxed{{{mark.text}}}",)
    return _readings(mark.text)


def _holds_mathematics(parsed: list) -> bool:
    """True if something was parsed as mathematics; what could not be parsed is there as a text."""
    return any(not isinstance(part, str) for part in parsed)


@functools.cache
def _package() -> ModuleType:
    """Imports math_verify, without its warnings that timeouts are off: ours are on."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its grammars are read at first use, 0.1 seconds that every child would spend again.
    parsed = math_verify.parse("\\boxed{\\frac{1}{2}} and $x + 1$, 3", parsing_timeout=None)
    math_verify.verify(parsed, parsed, timeout_seconds=None)
    return math_verify
