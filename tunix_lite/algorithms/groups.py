"""Groups: G graded completions for each prompt, and the batch that is made of their advantages.

An algorithm that only gives credit differently calls `Groups.batch`. algorithms/sampling.py makes
groups. Rewards of a conversation go to its turns by `conversation.credit`:

    end        every turn has the whole: r_1 + ... + r_n
    turn       a turn has what followed it: r_k
    discount   a turn has what followed it and what came later: r_k + d r_{k+1} + d^2 r_{k+2} + ...

With `end` the conversations of a group are compared, one value each. With the other two all turns
of the conversations of a group are compared, one value each, as the steps of a completion are in
process supervision (arXiv:2402.03300, section 4.1.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tunix_lite.algorithms.advantages import (
    Advantages,
    WholeBatch,
    advantages_of_kept,
    groups_that_agree,
)
from tunix_lite.algorithms.pieces import takes
from tunix_lite.algorithms.weighting import Weighting, weights_of_learned
from tunix_lite.basics.types import Batch, Graded, Metrics, Rollout


@dataclass(frozen=True)
class Groups:
    """The graded completions of P prompts, G of each: row p * G + g of the rollout is completion g
    of prompt p. Example: two prompts, two completions each -> rewards_PG [[1, 0], [1, 1]]."""

    rollout: Rollout
    graded: Graded
    rewards_PG: np.ndarray  # float64; nan where a reward failed and rewards.on_error=drop
    # bool: False where dropped, and where one is compared, but not learned from
    learned_PG: np.ndarray
    # of sampling and of the rewards of all completions that were sampled
    metrics: Metrics
    # parts of the rewards beside those of the task, [P, G], by name
    added: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, rollout: Rollout, graded: Graded, num_generations: int) -> "Groups":
        """The groups of a rollout and of its grades."""
        rewards_PG = graded.rewards.reshape(-1, num_generations)
        learned_PG = ~np.isnan(rewards_PG)
        if graded.masked is not None:
            learned_PG &= ~graded.masked.reshape(rewards_PG.shape)
        return cls(rollout, graded, rewards_PG, learned_PG, rollout.metrics | graded.metrics)

    def batch(
        self,
        advantages: Advantages,
        weighting: Weighting,
        num_mini_batches: int = 1,
    ) -> Batch:
        """The batch to learn from; `old_logprobs` are of the policy with nothing cut off.

        advantages: as in `token_advantages`. weighting: completion mask [B, T] ->
        weights [B, T], of each mini-batch by itself; it gets those that are learned from."""
        # Weights are made here, where the whole batch is in view: afterwards a loss only adds up.
        rollout = self.rollout
        prompt_PG, _ = np.indices(self.learned_PG.shape)
        return Batch(
            tokens=rollout.tokens,
            token_mask=rollout.token_mask,
            loss_weight=weights_of_learned(
                weighting,
                rollout.completion_mask,
                np.where(self.learned_PG, prompt_PG, -1).reshape(-1),
                num_mini_batches,
            ),
            advantages=self.token_advantages(advantages),
            old_logprobs=rollout.full_logprobs,
            routes=rollout.routes,
        )

    def token_advantages(self, function: Advantages) -> np.ndarray:
        """[B, T] float32: the advantage of a completion at each of its tokens; 0 where dropped.
        function: rewards [P, G] -> [P, G], as algorithms/advantages.py has them."""
        if self.graded.turn_discount is not None:
            return self.advantages_of_turns(function)
        advantages_PG = advantages_of_kept(function, self.rewards_PG, self.whole)
        advantages_B1 = np.float32(advantages_PG).reshape(-1, 1)
        return np.broadcast_to(advantages_B1, self.rollout.tokens.shape)

    def advantages_of_turns(self, function: Advantages) -> np.ndarray:
        """[B, T]: the advantage of each turn of a conversation at its tokens."""
        rewards = [[reward for _, reward in parts] for parts in self.reward_parts]
        of_rows = turn_advantages(function, self.graded.turn_discount, rewards, self.kept_PG)
        advantages_BT = np.zeros(self.rollout.tokens.shape, np.float32)
        for row, conversation in enumerate(self.rollout.conversations):
            for turn, value in zip(conversation.turns, of_rows[row]):
                advantages_BT[row, turn.begin : turn.end] = value
        return advantages_BT

    @property
    def reward_parts(self) -> list[list[tuple[int, float]]]:
        """The rewards in each completion, and the columns at which they are given: one at its end,
        or one at the end of each turn. Those of a dropped one sum to 0."""
        totals_B = np.nan_to_num(self.rewards_PG).reshape(-1)
        if self.graded.turn_discount is None:
            return [[(self.rollout.tokens.shape[1], total)] for total in totals_B]
        parts = []
        for row, total in enumerate(totals_B):
            ends = [turn.end for turn in self.rollout.conversations[row].turns]
            rewards = list(self.graded.turn_rewards[row])
            # What is in the reward beside those of the environment belongs to the last turn.
            rewards[-1] += total - sum(rewards)
            parts.append(list(zip(ends, rewards)))
        return parts

    def whole(self) -> WholeBatch:
        """Facts for an advantage function beside the rewards."""
        shape = self.rewards_PG.shape
        each = {name: values.reshape(shape) for name, values in self.graded.each.items()}
        return WholeBatch(
            lengths=self.lengths.reshape(shape),
            each=each | self.added,
            weights=self.graded.weights,
        )

    def with_reward(self, name: str, values_B: np.ndarray) -> "Groups":
        """Adds values [B] to the rewards that advantages are made of. The metrics of rewards stay
        those of the task. Raises ValueError where a value is nan, which means dropped."""
        values_PG = values_B.reshape(self.rewards_PG.shape)
        if np.isnan(values_PG[self.kept_PG]).any():
            raise ValueError(
                f"`{name}` is added to the rewards, and it is nan for a completion"
            )
        added = self.added | {name: values_PG}
        return replace(self, rewards_PG=self.rewards_PG + values_PG, added=added)

    def learning_from(self, learned_PG: np.ndarray) -> "Groups":
        """Gives weights to these completions alone; [P, 1] or [P, G]."""
        return replace(self, learned_PG=self.learned_PG & learned_PG)

    @property
    def lengths(self) -> np.ndarray:
        """[B] tokens of each completion."""
        return self.rollout.completion_mask.sum(axis=1)

    @property
    def kept_PG(self) -> np.ndarray:
        """bool: False where dropped."""
        return ~np.isnan(self.rewards_PG)

    @property
    def agree(self) -> np.ndarray:
        """[P] bool: the rewards of the group are all equal, so that nothing is to be learned."""
        return groups_that_agree(self.rewards_PG)


def turn_advantages(
    function: Advantages,
    discount: float,
    turn_rewards: Sequence[Sequence[float]],
    kept_PG: np.ndarray,
) -> list[np.ndarray]:
    """The advantage of each turn of each conversation; 0 where dropped, and in a group that has one
    turn in all.

    function: gets the values of all turns of a group as one row. turn_rewards: of each row, those
    of a group side by side. Raises ValueError for one that compares whole completions."""
    if takes(function, "whole"):
        raise ValueError(
            "conversation.credit=turn and discount compare turns, and the advantages of this "
            "algorithm compare whole completions; set conversation.credit=end"
        )

    def values_of(rewards: Sequence[float]) -> np.ndarray:
        # of each turn: its reward, and the values of later turns
        values = np.array(rewards, np.float64)
        for k in range(len(values) - 2, -1, -1):
            values[k] += discount * values[k + 1]
        return values

    row_advantages = [np.zeros(len(rewards)) for rewards in turn_rewards]
    for p, kept_G in enumerate(kept_PG):
        rows = p * len(kept_G) + np.flatnonzero(kept_G)
        values = [values_of(turn_rewards[row]) for row in rows]
        # one turn has nothing to be compared with
        if sum(map(len, values)) < 2:
            continue
        advantages = function(np.concatenate(values)[None])[0]
        ends = np.cumsum([len(one) for one in values])
        for row, of_turns in zip(rows, np.split(advantages, ends[:-1])):
            row_advantages[row] = of_turns
    return row_advantages
