"""The loss of held-out rows: the algorithm's own, in the rows and micro-batches of an update,
without its gradient. Weights are normalised over all rows at once, so their parts only add up."""

import math

import jax
import numpy as np

from tunix_lite.algorithms.sampling import sampler_for
from tunix_lite.basics.errors import RunFailed, error_context
from tunix_lite.basics.types import Metrics, TrainState
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
    params = learner.acting_params(state)
    policy = learner.policy
    with error_context("evaluation", RunFailed):
        # Collect as for an update.
        examples = task.held_out(run.loss_examples, is_learned=True)
        sample = sampler_for(run.algorithm)
        groups = sample(policy, task, params, examples, learner.seed_key)
        batch, collected = run.algorithm.batch_of(policy, task, params, examples, groups)

        # The sums of all parts, in float64.
        sums = {}
        for part in batch.parts(size):
            # what a teacher adds may be large
            if policy.compare is not None:
                part = policy.compare(part)
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
