"""Rewards that look at the form of a completion, not at what it says: tags, patterns, length,
repetition."""

import re
from dataclasses import dataclass

from tunix_lite.rewards.scores import CompletionText
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
    """1 if the completion is these tags in this order and nothing else, else 0. With `partial`,
    each tag that stands there once, opened before it is closed, counts its share, whatever stands
    around it.
    Example: `<think>3 + 4</think> <answer>7</answer>` -> 1; without `</think>` 0, or partial
    0.5."""

    tags: tuple[str, ...] = ("think", "answer")
    partial: bool = False  # a share of 1 for each tag that is right

    def __post_init__(self):
        if not self.tags:
            raise ValueError("tags is empty: name at least one, as in [think, answer]")
        if len({*self.tags}) < len(self.tags):
            raise ValueError(f"tags={list(self.tags)} has a tag twice")
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
    """1 if a regular expression (Python's, as `re` has it) finds something in the completion. An
    expression that takes longer than `seconds` has failed (`rewards/errors`): it is at fault, not
    the completion. The first 65,536 characters are looked at.
    Example: Matches("[0-9]+")("12 apples", {}) -> 1."""

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
    """1 at `target` tokens, falling in a straight line to 0 at `width` above or below it.
    Example: TargetLength(10, 10) of 15 tokens -> 0.5."""

    target: int
    width: int

    def __post_init__(self):
        if self.target < 0 or self.width < 1:
            raise ValueError(
                f"target={self.target} must not be negative, and width={self.width} at least 1"
            )

    def __call__(self, completion: CompletionText, example: dict) -> float:
        return max(0.0, 1.0 - abs(completion.num_tokens - self.target) / self.width)


@dataclass(frozen=True)
class Repetition:
    """0 if no n-gram of words stands there twice, down to -factor if all are one and the same. It
    is -factor (1 - different n-grams / n-grams); a completion of fewer words than `n` gets 0.
    Example: "a b a b a b" with n = 2: 5 bigrams, 2 different -> -0.6."""

    n: int = 3
    factor: float = 1.0

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")
        if self.factor < 0:
            raise ValueError(f"factor={self.factor} must not be negative: it is subtracted")

    def __call__(self, completion: str, example: dict) -> float:
        words = completion[:LONGEST].lower().split()
        grams = [tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)]
        if not grams:
            return 0.0
        return -self.factor * (1 - len({*grams}) / len(grams))
