"""How good is the policy: greedy completions of held-out prompts, graded by the task."""

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.errors import RunFailed, error_context
from tunix_lite.tasks.grading import FAILED
from tunix_lite.tasks.task import Task
from tunix_lite.types import Metrics, Params


def evaluate(
    policy: Policy, task: Task, params: Params, key: jax.Array, num_examples: int
) -> Metrics:
    """eval/accuracy and what goes with it, over the first `num_examples` of the held-out set."""
    examples = task.held_out(num_examples)
    grader = task.grader(examples)
    rollout = policy.generate(
        params, task.prompts(examples), key, 1, temperature=0.0, on_finished=grader.submit
    )
    with error_context("evaluation", RunFailed):
        graded = grader.results(rollout)
    return {
        "eval/accuracy": float(np.mean(graded.correct)),
        "eval/reward": graded.metrics["reward/mean"],
        "eval/failed_rewards": sum(graded.metrics[name] for name in FAILED),
        "eval/mean_length": float(np.asarray(rollout.completion_mask).sum(axis=1).mean()),
        "eval/truncated": float(1 - np.asarray(rollout.finished).mean()),
    }
