"""Expressions of True and False."""

import re
from dataclasses import dataclass

import numpy as np

from tunix_lite.tasks.generated import Split, answer_text, check_counts, example_of


@dataclass(frozen=True)
class Boolean:
    """Expressions such as `not (True and False) or True`, with brackets around each pair but the
    outermost.

    Example: {"question": "not (True and False) or True", "answer": "True", ...}.
    """

    # Nesting depth of operators.
    depth: int = 3
    # Share of parts with a `not` before them, from 0 to 1.
    negated: float = 0.3
    # Problems in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out problems, for evaluation.
    num_held_out: int = 256

    def __post_init__(self):
        if not 2 <= self.depth <= 8:
            raise ValueError(f"depth={self.depth} is from 2 to 8")
        if not 0 <= self.negated < 1:
            raise ValueError(f"negated={self.negated} is a share, from 0 to below 1")
        check_counts(self)

    @property
    def train(self) -> Split:
        return Split(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> Split:
        return Split(self, held_out=True, count=self.num_held_out)

    def make(self, rng: np.random.Generator) -> dict:
        """See generated.Generator."""
        text, value = self._pair(rng, self.depth)
        return example_of(text, str(value))

    def _pair(self, rng: np.random.Generator, depth: int) -> tuple[str, bool]:
        """`left and right`, or with `or`, and its value."""
        left, left_value = self._part(rng, depth - 1)
        # one side as deep as it may be, the other one of any depth
        right, right_value = self._part(rng, int(rng.integers(0, depth)))
        if rng.random() < 0.5:
            return f"{left} and {right}", left_value and right_value
        return f"{left} or {right}", left_value or right_value

    def _part(self, rng: np.random.Generator, depth: int) -> tuple[str, bool]:
        if depth:
            text, value = self._pair(rng, depth)
            text = f"({text})"
        else:
            value = bool(rng.random() < 0.5)
            text = str(value)
        if rng.random() < self.negated:
            return f"not {text}", not value
        return text, value


def is_truth_value(completion: str, example: dict) -> float:
    """1 if the last True or False of the completion's answer is `answer`, else 0."""
    said = re.findall(r"\b(?:true|false)\b", answer_text(completion).lower())
    return float(bool(said) and said[-1] == example["answer"].lower())
