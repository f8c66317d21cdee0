"""The scores of a model on a task, one number of each example: `tunix-lite evaluate` computes its
tables from them."""

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.config import RunConfig
from tunix_lite.errors import error_context
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.report.statistics import powers_up_to
from tunix_lite.rewards.scores import field_of
from tunix_lite.rewards.similarity import rouge_scores
from tunix_lite.runs.evaluate import Evaluated, evaluate, scores_of_samples
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.tasks.task import Task
from tunix_lite.types import Params


def held_out_examples(
    run: RunConfig, tokenizer: Tokenizer, num_examples: int | None, reference: str | None
) -> tuple[Task, list[dict]]:
    """The run's task, and its first `num_examples` held-out examples; None: all of them. reference:
    the field of an example that ROUGE compares with; None: no ROUGE. Raises ConfigError if there
    are fewer, if a prompt is too long, or if an example has no such field."""
    generation = run.generation
    task = Task(
        run.task,
        tokenizer,
        generation.max_prompt_length,
        generation.max_new_tokens,
        generation.long_prompts,
    )
    if num_examples is None:
        num_examples = len(run.task.source.held_out)
    with error_context("task"):
        if not num_examples:
            raise ValueError("the held-out set has no examples")
        examples = task.held_out(num_examples)
        task.prompts(examples)
        for example in examples if reference is not None else ():
            try:
                field_of(example, reference)
            except ValueError as error:
                raise ValueError(f"evaluate.reference={reference}: {error}") from error
    return task, examples


def model_scores(
    policy: Policy,
    params: Params,
    task: Task,
    examples: list[dict],
    seed: int,
    num_samples: int,
    temperature: float,
    reference: str | None,
    progress: SamplingProgress,
) -> tuple[Evaluated, dict[str, np.ndarray]]:
    """The completions of a model, and its scores by name, [E] float64 each: one number an example.
    A reward that failed makes nan. The completions are those of an evaluation of a run with this
    seed. Raises RunFailed if a reward fails and rewards.on_error=raise."""
    evaluated = evaluate(
        policy,
        task,
        params,
        examples,
        jax.random.key(seed),
        num_samples,
        temperature,
        progress,
    )
    # Of the greedy completions; truncated is 1 where one ran out of length.
    greedy = evaluated.greedy
    rollout = greedy.rollout
    scores = {
        "accuracy": greedy.correct.astype(np.float64),
        "reward": greedy.rewards,
        "length": np.asarray(rollout.completion_mask).sum(axis=1).astype(np.float64),
        "truncated": 1.0 - np.asarray(rollout.finished),
    }
    if reference is not None:
        references = [str(example[reference]) for example in examples]
        scores |= rouge_scores(greedy.completions, references)
    if (sampled := evaluated.sampled) is None:
        return evaluated, scores

    # Of the samples.
    scores |= scores_of_samples(sampled, powers_up_to(num_samples))

    # A dropped sample does not count; an example without samples has no reward.
    rewards_EN = sampled.rewards.reshape(-1, num_samples)
    kept_EN = ~np.isnan(rewards_EN)
    total_E = np.where(kept_EN, rewards_EN, 0.0).sum(axis=1)
    count_E = kept_EN.sum(axis=1)
    scores["sampled_reward"] = np.where(count_E > 0, total_E / np.maximum(count_E, 1), np.nan)
    return evaluated, scores
