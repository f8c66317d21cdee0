"""A guessing game: the model guesses a number, and hears whether the secret is higher or lower."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.environments.environment import Turn
from tunix_lite.environments.examples import DrawnSource


@dataclass(frozen=True)
class Secrets(DrawnSource):
    """Numbers to guess.
    Example: {"secret": 4, "low": 1, "high": 5, "question": "Guess 1 to 5."}."""

    # Smallest number that may be the secret.
    low: int = 1
    # Largest number that may be the secret.
    high: int = 5

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(f"low={self.low}, high={self.high}: low must be below high")
        super().__post_init__()

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one game."""
        secret = int(rng.integers(self.low, self.high + 1))
        question = f"Guess {self.low} to {self.high}."
        return {"secret": secret, "low": self.low, "high": self.high, "question": question}


@dataclass
class GuessingGame:
    """The last whole number of a completion is the guess. A right one gets 1 and ends the game, and
    so does the last guess.
    Example: GuessingGame(guesses=3) answers "higher" to 4 where the secret is 7."""

    # Guesses in a game.
    guesses: int = 3
    # Reward of each wrong guess that the answers before it allow, from 0 to 1.
    possible: float = 0.0

    def __post_init__(self):
        if not 0 <= self.possible <= 1:
            raise ValueError(f"possible={self.possible} must be from 0 to 1")
        if self.guesses < 1:
            raise ValueError(f"guesses={self.guesses} must be at least 1")

    def reset(self, example: dict) -> None:
        """Begins a game about the `secret` of an example, from `low` to `high`."""
        self.secret = example["secret"]
        self.low = self.least = example["low"]
        # from `least` to `most` the answers allow a number
        self.high = self.most = example["high"]
        self.left = self.guesses

    def step(self, completion: str) -> Turn:
        """Says whether the secret is higher or lower than the guess."""
        guess = _last_integer(completion)
        self.left -= 1
        if guess == self.secret:
            return Turn("right", 1.0, done=True, info={"won": True})
        answer = f"Say a number from {self.low} to {self.high}."
        reward = 0.0
        if guess is not None and self.low <= guess <= self.high:
            reward = self.possible if self.least <= guess <= self.most else 0.0
            # The numbers that a wrong guess rules out are no longer possible.
            if self.secret > guess:
                answer = "higher"
                self.least = max(self.least, guess + 1)
            else:
                answer = "lower"
                self.most = min(self.most, guess - 1)
        if self.left == 0:
            return Turn("over", reward, True, {"won": False})
        return Turn(answer, reward)


def is_secret(completion: str, example: dict) -> float:
    """1 if the completion guesses the secret, else 0."""
    return float(_last_integer(completion) == example["secret"])


def _last_integer(text: str) -> int | None:
    """The last whole number of up to nine digits in a text, perhaps before a full stop, or None."""
    number = None
    for word in text.split():
        digits = word.strip(".,:;!?()[]*'\"$\\")
        sign = digits.startswith("-")
        if digits[sign:].isdecimal() and digits.isascii() and len(digits) <= 10:
            number = int(digits)
    return number
