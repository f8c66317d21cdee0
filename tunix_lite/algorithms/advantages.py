"""Rewards [P, G] of the G completions of each prompt -> advantages [P, G]. Float64 on the host,
once per step."""

import numpy as np


def standardise(rewards_PG: np.ndarray, eps: float = 1e-4) -> np.ndarray:
    """(r - mean) / (std + eps) within the group, std with G - 1 in the denominator (GRPO,
    arXiv:2402.03300).

    The std comes from the centred rewards (two passes). A group of equal rewards has advantage
    exactly 0.
    """
    centred_PG = centre(rewards_PG)
    std_P1 = np.sqrt((centred_PG**2).sum(axis=1, keepdims=True) / (centred_PG.shape[1] - 1))
    return centred_PG / (std_P1 + eps)


def centre(rewards_PG: np.ndarray) -> np.ndarray:
    """r - mean of the group (Dr. GRPO, arXiv:2503.20783)."""
    rewards_PG = np.asarray(rewards_PG, np.float64)
    centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    agree_P1 = rewards_PG.min(axis=1, keepdims=True) == rewards_PG.max(axis=1, keepdims=True)
    # a mean of equal numbers can be off by a rounding
    return np.where(agree_P1, 0.0, centred_PG)


def leave_one_out(rewards_PG: np.ndarray) -> np.ndarray:
    """r - mean of the others in the group (RLOO, arXiv:2402.14740), which is G / (G - 1) times
    `centre`."""
    centred_PG = centre(rewards_PG)
    return centred_PG * (centred_PG.shape[1] / (centred_PG.shape[1] - 1))
