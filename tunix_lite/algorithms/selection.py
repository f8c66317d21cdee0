"""Selects the completions that are learned from: those of a group, and rows of what was sampled."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

from tunix_lite.algorithms.groups import Groups
from tunix_lite.types import Graded, Rollout


def selected(algorithm: Any, groups: Groups) -> Groups:
    """Applies the settings of algorithms.grpo.GRPO to groups: rewards as they are compared, and no
    weights where nothing is learned."""
    if algorithm.agreeing_groups == "drop":
        groups = groups.learning_from(~groups.agree[:, None])
    if algorithm.shaping is not None:
        groups = groups.with_reward("shaping", algorithm.shaping(groups.lengths))
    if algorithm.mask_truncated:
        finished_PG = np.asarray(groups.rollout.finished).reshape(groups.rewards_PG.shape)
        groups = groups.learning_from(finished_PG)
    return groups


def chosen_rows(parts: Sequence[Rollout], rows: np.ndarray) -> Rollout:
    """Selects rows number `rows` of all parts together, without their metrics."""
    bare = [part.replace(metrics={}) for part in parts]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[rows], *bare)


def chosen_completions(parts: Sequence[Graded], rows: np.ndarray) -> Graded:
    """Selects completions number `rows` of all parts together. Metrics and weights, which are no
    values of single completions, are those of the first part."""

    def chosen(values: list[Any]) -> Any:
        first = values[0]
        if first is None:
            return None
        if isinstance(first, Rollout):
            return chosen_rows(values, rows)
        if isinstance(first, dict):
            return {name: chosen([value[name] for value in values]) for name in first}
        if isinstance(first, list):
            together = [item for value in values for item in value]
            return [together[row] for row in rows] if together else []
        return np.concatenate(values)[rows]

    of_all = {"metrics", "weights", "num_generations"}
    names = {field.name for field in fields(Graded)} - of_all
    taken = {name: chosen([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **taken)
