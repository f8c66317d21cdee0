"""Convert a quantity from one unit into another."""

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tunix_lite.tasks.generated import Split, answer_text, check_counts, example_of

# kind -> unit -> how many of the smallest unit
UNITS = {
    "length": {"mm": 1, "cm": 10, "m": 1000, "km": 1_000_000},
    "mass": {"mg": 1, "g": 1000, "kg": 1_000_000, "t": 1_000_000_000},
    "time": {"s": 1, "min": 60, "h": 3600, "days": 86_400},
    "volume": {"ml": 1, "cl": 10, "dl": 100, "l": 1000},
}
# unit -> how it is written out, without the s of several
NAMES = {
    "mm": "millimeter",
    "cm": "centimeter",
    "m": "meter",
    "km": "kilometer",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "t": "ton",
    "s": "second",
    "min": "minute",
    "h": "hour",
    "days": "day",
    "ml": "milliliter",
    "cl": "centiliter",
    "dl": "deciliter",
    "l": "liter",
}


@dataclass(frozen=True)
class UnitConversion:
    """Quantities whose number in the other unit is a short decimal, such as `2.5 km in m`.

    Example: {"question": "Convert 5 dl to ml", "answer": "500", ...}.
    """

    # Kinds of quantities: length, mass, time, volume.
    kinds: tuple[str, ...] = tuple(UNITS)
    # Largest number to convert.
    max_value: int = 99
    # Most decimals of the number.
    decimals: int = 1
    # Largest ratio between the two units.
    max_factor: int = 10_000
    # Problems in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out problems, for evaluation.
    num_held_out: int = 256

    def __post_init__(self):
        if not self.kinds or set(self.kinds) - UNITS.keys():
            raise ValueError(f"kinds={list(self.kinds)}: choose from {', '.join(UNITS)}")
        if self.max_value < 9 or not 0 <= self.decimals <= 4:
            raise ValueError(
                f"max_value={self.max_value}, decimals={self.decimals}: at least 9, and 0 to 4"
            )
        if self.max_factor < 60:
            raise ValueError(f"max_factor={self.max_factor} must be at least 60")
        check_counts(self)

    @property
    def train(self) -> Split:
        return Split(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> Split:
        return Split(self, held_out=True, count=self.num_held_out)

    def make(self, rng: np.random.Generator) -> dict:
        """See generated.Generator."""
        while True:
            units = UNITS[self.kinds[int(rng.integers(len(self.kinds)))]]
            first, second = (list(units)[i] for i in rng.permutation(len(units))[:2])
            factor = Fraction(units[first], units[second])
            scale = 10 ** int(rng.integers(0, self.decimals + 1))
            number = Fraction(int(rng.integers(1, self.max_value * scale + 1)), scale)
            answer = decimal_of(number * factor)
            if answer is not None and max(factor, 1 / factor) <= self.max_factor:
                break
        question = f"Convert {decimal_of(number)} {first} to {second}"
        return example_of(question, answer, unit=second)


def decimal_of(value: Fraction) -> str | None:
    """The value as a decimal; None if it has more than eight places."""
    scaled = value * 10**8
    if scaled.denominator != 1:
        return None
    digits = str(scaled.numerator).zfill(9)
    return f"{digits[:-8]}.{digits[-8:]}".rstrip("0").rstrip(".")


def is_converted(completion: str, example: dict) -> float:
    """1 if the last number of the completion's answer equals `answer` and the word after it, if
    there is one, is the right unit; else 0."""
    found = re.findall(r"(-?\d+(?:,\d{3})*(?:\.\d+)?)\s*([a-z]+)?", answer_text(completion).lower())
    if not found:
        return 0.0
    number, unit = found[-1]
    name = NAMES[example["unit"]]
    said = unit.replace("tre", "ter")
    is_right_unit = said in ("", example["unit"], name, f"{name}s")
    return float(is_right_unit and Fraction(number.replace(",", "")) == Fraction(example["answer"]))
