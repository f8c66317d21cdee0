"""Metrics of grades: of rewards, of groups, of completions, and of what failed."""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from tunix_lite.rewards.scores import Score
from tunix_lite.tasks.processes import SharedError
from tunix_lite.tasks.reward_calls import RewardCalls
from tunix_lite.types import FINISH, Graded, Metrics, Rollout
from tunix_lite.workers.process import Outcome

# a metric -> the kind of failure of which it counts the calls
FAILED = {
    "rewards/errors": "error",
    "rewards/timeouts": "timeout",
    "rewards/crashes": "crash",
    "rewards/not_numbers": "not_number",
}


# a metric -> the kind of Score (rewards.scores) of which it counts the calls
NOTED = {"rewards/no_answer": "no_answer", "rewards/stopped": "stopped"}


def grade_metrics(
    graded: Graded,
    calls: RewardCalls,
    of_calls: list[dict[str, Outcome]],
    kinds_BN: np.ndarray,
    unscorable_B: np.ndarray,
    say: Callable[[str], None] | None,
    failed_environment: str = "",
) -> Metrics:
    """Returns the metrics of rewards, of what failed, and of groups. Raises SharedError if all
    completions are dropped.

    of_calls: as RewardCalls.outcomes returns them. kinds_BN, unscorable_B: as in
    reward_calls.dropped_of. say, failed_environment: as in `failure_metrics`.
    """
    dropped_B = graded.dropped
    failures = failure_metrics(calls, of_calls, dropped_B, unscorable_B, say, failed_environment)
    metrics = reward_metrics(graded.rewards, graded.each, kinds_BN, dropped_B) | failures
    return metrics | group_metrics(graded.rewards, dropped_B, calls.groups)


def reward_metrics(
    total_B: np.ndarray, each: dict[str, np.ndarray], kinds_BN: np.ndarray, dropped_B: np.ndarray
) -> Metrics:
    """Returns the metrics of the weighted sum and of each reward, over completions that are not
    dropped. A failed reward counts 0; one that skips a completion does not count there."""
    kept_B = ~dropped_B
    metrics = {
        "reward/mean": float(total_B[kept_B].mean()),
        "reward/std": float(total_B[kept_B].std()),
        "reward/min": float(total_B[kept_B].min()),
        "reward/max": float(total_B[kept_B].max()),
    }
    for place, (name, values_B) in enumerate(each.items()):
        counted_B = kept_B & (kinds_BN[:, place] != "skip")
        counted = np.nan_to_num(values_B)[counted_B]
        metrics[f"reward/{name}"] = float(counted.mean()) if counted.size else 0.0
        metrics[f"reward/{name}_std"] = float(counted.std()) if counted.size else 0.0
    return metrics


def group_metrics(total_B: np.ndarray, dropped_B: np.ndarray, groups: list[list[int]]) -> Metrics:
    """Returns the shares of groups that are worth 0 throughout, 1 throughout, and mixed, by the
    weighted sum as it was given. groups: the rows of each; dropped completions do not count."""
    totals = [total_B[rows][~dropped_B[rows]] for rows in groups]
    return {
        "reward/groups_all_zero": _share(len(one) > 0 and (one == 0).all() for one in totals),
        "reward/groups_all_one": _share(len(one) > 0 and (one == 1).all() for one in totals),
        "reward/groups_mixed": _share(len(one) > 0 and one.min() < one.max() for one in totals),
    }


def _share(claims: Iterable[bool]) -> float:
    return float(np.mean([bool(claim) for claim in claims]))


def failure_metrics(
    calls: RewardCalls,
    outcomes: list[dict[str, Outcome]],
    dropped_B: np.ndarray,
    unscorable_B: np.ndarray,
    say: Callable[[str], None] | None,
    failed_environment: str = "",
) -> Metrics:
    """Counts the calls that failed in each way, and the completions that are dropped for it; a line
    to `say` if something failed. Raises SharedError if all are dropped.

    outcomes: of all calls, as RewardCalls.outcomes returns them. failed_environment: how the first
    environment failed, in words.
    """
    kinds = Counter(kind for one in outcomes for kind, _ in one.values())
    counts = {metric: kinds[kind] for metric, kind in FAILED.items()}
    counts["rewards/dropped"] = int(dropped_B.sum())
    if dropped_B.all():
        first = calls.first_failure(outcomes) or failed_environment
        raise SharedError(f"all {len(dropped_B)} completions were dropped; the first: {first}")
    if any(counts[metric] for metric in FAILED) and say is not None:
        first = calls.first_failure(outcomes)
        failed = ", ".join(
            f"{metric.removeprefix('rewards/')} {number}"
            for metric, number in counts.items()
            if number
        )
        say(f"rewards that failed, of {len(dropped_B)} completions: {failed}; the first: {first}")

    # What is no failure of a reward, but of a completion.
    values = [value for one in outcomes for kind, value in one.values() if not kind]
    values += [item for value in values if isinstance(value, list) for item in value]
    noted = Counter(value.kind for value in values if isinstance(value, Score))
    noted_counts = {metric: noted[kind] for metric, kind in NOTED.items()}
    return counts | {"rewards/unscorable": int(unscorable_B.sum())} | noted_counts


def completion_metrics(right_B: np.ndarray, rollout: Rollout) -> Metrics:
    """Returns metrics of how many completions are right, how long they are, and how they ended."""
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
    """Returns how long the run waited for rewards, and how long the calls of this process took.

    of_calls: seconds of each call of a function.
    """
    metrics = {"time/rewards": seconds}
    if of_calls:
        median, slow = np.percentile(of_calls, [50, 99])
        metrics |= {"time/reward_p50": float(median), "time/reward_p99": float(slow)}
    return metrics


def with_full_prompts(
    examples: list[dict], rollout: Rollout, num_generations: int = 1
) -> list[dict]:
    """Selects the examples whose prompt fills its row, one of each group: only such a prompt can
    have been cut."""
    full_P = np.asarray(rollout.token_mask)[::num_generations, 0]
    return [example for example, is_full in zip(examples[::num_generations], full_P) if is_full]
