"""Evaluates the policy: greedy completions of held-out prompts, and samples, which the task grades.
No state changes, and samples have random numbers of their own: a run learns the same without it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.basics.errors import RunFailed, error_context
from tunix_lite.basics.types import Graded, Metrics, Params
from tunix_lite.distributed.host_memory import give_back_freed_memory
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import source
from tunix_lite.models.source import FoundModel
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.report.statistics import avg_at_k, maj_at_k, pass_at_k, powers_up_to
from tunix_lite.rewards.scores import field_of
from tunix_lite.rewards.similarity import similarity_scores
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.runs.setup import download_frozen
from tunix_lite.settings.config import RunConfig
from tunix_lite.tasks.grading import FAILED
from tunix_lite.tasks.reward_models import RewardScorer, ScoringModel
from tunix_lite.tasks.task import Task

# folded into the seed before the number of samples: a step of training folds in one number
_SAMPLES = 0xE7A1


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
    references: Sequence[str] | None = None,
) -> Evaluated:
    """Greedy completions of these held-out examples, and `num_samples` samples of each at
    `temperature`. key: of the run's seed; every evaluation of a run draws its samples with the same
    numbers, so two of them differ by the policy alone. progress: of `rollout_sizes`; None: nothing
    is said. references: a text for each example, which its greedy completion is compared with;
    None: nothing is. Raises RunFailed if a reward fails."""
    # An engine that is not ours may not know on_chunk.
    watched = {} if progress is None else {"on_chunk": progress.on_chunk}

    def graded(key: jax.Array | None, count: int, temperature: float) -> Graded:
        """`count` completions of each example, those of an example side by side."""
        # The cache and the prompts of the rollout before: their blocks may be too small for these.
        give_back_freed_memory()
        grader = task.grader(examples, count)
        prompts = task.prompts(examples)
        how = {
            "temperature": temperature,
            "on_finished": grader.submit,
            "partner": task.partner(examples, count),
            **watched,
        }
        with error_context("evaluation", RunFailed):
            return grader.results(policy.generate(params, prompts, key, count, **how))

    # Greedy, so that two evaluations differ by the weights alone.
    greedy = graded(key, 1, 0.0)
    of_greedy = greedy.metrics
    metrics = {
        "eval/accuracy": float(np.mean(greedy.correct)),
        "eval/reward": of_greedy["reward/mean"],
        "eval/failed_rewards": sum(of_greedy[name] for name in FAILED),
        "eval/mean_length": of_greedy["completions/mean_length"],
        "eval/truncated": of_greedy["completions/truncated"],
    }
    if references is not None:
        alike = similarity_scores(greedy.completions, references)
        for name in ("eval/exact_match", "eval/rouge_1", "eval/rouge_2", "eval/rouge_l"):
            metrics[name] = float(alike[name.removeprefix("eval/")].mean())
    if not num_samples:
        return Evaluated(metrics, greedy)
    k = num_samples
    key = jax.random.fold_in(jax.random.fold_in(key, _SAMPLES), k)
    sampled = graded(key, k, temperature)
    scores = _scores_of_samples(sampled, [k])
    metrics |= {
        f"eval/avg_at_{k}": float(scores[f"avg_at_{k}"].mean()),
        f"eval/pass_at_{k}": float(scores[f"pass_at_{k}"].mean()),
        f"eval/maj_at_{k}": float(scores[f"maj_at_{k}"].mean()),
        "eval/sampled_reward": sampled.metrics["reward/mean"],
        "eval/sampled_truncated": sampled.metrics["completions/truncated"],
    }
    return Evaluated(metrics, greedy, sampled)


def _scores_of_samples(sampled: Graded, counts: Sequence[int]) -> dict[str, np.ndarray]:
    """avg@N, maj@N, and pass@k for these counts, of N samples each: name -> [E] float64."""
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


def held_out_examples(
    run: RunConfig, tokenizer: Tokenizer, num_examples: int | None, reference: str | None
) -> tuple[Task, list[dict]]:
    """The run's task, and its first `num_examples` held-out examples; None: all of them. reference:
    as of Task.references. Raises ConfigError if there are fewer, if a prompt is too long, or if an
    example has no such field."""
    generation = run.generation
    task = Task(
        run.task,
        tokenizer,
        generation.max_prompt_length,
        generation.max_new_tokens,
        generation.long_prompts,
        learned=run.algorithm.needs.demonstrations,
    )
    if num_examples is None:
        num_examples = len(run.task.source.held_out)
    with error_context("task"):
        if not num_examples:
            raise ValueError("the held-out set has no examples")
        examples = task.held_out(num_examples)
        task.prompts(examples)
        with error_context(f"evaluate.reference={reference}", ValueError):
            for example in examples if reference is not None else ():
                field_of(example, reference)
    return task, examples


def with_reward_models(
    task: Task,
    scoring_models: dict[str, ScoringModel],
    located: dict[str, FoundModel],
    mesh: jax.sharding.Mesh,
    dtype: DTypeLike,
) -> Task:
    """The task with its reward models, loaded on devices of this mesh. Raises ConfigError."""
    scorers = {}
    for name, model in download_frozen(scoring_models, located).items():
        where, settings = scoring_models[name].where, scoring_models[name].reward
        with error_context(where):
            place = mesh
            if settings.mesh_shape is not None:
                place = make_mesh(settings.mesh_shape, list(mesh.devices.flat))
            source.check_mesh(model, place)
            with jax.set_mesh(place):
                params = source.load_base(model, 0, settings.storage)
            num_rows = settings.batch_size * place.shape["fsdp"]
            rows = RowLayout("none", 1, 1, num_rows=num_rows)
            policy = make_policy(model.cfg, None, 1.0, dtype, params, rows)
            scorer = policy.scorers["reference"]
            of_reward = RewardScorer.of(settings, task.text, model, scorer, num_rows)
        scorers[name.removeprefix("reward_")] = of_reward
    return replace(task, scorers=scorers)


def model_scores(
    evaluated: Evaluated, references: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """The scores of a model by name, [E] float64 each; nan where a reward failed."""
    # Of the greedy completions; truncated is 1 where one ran out of length.
    greedy = evaluated.greedy
    rollout = greedy.rollout
    scores = {
        "accuracy": greedy.correct.astype(np.float64),
        "reward": greedy.rewards,
        "length": rollout.completion_mask.sum(axis=1).astype(np.float64),
        "truncated": 1.0 - rollout.finished,
    }
    if references is not None:
        scores |= similarity_scores(greedy.completions, references)
    if (sampled := evaluated.sampled) is None:
        return scores

    # A dropped sample does not count; an example without samples has no reward.
    num = sampled.num_generations
    scores |= _scores_of_samples(sampled, powers_up_to(num))
    rewards_EN = sampled.rewards.reshape(-1, num)
    # a failed reward is no 0
    kept_EN = ~np.isnan(rewards_EN)
    total_E = np.where(kept_EN, rewards_EN, 0.0).sum(axis=1)
    count_E = kept_EN.sum(axis=1)
    scores["sampled_reward"] = np.where(count_E > 0, total_E / np.maximum(count_E, 1), np.nan)
    return scores
