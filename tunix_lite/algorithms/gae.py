"""Advantages from values: generalised advantage estimation (GAE, arXiv:1506.02438), on the host.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}
    return_t = A_t + V_t

t counts the tokens that the policy drew. What stands between them, such as the answer of a tool, is
no step: V and A are carried over it.
"""

import numpy as np


def gae(
    rewards_BT: np.ndarray,
    values_BT: np.ndarray,
    drawn_BT: np.ndarray,
    gamma: float,
    lam: float,
    after_B: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns [B, T], float64, 0 where nothing was drawn.

    values: V of the state before each token. drawn: which tokens the policy drew, and is rewarded
    for. after: V after the last of them; 0: nothing follows.
    Example: rewards [0, 0, 1], values [.5, .5, .5], gamma = lam = 1 -> advantages [.5, .5, .5] and
    returns [1, 1, 1]."""
    advantages_BT = np.zeros(drawn_BT.shape)
    advantage_B = np.zeros(len(drawn_BT))
    value_B = np.broadcast_to(np.float64(after_B), advantage_B.shape)
    for t in reversed(range(drawn_BT.shape[1])):
        drawn_B = drawn_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        advantage_B = np.where(drawn_B, delta_B + gamma * lam * advantage_B, advantage_B)
        value_B = np.where(drawn_B, values_BT[:, t], value_B)
        advantages_BT[:, t] = np.where(drawn_B, advantage_B, 0.0)
    return advantages_BT, np.where(drawn_BT, advantages_BT + values_BT, 0.0)


def whitened(advantages_BT: np.ndarray, counts_BT: np.ndarray) -> np.ndarray:
    """The advantages with mean 0 and variance 1 over all tokens that count, and 0 elsewhere: one
    mean and one (unbiased) variance for the whole global batch."""
    counted = advantages_BT[counts_BT]
    if counted.size < 2:
        return np.where(counts_BT, advantages_BT, 0.0)
    # as verl and TRL keep it finite
    scale = 1 / np.sqrt(counted.var(ddof=1) + 1e-8)
    return np.where(counts_BT, (advantages_BT - counted.mean()) * scale, 0.0)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """The share of the variance of returns that the values foresee: 1 - var(R - V) / var(R). 1 is
    perfect, 0 is no better than a constant, below 0 is worse; 0 where all returns are equal."""
    variance = returns.var()
    if variance > 0:
        return float(1 - (returns - values).var() / variance)
    return 0.0
