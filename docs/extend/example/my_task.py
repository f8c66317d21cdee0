"""Whole numbers to write in Roman numerals."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.tasks.generated import GeneratedSource, answer_text, example_of

SIGNS = {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}


@dataclass(frozen=True)
class Roman(GeneratedSource):
    """Numbers from 1 to `largest`."""

    largest: int = 300
    num_train: int = 100_000
    num_held_out: int = 20

    def __post_init__(self):
        if not 20 <= self.largest <= 399:
            raise ValueError(f"largest={self.largest} is from 20 to 399")

    def make(self, rng: np.random.Generator) -> dict:
        number = int(rng.integers(1, self.largest + 1))
        return example_of(str(number), in_roman(number))


def in_roman(number: int) -> str:
    text = ""
    for value, sign in SIGNS.items():
        text += sign * (number // value)
        number %= value
    return text


def is_roman(completion: str, example: dict) -> float:
    """1 if the completion's answer is the example's numeral."""
    return float(answer_text(completion).strip(" .") == example["answer"])
