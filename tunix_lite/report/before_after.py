"""The first and the last evaluation of a run, example by example: scores with their intervals, and
the examples that were improved or spoilt."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.report import statistics
from tunix_lite.report.evidence import Evidence, read_samples, sample_steps
from tunix_lite.report.statistics import Comparison, Estimate, estimate, wilson
from tunix_lite.tracking.rows import is_number

_LEVEL = 0.95
# of a bootstrap: a report is to be there in a second or two
_RESAMPLES = 2_000


@dataclass(frozen=True)
class Measured:
    """The completions of one evaluation: a greedy one of each example, and its samples.
    Example: `first_and_last(run)[-1].greedy[3]["correct"]`."""

    step: int
    # by the number of the example
    greedy: dict[int, dict]
    samples: dict[int, list[dict]]


@dataclass(frozen=True)
class ScoreChange:
    """A score before and after, and the change by example.
    Example: `scores(first_and_last(run))[0].change.better` examples were improved."""

    name: str
    before: Estimate
    after: Estimate
    change: Comparison


def first_and_last(run: Evidence) -> list[Measured]:
    """The evaluations that samples/ has: the first, and the last if it is another one."""
    steps = sample_steps(run.folder, "evaluation")
    measured = []
    for step in sorted({*steps[:1], *steps[-1:]}):
        greedy: dict[int, dict] = {}
        samples: dict[int, list[dict]] = {}
        for row in read_samples(run.folder, step, "evaluation", run.unread):
            group = row.get("group")
            if type(group) is not int or type(row.get("correct")) is not bool:
                continue
            if row.get("sampled") is True:
                samples.setdefault(group, []).append(row)
            else:
                greedy[group] = row

        # The file may be cut: an example counts with all of its samples, or not at all.
        most = max(map(len, samples.values()), default=0)
        whole = {group: rows for group, rows in samples.items() if len(rows) == most}
        if greedy:
            measured.append(Measured(step, greedy, whole))
    return measured


def scores(measured: list[Measured]) -> list[ScoreChange]:
    """All scores before and after, with their intervals; [] without two evaluations."""
    if len(measured) < 2:
        return []
    before, after = ends_by_name = [{}, {}]
    for one, by_name in zip(measured, ends_by_name):
        by_name["accuracy"] = {g: float(row["correct"]) for g, row in one.greedy.items()}
        if one.samples:
            correct_EN = np.array(
                [[row["correct"] for row in rows] for rows in one.samples.values()]
            )
            k = correct_EN.shape[1]
            for name, values_E in (
                (f"avg_at_{k}", statistics.avg_at_k(correct_EN)),
                (f"pass_at_{k}", statistics.pass_at_k(correct_EN, k)),
            ):
                by_name[name] = dict(zip(one.samples, values_E.tolist()))
        # a reward that failed is null, and counts in neither
        rewards = {g: row.get("reward") for g, row in one.greedy.items()}
        by_name["reward"] = {g: reward for g, reward in rewards.items() if is_number(reward)}
    changes = []
    for name in [name for name in before if name in after]:
        both = sorted(before[name].keys() & after[name].keys())
        if both:
            first_E, last_E = (np.array([x[name][g] for g in both]) for x in (before, after))
            change = statistics.compare(last_E, first_E, _LEVEL, _RESAMPLES)
            ends = []
            for values_E in (first_E, last_E):
                end = estimate(values_E, _LEVEL, _RESAMPLES)
                # a bootstrap takes an accuracy of 0 or 1 for certain
                if name == "accuracy" and values_E.min() == values_E.max():
                    end = wilson(float(values_E[0]), len(values_E))
                ends.append(end)
            changes.append(ScoreChange(name, *ends, change))
    return changes


def moved(before: Measured, after: Measured) -> dict[tuple[bool, bool], list[int]]:
    """By (was right, is right): the examples, in the order of the data. Only of the same prompt in
    both."""
    groups = {(was, now): [] for was in (False, True) for now in (False, True)}
    for group, row in before.greedy.items():
        other = after.greedy.get(group)
        if other is not None and other.get("prompt") == row.get("prompt"):
            groups[row["correct"], other["correct"]].append(group)
    return groups
