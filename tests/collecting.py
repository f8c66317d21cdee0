"""A step's collecting: what an algorithm learns from, sampled, and its batch."""

import jax

from tunix_lite.algorithms.algorithm import Algorithm, Policy
from tunix_lite.algorithms.sampling import sampler_for
from tunix_lite.basics.types import Batch, Graded, Metrics, Params, RowBatch


def collect(
    algorithm: Algorithm, policy: Policy, task: object, params: Params, examples: list[dict], key: jax.Array | None
) -> tuple[Batch, Metrics, Graded | None]:
    """The batch, its metrics and the graded completions, as a run makes them."""
    groups = sampler_for(algorithm)(policy, task, params or {}, examples, key)
    batch, metrics = algorithm.batch_of(policy, task, params, examples, groups)
    return batch, metrics, None if groups is None else groups.graded


def as_rows(batch: Batch) -> RowBatch:
    """The sequences as they are."""
    return RowBatch(**{name: value for name, value in vars(batch).items() if name != "seen"})
