"""The pictures of the documentation are those that their scripts draw, and can be read in light and dark."""

import importlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))


def test_pictures_are_what_the_scripts_draw(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "drawings")
    drawn = importlib.import_module("make").pictures()
    assert len(drawn) >= 10
    assert {file.stem: file.read_text() for file in PICTURES} == drawn, "python docs/drawings/make.py"


def luminance(colour: str) -> float:
    """WCAG 2.2 relative luminance of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def fills(rules: str) -> dict[str, str]:
    return dict(re.findall(r"(?:^|[}\n])(text|\.\w+)\{[^}]*?fill:(#[0-9a-f]+)", rules))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_ground(scheme, monkeypatch):
    """WCAG AA asks for 4.5 between text and what is behind it."""
    monkeypatch.syspath_prepend(DOCS / "drawings")
    light, _, dark = importlib.import_module("svg").STYLE.partition("@media(prefers-color-scheme:dark){")
    colours = fills(light) | (fills(dark) if scheme == "dark" else {})
    for ground in (".card", ".soft", ".a", ".b", ".c", ".d", ".e"):
        assert contrast(colours["text"], colours[ground]) >= 4.5, ground
    for words in (".dim", ".ta", ".tb", ".tc", ".td"):
        assert contrast(colours[words], colours[".card"]) >= 4.5, words


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.stem)
def test_a_picture_says_in_words_what_it_shows_and_keeps_inside_its_card(file):
    root = ET.parse(file).getroot()
    kind = "{http://www.w3.org/2000/svg}"
    assert len(root.find(f"{kind}title").text) > 10
    width, height = float(root.get("width")), float(root.get("height"))
    for text in root.iter(f"{kind}text"):
        x, y, classes = float(text.get("x")), float(text.get("y")), (text.get("class") or "").split()
        # a generous width of a letter, in pixels
        size = 9.9 if "big" in classes else 6.6 if "small" in classes else 7.6
        words = size * len(text.text)
        left = x - (words if "end" in classes else words / 2 if "mid" in classes else 0)
        assert left > -6 and left + words < width + 6 and 0 < y < height, text.text
