"""Examples of games: drawn, not stored. A game has few different ones, so the held-out examples are
other draws, not other games."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Game(Protocol):
    """A kind of game."""

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one example. It depends on nothing but the settings and the draws from rng."""


@dataclass(frozen=True)
class Draws(Sequence):
    """The training stream or the held-out set of a game.

    Example: Draws(Secrets(), held_out=True, count=64)[0]["secret"] is the same on every machine.
    """

    game: Game
    held_out: bool
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.game.make(np.random.default_rng((int(self.held_out), int(index))))


def check_num_examples(num_train: int, num_held_out: int) -> None:
    """Raises ValueError for a source that would draw no examples."""
    if min(num_train, num_held_out) < 1:
        raise ValueError(
            f"num_train={num_train}, num_held_out={num_held_out}: both must be at least 1"
        )


def last_integer(text: str) -> int | None:
    """The last whole number in a text of up to nine digits, which a sentence may end with; None:
    there is none."""
    number = None
    for word in text.split():
        digits = word.strip(".,:;!?()[]*'\"$\\")
        sign = digits.startswith("-")
        if digits[sign:].isdecimal() and digits.isascii() and len(digits) <= 10:
            number = int(digits)
    return number


def left_to_environment(completion: str, example: dict) -> float:
    """Gives 0 to every completion: only the environment can say what is right."""
    return 0.0
