"""Lists of words, of which the last one is asked for: an instruction that can be checked."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.tasks.generated import GeneratedSource, example_of

# fmt: off
WORDS = [
    "apple", "river", "stone", "cloud", "table", "horse", "green", "window",
    "paper", "music", "garden", "silver", "winter", "castle", "bridge", "letter",
    "summer", "island", "mountain", "doctor", "flower", "butter", "orange", "yellow",
    "market", "engine", "forest", "planet", "rocket", "tiger", "violin", "coffee",
]
# fmt: on


@dataclass(frozen=True)
class LastWord(GeneratedSource):
    """Lists of different common words, with the last one as the answer.
    Example: {"question": "horse, cloud, letter, stone", "answer": "stone", ...}."""

    # Words in a list, from 2 to 32.
    num_words: int = 4

    def __post_init__(self):
        if not 2 <= self.num_words <= len(WORDS):
            raise ValueError(f"num_words={self.num_words} is not from 2 to {len(WORDS)}")
        super().__post_init__()

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one list."""
        chosen = [str(word) for word in rng.choice(WORDS, self.num_words, replace=False)]
        return example_of(", ".join(chosen), chosen[-1])
