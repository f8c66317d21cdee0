"""Groups: sample G completions per prompt, grade them, and make a batch of their advantages.

An algorithm that only gives credit differently calls `sample_groups`, then `Groups.batch`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from tunix_lite.algorithms.advantages import WholeBatch
from tunix_lite.algorithms.algorithm import Policy, TaskInterface, who_answers
from tunix_lite.algorithms.credit import TurnCredit, turn_advantages, with_total
from tunix_lite.algorithms.dropped import (
    advantages_of_kept,
    groups_that_agree,
    weights_of_learned,
)
from tunix_lite.types import Batch, Graded, Metrics, Params, Rollout


@dataclass(frozen=True)
class Groups:
    """The graded completions of P prompts, G of each: row p * G + g of the rollout is completion g
    of prompt p.

    Example: two prompts, two completions each -> rewards_PG [[1, 0], [1, 1]], kept_PG [[T, T], [T,
    T]].
    """

    rollout: Rollout
    graded: Graded
    rewards_PG: np.ndarray  # float64; nan where dropped
    kept_PG: np.ndarray  # bool: False where a reward failed and rewards.on_error=drop
    # bool: of those that are kept, False where nothing is learned from one; it is compared all the
    # same
    learned_PG: np.ndarray
    # metrics of all completions that were sampled; None: the groups hold all of them
    of_all: Metrics | None = None
    # parts of the rewards beside those of the task, [P, G], by name
    added: dict[str, np.ndarray] = field(default_factory=dict)
    # credit of turns in conversations; None: there are no turns
    credit: TurnCredit | None = None

    def batch(
        self,
        advantages: Callable,
        weighting: Callable,
        num_mini_batches: int = 1,
        advantage_clip: float | None = None,
    ) -> Batch:
        """The batch to learn from; `old_logprobs` are of the policy with nothing cut off.

        advantages, advantage_clip: as in `token_advantages`. weighting: completion mask [B, T] ->
        weights [B, T], of each mini-batch by itself; it gets those that are learned from.
        """
        return Batch(
            tokens=self.rollout.tokens,
            token_mask=self.rollout.token_mask,
            loss_weight=self.token_weights(weighting, num_mini_batches),
            advantages=self.token_advantages(advantages, advantage_clip),
            old_logprobs=self.rollout.full_logprobs,
        )

    def token_weights(self, weighting: Callable, num_mini_batches: int = 1) -> np.ndarray:
        """[B, T] float32: the weight of each token in the loss; 0 where nothing is learned."""
        mask_BT = np.asarray(self.rollout.completion_mask)
        P, G = self.learned_PG.shape
        prompt_B = np.repeat(np.arange(P), G)
        learned_B = self.learned_PG.reshape(-1)
        return weights_of_learned(weighting, mask_BT, learned_B, prompt_B, num_mini_batches)

    def token_advantages(self, function: Callable, limit: float | None = None) -> np.ndarray:
        """[B, T] float32: the advantage of a completion at each of its tokens, within +- limit; 0
        where dropped. function: rewards [P, G] -> [P, G], as algorithms/advantages.py has them."""
        if self.credit is not None and self.credit.kind != "end":
            return self._turn_advantages(function, limit)
        advantages_PG = advantages_of_kept(function, self.rewards_PG, self.kept_PG, self.whole)
        if limit is not None:
            advantages_PG = np.clip(advantages_PG, -limit, limit)
        advantages_B1 = advantages_PG.reshape(-1, 1)
        return np.broadcast_to(advantages_B1, self.rollout.tokens.shape).astype(np.float32)

    def _turn_advantages(self, function: Callable, limit: float | None) -> np.ndarray:
        """[B, T] float32: the advantage of each turn at its tokens; 0 elsewhere."""
        # What is in the rewards beside those of the environment belongs to the last turn.
        totals_B = np.nan_to_num(self.rewards_PG).reshape(-1)
        rewards = [with_total(*one) for one in zip(self.graded.turn_rewards, totals_B)]
        kept_B = self.kept_PG.reshape(-1)
        G = self.rewards_PG.shape[1]
        advantages_BT = np.zeros(self.rollout.tokens.shape, np.float32)
        row_advantages = turn_advantages(function, self.credit, rewards, G, kept_B)
        for row, (one, values) in enumerate(zip(self.rollout.conversations, row_advantages)):
            for turn, value in zip(one.turns, values):
                advantages_BT[row, turn.begin : turn.end] = value
        return advantages_BT if limit is None else np.clip(advantages_BT, -limit, limit)

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
        those of the task."""
        values_PG = values_B.reshape(self.rewards_PG.shape)
        added = self.added | {name: values_PG}
        return replace(self, rewards_PG=self.rewards_PG + values_PG, added=added)

    def learning_from(self, learned_PG: np.ndarray) -> "Groups":
        """Gives weights to these completions alone; [P, 1] or [P, G]."""
        return replace(self, learned_PG=self.learned_PG & learned_PG)

    @property
    def lengths(self) -> np.ndarray:
        """[B] tokens of each completion."""
        return np.asarray(self.rollout.completion_mask).sum(axis=1)

    @property
    def agree(self) -> np.ndarray:
        """[P] bool: the rewards of the group are all equal, so that nothing is to be learned."""
        return groups_that_agree(self.rewards_PG, self.kept_PG)

    @property
    def metrics(self) -> Metrics:
        """Metrics of sampling and of the rewards, and the share of zero-advantage groups."""
        if self.of_all is not None:
            return dict(self.of_all)
        agree = float(self.agree.mean())
        return self.rollout.metrics | self.graded.metrics | {"reward/groups_that_agree": agree}


def sample_groups(
    policy: Policy,
    task: TaskInterface,
    params: Params,
    examples: list[dict],
    key: jax.Array,
    num_generations: int,
) -> Groups:
    """Samples `num_generations` completions for each example and grades them.

    A completion is graded as soon as it ends, while others are still sampled. Raises what sampling
    raises, and ValueError where a reward fails and rewards.on_error=raise.
    """
    repeated = [example for example in examples for _ in range(num_generations)]
    grader = task.grader(repeated, num_generations)
    prompts = task.prompts(examples)
    answers = who_answers(task, repeated)
    rollout = policy.generate(
        params, prompts, key, num_generations, on_finished=grader.submit, **answers
    )
    graded = grader.results(rollout)
    rewards_PG = graded.rewards.reshape(-1, num_generations)
    kept_PG = ~graded.dropped.reshape(rewards_PG.shape)
    groups = Groups(rollout, graded, rewards_PG, kept_PG, learned_PG=kept_PG)
    # Not whether anybody answered here: with rollout.overlap they may have done so a step ago.
    return groups if rollout.conversations is None else _of_conversations(groups, task)


def _of_conversations(groups: Groups, task: TaskInterface) -> Groups:
    """Applies the settings of conversations to groups: the credit of turns, and what is learned
    from a conversation that reached a limit."""
    settings = task.conversation
    groups = replace(groups, credit=TurnCredit(settings.credit, settings.discount))
    if settings.on_limit != "mask":
        return groups
    is_whole_B = np.array([not one.reached_limit for one in groups.rollout.conversations])
    return groups.learning_from(is_whole_B.reshape(groups.rewards_PG.shape))
