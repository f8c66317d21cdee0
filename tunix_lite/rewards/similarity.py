"""Similarity of a completion to a reference text: ROUGE-L, in linear memory (Hyyro's algorithm)."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunix_lite.rewards.scores import field_of

SPLITS = ("rouge", "words")
# units of a text that are compared: its first ones
MOST = 10_000


def _units_of(text: str, split: str = "rouge") -> list[str]:
    """A text as the words that are compared. rouge: as rouge_score has it without stemming: runs of
    a-z and 0-9 of the text in lower case; other letters are no part of any. words: runs of letters
    and digits of any writing, without case."""
    if split == "rouge":
        return re.findall(r"[a-z0-9]+", text.lower())
    return re.findall(r"\w+", text.casefold())


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence of two sequences."""
    # the places at which each unit stands, as bits
    places: dict[str, list[int]] = {}
    for place, unit in enumerate(first):
        places.setdefault(unit, []).append(place)
    masks = {}
    for unit, places_of_unit in places.items():
        # In bytes: to set a bit of one large int copies all of it.
        bits = bytearray(len(first) // 8 + 1)
        for place in places_of_unit:
            bits[place // 8] |= 1 << place % 8
        masks[unit] = int.from_bytes(bits, "little")
    every = (1 << len(first)) - 1
    left = every
    for unit in second:
        taken = left & masks.get(unit, 0)
        # The sum may carry beyond the last bit.
        left = ((left + taken) | (left - taken)) & every
    return len(first) - left.bit_count()


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L of the completion and the example's reference, as F1, from 0 to 1. With c the length
    of their longest common subsequence, it is 2 c / (units of the completion + units of the
    reference). Of several references the best.
    Example: RougeL()("the cat sat", {"answer": "the cat ran"}) -> 2 / 3."""

    # Field of the example: a text, or a list of them.
    field: str = "answer"
    # Units of a text: rouge (runs of latin letters and digits), or words (any writing).
    split: str = "rouge"

    def __post_init__(self):
        if self.split not in SPLITS:
            raise ValueError(f"split={self.split!r}; it is {' or '.join(SPLITS)}")

    def __call__(self, completion: str, example: dict) -> float:
        references = field_of(example, self.field)
        if not isinstance(references, list | tuple):
            references = [references]
        if not references or not all(isinstance(text, str) for text in references):
            raise ValueError(
                f"{self.field}={references!r:.200} of an example is not a text or texts"
            )
        ours = _units_of(completion, self.split)[:MOST]
        best = 0.0
        for text in references:
            # the time grows with the product of both lengths
            theirs = _units_of(text, self.split)[:MOST]
            if common := common_length(ours, theirs):
                best = max(best, 2 * common / (len(ours) + len(theirs)))
        return best


def _rouge_n(text: str, reference: str, n: int) -> float:
    """F1 of the runs of n words that both have, from 0 to 1; 0 if one of the two has none."""
    counts = []
    for each in (text, reference):
        words = _units_of(each)
        # each run of n words
        runs = zip(*(words[i:] for i in range(n)))
        counts.append(Counter(runs))
    ours, theirs = counts
    common = (ours & theirs).total()
    if not common:
        return 0.0
    return 2 * common / (ours.total() + theirs.total())


def similarity_scores(
    texts: Sequence[str], references: Sequence[str]
) -> dict[str, np.ndarray]:
    """Returns rouge_1, rouge_2 and rouge_l (Lin 2004) of each text, F1 from 0 to 1, as
    `rouge_score` with use_stemmer=False has them; and exact_match, 1 where the two are the same but
    for white space around them: [E] float64."""
    pairs = list(zip(texts, references))
    return {
        "exact_match": np.array(
            [float(text.strip() == other.strip()) for text, other in pairs]
        ),
        "rouge_1": np.array([_rouge_n(text, other, 1) for text, other in pairs]),
        "rouge_2": np.array([_rouge_n(text, other, 2) for text, other in pairs]),
        "rouge_l": np.array([RougeL()(text, {"answer": other}) for text, other in pairs]),
    }
