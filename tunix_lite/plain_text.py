"""Makes text of models, data and rewards safe to show: characters that control a terminal, or that
are no text, are escaped."""

import re
from typing import Any

# Characters of a row or a prompt that a message shows.
SHOWN = 200

# Controls (C0 less \t and \n, DEL, C1), line and paragraph separators, characters that turn the
# direction of writing, and halves of a pair of UTF-16, which no file can hold.
_ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_NO_TEXT = re.compile("[\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with such characters escaped as Python writes them: `\x1b`, `\u202e`, `\ud800`. \n
    and \t stay."""
    return _ACTS.sub(_escaped, text)


def encodable(text: str) -> str:
    r"""The text as UTF-8 can hold it, with `\ud800` and its like escaped. It is for JSON, which
    escapes all other characters itself."""
    return _NO_TEXT.sub(_escaped, text)


def shortened(value: Any) -> str:
    """`repr` of a row or a text in one line, cut after SHOWN characters. If it is cut, its length
    follows."""
    is_text = type(value) is str
    written = repr(value[: SHOWN + 1] if is_text else value).replace("\n", " ")
    if len(written) <= SHOWN:
        return visible(written)
    length = len(value) if is_text else len(written)
    return f"{visible(written[:SHOWN])}… ({length:,} characters)"


def shown(value: Any, most: int = 120) -> str:
    """A value as a message shows it: `repr`, cut after `most` characters."""
    return _cut(repr(value), most)


def escaped(text: str, most: int = 120) -> str:
    """A text as a message shows it: in one line, cut after `most` characters, and without
    characters that control a terminal."""
    characters = [c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1]]
    return _cut("".join(characters), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _escaped(found: re.Match) -> str:
    return found.group().encode("unicode_escape").decode()


def device_name(kind: str, platform: str) -> str:
    """A device in words: `NVIDIA H100 80GB HBM3 (gpu)`; of a CPU, whose kind says no more, `cpu`.

    kind, platform: as jax has them.
    """
    return kind if kind == platform else f"{kind} ({platform})"
