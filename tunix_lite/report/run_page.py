"""The report of one run, from the files in its folder."""

import math
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from tunix_lite.files.plain_text import escaped
from tunix_lite.report import before_after
from tunix_lite.report.before_after import Measured, ScoreChange
from tunix_lite.report.charts import CURVES, MANY, curves, metrics_of, number_text
from tunix_lite.report.evidence import Evidence, read_evidence, read_overrides
from tunix_lite.report.findings import diagnose
from tunix_lite.report.page import Page, html
from tunix_lite.tracking.console import as_words
from tunix_lite.tracking.dashboard import best_middle_worst, seconds_in_words
from tunix_lite.tracking.plugs import flat
from tunix_lite.tracking.rows import is_number
from tunix_lite.tracking.rundir import RunDir

NO_FINDING = "tunix-lite doctor finds nothing: the files show none of the faults that it knows."
# settings in the table of all
MOST_SETTINGS = 400
# characters of a setting
MOST_CHARACTERS = 160
# examples of a kind that are shown
SHOWN = 5


def run_page(folder: Path, is_alive: bool | None = None) -> Page:
    """The report of the run in a folder. is_alive: whether a process holds it; None: not known.
    Raises ValueError if it is no folder of a run."""
    run = read_evidence(folder)
    overrides = read_overrides(folder, run.unread)
    measured = before_after.first_and_last(run)
    scores = before_after.scores(run, measured)
    status, mood, words = standing(run, is_alive)
    sections = [
        ("How it ended", [html.text(words, is_warning=mood != "good")] if words else []),
        ("Before and after", [*_scores(run, scores, measured)]),
        ("Curves", [*_curves(run)]),
        ("Examples", [*_examples(run, measured)]),
        ("What may be wrong", [*map(html.finding, diagnose(run))] or [html.text(NO_FINDING)]),
        ("Time", [*_times(run)]),
        ("Settings", [*_settings(run, overrides)]),
        ("Go on from here", [*_commands(run, overrides, status)]),
        ("Numbers behind the curves", [_numbers(run)]),
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
    files = [folder / name for name in ("metrics.jsonl", "status.json")]
    written = max(file.stat().st_mtime for file in files if file.is_file())
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
    return Page(
        title=" · ".join(map(escaped, title)),
        subtitle=" · ".join(_facts(run)),
        status=status,
        mood=mood,
        figures=[*_figures(run, scores)],
        hero=next(iter(curves(run, CURVES[1:2] + CURVES[:1])), None),
        sections=sections,
        footer=f"the run's files were last written {when}",
    )


# ---- the head


# By the word of status.json: the mood, and a sentence.
STANDINGS = {
    "completed": ("good", ""),
    "stopped": ("mid", "It was stopped by {stopped} after {steps}, with its state saved."),
    "failed": ("bad", "{error}"),
    "interrupted": ("bad", "{error}"),
    "running": ("mid", "status.json says that it runs; it may also have been killed."),
    "alive": ("mid", "It is still running: this is what its files say so far."),
    "killed": (
        "bad",
        "Its process is gone without a word: it was killed, or its machine went down. "
        "metrics.jsonl holds {steps}.",
    ),
    "unknown": ("mid", "There is no status.json that can be read."),
}


def standing(run: Evidence, is_alive: bool | None) -> tuple[str, str, str]:
    """How the run stands: (a word, its mood, a sentence where there is more to say)."""
    word = run.status.get("status")
    if word not in ("completed", "stopped", "failed", "interrupted", "running"):
        word = "unknown"
    key = word
    if word == "running" and is_alive is not None:
        key = "alive" if is_alive else "killed"
    mood, sentence = STANDINGS[key]
    error = run.status.get("error")
    # Of metrics.jsonl, as status.json of a killed run is older.
    last = run.rows[-1]["step"] if run.rows else 0
    words = sentence.format(
        stopped=escaped(str(run.status.get("stopped"))),
        error=error if isinstance(error, str) else "The error is not known.",
        steps=f"{last:,} step{'' if last == 1 else 's'}",
    )
    return "killed" if key == "killed" else word, mood, words


def _facts(run: Evidence) -> Iterator[str]:
    parameters = run.status.get("parameters")
    if type(parameters) is int:
        rank = run.number("model.lora.rank", 0)
        yield f"{parameters:,} parameters" + (f", adapters of rank {rank:g}" if rank else "")
    mesh = run.status.get("mesh")
    if isinstance(mesh, dict):
        yield escaped(" x ".join(f"{name}={size}" for name, size in mesh.items()))
    seed = run.status.get("seed")
    if type(seed) is int:
        yield f"seed {seed}"
    yield escaped(str(run.folder), 200)


def _figures(run: Evidence, scores: list[ScoreChange]) -> Iterator[tuple[str, str, str]]:
    accuracy = run.series("eval/accuracy")
    if scores:
        score = scores[0]
        note = interval_text(score.after, True)
        if score.change:
            change = score.change.difference
            note = (
                f"{_signed(change.value)}, 95 %: {_signed(change.low)} to {_signed(change.high)}"
            )
        value = (
            f"{number_text(score.before.value, True)} → {number_text(score.after.value, True)}"
        )
        yield "held-out accuracy", value, note
    elif accuracy:
        note = f"of one evaluation, after step {run.evaluations[0]['step']}"
        yield "held-out accuracy", number_text(accuracy.last, True), note
    reward = run.series("reward/mean")
    if reward:
        value = f"{number_text(reward.early)} → {number_text(reward.late)}"
        yield "reward", value, "mean of the first and of the last third of the steps"
    of = run.setting("training.max_steps")
    steps = f"{run.rows[-1]['step']:,}" if run.rows else "0"
    seconds = run.status.get("seconds")
    took = f"in {seconds_in_words(seconds)}" if is_number(seconds) else ""
    yield "steps", f"{steps} of {of:,}" if type(of) is int else steps, took
    tokens = run.series("train/num_tokens")
    if tokens:
        yield "tokens learned from", f"{tokens.last:,.0f}", "prompts too"
    speed = run.series("perf/tokens_per_second")
    if speed:
        yield "tokens a second", number_text(speed.late), "mean of the last third"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}"


# ---- what it learned


def interval_text(estimate: before_after.Estimate, is_share: bool) -> str:
    """`36.3 % to 48.4 %`."""
    return f"{number_text(estimate.low, is_share)} to {number_text(estimate.high, is_share)}"


def _scores(
    run: Evidence, scores: list[ScoreChange], measured: list[Measured]
) -> Iterator[Markup]:
    if not scores:
        yield html.text("The run has no evaluation of two steps that could be compared.")
        return
    steps = [m.step for m in measured]
    if len(steps) < 2:
        steps = [row["step"] for row in run.evaluations]
    heads = ["score", f"step {steps[0]}", f"step {steps[-1]}", "change", "95 % of the change"]
    rows = []
    for score in scores:
        is_share = score.name != "reward"
        signed = _signed if is_share else "{:+.3g}".format
        row = [as_words(score.name)]
        for estimate in (score.before, score.after):
            interval = interval_text(estimate, is_share)
            row.append(f"{number_text(estimate.value, is_share)} ({interval})")
        if score.change is None:
            row += [signed(score.after.value - score.before.value), "", "", ""]
        else:
            by = score.change.difference
            row += [signed(by.value), f"{signed(by.low)} to {signed(by.high)}"]
            row += [
                f"{score.change.better}, {score.change.worse}",
                f"{score.change.p_value:.2g}",
            ]
        rows.append(row)
    note = "In brackets the 95 % interval of each. "
    change = scores[0].change
    if change is not None:
        count = change.better + change.worse + change.equal
        note += (
            f"Greedy completions of the same {count:,} held-out examples; avg, pass and maj are of "
            "samples. Intervals are bootstraps over the examples; p is that of exchanging before "
            "and after."
        )
    else:
        note += (
            "samples/ does not hold both evaluations: the interval is that of a share (Wilson)."
        )
    yield html.table([*heads, "higher, lower", "p"], rows, 1, note)
    best = run.series("eval/accuracy")
    if len(best) > 2:
        share = number_text(best.largest, True)
        words = f"The best of {len(best)} evaluations: {share}, after step {best.at_largest()}."
        yield html.text(words)


def _curves(run: Evidence) -> Iterator[Markup]:
    if not run.rows:
        yield html.text("No step was made.")
        return
    yield html.charts(curves(run))
    many = (
        "A thick line is the moving average of the thin one. " if len(run.rows) >= MANY else ""
    )
    yield html.text(
        f"{many}Beside a title stand the first and the last evaluation, or else the means of the "
        "first and of the last third of the steps."
    )


def _examples(run: Evidence, measured: list[Measured]) -> Iterator[Markup]:
    if len(measured) > 1:
        before, after = measured[0], measured[-1]
        moved = before_after.moved(before, after)
        yield html.text(
            f"Greedy completions of the same held-out examples at step {before.step} and step "
            f"{after.step}: {len(moved[False, True])} were improved, {len(moved[True, False])} "
            f"were spoilt, {len(moved[True, True])} stayed right, {len(moved[False, False])} "
            "stayed wrong."
        )
        for name, ends in (
            ("Improved: wrong before, right after", (False, True)),
            ("Spoilt: right before, wrong after", (True, False)),
            ("Still wrong", (False, False)),
        ):
            # Some of them, evenly from the first to the last.
            groups = moved[ends]
            chosen = groups[:: max(math.ceil(len(groups) / SHOWN), 1)]
            shown = [
                (
                    before.greedy[g],
                    [(f"step {m.step}", m.greedy[g], "") for m in (before, after)],
                )
                for g in chosen
            ]
            title = f"{name} ({len(groups)})"
            block = html.examples(title, shown)
            if shown:
                yield html.folded(title, block) if ends == (False, False) else block
    steps = sorted(step for step in run.samples if run.groups(step))
    chosen = best_middle_worst(run.groups(steps[-1]) if steps else [])
    if chosen:
        answers = [(f"reward {row['reward']:.3g}", row, _rewards(row)) for row in chosen]
        title = f"What step {steps[-1]} learned from: best, middle and worst of a group"
        yield html.examples(title, [(chosen[0], answers)])


def _rewards(row: dict) -> str:
    """`correct 1 · short 0.3 · advantage +0.62`."""
    rewards = row.get("rewards")
    parts = []
    for name, value in rewards.items() if isinstance(rewards, dict) else ():
        number = f" {value:.3g}" if is_number(value) else ""
        parts.append(f"{escaped(str(name))}{number}")
    if is_number(row.get("advantage")):
        parts.append(f"advantage {row['advantage']:+.2f}")
    return " · ".join(parts[:8])


# ---- what it cost


# time/ keys of parts of collecting, but for the pass of each scorer, and of what is beside it
COLLECTING = {"time/rollout": "sampling", "time/rewards": "waiting for rewards"}
BESIDE = {
    "time/update": "update",
    "time/compile": "compiling in steps",
    "time/eval": "evaluation",
}
# and those that lie in other ones
OTHER_TIMES = {"time/collect", "time/step", "time/rollout_beside_update", "time/extra_rounds"}
OTHER_TIMES |= {"time/reward_p50", "time/reward_p99"}


def _times(run: Evidence) -> Iterator[Markup]:
    """Where the seconds went; all together they are the seconds of status.json, as far as it knows
    them."""
    trained = {row["step"] for row in run.rows}
    rows = [*run.rows, *(row for row in run.evaluations if row["step"] not in trained)]

    def total(name: str) -> tuple[float, int]:
        """Seconds in all, and the steps that have some."""
        values = [row[name] for row in rows if is_number(row.get(name)) and row[name] >= 0]
        return math.fsum(values), len(values)

    times = {key for row in run.rows for key in row if key.startswith("time/")}
    scorers = sorted(times - COLLECTING.keys() - BESIDE.keys() - OTHER_TIMES)
    passes = {key: f"pass of {escaped(key.removeprefix('time/'))}" for key in scorers}
    inside = [(name, *total(key)) for key, name in (COLLECTING | passes).items()]
    beside = [(name, *total(key)) for key, name in BESIDE.items()]
    collecting, count = total("time/collect")
    rest = collecting - sum(seconds for _, seconds, _ in inside)
    every = [*inside, ("rest of collecting", rest, count), *beside]
    whole = run.status.get("seconds")
    if is_number(whole):
        rest = whole - collecting - sum(seconds for _, seconds, _ in beside)
        every.append(("start, compiling, files", rest, 0))
    every = [phase for phase in every if phase[1] > 0]
    whole = sum(seconds for _, seconds, _ in every)
    if not every:
        return
    parts = [(name, seconds, f"{seconds / whole:.0%}") for name, seconds, _ in every]
    yield html.bar(f"{seconds_in_words(whole)} in all", parts)
    cells = []
    for name, seconds, count in every:
        mean = f"{seconds / count:.3g}" if count else ""
        cells.append([name, f"{seconds:,.1f}", f"{seconds / whole:.1%}", mean])
    note = "The first step's sampling includes compiling it."
    mfu = run.series("perf/mfu")
    if mfu:
        note += f" MFU, mean of the last third of the steps: {mfu.late:.1%}."
    yield html.table(["phase", "seconds", "share", "seconds each time"], cells, 1, note)


# ---- settings, lines to paste, and numbers


def _settings(run: Evidence, overrides: list[str] | None) -> Iterator[Markup]:
    def table(heads: list[str], pairs: list[tuple[str, object]], note: str = "") -> Markup:
        cells = [[escaped(str(x), MOST_CHARACTERS) for x in pair] for pair in pairs]
        return html.table(heads, cells[:MOST_SETTINGS], note=note)

    if overrides is None:
        yield html.text("The run was not started from the command line. Its settings are below.")
    elif not overrides:
        yield html.text("All settings are the defaults.")
    else:
        pairs = [override.partition("=")[::2] for override in overrides]
        yield table(["changed from the defaults", "value"], pairs)
    facts = []
    for name in ("batch", "mesh", "versions"):
        value = run.status.get(name)
        if isinstance(value, dict):
            value = ", ".join(f"{key}={item}" for key, item in value.items())
        if value is not None:
            facts.append((name, value))
    if facts:
        yield table(["what they come to", ""], facts)
    every = [*flat(run.settings)]
    if every:
        more = len(every) - MOST_SETTINGS
        note = f"{more} more are left out." if more > 0 else ""
        yield html.folded(f"all {len(every)} settings", table(["setting", "value"], every, note))


def _commands(run: Evidence, overrides: list[str] | None, status: str) -> Iterator[Markup]:
    checkpoints = RunDir(run.folder).checkpoints
    steps = [path for path in checkpoints.glob("*") if path.is_dir() and path.name.isdecimal()]
    words = [shlex.quote(text) for text in overrides or [] if text.isprintable()]
    lines = []
    if overrides is not None:
        again = " ".join(["python run_training.py", *words])
        here = shlex.quote(f"hydra.run.dir={run.folder}")
        if status != "completed":
            does = "go on from its newest checkpoint" if steps else "begin it anew in its folder"
            lines.append((does, f"{again} {here}"))
        elif run.rows:
            more = f"training.max_steps={2 * run.rows[-1]['step']}"
            without = [text for text in words if not text.startswith("training.max_steps=")]
            line = " ".join(["python run_training.py", *without, more, here])
            lines.append(("train on", line))
        lines.append(("make it again, in a folder of its own", again))
    if steps:
        folder = shlex.quote(f"checkpoint={run.folder}")
        of_data = ("task", "generation", "rewards")
        same = [text for text in words if text.strip("'\"+~").startswith(of_data)]
        lines += [
            ("measure it", " ".join(["tunix-lite evaluate", folder, *same])),
            ("talk to it", f"tunix-lite generate {folder}"),
            ("export it for transformers or vLLM", f"tunix-lite export {folder}"),
        ]
    place = shlex.quote(str(run.folder))
    lines.append(("ask why it does not learn", f"tunix-lite doctor {place}"))
    lines.append(("write this report again", f"tunix-lite doctor {place} doctor.report={place}"))
    yield html.commands(lines)
    if not steps:
        none = "There is no checkpoint, so there is nothing to measure, talk to or export."
        yield html.text(none)
    if any("_target_" in text for text in overrides or []):
        yield html.text(
            "An override names something to import and call (_target_): read it before you run a "
            "line of somebody else's run.",
            is_warning=True,
        )


def _numbers(run: Evidence) -> Markup:
    """Every curve in numbers."""
    rows = []
    for name in [name for curve in CURVES for name in metrics_of(run, curve)]:
        series = run.series(name)
        if series:
            ends = (series.first, series.last, series.least, series.largest)
            rows.append([name, *(f"{x:.4g}" for x in (*ends, series.early, series.late))])
    heads = ["metric", "first", "last", "least", "most", "first third", "last third"]
    return html.folded("first, last, least and most of each metric", html.table(heads, rows, 1))
