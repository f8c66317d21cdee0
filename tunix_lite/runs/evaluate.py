"""Evaluates the policy: samples completions of held-out prompts, which the task grades.

Greedy completions say what the policy answers, samples how often it is right: avg@k and pass@k
climb where the greedy answer has long been found. Nothing here changes a state, and samples have
random numbers of their own, so a run learns the same with and without its evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy, who_answers
from tunix_lite.errors import RunFailed, error_context
from tunix_lite.report.statistics import avg_at_k, maj_at_k, pass_at_k
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.tasks.grading import FAILED
from tunix_lite.tasks.task import Task
from tunix_lite.types import Graded, Metrics, Params

# folded into the seed before the number of samples: a step of training folds in one number
SAMPLES = 0xE7A1


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: its numbers, and the graded completions that they are computed of. Example: 2
    examples, num_samples=4 -> 2 greedy completions and 8 sampled ones, those of an example side by
    side."""

    metrics: Metrics
    greedy: Graded
    # None: nothing was sampled
    sampled: Graded | None = None


def evaluate(
    policy: Policy,
    task: Task,
    params: Params,
    examples: list[dict],
    key: jax.Array | None,
    num_samples: int = 0,
    temperature: float = 1.0,
    progress: SamplingProgress | None = None,
) -> Evaluated:
    """Greedy completions of these held-out examples, and `num_samples` samples of each at
    `temperature`. key: of the run's seed; every evaluation of a run draws its samples with the same
    numbers, so two of them differ by the policy alone. progress: of `rollout_sizes`; None: nothing
    is said. Raises RunFailed if a reward fails."""
    greedy = _complete_and_grade(policy, task, params, examples, key, progress=progress)
    of_greedy = greedy.metrics
    metrics = {
        "eval/accuracy": float(np.mean(greedy.correct)),
        "eval/reward": of_greedy["reward/mean"],
        "eval/failed_rewards": sum(of_greedy[name] for name in FAILED),
        "eval/mean_length": of_greedy["completions/mean_length"],
        "eval/truncated": of_greedy["completions/truncated"],
    }
    if not num_samples:
        return Evaluated(metrics, greedy)
    k = num_samples
    key = jax.random.fold_in(jax.random.fold_in(key, SAMPLES), k)
    sampled = _complete_and_grade(
        policy, task, params, examples, key, k, temperature, progress
    )
    scores = scores_of_samples(sampled, [k])
    metrics |= {f"eval/{name}": float(score_E.mean()) for name, score_E in scores.items()}
    metrics |= {
        "eval/sampled_reward": sampled.metrics["reward/mean"],
        "eval/sampled_truncated": sampled.metrics["completions/truncated"],
    }
    return Evaluated(metrics, greedy, sampled)


def scores_of_samples(sampled: Graded, counts: Sequence[int]) -> dict[str, np.ndarray]:
    """avg@N, pass@k for these counts and maj@N of N samples an example, by name, [E] float64
    each."""
    num = sampled.num_generations
    correct_EN = sampled.correct.reshape(-1, num)
    texts = sampled.extracted
    extracted = [texts[row : row + num] for row in range(0, len(texts), num)]
    return {
        f"avg_at_{num}": avg_at_k(correct_EN),
        **{f"pass_at_{k}": pass_at_k(correct_EN, k) for k in counts},
        f"maj_at_{num}": maj_at_k(extracted, correct_EN),
    }


def rollout_sizes(num_examples: int, num_samples: int) -> list[int]:
    """Returns the completions of each rollout of an evaluation: first greedy ones, then samples."""
    return [num_examples, num_examples * num_samples] if num_samples else [num_examples]


def _complete_and_grade(
    policy: Policy,
    task: Task,
    params: Params,
    examples: list[dict],
    key: jax.Array,
    num_samples: int = 1,
    temperature: float = 0.0,
    progress: SamplingProgress | None = None,
) -> Graded:
    """Grades `num_samples` completions of each example, those of an example side by side. Raises
    RunFailed if a reward fails."""
    repeated = [example for example in examples for _ in range(num_samples)]
    grader = task.grader(repeated, num_samples)
    prompts = task.prompts(examples)
    # An engine that is not ours may not know on_chunk.
    watched = {} if progress is None else {"on_chunk": progress.on_chunk}
    with error_context("evaluation", RunFailed):
        rollout = policy.generate(
            params,
            prompts,
            key,
            num_samples,
            temperature=temperature,
            on_finished=grader.submit,
            **watched,
            **who_answers(task, repeated),
        )
        return grader.results(rollout)
