"""A report as one HTML file: no script, nothing from elsewhere, every text escaped.

The page also carries a content security policy that lets a browser run and load nothing, so that a
text which was not escaped could still do no harm.
"""

from functools import singledispatch
from html import escape
from pathlib import Path

from tunix_lite.plain_text import visible
from tunix_lite.report import charts
from tunix_lite.report.charts import line_chart, stacked_bar
from tunix_lite.report.findings import Finding
from tunix_lite.report.page import (
    Answer,
    Bar,
    Block,
    Charts,
    Commands,
    Example,
    Examples,
    Figure,
    Folded,
    Page,
    Section,
    Table,
    Text,
)

# most bytes of a page; a larger one loses its folded blocks, then its examples
MOST_BYTES = 2_000_000
# most characters of a completion, and of any other text
MOST_TEXT = 1_500
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"

STYLE = Path(__file__).with_name("report.css").read_text()


def page_as_html(page: Page) -> str:
    """The page as HTML of at most MOST_BYTES."""
    text = _page(page, page.sections)
    cut = Text("This page would be too large: a part of it is left out.", is_warning=True)
    sections = [Section("Cut", [cut]), *page.sections]
    for kinds in (Folded, Examples | Table, Charts | Bar | Finding | Commands):
        if len(text.encode()) <= MOST_BYTES:
            return text
        sections = [_without(section, kinds) for section in sections]
        text = _page(page, sections)
    return text


def _without(section: Section, kinds: type) -> Section:
    return Section(section.title, [b for b in section.blocks if not isinstance(b, kinds)])


def _page(page: Page, sections: list[Section]) -> str:
    style = f"{charts.STYLE}{charts.LIGHT}@media(prefers-color-scheme:dark){{{charts.DARK}}}{STYLE}"
    keys = "".join(f".key.c{i}{{background:var(--c{i})}}" for i in range(charts.COLORS))
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(page.title)}</title><style>{style}{keys}</style></head><body><main>",
        f'<header><div class="top"><h1>{_text(page.title)}</h1>',
        f'<span class="pill {page.mood}">{_text(page.status)}</span></div>',
        f'<p class="sub">{_text(page.subtitle)}</p></header>',
        _head(page),
    ]
    for section in sections:
        if section.blocks:
            body = "".join(map(_block, section.blocks))
            parts.append(f"<section><h2>{_text(section.title)}</h2>{body}</section>")
    parts.append(f"<footer>{_text(page.footer)}</footer></main></body></html>\n")
    return "\n".join(parts)


def _text(text: str, most: int = MOST_TEXT) -> str:
    """The text escaped, without characters that act, and cut."""
    left_out = len(text) - most
    if left_out > 0:
        text = f"{text[:most]}… ({left_out:,} characters more)"
    return escape(visible(text))


# ---- blocks


def _head(page: Page) -> str:
    figures = "".join(map(_figure, page.figures))
    hero = ""
    if page.hero is not None:
        hero = _chart(page.hero)
    kind = "head wide" if hero and figures else "head"
    return f'<div class="{kind}"><div class="figures">{figures}</div>{hero}</div>'


def _figure(figure: Figure) -> str:
    return (
        f'<div class="card figure"><div class="name">{_text(figure.name)}</div>'
        f'<div class="value">{_text(figure.value)}</div>'
        f'<div class="of">{_text(figure.note)}</div></div>'
    )


@singledispatch
def _block(block: Block) -> str:
    """A block as its kind is written, by one of the functions below."""
    raise TypeError(f"no block of a page: {type(block).__name__}")


@_block.register
def _table(table: Table) -> str:
    kind = ' class="num"' if table.numbers_from else ""
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    rows = [_row(table.heads, "th", table.numbers_from)]
    rows += [_row(row, "td", table.numbers_from) for row in table.rows]
    return f'<div class="scroll"><table{kind}>{"".join(rows)}</table></div>{note}'


def _row(cells: list[str], tag: str, numbers_from: int) -> str:
    written = []
    for i, cell in enumerate(cells):
        kind = ' class="n"' if 0 < numbers_from <= i else ""
        written.append(f"<{tag}{kind}>{_text(cell, 400)}</{tag}>")
    return f"<tr>{''.join(written)}</tr>"


@_block.register
def _charts(block: Charts) -> str:
    legend = _legend(block.legend)
    drawn = "".join(_chart(chart, has_legend=not block.legend) for chart in block.charts)
    return f'{legend}<div class="cards">{drawn}</div>'


def _chart(chart: charts.Chart, has_legend: bool = True) -> str:
    named = [(line.name, line.color) for line in chart.lines if line.kind != "faint" and line.name]
    own = _legend(named) if has_legend and len(named) > 1 else ""
    note = f"<span>{_text(chart.note)}</span>" if chart.note else ""
    head = f'<div class="ct"><div>{_text(chart.title)}</div>{note}</div>'
    return f'<div class="card">{head}{line_chart(chart)}{own}</div>'


def _legend(keys: list[tuple[str, int]]) -> str:
    if not keys:
        return ""
    shown = [
        f'<span><i class="key c{color % charts.COLORS}"></i>{_text(name)}</span>'
        for name, color in keys
    ]
    return f'<div class="legend">{"".join(shown)}</div>'


@_block.register
def _bar(block: Bar) -> str:
    drawn = stacked_bar([(name, amount) for name, amount, _ in block.parts], block.whole)
    keys = [(f"{name} {text}", i) for i, (name, _, text) in enumerate(block.parts)]
    return f'<div class="barbox"><h3>{_text(block.title)}</h3>{drawn}{_legend(keys)}</div>'


@_block.register
def _paragraph(block: Text) -> str:
    kind = ' class="warn"' if block.is_warning else ""
    return f"<p{kind}>{_text(block.text)}</p>"


@_block.register
def _examples(block: Examples) -> str:
    return f"<h3>{_text(block.title)}</h3>" + "".join(map(_example, block.examples))


def _example(example: Example) -> str:
    expected = ""
    if example.expected is not None:
        expected = f' <span class="what">expected <b>{_text(example.expected, 200)}</b></span>'
    answers = "".join(map(_answer, example.answers))
    return (
        f'<div class="card example"><div class="prompt">{_text(example.prompt)}{expected}</div>'
        f'<div class="answers">{answers}</div></div>'
    )


def _answer(answer: Answer) -> str:
    kind = "right" if answer.is_correct else "wrong"
    mark = "✔" if answer.is_correct else "✘"
    read = "no answer" if answer.extracted is None else _text(answer.extracted, 80)
    note = f'<div class="what">{_text(answer.note)}</div>' if answer.note else ""
    return (
        f'<div class="answer {kind}"><div class="what">{_text(answer.title)} '
        f"<b>{mark} {read}</b></div><pre>{_text(answer.text)}</pre>{note}</div>"
    )


@_block.register
def _commands(block: Commands) -> str:
    return "".join(
        f'<h3>{_text(what)}</h3><pre class="line">{_text(line, 20_000)}</pre>'
        for what, line in block.lines
    )


@_block.register
def _finding(finding: Finding) -> str:
    lines = [f"<li>{_text(line)}</li>" for line in finding.evidence]
    lines += [f"<li>try <code>{_text(line)}</code></li>" for line in finding.overrides]
    head = f"<b>{_text(finding.what)}</b> <span class='what'>{_text(finding.name)}</span>"
    return f'<div class="card finding">{head}<ul>{"".join(lines)}</ul></div>'


@_block.register
def _folded(block: Folded) -> str:
    return f"<details><summary>{_text(block.title)}</summary>{_block(block.block)}</details>"
