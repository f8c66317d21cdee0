"""Which curves a report shows, and line charts and bars as SVG text: no library and no script.

The style sheet of the page defines the colours c0 to c7, for light and for dark.
"""

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tunix_lite.files.plain_text import visible
from tunix_lite.report.evidence import Evidence, Series
from tunix_lite.tracking.console import as_words

# of a drawing, in units of its own: about a pixel where it is as wide as a telephone
WIDTH = 360
HEIGHT = 180
LEFT = 44
RIGHT = 12
TOP = 10
BOTTOM = 24
# most points of a drawn line, and most places of a chart that say their numbers under the mouse
MOST_POINTS = 400
MOST_HINTS = 60
COLORS = 8
# steps from which on a curve is smoothed
MANY = 20


@dataclass(frozen=True)
class Line:
    """A curve of a chart. color: which of the COLORS; from there on they repeat, dashed.

    Example: Line("seed 0", [0, 15, 30], [0.42, 0.93, 0.95], color=1, kind="points").
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    color: int = 0
    # line; faint: thin and pale, under a smooth one; smooth: over it; points: with a dot at each
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run, in one frame. note: a text beside the title.

    Example: Chart("held-out accuracy", [line], is_share=True).
    """

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
class Curve:
    """A chart of a run: which metrics it shows.

    Example: Curve("reward", ("reward/mean",)).
    """

    title: str
    # each is a line; those of eval/ get a dot at each evaluation
    metrics: tuple[str, ...]
    is_share: bool = False
    # what the legend calls them; none: as the metric
    names: tuple[str, ...] = ()
    # whether a comparison of runs shows its first metric, too
    in_comparison: bool = False


TWO = ("in training", "held out, greedy")
ACCURACIES = ("eval/accuracy", "eval/avg_at_", "eval/pass_at_")
LENGTHS = ("completions/mean_length", "eval/mean_length")
TIMES = ("time/step", "time/rollout", "time/update")
CURVES = (
    Curve("reward", ("reward/mean", "eval/reward"), False, TWO, True),
    Curve("held-out accuracy", ACCURACIES, True, ("greedy",)),
    Curve("right in training", ("completions/correct",), True),
    Curve("groups that teach nothing", ("reward/groups_that_agree",), True),
    Curve("completion length, tokens", LENGTHS, False, TWO, True),
    Curve(
        "cut off at the longest length", ("completions/truncated", "eval/truncated"), True, TWO
    ),
    Curve("entropy, nats a token", ("train/entropy",), in_comparison=True),
    Curve("KL to the reference, nats a token", ("train/kl",), in_comparison=True),
    Curve("gap of sampler and trainer, nats", ("train/sampler_gap",)),
    Curve("ratio outside of the clip", ("train/ratio_outside_clip",), True),
    Curve("loss", ("train/loss",)),
    Curve("gradient norm", ("train/grad_norm",), in_comparison=True),
    Curve("learning rate", ("train/learning_rate",), in_comparison=True),
    Curve("seconds of a step", TIMES, names=("step", "sampling", "update")),
    Curve("peak memory of a device, GB", ("memory/peak_gb",)),
    Curve(
        "tokens a second and device", ("perf/tokens_per_second_per_device",), in_comparison=True
    ),
)


def curves(run: Evidence, chosen: tuple[Curve, ...] = CURVES) -> list[Chart]:
    """The charts for which the run has numbers."""
    charts = []
    for curve in chosen:
        every = [(color, run.series(name)) for color, name in enumerate(metrics_of(run, curve))]
        every = [(color, series) for color, series in every if series]
        lines = []
        for color, series in every:
            name = as_words(series.name.rpartition("/")[2]) if len(curve.metrics) > 1 else ""
            name = curve.names[color] if color < len(curve.names) else name
            lines += curve_lines(series, name, color)
        if not any(any(line.values) for line in lines):
            continue

        # Beside the title: the first and the last number of the first metric.
        color, series = every[0]
        ends = (series.early, series.late)
        if series.name.startswith("eval/") or series.name == "train/learning_rate":
            ends = (series.first, series.last)
        note = " → ".join(number_text(value, curve.is_share) for value in ends)
        charts.append(Chart(curve.title, lines, curve.is_share, note if color == 0 else ""))
    return charts


def metrics_of(run: Evidence, curve: Curve) -> list[str]:
    """The metrics of a curve; `eval/pass_at_` stands for the one that the run has."""
    last = run.evaluations[-1] if run.evaluations else {}
    names = []
    for name in curve.metrics:
        names += [key for key in last if key.startswith(name)][:1] if name[-1] == "_" else [name]
    return names


def curve_lines(series: Series, name: str, color: int, only_one: bool = False) -> list[Line]:
    """A metric as it is, and where it has many steps a smooth line over it, or that alone."""
    steps = series.steps.tolist()
    values = series.values.tolist()
    if series.name.startswith("eval/") and (only_one or len(steps) <= MANY):
        return [Line(name, steps, values, color, "points" if len(steps) <= MANY else "line")]
    if len(steps) < MANY or series.name == "train/learning_rate":
        return [Line(name, steps, values, color)]
    smooth = _smoothed(values, max(len(steps) / 12, 4))
    if only_one:
        return [Line(name, steps, smooth, color)]
    return [
        Line(name, steps, values, color, "faint"),
        Line(name, steps, smooth, color, "smooth"),
    ]


# ---- numbers


def thinned(
    steps: Sequence[float], values: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points (4 or more) of a curve: the first, the last, and of every stretch
    between them the smallest and the largest, so that no peak is lost."""
    last = len(steps) - 1
    if last < most:
        return list(steps), list(values)
    chosen = {0, last}
    for stretch in np.array_split(np.arange(1, last), (most - 2) // 2):
        chosen |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return [steps[i] for i in sorted(chosen)], [values[i] for i in sorted(chosen)]


def _smoothed(values: Sequence[float], span: float) -> list[float]:
    """The exponential moving average over about `span` values, without the bias of its start."""
    keep = 1 - 2 / (span + 1)
    total = 0.0
    weight = 0.0
    means = []
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        means.append(total / weight)
    return means


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`, about `count` of them: 1, 2 or 5 apart."""
    reach = high - low
    if not math.isfinite(reach) or reach <= 0:
        return [low]
    rough = reach / count
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough * (1 - 1e-9))
    begin = math.floor(low / apart + 1e-9)
    end = math.ceil(high / apart - 1e-9)
    return [i * apart for i in range(begin, end + 1)]


def number_text(value: float, is_share: bool = False) -> str:
    """A number in few characters: 42.2 %, 0.0312, 4e-05, 12,435."""
    if is_share:
        return f"{100 * value:.1f} %"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if 1000 <= size < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.2g}"


# ---- drawings


def line_chart(chart: Chart) -> str:
    """The SVG element of a chart; one without any number is a frame with a word in it."""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_safe(chart.title)}"'
    parts = [f'<svg class="chart" {box}>']

    def write(text: str, x: float, y: float, anchor: str = "middle") -> None:
        place = f'x="{x:.4g}" y="{y:.4g}"'
        parts.append(f'<text class="tick" {place} text-anchor="{anchor}">{text}</text>')

    lines = [line for line in chart.lines if len(line.steps)]
    if not lines:
        write("no numbers", WIDTH / 2, HEIGHT / 2)
        return "".join([*parts, "</svg>"])
    first = min(min(line.steps) for line in lines)
    last = max(max(line.steps) for line in lines)
    low = min(min(line.values) for line in lines)
    high = max(max(line.values) for line in lines)

    # Numbers near zero are seen from zero; a level line gets some room.
    if 0 < low < 0.5 * high:
        low = 0.0
    if high == low:
        room = abs(high) * 0.1 or 1.0
        low = max(low - room, 0.0) if low >= 0 else low - room
        high = high + room
    levels = _ticks(low, high)
    if chart.is_share and low >= 0 and high <= 1:
        levels = [level for level in levels if level <= 1 + 1e-9]
    low = min(levels[0], low)
    high = max(levels[-1], high)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / ((high - low) or 1.0)

    # The levels with their numbers, and the steps below.
    for level in levels:
        parts.append(f'<path class="grid" d="M{LEFT} {y(level):.1f}H{WIDTH - RIGHT}"/>')
        text = f"{100 * level:.4g} %" if chart.is_share else f"{level:.6g}"
        write(text, LEFT - 6, y(level) + 3.5, "end")
    for step in _ticks(first, last, 5):
        if first <= step <= last and step == round(step):
            write(f"{step:.10g}", x(step), HEIGHT - 8)

    for line in lines:
        points = [
            (f"{x(s):.1f}", f"{y(v):.1f}") for s, v in zip(*thinned(line.steps, line.values))
        ]
        color = f"c{line.color % COLORS}"
        dashes = ' stroke-dasharray="5 3"' if line.color >= COLORS else ""
        kind = "faint" if line.kind == "faint" else "line"
        if len(points) > 1:
            curve = "L".join(map(" ".join, points))
            parts.append(f'<path class="{kind} {color}"{dashes} d="M{curve}"/>')
        if line.kind == "points" or len(points) == 1:
            parts += [
                f'<circle class="dot {color}" cx="{a}" cy="{b}" r="3"/>' for a, b in points
            ]
    return "".join([*parts, *_hints(lines, x, chart.is_share), "</svg>"])


def _hints(lines: list[Line], x: Callable[[float], float], is_share: bool) -> Iterator[str]:
    """Upright strips over the chart, each of which says the numbers of its step under the mouse."""
    of_step: dict[float, list[str]] = {}
    for line in lines:
        for step, value in zip(line.steps, line.values):
            of_step.setdefault(step, []).append(f"{line.name} {number_text(value, is_share)}")
    steps = sorted(of_step)
    steps = steps[:: max(math.ceil(len(steps) / MOST_HINTS), 1)]
    width = (WIDTH - LEFT - RIGHT) / max(len(steps), 1)
    for step in steps:
        box = f'x="{x(step) - width / 2:.1f}" y="{TOP}" width="{width:.1f}"'
        text = _safe(f"step {step:g}: {', '.join(of_step[step][:COLORS])}")
        rest = f'height="{HEIGHT - TOP - BOTTOM}"><title>{text}</title></rect>'
        yield f'<rect class="hint" {box} {rest}'


def stacked_bar(parts: Sequence[tuple[str, float]]) -> str:
    """A bar of parts, (name, amount) each."""
    whole = sum(amount for _, amount in parts) or 1.0
    drawn = ['<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img">']
    drawn.append('<rect class="rail" x="0" y="0" width="100" height="6"/>')
    left = 0.0
    for i, (name, amount) in enumerate(parts):
        width = 100 * amount / whole
        text = _safe(f"{name}: {amount / whole:.1%}")
        box = f'x="{left:.3f}" y="0" width="{width:.3f}" height="6"'
        drawn.append(f'<rect class="part c{i % COLORS}" {box}><title>{text}</title></rect>')
        left += width
    return "".join([*drawn, "</svg>"])


def _safe(text: str) -> str:
    return html.escape(visible(text))
