"""Rewards [P, G] of the G completions of each prompt -> advantages [P, G]. Float64 on the host,
once per step.

A function that has a parameter `whole` sees the whole batch at once, rewards of dropped completions
as nan, and gets a WholeBatch there. One that has none gets groups without their dropped
completions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tunix_lite.algorithms.pieces import takes

# rewards [P, G] -> advantages [P, G]
Advantages = Callable[..., np.ndarray]


@dataclass(frozen=True)
class WholeBatch:
    """Facts about P groups of G completions beside the sum of their rewards. Example: lengths [[3,
    5]], each {"correct": [[1, 0]]}, weights {"correct": 1.0}."""

    lengths: np.ndarray  # [P, G] tokens of each completion
    # each reward by name, [P, G], without its weight; nan where it failed
    each: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)  # weight of each reward, by name

    def advantages(self, function: Advantages, rewards_PG: np.ndarray) -> np.ndarray:
        """[P, G]: those of a function that sees the whole batch; it has to know who is missing, so
        it gets nan in their places."""
        kept_PG = ~np.isnan(rewards_PG)
        kept_PG &= kept_PG.sum(axis=1, keepdims=True) > 1
        values_PG = function(np.where(kept_PG, rewards_PG, np.nan), whole=self)
        return np.where(kept_PG, values_PG, 0.0)


# makes it for a function that asks for it; None: none does
Whole = Callable[[], WholeBatch] | None


def standardise(rewards_PG: np.ndarray, eps: float = 1e-4) -> np.ndarray:
    """(r - mean) / (std + eps) within the group, std with G - 1 in the denominator and exactly 0
    where all agree (GRPO, arXiv:2402.03300)."""
    centred_PG = centre(rewards_PG)
    # G - 1, as torch.std has it: the rewards are a sample of what the prompt may earn
    std_P1 = np.sqrt((centred_PG**2).sum(axis=1, keepdims=True) / (centred_PG.shape[1] - 1))
    return centred_PG / (std_P1 + eps)


def centre(rewards_PG: np.ndarray) -> np.ndarray:
    """r - mean of the group (Dr. GRPO, arXiv:2503.20783)."""
    rewards_PG = np.asarray(rewards_PG, np.float64)
    centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    # a mean of equal numbers can be off by a rounding
    return np.where(np.ptp(rewards_PG, axis=1, keepdims=True) > 0, centred_PG, 0.0)


def leave_one_out(rewards_PG: np.ndarray) -> np.ndarray:
    """r - mean of the others in the group (RLOO, arXiv:2402.14740), which is G / (G - 1) times
    `centre`."""
    centred_PG = centre(rewards_PG)
    return centred_PG * (centred_PG.shape[1] / (centred_PG.shape[1] - 1))


def leave_one_out_std(rewards_PG: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """(r - mean of the others) / (std of the others + eps), undivided where that std is 0: for the
    one that differs from equal others (NeMo-RL's GRPO)."""
    gaps_PG = leave_one_out(rewards_PG)
    spreads_PG = np.zeros_like(gaps_PG)
    for g in range(gaps_PG.shape[1]):
        others = centre(np.delete(np.asarray(rewards_PG, np.float64), g, axis=1))
        spreads_PG[:, g] = np.sqrt((others**2).sum(axis=1) / max(others.shape[1] - 1, 1))
    return gaps_PG / np.where(spreads_PG > 0, spreads_PG + eps, 1.0)


def max_likelihood(rewards_PG: np.ndarray, eps: float = 0.0) -> np.ndarray:
    """(r - mean) / (mean of the group + eps), 0 where the mean is 0 (MaxRL, arXiv:2602.02710).

    For rewards of 0 and 1 only, where the mean is a success rate. Raises ValueError for others."""
    rewards_PG = np.asarray(rewards_PG, np.float64)
    others = rewards_PG[(rewards_PG != 0) & (rewards_PG != 1)]
    # A mean of other numbers is no success rate, and could be negative.
    if others.size:
        raise ValueError(
            "advantages=max_likelihood divides by the success rate of a group, so rewards must be "
            f"0 or 1; one is {others[0]:g}: leave the other rewards out, or take another advantage"
        )
    mean_P1 = rewards_PG.mean(axis=1, keepdims=True)
    nothing = np.zeros_like(rewards_PG)
    return np.divide(centre(rewards_PG), mean_P1 + eps, out=nothing, where=mean_P1 > 0)


# ---- with statistics of the whole batch


def batch_scaled(
    rewards_PG: np.ndarray,
    whole: WholeBatch | None = None,
    eps: float = 1e-4,
    mean: str = "group",
) -> np.ndarray:
    """(r - mean of the group) / (std of all rewards of the batch + eps), so that easy and hard
    prompts are scaled alike (`scale_rewards=batch` of TRL, arXiv:2508.08221).

    mean: batch: r is less the mean of the batch (AReaL's GRPO); an easy prompt then has advantages
    for being easy."""
    if mean not in ("group", "batch"):
        raise ValueError(f"advantages.mean={mean!r}; it is group or batch")
    mean_of_all, std = _mean_and_std(rewards_PG)
    if mean == "group":
        return advantages_of_kept(centre, rewards_PG) / (std + eps)
    return np.nan_to_num(rewards_PG - mean_of_all) / (std + eps)


def whiten(
    rewards_PG: np.ndarray,
    whole: WholeBatch | None = None,
    over: str = "tokens",
    group_baseline: bool = True,
    eps: float = 1e-8,
) -> np.ndarray:
    """(a - mean) / sqrt(variance + eps) over the batch, a = r - mean of the group (REINFORCE++ with
    a baseline, arXiv:2501.03262).

    over: tokens: a completion counts in both as often as it has tokens (verl); samples: once.
    group_baseline: False: a = r. The variance has one less than the count in its denominator."""
    if over not in ("tokens", "samples"):
        raise ValueError(f"advantages.over={over!r}; it is tokens or samples")
    is_kept_PG = ~np.isnan(rewards_PG)
    # The baseline comes first: the mean over the batch would not tell easy prompts from hard ones.
    values_PG = advantages_of_kept(centre, rewards_PG) if group_baseline else rewards_PG
    values = values_PG[is_kept_PG]
    counts = np.ones(len(values)) if over == "samples" else whole.lengths[is_kept_PG]
    total = counts.sum()
    # nothing to learn, and the variance would be 0 / 0
    if total < 2 or values.min() == values.max():
        return np.zeros(rewards_PG.shape)
    mean = (counts * values).sum() / total
    variance = (counts * (values - mean) ** 2).sum() / (total - 1)
    return np.where(is_kept_PG, (values_PG - mean) / np.sqrt(variance + eps), 0.0)


def per_reward(
    rewards_PG: np.ndarray, whole: WholeBatch | None = None, eps: float = 1e-4
) -> np.ndarray:
    """Each reward is standardised in its group by itself; then their weighted sum is standardised
    over the batch (GDPO, arXiv:2601.05242)."""
    is_kept_PG = ~np.isnan(rewards_PG)
    total_PG = np.where(is_kept_PG, 0.0, np.nan)
    for name, values_PG in whole.each.items():
        # one that failed, and is not dropped for it, counts as 0
        values_PG = np.where(is_kept_PG, np.nan_to_num(values_PG), np.nan)
        scaled_PG = advantages_of_kept(partial(standardise, eps=eps), values_PG)
        total_PG += whole.weights.get(name, 1.0) * scaled_PG
    mean, std = _mean_and_std(total_PG)
    return np.nan_to_num(total_PG - mean) / (std + eps)


def _mean_and_std(values_PG: np.ndarray) -> tuple[float, float]:
    """Of all values that are not nan; of equal ones exactly their value and 0."""
    values = values_PG[~np.isnan(values_PG)]
    if not len(values) or values.min() == values.max():
        return (values[0] if len(values) else 0.0), 0.0
    return values.mean(), values.std(ddof=1)


# ---- without dropped completions: others are learned from as if these had never been there


def advantages_of_kept(
    advantages: Advantages, rewards_PG: np.ndarray, whole: Whole = None
) -> np.ndarray:
    """[P, G]; 0 for a dropped completion, whose reward is nan, and for one that is alone in its
    group.

    `advantages` gets groups that lack the same completions together, and without them; if it has a
    parameter `whole`, everything at once, nan where dropped."""
    if takes(advantages, "whole"):
        return whole().advantages(advantages, rewards_PG)
    result_PG = np.zeros_like(rewards_PG)
    kept_PG = ~np.isnan(rewards_PG)
    for kept_G in np.unique(kept_PG, axis=0):
        if kept_G.sum() > 1:
            here = np.ix_((kept_PG == kept_G).all(axis=1), kept_G)
            result_PG[here] = advantages(rewards_PG[here])
    return result_PG


def groups_that_agree(rewards_PG: np.ndarray) -> np.ndarray:
    """[P] bool: the rewards of the group are all equal, dropped ones (nan) apart."""
    return ~(np.fmin.reduce(rewards_PG, axis=1) < np.fmax.reduce(rewards_PG, axis=1))
