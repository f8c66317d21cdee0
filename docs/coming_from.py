"""Writes docs/guide/coming_from.md from the table of other projects' words:

    python docs/coming_from.py

tests/test_hints.py compares the file with what this makes, so neither can change alone.
"""

import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tunix_lite.settings.hints import Word, foreign_words

PAGE = Path(__file__).parent / "guide" / "coming_from.md"
# what stands before the tables
TEMPLATE = Path(__file__).parent / "coming_from_template.txt"
WIDTH = 118
NAMES = 44
# project -> its heading; words of other projects are answered by the program alone
PROJECTS = {
    "TRL": "TRL, transformers, PEFT",
    "accelerate": "accelerate and DeepSpeed",
    "verl": "verl",
    "Tunix": "Tunix",
    "MaxText": "MaxText",
}
TOGETHER = {"DeepSpeed": "accelerate"}
SPECIAL = {
    "<model>": "model.weights=X for a folder or a hub name, model=gemma3_1b for a size by name",
    "<data>": "task=jsonl task.train=X for a file",
    "<file>": "task=parquet task.train=X, or task=jsonl, by the ending of the file",
    "<reward>": "task.reward=X for a function module.name",
    "<mesh>": "model.mesh_shape=[[4,2],[fsdp,tp]] for (4,2)",
}


def render() -> str:
    """The whole page. Values and notes of a word stand where it is named first."""
    parts = [TEMPLATE.read_text()]
    table, _ = foreign_words()
    first: dict[int, str] = {}
    for project, title in PROJECTS.items():
        lines = []
        for number, word in enumerate(table):
            if names := _names(word, project):
                lines += _lines(word, names, first.get(number))
                first.setdefault(number, names[0])
        parts.append(f"### {title}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


def _names(word: Word, project: str) -> list[str]:
    """The names that a project, or one shown with it, has for a word."""
    names = []
    for where, name in word.all_names():
        if TOGETHER.get(where, where) == project:
            names.append(name)
    return names


def _lines(word: Word, names: list[str], before: str | None) -> Iterator[str]:
    """Names, and what they are here: one row, and one for each value. `before` is the name under
    which an earlier table has the word."""
    shown = " or ".join(SPECIAL.get(text, text.replace("{}", "X")) for text in word.ours)
    values: dict[str, list[str]] = {}
    for value, ours in word.values.items():
        if ours:
            values.setdefault(ours, []).append(value)
    if before and (values or not shown):
        yield from _row(names, f"like {before}")
        return
    for ours, ways in values.items():
        yield from _row([f"{names[0]}={'|'.join(ways)}"], ours)
    if shown or not values:
        yield from _row(names, shown or f"- {word.note}")
    elif names[1:]:
        yield from _row(names[1:], f"like {names[0]}")


def _row(left: list[str], right: str) -> Iterator[str]:
    """Names below each other, and beside them what they are."""
    wide = [name for name in left if len(name) >= NAMES]
    yield from wide
    wrapped = textwrap.wrap(
        right, WIDTH - NAMES, break_long_words=False, break_on_hyphens=False
    )
    others = [name for name in left if name not in wide]
    for name, line in itertools.zip_longest(others, wrapped, fillvalue=""):
        yield f"{name:<{NAMES}}{line}".rstrip()


if __name__ == "__main__":
    PAGE.write_text(render())
