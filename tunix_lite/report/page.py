"""What a report says, before it is HTML or Markdown: sections of tables, charts, texts, examples.

Every text in here is as the run's files have it: whoever writes it out escapes it.
"""

from dataclasses import dataclass, field

from tunix_lite.report.charts import Chart
from tunix_lite.report.findings import Finding


@dataclass(frozen=True)
class Figure:
    """One number at the head of a report.

    Example: Figure("steps", "60 of 60", "in 55s").
    """

    name: str
    value: str
    note: str = ""


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
    """Parts of a whole, (name, amount, its text) each. whole: the amount of the full width.

    Example: Bar("where the time went", [("sampling", 12.1, "12.1 s")]).
    """

    title: str
    parts: list[tuple[str, float, str]]
    whole: float = 0.0


@dataclass(frozen=True)
class Text:
    """A paragraph. is_warning: one to be seen.

    Example: Text("the run was killed", is_warning=True).
    """

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Answer:
    """A completion, and what came of it.

    Example: Answer("The answer is 7.", "7", True, "step 60").
    """

    text: str
    extracted: str | None
    is_correct: bool
    title: str = ""
    # rewards, advantage and the like, in words
    note: str = ""


@dataclass(frozen=True)
class Example:
    """A prompt, and completions of it side by side.

    Example: Example("What is 3 + 4?", "7", [before, after]).
    """

    prompt: str
    expected: str | None
    answers: list[Answer]


@dataclass(frozen=True)
class Examples:
    """Examples under a title.

    Example: Examples("improved (139)", [Example("What is 3 + 4?", "7", [before, after])]).
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
    figures: list[Figure] = field(default_factory=list)
    # the chart beside the figures
    hero: Chart | None = None
    sections: list[Section] = field(default_factory=list)
    # where and when it was made
    footer: str = ""
