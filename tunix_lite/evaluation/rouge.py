"""ROUGE of completions and references (Lin 2004): the numbers of `rouge_score` with
use_stemmer=False."""

from collections.abc import Sequence

import numpy as np

from tunix_lite.rewards.similarity import RougeL, rouge_n


def rouge_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns rouge_1, rouge_2 and rouge_l of each text, F1 from 0 to 1: [E] float64."""
    pairs = list(zip(texts, references))
    return {
        "rouge_1": np.array([rouge_n(text, other, 1) for text, other in pairs]),
        "rouge_2": np.array([rouge_n(text, other, 2) for text, other in pairs]),
        "rouge_l": np.array([RougeL()(text, {"answer": other}) for text, other in pairs]),
    }
