"""Rules of overlap: the groups that an update takes where rollouts overlap with learning.

Rollouts are counted from 0 here; with algorithm.updates_per_rollout=1 they are updates."""

from collections.abc import Sequence

import numpy as np

from tunix_lite.config import RunConfig


def groups_to_take(
    oldest: Sequence[int],
    is_whole: Sequence[bool],
    count: int,
    now: int,
    staleness: int,
) -> list[int] | None:
    """The places of `count` whole groups that rollout `now` hands out; None: more must end first.

    oldest: the rollout in which each group began, `now` for those that had not begun. Those that
    began first are taken first. Enough of the older ones must be among them that none of what stays
    can become older than `staleness` rollouts; with at most count * (staleness + 1) groups in
    flight that is always possible."""
    began = np.asarray(oldest)
    whole = np.flatnonzero(is_whole)
    if len(whole) < count:
        return None
    taken = whole[np.argsort(began[whole], kind="stable")][:count]
    for later in range(staleness):
        # those that no rollout after now + later may take
        due = began + staleness <= now + later
        if due[taken].sum() < due.sum() - count * later:
            return None
    return sorted(taken.tolist())


def overlap_words(run: RunConfig, num_prompts: int) -> str:
    """Describes rollout.overlap of this run, for its panel."""
    rollout = run.rollout
    if rollout.overlap == "one_step":
        return "one_step: the next batch is sampled beside the update"
    in_flight = num_prompts * (rollouts_behind(run) + 1)
    return (
        f"carry: {in_flight} prompts in flight, {num_prompts} an update; tokens are up to "
        f"{rollout.max_staleness} updates old"
    )


def rollouts_behind(run: RunConfig) -> int:
    """The most rollouts that a token may be older than the update that learns from it."""
    return run.rollout.max_staleness // run.algorithm.updates_per_rollout
