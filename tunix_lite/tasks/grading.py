"""Outcomes of rewards as arrays, as metrics and in words."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from tunix_lite.rewards.pool import FAILURES, Outcome
from tunix_lite.rewards.scores import Score
from tunix_lite.tasks.processes import SharedError
from tunix_lite.tasks.reward_calls import RewardCalls
from tunix_lite.types import Metrics, Rollout

# a metric -> the kind of failure of which it counts the calls
FAILED = {
    "rewards/errors": "error",
    "rewards/timeouts": "timeout",
    "rewards/crashes": "crash",
    "rewards/not_numbers": "not_number",
}


# a metric -> the kind of Score (rewards.scores) of which it counts the calls
NOTED = {"rewards/no_answer": "no_answer", "rewards/stopped": "stopped"}


def values_of(outcomes: list[dict[str, Outcome]], name: str) -> np.ndarray:
    """What a function says of each completion, [B] float64; nan where it failed or said None."""
    found = (one[name] for one in outcomes)
    return np.array([np.nan if failed else value for failed, value in found], np.float64)


def texts_of(outcomes: list[dict[str, Outcome]], name: str) -> list[str | None]:
    """What a function reads out of each completion; None where it failed."""
    return [None if failed else value for failed, value in (one[name] for one in outcomes)]


def kinds_of(outcomes: list[dict[str, Outcome]], names: list[str]) -> np.ndarray:
    """The kind of each outcome ("": a value), [B, len(names)]."""
    return np.array([[one[name][0] for name in names] for one in outcomes])


def dropped_of(kinds_BN: np.ndarray, on_error: str) -> tuple[np.ndarray, np.ndarray]:
    """Which completions nothing is learned from, and which of those are unscorable; [B] bool.

    kinds_BN: of the outcomes of all rewards. A completion that every reward skips is unscorable.
    """
    unscorable_B = (kinds_BN == "unscorable").any(axis=1) | (kinds_BN == "skip").all(axis=1)
    failed_B = np.isin(kinds_BN, FAILURES).any(axis=1)
    return unscorable_B | (failed_B & (on_error == "drop")), unscorable_B


def reasons_of(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Why functions failed on a completion, or found no answer in it, by their names:
    {"reward 'near'": "error: ..."}."""
    reasons = {}
    for name, (kind, how) in outcomes.items():
        if kind:
            reasons[name] = f"{kind}: {how}" if how else kind
        elif isinstance(how, Score):
            reasons[name] = f"{how.kind}: {how.why}"
    return reasons


def reward_metrics(
    total_B: np.ndarray, each: dict[str, np.ndarray], kinds_BN: np.ndarray, dropped_B: np.ndarray
) -> Metrics:
    """Of the weighted sum and of each reward, over the completions that are kept. A failed reward
    counts 0; one that skips a completion does not count there."""
    kept_B = ~dropped_B
    means = {}
    for place, (name, values_B) in enumerate(each.items()):
        counted_B = kept_B & (kinds_BN[:, place] != "skip")
        counted = np.nan_to_num(values_B)[counted_B]
        means[f"reward/{name}"] = float(counted.mean()) if counted.size else 0.0
    return {
        "reward/mean": float(total_B[kept_B].mean()),
        "reward/std": float(total_B[kept_B].std()),
        **means,
    }


def failure_metrics(
    calls: RewardCalls,
    outcomes: list[dict[str, Outcome]],
    dropped_B: np.ndarray,
    unscorable_B: np.ndarray,
    say: Callable[[str], None] | None,
) -> Metrics:
    """How many calls failed in which way, and how many completions are dropped for it; a line to
    `say` if something failed. Raises SharedError if all are dropped.

    outcomes: of all calls, as RewardCalls.outcomes returns them.
    """
    kinds = Counter(kind for one in outcomes for kind, _ in one.values())
    counts = {metric: kinds[kind] for metric, kind in FAILED.items()}
    counts["rewards/dropped"] = int(dropped_B.sum())
    if dropped_B.all():
        first = calls.first_failure(outcomes)
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
    """How many are right, how long they are, and how many ran out of room."""
    lengths_B = np.asarray(rollout.completion_mask).sum(axis=1)
    return {
        "completions/correct": float(np.mean(right_B)),
        "completions/mean_length": float(lengths_B.mean()),
        "completions/max_length": int(lengths_B.max()),
        "completions/truncated": float(1 - np.asarray(rollout.finished).mean()),
    }


def with_full_prompts(examples: list[dict], rollout: Rollout) -> list[dict]:
    """The examples whose prompt fills its row: only such a prompt can have been cut."""
    full_B = np.asarray(rollout.token_mask)[:, 0]
    return [example for example, is_full in zip(examples, full_B) if is_full]
