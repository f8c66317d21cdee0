"""Dropped completions: learning from the others as if those whose reward failed had never been
there."""

from collections.abc import Callable

import numpy as np


def advantages_of_kept(
    advantages: Callable, rewards_PG: np.ndarray, kept_PG: np.ndarray
) -> np.ndarray:
    """[P, G]; 0 for a dropped completion, and for one that is alone in its group: it has nothing to
    be compared with.

    Whole groups are passed to `advantages` together, groups with a dropped completion one by one.
    """
    result_PG = np.zeros(rewards_PG.shape)
    is_whole_P = kept_PG.all(axis=1)
    if is_whole_P.any():
        result_PG[is_whole_P] = advantages(rewards_PG[is_whole_P])
    for p in np.flatnonzero(~is_whole_P & (kept_PG.sum(axis=1) >= 2)):
        result_PG[p, kept_PG[p]] = advantages(rewards_PG[p : p + 1, kept_PG[p]])[0]
    return result_PG


def weights_of_kept(
    weighting: Callable, completion_mask_BT: np.ndarray, kept_B: np.ndarray
) -> np.ndarray:
    """[B, T] float32; 0 for dropped completions, which `weighting` does not see."""
    weights_BT = np.zeros(completion_mask_BT.shape, np.float32)
    if kept_B.any():
        weights_BT[kept_B] = weighting(completion_mask_BT[kept_B])
    return weights_BT


def groups_that_agree(rewards_PG: np.ndarray, kept_PG: np.ndarray) -> np.ndarray:
    """[P] bool: the rewards of the group are all equal, dropped completions apart."""
    least_P = np.where(kept_PG, rewards_PG, np.inf).min(axis=1)
    most_P = np.where(kept_PG, rewards_PG, -np.inf).max(axis=1)
    return least_P >= most_P
