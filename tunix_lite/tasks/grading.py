"""Metrics of grades: of rewards, of groups, of completions, and of what failed."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from tunix_lite.rewards.scores import Score
from tunix_lite.tasks.processes import SharedError
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
    outcomes: list[dict[str, Outcome]],
    kinds_BN: np.ndarray,
    unscorable_B: np.ndarray,
    groups: list[list[int]],
    first_failure: str,
    say: Callable[[str], None] | None,
) -> Metrics:
    """Returns the metrics of rewards, of what failed, and of groups; a line to `say` if a reward
    failed. Raises SharedError if all completions are dropped.

    outcomes: of all calls, as reward_calls.shared_outcomes returns them. kinds_BN, unscorable_B: as
    in reward_calls.dropped_of. groups: the rows of each. first_failure: of a reward or of an
    environment, in words.
    """
    kinds = Counter(kind for one in outcomes for kind, _ in one.values())
    counts = {metric: kinds[kind] for metric, kind in FAILED.items()}
    counts["rewards/dropped"] = int(graded.dropped.sum())
    if graded.dropped.all():
        raise SharedError(
            f"all {graded.dropped.size} completions were dropped; the first: {first_failure}"
        )
    if any(counts[metric] for metric in FAILED) and say is not None:
        failed = ", ".join(
            f"{metric.removeprefix('rewards/')} {number}"
            for metric, number in counts.items()
            if number
        )
        say(
            f"rewards that failed, of {graded.dropped.size} completions: {failed}; the first: "
            f"{first_failure}"
        )

    # What is no failure of a reward, but of a completion.
    values = [value for one in outcomes for kind, value in one.values() if not kind]
    values += [item for value in values if isinstance(value, list) for item in value]
    noted = Counter(value.kind for value in values if isinstance(value, Score))

    # A failed reward counts 0; one that skips a completion does not count there.
    kept_B = ~graded.dropped
    valid = graded.rewards[kept_B]
    metrics = {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std()),
        "reward/min": float(valid.min()),
        "reward/max": float(valid.max()),
    }
    for place, (name, values_B) in enumerate(graded.each.items()):
        counted = np.nan_to_num(values_B)[kept_B & (kinds_BN[:, place] != "skip")]
        metrics[f"reward/{name}"] = float(counted.mean()) if counted.size else 0.0
        metrics[f"reward/{name}_std"] = float(counted.std()) if counted.size else 0.0
    metrics |= counts | {"rewards/unscorable": int(unscorable_B.sum())}
    metrics |= {metric: noted[kind] for metric, kind in NOTED.items()}
    return metrics | group_metrics(graded.rewards, graded.dropped, groups)


def group_metrics(
    total_B: np.ndarray, dropped_B: np.ndarray, groups: list[list[int]]
) -> Metrics:
    """Returns the shares of groups that are worth 0 throughout, 1 throughout, and mixed, by the
    weighted sum as it was given. groups: the rows of each; dropped completions do not count."""
    totals = [total_B[rows][~dropped_B[rows]] for rows in groups]
    claims = {
        "reward/groups_all_zero": [one.size > 0 and bool((one == 0).all()) for one in totals],
        "reward/groups_all_one": [one.size > 0 and bool((one == 1).all()) for one in totals],
        "reward/groups_mixed": [one.size > 0 and bool(one.min() < one.max()) for one in totals],
    }
    return {name: float(np.mean(are_true)) for name, are_true in claims.items()}


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
