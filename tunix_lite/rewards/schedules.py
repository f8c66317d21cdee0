"""Weights of rewards that change over a run: functions of the number of the update, from 0.

They depend on nothing else, so a run that goes on has the weights that it would have had.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """Moves from `start` in the first update in a straight line to `end` after `steps` updates, and
    stays there.
    Example: Linear(1.0, 0.0, 100): 1 in update 0, 0.5 in update 50, 0 from update 100 on."""

    start: float
    end: float
    steps: int
    begin: int = 0  # the update in which it leaves `start`

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if self.begin < 0:
            raise ValueError(f"begin={self.begin} must not be negative")

    def __call__(self, step: int) -> float:
        share = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        return self.start + (self.end - self.start) * share
