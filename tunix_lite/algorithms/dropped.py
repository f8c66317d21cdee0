"""Excludes dropped completions: the others are learned from as if those whose reward failed had
never been there. Also functions of advantages that look at the whole batch, and mini-batches."""

import inspect
from collections.abc import Callable

import numpy as np

from tunix_lite.algorithms.advantages import WholeBatch


def advantages_of_kept(
    advantages: Callable,
    rewards_PG: np.ndarray,
    kept_PG: np.ndarray,
    whole: Callable[[], WholeBatch],
) -> np.ndarray:
    """[P, G]; 0 for a dropped completion, and for one that is alone in its group and has nothing to
    be compared with.

    Whole groups are passed to `advantages` together, groups with a dropped completion one by one.
    One with a parameter `whole` gets everything at once, nan where dropped.
    """
    if takes_whole(advantages):
        is_compared_PG = kept_PG & (kept_PG.sum(axis=1, keepdims=True) >= 2)
        found_PG = advantages(np.where(is_compared_PG, rewards_PG, np.nan), whole=whole())
        return np.where(is_compared_PG, found_PG, 0.0)
    result_PG = np.zeros(rewards_PG.shape)
    is_whole_P = kept_PG.all(axis=1)
    if is_whole_P.any():
        result_PG[is_whole_P] = advantages(rewards_PG[is_whole_P])
    for p in np.flatnonzero(~is_whole_P & (kept_PG.sum(axis=1) >= 2)):
        result_PG[p, kept_PG[p]] = advantages(rewards_PG[p : p + 1, kept_PG[p]])[0]
    return result_PG


def weights_of_learned(
    weighting: Callable,
    completion_mask_BT: np.ndarray,
    learned_B: np.ndarray,
    prompt_B: np.ndarray,
    num_parts: int = 1,
) -> np.ndarray:
    """[B, T] float32; 0 for completions that are not learned from; `weighting` does not see them.

    prompt_B: the number of each completion's prompt, which a weighting with such a parameter gets.
    num_parts: the sequences are so many mini-batches, one after the other, and each has weights of
    its own.
    """
    weights_BT = np.zeros(completion_mask_BT.shape, np.float32)
    for rows in np.split(np.arange(len(learned_B)), num_parts):
        learned = rows[learned_B[rows]]
        if len(learned):
            known = {"prompt_B": prompt_B[learned]} if takes_prompts(weighting) else {}
            weights_BT[learned] = weighting(completion_mask_BT[learned], **known)
    return weights_BT


def takes_prompts(weighting: Callable) -> bool:
    """True if the function needs to know which completions are of one prompt."""
    return "prompt_B" in inspect.signature(weighting).parameters


def takes_whole(advantages: Callable) -> bool:
    """True if the function looks at the whole batch, as a WholeBatch."""
    return "whole" in inspect.signature(advantages).parameters


def groups_that_agree(rewards_PG: np.ndarray, kept_PG: np.ndarray) -> np.ndarray:
    """[P] bool: the rewards of the group are all equal, dropped completions apart."""
    least_P = np.where(kept_PG, rewards_PG, np.inf).min(axis=1)
    most_P = np.where(kept_PG, rewards_PG, -np.inf).max(axis=1)
    return least_P >= most_P
