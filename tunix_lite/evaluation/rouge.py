"""ROUGE: the share of a reference text in another (Lin 2004), as F1 of words.

Words are runs of letters and digits, in lower case, without stemming: the numbers of `rouge_score`
with use_stemmer=False.
"""

from collections import Counter
from collections.abc import Sequence

from tunix_lite.rewards.similarity import f1, units_of


def rouge_n(text: str, reference: str, n: int = 1) -> float:
    """F1 of the runs of n words that both have, from 0 to 1; 0 if one of the two has none."""
    ours = _runs(units_of(text), n)
    theirs = _runs(units_of(reference), n)
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, from 0 to 1; 0 if one of the two has none."""
    return f1(units_of(text), units_of(reference))


def _runs(words: Sequence[str], n: int) -> Counter:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
