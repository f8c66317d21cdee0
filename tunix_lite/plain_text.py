"""Text of models, data and rewards made safe to show: what would act on a terminal, or is no text,
is escaped."""

import re
from typing import Any

# characters of a row or a prompt that a message shows
SHOWN = 200

# Controls (C0 less \t and \n, DEL, C1), line and paragraph separators, what turns the direction of
# writing, and halves of a pair of UTF-16, which no file can hold.
_ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_NO_TEXT = re.compile("[\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with each such character as Python writes it: `\x1b`, `\u202e`, `\ud800`. \n and \t
    stay."""
    return _ACTS.sub(_escaped, text)


def encodable(text: str) -> str:
    r"""The text as UTF-8 can hold it, with `\ud800` and its like escaped: for JSON, which quotes
    all else itself."""
    return _NO_TEXT.sub(_escaped, text)


def shortened(value: Any) -> str:
    """`repr` of a row or a text in one line, not longer than SHOWN; of a longer one, how long it
    is."""
    is_text = type(value) is str
    said = repr(value[: SHOWN + 1] if is_text else value).replace("\n", " ")
    if len(said) <= SHOWN:
        return visible(said)
    return f"{visible(said[:SHOWN])}… ({len(value) if is_text else len(said):,} characters)"


def shown(value: Any, most: int = 120) -> str:
    """A value as a message shows it: `repr`, in one line, cut."""
    return _cut(repr(value), most)


def escaped(text: str, most: int = 120) -> str:
    """A text as a message shows it: in one line, cut, and with nothing in it that acts on a
    terminal."""
    return _cut("".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1]), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _escaped(found: re.Match) -> str:
    return found.group().encode("unicode_escape").decode()
