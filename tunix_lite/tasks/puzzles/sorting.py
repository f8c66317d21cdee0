"""Put numbers or words in order."""

import re
from dataclasses import dataclass

import numpy as np

from tunix_lite.tasks.generated import GeneratedSource, answer_text, check_range, example_of

KINDS = ("numbers", "words")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Sorting(GeneratedSource):
    """Lists to put in order, without equal items. The question names the order: from the smallest,
    or for a share `descending` of the lists from the largest.

    Example: {"question": "Sort in descending order: 63, 30, 4", "answer": "63, 30, 4", ...}.
    """

    # Items to sort: numbers, or words of random letters.
    kind: str = "numbers"
    # Fewest items in a list.
    min_items: int = 3
    # Most items in a list.
    max_items: int = 6
    # Largest number in a problem.
    max_value: int = 99
    # Letters in a word.
    word_length: int = 3
    # Share of lists to sort from the largest, from 0 to 1.
    descending: float = 0.5

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; it is numbers or words")
        check_range(self, 2, "min_items", "max_items")
        if self.max_value < 2 * self.max_items:
            raise ValueError(
                f"max_value={self.max_value} leaves too few numbers for max_items="
                f"{self.max_items}; use at least {2 * self.max_items}"
            )
        if self.word_length < 2:
            raise ValueError(f"word_length={self.word_length} must be at least 2")
        if not 0 <= self.descending <= 1:
            raise ValueError(f"descending={self.descending} is a share, from 0 to 1")
        super().__post_init__()

    def make(self, rng: np.random.Generator) -> dict:
        """See generated.Generator."""
        count = int(rng.integers(self.min_items, self.max_items + 1))
        is_descending = bool(rng.random() < self.descending)
        items: list = []
        while len(items) < count:
            if self.kind == "numbers":
                item = int(rng.integers(0, self.max_value + 1))
            else:
                letters = rng.integers(0, len(LETTERS), self.word_length)
                item = "".join(LETTERS[i] for i in letters)
            if item not in items:
                items.append(item)
        ordered = sorted(items, reverse=is_descending)
        order = "descending" if is_descending else "ascending"
        question = f"Sort in {order} order: {', '.join(map(str, items))}"
        return example_of(question, ", ".join(map(str, ordered)))


def is_sorted_right(completion: str, example: dict) -> float:
    """1 if the completion's answer names the items of `answer` in this order, else 0. Commas, white
    space and brackets between them do not count."""
    return float(_items(answer_text(completion)) == _items(example["answer"]))


def _items(text: str) -> list[str]:
    return re.findall(r"-?\w+", text.lower())
