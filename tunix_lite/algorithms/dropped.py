"""Learning from the completions that were kept, as if those whose reward failed had never been
there."""

from collections.abc import Callable

import numpy as np


def advantages_of_kept(advantages: Callable, rewards_PG, kept_PG) -> np.ndarray:
    """[P, G]; 0 for what was not kept, and for what is alone in its group: it has nothing to be
    compared with.

    Whole groups are handed over together, those that are short one by one.
    """
    result_PG, whole_P = np.zeros(rewards_PG.shape), kept_PG.all(axis=1)
    if whole_P.any():
        result_PG[whole_P] = advantages(rewards_PG[whole_P])
    for p in np.flatnonzero(~whole_P & (kept_PG.sum(axis=1) >= 2)):
        result_PG[p, kept_PG[p]] = advantages(rewards_PG[p : p + 1, kept_PG[p]])[0]
    return result_PG


def weights_of_kept(weighting: Callable, completion_mask_BT, kept_B) -> np.ndarray:
    """[B, T] float32; 0 for what was not kept."""
    weights_BT = np.zeros(completion_mask_BT.shape, np.float32)
    if kept_B.any():
        weights_BT[kept_B] = weighting(completion_mask_BT[kept_B])
    return weights_BT


def agreeing(rewards_PG, kept_PG) -> np.ndarray:
    """[P] bool: the rewards of the group that were kept are all equal."""
    least_P = np.where(kept_PG, rewards_PG, np.inf).min(axis=1)
    return least_P >= np.where(kept_PG, rewards_PG, -np.inf).max(axis=1)
