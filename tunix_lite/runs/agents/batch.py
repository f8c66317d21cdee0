"""Turns episodes into the batch of an update: groups, their advantages, and rows of tokens. The
advantage of an episode counts for each token sampled in it, whichever sequence holds it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import jax
import numpy as np

from tunix_lite.algorithms.advantages import WholeBatch, advantages_of_kept, groups_that_agree
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.weighting import weights_of_learned
from tunix_lite.basics.errors import ConfigError, RunFailed, error_context
from tunix_lite.basics.types import Batch, Metrics
from tunix_lite.runs.agents.episodes import Episode
from tunix_lite.runs.agents.running import Ended
from tunix_lite.settings.config import RunConfig

# of training.packing: any other names what sequences of agents are not laid out by
PACKING = ("auto", "sequences")


@dataclass(frozen=True)
class EpisodeGroups:
    """P examples with G episodes each: episode p * G + g is number g of example p.
    Example: EpisodeGroups(episodes, ended, 8).rewards_PG of two examples is [2, 8]."""

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
        """Measures rewards, calls and failures. Raises RunFailed where an episode failed and
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
            "completions/correct": float((rewards_PG[kept_PG] >= 1).mean()),
            "reward/groups_that_agree": float(groups_that_agree(rewards_PG).mean()),
            "episodes/calls": sum(one.num_calls for one in self.episodes) / count,
            "episodes/sequences": sum(len(one.sequences) for one in self.episodes) / count,
            "episodes/tokens": sum(one.num_tokens for one in self.episodes) / count,
            "episodes/errors": kinds.count("error") + kinds.count("no_reward"),
            "episodes/timeouts": kinds.count("timeout"),
            "time/episode": float(np.mean([one.seconds for one in self.ended])),
        }

    def advantages_PG(self, algorithm: GRPO) -> np.ndarray:
        """[P, G]; 0 where dropped."""
        rewards_PG = self.rewards_PG
        lengths_B = np.array([one.num_tokens for one in self.episodes])
        whole = WholeBatch(lengths_B.reshape(rewards_PG.shape), {"agent": rewards_PG})
        how = (algorithm.advantages, rewards_PG, lambda: whole)
        limit = np.inf if algorithm.advantage_clip is None else algorithm.advantage_clip
        return np.clip(advantages_of_kept(*how), -limit, limit)

    def batch(self, algorithm: GRPO) -> Batch:
        """Makes the batch of an update: a sequence of an episode a row, [B, T], right-padded. Where
        nothing is left to learn from, it is one row in which nothing counts."""
        advantages_B = self.advantages_PG(algorithm).reshape(-1)
        learned_PG = self.kept_PG
        if algorithm.agreeing_groups == "drop":
            agree_P = groups_that_agree(self.rewards_PG)
            learned_PG = learned_PG & ~agree_P[:, None]
        learned_B = learned_PG.reshape(-1)
        rows = [
            (one, advantages_B[place], place // self.num_generations)
            for place, episode in enumerate(self.episodes)
            for one in episode.sequences
            if learned_B[place]
        ]
        lengths = [len(one.tokens) for one, *_ in rows]
        shape = (max(1, len(rows)), max(lengths, default=2))

        def filled(values: Iterable, dtype: type) -> np.ndarray:
            array = np.zeros(shape, dtype)
            for row, (value, length) in enumerate(zip(values, lengths)):
                array[row, :length] = value
            return array

        sampled = filled((one.is_sampled for one, *_ in rows), bool)
        weights = np.zeros(shape, np.float32)
        if rows:
            # What each token counts is made where all sequences are in view.
            prompts = np.array([prompt for *_, prompt in rows])
            weights = weights_of_learned(algorithm.weighting, sampled, prompts, 1)
        return Batch(
            tokens=filled((one.tokens for one, *_ in rows), np.int32),
            token_mask=filled((True for _ in rows), bool),
            loss_weight=weights,
            advantages=filled((advantage for _, advantage, _ in rows), np.float32),
            old_logprobs=filled((one.logprobs for one, *_ in rows), np.float32),
        )


def settings_for_agents(run: RunConfig) -> RunConfig:
    """Returns the run as agents train: its sequences stand side by side in rows, and no workers
    grade. Raises ConfigError for settings that agents do not follow, and missing packages."""
    if find_spec("aiohttp") is None or find_spec("openai") is None:
        raise ConfigError("agents need aiohttp and openai: pip install -e '.[agents]'")
    algorithm = run.algorithm
    if not isinstance(algorithm, GRPO):
        raise ConfigError(
            f"algorithm={type(algorithm).__name__}: agents learn by GRPO and its family"
        )
    refused = {
        "algorithm.kl_coef above 0": algorithm.kl_coef > 0,
        "algorithm.mini_batches above 1": algorithm.mini_batches > 1,
        f"algorithm.old_logprobs={algorithm.old_logprobs}": algorithm.old_logprobs != "whole",
        "algorithm.agreeing_groups=replace": algorithm.agreeing_groups == "replace",
        "algorithm.shaping": algorithm.shaping is not None,
        "algorithm.mask_truncated=true": algorithm.mask_truncated,
        "task.environment": run.task.environment is not None,
        f"rollout.overlap={run.rollout.overlap}": run.rollout.overlap != "none",
        f"training.packing={run.training.packing}": run.training.packing not in PACKING,
        # Sequences are packed: micro-batches have tokens, and dropout belongs to one sequence.
        "training.micro_batch_size": run.training.micro_batch_size is not None,
        "training.gradient_accumulation_steps": bool(run.training.gradient_accumulation_steps),
        "model.lora.dropout above 0": run.model.lora.dropout > 0,
    }
    for name, is_on in refused.items():
        if is_on:
            raise ConfigError(f"{name}: agents do not follow it; leave it out")
    if run.generation.temperature <= 0:
        raise ConfigError(
            "generation.temperature=0: all episodes of a group would be the same"
        )
    if jax.process_count() > 1:
        raise ConfigError("an agent is trained in one process; run_training.py spans several")
    training = replace(run.training, packing="sequences")
    rewards = replace(run.rewards, workers=0)
    # Agents read tokens again in every call, and each reading would have routes of its own.
    rollout = replace(run.rollout, replay_routes=False)
    with error_context(""):
        return replace(run, training=training, rewards=rewards, rollout=rollout)
