"""The report of one run, from the files in its folder."""

import time
from collections.abc import Iterator
from pathlib import Path

from tunix_lite.plain_text import escaped
from tunix_lite.report import before_after
from tunix_lite.report import sections as parts
from tunix_lite.report.before_after import Measured, ScoreChange
from tunix_lite.report.charts import number_text
from tunix_lite.report.curves import CURVES, curve_blocks, curves, number_blocks
from tunix_lite.report.evidence import Evidence, read_evidence, read_overrides
from tunix_lite.report.findings import diagnose
from tunix_lite.report.page import Block, Example, Examples, Folded, Page, Section, Table, Text
from tunix_lite.tracking.console import as_words
from tunix_lite.tracking.dashboard import best_middle_worst, minutes
from tunix_lite.tracking.rows import is_number

NO_FINDING = "tunix-lite doctor finds nothing: the files show none of the faults that it knows."


def run_page(folder: Path, is_alive: bool | None = None, command: str = "") -> Page:
    """The report of the run in a folder. is_alive: whether a process holds it; None: not known.
    command: starts a run, in the lines to paste. Raises ValueError if it is no folder of a run."""
    run = read_evidence(folder)
    overrides = read_overrides(folder, run.unread)
    measured = before_after.first_and_last(run)
    scores = before_after.scores(run, measured)
    status, mood, words = standing(run, is_alive)
    command = command or "python run_training.py"
    sections = [
        Section("Before and after", [*_scores(run, scores, measured)]),
        Section("Curves", [*curve_blocks(run)]),
        Section("Examples", [*_examples(run, measured)]),
        Section("What may be wrong", diagnose(run) or [Text(NO_FINDING)]),
        Section("Time", [*parts.time_blocks(run)]),
        Section("Memory", [*parts.memory_blocks(run)]),
        Section("What crosses devices", [*parts.sent_blocks(run)]),
        Section("Settings", [*parts.setting_blocks(run, overrides)]),
        Section("Go on from here", [*parts.command_blocks(run, overrides, status, command)]),
        Section("Numbers behind the curves", [number_blocks(run)]),
    ]
    # At last what the parts before could not read.
    for text in dict.fromkeys(run.unread):
        sections[-1].blocks.append(Text(f"not read: {text}", is_warning=True))
    if words:
        sections.insert(0, Section("How it ended", [Text(words, is_warning=mood != "good")]))
    return Page(
        title=title_of(run),
        subtitle=" · ".join(_facts(run)),
        status=status,
        mood=mood,
        figures=[*_figures(run, scores)],
        hero=next(iter(curves(run, CURVES[1:2] + CURVES[:1])), None),
        sections=[section for section in sections if section.blocks],
        footer=_footer(run),
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


def title_of(run: Evidence) -> str:
    """`GRPO · arithmetic`: the algorithm, and where the problems are from."""
    algorithm = run.status.get("algorithm")
    parts = [algorithm if isinstance(algorithm, str) else "a run"]
    for name, mark in (("task.source._target_", "."), ("model.weights", "/")):
        value = run.setting(name)
        if isinstance(value, str):
            parts.append(value.rstrip("/").rpartition(mark)[2])
    return " · ".join(map(escaped, parts))


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


def _footer(run: Evidence) -> str:
    files = [run.folder / name for name in ("metrics.jsonl", "status.json")]
    written = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
    versions = run.status.get("versions")
    parts = [f"the run's files were last written {when}"]
    if isinstance(versions, dict):
        parts += [escaped(f"{name} {version}") for name, version in versions.items()]
    return " · ".join(parts)


def _figures(run: Evidence, scores: list[ScoreChange]) -> Iterator[tuple[str, str, str]]:
    accuracy = run.series("eval/accuracy")
    if scores:
        score = scores[0]
        note = interval_text(score.after, True)
        if score.change:
            change = score.change.difference
            note = f"{_signed(change.value)}, 95 %: {_signed(change.low)} to {_signed(change.high)}"
        value = f"{number_text(score.before.value, True)} → {number_text(score.after.value, True)}"
        yield "held-out accuracy", value, note
    elif accuracy is not None:
        note = f"of one evaluation, after step {run.evaluations[0]['step']}"
        yield "held-out accuracy", number_text(accuracy.last, True), note
    reward = run.series("reward/mean")
    if reward is not None:
        value = f"{number_text(reward.early)} → {number_text(reward.late)}"
        yield "reward", value, "mean of the first and of the last third of the steps"
    of = run.setting("training.max_steps")
    steps = f"{run.rows[-1]['step']:,}" if run.rows else "0"
    seconds = run.status.get("seconds")
    took = f"in {minutes(seconds)}" if is_number(seconds) else ""
    yield "steps", f"{steps} of {of:,}" if type(of) is int else steps, took
    tokens = run.series("train/num_tokens")
    if tokens is not None:
        yield "tokens learned from", f"{tokens.last:,.0f}", "prompts too"
    speed = run.series("perf/tokens_per_second")
    if speed is not None:
        yield "tokens a second", number_text(speed.late), "mean of the last third"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}"


# ---- before and after


def interval_text(estimate: before_after.Estimate, is_share: bool) -> str:
    """`36.3 % to 48.4 %`."""
    return f"{number_text(estimate.low, is_share)} to {number_text(estimate.high, is_share)}"


def _scores(run: Evidence, scores: list[ScoreChange], measured: list[Measured]) -> Iterator[Block]:
    if not scores:
        yield Text("The run has no evaluation of two steps that could be compared.")
        return
    steps = [m.step for m in measured]
    if len(steps) < 2:
        steps = [row["step"] for row in run.evaluations]
    heads = ["score", f"step {steps[0]}", f"step {steps[-1]}", "change", "95 % of the change"]
    rows = [_score_row(score, is_share=score.name != "reward") for score in scores]
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
        note += "samples/ does not hold both evaluations: the interval is that of a share (Wilson)."
    yield Table([*heads, "higher, lower", "p"], rows, numbers_from=1, note=note)
    best = run.series("eval/accuracy", least=3)
    if best is not None:
        share = number_text(best.largest, True)
        yield Text(f"The best of {len(best)} evaluations: {share}, after step {best.at_largest()}.")


def _score_row(score: ScoreChange, is_share: bool) -> list[str]:
    def signed(value: float) -> str:
        return _signed(value) if is_share else f"{value:+.3g}"

    row = [as_words(score.name)]
    for estimate in (score.before, score.after):
        interval = interval_text(estimate, is_share)
        row.append(f"{number_text(estimate.value, is_share)} ({interval})")
    change = score.change
    if change is None:
        return [*row, signed(score.after.value - score.before.value), "", "", ""]
    by = change.difference
    row += [signed(by.value), f"{signed(by.low)} to {signed(by.high)}"]
    return [*row, f"{change.better}, {change.worse}", f"{change.p_value:.2g}"]


# ---- examples


def _examples(run: Evidence, measured: list[Measured]) -> Iterator[Block]:
    if len(measured) > 1:
        before, after = measured[0], measured[-1]
        moved = before_after.moved(before, after)
        yield Text(
            f"Greedy completions of the same held-out examples at step {before.step} and step "
            f"{after.step}: {len(moved.improved)} were improved, {len(moved.spoilt)} were spoilt, "
            f"{len(moved.right)} stayed right, {len(moved.wrong)} stayed wrong."
        )
        for title, groups in (
            ("Improved: wrong before, right after", moved.improved),
            ("Spoilt: right before, wrong after", moved.spoilt),
            ("Still wrong", moved.wrong),
        ):
            shown = before_after.shown_examples(before, after, groups)
            block = Examples(f"{title} ({len(groups)})", shown)
            if shown:
                yield Folded(block.title, block) if groups is moved.wrong else block
    steps = sorted(step for step in run.samples if run.groups(step))
    chosen = best_middle_worst(run.groups(steps[-1]) if steps else [])
    if chosen:
        answers = [(f"reward {row['reward']:.3g}", row, _rewards(row)) for row in chosen]
        title = f"What step {steps[-1]} learned from: best, middle and worst of a group"
        yield Examples(title, [Example(chosen[0], answers)])


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
