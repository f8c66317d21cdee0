"""Sampling of what an algorithm learns from: G completions for each prompt, graded."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Algorithm, Policy, TaskInterface
from tunix_lite.algorithms.groups import Groups
from tunix_lite.basics.types import Graded, Params, Rollout, policy_part

# folded into the key of further rounds; sampling folds the number of a prompt into the key that it
# gets
ROUNDS = 0xD4A90


def sampler_for(algorithm: Algorithm) -> Callable[..., Groups | None]:
    """How the run samples for an algorithm: (policy, task, params, examples, key) -> Groups, or
    None for one that learns from demonstrations. examples: P rows of data; with `needs.rounds`, P
    of each round."""
    needs = algorithm.needs
    if not needs.is_sampled:
        return lambda *_: None
    settings = {"num_generations": algorithm.num_generations}
    if needs.rounds > 1:
        return partial(sample_mixed_groups, **settings, max_rounds=needs.rounds)
    return partial(sample_groups, **settings)


def sample_groups(
    policy: Policy,
    task: TaskInterface,
    params: Params,
    examples: list[dict],
    key: jax.Array,
    num_generations: int,
) -> Groups:
    """Samples `num_generations` completions for each example and grades them.

    A completion is graded as soon as it ends, while others are still sampled. params: the current
    weights, adapters attached. key: of this step's sampling. Raises what sampling
    raises, and ValueError where a reward fails and rewards.on_error=raise.
    Example: sample_groups(policy, task, params, task.batch(16, seed, step), key, 8)."""
    # The grader is there before sampling starts: rewards run while other completions are sampled.
    grader = task.grader(examples, num_generations)
    rollout = policy.generate(
        policy_part(params),
        task.prompts(examples),
        key,
        num_generations,
        on_finished=grader.submit,
        partner=task.partner(examples, num_generations),
    )
    return Groups.of(rollout, grader.results(rollout), num_generations)


def sample_mixed_groups(
    policy: Policy,
    task: TaskInterface,
    params: Params,
    examples: list[dict],
    key: jax.Array,
    num_generations: int,
    max_rounds: int,
) -> Groups:
    """P groups whose rewards differ: one that agrees teaches nothing, and one of another prompt
    replaces it (dynamic sampling, DAPO, arXiv:2503.14476). Metrics are of all that were sampled.

    examples: P for each of `max_rounds` rounds, one after the other. If they hold too few mixed
    groups, the first others fill the batch, and nothing is learned from them. A group is judged by
    the rewards of the task, with nothing added."""
    num_prompts = len(examples) // max_rounds
    ends = []
    rounds: list[Groups] = []
    for r in range(max_rounds):
        drawn = examples[r * num_prompts : (r + 1) * num_prompts]
        # the first round draws what a run that replaces no group draws
        round_key = jax.random.fold_in(jax.random.fold_in(key, ROUNDS), r) if r else key
        rounds.append(sample_groups(policy, task, params, drawn, round_key, num_generations))
        ends.append(time.perf_counter())
        if sum((~groups.agree).sum() for groups in rounds) >= num_prompts:
            break

    # the first P that are mixed, then as many others as are missing, in the order of drawing
    is_mixed = ~np.concatenate([groups.agree for groups in rounds])
    chosen = np.sort(np.argsort(~is_mixed, kind="stable")[:num_prompts])
    rows = (chosen[:, None] * num_generations + np.arange(num_generations)).reshape(-1)
    rewards_PG = np.concatenate([groups.rewards_PG for groups in rounds])
    learned_PG = np.concatenate([groups.learned_PG for groups in rounds])

    # Every round has as many completions, so the mean of a metric is the mean of its means; seconds
    # and counts are summed.
    metrics = {}
    by_round = [groups.metrics for groups in rounds]
    for name in by_round[0]:
        values = [one[name] for one in by_round if name in one]
        part, _, rest = name.partition("/")
        # a metric that only some rounds have would be a mean of few
        if len(values) < len(rounds):
            continue
        if part in ("time", "rewards", "prompts"):
            metrics[name] = sum(values)
        elif rest.startswith(("max", "min")):
            metrics[name] = max(values) if rest.startswith("max") else min(values)
        else:
            metrics[name] = sum(values) / len(values)
    rewards = rewards_PG[~np.isnan(rewards_PG)]
    metrics |= {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "prompts/drawn": len(is_mixed),
        "prompts/mixed": int(is_mixed.sum()),
        "prompts/kept": int(is_mixed[chosen].sum()),
        "time/extra_rounds": ends[-1] - ends[0],
    }
    return Groups(
        rollout=_chosen_rows([groups.rollout for groups in rounds], rows),
        graded=chosen_completions([groups.graded for groups in rounds], rows),
        rewards_PG=rewards_PG[chosen],
        learned_PG=learned_PG[chosen] & is_mixed[chosen][:, None],
        metrics=metrics,
    )


def _chosen_rows(parts: Sequence[Rollout], rows: np.ndarray) -> Rollout:
    """Selects rows number `rows` of all parts together, without their metrics."""
    bare = [part.replace(metrics={}) for part in parts]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[rows], *bare)


def chosen_completions(parts: Sequence[Graded], rows: np.ndarray) -> Graded:
    """Selects completions number `rows` of all parts together. Metrics and weights are those of the
    first part."""

    def chosen(*values: np.ndarray | list) -> np.ndarray | list:
        if isinstance(values[0], list):
            together = list(itertools.chain(*values))
            if not together:
                return []
            return [together[row] for row in rows]
        return np.concatenate(values)[rows]

    # these are of the batch, and not of a completion
    of_all = {"metrics", "weights", "num_generations", "rollout", "turn_discount"}
    names = {field.name for field in fields(Graded)} - of_all
    of_each = [{name: getattr(part, name) for name in names} for part in parts]
    taken = jax.tree.map(chosen, *of_each, is_leaf=lambda x: isinstance(x, list))
    if parts[0].rollout is not None:
        taken["rollout"] = _chosen_rows([part.rollout for part in parts], rows)
    return replace(parts[0], **taken)
