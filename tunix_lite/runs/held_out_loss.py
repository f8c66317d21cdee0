"""The loss of held-out rows: the algorithm's own, in the rows and micro-batches of an update,
without its gradient. Weights are normalised over all rows at once, so their parts only add up."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from tunix_lite.basics.errors import RunFailed, error_context
from tunix_lite.basics.types import Batch, Metrics, TrainState
from tunix_lite.distributed.stopping import COMPILATION
from tunix_lite.runs.learner import Learner
from tunix_lite.tasks.task import Task


def held_out_loss(learner: Learner, task: Task, state: TrainState) -> Metrics:
    """The loss of evaluation.loss_examples held-out rows under today's weights, as eval/loss, and
    the other metrics of the algorithm's loss; of a loss in nats a token also eval/perplexity, its
    exponential. Raises RunFailed if data or a reward is wrong; StopRun if a signal ends
    sampling."""
    run = learner.resolved.run
    needs = run.algorithm.needs
    size = learner.resolved.batch.sequences
    params = learner.policy_params(state)
    scorers = {name: _in_parts(score, size) for name, score in learner.policy.scorers.items()}
    policy = replace(
        learner.policy, scorers=scorers, rescore=_in_parts(learner.policy.rescore, size)
    )

    # Collect as for an update. What a teacher adds may be large, so it comes part by part below.
    seen: list[Batch | None] = [None]
    if policy.compare is not None:

        def compare_later(batch: Batch, read: Batch | None = None) -> Batch:
            seen[0] = read
            return batch

        policy = replace(policy, compare=compare_later)
    with error_context("evaluation", RunFailed):
        examples = task.held_out(run.loss_examples, is_learned=True)
        batch, collected, _ = run.algorithm.collect(
            policy, task, params, examples, learner.seed_key
        )

        # The sums of all parts, in float64.
        sums = {}
        theirs = iter(()) if seen[0] is None else _batches_of(seen[0], size)
        for part in _batches_of(batch, size):
            if policy.compare is not None:
                part = learner.policy.compare(part, next(theirs, None))
            rows, _ = learner.resolved.rows.lay_out(part)
            arguments = (state.params, learner.frozen, rows)
            with learner.stopping.uninterruptible(COMPILATION):
                program = learner.train_step.compile_metrics(*arguments)
            for name, value in jax.device_get(program(*arguments)).items():
                sums[name] = sums.get(name, 0.0) + float(value)
    metrics = {
        f"eval/{name.removeprefix('train/')}": value
        for name, value in (collected | sums).items()
        # entropy is not about held-out rows
        if name.startswith("train/") and name != "train/entropy"
    }
    if needs.held_out_loss == "nats":
        total = float(np.sum(batch.loss_weight, dtype=np.float64)) or 1.0
        metrics["eval/perplexity"] = math.exp(min(metrics["eval/loss"] / total, 700.0))
    return metrics


def _batches_of(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch, `size` sequences at a time; copies that do not count fill the last part."""
    count = len(batch.tokens)
    for begin in range(0, count, size):
        places = np.arange(begin, begin + size)
        part = jax.tree.map(partial(np.take, indices=places % count, axis=0), batch)
        weight = np.where((places < count)[:, None], part.loss_weight, np.float32(0))
        yield part.replace(loss_weight=weight)


def _in_parts(score: Callable[..., np.ndarray], size: int) -> Callable[..., np.ndarray]:
    """A scorer of batches of `size` sequences as one of any number: its last argument is cut."""

    def scored(*arguments: object) -> np.ndarray:
        *params, batch = arguments
        values = [score(*params, part) for part in _batches_of(batch, size)]
        return np.concatenate(values)[: len(batch.tokens)]

    return scored
