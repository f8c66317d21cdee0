"""The report of several runs, or of a sweep: their results in a table, their curves in one frame,
and the settings in which they differ."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from tunix_lite.files.plain_text import escaped
from tunix_lite.report import before_after
from tunix_lite.report.before_after import ScoreChange
from tunix_lite.report.charts import (
    COLORS,
    CURVES,
    Chart,
    curve_lines,
    metrics_of,
    number_text,
)
from tunix_lite.report.evidence import Evidence, read_evidence, read_overrides
from tunix_lite.report.findings import diagnose
from tunix_lite.report.page import Page, html
from tunix_lite.report.run_page import interval_text, standing
from tunix_lite.tracking.console import seconds_in_words
from tunix_lite.tracking.plugs import flat
from tunix_lite.tracking.rows import is_number

# runs in the table; those with the best accuracy have curves, one colour each
_MOST_RUNS = 64
# settings in the table of differences, characters of a value, and of the name of a run
_MOST_SETTINGS = 60
_MOST_CHARACTERS = 60


@dataclass(frozen=True)
class _Compared:
    """A run among others."""

    name: str
    run: Evidence
    # how it stands, in a word
    status: str
    # the accuracy before and after; None: samples/ does not have it
    accuracy: ScoreChange | None

    @property
    def reached(self) -> float:
        """The last held-out accuracy; -1: none."""
        accuracy = self.run.series("eval/accuracy")
        return accuracy.last if accuracy else -1.0


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs right below a folder, by number and then by name, as a sweep has them."""
    found = [path.parent for path in folder.glob("*/metrics.jsonl")]
    return sorted(
        found, key=lambda path: (not path.name.isdecimal(), len(path.name), path.name)
    )


def _compared(folders: Sequence[Path]) -> list[_Compared]:
    """Reads the folders. Raises ValueError for one that is no folder of a run, or that is there
    twice."""
    places = [folder.resolve() for folder in folders]
    runs = []
    for name, folder, place in zip(_names(folders), folders, places):
        if places.count(place) > 1:
            raise ValueError(f"{escaped(str(folder))} is given twice")
        run = read_evidence(folder)
        scores = before_after.scores(before_after.first_and_last(run))
        status, _, _ = standing(run, None)
        runs.append(_Compared(name, run, status, scores[0] if scores else None))
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Tells each run from the others: by its own overrides if they are short, else its folder."""
    overrides = [read_overrides(folder, []) or [] for folder in folders]
    common = set.intersection(*map(set, overrides))
    names = [
        " ".join(
            text for text in texts if text not in common and not text.startswith("hydra.")
        )
        for texts in overrides
    ]
    if "" in names or len(set(names)) < len(names) or max(map(len, names)) > _MOST_CHARACTERS:
        names = list(map(str, folders))
    return [escaped(name[-_MOST_CHARACTERS:]) for name in names]


def comparison_page(folders: Sequence[Path], say: Callable[[str], None]) -> Page:
    """The report of these runs. say: gets the table of their results, line by line. Raises
    ValueError if one of them is not the folder of a run."""
    runs = _compared(folders[:_MOST_RUNS])
    heads, rows = _results(runs)
    for line in _lines(heads, rows):
        say(line)

    # The curves of the best runs.
    shown = sorted(runs, key=lambda one: -one.reached)[:COLORS]
    charts = []
    for curve in [curve for curve in CURVES if curve.in_comparison]:
        lines = []
        for color, one in enumerate(shown):
            series = one.run.series(metrics_of(one.run, curve)[0])
            # The moving average alone: the numbers of all runs would hide one another.
            lines += curve_lines(series, one.name, color)[-1:] if series else []
        if any(any(line.values) for line in lines):
            charts.append(Chart(curve.title, lines, curve.is_share))
    findings = []
    for one in runs:
        first = next(iter(diagnose(one.run)), None)
        words = f"{first.what} [{first.name}]" if first else "nothing found"
        findings.append([one.name, words, escaped(first.evidence[0], 300) if first else ""])
    sections = [
        ("Results", [html.table(heads, rows, 2)]),
        ("Curves", [html.charts(charts, [(one.name, i) for i, one in enumerate(shown)])]),
        ("Where their settings differ", [*_differences(runs)]),
        (
            "What may be wrong",
            [html.table(["run", "first finding", "what shows it"], findings)],
        ),
    ]
    if (left_out := len(folders) - len(runs)) > 0:
        sections.insert(0, ("", [html.text(f"{left_out} more runs are left out.", True)]))
    completed = [one.status for one in runs].count("completed")
    is_good = completed == len(runs)
    figures = [("steps of all runs", f"{sum(one.run.num_steps for one in runs):,}", "")]
    if (best := shown[0]).accuracy is not None:
        note = f"{best.name}; 95 %: {interval_text(best.accuracy.after, True)}"
        figures.insert(0, ("best held-out accuracy", number_text(best.reached, True), note))
    return Page(
        title=f"{len(runs)} runs compared",
        subtitle=escaped(str(folders[0].parent), 200),
        status="completed" if is_good else f"{completed} of {len(runs)} completed",
        mood="good" if is_good else "mid",
        figures=figures,
        hero=charts[0] if charts else None,
        sections=sections,
    )


def _results(runs: list[_Compared]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row for each run: how it ended, what it reached, and what that took."""
    heads = ["run", "status", "steps", "accuracy before", "accuracy after", "95 % of it"]
    heads += ["best", "reward, last third", "time", "tokens/s"]
    rows = []
    for one in runs:
        run = one.run
        accuracy = run.series("eval/accuracy")
        values = (accuracy.first, accuracy.last) if accuracy else ()
        cells = [number_text(value, True) for value in values] or ["", ""]
        cells.append(interval_text(one.accuracy.after, True) if one.accuracy else "")
        cells.append(number_text(accuracy.largest, True) if accuracy else "")
        reward, speed = (
            number_text(series.late) if series else ""
            for series in map(run.series, ("reward/mean", "perf/tokens_per_second"))
        )
        seconds = run.status.get("seconds")
        took = seconds_in_words(seconds) if is_number(seconds) else ""
        steps = str(run.rows[-1]["step"]) if run.rows else "0"
        rows.append([one.name, one.status, steps, *cells, reward, took, speed])
    return heads, rows


def _lines(heads: list[str], rows: list[list[str]]) -> list[str]:
    """A table as plain lines, for a terminal: columns without a word in them are left out."""
    columns = [column for column in zip(heads, *rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in zip(*columns):
        padded = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _differences(runs: list[_Compared]) -> Iterator[Markup]:
    """The settings in which runs differ, and their values; - where a run has none."""
    settings = [dict(flat(one.run.settings)) for one in runs]
    names = []
    for name in dict.fromkeys(name for each in settings for name in each):
        values = {str(each.get(name, "-")) for each in settings}
        if len(values) > 1 and not name.startswith("hydra."):
            names.append(name)
    if not names:
        yield html.text("In none: the runs have the same settings.")
        return
    rows = []
    for one, each in zip(runs, settings):
        values = [str(each.get(name, "-")) for name in names[:_MOST_SETTINGS]]
        rows.append([one.name, *(escaped(value, _MOST_CHARACTERS) for value in values)])
    yield html.table(["run", *map(escaped, names[:_MOST_SETTINGS])], rows)
    if len(names) > _MOST_SETTINGS:
        yield html.text(f"{len(names) - _MOST_SETTINGS} more settings differ.")
