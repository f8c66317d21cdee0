"""Reach a target with given numbers, each at most once, by + - * / and brackets."""

import ast
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tunix_lite.tasks.generated import GeneratedSource, answer_text, check_range, example_of

# characters of an expression that is read at all
LONGEST = 200
OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
# the signs that a model may write for them: times, divided by, minus
SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})


@dataclass(frozen=True)
class Countdown(GeneratedSource):
    """Numbers and a target that an expression of all of them reaches, with whole numbers on the
    way. Other expressions that reach it are right, too.
    Example: {"question": "Reach 14 with some of 7, 8, 13, 16, each once", ...}."""

    # conf/task/countdown.yaml explains each setting
    min_numbers: int = 3
    max_numbers: int = 4
    max_value: int = 25
    max_target: int = 100
    use_all: bool = False

    def __post_init__(self):
        check_range(self, "min_numbers", "max_numbers")
        if self.max_numbers > 8:
            raise ValueError(f"max_numbers={self.max_numbers} must be at most 8")
        if self.max_value < 9 or self.max_target < 10:
            raise ValueError(
                f"max_value={self.max_value}, max_target={self.max_target}: use at least 9 and 10"
            )
        super().__post_init__()

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one problem."""
        count = int(rng.integers(self.min_numbers, self.max_numbers + 1))
        while True:
            numbers = [int(n) for n in rng.integers(1, self.max_value + 1, count)]
            text, target = self._expression(rng, numbers)
            # a target that is given already teaches nothing
            if 0 < target <= self.max_target and target not in numbers:
                break
        shown = ", ".join(str(n) for n in sorted(numbers))
        rule = "each" if self.use_all else "some"
        question = f"Reach {target} with {rule} of {shown}, each once"
        return example_of(question, text, numbers=numbers, target=target, use_all=self.use_all)

    def _expression(self, rng: np.random.Generator, numbers: list[int]) -> tuple[str, int]:
        """All numbers in one expression, joined two at a time, and its value."""
        parts = [(str(number), number) for number in numbers]
        while len(parts) > 1:
            first = parts.pop(int(rng.integers(len(parts))))
            second = parts.pop(int(rng.integers(len(parts))))
            # The larger one first: no difference is negative, and a quotient may be whole.
            if first[1] < second[1]:
                first, second = second, first
            signs = ["+", "-", "*"]
            if second[1] and first[1] % second[1] == 0:
                signs.append("/")
            sign = signs[int(rng.integers(len(signs)))]
            a, b = first[1], second[1]
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
            text = f"{first[0]} {sign} {second[0]}"
            parts.append((f"({text})" if parts else text, value))
        return parts[0]


def reaches_target(completion: str, example: dict) -> float:
    """1 if the completion's answer is an expression of the example's `numbers`, each at most once,
    that is exactly its `target`, else 0. `= target` may follow it."""
    text = answer_text(completion).translate(SIGNS)
    text, _, rest = text.rstrip(". ").partition("=")
    if rest.strip() not in ("", str(example["target"])):
        return 0.0
    evaluation = evaluated(text)
    if evaluation is None:
        return 0.0
    value, used = evaluation
    available = Counter(example["numbers"])
    too_many = used - available
    left_over = available - used if example["use_all"] else None
    return float(value == example["target"] and not too_many and not left_over)


def evaluated(text: str) -> tuple[Fraction, Counter] | None:
    """The exact value of an expression of whole numbers, + - * / and brackets, and how often it
    uses each number; None for anything else."""
    if len(text) > LONGEST:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        used = Counter()
        return _value(tree, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: Counter) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _value(node.left, used)
        return OPERATORS[type(node.op)](left, _value(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    raise ValueError("not an expression of whole numbers")
