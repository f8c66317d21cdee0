"""A report as one HTML file, by report.html.jinja, which escapes each text. The page holds no
script and loads nothing, and its content security policy lets a browser do neither."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tunix_lite.basics.plain_text import visible
from tunix_lite.report.charts import COLORS, Chart, line_chart

# most characters of a completion, and of any other text
MOST_TEXT = 1_500


@dataclass(frozen=True)
class Page:
    """A report. Its blocks are HTML, made by the macros of the template: `html.table(...)`.
    Example: Page("GRPO on arithmetic", "632,448 parameters", "completed", "good")."""

    title: str
    subtitle: str
    # how the run stands, in a word or two, and whether that is good, bad or neither: good, bad, mid
    status: str
    mood: str
    # numbers at the head: (name, number, note) each
    figures: list[tuple[str, str, str]] = field(default_factory=list)
    # the chart beside the figures
    hero: Chart | None = None
    # title and blocks of each
    sections: list[tuple[str, list[Markup]]] = field(default_factory=list)
    # where and when it was made
    footer: str = ""


def _safe(text: object, most: int = MOST_TEXT) -> Markup:
    """The text escaped, without characters that act, and cut; what is HTML already stays."""
    if isinstance(text, Markup):
        return text
    text = str(text)
    left_out = len(text) - most
    if left_out > 0:
        text = f"{text[:most]}… ({left_out:,} characters more)"
    return escape(visible(text))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_safe,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters["cut"] = _safe
_ENVIRONMENT.filters["drawn"] = lambda chart: Markup(line_chart(chart))
_ENVIRONMENT.globals["colors"] = COLORS
_TEMPLATE = _ENVIRONMENT.get_template("report.html.jinja")
# The macros of the template: each makes a block of a page.
html = _TEMPLATE.module


def write_page(page: Page, folder: Path) -> Path:
    """Writes report.html into a folder, and returns the file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.html"
    # A new file replaces the old one at once: a reader never sees half of it.
    fresh = file.with_name(f".{file.name}.tmp")
    fresh.write_text(_TEMPLATE.render(vars(page)), encoding="utf-8")
    fresh.replace(file)
    return file


def write_at_end(folder: Path, page: Callable[[], Page], say: Callable[[str], None]) -> None:
    """Writes the report of a run that has just ended into its folder. It never fails: whatever is
    wrong becomes one line that `say` gets."""
    try:
        say(f"report: {write_page(page(), folder)}")
    # A report is no reason for a run to fail, whatever its files hold.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        # The disk of the log may be full, too.
        with contextlib.suppress(OSError):
            again = f"tunix-lite doctor {folder} doctor.report={folder}"
            say(f"warning: the report could not be written ({reason}); {again}")
