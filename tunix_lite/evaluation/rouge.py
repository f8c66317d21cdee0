"""ROUGE: how much of a reference text stands in another (Lin 2004), as F1 of words.

Words are runs of letters and digits, in lower case, without stemming: the numbers of `rouge_score`
with use_stemmer=False.
"""

import re
from collections import Counter

WORD = re.compile(r"[a-z0-9]+")


def words_of(text: str) -> list[str]:
    """`The cat's 2 hats` -> [the, cat, s, 2, hats]."""
    return WORD.findall(text.lower())


def rouge_n(text: str, reference: str, n: int = 1) -> float:
    """F1 of the runs of n words that both have, from 0 to 1; 0 if one of the two has none."""
    ours = _runs(words_of(text), n)
    theirs = _runs(words_of(reference), n)
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, from 0 to 1; 0 if one of the two has none."""
    ours = words_of(text)
    theirs = words_of(reference)
    return _f1(_longest_common(ours, theirs), len(ours), len(theirs))


def _runs(words: list[str], n: int) -> Counter:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _longest_common(ours: list[str], theirs: list[str]) -> int:
    # row[j]: the longest common subsequence of the words so far and the first j of theirs
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for j, other in enumerate(theirs, 1):
            above = row[j]
            row[j] = before + 1 if word == other else max(above, row[j - 1])
            before = above
    return row[-1]


def _f1(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0
