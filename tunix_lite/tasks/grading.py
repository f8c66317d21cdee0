"""Outcomes of rewards as arrays, as metrics and in words."""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from tunix_lite.rewards.pool import Outcome
from tunix_lite.tasks.processes import SharedError
from tunix_lite.tasks.reward_calls import RewardCalls
from tunix_lite.types import FINISH, Metrics, Rollout

# a metric -> the kind of failure of which it counts the calls
FAILED = {
    "rewards/errors": "error",
    "rewards/timeouts": "timeout",
    "rewards/crashes": "crash",
    "rewards/not_numbers": "not_number",
}


def values_of(outcomes: list[dict[str, Outcome]], name: str) -> np.ndarray:
    """What a function says of each completion, [B] float64; nan where it failed."""
    found = (one[name] for one in outcomes)
    return np.array([np.nan if failed else value for failed, value in found], np.float64)


def texts_of(outcomes: list[dict[str, Outcome]], name: str) -> list[str | None]:
    """What a function reads out of each completion; None where it failed."""
    return [None if failed else value for failed, value in (one[name] for one in outcomes)]


def reasons_of(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Why functions failed on a completion, by their names: {"reward 'near'": "error: ..."}."""
    return {
        name: f"{kind}: {how}" if how else kind for name, (kind, how) in outcomes.items() if kind
    }


def reward_metrics(
    total_B: np.ndarray, each: dict[str, np.ndarray], dropped_B: np.ndarray
) -> Metrics:
    """Of the weighted sum and of each reward, over the completions that are kept. A failed reward
    counts 0."""
    kept_B = ~dropped_B
    metrics = {
        "reward/mean": float(total_B[kept_B].mean()),
        "reward/std": float(total_B[kept_B].std()),
        "reward/min": float(total_B[kept_B].min()),
        "reward/max": float(total_B[kept_B].max()),
    }
    for name, values_B in each.items():
        counted_B = np.nan_to_num(values_B)[kept_B]
        metrics[f"reward/{name}"] = float(counted_B.mean())
        metrics[f"reward/{name}_std"] = float(counted_B.std())
    return metrics


def group_metrics(total_B: np.ndarray, dropped_B: np.ndarray, groups: list[list[int]]) -> Metrics:
    """What share of groups are worth 0 throughout, 1 throughout, and mixed: the weighted sum as it
    was given. groups: the rows of each; dropped completions do not count."""
    kept = [total_B[rows][~dropped_B[rows]] for rows in groups]
    return {
        "reward/groups_all_zero": _share(len(one) > 0 and (one == 0).all() for one in kept),
        "reward/groups_all_one": _share(len(one) > 0 and (one == 1).all() for one in kept),
        "reward/groups_mixed": _share(len(one) > 0 and one.min() < one.max() for one in kept),
    }


def _share(claims: Iterable[bool]) -> float:
    return float(np.mean([bool(claim) for claim in claims]))


def failure_metrics(
    calls: RewardCalls,
    outcomes: list[dict[str, Outcome]],
    dropped_B: np.ndarray,
    say: Callable[[str], None] | None,
) -> Metrics:
    """How many calls failed in which way, and how many completions are dropped for it; a line to
    `say` if there is anything. Raises SharedError if all are dropped.

    outcomes: of all calls, as RewardCalls.outcomes returns them.
    """
    kinds = Counter(kind for one in outcomes for kind, _ in one.values())
    counts = {metric: kinds[kind] for metric, kind in FAILED.items()}
    counts["rewards/dropped"] = int(dropped_B.sum())
    if not any(counts.values()):
        return counts
    first = calls.first_failure(outcomes)
    if dropped_B.all():
        raise SharedError(f"all {len(dropped_B)} completions were dropped; the first: {first}")
    if say is not None:
        failed = ", ".join(
            f"{metric.removeprefix('rewards/')} {number}"
            for metric, number in counts.items()
            if number
        )
        say(f"rewards that failed, of {len(dropped_B)} completions: {failed}; the first: {first}")
    return counts


def completion_metrics(right_B: np.ndarray, rollout: Rollout) -> Metrics:
    """How many are right, how long they are, and how they ended."""
    lengths_B = np.asarray(rollout.completion_mask).sum(axis=1)
    finished_B = np.asarray(rollout.finished)
    # Of those that ended by themselves; 0 where none did.
    ended = lengths_B[finished_B] if finished_B.any() else np.zeros(1, lengths_B.dtype)
    return {
        "completions/correct": float(np.mean(right_B)),
        "completions/mean_length": float(lengths_B.mean()),
        "completions/min_length": int(lengths_B.min()),
        "completions/max_length": int(lengths_B.max()),
        "completions/truncated": float(1 - finished_B.mean()),
        "completions/eos": float(np.mean(np.asarray(rollout.finish) == FINISH.index("eos"))),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": int(ended.min()),
        "completions/max_terminated_length": int(ended.max()),
    }


def time_metrics(seconds: float, of_calls: list[float]) -> Metrics:
    """Of rewards: how long the run waited for them, and how long calls took that this process made.

    of_calls: seconds of each call of a function.
    """
    metrics = {"time/rewards": seconds}
    if of_calls:
        median, slow = np.percentile(of_calls, [50, 99])
        metrics |= {"time/reward_p50": float(median), "time/reward_p99": float(slow)}
    return metrics


def with_full_prompts(examples: list[dict], rollout: Rollout) -> list[dict]:
    """The examples whose prompt fills its row: only such a prompt can have been cut."""
    full_B = np.asarray(rollout.token_mask)[:, 0]
    return [example for example, is_full in zip(examples, full_B) if is_full]
