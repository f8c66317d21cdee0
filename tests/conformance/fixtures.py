"""Small batches that bring out where definitions differ, or where a careless one breaks."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Fixture:
    """P groups of G completions. Log-probabilities are [B, T] float64 of the sampled tokens; row
    p * G + g is completion g of prompt p. They are nan where there is no token.

    Example: FIXTURES["binary"].rewards[0] is [1, 0, 0, 1].
    """

    name: str
    about: str
    rewards: np.ndarray  # [P, G]; nan: the reward failed, and the completion is left out
    mask: np.ndarray  # [B, T] bool, True on the tokens of a completion
    logprobs: np.ndarray  # of the policy that learns
    old_logprobs: np.ndarray  # of the same policy when it sampled, by the trainer
    sampler_logprobs: np.ndarray  # the same by the sampler
    ref_logprobs: np.ndarray  # of the reference, or of a teacher
    components: np.ndarray  # [2, P, G], two rewards whose sum is `rewards`
    max_length: int  # the most tokens a completion may have

    @cached_property
    def counted(self) -> np.ndarray:
        """[B, T] bool: the tokens of completions that were not dropped."""
        return self.mask & ~np.isnan(self.rewards).reshape(-1, 1)

    @property
    def is_binary(self) -> bool:
        """Whether all rewards are 0 or 1."""
        kept = self.rewards[~np.isnan(self.rewards)]
        return bool(np.isin(kept, (0.0, 1.0)).all())

    def array(self, name: str) -> np.ndarray:
        """Log-probabilities by field, 0 where no token counts."""
        return np.where(self.counted, getattr(self, name), 0.0)


def _fixture(
    name: str, about: str, rewards: list, lengths: np.ndarray, width: int, seed: int, far: float = 0.0
) -> Fixture:
    """far: a log-ratio, of either sign, that some tokens have between two of the policies."""
    # Rewards and masks are given, the rest is drawn.
    rng = np.random.default_rng(seed)
    rewards = np.array(rewards, np.float64)
    mask = np.arange(width) < lengths.reshape(-1, 1)

    def near(of: np.ndarray, spread: float) -> np.ndarray:
        return of + rng.normal(0, spread, mask.shape)

    # of a token at most one of the three is far from the policy before it
    moved = rng.integers(0, 6, mask.shape)
    sign = rng.choice([-1.0, 1.0], mask.shape)
    sampler = -rng.gamma(2.0, 0.6, mask.shape) - 2 * far
    old = near(sampler, 0.02) + np.where(moved == 0, sign * far, 0)
    logprobs = near(old, 0.35) + np.where(moved == 1, sign * far, 0)
    ref = near(logprobs, 0.3) + np.where(moved == 2, sign * far, 0)
    # What stands off the tokens must never matter.
    arrays = (np.where(mask, x, np.nan) for x in (logprobs, old, sampler, ref))
    # Two rewards that add up to the one.
    share = rng.uniform(0, 1, rewards.shape)
    components = np.stack([rewards * share, rewards * (1 - share)])
    return Fixture(name, about, rewards, mask, *arrays, components, max_length=width + 3)


def _lengths(count: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, width + 1, count)


NAN = np.nan
FIXTURES = {
    fixture.name: fixture
    for fixture in (
        _fixture(
            "plain",
            "real-valued rewards, ratios within a factor of three",
            [[0.7, 0.1, 0.55, 0.9], [1.3, 0.2, 0.8, 0.45], [0.05, 0.6, 0.3, 0.35]],
            _lengths(12, 8, 1),
            8,
            seed=1,
        ),
        _fixture(
            "binary",
            "rewards of 0 and 1; one group all right, one all wrong",
            [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]],
            _lengths(16, 6, 2),
            6,
            seed=2,
        ),
        _fixture(
            "agreeing",
            "every group agrees, some on numbers that have no exact mean",
            [[0.1, 0.1, 0.1], [1, 1, 1], [0.7, 0.7, 0.7]],
            _lengths(9, 6, 3),
            6,
            seed=3,
        ),
        _fixture(
            "nearly_agreeing",
            "one completion against equal others: a variance in one pass loses it",
            [[0, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95], [0.1] + [0.7] * 7],
            _lengths(16, 5, 4),
            5,
            seed=4,
        ),
        _fixture(
            "empty",
            "completions without tokens, one whole group of them",
            [[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1]],
            np.array([3, 0, 5, 2, 0, 0, 0, 0, 6, 1, 4, 0]),
            6,
            seed=5,
        ),
        _fixture(
            "extreme",
            "ratios of 1e8 and 1e-8 beside ordinary ones",
            [[1, 0, 0, 1], [0, 1, 0, 0]],
            _lengths(8, 6, 6),
            6,
            seed=6,
            far=np.log(1e8),
        ),
        _fixture(
            "long_and_short",
            "completions of 1 token beside 64",
            [[0.2, 0.9, 0.4, 0.1], [0.5, 0.3, 0.8, 0.6]],
            np.array([1, 64, 1, 64, 64, 1, 33, 2]),
            64,
            seed=7,
        ),
        _fixture(
            "dropped",
            "rewards that failed: some of a group, and all of another",
            [[1, NAN, 0, 1], [NAN, NAN, NAN, NAN], [0, 1, NAN, NAN], [0, 0, 1, 0]],
            _lengths(16, 6, 8),
            6,
            seed=8,
        ),
    )
}
