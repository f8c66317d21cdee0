"""The first and the last evaluation of a run, example by example: scores with their intervals, and
the examples that were improved or spoilt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunix_lite.evaluation.statistics import (
    Comparison,
    Estimate,
    avg_at_k,
    compare,
    estimate,
    maj_at_k,
    pass_at_k,
    wilson,
)
from tunix_lite.plain_text import escaped
from tunix_lite.report.evidence import Evidence, read_sample_file, sample_steps
from tunix_lite.report.page import Answer, Example
from tunix_lite.tracking.rows import is_number

LEVEL = 0.95
# of a bootstrap: a report is to be there in a second or two
RESAMPLES = 2_000
# examples of a kind that are shown
SHOWN = 5


@dataclass(frozen=True)
class Measured:
    """The completions of one evaluation: a greedy one of each example, and its samples.

    Example: `measured_at(folder, 60, [])` has `.greedy[3]["correct"]`.
    """

    step: int
    # by the number of the example
    greedy: dict[int, dict]
    samples: dict[int, list[dict]]


@dataclass(frozen=True)
class ScoreChange:
    """A score before and after. Without samples of it there is no difference by example.

    Example: ScoreChange("accuracy", Estimate(0.42, 0.36, 0.48), Estimate(0.95, 0.92, 0.98), None).
    """

    name: str
    before: Estimate
    after: Estimate
    change: Comparison | None


# ---- what samples/ has


def first_and_last(run: Evidence) -> list[Measured]:
    """The evaluations that samples/ has: the first, and the last if it is another one."""
    steps = sample_steps(run.folder, "evaluation")
    found = [measured_at(run.folder, step, run.unread) for step in {*steps[:1], *steps[-1:]}]
    return sorted((m for m in found if m is not None), key=lambda m: m.step)


def measured_at(folder: Path, step: int, unread: list[str]) -> Measured | None:
    """The completions of the evaluation after a step; None if there are none."""
    try:
        rows = read_sample_file(folder, step, "evaluation")
    except ValueError as error:
        unread.append(escaped(str(error)))
        return None
    greedy: dict[int, dict] = {}
    samples: dict[int, list[dict]] = {}
    for row in rows or []:
        group = row.get("group")
        if type(group) is not int or type(row.get("correct")) is not bool:
            continue
        if row.get("sampled") is True:
            samples.setdefault(group, []).append(row)
        else:
            greedy[group] = row

    # The file may be cut: an example counts with all of its samples, or not at all.
    most = max((len(rows) for rows in samples.values()), default=0)
    whole = {group: rows for group, rows in samples.items() if len(rows) == most}
    return Measured(step, greedy, whole) if greedy else None


def scores_of(found: Measured) -> dict[str, dict[int, float]]:
    """By the name of a score: the number of each example."""
    rewards = {g: row["reward"] for g, row in found.greedy.items() if is_number(row.get("reward"))}
    scores = {"accuracy": {g: float(row["correct"]) for g, row in found.greedy.items()}}
    if found.samples:
        groups = list(found.samples)
        correct_EN = np.array([[row["correct"] for row in found.samples[g]] for g in groups])
        extracted = [[row.get("extracted") for row in found.samples[g]] for g in groups]
        answers = [[x if isinstance(x, str) else None for x in texts] for texts in extracted]
        k = correct_EN.shape[1]
        for name, values_E in (
            (f"avg_at_{k}", avg_at_k(correct_EN)),
            (f"pass_at_{k}", pass_at_k(correct_EN, k)),
            (f"maj_at_{k}", maj_at_k(answers, correct_EN, k)),
        ):
            scores[name] = dict(zip(groups, values_E.tolist()))
    if rewards:
        scores["reward"] = rewards
    return scores


# ---- scores


def scores(run: Evidence, measured: list[Measured]) -> list[ScoreChange]:
    """All scores before and after, with their intervals: from samples/, else from the metrics."""
    if len(measured) < 2:
        return scores_without_samples(run)
    before, after = (scores_of(m) for m in (measured[0], measured[-1]))
    found = []
    for name in before:
        both = [group for group in before[name] if group in after.get(name, {})]
        if not both:
            continue
        first_E = np.array([before[name][group] for group in both])
        last_E = np.array([after[name][group] for group in both])
        found.append(
            ScoreChange(
                name,
                _estimated(name, first_E),
                _estimated(name, last_E),
                compare(last_E, first_E, LEVEL, RESAMPLES),
            )
        )
    return found


def _estimated(name: str, values_E: np.ndarray) -> Estimate:
    """The mean and its bootstrap interval; of an accuracy of 0 or 1, which a bootstrap takes for
    certain, Wilson's."""
    if name == "accuracy" and values_E.min() == values_E.max():
        return wilson(float(values_E[0]), len(values_E))
    return estimate(values_E, LEVEL, RESAMPLES)


def scores_without_samples(run: Evidence) -> list[ScoreChange]:
    """The accuracy of the first and of the last evaluation, with the intervals of a share."""
    series = run.series("eval/accuracy")
    count = int(run.number("evaluation.num_examples", 0))
    if series is None or len(series) < 2 or count < 1:
        return []
    if not all(0 <= value <= 1 for value in (series.first, series.last)):
        return []
    return [ScoreChange("accuracy", wilson(series.first, count), wilson(series.last, count), None)]


# ---- examples


@dataclass(frozen=True)
class Moved:
    """Examples by what became of their greedy completion: numbers, in the order of the data.

    Example: Moved(improved=[3, 7], spoilt=[5], right=[0, 1], wrong=[2]).
    """

    improved: list[int]
    spoilt: list[int]
    right: list[int]
    wrong: list[int]


def moved(before: Measured, after: Measured) -> Moved:
    """Which examples were wrong and are right, and so on. Only of the same prompt in both."""
    found = Moved([], [], [], [])
    kinds = {
        (False, True): found.improved,
        (True, False): found.spoilt,
        (True, True): found.right,
        (False, False): found.wrong,
    }
    for group, row in before.greedy.items():
        other = after.greedy.get(group)
        if other is not None and other.get("prompt") == row.get("prompt"):
            kinds[row["correct"], other["correct"]].append(group)
    return found


def shown_examples(before: Measured, after: Measured, groups: Sequence[int]) -> list[Example]:
    """Some of these examples, evenly from the first to the last, with both completions."""
    count = min(SHOWN, len(groups))
    chosen = [groups[i * len(groups) // count] for i in range(count)]
    return [
        Example(
            _text(before.greedy[group].get("prompt")),
            _or_none(before.greedy[group].get("expected")),
            [
                answer_of(before.greedy[group], f"step {before.step}"),
                answer_of(after.greedy[group], f"step {after.step}"),
            ],
        )
        for group in chosen
    ]


def answer_of(row: dict, title: str, note: str = "") -> Answer:
    """A line of samples/ as a report shows it."""
    extracted = _or_none(row.get("extracted"))
    return Answer(_text(row.get("completion")), extracted, row.get("correct") is True, title, note)


def _or_none(value: object) -> str | None:
    return None if value is None else _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value)
