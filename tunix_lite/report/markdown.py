"""A report as Markdown: the same sections, with curves as a line of text."""

import re
from functools import singledispatch

from tunix_lite.plain_text import visible
from tunix_lite.report.charts import number_text, sparkline
from tunix_lite.report.findings import Finding
from tunix_lite.report.page import (
    Bar,
    Block,
    Charts,
    Commands,
    Example,
    Examples,
    Folded,
    Page,
    Table,
    Text,
)

# most characters of a text
MOST_TEXT = 600
# what means something in Markdown, or in the HTML inside of it
_ACTS = re.compile(r"([\\`*_\[\]#|<>~&@]|:(?=//))")


def page_as_markdown(page: Page) -> str:
    """The page as Markdown. Texts of the run cannot make links, pictures or HTML of themselves."""
    lines = [f"# {_text(page.title)}: {_text(page.status)}", "", _text(page.subtitle), ""]
    if page.figures:
        rows = [[figure.name, figure.value, figure.note] for figure in page.figures]
        lines += [*_table(Table(["", "", ""], rows)), ""]
    for section in page.sections:
        lines += [f"## {_text(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join([*lines, _text(page.footer)]) + "\n"


def _text(text: str) -> str:
    """The text in one line, with every character escaped that Markdown would read."""
    return _ACTS.sub(r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    text = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
    return " ⏎ ".join(visible(text).split("\n")).replace("\t", " ")


def _code(text: str) -> str:
    """The text as code, in more backticks than it holds."""
    text = visible(text).replace("\n", " ").replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"`{text}`"


@singledispatch
def _block(block: Block) -> list[str]:
    """A block as its kind is written, by one of the functions below."""
    raise TypeError(f"no block of a page: {type(block).__name__}")


@_block.register
def _table(table: Table) -> list[str]:
    marks = ["--:" if 0 < table.numbers_from <= i else "---" for i in range(len(table.heads))]
    lines = [f"| {' | '.join(map(_text, table.heads))} |", f"| {' | '.join(marks)} |"]
    lines += [f"| {' | '.join(map(_text, row))} |" for row in table.rows]
    return [*lines, "", _text(table.note)] if table.note else lines


@_block.register
def _charts(block: Charts) -> list[str]:
    lines = ["| curve | | first | last |", "| --- | --- | --: | --: |"]
    for chart in block.charts:
        for line in chart.lines:
            if line.kind == "smooth":
                continue
            name = f"{chart.title}: {line.name}" if line.name else chart.title
            ends = [number_text(line.values[i], chart.is_share) for i in (0, -1)]
            cells = [_text(name), sparkline(line.values), *map(_text, ends)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


@_block.register
def _bar(block: Bar) -> list[str]:
    parts = ", ".join(f"{name} {text}" for name, _, text in block.parts)
    return [f"{_text(block.title)}: {_text(parts)}"]


@_block.register
def _paragraph(block: Text) -> list[str]:
    return [f"**{_text(block.text)}**" if block.is_warning else _text(block.text)]


@_block.register
def _examples(block: Examples) -> list[str]:
    lines = [f"### {_text(block.title)}", ""]
    for example in block.examples:
        lines += _example(example)
    return lines


def _example(example: Example) -> list[str]:
    expected = "" if example.expected is None else f" (expected {_text(example.expected)})"
    lines = [f"- {_text(example.prompt)}{expected}"]
    for answer in example.answers:
        mark = "✔" if answer.is_correct else "✘"
        note = f" ({_text(answer.note)})" if answer.note else ""
        lines.append(f"  - {_text(answer.title)} {mark}{note}: {_code(answer.text[:MOST_TEXT])}")
    return lines


@_block.register
def _commands(block: Commands) -> list[str]:
    lines = []
    for what, line in block.lines:
        # Four spaces make code of a line, whatever stands in it.
        lines += [f"{_text(what)}:", "", f"    {_one_long_line(line)}", ""]
    return lines


def _one_long_line(text: str) -> str:
    return visible(text).replace("\n", " ")


@_block.register
def _finding(finding: Finding) -> list[str]:
    lines = [f"- **{_text(finding.what)}** ({_text(finding.name)})"]
    lines += [f"  - {_text(line)}" for line in finding.evidence]
    lines += [f"  - try {_code(line)}" for line in finding.overrides]
    return lines


@_block.register
def _folded(block: Folded) -> list[str]:
    head = [] if isinstance(block.block, Examples) else [f"### {_text(block.title)}", ""]
    return [*head, *_block(block.block)]
