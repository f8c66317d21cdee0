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
    MANY,
    Chart,
    Curve,
    curve_lines,
    metrics_of,
    number_text,
)
from tunix_lite.report.evidence import Evidence, read_evidence, read_overrides
from tunix_lite.report.findings import diagnose
from tunix_lite.report.page import Page, html
from tunix_lite.report.run_page import interval_text, standing
from tunix_lite.tracking.dashboard import seconds_in_words
from tunix_lite.tracking.plugs import flat
from tunix_lite.tracking.rows import is_number

# runs in the table, and of these with curves: those with the best accuracy
MOST_RUNS = 64
MOST_CURVES = 12
# settings in the table of differences, characters of a value, and of the name of a run
MOST_SETTINGS = 60
MOST_CHARACTERS = 60
# the curves of a comparison: the first metric of each
COMPARED = (
    Curve("held-out accuracy, greedy", ("eval/accuracy",), True),
    Curve("held-out accuracy of samples", ("eval/avg_at_",), True),
    *(curve for curve in CURVES if curve.in_comparison),
)


@dataclass(frozen=True)
class Compared:
    """A run among others.

    Example: `compared([Path("outputs/sweep/0"), Path("outputs/sweep/1")])[0].name` is "seed=0".
    """

    name: str
    run: Evidence
    # how it stands, in a word
    status: str
    # the accuracy before and after; None: it has none
    accuracy: ScoreChange | None
    seconds: float


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs right below a folder, by number and then by name, as a sweep has them."""
    found = [path.parent for path in folder.glob("*/metrics.jsonl")]
    return sorted(found, key=lambda path: (not path.name.isdecimal(), len(path.name), path.name))


def compared(folders: Sequence[Path]) -> list[Compared]:
    """Reads the folders. Raises ValueError for one that is no folder of a run, or that is there
    twice."""
    places = [folder.resolve() for folder in folders]
    runs = []
    for name, folder, place in zip(_names(folders), folders, places):
        if places.count(place) > 1:
            raise ValueError(f"{escaped(str(folder))} is given twice")
        run = read_evidence(folder)
        scores = before_after.scores(run, before_after.first_and_last(run))
        status, _, _ = standing(run, None)
        seconds = run.status.get("seconds")
        accuracy = scores[0] if scores else None
        runs.append(
            Compared(name, run, status, accuracy, seconds if is_number(seconds) else 0.0)
        )
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Tells each run from the others: by its own overrides if they are short, else its folder."""
    overrides = [read_overrides(folder, []) or [] for folder in folders]
    common = set.intersection(*map(set, overrides)) if overrides else set()
    own = [
        " ".join(text for text in texts if text not in common and not text.startswith("hydra."))
        for texts in overrides
    ]
    if all(own) and len(set(own)) == len(own) and max(map(len, own)) <= MOST_CHARACTERS:
        return [escaped(name, MOST_CHARACTERS) for name in own]

    # The shortest ends of their paths that differ.
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return [escaped(name, MOST_CHARACTERS) for name in names]


def comparison_page(folders: Sequence[Path], say: Callable[[str], None]) -> Page:
    """The report of these runs. say: gets the table of their results, line by line. Raises
    ValueError if one of them is not the folder of a run."""
    runs = compared(folders[:MOST_RUNS])
    heads, rows = _results(runs)
    for line in _lines(heads, rows):
        say(line)
    results = [html.table(heads, rows, 2)]
    if any(run.accuracy is not None and run.accuracy.change is None for run in runs):
        about = "Where samples/ lacks an evaluation, the interval is that of a share (Wilson)."
        results.append(html.text(about))

    # The curves of the best runs.
    best = sorted(runs, key=lambda r: r.accuracy.after.value if r.accuracy else -1, reverse=True)
    shown = [run for run in runs if run in best[:MOST_CURVES]]
    charts = []
    for curve in COMPARED:
        lines = []
        for place, run in enumerate(shown):
            for name in metrics_of(run.run, curve)[:1]:
                if series := run.run.series(name):
                    lines += curve_lines(series, run.name, place, only_one=True)
        if any(any(line.values) for line in lines):
            charts.append(Chart(curve.title, lines, curve.is_share))
    dashed = [run.name if i < COLORS else f"{run.name} (dashed)" for i, run in enumerate(shown)]
    curves = [html.charts(charts, [(name, i) for i, name in enumerate(dashed)])]
    if any(run.run.num_steps >= MANY for run in shown):
        about = "Curves of many steps are moving averages; those of evaluations are not."
        curves.append(html.text(about))
    if len(shown) < len(runs):
        curves.append(html.text(f"Curves are of the {len(shown)} runs with the best accuracy."))
    findings = []
    for run in runs:
        first = next(iter(diagnose(run.run)), None)
        words = f"{first.what} [{first.name}]" if first else "nothing found"
        findings.append([run.name, words, escaped(first.evidence[0], 300) if first else ""])
    heads = ["run", "first finding of tunix-lite doctor", "what shows it"]
    sections = [
        ("Results", results),
        ("Curves", curves),
        ("Where their settings differ", [*_differences(runs)]),
        ("What may be wrong", [html.table(heads, findings)]),
    ]
    if (left_out := len(folders) - len(runs)) > 0:
        sections.insert(0, ("", [html.text(f"{left_out} more runs are left out.", True)]))
    figures = []
    if (accuracy := best[0].accuracy) is not None:
        note = f"{best[0].name}; 95 %: {interval_text(accuracy.after, True)}"
        figures.append(("best held-out accuracy", number_text(accuracy.after.value, True), note))
    rewards = [(run.run.series("reward/mean"), run.name) for run in runs]
    if known := [(reward.late, name) for reward, name in rewards if reward]:
        value, name = max(known)
        figures.append(
            ("highest reward", number_text(value), f"{name}; last third of its steps")
        )
    steps = sum(run.run.num_steps for run in runs)
    took = seconds_in_words(sum(run.seconds for run in runs))
    figures.append(("steps of all runs", f"{steps:,}", f"in {took}"))
    completed = [run.status for run in runs].count("completed")
    is_good = completed == len(runs)
    return Page(
        title=f"{len(runs)} runs compared",
        subtitle=escaped(str(folders[0].parent), 200),
        status="completed" if is_good else f"{completed} of {len(runs)} completed",
        mood="good" if is_good else "mid",
        figures=figures,
        hero=charts[0] if charts else None,
        sections=sections,
    )


def _results(runs: list[Compared]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row for each run: how it ended, what it reached, and what that took."""
    heads = ["run", "status", "steps", "accuracy before", "accuracy after", "95 % of it"]
    heads += ["best", "reward, last third", "time", "tokens/s"]
    rows = []
    for compared_run in runs:
        run = compared_run.run
        accuracy = compared_run.accuracy
        best = run.series("eval/accuracy")
        of_accuracy = ["", "", "", ""]
        if accuracy is not None and best:
            ends = (accuracy.before.value, accuracy.after.value)
            of_accuracy = [number_text(value, True) for value in ends]
            of_accuracy += [interval_text(accuracy.after, True), number_text(best.largest, True)]
        reward, speed = (
            number_text(series.late) if series else ""
            for series in map(run.series, ("reward/mean", "perf/tokens_per_second"))
        )
        steps = str(run.rows[-1]["step"]) if run.rows else "0"
        took = seconds_in_words(compared_run.seconds)
        rows.append(
            [compared_run.name, compared_run.status, steps, *of_accuracy, reward, took, speed]
        )
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


def _differences(runs: list[Compared]) -> Iterator[Markup]:
    """The settings in which runs differ, and their values; - where a run has none."""
    settings = [dict(flat(run.run.settings)) for run in runs]
    rows = []
    for name in dict.fromkeys(name for each in settings for name in each):
        values = [str(each.get(name, "-")) for each in settings]
        if len(set(values)) > 1 and not name.startswith("hydra."):
            rows.append([escaped(cell, MOST_CHARACTERS) for cell in (name, *values)])
    if not rows:
        yield html.text("In none: the runs have the same settings.")
        return
    # Runs go down and settings across where there are more runs than settings.
    heads = ["setting", *(run.name for run in runs)]
    shown = rows[:MOST_SETTINGS]
    if len(shown) <= 6:
        heads, *shown = map(list, zip(["run", *heads[1:]], *shown))
    yield html.table(heads, shown)
    if len(rows) > MOST_SETTINGS:
        yield html.text(f"{len(rows) - MOST_SETTINGS} more settings differ.")
