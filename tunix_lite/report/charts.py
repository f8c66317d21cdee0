"""Line charts and bars as SVG text, drawn by plain float arithmetic: no library and no script.

The style sheet of the page defines the colours c0 to c7, for light and for dark.
"""

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tunix_lite.plain_text import visible

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


# ---- numbers


def thinned(
    steps: Sequence[float], values: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points (4 or more) of a curve: the first, the last, and of every stretch
    between them the smallest and the largest, so that no peak is lost."""
    count = len(steps)
    if count <= most:
        return list(steps), list(values)
    chosen = {0, count - 1}
    stretches = (most - 2) // 2
    inner = count - 2
    for i in range(stretches):
        places = range(1 + i * inner // stretches, 1 + (i + 1) * inner // stretches)
        chosen.add(min(places, key=values.__getitem__))
        chosen.add(max(places, key=values.__getitem__))
    ordered = sorted(chosen)
    return [steps[i] for i in ordered], [values[i] for i in ordered]


def smoothed(values: Sequence[float], span: float) -> list[float]:
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


def ticks(low: float, high: float, count: int = 4) -> list[float]:
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


def _tick_text(value: float, is_share: bool, apart: float) -> str:
    if is_share:
        return f"{100 * value:.0f} %" if apart >= 0.01 else f"{100 * value:.3g} %"
    if 1e4 <= abs(value) < 1e6:
        return f"{value / 1000:.4g}k"
    if value and (abs(value) >= 1e4 or abs(value) < 1e-3):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:.4g}"


# ---- drawings


def line_chart(chart: Chart) -> str:
    """The SVG element of a chart; one without any number is a frame with a word in it."""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_safe(chart.title)}"'
    opening = f'<svg class="chart" {box}>'
    lines = [line for line in chart.lines if len(line.steps)]
    if not lines:
        middle = f'x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}"'
        return f'{opening}<text {middle} class="tick" text-anchor="middle">no numbers</text></svg>'
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
    levels = ticks(low, high)
    if chart.is_share and low >= 0 and high <= 1:
        levels = [level for level in levels if level <= 1 + 1e-9]
    low = min(levels[0], low)
    high = max(levels[-1], high)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / ((high - low) or 1.0)

    # The levels with their numbers, and the steps below.
    parts = [opening]
    apart = levels[1] - levels[0] if len(levels) > 1 else 1.0
    for level in levels:
        text = _tick_text(level if abs(level) > 1e-12 * apart else 0.0, chart.is_share, apart)
        place = f'x="{LEFT - 6}" y="{y(level) + 3.5:.1f}"'
        parts.append(f'<path class="grid" d="M{LEFT} {y(level):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" {place} text-anchor="end">{text}</text>')
    for step in ticks(first, last, 5):
        if first <= step <= last and step == round(step):
            place = f'x="{x(step):.1f}" y="{HEIGHT - 8}"'
            text = _tick_text(step, False, 1.0)
            parts.append(f'<text class="tick" {place} text-anchor="middle">{text}</text>')

    for line in lines:
        points = [(f"{x(s):.1f}", f"{y(v):.1f}") for s, v in zip(*thinned(line.steps, line.values))]
        color = f"c{line.color % COLORS}"
        dashes = ' stroke-dasharray="5 3"' if line.color >= COLORS else ""
        kind = "faint" if line.kind == "faint" else "line"
        if len(points) > 1:
            curve = "L".join(map(" ".join, points))
            parts.append(f'<path class="{kind} {color}"{dashes} d="M{curve}"/>')
        if line.kind == "points" or len(points) == 1:
            parts += [f'<circle class="dot {color}" cx="{a}" cy="{b}" r="3"/>' for a, b in points]
    return "".join([*parts, *_hints(lines, x, chart.is_share), "</svg>"])


def _hints(lines: list[Line], x: Callable[[float], float], is_share: bool) -> Iterator[str]:
    """Upright strips over the chart, each of which says the numbers of its step under the mouse."""
    of_step: dict[float, list[str]] = {}
    for line in lines:
        for step, value in zip(line.steps, line.values):
            shown = number_text(value, is_share)
            of_step.setdefault(step, []).append(f"{line.name} {shown}" if line.name else shown)
    steps = sorted(of_step)
    steps = steps[:: max(math.ceil(len(steps) / MOST_HINTS), 1)]
    for i, step in enumerate(steps):
        left = (x(steps[i - 1]) + x(step)) / 2 if i else x(step) - 4
        right = (x(steps[i + 1]) + x(step)) / 2 if i + 1 < len(steps) else x(step) + 4
        box = (
            f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        )
        text = _safe(f"step {step:g}: {', '.join(of_step[step][:COLORS])}")
        yield f'<rect class="hint" {box}><title>{text}</title></rect>'


def stacked_bar(parts: Sequence[tuple[str, float]]) -> str:
    """A bar of parts, (name, amount) each."""
    amounts = [max(amount, 0.0) for _, amount in parts]
    whole = sum(amounts) or 1.0
    drawn = ['<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img">']
    drawn.append('<rect class="rail" x="0" y="0" width="100" height="6"/>')
    left = 0.0
    for i, ((name, _), amount) in enumerate(zip(parts, amounts)):
        width = 100 * amount / whole
        text = _safe(f"{name}: {amount / whole:.1%}")
        box = f'x="{left:.3f}" y="0" width="{width:.3f}" height="6"'
        drawn.append(f'<rect class="part c{i % COLORS}" {box}><title>{text}</title></rect>')
        left += width
    return "".join([*drawn, "</svg>"])


def _safe(text: str) -> str:
    return html.escape(visible(text))
