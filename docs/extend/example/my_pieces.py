"""Pieces of an objective: an advantage and a surrogate."""

import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.surrogates import Gain


def ranked(rewards_PG):
    """1 for the best completion of a group, -1 for the worst, ties in the middle of their ranks."""
    below_PG = (rewards_PG[:, :, None] > rewards_PG[:, None, :]).sum(axis=2)
    above_PG = (rewards_PG[:, :, None] < rewards_PG[:, None, :]).sum(axis=2)
    return np.float64(below_PG - above_PG) / (rewards_PG.shape[1] - 1)


def squashed(terms, width: float = 0.3):
    """A tanh of the log-ratio in place of a clip: rho A near rho = 1, flat far away."""
    return Gain((1 + width * jnp.tanh(terms.log_ratio / width)) * terms.advantages)
