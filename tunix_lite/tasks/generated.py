"""Examples that are made and not stored: a function of the number of the example alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tunix_lite.rewards.answers import marked_answers

# draws for one example until its settings are found to leave too few different problems
MOST_DRAWS = 10_000


class Generator(Protocol):
    """A kind of problem with its difficulty: usually a frozen dataclass, the source of a task."""

    def make(self, rng: np.random.Generator) -> dict:
        """One example: `question`, `answer` and `completion`, a demonstration. It depends on
        nothing but the settings and what it draws from rng."""


@dataclass(frozen=True)
class Split(Sequence):
    """The training stream or the held-out set of a generator; no question is in both.

    Example: Split(Sorting(), held_out=True, count=256)[0]["question"] is the same on every machine.
    """

    generator: Generator
    held_out: bool
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self.count:
            raise IndexError(index)
        rng = np.random.default_rng((int(self.held_out), int(index)))
        for _ in range(MOST_DRAWS):
            example = self.generator.make(rng)
            if is_held_out(example["question"]) == self.held_out:
                return example
        raise ValueError(
            f"{self.generator} has too few different problems: none of {MOST_DRAWS:,} drawn is "
            f"{'held out' if self.held_out else 'to train on'}"
        )


@dataclass(frozen=True, kw_only=True)
class GeneratedSource:
    """A generator as the source of a task: add `make` (see Generator) and settings.

    Example: Sorting(num_held_out=16).held_out[0]["question"].
    """

    # Problems in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out problems, for evaluation.
    num_held_out: int = 256

    def __post_init__(self):
        if min(self.num_train, self.num_held_out) < 1:
            raise ValueError(
                f"num_train={self.num_train}, num_held_out={self.num_held_out}: both must be at "
                "least 1"
            )

    @property
    def train(self) -> Split:
        """The training stream."""
        return Split(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> Split:
        """The held-out set, of which nothing is trained on."""
        return Split(self, held_out=True, count=self.num_held_out)


def is_held_out(question: str) -> bool:
    """One problem in eight, chosen by its text alone (FNV-1a, the same on every machine)."""
    value = 2166136261
    for byte in question.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return (value >> 16) % 8 == 0


def check_range(source: GeneratedSource, least: int, low: str, high: str) -> None:
    """Raises ValueError unless least <= low <= high, two settings by their names."""
    if not least <= getattr(source, low) <= getattr(source, high):
        raise ValueError(
            f"{low}={getattr(source, low)}, {high}={getattr(source, high)}: need {least} <= {low} "
            f"<= {high}"
        )


def example_of(question: str, answer: str, **more: object) -> dict:
    """An example with the usual demonstration. more: further fields for its checker."""
    completion = f"The answer is {answer}."
    return {"question": question, "answer": answer, "completion": completion, **more}


def answer_text(completion: str) -> str:
    """The answer in a completion: what it marks as such (\\boxed{}, <answer>, ####, `The answer
    is`), or else its last line that is not empty."""
    if marks := marked_answers(completion):
        return marks[-1].text.strip()
    lines = [line.strip() for line in completion.splitlines() if line.strip()]
    return lines[-1] if lines else ""
