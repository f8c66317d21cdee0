"""The report of several runs, or of a sweep: their results in a table, their curves in one frame,
and the settings in which they differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.plain_text import escaped
from tunix_lite.report import before_after
from tunix_lite.report.before_after import ScoreChange
from tunix_lite.report.charts import COLORS, Chart, Line, number_text, smoothed
from tunix_lite.report.curves import MANY, Curve, metrics_of, span_of
from tunix_lite.report.evidence import Evidence, read_evidence, read_overrides
from tunix_lite.report.findings import diagnose
from tunix_lite.report.going_on import flat
from tunix_lite.report.page import Block, Charts, Page, Section, Table, Text
from tunix_lite.report.run_page import interval_text, standing
from tunix_lite.tracking.dashboard import minutes
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
    Curve("reward", ("reward/mean",)),
    Curve("completion length, tokens", ("completions/mean_length",)),
    Curve("entropy, nats a token", ("train/entropy",)),
    Curve("KL to the reference, nats a token", ("train/kl",)),
    Curve("gradient norm", ("train/grad_norm",)),
    Curve("learning rate", ("train/learning_rate",)),
    Curve("tokens a second and device", ("perf/tokens_per_second_per_device",)),
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


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs right below a folder, by number and then by name, as a sweep has them."""
    found = [path.parent for path in folder.glob("*/metrics.jsonl")]
    return sorted(found, key=lambda path: (not path.name.isdecimal(), len(path.name), path.name))


def compared(folders: Sequence[Path]) -> list[Compared]:
    """What the folders hold. Raises ValueError for one that is not the folder of a run, or that is
    given twice."""
    places = [folder.resolve() for folder in folders]
    twice = next((f for f, place in zip(folders, places) if places.count(place) > 1), None)
    if twice is not None:
        raise ValueError(f"{escaped(str(twice))} is given twice")
    names = names_of(folders)
    found = []
    for name, folder in zip(names, folders):
        run = read_evidence(folder)
        scores = before_after.scores(run, before_after.first_and_last(run))
        status, _, _ = standing(run, None)
        found.append(Compared(name, run, status, scores[0] if scores else None))
    return found


def names_of(folders: Sequence[Path]) -> list[str]:
    """What tells each run from the others: its own overrides if they are short, else its folder."""
    given = [read_overrides(folder, []) or [] for folder in folders]
    common = set.intersection(*map(set, given)) if given else set()
    own = [
        " ".join(text for text in texts if text not in common and not text.startswith("hydra."))
        for texts in given
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


def comparison_page(folders: Sequence[Path]) -> Page:
    """The report of these runs. Raises ValueError if one of them is not the folder of a run."""
    runs = compared(folders[:MOST_RUNS])
    shown = _best(runs)[:MOST_CURVES]
    shown = [run for run in runs if run in shown]
    legend = [
        (run.name if i < COLORS else f"{run.name} (dashed)", i) for i, run in enumerate(shown)
    ]
    charts = [chart for chart in (_chart(curve, shown) for curve in COMPARED) if chart is not None]
    results: list[Block] = [results_table(runs)]
    if any(run.accuracy is not None and run.accuracy.change is None for run in runs):
        about = "Where samples/ lacks an evaluation, the interval is that of a share (Wilson)."
        results.append(Text(about))
    curves: list[Block] = [Charts(charts, legend)]
    if any(run.run.num_steps >= MANY for run in shown):
        about = "Curves of many steps are moving averages; those of evaluations are not."
        curves.append(Text(about))
    if len(shown) < len(runs):
        curves.append(Text(f"Curves are of the {len(shown)} runs with the best accuracy."))
    findings = []
    for run in runs:
        first = next(iter(diagnose(run.run)), None)
        words = f"{first.what} [{first.name}]" if first else "nothing found"
        evidence = first.evidence[0] if first and first.evidence else ""
        findings.append([run.name, words, escaped(evidence, 300)])
    heads = ["run", "first finding of tunix-lite doctor", "what shows it"]
    sections = [
        Section("Results", results),
        Section("Curves", curves),
        Section("Where their settings differ", [*_differences(runs)]),
        Section("What may be wrong", [Table(heads, findings)]),
    ]
    if (left_out := len(folders) - len(runs)) > 0:
        sections.insert(0, Section("", [Text(f"{left_out} more runs are left out.", True)]))
    ended = [run.status for run in runs]
    is_good = all(status == "completed" for status in ended)
    status = "completed" if is_good else f"{ended.count('completed')} of {len(ended)} completed"
    return Page(
        title=f"{len(runs)} runs compared",
        subtitle=escaped(str(folders[0].parent), 200),
        status=status,
        mood="good" if is_good else "mid",
        figures=[*_figures(runs)],
        hero=charts[0] if charts else None,
        sections=sections,
    )


def _best(runs: list[Compared]) -> list[Compared]:
    """The runs by their last accuracy, the highest first; those without any come last."""
    return sorted(runs, key=lambda r: r.accuracy.after.value if r.accuracy else -1, reverse=True)


def _figures(runs: list[Compared]) -> Iterator[tuple[str, str, str]]:
    best = _best(runs)[0]
    if best.accuracy is not None:
        value = number_text(best.accuracy.after.value, True)
        interval = interval_text(best.accuracy.after, True)
        yield ("best held-out accuracy", value, f"{best.name}; 95 %: {interval}")
    rewards = [(run.run.series("reward/mean"), run.name) for run in runs]
    found = [(series.late, name) for series, name in rewards if series is not None]
    if found:
        value, name = max(found)
        yield ("highest reward", number_text(value), f"{name}; last third of its steps")
    steps = sum(run.run.num_steps for run in runs)
    seconds = sum(_seconds(run.run) for run in runs)
    yield ("steps of all runs", f"{steps:,}", f"in {minutes(seconds)}")


def _seconds(run: Evidence) -> float:
    seconds = run.status.get("seconds")
    return seconds if is_number(seconds) else 0.0


# ---- results


def results_table(runs: list[Compared]) -> Table:
    """A row for each run: how it ended, what it reached, and what that took."""
    heads = ["run", "status", "steps", "accuracy before", "accuracy after", "95 % of it"]
    heads += ["best", "reward, last third", "time", "tokens/s"]
    rows = []
    for compared_run in runs:
        run = compared_run.run
        row = [compared_run.name, compared_run.status]
        row.append(str(run.rows[-1]["step"]) if run.rows else "0")
        accuracy = compared_run.accuracy
        best = run.series("eval/accuracy")
        if accuracy is None or best is None:
            row += ["", "", "", ""]
        else:
            ends = (accuracy.before.value, accuracy.after.value)
            row += [number_text(value, True) for value in ends]
            row += [interval_text(accuracy.after, True), number_text(best.largest, True)]
        reward = run.series("reward/mean")
        speed = run.series("perf/tokens_per_second")
        row.append(number_text(reward.late) if reward is not None else "")
        row.append(minutes(_seconds(run)))
        row.append(number_text(speed.late) if speed is not None else "")
        rows.append(row)
    return Table(heads, rows, numbers_from=2)


def table_lines(table: Table) -> list[str]:
    """A table as plain lines, for a terminal: columns without a word in them are left out."""
    columns = [
        column for column in zip(table.heads, *table.rows) if any(cell for cell in column[1:])
    ]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in zip(*columns):
        cells = [
            cell.rjust(width) if 0 < table.numbers_from <= i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


# ---- curves


def _chart(curve: Curve, runs: list[Compared]) -> Chart | None:
    lines = []
    for place, compared_run in enumerate(runs):
        names = metrics_of(compared_run.run, curve)
        series = compared_run.run.series(names[0]) if names else None
        if series is None:
            continue
        steps = series.steps.tolist()
        values = series.values.tolist()
        is_evaluation = series.name.startswith("eval/")
        if len(steps) >= MANY and not is_evaluation and series.name != "train/learning_rate":
            values = smoothed(values, span_of(len(steps)))
        kind = "points" if is_evaluation and len(steps) <= MANY else "line"
        lines.append(Line(compared_run.name, steps, values, place, kind))
    if not any(any(line.values) for line in lines):
        return None
    return Chart(curve.title, lines, curve.is_share)


# ---- differences and findings


def setting_differences(runs: list[Compared]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ: (name, its value in each run); - where it has none."""
    settings = [dict(flat(run.run.settings)) for run in runs]
    names = dict.fromkeys(name for found in settings for name in found)
    rows = []
    for name in names:
        values = [str(found[name]) if name in found else "-" for found in settings]
        if len(set(values)) > 1 and not name.startswith("hydra."):
            rows.append((name, values))
    return rows


def _differences(runs: list[Compared]) -> Iterator[Block]:
    found = setting_differences(runs)
    if not found:
        yield Text("In none: the runs have the same settings.")
        return
    # Runs go down and settings across where there are more runs than settings.
    cells = [[escaped(v, MOST_CHARACTERS) for v in values] for _, values in found[:MOST_SETTINGS]]
    names = [escaped(name, MOST_CHARACTERS) for name, _ in found[:MOST_SETTINGS]]
    if len(names) <= 6:
        rows = [[run.name, *values] for run, values in zip(runs, zip(*cells))]
        yield Table(["run", *names], rows)
    else:
        rows = [[name, *values] for name, values in zip(names, cells)]
        yield Table(["setting", *(run.name for run in runs)], rows)
    if len(found) > MOST_SETTINGS:
        yield Text(f"{len(found) - MOST_SETTINGS} more settings differ.")
