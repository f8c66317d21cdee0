"""The results of a run, from the files in its folder: how it ended, and its scores before and
after; or those of several runs, beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunix_lite.basics.plain_text import counted, escaped
from tunix_lite.report.evidence import (
    Evidence,
    read_evidence,
    read_overrides,
    read_samples,
    sample_steps,
)
from tunix_lite.report.statistics import Comparison, Estimate, compare, estimate, wilson
from tunix_lite.tracking.console import as_words, seconds_in_words
from tunix_lite.tracking.rows import is_number

# runs in the table, and characters of the name of one
_MOST_RUNS = 64
_MOST_CHARACTERS = 60
_LEVEL = 0.95
# of a bootstrap: the results are to be there in a second or two
_RESAMPLES = 2_000
# By the word of status.json: what there is to say beside it.
_SENTENCES = {
    "completed": "{early_stopping}",
    "stopped": "by {stopped} after {steps}, with its state saved",
    "failed": "{error}",
    "interrupted": "{error}",
    "running": "or was killed: this is what its files say so far",
    "killed": "its process is gone without a word; metrics.jsonl holds {steps}",
    "unknown": "status.json is missing, or does not say how the run stands",
}


@dataclass(frozen=True)
class _ScoreChange:
    """A score before and after, and the change by example.
    Example: `score_changes(run)[0].change.better` examples were improved."""

    name: str
    before: Estimate
    after: Estimate
    change: Comparison


def _score_changes(run: Evidence) -> list[_ScoreChange]:
    """The scores of the first and last evaluation in samples/, of the same examples, or []."""
    steps = sample_steps(run.folder, "evaluation")
    if len(steps) < 2:
        return []
    before, after = (
        _by_example(read_samples(run.folder, step, "evaluation", run.unread))
        for step in (steps[0], steps[-1])
    )
    changes = []
    for name, values in before.items():
        others = after.get(name, {})
        if both := sorted(values.keys() & others.keys()):
            first_E = np.array([values[group] for group in both])
            last_E = np.array([others[group] for group in both])
            change = compare(last_E, first_E, _LEVEL, _RESAMPLES)
            estimates = [
                # a bootstrap takes an accuracy of 0 or 1 for certain
                wilson(float(values_E[0]), len(values_E))
                if name == "accuracy" and values_E.min() == values_E.max()
                else estimate(values_E, _LEVEL, _RESAMPLES)
                for values_E in (first_E, last_E)
            ]
            changes.append(_ScoreChange(name, *estimates, change))
    return changes


def _by_example(rows: list[dict]) -> dict[str, dict[int, float]]:
    """Score -> the number of the example -> its value, of the completions of one evaluation."""
    greedy: dict[int, dict] = {}
    samples: dict[int, list[bool]] = {}
    for row in rows:
        group = row.get("group")
        if type(group) is not int or type(row.get("correct")) is not bool:
            continue
        if row.get("sampled") is True:
            samples.setdefault(group, []).append(row["correct"])
        else:
            greedy[group] = row
    scores = {"accuracy": {group: float(row["correct"]) for group, row in greedy.items()}}
    # The file may be cut: an example counts with all of its samples, or not at all.
    most = max(map(len, samples.values()), default=0)
    whole = {group: right for group, right in samples.items() if len(right) == most}
    if whole:
        scores[f"avg_at_{most}"] = {group: sum(right) / most for group, right in whole.items()}
        scores[f"pass_at_{most}"] = {group: float(any(x)) for group, x in whole.items()}
    # a reward that failed is null, and counts in neither
    rewards = {group: row.get("reward") for group, row in greedy.items()}
    scores["reward"] = {group: x for group, x in rewards.items() if is_number(x)}
    return scores


def result_lines(run: Evidence, is_alive: bool | None = None) -> list[str]:
    """How the run stands, and each score before and after. is_alive: whether a process holds its
    folder; None: not known."""
    word = _standing(run, is_alive)
    # Of metrics.jsonl, as status.json of a killed run is older.
    last = run.rows[-1]["step"] if run.rows else 0
    unknown = {"error": "the error is not known", "stopped": "", "early_stopping": ""}
    values = {**unknown, **run.status, "steps": counted(last, "step")}
    sentence = _SENTENCES[word].format_map(values)
    lines = [f"{word}: {sentence}" if sentence else word]
    for one in _score_changes(run):
        is_share = one.name != "reward"
        ends = [
            f"{_number(end.value, is_share)} ({_interval(end, is_share)})"
            for end in (one.before, one.after)
        ]
        by = one.change.difference
        moved = f"{_number(by.value, is_share, '+')} ({_interval(by, is_share, '+')})"
        counts = f"{one.change.better} higher, {one.change.worse} lower"
        lines.append(f"{as_words(one.name)} {' → '.join(ends)}, change {moved}; {counts}")
    return lines


def _standing(run: Evidence, is_alive: bool | None) -> str:
    """How the run stands, in a word."""
    word = run.status.get("status")
    if not isinstance(word, str) or word not in _SENTENCES:
        return "unknown"
    # nobody wrote that it ended, and no process has the folder
    return "killed" if word == "running" and is_alive is False else word


def _number(value: float, is_share: bool = False, sign: str = "") -> str:
    """A number in few characters: 42.2 %, 0.0312, 4e-05, 12,435."""
    if is_share:
        return f"{100 * value:{sign}.1f} %"
    if 1000 <= abs(value) < 1e7:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.3g}"


def _interval(estimated: Estimate, is_share: bool, sign: str = "") -> str:
    """`36.3 % to 48.4 %`."""
    low = _number(estimated.low, is_share, sign)
    return f"{low} to {_number(estimated.high, is_share, sign)}"


# ---- several runs


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs right below a folder, by number and then by name, as a sweep has them."""
    runs = [path.parent for path in folder.glob("*/metrics.jsonl")]
    # Numbers by their length first, so that 10 follows 9.
    return sorted(
        runs, key=lambda path: (not path.name.isdecimal(), len(path.name), path.name)
    )


def lines_of_runs(folders: Sequence[Path]) -> list[str]:
    """A row for each run: how it ended, what it reached, and what that took. Raises ValueError if
    one of them is not the folder of a run, or is there twice."""
    heads = ["run", "status", "steps", "accuracy before", "accuracy after", "95 % of it"]
    rows = [[*heads, "best", "reward, last third", "time", "tokens/s"]]
    places = [folder.resolve() for folder in folders]
    # Each is told from the others by its own overrides if they are short, else by its folder.
    overrides = [read_overrides(folder, []) or [] for folder in folders]
    common = set.intersection(*map(set, overrides))
    names = []
    for texts in overrides:
        own = [x for x in texts if x not in common and not x.startswith("hydra.")]
        names.append(" ".join(own))
    if "" in names or len(set(names)) < len(names) or max(map(len, names)) > _MOST_CHARACTERS:
        names = list(map(str, folders))
    for name, folder, place in zip(names, folders, places[:_MOST_RUNS]):
        if places.count(place) > 1:
            raise ValueError(f"{escaped(str(folder))} is given twice")
        run = read_evidence(folder)
        scores = _score_changes(run)
        accuracy = run.series("eval/accuracy")
        before = after = best = interval = seconds = ""
        if accuracy:
            ends = (accuracy.first, accuracy.last, accuracy.largest)
            before, after, best = (_number(value, True) for value in ends)
        if scores:
            interval = _interval(scores[0].after, True)
        if is_number(run.status.get("seconds")):
            seconds = seconds_in_words(run.status["seconds"])
        reward = run.series("reward/mean")
        speed = run.series("perf/tokens_per_second")
        rows.append(
            [
                escaped(name[-_MOST_CHARACTERS:]),
                _standing(run, None),
                str(run.rows[-1]["step"]) if run.rows else "0",
                before,
                after,
                interval,
                best,
                _number(reward.late) if reward else "",
                seconds,
                _number(speed.late) if speed else "",
            ]
        )
    # Columns without a word below their heads are left out.
    columns = [column for column in zip(*rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in zip(*columns):
        padded = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(padded).rstrip())
    if (left_out := len(folders) - _MOST_RUNS) > 0:
        lines.append(f"{left_out} more runs are left out")
    return lines
