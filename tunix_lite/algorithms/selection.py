"""Which completions are learned from, and what is added to rewards before they are compared."""

from typing import Any

import numpy as np

from tunix_lite.algorithms.groups import Groups


def selected(algorithm: Any, groups: Groups) -> Groups:
    """The groups with rewards as they are compared, and without what is not learned from, as the
    settings of algorithms.grpo.GRPO have it."""
    if algorithm.agreeing_groups == "drop":
        groups = groups.learning_from(~groups.agree[:, None])
    if algorithm.shaping is not None:
        groups = groups.with_reward("shaping", algorithm.shaping(groups.lengths))
    if algorithm.mask_truncated:
        finished_PG = np.asarray(groups.rollout.finished).reshape(groups.rewards_PG.shape)
        groups = groups.learning_from(finished_PG)
    return groups
