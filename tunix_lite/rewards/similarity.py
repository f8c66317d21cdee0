"""Similarity of a completion to a reference text: ROUGE-L and edit distance.

Both keep one number of as many bits as a text has units (Hyyro's and Myers' algorithms), so their
memory is linear. Of longer texts the first `most` units are compared.
"""

import re
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
    masks = _masks(first)
    every = (1 << len(first)) - 1
    left = every
    for unit in second:
        taken = left & masks.get(unit, 0)
        left = ((left + taken) | (left - taken)) & every
    return len(first) - left.bit_count()


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Counts the insertions, deletions and replacements that make one sequence the other
    (Levenshtein)."""
    if not first:
        return len(second)
    masks = _masks(first)
    every = (1 << len(first)) - 1
    last = 1 << (len(first) - 1)
    # bits of the places where a column of the table rises by one, and where it falls
    up = every
    down = 0
    distance = len(first)
    for unit in second:
        equal = masks.get(unit, 0)
        diagonal = (((equal & up) + up) ^ up) | equal | down
        right_up = down | ~(diagonal | up) & every
        right_down = diagonal & up
        distance += bool(right_up & last) - bool(right_down & last)
        right_up = (right_up << 1 | 1) & every
        right_down = (right_down << 1) & every
        up = right_down | ~(diagonal | right_up) & every
        down = diagonal & right_up
    return distance


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
        _check(self)
        if self.measure not in MEASURES:
            raise ValueError(f"measure={self.measure!r}; it is f, precision or recall")

    def __call__(self, completion: str, example: dict) -> float:
        units = units_of(completion, self.split)[: self.most]
        return max(self._score(units, text) for text in _references(example, self.field))

    def _score(self, units: Sequence[str], reference: str) -> float:
        expected = units_of(reference, self.split)[: self.most]
        common = common_length(expected, units)
        if not common:
            return 0.0
        precision = common / len(units)
        recall = common / len(expected)
        f = 2 * precision * recall / (precision + recall)
        return {"f": f, "precision": precision, "recall": recall}[self.measure]


@dataclass(frozen=True)
class EditSimilarity:
    """1 - edit distance / the longer of the two lengths: 1 for the example's reference itself, 0 if
    nothing of it is kept. Of several references the best.

    Example: EditSimilarity()("abcd", {"answer": "abce"}) -> 0.75.
    """

    field: str = "answer"  # of the example: a text, or a list of them
    split: str = "characters"  # or words, rouge
    most: int = 10_000  # units of a text that are compared
    strip: bool = True  # without space around the two

    def __post_init__(self):
        _check(self)

    def __call__(self, completion: str, example: dict) -> float:
        return max(self._score(completion, text) for text in _references(example, self.field))

    def _score(self, completion: str, reference: str) -> float:
        texts = (completion, reference)
        if self.strip:
            texts = tuple(text.strip() for text in texts)
        units, expected = (units_of(text, self.split)[: self.most] for text in texts)
        longest = max(len(units), len(expected))
        return 1.0 if not longest else 1 - edit_distance(units, expected) / longest


def _masks(units: Sequence[str]) -> dict[str, int]:
    """Returns the places at which each unit stands, as bits."""
    places: dict[str, list[int]] = {}
    for place, unit in enumerate(units):
        places.setdefault(unit, []).append(place)
    masks = {}
    for unit, places_of_unit in places.items():
        bits = bytearray(len(units) // 8 + 1)
        for place in places_of_unit:
            bits[place // 8] |= 1 << place % 8
        masks[unit] = int.from_bytes(bits, "little")
    return masks


def _references(example: dict, field: str) -> list[str]:
    references = field_of(example, field)
    references = references if isinstance(references, list | tuple) else [references]
    if not references or not all(isinstance(text, str) for text in references):
        raise ValueError(f"{field}={references!r:.200} of an example is not a text or texts")
    return list(references)


def _check(settings: "RougeL | EditSimilarity") -> None:
    if settings.split not in SPLITS:
        raise ValueError(f"split={settings.split!r}; it is rouge, words or characters")
    if settings.most < 1:
        raise ValueError(f"most={settings.most} must be at least 1")
