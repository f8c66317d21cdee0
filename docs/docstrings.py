"""Docstrings are plain text with `code` in them; Sphinx wants reStructuredText. One becomes the
other here."""

import re

CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Code becomes ``code``, a paragraph with an indented line a literal block, and nothing else is
    markup."""
    if lines and (
        getattr(obj, "__dataclass_fields__", None) and lines[0].startswith(f"{obj.__name__}(")
    ):
        # the docstring that dataclass makes up repeats the signature
        lines[:] = []
    paragraphs, kept = "\n".join(lines).strip("\n").split("\n\n"), []
    for paragraph in paragraphs:
        if re.search(r"^\s", paragraph, re.MULTILINE):
            kept += ["::", "", *(f"    {line}" for line in paragraph.split("\n")), ""]
        else:
            kept += [*(_line(line) for line in paragraph.split("\n")), ""]
    lines[:] = kept if any(lines) else []


def _line(text: str) -> str:
    # plain, code, plain, code ...
    pieces = CODE.split(text)
    plain = [re.sub(r"([\\*|_`])", r"\\\1", piece) for piece in pieces]
    return "".join(f"``{pieces[i]}``" if i % 2 else plain[i] for i in range(len(pieces)))
