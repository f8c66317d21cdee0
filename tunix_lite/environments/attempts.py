"""Several attempts at a problem: after a wrong answer the model reads that it is wrong."""

from collections.abc import Callable
from dataclasses import dataclass

from tunix_lite.environments.environment import Turn


@dataclass
class Attempts:
    """Asks again until `score` gives a completion `full`, or until no attempt is left.

    The reward is the score of the last completion, times `later` for each attempt before it.

    Example: Attempts(score, attempts=3, later=0.5) gives 0.5 where the second answer is right.
    """

    # Function (completion, example) -> number: how right a completion is.
    score: Callable
    # Completions that the model has for a problem.
    attempts: int = 3
    # Score of a right answer. It ends the conversation.
    full: float = 1.0
    # Factor of the reward for each attempt before the last one, from 0 to 1. 1 does not mind them.
    later: float = 1.0
    # What the model reads after a wrong answer. {score} is its score, {left} the attempts left.
    feedback: str = "That is not right. Try again."

    def __post_init__(self):
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} must be at least 1")
        if not 0 <= self.later <= 1:
            raise ValueError(f"later={self.later} must be from 0 to 1")

    def reset(self, example: dict) -> None:
        """Begins with the task's own prompt."""
        self.example = example
        self.made = 0

    def step(self, completion: str) -> Turn:
        """Scores an answer, and asks for another one if it is wrong."""
        score = float(self.score(completion, self.example))
        self.made += 1
        is_right = score >= self.full
        if not is_right and self.made < self.attempts:
            left = self.attempts - self.made
            return Turn(self.feedback.format(score=score, left=left))
        info = {"won": is_right, "attempts": self.made}
        return Turn("", score * self.later ** (self.made - 1), done=True, info=info)
