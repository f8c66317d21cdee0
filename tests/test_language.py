"""The pages are short sentences: none over 35 words, and at most 18 on average on a page."""

import re

import pytest
from test_docs import DOCS, LIVING, ROOT

DECISIONS = sorted(DOCS.glob("decisions/*.md"))
PAGES = [*LIVING, ROOT / "CHANGELOG.md", *DECISIONS]


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence. Code blocks, tables, headings, pictures, formulas and targets of links are left out;
    `code` is a word."""
    text = re.sub(r"^(```|:::).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|\$\$.*?\$\$|!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL)
    text = re.sub(r"^\[[^\]]*\]: \S+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    # a blank line, an item of a list and a heading begin anew
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))|^#.*$", text, flags=re.MULTILINE)
    parts = [re.sub(r"^\s*(?:[-*] |\d+\. )", "", part) for part in parts if not part.strip().startswith("|")]
    found = [s for part in parts for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(*])", " ".join(part.split()))]
    words = [[word for word in s.split() if re.search(r"\w", word)] for s in found]
    return [sentence for sentence in words if sentence]


def test_sentences_are_counted_as_a_reader_does():
    text = "# A title\n\nOne `a b` two. *Three* four, [five six](x.md).\n\n- seven\n- eight\n\n| a | b |\n\n```bash\nmake\n```\n"
    assert [len(sentence) for sentence in sentences(text)] == [3, 4, 1, 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_easy_to_read(page):
    found = sentences(page.read_text())
    long = [" ".join(sentence) for sentence in found if len(sentence) > 35]
    assert not long, f"{page.name}: {long[0]}"
    assert sum(map(len, found)) <= 18 * max(len(found), 1), f"{page.name}: sentences are too long on average"
