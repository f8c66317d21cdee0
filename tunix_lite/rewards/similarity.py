"""Similarity of a completion to a reference text: ROUGE (Lin 2004).

It keeps one number of as many bits as a text has units (Hyyro's algorithm), so its memory is
linear. Of longer texts the first `most` units are compared.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tunix_lite.rewards.fields import field_of

SPLITS = ("rouge", "words", "characters")
MEASURES = ("f", "precision", "recall")


def units_of(text: str, split: str) -> Sequence[str]:
    """A text as the units that are compared.

    rouge: as rouge_score has it without stemming: runs of a-z and 0-9 of the text in lower case;
    other letters are no part of any. words: runs of letters and digits of any writing, without
    case. characters: all as they are.
    """
    if split == "rouge":
        return re.findall(r"[a-z0-9]+", text.lower())
    if split == "words":
        return re.findall(r"\w+", text.casefold())
    return text


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence of two sequences."""
    # the places at which each unit stands, as bits
    places: dict[str, list[int]] = {}
    for place, unit in enumerate(first):
        places.setdefault(unit, []).append(place)
    masks = {}
    for unit, places_of_unit in places.items():
        bits = bytearray(len(first) // 8 + 1)
        for place in places_of_unit:
            bits[place // 8] |= 1 << place % 8
        masks[unit] = int.from_bytes(bits, "little")
    every = (1 << len(first)) - 1
    left = every
    for unit in second:
        taken = left & masks.get(unit, 0)
        left = ((left + taken) | (left - taken)) & every
    return len(first) - left.bit_count()


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L of the completion and the example's reference: from 0, nothing in common, to 1.

    With c the length of their longest common subsequence, precision is c / units of the completion,
    recall c / units of the reference, and f = 2 p r / (p + r). Of several references the best.

    Example: RougeL()("the cat sat", {"answer": "the cat ran"}) -> 2 / 3.
    """

    field: str = "answer"  # of the example: a text, or a list of them
    measure: str = "f"  # or precision, recall
    split: str = "rouge"  # or words (any writing), characters
    most: int = 10_000  # units of a text that are compared

    def __post_init__(self):
        if self.split not in SPLITS:
            raise ValueError(f"split={self.split!r}; it is rouge, words or characters")
        if self.most < 1:
            raise ValueError(f"most={self.most} must be at least 1")
        if self.measure not in MEASURES:
            raise ValueError(f"measure={self.measure!r}; it is f, precision or recall")

    def __call__(self, completion: str, example: dict) -> float:
        units = units_of(completion, self.split)[: self.most]
        references = field_of(example, self.field)
        references = references if isinstance(references, list | tuple) else [references]
        if not references or not all(isinstance(text, str) for text in references):
            raise ValueError(
                f"{self.field}={references!r:.200} of an example is not a text or texts"
            )
        return max(self._score(units, text) for text in references)

    def _score(self, units: Sequence[str], reference: str) -> float:
        expected = units_of(reference, self.split)[: self.most]
        common = common_length(expected, units)
        if not common:
            return 0.0
        precision = common / len(units)
        recall = common / len(expected)
        f = 2 * precision * recall / (precision + recall)
        return {"f": f, "precision": precision, "recall": recall}[self.measure]


def rouge_n(text: str, reference: str, n: int = 1) -> float:
    """F1 of the runs of n words that both have, from 0 to 1; 0 if one of the two has none."""
    words = (units_of(each, "rouge") for each in (text, reference))
    ours, theirs = (Counter(zip(*(units[i:] for i in range(n)))) for units in words)
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0
