"""How good is the policy: greedy completions of held-out prompts, judged by the task."""

import numpy as np

from tunix_lite.errors import RunFailed, error_context
from tunix_lite.tasks.task import FAILED
from tunix_lite.types import Metrics


def evaluate(policy, task, params, key, num_examples: int) -> Metrics:
    """eval/accuracy and what goes with it, over the first `num_examples` of the held-out set."""
    examples = task.held_out(num_examples)
    judging = task.judging(examples)
    rollout = policy.generate(
        params, task.prompts(examples), key, 1, temperature=0.0, on_finished=judging.see
    )
    with error_context("evaluation", RunFailed):
        judged = judging.judged(rollout)
    return {
        "eval/accuracy": float(np.mean(judged.correct)),
        "eval/reward": judged.metrics["reward/mean"],
        "eval/failed_rewards": sum(judged.metrics[name] for name in FAILED),
        "eval/mean_length": float(np.asarray(rollout.completion_mask).sum(axis=1).mean()),
        "eval/truncated": float(1 - np.asarray(rollout.finished).mean()),
    }
