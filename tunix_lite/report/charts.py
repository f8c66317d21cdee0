"""Line charts and bars as SVG text, drawn by plain float arithmetic: no library and no script.

Colours are the classes c0 to c7 and text, which a page's own style sheet defines; `standalone` adds
one for light and dark to a drawing that is a file of its own.
"""

import html
import math
from collections.abc import Iterator, Sequence
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
    """A curve of a chart.

    Example: Line("seed 0", [0, 15, 30], [0.42, 0.93, 0.95], color=1, kind="points").
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    # which of the COLORS; from there on they repeat, dashed
    color: int = 0
    # line; faint: thin and pale, under a smooth one; smooth: over it; points: with a dot at each
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run, in one frame.

    Example: Chart("held-out accuracy", [line], is_share=True).
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    # shown in percent
    is_share: bool = False
    # what is said under the title
    note: str = ""


@dataclass(frozen=True)
class Frame:
    """Where numbers lie in a drawing.

    Example: Frame(0, 60, 0.0, 1.0).x(30) is half way between the sides.
    """

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        width = WIDTH - LEFT - RIGHT
        return LEFT + width * (step - self.first) / ((self.last - self.first) or 1.0)

    def y(self, value: float) -> float:
        height = HEIGHT - TOP - BOTTOM
        return TOP + height * (self.high - value) / ((self.high - self.low) or 1.0)


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
        begin = 1 + i * inner // stretches
        end = 1 + (i + 1) * inner // stretches
        places = range(begin, end)
        chosen.add(min(places, key=values.__getitem__))
        chosen.add(max(places, key=values.__getitem__))
    ordered = sorted(chosen)
    return [steps[i] for i in ordered], [values[i] for i in ordered]


def smoothed(values: Sequence[float], span: float) -> list[float]:
    """The exponential moving average over about `span` values, without the bias of its start."""
    keep = 1 - 2 / (span + 1)
    total = 0.0
    weight = 0.0
    found = []
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        found.append(total / weight)
    return found


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
    if size >= 1e-3:
        return f"{value:.3g}"
    return f"{value:.2g}"


def _tick_text(value: float, is_share: bool, apart: float) -> str:
    if is_share:
        return f"{100 * value:.0f} %" if apart >= 0.01 else f"{100 * value:.3g} %"
    if value and (abs(value) >= 1e4 or abs(value) < 1e-3):
        text = f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
        thousands = 1e4 <= abs(value) < 1e6
        return f"{value / 1000:.4g}k" if thousands else text
    return f"{value:.4g}"


# ---- a chart


def line_chart(chart: Chart, standalone: bool = False) -> str:
    """The SVG element of a chart; one without any number is a frame with a word in it."""
    lines = [line for line in chart.lines if len(line.steps)]
    label = html.escape(visible(chart.title))
    parts = [_opening(label, standalone)]
    if not lines:
        middle = f'x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}"'
        parts.append(f'<text {middle} class="tick" text-anchor="middle">no numbers</text></svg>')
        return "".join(parts)
    frame, levels = _frame(lines, chart.is_share)
    parts += _grid(frame, levels, chart.is_share)
    for line in lines:
        parts += _curve(line, frame)
    parts += _hints(lines, frame, chart.is_share)
    parts.append("</svg>")
    return "".join(parts)


def _opening(label: str, standalone: bool) -> str:
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
    if not standalone:
        return f'<svg class="chart" {box}>'
    space = 'xmlns="http://www.w3.org/2000/svg"'
    style = f"<style>{STYLE}{LIGHT}@media(prefers-color-scheme:dark){{{DARK}}}</style>"
    return f'<svg {space} class="chart" {box}><title>{label}</title>{style}'


def _frame(lines: list[Line], is_share: bool) -> tuple[Frame, list[float]]:
    """The frame that holds all lines, and the levels that get a line across."""
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
    if is_share and low >= 0 and high <= 1:
        levels = [level for level in levels if level <= 1 + 1e-9]
    return Frame(first, last, min(levels[0], low), max(levels[-1], high)), levels


def _grid(frame: Frame, levels: list[float], is_share: bool) -> Iterator[str]:
    """Levels with their numbers, and the steps below."""
    apart = levels[1] - levels[0] if len(levels) > 1 else 1.0
    for level in levels:
        y = f"{frame.y(level):.1f}"
        text = _tick_text(level if abs(level) > 1e-12 * apart else 0.0, is_share, apart)
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        place = f'x="{LEFT - 6}" y="{frame.y(level) + 3.5:.1f}"'
        yield f'<text class="tick" {place} text-anchor="end">{text}</text>'
    steps = [s for s in ticks(frame.first, frame.last, 5) if frame.first <= s <= frame.last]
    for step in steps:
        if step != round(step):
            continue
        place = f'x="{frame.x(step):.1f}" y="{HEIGHT - 8}"'
        text = _tick_text(step, False, 1.0)
        yield f'<text class="tick" {place} text-anchor="middle">{text}</text>'


def _curve(line: Line, frame: Frame) -> Iterator[str]:
    steps, values = thinned(line.steps, line.values)
    places = [f"{frame.x(s):.1f} {frame.y(v):.1f}" for s, v in zip(steps, values)]
    color = f"c{line.color % COLORS}"
    dashes = ' stroke-dasharray="5 3"' if line.color >= COLORS else ""
    kind = "faint" if line.kind == "faint" else "line"
    if len(places) > 1:
        yield f'<path class="{kind} {color}"{dashes} d="M{"L".join(places)}"/>'
    if line.kind == "points" or len(places) == 1:
        for place in places:
            x, y = place.split()
            yield f'<circle class="dot {color}" cx="{x}" cy="{y}" r="3"/>'


def _hints(lines: list[Line], frame: Frame, is_share: bool) -> Iterator[str]:
    """Upright strips over the chart, each of which says the numbers of its step under the mouse."""
    of_step: dict[float, list[str]] = {}
    for line in lines:
        for step, value in zip(line.steps, line.values):
            shown = number_text(value, is_share)
            of_step.setdefault(step, []).append(f"{line.name} {shown}" if line.name else shown)
    steps = sorted(of_step)
    every = math.ceil(len(steps) / MOST_HINTS)
    steps = steps[:: max(every, 1)]
    for i, step in enumerate(steps):
        here = frame.x(step)
        left = (frame.x(steps[i - 1]) + here) / 2 if i else here - 4
        right = (frame.x(steps[i + 1]) + here) / 2 if i + 1 < len(steps) else here + 4
        box = (
            f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        )
        text = html.escape(visible(f"step {step:g}: {', '.join(of_step[step][:COLORS])}"))
        yield f'<rect class="hint" {box}><title>{text}</title></rect>'


# ---- bars


def stacked_bar(parts: Sequence[tuple[str, float]], whole: float = 0.0) -> str:
    """A bar of parts, (name, amount) each. whole: the amount of the full width; 0: their sum."""
    amounts = [max(amount, 0.0) for _, amount in parts]
    whole = max(whole, sum(amounts)) or 1.0
    drawn = ['<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img">']
    drawn.append('<rect class="rail" x="0" y="0" width="100" height="6"/>')
    left = 0.0
    for i, ((name, _), amount) in enumerate(zip(parts, amounts)):
        width = 100 * amount / whole
        text = html.escape(visible(f"{name}: {amount / whole:.1%}"))
        box = f'x="{left:.3f}" y="0" width="{width:.3f}" height="6"'
        drawn.append(f'<rect class="part c{i % COLORS}" {box}><title>{text}</title></rect>')
        left += width
    return "".join([*drawn, "</svg>"])


# ---- text and style

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """A curve in one line of text: ▁▂▅▇. Each character is the mean of its stretch."""
    if not len(values):
        return ""
    width = min(width, len(values))
    means = []
    for i in range(width):
        part = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(part) / len(part))
    low = min(means)
    reach = max(means) - low
    if reach <= 0 or not math.isfinite(reach):
        return SPARKS[3] * width
    return "".join(SPARKS[round((mean - low) / reach * (len(SPARKS) - 1))] for mean in means)


_LIGHT_COLORS = "#2563c9 #d9622b #1a8f5f #a3409f #b08400 #0e8aa6 #c2304f #6b6f7b"
_DARK_COLORS = "#7aa9ff #ff9d6b #4fd19a #e08be0 #e5bd4b #5ccbe6 #ff8097 #a9aebb"


def _palette(colors: str, text: str, grid: str, rail: str) -> str:
    named = "".join(f"--c{i}:{color};" for i, color in enumerate(colors.split()))
    return f":root{{{named}--tick:{text};--grid:{grid};--rail:{rail}}}"


# Custom properties of both schemes, and what the classes of a drawing make of them.
LIGHT = _palette(_LIGHT_COLORS, "#6a7180", "#e4e7ee", "#e9ecf2")
DARK = _palette(_DARK_COLORS, "#98a1b3", "#2b3140", "#2b3140")
STYLE = (
    ".chart{display:block;width:100%;height:auto;overflow:visible}"
    ".tick{fill:var(--tick);font:11px system-ui,sans-serif}"
    ".grid{stroke:var(--grid);stroke-width:1;fill:none}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".faint{fill:none;stroke-width:1;stroke-linejoin:round;opacity:.35}"
    ".dot{stroke:none}.hint{fill:transparent}.hint:hover{fill:var(--tick);fill-opacity:.12}"
    ".rail{fill:var(--rail)}"
    + "".join(
        f".line.c{i},.faint.c{i}{{stroke:var(--c{i})}}.dot.c{i},.part.c{i}{{fill:var(--c{i})}}"
        for i in range(COLORS)
    )
)
