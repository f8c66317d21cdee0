"""Answers that can be checked: a text, a number or a letter of a choice, read out of the last mark
of a completion: `\\boxed{...}`, `<answer>...</answer>`, `#### ...`, or words such as `Answer: ...`.
Strict reads an answer that fills the mark; flexible one with words around it, or without a mark."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from tunix_lite.rewards.numbers import (
    LOOKED_AT,
    last_number,
    number_in,
    number_of,
    undecorated,
)
from tunix_lite.rewards.scores import field_of, no_answer

HOW = ("strict", "flexible")

# Patterns whose time is bounded by the length of the text, whatever stands in it.
_BOX_OR_BRACE = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*(?:\{|\Z))|\\boxed\s*(?P<bare>-?\d+(?:\.\d+)?)|(?<!\\)[{}]"
)
_TAG = re.compile(r"<(/?)answer\s*(?:>|\Z)", re.IGNORECASE)
# the rest of the line, or the next line if that has a digit
_HASHES = re.compile(
    r"(?<!#)####(?!#)[^\S\n]*(?:(?P<line>[^\s#][^\n#]*)|\n\s{0,99}(?P<next>[^\n#]*\d[^\n#]*))?"
)
# 5! is 120
_FACTORIAL = re.compile(r"\d!\$?\s*\Z")
# letters of a word, not of a formula
_PROSE = re.compile(r"(?<![\\\w])[^\W\d_]{3,}")
# marks that are tried, from the last one back
MOST_MARKS = 16
# characters of an answer after such words that are looked at
_LINE = 500
_WORDS = re.compile(
    r"\banswer\b(?:[*_\s]{0,9}[:=][*_]*|\s+(?:is|would\s+be|should\s+be)\b(?!\s+not\b)[*_\s]{0,9}:?)"
    rf"[*_]*[^\S\n]*(?=(.{{0,{_LINE}}}))",
    re.IGNORECASE,
)
# A sentence ends at a full stop that is not a decimal point.
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|</|<answer>|\n", re.IGNORECASE)


class _Mark(NamedTuple):
    """An answer that the completion marks as such. place: the character where the mark begins.
    text: what it holds, "" if it is empty or was not closed."""

    place: int
    kind: str
    text: str


def marked_answers(text: str) -> list[_Mark]:
    """Finds the answers that a text marks, in the order in which the marks begin."""
    # An end that is cut off at its front may begin within a mark, which is then not seen.
    text = text[-LOOKED_AT:]
    answers = []
    # the match of each open brace; None for a brace that is not a box's
    boxes: list[re.Match | None] = []
    last_closed = -1
    for match in _BOX_OR_BRACE.finditer(text):
        if match["bare"]:
            answers.append(_Mark(match.start(), "boxed", match["bare"]))
        elif match[0] != "}":
            boxes.append(match if match["box"] else None)
        # of boxes within a box, the inner ones
        elif boxes and (box := boxes.pop()) and box.start() > last_closed:
            last_closed = box.start()
            answers.append(_Mark(box.start(), "boxed", text[box.end() : match.start()]))
    # One that was not closed holds no answer, and is still the last mark.
    answers += [_Mark(box.start(), "boxed", "") for box in boxes if box]
    opened = None
    for tag in _TAG.finditer(text):
        # one that is opened again was not closed
        if opened is not None:
            held = text[opened.end() : tag.start()] if tag[1] else ""
            answers.append(_Mark(opened.start(), "tag", held))
        opened = None if tag[1] else tag
    if opened is not None:
        answers.append(_Mark(opened.start(), "tag", ""))
    answers += [
        _Mark(match.start(), "hashes", match["line"] or match["next"] or "")
        for match in _HASHES.finditer(text)
    ]
    for match in _WORDS.finditer(text):
        said = match[1]
        # on the next line, if nothing follows on this one
        if not said.strip("*_ "):
            said = text[match.end() : match.end() + _LINE].lstrip().partition("\n")[0]
        end = _SENTENCE_END.search(said)
        if end:
            said = said[: end.start()]
        answers.append(_Mark(match.start(), "words", said))
    return sorted(answers)


def read_answer(completion: str, how: str = "flexible") -> str | None:
    """The answer as text, for display: what the last mark holds, or (flexible) the last number."""
    if marks := marked_answers(completion):
        return marks[-1].text.strip() or None
    last = last_number(completion) if how == "flexible" else None
    return None if last is None else last[0]


@dataclass(frozen=True)
class NumericAnswer:
    """1 if the completion's answer is the example's as a number, else 0.

    Signs, thousands separators, currency, units, fractions, powers of ten and percent signs are
    read (see rewards.numbers). Numbers are compared exactly, unless a tolerance is given: they may
    differ by `tolerance`, or by `relative_tolerance` times the expected one.
    Example: NumericAnswer()("The answer is 1,200.", {"answer": 1200}) -> 1."""

    field: str = "answer"  # of the example: the expected number
    how: str = "flexible"  # strict: only a marked answer; flexible: else the last number
    tolerance: float = 0.0
    relative_tolerance: float = 0.0

    def __post_init__(self):
        _check_choice("how", self.how, HOW)
        for name in ("tolerance", "relative_tolerance"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")

    def __call__(self, completion: str, example: dict) -> float:
        """Raises ValueError if the example's answer is no number."""
        expected = number_of(str(field_of(example, self.field)))
        if expected is None:
            wrong = _of_example(example, self.field)
            raise ValueError(
                f"{wrong} is not a number; rewards.answers.ExactAnswer compares text"
            )
        number = self._read(completion[-LOOKED_AT:])
        if number is None:
            return no_answer(f"it holds no number ({self.how})")
        # As fractions: floats would round the difference.
        allowed = max(
            Fraction(self.tolerance),
            Fraction(self.relative_tolerance) * abs(expected),
        )
        return float(abs(number - expected) <= allowed)

    def _read(self, text: str) -> Fraction | None:
        read = number_of if self.how == "strict" else number_in
        for mark in marked_answers(text)[: -MOST_MARKS - 1 : -1]:
            if self.how == "flexible" and is_sentence(mark, text):
                continue
            # in prose it is an exclamation mark
            is_formula = mark.kind in ("boxed", "tag") or mark.text.rstrip().endswith("$")
            is_factorial = is_formula and _FACTORIAL.search(mark.text)
            return None if is_factorial else read(mark.text)
        last = None if self.how == "strict" else last_number(text)
        return None if last is None else last[1]


def is_sentence(mark: _Mark, text: str) -> bool:
    """True if a mark is words that give no number, such as `the answer is clear`, or a heading
    behind `####` with more text below it. A number before such a mark still counts."""
    if any(sign.isdigit() for sign in mark.text) or not _PROSE.search(mark.text):
        return False
    is_heading = mark.kind == "hashes" and "\n" in text[mark.place :].strip()
    return mark.kind == "words" or is_heading


@dataclass(frozen=True)
class ExactAnswer:
    """1 if the completion's answer is the example's as text, else 0.

    Both are compared without space around them, a full stop at the end, quotes, bold marks and
    LaTeX's `\\text{}` and dollars, and with every space as one. Where the example's answer is a
    list, any of its texts is right.
    Example: ExactAnswer()("The answer is Paris.", {"answer": "paris"}) -> 1."""

    # Field of the example: the expected text, or a list of texts.
    field: str = "answer"
    # strict: only a marked answer; flexible: without a mark, the last line that is not empty
    how: str = "strict"
    # Whether capital and small letters are the same.
    ignore_case: bool = True

    def __post_init__(self):
        _check_choice("how", self.how, HOW)

    def __call__(self, completion: str, example: dict) -> float:
        expected = field_of(example, self.field)
        texts = expected if isinstance(expected, list | tuple) else [expected]
        answer = self._read(completion)
        if not answer:
            return no_answer(f"it holds no answer ({self.how})")
        return float(answer in [self._normal(str(text)) for text in texts])

    def _read(self, completion: str) -> str:
        if marks := marked_answers(completion):
            return self._normal(marks[-1].text)
        if self.how == "strict":
            return ""
        lines = [self._normal(line) for line in completion[-LOOKED_AT:].splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def _normal(self, text: str) -> str:
        text = " ".join(undecorated(text).split())
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True)
class ChoiceAnswer:
    """1 if the completion chooses the example's letter, else 0.

    Strict reads a letter that a mark begins with (`The answer is (B) Paris.`), or a completion that
    is nothing but a letter. Flexible also takes the last letter with a bracket, a full stop or a
    colon behind it, and then the last one that stands alone.
    Example: ChoiceAnswer()("The answer is (B) Paris.", {"answer": "B"}) -> 1."""

    field: str = "answer"  # of the example: the expected letter
    choices: str = "ABCDE"  # the letters there are
    how: str = "flexible"

    def __post_init__(self):
        _check_choice("how", self.how, HOW)
        if not self.choices.isalpha() or not self.choices.isascii():
            raise ValueError(f"choices={self.choices!r}; it is letters, as in ABCD")

    def __call__(self, completion: str, example: dict) -> float:
        """Raises ValueError if the example's answer is none of the letters."""
        letters = self.choices.upper()
        expected = str(field_of(example, self.field)).strip(" ().").upper()
        if len(expected) != 1 or expected not in letters:
            wrong = _of_example(example, self.field)
            raise ValueError(f"{wrong} is none of choices={self.choices}")
        letter = self._read(completion, letters)
        if letter is None:
            return no_answer(f"it chooses none of {letters} ({self.how})")
        return float(letter == expected)

    def _read(self, completion: str, letters: str) -> str | None:
        one = f"[{letters}{letters.lower()}]"
        # `B`, `(B)`, `B) Paris`, `B. Paris`, `B: Paris`; but not the article of `A dog`
        whole = re.compile(rf"\(?({one})(?:\s*[).:,].*|\s*)", re.DOTALL)
        # `A or B`, `A, C`, `(A)(C)` choose none
        several = re.compile(
            rf"(?<![\w'])\(?{one}\)?\s*(?:[,;/&+]|\b(?:and|or)\b|(?<=\))(?=\())[\s,]*"
            rf"(?:(?:and|or)\s+)?\(?(?:[{letters}](?![\w'])|{one}\)|{one}\s*\Z)"
        )
        completion = completion[-LOOKED_AT:]
        for mark in reversed(marked_answers(completion)):
            # `option (B)` and `choice B` without the word
            said = undecorated(mark.text)
            said = re.sub(r"^(?:option|choice|letter)\s+", "", said, flags=re.IGNORECASE)
            if (match := whole.fullmatch(said)) and not several.match(said):
                return match[1].upper()
            if self.how == "strict":
                return None
            if several.search(said):
                return None
            if not is_sentence(mark, completion):
                return _last_letter(said, letters)
        text = undecorated(completion)
        if match := re.fullmatch(rf"\(?({one})\)?", text):
            return match[1].upper()
        if self.how == "strict":
            return None
        return _last_letter(text, letters)


def _last_letter(text: str, letters: str) -> str | None:
    """The last letter with a sign behind it, or else the last one that stands alone."""
    apart = rf"\(([{letters}{letters.lower()}])\)|(?<!\w)([{letters}])(?:\)|[.:](?=\s|$))"
    # a letter before a small one may be an article, unless words say that it is meant
    alone = (
        rf"\b(?i:option|choice|answer)\s+([{letters}])(?![\w'])"
        rf"|(?<![\w'])([{letters}])\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b"
        rf"|(?<![\w'])([{letters}])(?![\w'])(?!\s+[a-z])"
    )
    for pattern in (apart, alone):
        if matches := re.findall(pattern, text):
            return "".join(matches[-1]).upper()
    return None


def _of_example(example: dict, field: str) -> str:
    return f"{field}={field_of(example, field)!r:.200} of an example"


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; it is {' or '.join(choices)}")
