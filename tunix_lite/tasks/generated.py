"""Problems that are made and not stored, with answers that can be verified."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.environments.examples import DrawnSource
from tunix_lite.rewards.answers import marked_answers

# draws for one example until its settings are found to leave too few different problems
MOST_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class GeneratedSource(DrawnSource):
    """A source of problems, no question of which is both trained on and held out. `make` gives them
    a `question`, an `answer` and a `completion`, a demonstration.
    Example: Countdown(num_held_out=16).held_out[0]["question"]."""

    # Held-out problems, for evaluation.
    num_held_out: int = 256

    def draw(self, rng: np.random.Generator, held_out: bool) -> dict:
        """One problem of a split."""
        for _ in range(MOST_DRAWS):
            example = self.make(rng)
            if is_held_out(example["question"]) == held_out:
                return example
        raise ValueError(
            f"{self} has too few different problems: none of {MOST_DRAWS:,} drawn is "
            f"{'held out' if held_out else 'to train on'}"
        )


def is_held_out(question: str) -> bool:
    """One problem in eight, chosen by its text alone (FNV-1a, the same on every machine)."""
    value = 2166136261
    for byte in question.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return (value >> 16) % 8 == 0


def check_range(source: GeneratedSource, low: str, high: str) -> None:
    """Raises ValueError unless 2 <= low <= high, two settings by their names."""
    if not 2 <= getattr(source, low) <= getattr(source, high):
        raise ValueError(
            f"{low}={getattr(source, low)}, {high}={getattr(source, high)}: need 2 <= {low} "
            f"<= {high}"
        )


def example_of(question: str, answer: str, **more: object) -> dict:
    """An example with the usual demonstration. more: further fields for its checker."""
    completion = f"The answer is {answer}."
    return {"question": question, "answer": answer, "completion": completion, **more}


def answer_text(completion: str) -> str:
    """The answer in a completion: what it marks as such (\\boxed{}, <answer>, ####, `The answer
    is`), or else its last line that is not empty."""
    if marks := marked_answers(completion):
        return marks[-1].text.strip()
    lines = [line.strip() for line in completion.splitlines() if line.strip()]
    return lines[-1] if lines else ""
