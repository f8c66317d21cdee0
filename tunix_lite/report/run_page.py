"""The report of one run, from the files in its folder."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from tunix_lite.basics.plain_text import escaped
from tunix_lite.report import before_after
from tunix_lite.report.before_after import Measured, ScoreChange
from tunix_lite.report.charts import CURVES, curves, ends, metrics_of, number_text
from tunix_lite.report.evidence import Evidence, read_evidence, read_overrides
from tunix_lite.report.findings import diagnose
from tunix_lite.report.page import Page, html
from tunix_lite.report.statistics import Estimate
from tunix_lite.tracking.console import as_words, seconds_in_words
from tunix_lite.tracking.rows import is_number

_ABOUT_CURVES = (
    "A thick line is the moving average of the thin one. Beside a title stand the first and the "
    "last evaluation, or else the means of the first and of the last third of the steps."
)
_NO_FINDING = (
    "tunix-lite doctor finds nothing: the files show none of the faults that it knows."
)
# examples of a kind that are shown
_SHOWN = 5


def run_page(folder: Path, is_alive: bool | None = None) -> Page:
    """The report of the run in a folder. is_alive: whether a process holds it; None: not known.
    Raises ValueError if it is no folder of a run."""
    run = read_evidence(folder)
    overrides = read_overrides(folder, run.unread)
    changed = (
        [" ".join(overrides) or "All settings are the defaults."]
        if overrides is not None
        else []
    )
    measured = before_after.first_and_last(run)
    scores = before_after.scores(measured)
    charts = curves(run)
    status, mood, words = standing(run, is_alive)
    # Every curve in numbers.
    rows = []
    for name in [name for curve in CURVES for name in metrics_of(run, curve)]:
        if series := run.series(name):
            values = (series.first, series.last, series.least, series.largest)
            rows.append([name, *(f"{x:.4g}" for x in (*values, series.early, series.late))])
    heads = ["metric", "first", "last", "least", "most", "first third", "last third"]
    sections = [
        ("How it ended", [html.text(words, is_warning=mood != "good")] if words else []),
        ("Before and after", [*_scores(scores, measured)]),
        ("Curves", [html.charts(charts), html.text(_ABOUT_CURVES)]),
        ("Examples", [*_examples(run, measured)]),
        ("What may be wrong", [*map(html.finding, diagnose(run))] or [html.text(_NO_FINDING)]),
        ("Changed from the defaults", [*map(html.text, changed)]),
        (
            "Numbers behind the curves",
            [
                html.folded(
                    "first, last, least and most of each metric", html.table(heads, rows, 1)
                )
            ],
        ),
    ]
    # At last what the parts before could not read.
    for text in dict.fromkeys(run.unread):
        sections[-1][1].append(html.text(f"not read: {text}", is_warning=True))
    # `GRPO · arithmetic`: the algorithm, and where the problems are from.
    algorithm = run.status.get("algorithm")
    title = [algorithm if isinstance(algorithm, str) else "a run"]
    for name, mark in (("task.source._target_", "."), ("model.weights", "/")):
        value = run.setting(name)
        if isinstance(value, str):
            title.append(value.rstrip("/").rpartition(mark)[2])
    facts = [f"seed {run.status.get('seed')}", str(folder)]
    if type(count := run.status.get("parameters")) is int:
        facts.insert(0, f"{count:,} parameters")
    # the page itself is written later, and may be written again
    files = [folder / name for name in ("metrics.jsonl", "status.json")]
    # Not the time of now: the same files make the same page.
    written = max(file.stat().st_mtime for file in files if file.is_file())
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
    of_accuracy = [chart for chart in charts if chart.title == "held-out accuracy"]
    return Page(
        title=" · ".join(map(escaped, title)),
        subtitle=" · ".join(map(escaped, facts)),
        status=status,
        mood=mood,
        figures=[*_figures(run, scores)],
        hero=next(iter(of_accuracy or charts), None),
        sections=sections,
        footer=f"the run's files were last written {when}",
    )


# By the word of status.json: the mood, and a sentence.
_STANDINGS = {
    "completed": ("good", "{early_stopping}"),
    "stopped": ("mid", "It was stopped by {stopped} after {steps}, with its state saved."),
    "failed": ("bad", "{error}"),
    "interrupted": ("bad", "{error}"),
    "running": (
        "mid",
        "It is still running, or was killed: this is what its files say so far.",
    ),
    "killed": (
        "bad",
        "Its process is gone without a word: it was killed, or its machine went down. "
        "metrics.jsonl holds {steps}.",
    ),
    "unknown": ("mid", "There is no status.json that can be read."),
}
# A difference of shares.
_percent = "{:+.1%}".format


def standing(run: Evidence, is_alive: bool | None) -> tuple[str, str, str]:
    """How the run stands: (a word, its mood, a sentence where there is more to say)."""
    word = run.status.get("status")
    if not isinstance(word, str) or word not in _STANDINGS:
        word = "unknown"
    if word == "running" and is_alive is False:
        # nobody wrote that it ended, and no process has the folder
        word = "killed"
    mood, sentence = _STANDINGS[word]
    # Of metrics.jsonl, as status.json of a killed run is older.
    last = run.rows[-1]["step"] if run.rows else 0
    steps = f"{last:,} step{'' if last == 1 else 's'}"
    unknown = {"error": "The error is not known.", "stopped": "", "early_stopping": ""}
    values = {**unknown, **run.status, "steps": steps}
    return word, mood, sentence.format_map(values)


def _figures(run: Evidence, scores: list[ScoreChange]) -> Iterator[tuple[str, str, str]]:
    accuracy = run.series("eval/accuracy")
    if scores:
        by = scores[0].change.difference
        note = f"{_percent(by.value)}, 95 %: {_percent(by.low)} to {_percent(by.high)}"
        values = (scores[0].before.value, scores[0].after.value)
        yield "held-out accuracy", " → ".join(number_text(x, True) for x in values), note
    elif accuracy:
        yield "held-out accuracy", number_text(accuracy.last, True), "of the last evaluation"
    if loss := run.series("eval/loss"):
        value = " → ".join(number_text(x) for x in (loss.first, loss.last))
        yield "held-out loss", value, f"the least is {number_text(loss.least)}"
    if reward := run.series("reward/mean"):
        value = " → ".join(map(number_text, ends(reward)))
        yield "reward", value, "mean of the first and of the last third of the steps"
    most = run.setting("training.max_steps")
    steps = f"{run.rows[-1]['step']:,}" if run.rows else "0"
    seconds = run.status.get("seconds")
    took = f"in {seconds_in_words(seconds)}" if is_number(seconds) else ""
    yield "steps", f"{steps} of {most:,}" if type(most) is int else steps, took
    if tokens := run.series("train/num_tokens"):
        yield "tokens learned from", f"{tokens.last:,.0f}", "prompts too"
    if speed := run.series("perf/tokens_per_second"):
        yield "tokens a second", number_text(speed.late), "mean of the last third"


def interval_text(estimate: Estimate, is_share: bool) -> str:
    """`36.3 % to 48.4 %`."""
    return f"{number_text(estimate.low, is_share)} to {number_text(estimate.high, is_share)}"


def _scores(scores: list[ScoreChange], measured: list[Measured]) -> Iterator[Markup]:
    if not scores:
        yield html.text("samples/ has no evaluation of two steps that could be compared.")
        return
    heads = ["score", *(f"step {one.step}" for one in measured)]
    heads += ["change", "95 % of the change", "higher, lower"]
    rows = []
    for score in scores:
        is_share = score.name != "reward"
        signed = _percent if is_share else "{:+.3g}".format
        row = [as_words(score.name)]
        for one in (score.before, score.after):
            row.append(f"{number_text(one.value, is_share)} ({interval_text(one, is_share)})")
        by = score.change.difference
        row += [signed(by.value), f"{signed(by.low)} to {signed(by.high)}"]
        row.append(f"{score.change.better}, {score.change.worse}")
        rows.append(row)
    note = (
        f"Greedy completions of the same {len(measured[-1].greedy):,} held-out examples; avg and "
        "pass are of samples. In brackets the 95 % interval of each, a bootstrap over the examples."
    )
    yield html.table(heads, rows, 1, note)


def _examples(run: Evidence, measured: list[Measured]) -> Iterator[Markup]:
    if len(measured) > 1:
        before, after = measured
        moved = before_after.moved(before, after)
        yield html.text(
            f"Greedy completions of the same held-out examples at step {before.step} and step "
            f"{after.step}: {len(moved[False, True])} were improved, {len(moved[True, False])} "
            f"were spoilt, {len(moved[True, True])} stayed right, {len(moved[False, False])} "
            "stayed wrong."
        )
        for name, was_and_is in (
            ("Improved: wrong before, right after", (False, True)),
            ("Spoilt: right before, wrong after", (True, False)),
            ("Still wrong", (False, False)),
        ):
            # Some of them, evenly from the first to the last.
            groups = moved[was_and_is]
            shown = []
            for group in groups[:: max(math.ceil(len(groups) / _SHOWN), 1)]:
                answers = [(f"step {one.step}", one.greedy[group], "") for one in measured]
                shown.append((before.greedy[group], answers))
            if shown:
                yield html.examples(f"{name} ({len(groups)})", shown)
    # Of the last step the group whose rewards differ most: where they do, the policy has learned
    # something. Rows without a reward do not count.
    steps = sorted(step for step in run.samples if run.groups(step))
    ranked = []
    for group in run.groups(steps[-1]) if steps else []:
        rewarded = [row for row in group if is_number(row.get("reward"))]
        ranked.append(sorted(rewarded, key=lambda row: -row["reward"]))
    if ranked := [group for group in ranked if group]:
        group = max(ranked, key=lambda group: group[0]["reward"] - group[-1]["reward"])
        chosen = [group[i] for i in sorted({0, len(group) // 2, len(group) - 1})]
        answers = []
        for row in chosen:
            # `correct 1 · short 0.3 · advantage +0.62`
            rewards = row.get("rewards")
            every = rewards.items() if isinstance(rewards, dict) else ()
            parts = [f"{escaped(str(name))} {x:.3g}" for name, x in every if is_number(x)]
            if is_number(row.get("advantage")):
                parts.append(f"advantage {row['advantage']:+.2f}")
            answers.append((f"reward {row['reward']:.3g}", row, " · ".join(parts[:8])))
        title = f"What step {steps[-1]} learned from: best, middle and worst of a group"
        yield html.examples(title, [(chosen[0], answers)])
