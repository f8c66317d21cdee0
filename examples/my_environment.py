"""An environment of your own: the model says what a sum is, and hears if that is too low.

    python run_training.py task.environment=examples.my_environment.HotAndCold

An example of the task has an `answer`. The rewards of the task see the last completion alone.
"""

import re

from tunix_lite.environments.environment import Turn


class HotAndCold:
    """One conversation: `reset` gets the example, `step` each completion of the model."""

    def reset(self, example: dict) -> None:
        """None keeps the prompt of the task; a text would be the prompt instead."""
        self.answer = int(example["answer"])

    def step(self, completion: str) -> Turn:
        """A turn: what the model reads next, a reward, and whether the conversation is over."""
        numbers = re.findall(r"-?\d+", completion)
        if not numbers:
            return Turn("Say a number.", reward=-0.1)
        said = int(numbers[-1])
        if said == self.answer:
            return Turn("right", done=True, info={"won": True})
        return Turn("higher" if said < self.answer else "lower")
