"""The report of one run, from the files in its folder."""

import time
from collections.abc import Iterator
from pathlib import Path

from tunix_lite.plain_text import escaped
from tunix_lite.report import before_after
from tunix_lite.report.before_after import Measured, ScoreChange, answer_of
from tunix_lite.report.charts import number_text
from tunix_lite.report.costs import memory_blocks, sent_blocks, time_blocks
from tunix_lite.report.curves import CURVES, curve_blocks, curves, number_blocks
from tunix_lite.report.evidence import (
    Evidence,
    read_evidence,
    read_overrides,
)
from tunix_lite.report.findings import diagnose
from tunix_lite.report.going_on import command_blocks, setting_blocks
from tunix_lite.report.page import (
    Block,
    Example,
    Examples,
    Folded,
    Page,
    Section,
    Table,
    Text,
)
from tunix_lite.tracking.console import as_words
from tunix_lite.tracking.dashboard import minutes
from tunix_lite.tracking.rows import is_number

NO_FINDING = "tunix-lite doctor finds nothing: the files show none of the faults that it knows."


def run_page(folder: Path, is_alive: bool | None = None, command: str = "") -> Page:
    """The report of the run in a folder.

    is_alive: whether a process holds the folder; None: not known. command: what starts a run, for
    the lines to paste. Raises ValueError if the folder is not one of a run.
    """
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
        Section("Time", [*time_blocks(run)]),
        Section("Memory", [*memory_blocks(run)]),
        Section("What crosses devices", [*sent_blocks(run)]),
        Section("Settings", [*setting_blocks(run, overrides)]),
        Section("Go on from here", [*command_blocks(run, overrides, status, command)]),
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


def standing(run: Evidence, is_alive: bool | None) -> tuple[str, str, str]:
    """How the run stands: (a word, its mood, a sentence where there is more to say)."""
    status = run.status.get("status")
    error = run.status.get("error")
    if status == "completed":
        return "completed", "good", ""
    if status == "stopped":
        reason = escaped(str(run.status.get("stopped")))
        return (
            "stopped",
            "mid",
            f"It was stopped by {reason} after {_steps(run)}, with its state saved.",
        )
    if status in ("failed", "interrupted"):
        return (
            str(status),
            "bad",
            f"{error}" if isinstance(error, str) else "The error is not known.",
        )
    if status == "running" and is_alive:
        return "running", "mid", "It is still running: this is what its files say so far."
    if status == "running" and is_alive is False:
        words = (
            "Its process is gone without a word: it was killed, or its machine went down. "
            f"metrics.jsonl holds {_steps(run)}."
        )
        return "killed", "bad", words
    if status == "running":
        return "running", "mid", "status.json says that it runs; it may also have been killed."
    return "unknown", "mid", "There is no status.json that can be read."


def _steps(run: Evidence) -> str:
    """`60 steps`: of metrics.jsonl, as status.json of a killed run is older."""
    last = run.rows[-1]["step"] if run.rows else 0
    return f"{last:,} step{'' if last == 1 else 's'}"


def title_of(run: Evidence) -> str:
    """`GRPO · arithmetic`: the algorithm, and where the problems are from."""
    algorithm = run.status.get("algorithm")
    source = run.setting("task.source._target_")
    parts = [algorithm if isinstance(algorithm, str) else "a run"]
    if isinstance(source, str):
        parts.append(source.rpartition(".")[2])
    weights = run.setting("model.weights")
    if isinstance(weights, str):
        parts.append(Path(weights).name)
    return " · ".join(escaped(part) for part in parts)


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
    for score in scores[:1]:
        change = score.change.difference if score.change else None
        note = interval_text(score.after, True)
        if change is not None:
            note = f"{_signed(change.value)}, 95 %: {_signed(change.low)} to {_signed(change.high)}"
        value = f"{number_text(score.before.value, True)} → {number_text(score.after.value, True)}"
        yield ("held-out accuracy", value, note)
    accuracy = run.series("eval/accuracy")
    if not scores and accuracy is not None:
        note = f"of one evaluation, after step {run.evaluations[0]['step']}"
        yield ("held-out accuracy", number_text(accuracy.last, True), note)
    reward = run.series("reward/mean")
    if reward is not None:
        value = f"{number_text(reward.early)} → {number_text(reward.late)}"
        yield ("reward", value, "mean of the first and of the last third of the steps")
    of = run.setting("training.max_steps")
    steps = f"{run.rows[-1]['step']:,}" if run.rows else "0"
    seconds = run.status.get("seconds")
    took = f"in {minutes(seconds)}" if is_number(seconds) else ""
    yield ("steps", f"{steps} of {of:,}" if type(of) is int else steps, took)
    tokens = run.series("train/num_tokens")
    speed = run.series("perf/tokens_per_second")
    if tokens is not None:
        yield ("tokens learned from", f"{tokens.last:,.0f}", "prompts too")
    if speed is not None:
        yield ("tokens a second", number_text(speed.late), "mean of the last third")


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}"


# ---- before and after


def interval_text(found: before_after.Estimate, is_share: bool) -> str:
    """`36.3 % to 48.4 %`."""
    return f"{number_text(found.low, is_share)} to {number_text(found.high, is_share)}"


def _scores(run: Evidence, scores: list[ScoreChange], measured: list[Measured]) -> Iterator[Block]:
    if not scores:
        yield Text("The run has no evaluation of two steps that could be compared.")
        return
    steps = (
        [m.step for m in measured]
        if len(measured) > 1
        else [row["step"] for row in run.evaluations]
    )
    heads = ["score", f"step {steps[0]}", f"step {steps[-1]}", "change", "95 % of the change"]
    heads += ["higher, lower", "p"]
    rows = []
    for score in scores:
        is_share = score.name != "reward"
        row = [as_words(score.name)]
        for found in (score.before, score.after):
            row.append(f"{number_text(found.value, is_share)} ({interval_text(found, is_share)})")
        change = score.change
        if change is None:
            difference = score.after.value - score.before.value
            row += [_signed(difference) if is_share else f"{difference:+.3g}", "", "", ""]
        else:
            found = change.difference
            values = (found.value, found.low, found.high)
            shown = [_signed(v) if is_share else f"{v:+.3g}" for v in values]
            row += [shown[0], f"{shown[1]} to {shown[2]}", f"{change.better}, {change.worse}"]
            row.append(f"{change.p_value:.2g}")
        rows.append(row)
    note = "In brackets the 95 % interval of each. "
    if scores[0].change is not None:
        count = sum(getattr(scores[0].change, kind) for kind in ("better", "worse", "equal"))
        note += (
            f"Greedy completions of the same {count:,} held-out examples; avg, pass and maj are of "
            "samples. Intervals are bootstraps over the examples; p is that of exchanging before "
            "and after."
        )
    else:
        note += "samples/ does not hold both evaluations: the interval is that of a share (Wilson)."
    yield Table(heads, rows, numbers_from=1, note=note)
    best = run.series("eval/accuracy")
    if best is not None and len(best) > 2:
        share = number_text(best.largest, True)
        yield Text(f"The best of {len(best)} evaluations: {share}, after step {best.at_largest()}.")


# ---- examples


def _examples(run: Evidence, measured: list[Measured]) -> Iterator[Block]:
    if len(measured) > 1:
        before, after = measured[0], measured[-1]
        found = before_after.moved(before, after)
        yield Text(
            f"Greedy completions of the same held-out examples at step {before.step} and step "
            f"{after.step}: {len(found.improved)} were improved, {len(found.spoilt)} were spoilt, "
            f"{len(found.right)} stayed right, {len(found.wrong)} stayed wrong."
        )
        for title, groups in (
            ("Improved: wrong before, right after", found.improved),
            ("Spoilt: right before, wrong after", found.spoilt),
            ("Still wrong", found.wrong),
        ):
            shown = before_after.shown_examples(before, after, groups)
            block = Examples(f"{title} ({len(groups)})", shown)
            if shown:
                yield Folded(block.title, block) if groups is found.wrong else block
    # The group of the last sampled step whose rewards differ most: best, middle and worst.
    steps = sorted(step for step in run.samples if run.groups(step))
    groups = run.groups(steps[-1]) if steps else []
    groups = [[row for row in group if is_number(row.get("reward"))] for group in groups]
    ranked = [sorted(group, key=lambda row: -row["reward"]) for group in groups if group]
    if not ranked:
        return
    group = max(ranked, key=lambda group: group[0]["reward"] - group[-1]["reward"])
    chosen = [group[i] for i in sorted({0, len(group) // 2, len(group) - 1})]
    answers = [answer_of(row, f"reward {row['reward']:.3g}", _rewards(row)) for row in chosen]
    expected = chosen[0].get("expected")
    yield Examples(
        f"What step {steps[-1]} learned from: best, middle and worst of a group",
        [
            Example(
                str(chosen[0].get("prompt")), None if expected is None else str(expected), answers
            )
        ],
    )


def _rewards(row: dict) -> str:
    """`correct 1 · short 0.3 · advantage +0.62`."""
    parts = []
    rewards = row.get("rewards")
    for name, value in rewards.items() if isinstance(rewards, dict) else ():
        parts.append(
            f"{escaped(str(name))} {value:.3g}" if is_number(value) else escaped(str(name))
        )
    if is_number(row.get("advantage")):
        parts.append(f"advantage {row['advantage']:+.2f}")
    return " · ".join(parts[:8])
