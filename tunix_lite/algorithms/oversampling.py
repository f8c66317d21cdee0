"""Replaces groups whose completions all have one reward, and teach nothing, by groups of other
prompts (dynamic sampling, DAPO, arXiv:2503.14476).

Prompts are drawn round by round, P at a time, until P groups are mixed or the rounds are used up.
What a round draws depends on seed and step alone.
"""

import time
from dataclasses import replace

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy, TaskInterface
from tunix_lite.algorithms.groups import Groups, sample_groups
from tunix_lite.algorithms.selection import chosen_completions, chosen_rows
from tunix_lite.types import Metrics, Params

# the keys of further rounds; sampling folds the number of a prompt into the key that it gets
ROUNDS = 0xD4A90


def sample_mixed_groups(
    policy: Policy,
    task: TaskInterface,
    params: Params,
    examples: list[dict],
    key: jax.Array,
    num_generations: int,
    max_rounds: int,
) -> Groups:
    """P mixed groups; their metrics are of all completions that were sampled for them.

    examples: P for each of `max_rounds` rounds, one after the other. If they hold too few mixed
    groups, the first others fill the batch, and nothing is learned from them. A group is mixed by
    the rewards of the task, with nothing added.
    """
    num_prompts = len(examples) // max_rounds
    began = time.perf_counter()
    seconds = []
    rounds: list[Groups] = []
    for r in range(max_rounds):
        drawn = examples[r * num_prompts : (r + 1) * num_prompts]
        round_key = jax.random.fold_in(jax.random.fold_in(key, ROUNDS), r) if r else key
        rounds.append(sample_groups(policy, task, params, drawn, round_key, num_generations))
        seconds.append(time.perf_counter() - began)
        if sum((~groups.agree).sum() for groups in rounds) >= num_prompts:
            break

    # the first P that are mixed, then as many others as are missing, in the order of drawing
    is_mixed = ~np.concatenate([groups.agree for groups in rounds])
    first_mixed = np.flatnonzero(is_mixed)[:num_prompts]
    fillers = np.flatnonzero(~is_mixed)[: num_prompts - len(first_mixed)]
    chosen = np.sort(np.concatenate([first_mixed, fillers]))
    groups = _chosen_groups(rounds, chosen).learning_from(is_mixed[chosen][:, None])
    metrics = metrics_of_rounds(rounds) | {
        "prompts/drawn": len(is_mixed),
        "prompts/mixed": int(is_mixed.sum()),
        "prompts/kept": len(first_mixed),
        "time/extra_rounds": seconds[-1] - seconds[0],
    }
    return replace(groups, of_all=metrics)


def metrics_of_rounds(rounds: list[Groups]) -> Metrics:
    """The metrics of all completions of all rounds, kept or not.

    Every round has as many completions, so that a mean is the mean of theirs; seconds and counts
    are summed, of a maximum or minimum it is the largest or smallest.
    """
    by_round = [groups.metrics for groups in rounds]
    names = [name for name in by_round[0] if all(name in one for one in by_round)]
    merged = {name: _merged(name, [one[name] for one in by_round]) for name in names}
    rewards = np.concatenate([groups.rewards_PG[groups.kept_PG] for groups in rounds])
    return merged | {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}


def _merged(name: str, values: list[float]) -> float:
    part, _, rest = name.partition("/")
    if part in ("time", "rewards", "prompts"):
        return sum(values)
    if rest.startswith("max"):
        return max(values)
    if rest.startswith("min"):
        return min(values)
    return sum(values) / len(values)


def _chosen_groups(rounds: list[Groups], chosen: np.ndarray) -> Groups:
    """Groups number `chosen` of all rounds, as if they had been sampled together."""
    G = rounds[0].rewards_PG.shape[1]
    rows = (chosen[:, None] * G + np.arange(G)).reshape(-1)
    kept_PG = np.concatenate([groups.kept_PG for groups in rounds])[chosen]
    return Groups(
        rollout=chosen_rows([groups.rollout for groups in rounds], rows),
        graded=chosen_completions([groups.graded for groups in rounds], rows),
        rewards_PG=np.concatenate([groups.rewards_PG for groups in rounds])[chosen],
        kept_PG=kept_PG,
        learned_PG=np.concatenate([groups.learned_PG for groups in rounds])[chosen],
        credit=rounds[0].credit,
    )
