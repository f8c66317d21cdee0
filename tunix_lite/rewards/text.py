"""Rewards that look at the form of a completion, not at what it says: tags, patterns, length,
repetition."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from tunix_lite.rewards.completion import check_unit, length_of
from tunix_lite.workers.limits import time_limit

# characters of a completion that patterns and n-grams look at: its first ones
LONGEST = 64 * 1024


def brevity(completion: str, example: dict, length: int = 200) -> float:
    """1 for an empty completion, falling in a straight line to 0 at `length` characters."""
    return max(0.0, 1.0 - len(completion) / length)


def contains(completion: str, example: dict, text: str) -> float:
    """1 if `text` stands in the completion, else 0."""
    return float(text in completion)


@dataclass(frozen=True)
class Tags:
    """1 if the completion is these tags in this order and nothing else, else 0.

    With `partial`, each tag that stands there once, opened before it is closed, counts its share,
    whatever stands around it.

    Example: `<think>3 + 4</think> <answer>7</answer>` -> 1; without `</think>` 0, or partial 0.5.
    """

    tags: tuple[str, ...] = ("think", "answer")
    partial: bool = False  # a share of 1 for each tag that is right

    def __post_init__(self):
        if not self.tags:
            raise ValueError("tags is empty: name at least one, as in [think, answer]")
        if len({*self.tags}) < len(self.tags):
            raise ValueError(
                f"tags={list(self.tags)} has a tag twice; each may stand there once"
            )
        for tag in self.tags:
            if not re.fullmatch(r"[A-Za-z][\w.-]*", tag):
                raise ValueError(f"tags: {tag!r} is not the name of a tag, such as answer")

    def __call__(self, completion: str, example: dict) -> float:
        right = []
        for tag in self.tags:
            opened, closed = f"<{tag}>", f"</{tag}>"
            is_once = completion.count(opened) == completion.count(closed) == 1
            right.append(is_once and completion.index(opened) < completion.index(closed))
        if self.partial:
            return sum(right) / len(right)
        # nothing but space stands before, between and behind the tags
        parts = [rf"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in self.tags]
        whole = r"\s*".join(["", *parts, ""])
        is_all = all(right) and re.fullmatch(whole, completion, re.DOTALL)
        return float(bool(is_all))


@dataclass(frozen=True)
class Matches:
    """1 if a regular expression (Python's, as `re` has it) finds something in the completion.

    An expression that takes longer than `seconds` has failed (`rewards/errors`): it is at fault,
    not the completion. The first 65,536 characters are looked at.

    Example: Matches("[0-9]+")("12 apples", {}) -> 1.
    """

    pattern: str
    whole: bool = False  # the completion must match as a whole
    ignore_case: bool = False
    dot_all: bool = True  # `.` is a newline, too
    seconds: float = 1.0

    def __post_init__(self):
        try:
            self._compiled()
        except re.error as error:
            raise ValueError(
                f"pattern={self.pattern!r} is no regular expression: {error}"
            ) from error
        if self.seconds <= 0:
            raise ValueError(f"seconds={self.seconds} must be above 0")

    def __call__(self, completion: str, example: dict) -> float:
        pattern = self._compiled()
        look = pattern.fullmatch if self.whole else pattern.search
        with time_limit(self.seconds, f"the pattern {self.pattern[:100]!r}"):
            return float(look(completion[:LONGEST]) is not None)

    def _compiled(self) -> re.Pattern:
        # re keeps what it compiled
        flags = re.IGNORECASE * self.ignore_case | re.DOTALL * self.dot_all
        return re.compile(self.pattern, flags)


@dataclass(frozen=True)
class TargetLength:
    """1 at `target`, falling in a straight line to 0 at `width` above or below it.

    Example: TargetLength(10, 10, unit="characters") of 15 characters -> 0.5.
    """

    target: int
    width: int
    unit: str = "tokens"  # or words, characters

    def __post_init__(self):
        check_unit(self.unit)
        if self.target < 0 or self.width < 1:
            raise ValueError(
                f"target={self.target} must not be negative, and width={self.width} at least 1"
            )

    def __call__(self, completion: str, example: dict) -> float:
        distance = abs(length_of(completion, self.unit) - self.target)
        return max(0.0, 1.0 - distance / self.width)


@dataclass(frozen=True)
class CosineLength:
    """Moves between two values along half a cosine of the length, others for a right completion
    than for a wrong one: among right ones short is better, among wrong ones long is.

    With x = min(length / max_length, 1), a value goes from its `_short` at x = 0 to its `_long` at
    x = 1 as long + (short - long) (1 + cos(pi x)) / 2.

    Example: CosineLength(correct, 10, unit="characters") of a right answer of one character ->
    0.988.
    """

    # (completion, example) -> above 0 if it is right
    correct: Callable
    max_length: int
    unit: str = "tokens"  # or words, characters
    right_short: float = 1.0
    right_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5

    def __post_init__(self):
        check_unit(self.unit)
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} must be at least 1")

    def __call__(self, completion: str, example: dict) -> float:
        share = min(length_of(completion, self.unit) / self.max_length, 1.0)
        is_right = self.correct(completion, example) > 0
        short = self.right_short if is_right else self.wrong_short
        long = self.right_long if is_right else self.wrong_long
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class SoftOverlong:
    """0 up to max_tokens - buffer_tokens, from there in a straight line down to -factor at
    max_tokens: the overlong shaping of DAPO, in tokens.

    Example: max_tokens 100, buffer 20: 80 tokens -> 0, 90 -> -0.5, 100 and more -> -1.
    """

    max_tokens: int  # of a completion: ${generation.max_new_tokens}
    buffer_tokens: int
    factor: float = 1.0

    def __post_init__(self):
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens} must be above 0 and at most "
                f"max_tokens={self.max_tokens}"
            )
        if self.factor < 0:
            raise ValueError(f"factor={self.factor} must not be negative: it is subtracted")

    def __call__(self, completion: str, example: dict) -> float:
        exceeds = length_of(completion, "tokens") - (self.max_tokens - self.buffer_tokens)
        return -self.factor * min(max(exceeds / self.buffer_tokens, 0.0), 1.0)


@dataclass(frozen=True)
class Repetition:
    """0 if no n-gram of words stands there twice, down to -factor if all are one and the same.

    It is -factor (1 - different n-grams / n-grams); a completion of fewer words than `n` gets 0.

    Example: "a b a b a b" with n = 2: 5 bigrams, 2 different -> -0.6.
    """

    n: int = 3
    factor: float = 1.0

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")
        if self.factor < 0:
            raise ValueError(f"factor={self.factor} must not be negative: it is subtracted")

    def __call__(self, completion: str, example: dict) -> float:
        grams = ngrams(completion, self.n)
        if not grams:
            return 0.0
        return -self.factor * (1 - len({*grams}) / len(grams))


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """All runs of n words, in lower case, of the first LONGEST characters of a text."""
    split = text[:LONGEST].lower().split()
    return [tuple(split[i : i + n]) for i in range(len(split) - n + 1)]
