"""Several runs, or those of a sweep, beside each other: a table of their results."""

from collections.abc import Sequence
from pathlib import Path

from tunix_lite.basics.plain_text import escaped
from tunix_lite.report import before_after
from tunix_lite.report.charts import number_text
from tunix_lite.report.evidence import read_evidence, read_overrides
from tunix_lite.report.run_page import interval_text, standing
from tunix_lite.tracking.console import seconds_in_words
from tunix_lite.tracking.rows import is_number

# runs in the table, and characters of the name of one
_MOST_RUNS = 64
_MOST_CHARACTERS = 60


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs right below a folder, by number and then by name, as a sweep has them."""
    found = [path.parent for path in folder.glob("*/metrics.jsonl")]
    # Numbers by their length first, so that 10 follows 9.
    return sorted(
        found, key=lambda path: (not path.name.isdecimal(), len(path.name), path.name)
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
        scores = before_after.scores(before_after.first_and_last(run))
        status, _, _ = standing(run, None)
        accuracy = run.series("eval/accuracy")
        values = (accuracy.first, accuracy.last) if accuracy else ()
        cells = [number_text(value, True) for value in values] or ["", ""]
        cells.append(interval_text(scores[0].after, True) if scores else "")
        cells.append(number_text(accuracy.largest, True) if accuracy else "")
        for series in map(run.series, ("reward/mean", "perf/tokens_per_second")):
            cells.append(number_text(series.late) if series else "")
        seconds = run.status.get("seconds")
        cells.insert(-1, seconds_in_words(seconds) if is_number(seconds) else "")
        steps = str(run.rows[-1]["step"]) if run.rows else "0"
        rows.append([escaped(name[-_MOST_CHARACTERS:]), status, steps, *cells])
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
