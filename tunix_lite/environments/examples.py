"""Examples that are drawn, not stored: a function of the number of the example alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class _Split(Sequence):
    """The training stream or the held-out set of a DrawnSource: Split(Secrets(), True, 64)[0]."""

    source: Any  # a DrawnSource
    held_out: bool
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self.count:
            raise IndexError(index)
        rng = np.random.default_rng((int(self.held_out), int(index)))
        return self.source.draw(rng, self.held_out)


@dataclass(frozen=True, kw_only=True)
class DrawnSource:
    """A source of examples that `make(rng) -> dict` draws: a frozen dataclass with its settings, on
    which, and on rng, alone an example depends. Held-out examples are other draws, not other games.
    Example: Secrets(num_held_out=16).held_out[0]["question"]."""

    # Examples in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out examples, for evaluation.
    num_held_out: int = 64

    def __post_init__(self):
        if min(self.num_train, self.num_held_out) < 1:
            raise ValueError(
                f"num_train={self.num_train}, num_held_out={self.num_held_out}: both must be at "
                "least 1"
            )

    @property
    def train(self) -> _Split:
        """The training stream."""
        return _Split(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> _Split:
        """The held-out set."""
        return _Split(self, held_out=True, count=self.num_held_out)

    def draw(self, rng: np.random.Generator, held_out: bool) -> dict:
        """One example of a split."""
        return self.make(rng)
