"""The live region of a run on a terminal: numbers of the last step, their course, and the clock.

It is drawn from metrics alone, so `tunix-lite watch` draws the same from the files of a run.
"""

import math
import time
from collections import deque
from collections.abc import Iterable

import numpy as np
import rich.console
import rich.panel
import rich.table
import rich.text

from tunix_lite.files.plain_text import visible
from tunix_lite.tracking.rows import is_number
from tunix_lite.types import Metrics

BARS = "▁▂▃▄▅▆▇█"
# Steps of each metric that are drawn, in so many bars.
_STEPS = 400
_NUM_BARS = 20
# Rows of the region are at most this share of the terminal's.
_SHARE = 0.6
# The numbers of a line: the name, and how it is written.
LINE_METRICS = {
    "train/loss": ("loss", "{:.4f}"),
    "reward/mean": ("reward", "{:.3f}"),
    "completions/correct": ("right", "{:.0%}"),
    "eval/accuracy": ("held-out accuracy", "{:.1%}"),
    "completions/mean_length": ("length", "{:.1f}"),
    "completions/truncated": ("cut", "{:.0%}"),
    "conversation/turns": ("turns", "{:.2f}"),
    "prompts/drawn": ("drawn", "{:.0f}"),
    "prompts/kept": ("kept", "{:.0f}"),
    "time/extra_rounds": ("extra rounds", "{:.1f} s"),
    "train/kl": ("kl", "{:.4f}"),
    "train/entropy": ("entropy", "{:.3f}"),
    "train/grad_norm": ("grad", "{:.2f}"),
    "train/learning_rate": ("lr", "{:.1e}"),
    "time/step": ("s/step", "{:.2f}"),
}
# Those of the region: below the speed the parts of a step.
_NUMBERS = LINE_METRICS | {
    "time/rollout": ("  rollout", "{:.2f} s"),
    "time/rewards": ("  rewards", "{:.2f} s"),
    "time/reference": ("  scoring", "{:.2f} s"),
    "time/update": ("  update", "{:.2f} s"),
    "time/eval": ("  evaluation", "{:.2f} s"),
    "reward/groups_that_agree": ("groups agree", "{:.0%}"),
    "perf/tokens_per_second_per_device": ("tokens/s/device", "{:,.0f}"),
    "perf/mfu": ("MFU", "{:.1%}"),
    "memory/peak_gb": ("memory", "{:.2f} GB"),
}


class Dashboard:
    """What a run has logged so far, and what it does now.

    Example: `board.log(1, {"reward/mean": 0.5})`, then `board.drawn(80, 24)` is drawn by rich.
    """

    def __init__(self, max_steps: int | None, evaluates_every: int = 0):
        """max_steps: None: not known. evaluates_every: steps between two evaluations; 0: there is
        one at the end, or none."""
        self.max_steps = max_steps
        self.step = 0
        self._evaluates_every = evaluates_every
        # metric -> its values, the newest last
        self._course: dict[str, deque[float]] = {}
        self._busy: tuple[str, float | None] | None = None

    def busy(self, text: str, has_clock: bool = True) -> None:
        """Takes what is done from now until the next step; "": nothing. has_clock: False where the
        text itself says how long it takes."""
        self._busy = (text, time.monotonic() if has_clock else None) if text else None

    def log(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step; what is no finite number is left out."""
        self.step = step
        self._busy = None
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._course.setdefault(name, deque(maxlen=_STEPS)).append(float(value))

    def seconds_left(self) -> float | None:
        """By the steps since the first one, which compiles, and the evaluations that are still to
        come, each as long as the last one; None: not known yet."""
        seconds = list(self._course.get("time/step", ()))[1:]
        if not seconds or self.max_steps is None:
            return None
        # Evaluations are every so many steps, and after the last one.
        every = self._evaluates_every
        num_evaluations = int(self.step < self.max_steps)
        if every:
            num_evaluations += (self.max_steps - 1) // every - self.step // every
        evaluation = self._course["time/eval"][-1] if "time/eval" in self._course else 0.0
        pace = sum(seconds) / len(seconds)
        return pace * (self.max_steps - self.step) + num_evaluations * evaluation

    def drawn(self, width: int, height: int) -> rich.console.RenderableType:
        """The region for a terminal of so many columns and rows."""
        title = rich.text.Text(self.headline(), no_wrap=True, overflow="ellipsis")
        if height < 10 or width < 40 or not self._course:
            return title
        lines = []
        for metric, (name, text) in _NUMBERS.items():
            # A copy at once: the run may log while another thread draws.
            if values := list(self._course.get(metric, ())):
                lines.append((name, text.format(values[-1]), _bars(values)))
        lines = lines[: max(1, int(height * _SHARE) - 2)]

        # rich would shorten names in favour of empty columns.
        table = rich.table.Table.grid(padding=(0, 1))
        for style, column in zip(("cyan", "bold", ""), zip(*lines)):
            table.add_column(style=style, no_wrap=True, min_width=max(map(len, column)))
        for cells in lines:
            table.add_row(*map(rich.text.Text, cells))
        return rich.panel.Panel(table, title=title, title_align="left", width=width)

    def headline(self) -> str:
        """`step 12/60 20% | eta 1m20s`, or what is done now with its clock."""
        parts = headline(self.step, self.max_steps, self.seconds_left())
        if self._busy is not None:
            text, since = self._busy
            clock = "" if since is None else f" {seconds_in_words(time.monotonic() - since)}"
            parts.append(f"{visible(text)}{clock}")
        return " | ".join(parts)


def headline(step: int, max_steps: int | None, seconds_left: float | None) -> list[str]:
    """`step 12/60 20%` and `eta 1m20s`; None: not known."""
    parts = [
        f"step {step}/{max_steps} {step / max_steps:.0%}" if max_steps else f"step {step}"
    ]
    return parts if seconds_left is None else [*parts, f"eta {seconds_in_words(seconds_left)}"]


def _bars(values: list[float]) -> str:
    """The course of some values as bars, each the mean of its share of them: `▁▃▅▇`."""
    parts = np.array_split(values, min(_NUM_BARS, len(values)))
    means = np.array([part.mean() for part in parts])
    reach = float(np.ptp(means)) or 1.0
    heights = (means - means.min()) / reach * (len(BARS) - 1)
    return "".join(BARS[round(height)] for height in heights)


def best_middle_worst(groups: Iterable[list[dict]]) -> list[dict]:
    """Three rows of the group whose rewards differ most, fewer of a small one; [] without groups.
    Rows without a reward do not count."""
    rewarded = [[row for row in group if is_number(row.get("reward"))] for group in groups]
    ranked = [sorted(group, key=lambda row: -row["reward"]) for group in rewarded if group]
    if not ranked:
        return []
    group = max(ranked, key=lambda group: group[0]["reward"] - group[-1]["reward"])
    return [group[i] for i in sorted({0, len(group) // 2, len(group) - 1})]


def seconds_in_words(seconds: float) -> str:
    """A duration as `48 s`, `2m05s` or `3h12m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
