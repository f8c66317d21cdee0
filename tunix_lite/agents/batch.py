"""What an update learns from episodes: groups of them, their advantages, and rows of tokens.

The advantage of an episode is that of its reward in its group, the episodes of the same example. It
counts for each token that the model sampled in the episode, whichever of its sequences holds it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tunix_lite.agents.episodes import Episode
from tunix_lite.agents.running import Ended
from tunix_lite.agents.sequences import TokenSequence
from tunix_lite.algorithms.advantages import WholeBatch
from tunix_lite.algorithms.dropped import (
    advantages_of_kept,
    groups_that_agree,
    weights_of_learned,
)
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.errors import ConfigError, RunFailed
from tunix_lite.types import Batch, Metrics

# The narrowest row, and tokens of a forward and backward pass on one shard, padding included.
LEAST_WIDTH = 64
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class EpisodeGroups:
    """P examples with G episodes each: episode p * G + g is number g of example p.

    Example: EpisodeGroups(episodes, ended, 8).rewards_PG of two examples is [2, 8].
    """

    episodes: Sequence[Episode]
    ended: Sequence[Ended]
    num_generations: int
    on_error: str

    @property
    def rewards_PG(self) -> np.ndarray:
        """float64; nan where an episode failed and is dropped."""
        value = 0.0 if self.on_error == "zero" else np.nan
        rewards_B = [value if one.reward is None else one.reward for one in self.ended]
        return np.array(rewards_B, np.float64).reshape(-1, self.num_generations)

    @property
    def kept_PG(self) -> np.ndarray:
        """bool: False where an episode failed, and on_error=drop."""
        return ~np.isnan(self.rewards_PG)

    @property
    def metrics(self) -> Metrics:
        """Of rewards, calls and failures. Raises RunFailed where an episode failed and
        on_error=raise, or where none is left."""
        failed = [one for one in self.ended if one.failure]
        if failed and self.on_error == "raise":
            raise RunFailed(f"an agent failed ({failed[0].failure}): {failed[0].message}")
        rewards_PG = self.rewards_PG
        kept_PG = self.kept_PG
        if not kept_PG.any():
            raise RunFailed(f"all episodes failed; the first: {failed[0].message}")
        count = len(self.episodes)
        kinds = [one.failure for one in self.ended]
        return {
            "reward/mean": float(rewards_PG[kept_PG].mean()),
            "reward/std": float(rewards_PG[kept_PG].std()),
            "reward/groups_that_agree": float(groups_that_agree(rewards_PG, kept_PG).mean()),
            "episodes/calls": sum(one.num_calls for one in self.episodes) / count,
            "episodes/sequences": sum(len(one.sequences) for one in self.episodes) / count,
            "episodes/tokens": sum(one.num_tokens for one in self.episodes) / count,
            "episodes/errors": kinds.count("error") + kinds.count("no_reward"),
            "episodes/timeouts": kinds.count("timeout"),
            "time/episode": float(np.mean([one.seconds for one in self.ended])),
        }

    def advantages_PG(self, algorithm: GRPO) -> np.ndarray:
        """[P, G]; 0 where dropped."""

        def whole() -> WholeBatch:
            lengths_B = np.array([one.num_tokens for one in self.episodes])
            return WholeBatch(lengths_B.reshape(rewards_PG.shape), {"agent": rewards_PG})

        rewards_PG = self.rewards_PG
        found_PG = advantages_of_kept(algorithm.advantages, rewards_PG, self.kept_PG, whole)
        limit = algorithm.advantage_clip
        return found_PG if limit is None else np.clip(found_PG, -limit, limit)

    def batches(self, algorithm: GRPO, shards: int) -> Iterator[Batch]:
        """The batch of an update in parts, whose gradients add up: all of its weights sum to what
        they would in one. Rows of a part have one width, a power of two. shards: of a batch
        (fsdp)."""
        advantages_B = self.advantages_PG(algorithm).reshape(-1)
        learned_PG = self.kept_PG
        if algorithm.agreeing_groups == "drop":
            agree_P = groups_that_agree(self.rewards_PG, self.kept_PG)
            learned_PG = learned_PG & ~agree_P[:, None]
        learned_B = learned_PG.reshape(-1)
        rows = [
            (one, advantages_B[place])
            for place, episode in enumerate(self.episodes)
            for one in episode.sequences
            if learned_B[place]
        ]
        # the same width first, so that parts of one width have one shape
        rows.sort(key=lambda row: len(row[0].tokens))
        weights = _weights(algorithm, [one for one, _ in rows])
        at = 0
        while at < len(rows):
            width = _width(len(rows[at][0].tokens))
            count = max(1, TOKENS_AT_ONCE // width) * shards
            part = [row for row in rows[at : at + count] if len(row[0].tokens) <= width]
            yield _batch_of(part, weights[at : at + len(part)], count, width)
            at += len(part)


def check_algorithm(algorithm: object) -> None:
    """Raises ConfigError for what episodes cannot be learned by."""
    if not isinstance(algorithm, GRPO):
        raise ConfigError(
            f"algorithm={type(algorithm).__name__}: agents learn by GRPO and its family"
        )
    needs_run = {
        "kl_coef above 0": algorithm.kl_coef > 0,
        "mini_batches above 1": algorithm.mini_batches > 1,
        f"old_logprobs={algorithm.old_logprobs}": algorithm.old_logprobs != "whole",
        "agreeing_groups=replace": algorithm.agreeing_groups == "replace",
        "shaping": algorithm.shaping is not None,
        "mask_truncated=true": algorithm.mask_truncated,
    }
    for name, is_on in needs_run.items():
        if is_on:
            raise ConfigError(f"algorithm.{name} is for run_training.py: agents do not follow it")


def _width(length: int) -> int:
    return max(LEAST_WIDTH, 1 << (length - 1).bit_length())


def _weights(algorithm: GRPO, sequences: list[TokenSequence]) -> list[np.ndarray]:
    """What each token of each sequence counts: made once, where all are in view."""
    if not sequences:
        return []
    most = max(len(one.tokens) for one in sequences)
    mask_BT = np.zeros((len(sequences), most), bool)
    for row, one in enumerate(sequences):
        mask_BT[row, : len(one.tokens)] = one.is_sampled
    all_B = np.ones(len(sequences), bool)
    weights_BT = weights_of_learned(algorithm.weighting, mask_BT, all_B)
    return [weights_T[: len(one.tokens)] for weights_T, one in zip(weights_BT, sequences)]


def _batch_of(
    rows: list[tuple[TokenSequence, float]], weights: list[np.ndarray], count: int, width: int
) -> Batch:
    """A sequence a row, [count, width]; rows that are left hold nothing."""
    tokens = np.zeros((count, width), np.int32)
    mask = np.zeros((count, width), bool)
    values = {
        name: np.zeros((count, width), np.float32)
        for name in ("loss_weight", "advantages", "old_logprobs")
    }
    for row, (one, advantage) in enumerate(rows):
        length = len(one.tokens)
        tokens[row, :length] = one.tokens
        mask[row, :length] = True
        values["loss_weight"][row, :length] = weights[row]
        values["advantages"][row, :length] = advantage
        values["old_logprobs"][row, :length] = one.logprobs
    return Batch(tokens=tokens, token_mask=mask, **values)
