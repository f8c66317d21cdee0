"""Assigns rewards to the turns of a conversation, and computes the advantage of each turn.

    end        every turn has the whole: r_1 + ... + r_n
    turn       a turn has what followed it: r_k
    discount   a turn has what followed it and what came later: r_k + d r_{k+1} + d^2 r_{k+2} + ...

With `end` the conversations of a group are compared, one value each. With the other two all turns
of the conversations of a group are compared, one value each, as the steps of a completion are in
process supervision (arXiv:2402.03300, section 4.1.3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tunix_lite.algorithms.dropped import takes_whole


@dataclass(frozen=True)
class TurnCredit:
    """Assigns the rewards of a conversation to its turns.

    Example: TurnCredit("discount", 0.5).values([0.0, 1.0]) is [0.5, 1.0].
    """

    kind: str = "end"  # end, turn or discount
    # factor of `discount` for each turn between a turn and a reward
    discount: float = 1.0

    def values(self, rewards: Sequence[float]) -> np.ndarray:
        """Returns the value of each turn of a conversation, float64, from the rewards of its
        turns."""
        rewards = np.asarray(rewards, np.float64)
        if self.kind == "end":
            return np.full(len(rewards), rewards.sum())
        if self.kind == "turn":
            return rewards
        values = rewards.copy()
        for k in range(len(values) - 2, -1, -1):
            values[k] += self.discount * values[k + 1]
        return values


def turn_advantages(
    function: Callable,
    credit: TurnCredit,
    turn_rewards: Sequence[Sequence[float]],
    num_generations: int,
    kept_B: np.ndarray,
) -> list[np.ndarray]:
    """The advantage of each turn of each conversation; 0 where dropped, and in a group that has one
    turn in all.

    function: as in algorithms/advantages.py; a group is one row of the values of all its turns.
    turn_rewards: of each row, those of a group side by side. Raises ValueError for a function that
    looks at the whole batch, as it compares completions and not turns.
    """
    if takes_whole(function):
        raise ValueError(
            f"conversation.credit={credit.kind} compares turns, and the advantages of this "
            "algorithm compare whole completions; set conversation.credit=end"
        )
    row_advantages = [np.zeros(len(rewards)) for rewards in turn_rewards]
    for first in range(0, len(turn_rewards), num_generations):
        rows = [row for row in range(first, first + num_generations) if kept_B[row]]
        values = [credit.values(turn_rewards[row]) for row in rows]
        together = np.concatenate(values) if values else np.zeros(0)
        if len(together) < 2:
            continue
        advantages = function(together[None])[0]
        ends = np.cumsum([len(one) for one in values])
        for row, of_turns in zip(rows, np.split(advantages, ends[:-1])):
            row_advantages[row] = of_turns
    return row_advantages


def with_total(rewards: Sequence[float], total: float) -> list[float]:
    """Adds the rest of a conversation's reward to its last turn: the rewards of turns then sum to
    `total`."""
    return [*rewards[:-1], rewards[-1] + (total - sum(rewards))]
