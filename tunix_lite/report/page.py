"""A report: its parts, and the one HTML file that they become.

The file holds no script and loads nothing from elsewhere. Texts stand in the parts as the run's
files have them; the template escapes each. The page also carries a content security policy that
lets a browser run and load nothing, so that a text which was not escaped could still do no harm.
"""

from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tunix_lite.plain_text import visible
from tunix_lite.report.charts import COLORS, Chart, line_chart, stacked_bar
from tunix_lite.report.findings import Finding

# most bytes of a page; a larger one loses its folded blocks, then its examples
MOST_BYTES = 2_000_000
# most characters of a completion, and of any other text
MOST_TEXT = 1_500


@dataclass(frozen=True)
class Table:
    """Rows of text under heads. numbers_from: the first column of numbers; 0: there are none.

    Example: Table(["phase", "seconds"], [["sampling", "12.1"]], numbers_from=1).
    """

    heads: list[str]
    rows: list[list[str]]
    numbers_from: int = 0
    note: str = ""


@dataclass(frozen=True)
class Charts:
    """Charts side by side. legend: of all of them, (name, colour) each.

    Example: Charts([Chart("reward", [line])], legend=[("seed 0", 0), ("seed 1", 1)]).
    """

    charts: list[Chart]
    legend: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Bar:
    """Parts of a whole, (name, amount, its text) each.

    Example: Bar("where the time went", [("sampling", 12.1, "12.1 s")]).
    """

    title: str
    parts: list[tuple[str, float, str]]


@dataclass(frozen=True)
class Text:
    """A paragraph. is_warning: one to be seen.

    Example: Text("the run was killed", is_warning=True).
    """

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Example:
    """A line of samples/, and completions of its prompt side by side: (title, line, note) each.

    Example: Example(before, [("step 0", before, ""), ("step 60", after, "")]).
    """

    row: dict
    answers: list[tuple[str, dict, str]]


@dataclass(frozen=True)
class Examples:
    """Examples under a title.

    Example: Examples("improved (139)", [Example(before, [("step 60", after, "")])]).
    """

    title: str
    examples: list[Example]


@dataclass(frozen=True)
class Commands:
    """Lines to paste, (what for, the line) each.

    Example: Commands([("talk to it", "tunix-lite chat checkpoint=outputs/latest")]).
    """

    lines: list[tuple[str, str]]


@dataclass(frozen=True)
class Folded:
    """A block that is closed at first. It is left out of a page that would be too large.

    Example: Folded("all settings", Table(["setting", "value"], [["seed", "0"]])).
    """

    title: str
    block: "Block"


Block = Table | Charts | Bar | Text | Examples | Commands | Finding | Folded


@dataclass(frozen=True)
class Section:
    """A part of a report under a title.

    Example: Section("Time", [Text("nothing was measured")]).
    """

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Page:
    """A report.

    Example: Page("GRPO on arithmetic", "632,448 parameters", "completed", "good").
    """

    title: str
    subtitle: str
    # how the run stands, in a word or two, and whether that is good, bad or neither: good, bad, mid
    status: str
    mood: str
    # numbers at the head: (name, number, note) each
    figures: list[tuple[str, str, str]] = field(default_factory=list)
    # the chart beside the figures
    hero: Chart | None = None
    sections: list[Section] = field(default_factory=list)
    # where and when it was made
    footer: str = ""


def page_as_html(page: Page) -> str:
    """The page as HTML of at most MOST_BYTES."""
    template = _environment().get_template("report.html.jinja")
    text = template.render(page=page, sections=page.sections)
    cut = Text("This page would be too large: a part of it is left out.", is_warning=True)
    sections = [Section("Cut", [cut]), *page.sections]
    for kinds in (Folded, Examples | Table, Charts | Bar | Finding | Commands):
        if len(text.encode()) <= MOST_BYTES:
            break
        sections = [
            Section(section.title, [b for b in section.blocks if not isinstance(b, kinds)])
            for section in sections
        ]
        text = template.render(page=page, sections=sections)
    return text


def _environment() -> Environment:
    """Jinja with every text that a template writes escaped."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    found.filters["cut"] = _safe
    found.filters["drawn"] = lambda chart: Markup(line_chart(chart))
    found.filters["drawn_bar"] = lambda parts: Markup(stacked_bar([part[:2] for part in parts]))
    found.filters["kind"] = lambda block: type(block).__name__
    found.globals["colors"] = COLORS
    return found


def _safe(text: object, most: int = MOST_TEXT) -> Markup:
    """The text escaped, without characters that act, and cut; what is HTML already stays."""
    if isinstance(text, Markup):
        return text
    text = str(text)
    left_out = len(text) - most
    if left_out > 0:
        text = f"{text[:most]}… ({left_out:,} characters more)"
    return escape(visible(text))
