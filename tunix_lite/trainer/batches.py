"""Batches of an algorithm, such as GRPO: collected as run_training.py collects them, and their
gradient.

Sampling, rewards, rows and the program of the gradient are those of a run, so that a loop written
with them gives the same numbers.
"""

import contextlib
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Algorithm, Policy
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, RunFailed, error_context
from tunix_lite.learner.policy import STORED
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import decoder, source
from tunix_lite.models.lora import LoraConfig, acting_params
from tunix_lite.models.source import FoundModel
from tunix_lite.resolved.parts import policy_of
from tunix_lite.runs.separate_sampling import sampler_of_run
from tunix_lite.runs.setup import find_parts
from tunix_lite.settings.compose import compose
from tunix_lite.trainer.data import TOKENS_AT_ONCE
from tunix_lite.types import Batch, Graded, Metrics, Params


class Collecting:
    """What samples, grades and lays out batches as a run with the trainer's settings.

    Example: batch, metrics, graded = trainer.collecting.collect(params, None, None, step=0).
    """

    def __init__(self, run: RunConfig, found: FoundModel):
        """Raises ConfigError for settings that only a run can follow."""
        self.algorithm = run.algorithm
        needs = run.algorithm.needs
        needs_run = {
            f"rollout.overlap={run.rollout.overlap}": run.rollout.overlap != "none",
            "algorithm.mini_batches above 1": needs.mini_batches > 1,
            "algorithm.agreeing_groups=replace": needs.rounds > 1,
            "training.micro_batch_size=auto": run.training.micro_batch_size == "auto",
            "an algorithm with a teacher": bool(needs.frozen_models),
        }
        for name, is_on in needs_run.items():
            if is_on:
                raise ConfigError(f"{name} is for run_training.py: collect does not follow it")
        self.found = found
        parts = find_parts(run)
        self.resolved = parts.resolved
        self._closing = contextlib.ExitStack()
        task = parts.task
        # Only a run says things on the console.
        workers = task.with_workers(
            run.rewards, lambda text: None, conversation=run.conversation
        )
        self._task = self._closing.enter_context(workers)
        self._generate = sampler_of_run(self.resolved, found.tokenizer)
        self._policies: dict[LoraConfig | None, Policy] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Of the batches: sequences, tokens of each."""
        return self.resolved.batch.sequences, sum(self.resolved.lengths)

    def collect(
        self, params: Params, frozen: Params | None, lora: LoraConfig | None, step: int
    ) -> tuple[Batch, Metrics, Graded | None]:
        """See TrainingClient.collect. frozen: the base under adapters."""
        run = self.resolved.run
        if lora not in self._policies:
            # the reference is where the training of these clients starts
            reference = None
            if self.algorithm.needs.reference and lora is not None:
                reference = frozen
            elif self.algorithm.needs.reference:
                storage = STORED[run.training.mixed_precision]
                start = source.load_base(self.found, run.seed, storage)
                reference = decoder.copy_to_score(start, self.found.cfg, self.resolved.dtype)
            resolved = replace(self.resolved, lora=lora)
            self._policies[lora] = policy_of(resolved, self._generate, reference)
        policy = self._policies[lora]
        acting = acting_params(frozen, params, lora)
        with error_context(f"step {step + 1}", RunFailed):
            rollout = step // self.algorithm.updates_per_rollout
            examples, _ = self._task.batch(self.resolved.batch.prompts, run.seed, rollout)
            key = jax.random.fold_in(jax.random.key(run.seed), step)
            return self.algorithm.collect(policy, self._task, acting, examples, key)

    def close(self) -> None:
        """Ends the reward workers."""
        self._closing.close()


@cache
def algorithm_named(loss: str | Algorithm, settings: tuple[tuple[str, Any], ...]) -> Algorithm:
    """The algorithm of this name in conf/algorithm, with these settings; or the object itself.

    Raises ConfigError for another name or setting.
    """
    if not isinstance(loss, str):
        if settings:
            raise ValueError("settings: an algorithm that is given as an object has its own")
        return loss
    return compose(
        [f"algorithm={loss}", *(f"algorithm.{k}={v}" for k, v in settings)]
    ).algorithm


def layout_of(num_sequences: int, length: int, shards: int) -> RowLayout:
    """A sequence a row, in as few micro-batches as TOKENS_AT_ONCE allows."""
    per_shard = num_sequences // shards if num_sequences % shards == 0 else num_sequences
    sizes = [n for n in range(1, per_shard + 1) if per_shard % n == 0]
    fitting = [n for n in sizes if n * length <= TOKENS_AT_ONCE] or [1]
    return RowLayout("none", per_shard // max(fitting))


def check_batch(batch: Batch, algorithm: Algorithm, vocab_size: int, max_length: int) -> None:
    """Raises ValueError for a batch that the model or the algorithm cannot take."""
    if algorithm.needs.comparison is not None:
        raise ValueError(
            f"{type(algorithm).__name__} compares with a teacher, which only a run loads"
        )
    tokens = np.asarray(batch.tokens)
    if tokens.ndim != 2 or not tokens.size:
        raise ValueError(
            f"batch.tokens has shape {list(tokens.shape)}; it is [B, T], not empty"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"batch.tokens holds {tokens.min()} to {tokens.max()}; a token of this model is 0 to "
            f"{vocab_size - 1}"
        )
    longest = int(np.asarray(batch.token_mask).sum(axis=1).max())
    if longest > max_length:
        raise ValueError(
            f"a sequence has {longest} tokens; the model takes up to {max_length}"
        )
    for name in algorithm.needs.streams:
        if name not in batch.streams:
            raise ValueError(f"batch.streams[{name!r}] is missing; this loss needs it")
    for name in ("loss_weight", *algorithm.needs.batch_fields):
        values = getattr(batch, name)
        if values is None:
            raise ValueError(f"batch.{name} is missing; this loss needs it")
        if not np.isfinite(np.asarray(values)).all():
            raise ValueError(f"batch.{name} holds a number that is not finite")
