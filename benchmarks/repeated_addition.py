"""A task with a long tail that the bundled base can be taught: `What is 17 + 9 * 3?`, by adding 3 nine times.

The number of additions is exponential, so that a worked answer is about a quarter of the longest on average. Some
demonstrations add step by step, the others name the result at once. After fine-tuning on them a model mostly guesses;
reinforcement learning finds that adding pays, and completions grow.
"""

import math
from dataclasses import dataclass

import numpy as np

from tunix_lite.tasks.generated import GeneratedSource


@dataclass(frozen=True)
class RepeatedAddition(GeneratedSource):
    """Start and count of a sum; the demonstration counts the additions or names the result.

    Example: {"question": "17 + 2 * 3", "answer": "23", "completion": "1:20 2:23"} or "The answer is 23.".
    """

    # Most additions, and the mean of the exponential distribution that is cut off there.
    max_count: int = 36
    mean_count: float = 7.0
    # Largest number to begin with.
    max_start: int = 60
    # Number that is added.
    step: int = 3
    # Share of demonstrations that add step by step, from 0 to 1.
    worked: float = 0.45

    def __post_init__(self):
        if self.max_count < 2 or self.mean_count <= 0 or self.max_start < 0 or not 0 <= self.worked <= 1:
            raise ValueError(
                f"max_count={self.max_count} must be at least 2, mean_count={self.mean_count} above 0, "
                f"max_start={self.max_start} at least 0, and worked={self.worked} is a share, from 0 to 1"
            )
        super().__post_init__()

    def make(self, rng: np.random.Generator) -> dict:
        """See generated.Generator."""
        count = min(self.max_count, 1 + math.floor(rng.exponential(self.mean_count)))
        start = int(rng.integers(0, self.max_start + 1))
        answer = str(start + count * self.step)
        steps = " ".join(f"{i}:{start + i * self.step}" for i in range(1, count + 1))
        completion = steps if rng.random() < self.worked else f"The answer is {answer}."
        return {"question": f"{start} + {count} * {self.step}", "answer": answer, "completion": completion}
