"""Sums, differences and products modulo a number."""

import re
from dataclasses import dataclass

import numpy as np

from tunix_lite.tasks.generated import Split, answer_text, check_counts, check_range, example_of

OPERATORS = ("+", "-", "*")


@dataclass(frozen=True)
class ModularArithmetic:
    """Expressions such as `(7 + 3 * 5) mod 4`; `*` comes before `+` and `-`. The answer lies from 0
    to the modulus less 1.

    Example: {"question": "(13 + 10 + 5) mod 3", "answer": "1", ...}.
    """

    # Fewest numbers in an expression.
    min_terms: int = 2
    # Most numbers in a problem.
    max_terms: int = 3
    # Largest number in a problem.
    max_value: int = 20
    # Smallest modulus.
    min_modulus: int = 3
    # Largest modulus.
    max_modulus: int = 11
    # Operators between the numbers.
    operators: tuple[str, ...] = OPERATORS
    # Problems in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out problems, for evaluation.
    num_held_out: int = 256

    def __post_init__(self):
        check_range(self, 2, "min_terms", "max_terms")
        check_range(self, 2, "min_modulus", "max_modulus")
        if self.max_value < 3:
            raise ValueError(f"max_value={self.max_value} must be at least 3")
        if not self.operators or set(self.operators) - {*OPERATORS}:
            raise ValueError(f"operators={list(self.operators)}: choose from '+', '-' and '*'")
        check_counts(self)

    @property
    def train(self) -> Split:
        return Split(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> Split:
        return Split(self, held_out=True, count=self.num_held_out)

    def make(self, rng: np.random.Generator) -> dict:
        """See generated.Generator."""
        count = int(rng.integers(self.min_terms, self.max_terms + 1))
        terms = [int(term) for term in rng.integers(0, self.max_value + 1, count)]
        signs = [self.operators[i] for i in rng.integers(0, len(self.operators), count - 1)]
        modulus = int(rng.integers(self.min_modulus, self.max_modulus + 1))
        text = str(terms[0]) + "".join(f" {s} {t}" for s, t in zip(signs, terms[1:]))
        return example_of(f"({text}) mod {modulus}", str(_value(terms, signs) % modulus))


def _value(terms: list[int], signs: list[str]) -> int:
    """Products first, then sums and differences from the left."""
    summands = [terms[0]]
    for sign, term in zip(signs, terms[1:]):
        if sign == "*":
            summands[-1] *= term
        else:
            summands.append(term if sign == "+" else -term)
    return sum(summands)


def is_residue(completion: str, example: dict) -> float:
    """1 if the last whole number of the completion's answer is `answer`, else 0. Another number of
    the same residue, such as -1 for 6 modulo 7, is wrong; so is a decimal fraction."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer_text(completion))
    return float(bool(numbers) and numbers[-1].lstrip("0").zfill(1) == example["answer"])
