"""Grades: the outcomes of rewards, collected from all processes, and the metrics of them."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import numpy as np

from tunix_lite.basics.types import FINISH, Graded, Metrics, Rollout
from tunix_lite.rewards.scores import Score, from_json
from tunix_lite.tasks.processes import Processes
from tunix_lite.workers.pool import FAILURES
from tunix_lite.workers.process import Outcome

# seconds between two checks whether the run is to end, while grades are waited for
LOOK_SECONDS = 0.2
# a metric -> the kind of failure of which it counts the calls
FAILED = {
    "rewards/errors": "error",
    "rewards/timeouts": "timeout",
    "rewards/crashes": "crash",
    "rewards/not_numbers": "not_number",
}
# a metric -> the kind of Score (rewards.scores) of which it counts the calls
NOTED = {
    "rewards/no_answer": "no_answer",
    "rewards/stopped": "stopped",
    "rewards/cut": "cut",
}


def shared_outcomes(
    futures: Sequence[Future | None],
    graded: str,
    processes: Processes,
) -> list[dict[str, Outcome]]:
    """Returns the outcome of each call, by whichever process. graded: a digest, which must be the
    same everywhere. Raises ValueError on all processes if one of them does."""
    own = [future for future in futures if future is not None]
    left = set(own)
    stops = False
    error = None
    while left and not stops:
        _, left = wait(left, timeout=LOOK_SECONDS, return_when=FIRST_EXCEPTION)
        # the first of those that failed, in the order of calls, without waiting for the others
        failed = [future for future in own if future.done() and future.exception()]
        if failed:
            try:
                failed[0].result()
            except ValueError as failure:
                error = str(failure)
            break
        stopping = processes.stopping
        stops = bool(left) and stopping is not None and stopping.is_requested()
    results = []
    if not left and not error:
        results = [future.result() for future in own]

    everyone = processes.exchange([results, graded], error, stops)
    processes.check_same(
        [graded for _, graded in everyone],
        "graded other prompts or completions than process 0: do all hosts have the same data "
        "files and the same tokenizer?",
    )
    count = len(everyone)
    # As `Processes` deals them out.
    results = [everyone[call % count][0][call // count] for call in range(len(futures))]
    return [
        {name: Outcome(kind, from_json(value)) for name, (kind, value) in one.items()}
        for one in results
    ]


def values_of(outcomes: list[dict[str, Outcome]], name: str) -> np.ndarray:
    """The value that a function gives each completion, [B] float64; nan where it failed."""
    values = []
    for of_completion in outcomes:
        kind, value = of_completion[name]
        values.append(np.nan if kind else value)
    return np.array(values, np.float64)


def dropped_of(kinds_BN: np.ndarray, on_error: str) -> tuple[np.ndarray, np.ndarray]:
    """Tells which completions nothing is learned from, and which of those are unscorable, as every
    reward skips them; [B] bool each. kinds_BN: of the outcomes of all rewards."""
    unscorable_B = (kinds_BN == "unscorable").any(axis=1) | (kinds_BN == "skip").all(axis=1)
    failed_B = np.isin(kinds_BN, FAILURES).any(axis=1)
    return unscorable_B | (failed_B & (on_error == "drop")), unscorable_B


def reasons_of(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Explains, by function, why it failed on a completion or found no answer in it."""
    reasons = {}
    for name, (kind, how) in outcomes.items():
        if kind:
            reasons[name] = f"{kind}: {how}" if how else kind
        elif isinstance(how, Score):
            reasons[name] = f"{how.kind}: {how.why}"
    return reasons


def call_metrics(calls: list[dict[str, Outcome]]) -> Metrics:
    """Counts the calls of functions that failed, and those that noted something."""
    kinds = Counter()
    noted = Counter()
    for outcomes in calls:
        for kind, value in outcomes.values():
            kinds[kind] += 1
            # of a function that gets a whole group, a list
            values = value if isinstance(value, list) else [value]
            if not kind:
                noted.update(each.kind for each in values if isinstance(each, Score))
    counts = {metric: kinds[kind] for metric, kind in FAILED.items()}
    return counts | {metric: noted[kind] for metric, kind in NOTED.items()}


def reward_metrics(graded: Graded, kinds_BN: np.ndarray, groups: list[list[int]]) -> Metrics:
    """Returns the metrics of rewards over the completions that count, and of groups. kinds_BN: as
    in dropped_of, in the order of graded.each. groups: the rows of each."""
    kept_B = ~graded.dropped
    valid = graded.rewards[kept_B]
    metrics = {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std()),
        "reward/min": float(valid.min()),
        "reward/max": float(valid.max()),
    }
    for place, (name, values_B) in enumerate(graded.each.items()):
        # a reward that failed counts 0; one that skips a completion does not count there
        counted = np.nan_to_num(values_B)[kept_B & (kinds_BN[:, place] != "skip")]
        if not counted.size:
            counted = np.zeros(1)
        metrics[f"reward/{name}"] = float(counted.mean())
        metrics[f"reward/{name}_std"] = float(counted.std())
    return metrics | group_metrics(graded.rewards, graded.dropped, groups)


def group_metrics(
    total_B: np.ndarray, dropped_B: np.ndarray, groups: list[list[int]]
) -> Metrics:
    """Returns the shares of groups that are worth 0 throughout, 1 throughout, mixed, and not mixed,
    by the weighted sum as it was given. groups: the rows of each; dropped completions do not
    count."""
    counts = Counter()
    for rows in groups:
        totals = total_B[rows][~dropped_B[rows]]
        if not totals.size:
            continue
        is_mixed = totals.min() < totals.max()
        counts["mixed" if is_mixed else float(totals[0])] += 1
    return {
        "reward/groups_all_zero": counts[0.0] / len(groups),
        "reward/groups_all_one": counts[1.0] / len(groups),
        "reward/groups_mixed": counts["mixed"] / len(groups),
        "reward/groups_that_agree": (len(groups) - counts["mixed"]) / len(groups),
    }


def completion_metrics(right_B: np.ndarray, rollout: Rollout) -> Metrics:
    """Returns metrics of how many completions are right, how long they are, and how they ended."""
    lengths_B = rollout.completion_mask.sum(axis=1)
    finished_B = rollout.finished
    ended_by_eos_B = rollout.finish == FINISH.index("eos")
    # Of those that ended by themselves; 0 where none did.
    ended = lengths_B[finished_B]
    if not ended.size:
        ended = np.zeros(1, lengths_B.dtype)
    return {
        "completions/correct": float(np.mean(right_B)),
        "completions/mean_length": float(lengths_B.mean()),
        "completions/min_length": int(lengths_B.min()),
        "completions/max_length": int(lengths_B.max()),
        "completions/truncated": float(1 - finished_B.mean()),
        "completions/eos": float(ended_by_eos_B.mean()),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": int(ended.min()),
        "completions/max_terminated_length": int(ended.max()),
    }
