"""The live region of a run on a terminal: numbers of the last step, their course, and the clock.

It is drawn from metrics alone, so `tunix-lite watch` draws the same from the files of a run.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import rich.console
import rich.panel
import rich.table
import rich.text

from tunix_lite.plain_text import visible
from tunix_lite.tracking.rows import is_number
from tunix_lite.types import Metrics

BARS = "▁▂▃▄▅▆▇█"
# Steps that are kept of each metric, and those that a trend compares with the ones before.
KEPT = 400
TREND = 5
# Characters of a sparkline, and columns from which on two tables stand side by side.
SPARK = 20
WIDE = 110
# Rows of the region are at most this share of the terminal's.
SHARE = 0.6


@dataclass(frozen=True)
class Row:
    """One number of the region: its name, the metric, and how it is written.

    Example: `Row("reward", "reward/mean", "{:.3f}", has_best=True)`.
    """

    name: str
    metric: str
    text: str
    # whether the highest value is shown, and the step of it
    has_best: bool = False
    has_course: bool = True


LEARNING = (
    Row("reward", "reward/mean", "{:.3f}", has_best=True),
    Row("loss", "train/loss", "{:.4f}"),
    Row("right", "completions/correct", "{:.0%}", has_best=True),
    Row("held-out", "eval/accuracy", "{:.1%}", has_best=True),
    Row("kl", "train/kl", "{:.4f}"),
    Row("entropy", "train/entropy", "{:.3f}"),
    Row("length", "completions/mean_length", "{:.1f}"),
    Row("cut", "completions/truncated", "{:.0%}"),
    Row("groups agree", "reward/groups_that_agree", "{:.0%}"),
    Row("grad norm", "train/grad_norm", "{:.2f}"),
    Row("rate", "train/learning_rate", "{:.1e}", has_course=False),
)
# And below the speed the parts of a step, in their order.
SPEED = (
    Row("s/step", "time/step", "{:.2f}"),
    Row("tokens/s/device", "perf/tokens_per_second_per_device", "{:,.0f}", has_course=False),
    Row("MFU", "perf/mfu", "{:.1%}", has_course=False),
    Row("memory", "memory/peak_gb", "{:.2f} GB", has_course=False),
    Row("  rollout", "time/rollout", "{:.2f} s", has_course=False),
    Row("  rewards", "time/rewards", "{:.2f} s", has_course=False),
    Row("  scoring", "time/reference", "{:.2f} s", has_course=False),
    Row("  update", "time/update", "{:.2f} s", has_course=False),
    Row("  evaluation", "time/eval", "{:.2f} s", has_course=False),
)


class Dashboard:
    """What a run has logged so far, and what it does now.

    Example: `board.log(1, {"reward/mean": 0.5})`, then `board.drawn(80, 24)` is drawn by rich.
    """

    def __init__(
        self,
        max_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
        is_here: bool = True,
        evaluates_every: int = 0,
    ):
        """max_steps: None: not known. is_here: the run logs each step as it makes it; False: from
        files, so the time left is by the seconds of its steps. evaluates_every: steps between two
        evaluations; 0: there is one at the end, or none."""
        self.max_steps = max_steps
        self._evaluates_every = evaluates_every
        self.step = 0
        self._clock = clock
        self._is_here = is_here
        # metric -> its (step, value), the newest last; and (step, value) of the highest
        self._course: dict[str, deque[tuple[int, float]]] = {}
        self._best: dict[str, tuple[int, float]] = {}
        self._busy: tuple[str, float | None] | None = None
        # the clock at the end of the first step, which compiles, and that step
        self._began: tuple[float, int] | None = None
        # seconds of all evaluations since then, and of the last one
        self._evaluating = 0.0
        self._last_evaluation = 0.0

    def busy(self, text: str, since: float | None = None, has_clock: bool = True) -> None:
        """Takes what is done until the next step; "": nothing. since: when it began; None: now.
        has_clock: False where the text itself says how long it takes."""
        since = self._clock() if since is None else since
        self._busy = (text, since if has_clock else None) if text else None

    def log(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step; what is no finite number is left out."""
        self.step = step
        self._busy = None
        has_begun = self._began is not None
        if not has_begun and "time/step" in metrics:
            self._began = (self._clock(), step)
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                # First the best: another thread may draw what has a course.
                if name not in self._best or value > self._best[name][1]:
                    self._best[name] = (step, float(value))
                self._course.setdefault(name, deque(maxlen=KEPT)).append((step, float(value)))
        if course := self._course.get("time/eval"):
            step_of_last, self._last_evaluation = course[-1]
            if step_of_last == step and has_begun:
                self._evaluating += self._last_evaluation

    def seconds_left(self) -> float | None:
        """By the pace since the first step, which compiles, and the evaluations that are still to
        come, each as long as the last one; None: not known yet."""
        if self._began is None or self.max_steps is None or self.step <= self._began[1]:
            return None
        if self._is_here:
            seconds = self._clock() - self._began[0] - self._evaluating
            pace = max(seconds, 0.0) / (self.step - self._began[1])
        else:
            steps = [value for _, value in list(self._course["time/step"])[1:]]
            pace = sum(steps) / len(steps)

        # Evaluations are every so many steps, and after the last one.
        every = self._evaluates_every
        num_evaluations = int(self.step < self.max_steps)
        if every:
            num_evaluations += (self.max_steps - 1) // every - self.step // every
        return pace * (self.max_steps - self.step) + num_evaluations * self._last_evaluation

    # ---- drawing

    def drawn(self, width: int, height: int) -> rich.console.RenderableType:
        """The region for a terminal of so many columns and rows."""
        rows = max(1, int(height * SHARE) - 2)
        if height < 10 or width < 40 or not self._course:
            return rich.text.Text(self.headline(), no_wrap=True, overflow="ellipsis")
        is_wide = width >= WIDE
        left = self._table(LEARNING, rows, with_course=width >= 60)
        room = rows if is_wide else max(0, rows - left.row_count)
        right = self._table(SPEED, room, with_course=is_wide)
        both = rich.table.Table.grid(padding=(0, 3))
        for tables in [(left, right)] if is_wide else [(left,), (right,)]:
            both.add_row(*tables)
        title = rich.text.Text(self.headline(), no_wrap=True, overflow="ellipsis")
        return rich.panel.Panel(both, title=title, title_align="left", width=width)

    def headline(self) -> str:
        """`step 12/60 20% | eta 1m20s`, or what is done now with its clock."""
        parts = headline(self.step, self.max_steps, self.seconds_left())
        if self._busy is not None:
            text, since = self._busy
            clock = "" if since is None else f" {minutes(self._clock() - since)}"
            parts.append(f"{visible(text)}{clock}")
        return " | ".join(parts)

    def _table(self, rows: tuple[Row, ...], most: int, with_course: bool) -> rich.table.Table:
        lines = []
        for row in rows:
            course = self._course.get(row.metric)
            if course is None or len(lines) >= most:
                continue
            # A copy at once: the run may log while this thread draws.
            values = [value for _, value in list(course)]
            cells = [row.name, row.text.format(values[-1])]
            cells.append(trend(values) if row.has_course else "")
            if with_course:
                best = self._best[row.metric]
                cells.append(spark_bars(values) if row.has_course else "")
                cells.append(
                    f"best {row.text.format(best[1])} at {best[0]}" if row.has_best else ""
                )
            lines.append(cells)

        # rich would shorten names in favour of empty columns.
        table = rich.table.Table.grid(padding=(0, 1))
        for i, style in enumerate(("cyan", "bold", "", "", "dim")[: 5 if with_course else 3]):
            longest = max((len(cells[i]) for cells in lines), default=0)
            table.add_column(style=style, no_wrap=True, min_width=longest)
        for cells in lines:
            table.add_row(*map(rich.text.Text, cells))
        return table


def headline(step: int, max_steps: int | None, seconds_left: float | None) -> list[str]:
    """`step 12/60 20%` and `eta 1m20s`; None: not known."""
    parts = [f"step {step}/{max_steps} {step / max_steps:.0%}" if max_steps else f"step {step}"]
    return parts if seconds_left is None else [*parts, f"eta {minutes(seconds_left)}"]


def spark_bars(values: list[float], width: int = SPARK) -> str:
    """The course of some values as bars, each the mean of its share of them: `▁▃▅▇`."""
    if len(values) < 2:
        return ""
    parts = np.array_split(values, min(width, len(values)))
    means = [float(part.mean()) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def trend(values: list[float]) -> str:
    """Whether the mean of the last TREND values is above or below that of those before: ↗ ↘ →."""
    if len(values) < 2 * TREND:
        return ""
    now = sum(values[-TREND:]) / TREND
    before = sum(values[-2 * TREND : -TREND]) / TREND
    small = 0.02 * max(abs(now), abs(before))
    return "→" if abs(now - before) <= small else "↗" if now > before else "↘"


def best_middle_worst(groups: Iterable[list[dict]]) -> list[dict]:
    """Three rows of the group whose rewards differ most, fewer of a small one; [] without groups.
    Rows without a reward do not count."""
    rewarded = [[row for row in group if is_number(row.get("reward"))] for group in groups]
    ranked = [sorted(group, key=lambda row: -row["reward"]) for group in rewarded if group]
    if not ranked:
        return []
    group = max(ranked, key=lambda group: group[0]["reward"] - group[-1]["reward"])
    return [group[i] for i in sorted({0, len(group) // 2, len(group) - 1})]


def sample_panel(step: int, rows: list[dict], width: int) -> rich.console.RenderableType | None:
    """The best, the middle and the worst completion of one group; None where there is no group.

    rows: of samples/*.jsonl. All text is the model's, so it is no markup, and characters that act
    on a terminal are escaped.
    """
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if is_number(row.get("reward")) and "group" in row:
            groups.setdefault(str(row["group"]), []).append(row)
    picked = best_middle_worst(group for group in groups.values() if len(group) > 1)
    if not picked:
        return None
    names = ["best", "middle", "worst"] if len(picked) == 3 else ["best", "worst"]
    table = rich.table.Table.grid(padding=(0, 1))
    most = (2 if width < WIDE else 3) * max(20, width - 14)
    for name, row in zip(names, picked):
        text = rich.text.Text(_one_line(row.get("completion"), most))
        text.append(f"\n{' · '.join(_facts(row))}", style="dim")
        table.add_row(rich.text.Text(name, style="green" if row.get("correct") else "red"), text)
    prompt = rich.text.Text(f"step {step} · {_one_line(picked[0].get('prompt'), width - 24)}")
    return rich.panel.Panel(table, title=prompt, title_align="left", width=width)


def _one_line(value: object, most: int) -> str:
    """A text of a row in one line; "" where there is none."""
    text = visible(value) if isinstance(value, str) else ""
    text = text.replace("\n", " ⏎ ").replace("\t", " ")
    return text if len(text) <= most else f"{text[: max(1, most - 1)]}…"


def _facts(row: dict) -> Iterator[str]:
    """The answer of a completion, what was expected, its rewards and its advantage."""
    yield f"answer {_one_line(row.get('extracted'), 30) or 'none'}"
    if row.get("expected") is not None:
        yield f"expected {_one_line(str(row['expected']), 30)}"
    yield f"reward {row['reward']:.3g}"
    each = row.get("rewards")
    if isinstance(each, dict) and len(each) > 1:
        named = [f"{visible(str(name))} {x:.3g}" for name, x in each.items() if is_number(x)]
        yield f"({', '.join(named)})"
    if is_number(row.get("advantage")):
        yield f"advantage {row['advantage']:+.2f}"


def minutes(seconds: float) -> str:
    """A duration as `48s`, `2m05s` or `3h12m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
