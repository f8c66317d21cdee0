"""A number of one's own for every step: a function of the step that has just been made."""

import numpy as np

from tunix_lite.api import StepDone


def longest(done: StepDone) -> dict[str, float]:
    """Tokens of the longest completion of the step, and of the longest that was rewarded most."""
    counted = np.asarray(done.experience.batch.loss_weight) != 0
    lengths = counted.sum(axis=1)
    best = done.experience.graded.rewards == done.experience.graded.rewards.max()
    return {"lengths/longest": lengths.max(), "lengths/longest_of_best": lengths[best].max()}
