"""Which curves a report shows, and line charts as SVG text: no library and no script.

The style sheet of the page defines the colours c0 to c7, for light and for dark."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tunix_lite.basics.plain_text import visible
from tunix_lite.report.evidence import Evidence, Series
from tunix_lite.tracking.console import as_words

# of a drawing, in units of its own: about a pixel where it is as wide as a telephone
_WIDTH = 360
_HEIGHT = 180
_LEFT = 44
_RIGHT = 12
_TOP = 10
_BOTTOM = 24
# most points of a drawn line
_MOST_POINTS = 400
COLORS = 8
# steps from which on a curve is smoothed
_MANY = 20


@dataclass(frozen=True)
class Line:
    """A curve of a chart. color: which of the COLORS.
    Example: Line("seed 0", [0, 15, 30], [0.42, 0.93, 0.95], color=1, kind="points")."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    color: int = 0
    # line; faint: thin and pale, under a smooth one; points: with a dot at each
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run, in one frame. note: a text beside the title.
    Example: Chart("held-out accuracy", [line], is_share=True)."""

    title: str
    lines: list[Line] = field(default_factory=list)
    # shown in percent
    is_share: bool = False
    note: str = ""

    @property
    def legend(self) -> list[tuple[str, int]]:
        """The name and the colour of each curve that has a name."""
        lines = [line for line in self.lines if line.name and line.kind != "faint"]
        return [(line.name, line.color) for line in lines]


@dataclass(frozen=True)
class _Curve:
    """A chart of a run: which metrics it shows."""

    title: str
    # each is a line; those of eval/ get a dot at each evaluation
    metrics: tuple[str, ...]
    is_share: bool = False


_ACCURACIES = ("eval/accuracy", "eval/avg_at_", "eval/pass_at_")
CURVES = (
    _Curve("reward", ("reward/mean", "eval/reward")),
    _Curve("held-out accuracy", _ACCURACIES, is_share=True),
    _Curve("right in training", ("completions/correct",), is_share=True),
    _Curve("groups that teach nothing", ("reward/groups_that_agree",), is_share=True),
    _Curve("completion length, tokens", ("completions/mean_length",)),
    _Curve("cut off at the longest length", ("completions/truncated",), is_share=True),
    _Curve("entropy, nats a token", ("train/entropy",)),
    _Curve("KL to the reference, nats a token", ("train/kl",)),
    _Curve("gap of sampler and trainer, nats", ("train/sampler_gap",)),
    _Curve("ratio outside of the clip", ("train/ratio_outside_clip",), is_share=True),
    _Curve("loss", ("train/loss", "eval/loss")),
    _Curve("likeliest tokens", ("train/token_accuracy", "eval/token_accuracy"), is_share=True),
    _Curve("gradient norm", ("train/grad_norm",)),
    _Curve("learning rate", ("train/learning_rate",)),
    _Curve("seconds of a step", ("time/step", "time/rollout", "time/update")),
    _Curve("peak memory of a device, GB", ("memory/peak_gb",)),
    _Curve("tokens a second", ("perf/tokens_per_second",)),
)


def curves(run: Evidence) -> list[Chart]:
    """The charts for which the run has numbers."""
    charts = []
    for curve in CURVES:
        lines = []
        note = ""
        for color, name in enumerate(metrics_of(run, curve)):
            if series := run.series(name):
                label = as_words(name) if len(curve.metrics) > 1 else ""
                # Beside the title: the first and the last number of the first metric.
                note = note or " → ".join(number_text(x, curve.is_share) for x in ends(series))
                # The metric as it is, and where it has many steps its moving average over it. They
                # are plain numbers: they are written as text.
                steps = series.steps.tolist()
                kind = "points" if series.name.startswith("eval/") else "line"
                kind = kind if len(steps) < _MANY else "faint"
                lines.append(Line(label, steps, series.values.tolist(), color, kind))
                if len(steps) >= _MANY:
                    # Wide enough that a curve of noisy rewards shows where it goes. Where the
                    # window hangs over an end, the mean is of what there is.
                    window = np.ones(max(len(steps) // 12, 4))
                    counts = np.convolve(np.ones(len(steps)), window, "same")
                    smooth = np.convolve(series.values, window, "same") / counts
                    lines.append(Line(label, steps, smooth.tolist(), color))
        # What is 0 in every step is no part of this run.
        if any(any(line.values) for line in lines):
            charts.append(Chart(curve.title, lines, curve.is_share, note))
    return charts


def ends(series: Series) -> tuple[float, float]:
    """The first and the last number of an evaluation; else the means of the first third and of the
    last."""
    if series.name.startswith("eval/"):
        return series.first, series.last
    return series.early, series.late


def metrics_of(run: Evidence, curve: _Curve) -> list[str]:
    """The metrics of a curve; `eval/pass_at_` stands for the one that the run has."""
    last = run.evaluations[-1] if run.evaluations else {}
    names = []
    for name in curve.metrics:
        names += (
            [key for key in last if key.startswith(name)][:1] if name[-1] == "_" else [name]
        )
    return names


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`, about `count` of them: 1, 2 or 5 apart."""
    reach = high - low
    if not math.isfinite(reach) or reach <= 0:
        return [low]
    # numbers that people read at a glance
    power = 10.0 ** math.floor(math.log10(reach / count))
    apart = next(
        power * nice for nice in (1, 2, 5, 10) if power * nice * count >= reach * 0.999
    )
    # Rounding may put a whole number just below itself, or above.
    begin = math.floor(low / apart + 1e-9)
    end = math.ceil(high / apart - 1e-9)
    return [i * apart for i in range(begin, end + 1)]


def number_text(value: float, is_share: bool = False) -> str:
    """A number in few characters: 42.2 %, 0.0312, 4e-05, 12,435."""
    if is_share:
        return f"{100 * value:.1f} %"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def line_chart(chart: Chart) -> str:
    """The SVG element of a chart; one without any number is a frame with a word in it."""
    title = html.escape(visible(chart.title))
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}"'
    parts = [f'<svg class="chart" {box}>']

    def write(text: str, x: float, y: float, anchor: str = "middle") -> None:
        place = f'x="{x:.4g}" y="{y:.4g}"'
        parts.append(f'<text class="tick" {place} text-anchor="{anchor}">{text}</text>')

    lines = [line for line in chart.lines if len(line.steps)]
    if not lines:
        write("no numbers", _WIDTH / 2, _HEIGHT / 2)
        return "".join([*parts, "</svg>"])
    first = min(min(line.steps) for line in lines)
    last = max(max(line.steps) for line in lines)
    low = min(min(line.values) for line in lines)
    high = max(max(line.values) for line in lines)

    # Numbers near zero are seen from zero; a level line gets some room.
    if 0 < low < 0.5 * high:
        low = 0.0
    if high == low:
        high += abs(high) * 0.1 or 1.0
    levels = _ticks(low, high)
    # nothing is above 100 %
    if chart.is_share and low >= 0 and high <= 1:
        levels = [level for level in levels if level <= 1 + 1e-9]
    low = min(levels[0], low)
    high = max(levels[-1], high)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / ((high - low) or 1.0)

    # The levels with their numbers, and the steps below.
    for level in levels:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(level):.1f}H{_WIDTH - _RIGHT}"/>')
        text = f"{100 * level:.4g} %" if chart.is_share else f"{level:.6g}"
        write(text, _LEFT - 6, y(level) + 3.5, "end")
    for step in _ticks(first, last, 5):
        if first <= step <= last and step == round(step):
            write(f"{step:.10g}", x(step), _HEIGHT - 8)
    for line in lines:
        shown = range(len(line.steps))
        if len(shown) > _MOST_POINTS:
            # The first, the last, and of every stretch between them the smallest and the largest,
            # so that no peak is lost.
            chosen = {0, len(shown) - 1}
            for stretch in np.array_split(np.arange(1, len(shown) - 1), _MOST_POINTS // 2 - 1):
                values = np.take(line.values, stretch)
                chosen |= {stretch[values.argmin()], stretch[values.argmax()]}
            shown = sorted(chosen)
        points = [(f"{x(line.steps[i]):.1f}", f"{y(line.values[i]):.1f}") for i in shown]
        color = f"c{line.color % COLORS}"
        if len(points) > 1:
            kind = "faint" if line.kind == "faint" else "line"
            curve = "L".join(map(" ".join, points))
            parts.append(f'<path class="{kind} {color}" d="M{curve}"/>')
        if line.kind == "points" or len(points) == 1:
            parts += [
                f'<circle class="dot {color}" cx="{a}" cy="{b}" r="3"/>' for a, b in points
            ]
    return "".join([*parts, "</svg>"])
