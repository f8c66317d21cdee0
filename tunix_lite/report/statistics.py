"""Estimates scores of graded completions, and how sure they are, in plain numpy, from a fixed seed.
Shapes: E examples, N samples of each; `correct_EN` is bool or 0/1."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# of a bootstrap interval, and of a test by exchanging signs
_RESAMPLES = 10_000
# numbers drawn at a time, so that memory does not grow with the examples
_BLOCK = 2_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over examples, and the interval that holds the true one at the level asked for.
    Example: 128 of 256 right -> Estimate(0.5, 0.441, 0.559)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Two models on the same examples: the first minus the second.
    Example: Comparison(Estimate(0.1, 0.02, 0.18), better=30, worse=10, equal=60, p_value=0.002)."""

    difference: Estimate
    # examples on which the first is better, worse, or as good
    better: int
    worse: int
    equal: int
    # how often a difference as large comes up if which model is which does not matter
    p_value: float


def powers_up_to(num_samples: int) -> list[int]:
    """The k of a table: 1, 2, 4 ... and the number of samples itself: 6 -> [1, 2, 4, 6]."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]


# ---- one number of each example


def pass_at_k(correct_EN: np.ndarray, k: int) -> np.ndarray:
    """[E] float64: the chance that at least one of k samples is right, without bias. With c of N
    samples right it is 1 - C(N - c, k) / C(N, k): the share of all subsets of k samples that hold a
    right one (arXiv:2107.03374). Raises ValueError unless 1 <= k <= N."""
    correct_EN = np.asarray(correct_EN)
    num_samples = correct_EN.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} of {num_samples} samples; it is 1 to their number")
    wrong_E = num_samples - correct_EN.sum(axis=1)
    # By whole numbers, which are exact however many subsets there are.
    all_subsets = math.comb(num_samples, k)
    return np.array([1 - math.comb(int(wrong), k) / all_subsets for wrong in wrong_E])


def avg_at_k(correct_EN: np.ndarray) -> np.ndarray:
    """[E] float64: the share of the samples that are right; others call it mean@k or pass@1."""
    return np.asarray(correct_EN, np.float64).mean(axis=1)


def maj_at_k(answers: Sequence[Sequence[str | None]], correct_EK: np.ndarray) -> np.ndarray:
    """[E] float64: whether the most frequent answer of the k samples is right. answers: of each
    example the answers of its samples; None: there is none, and it does not vote. Of answers that
    are equally frequent each counts its share; where nobody votes it is 0."""
    shares = []
    for row, right in zip(answers, np.asarray(correct_EK)):
        votes = Counter(answer for answer in row if answer is not None)
        most = max(votes.values(), default=0)
        # The same answer may be graded differently, where more than the answer counts.
        is_right = [
            np.mean([ok for answer, ok in zip(row, right) if answer == winner])
            for winner, count in votes.items()
            if count == most
        ]
        shares.append(np.mean(is_right) if is_right else 0.0)
    return np.array(shares, np.float64)


# ---- how sure it is


def estimate(
    values_E: np.ndarray, level: float = 0.95, resamples: int = _RESAMPLES, seed: int = 0
) -> Estimate:
    """The mean of one number of each example, with its bootstrap interval (percentiles).
    Examples are drawn again, not their samples: the samples of an example are not independent.
    Values that are all equal give an interval without width, which says only that the examples are
    too few or too much alike. Raises ValueError without examples, or for a level outside (0, 1)."""
    values_E = np.asarray(values_E, np.float64)
    if values_E.ndim != 1 or not len(values_E):
        raise ValueError(f"an interval is of one number of each example; got {values_E.shape}")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is between 0 and 1, such as 0.95")
    rng = np.random.default_rng(seed)
    count = len(values_E)
    # in blocks: all at once would take gigabytes for a large evaluation
    drawn = (rng.integers(count, size=(rows, count)) for rows in _blocks(resamples, count))
    means = np.concatenate([values_E[rows].mean(axis=1) for rows in drawn])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(values_E.mean()), float(low), float(high))


def wilson(share: float, count: int) -> Estimate:
    """The 95 % interval of a share of `count` examples, at least one, where only the share is known
    (Wilson's score interval)."""
    z = 1.959964
    denominator = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / denominator
    variance = share * (1 - share) / count + z * z / (4 * count * count)
    reach = z * math.sqrt(variance) / denominator
    return Estimate(share, max(middle - reach, 0.0), min(middle + reach, 1.0))


def _blocks(resamples: int, count: int) -> list[int]:
    """So many resamples of `count` numbers, in parts of at most _BLOCK numbers."""
    most = max(1, _BLOCK // count)
    return [min(most, resamples - begin) for begin in range(0, resamples, most)]


def compare(
    first_E: np.ndarray,
    second_E: np.ndarray,
    level: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Two models by one number of each example, the examples being the same. What is hard for both
    cancels, so it sees smaller differences than two intervals do. The p-value is two-sided: the
    share of random exchanges of the two models' numbers, example by example, after which the sum is
    as far from 0. Raises ValueError if the examples are not as many."""
    first_E = np.asarray(first_E, np.float64)
    second_E = np.asarray(second_E, np.float64)
    if first_E.shape != second_E.shape:
        raise ValueError(
            f"a paired comparison is of the same examples; there are {len(first_E)} and "
            f"{len(second_E)}"
        )
    differences_E = first_E - second_E
    # Examples with equal scores change no sum, whichever way they are exchanged.
    moved = differences_E[differences_E != 0]
    rng = np.random.default_rng(seed)
    extreme = 0
    for rows in _blocks(resamples, max(1, len(moved))):
        signs = 1 - 2 * rng.integers(2, size=(rows, len(moved)))
        # sums of the same numbers in another order differ by rounding
        extreme += int((np.abs(signs @ moved) >= abs(moved.sum()) * (1 - 1e-12)).sum())
    return Comparison(
        estimate(differences_E, level, resamples, seed),
        better=int((differences_E > 0).sum()),
        worse=int((differences_E < 0).sum()),
        equal=int((differences_E == 0).sum()),
        # The order at hand is one of the exchanges, so p is never 0.
        p_value=(1 + extreme) / (1 + resamples),
    )
