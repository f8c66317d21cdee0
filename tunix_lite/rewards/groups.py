"""Rewards that compare the completions of a prompt: `group: true` in a task. Each gets the list of
them and returns a number for each."""

from collections.abc import Callable
from dataclasses import dataclass

from tunix_lite.rewards.completion import check_unit, length_of
from tunix_lite.rewards.text import ngrams


@dataclass(frozen=True)
class LengthRank:
    """1 for the shortest completion of a group, 0 for the longest, evenly between; completions of
    one length share their ranks. With `correct`, only right ones are ranked, and wrong ones get 0.

    A completion that is compared with no other gets 0.

    Example: LengthRank(unit="characters")(["a", "aaa", "aa"], {}) -> [1, 0, 0.5].
    """

    unit: str = "tokens"  # or words, characters
    longest_first: bool = False  # 1 for the longest instead
    # (completion, example) -> above 0 if it is right; null: all are ranked
    correct: Callable | None = None

    def __post_init__(self):
        check_unit(self.unit)

    def __call__(self, completions: list[str], example: dict) -> list[float]:
        ranked = [
            place
            for place, completion in enumerate(completions)
            if self.correct is None or self.correct(completion, example) > 0
        ]
        lengths = [length_of(completions[place], self.unit) for place in ranked]
        ranks = ranks_of([-length if self.longest_first else length for length in lengths])
        scores = [0.0] * len(completions)
        for place, rank in zip(ranked, ranks):
            if len(ranked) > 1:
                scores[place] = 1 - rank / (len(ranked) - 1)
        return scores


def ranks_of(values: list[float]) -> list[float]:
    """The rank of each value from 0, the smallest; of equal values the mean of theirs.

    Example: [5, 3, 5] -> [1.5, 0, 1.5].
    """
    order = sorted(values)
    first = {}
    last = {}
    for rank, value in enumerate(order):
        first.setdefault(value, rank)
        last[value] = rank
    return [(first[value] + last[value]) / 2 for value in values]


@dataclass(frozen=True)
class Diversity:
    """Difference of a completion from the others of its group, from 0, a copy of each, to 1,
    nothing in common with any.

    It is the mean, over the others, of 1 - (n-grams in both) / (n-grams in either). A completion
    alone gets 0.

    Example: Diversity()(["a b c", "a b c"], {}) -> [0, 0].
    """

    n: int = 2  # words of an n-gram

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")

    def __call__(self, completions: list[str], example: dict) -> list[float]:
        grams = [{*ngrams(completion, self.n)} for completion in completions]
        scores = []
        for place, own in enumerate(grams):
            others = [other for index, other in enumerate(grams) if index != place]
            distances = [1 - len(own & x) / len(own | x) if own | x else 0.0 for x in others]
            scores.append(sum(distances) / len(others) if others else 0.0)
        return scores
