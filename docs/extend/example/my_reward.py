"""Rewards of a task of sums: strings in, a number out."""

from dataclasses import dataclass


def shows_working(completion: str, example: dict) -> float:
    """1 if the completion writes an equation, else 0."""
    return float("=" in completion)


@dataclass(frozen=True)
class WordLimit:
    """1 for a completion of at most `most` words, else `penalty`."""

    most: int
    penalty: float = -1.0

    def __post_init__(self):
        if self.most < 1:
            raise ValueError(f"most={self.most} must be at least 1")

    def __call__(self, completion: str, example: dict) -> float:
        return 1.0 if len(completion.split()) <= self.most else self.penalty
