"""Numbers as people and models write them: `-1,234.5`, `$3`, `50%`, `1 1/2`, `5 km`, as exact
fractions. What is not plainly one number is none, and not guessed at: `1,23`, `3:45`, `2^5`,
`5 or 6`, `2x`."""

import re
import unicodedata
from fractions import Fraction

# Characters of a text that are looked at; of a longer one, those at its end.
LOOKED_AT = 64 * 1024
# digits of a number, and the largest power of ten, that are still computed with
MOST_DIGITS = 400

SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000}
SCALES |= {"million": 10**6, "billion": 10**9, "trillion": 10**12}

_CURRENCY = r"(?:(?:US|CA|AU)?\$|€|£|¥|₹|(?:USD|EUR|GBP|Rs\.?)\s?)"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+|\.(?![\d.]))?|\.\d+)"
_SIGNED = rf"[-+]?\s*{_DECIMAL}"
# `{1.5}`, or one digit without braces
_ARGUMENT = rf"(?:\{{\s*{_SIGNED}\s*\}}|\s*\d)"
_FRACTION = rf"\\[dtc]?frac{_ARGUMENT}\s*{_ARGUMENT}"
_TIMES_TEN = r"\s*(?:\\times|\\cdot|[x\u00d7*\u00b7])\s*10\s*\^"
_POWER = rf"(?:{_TIMES_TEN}\s*\{{?\s*([-+]?\d+)\s*\}}?|[eE]([-+]?\d+))"
# One number with its sign, currency, power of ten and percent sign; what follows it is a unit.
NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]\s*)? {_CURRENCY}? (?P<second>[-+])?
    (?:
        (?:(?P<whole>\d+)\s*)? (?P<frac>{_FRACTION})
      | (?P<mixed>\d+)\s+(?P<above>\d+)\s*/\s*(?P<below>\d+)
      | (?P<over>{_DECIMAL})\s*/\s*(?P<under>[-+]?{_DECIMAL}|\(\s*{_SIGNED}\s*\))
      | 10\s*\^\s*\{{?\s*(?P<ten>[-+]?\d+)\s*\}}?
      | (?P<decimal>{_DECIMAL})(?P<power>{_POWER})?
    )
    (?:\s*%|\s*percent\b)?
    """,
    re.VERBOSE,
)
# Units of one letter, and short ones that stand right behind a number; other letters are variables.
_UNIT_LETTERS = frozenset("mgshlLWVANJKCF\u2126\u03a9")
_SHORT_UNITS = """
    km cm mm nm kg mg ml cl ms hz kb mb gb tb ft in yd mi lb oz am pm st nd rd th
""".split()  # noqa: SIM905
_FUNCTIONS = (
    r"pi|tau|sin|cos|tan|cot|sec(?=\s*[(\w])|csc|sinh|cosh|tanh|arcsin|arccos|arctan|log|ln|exp|sqrt|"
    r"cbrt|lim|inf|infinity|infty|mod|modulo|choose|factorial|squared|cubed|plus|minus|or|multiplied|"
    r"divided"
)
# Signs of mathematics: ± × ÷, those from ∀ on, and numbers that are raised or lowered.
_RAISED = r"\u00b2\u00b3\u00b9\u2070-\u209f"
_OPERATOR = rf"\\^_=<>+*|~\u00b1\u00d7\u00f7\u2200-\u22ff{_RAISED}"
_LETTER = rf"[^\W\d_{_RAISED}]"
# What follows a number, piece by piece; m^2, s^{-1} and m² are no operators.
_TOKEN = re.compile(
    rf"""
    (?: (?<={_LETTER}) | (?<={_LETTER}[ ]) ) (?: \^\s*\{{?\s*-?\d\s*\}}? | [\u00b2\u00b3] )
  | (?P<operator>
        [\d{_OPERATOR}] | (?<!{_LETTER})[\u00b7!] | -(?!{_LETTER}{{2}}) | /(?!\s*{_LETTER})
    )
  | (?P<word> {_LETTER}+ (?: ['.] {_LETTER}+ )* )
  | .
    """,
    re.DOTALL | re.VERBOSE,
)
_CONNECTS = re.compile(
    rf"(?:{_FUNCTIONS})\b|and\s+(?:an?|one|half|more)\b|at\s+(?:least|most)\b", re.IGNORECASE
)
_CONNECTS_AT_ONCE = re.compile(
    rf"\(|\s*(?:and|through|thru|till|until|to(?!\s+(?!inf){_LETTER}{{3}}))\b", re.IGNORECASE
)
# What ends an answer, so that the rest is a remark: `5, not 6`, `5 (of 7)`, `5 = 2 + 3`.
_REMARK = re.compile(
    rf"""
    (?: \s\( | [,;:.]\s | \n ) \s{{0,9}} (?! (?:or|and|to)\b ) (?: = | {_LETTER}{{2}} )
  | \s (?:because|since|as|which|so|not)\b
  | (?<={_LETTER}{{2}}) \s+ (?:in|for|from|after|on|at|with|per|during|out\ of|of)\b
  | = (?= [^=,;]*\Z )
    """,
    re.IGNORECASE | re.VERBOSE,
)
# What makes a number behind it a part: an operator, a bracket, a function, `at least`, a variable.
_LEADS_IN = re.compile(
    rf"""
    [\d{_OPERATOR}(){{}}\[\]/]
  | \b (?:{_FUNCTIONS}) \b
  | \b (?: least|most|than|over|under|above|below|negative|roots?|half|twice|double|triple|not )
    (?:\s+of)? [\s$-]* \Z
  | (?<!{_LETTER}) (?<!['.]) (?! [aI]\s ) {_LETTER} (?! {_LETTER} | ['.] | \s*: | \s+is\b )
    """,
    re.IGNORECASE | re.VERBOSE,
)
# The variable of a second equation: `x = 3, y = 4`.
_SECOND = re.compile(
    r"(?:[,;]|\\\\|\b(?:or|and)\b)\s*(?:(?:or|and)\s)?\s*[^\W\d_]\w{0,2}\s*\Z", re.IGNORECASE
)
_SCALE = re.compile(rf"(?:\s*\b(?:{'|'.join(SCALES)})s?\b)+", re.IGNORECASE)
# Words before a number that say no more than that it comes.
_PREFIX = re.compile(
    r"(?:(?:is|equals?|equal to|just|only|exactly|about|approximately|roughly|around)\b|[:=])\s*",
    re.IGNORECASE,
)
# A number behind these is a part of something else: a word, a power, a time, a date, a list.
_BEFORE = re.compile(r"(?:[\w^]|\^\{|\d[:/.,])\Z")
# As is one before these.
_AFTER = re.compile(r"\s*\^|[:/.,]\d")


def number_of(text: str) -> Fraction | None:
    """The number that the whole text is, or None. A unit or a percent sign behind it
    is passed over.
    Example: number_of("x = $1,234.50") == Fraction(2469, 2); number_of("5 or 6") is None."""
    text = undecorated(text)
    # the right side of an equation; `x >= 3` is none
    before, _, text = text.rpartition("=")
    is_second = "=" in before and _SECOND.search(before[-40:])
    if is_second or before.endswith(("<", ">", "!")):
        return None
    text = text.strip()
    while prefix := _PREFIX.match(text):
        text = text[prefix.end() :]
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1].strip()
    match = NUMBER.match(text)
    # (5,) is a list
    if (
        match is None
        or text.endswith(",")
        or _larger_at(_without_scale(text[match.end() :])) is not None
    ):
        return None
    return _value(match, text)


def number_in(text: str) -> Fraction | None:
    """The number that a text gives as its answer, with words around it; None if the number is only
    a part of what is given: of a pair, a range, a product, a root.
    Example: number_in("she has 5, not 6") == 5; number_in("5 or 6"), number_in("2x") are None."""
    if (whole := number_of(text)) is not None:
        return whole
    text = undecorated(text)
    match = NUMBER.search(text)
    if match is None:
        return None
    match = _without_binary_sign(match, text)
    rest = text[match.end() :]
    if _LEADS_IN.search(text[: match.start()]) or _AFTER.match(rest):
        return None
    rest = _without_scale(rest)
    larger_at = _larger_at(rest)
    # what stands in a remark belongs to it, and not to the number
    remark = _REMARK.search(rest)
    if larger_at is not None and (remark is None or remark.start() > larger_at):
        return None
    return _value(match, text)


def last_number(text: str) -> tuple[str, Fraction] | None:
    """The last number in running text, as it is written and as a value; None if there is none."""
    text = undecorated(text)
    matches = []
    place = 0
    while match := NUMBER.search(text, place):
        place = match.end()
        match = _without_binary_sign(match, text)
        before = text[max(0, match.start() - 8) : match.start()]
        # one that is a part of something else does not count
        if not (_BEFORE.search(before) or _AFTER.match(text, match.end())):
            matches.append(match)
    for match in reversed(matches):
        if (value := _value(match, text)) is not None:
            return match.group().strip(), value
    return None


def undecorated(text: str) -> str:
    """The text without what is there for the eye: LaTeX's spaces and dollars, bold, quotes."""
    text = text[-LOOKED_AT:]
    text = text.translate(_CHARACTERS)
    # escaped signs are meant: \$5, 50\%
    text = _ESCAPED_DOLLAR.sub("\0", text)
    text = text.replace("\\%", "%")
    # `$5$` is mathematics and `$5` is money
    text = _MATH.sub(r" \1 ", text)
    text = text.replace("\0", "$")
    text = _BOLD.sub(r"\1", text)
    text = _SEPARATORS.sub(",", text)
    text = _SPACES.sub(" ", text)
    text = _TEXT.sub(r" \1 ", text)
    text = _DEGREES.sub(" degrees", text)
    text = _EQUALS.sub("=", text)
    # `1½` is a mixed number
    text = _VULGAR.sub(
        # unicodedata has floats; none of these signs has a larger denominator.
        lambda sign: f" {Fraction(unicodedata.numeric(sign[0])).limit_denominator(9)}",
        text,
    )
    return text.strip(_QUOTES).rstrip(_END).strip(_QUOTES)


_VULGAR = re.compile(r"[\u00bc-\u00be\u2153-\u215e]")
_QUOTES = "*`'\" \n\t\r"
_END = ".,;:!? *"
_CHARACTERS = {
    # minus signs and dashes
    0x2212: "-",
    0x2013: "-",
    0xFE63: "-",
    0xFF0D: "-",
    # a stroke of fractions, an apostrophe
    0x2044: "/",
    0x2019: "'",
    # spaces that separate thousands
    0x00A0: "\u202f",
    0x2009: "\u202f",
    # full-width signs
    0xFF05: "%",
    0xFF04: "$",
}
_ESCAPED_DOLLAR = re.compile(r"\\\$")
_MATH = re.compile(r"\$\$?([^$\n]{1,2000}?)\$\$?(?!\d)")
_BOLD = re.compile(r"\*\*([^*\n]{1,2000})\*\*")
_SEPARATORS = re.compile(r"(?<=\d)(?:\u202f|\{,\}|\\,|_|,\\!)(?=\d{3}(?!\d))")
_SPACES = re.compile(
    r"\\[,;:! ()\[\]]|\\q?quad\b|~|\u202f|\\left\b|\\right\b|\\displaystyle\b"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textit)\s*\{([^{}]{0,200})\}")
_EQUALS = re.compile(r"≈|≃|\\approx\b")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|°")


def _larger_at(rest: str) -> int | None:
    """Where something begins, behind a number, that it is only a part of; None: units, words."""
    if _CONNECTS_AT_ONCE.match(rest):
        return 0
    num_words = 0
    for token in _TOKEN.finditer(rest):
        if token["operator"]:
            return token.start()
        if token["word"]:
            num_words += 1
            is_variable = num_words == 1 and not _is_of_a_unit(token["word"], token)
            if is_variable or (num_words <= 2 and _CONNECTS.match(rest, token.start())):
                return token.start()
    return None


def _is_of_a_unit(word: str, match: re.Match) -> bool:
    """True if letters behind a number are no variables: `5 km`, `5 clips`; not `5x`, `5 x`."""
    if word in _UNIT_LETTERS:
        return True
    if "\u0370" <= word[0] < "\u0400" or (len(word) == 1 and word.isascii()):
        # Greek or Latin; `a` and `I` are words of their own
        return word in "aI" and match.start() > 0
    is_short = len(word) <= 2 and word.isascii() and word.lower() not in _SHORT_UNITS
    return match.start() > 0 or not is_short


def _without_scale(rest: str) -> str:
    scale = _SCALE.match(rest)
    return rest[scale.end() :] if scale else rest


def _without_binary_sign(match: re.Match, text: str) -> re.Match:
    """The match without a sign that belongs to a sum: in `5-3`, `x - 3` it is no sign of the 3."""
    sign = match["sign"]
    if not sign:
        return match
    before = text[max(0, match.start() - 8) : match.start()]
    is_binary = bool(before.rstrip()) and (
        before.rstrip()[-1].isalnum() or before.rstrip()[-1] in ")}]%"
    )
    # `5 -3` are two numbers, `5 - 3` is a difference
    is_apart = sign != sign.rstrip() or not before[-1:].isspace()
    if not (is_binary and is_apart):
        return match
    return NUMBER.match(text, match.start() + len(sign)) or match


def _value(match: re.Match, text: str) -> Fraction | None:
    """The number that was matched; None for one of too many digits, or over nothing."""
    # arithmetic with a million digits takes minutes
    if sum(c.isdigit() for c in match.group()) > MOST_DIGITS:
        return None
    try:
        value = _magnitude(match)
    except (ZeroDivisionError, OverflowError):
        return None
    if value is None:
        return None

    # sign, and words such as million
    signs = f"{match['sign'] or ''}{match['second'] or ''}"
    if signs.count("-") == 1:
        value = -value
    if scale := _SCALE.match(text, match.end()):
        for word in scale[0].lower().split():
            value *= SCALES[word.removesuffix("s")]
    return value


def _magnitude(match: re.Match) -> Fraction | None:
    if match["frac"]:
        above, below = (Fraction(_bare(part)) for part in re.findall(_ARGUMENT, match["frac"]))
        if match["whole"] and (above < 0 or below < 0):
            return None
        return int(match["whole"] or 0) + above / below
    if match["mixed"]:
        return int(match["mixed"]) + Fraction(int(match["above"]), int(match["below"]))
    if match["over"]:
        return Fraction(_bare(match["over"])) / Fraction(_bare(match["under"]))
    if match["ten"]:
        return _power_of_ten(int(match["ten"]))

    # a decimal, perhaps with a power of ten
    value = Fraction(_bare(match["decimal"]))
    if not match["power"]:
        return value
    power = _power_of_ten(int(re.search(r"[-+]?\d+\s*\}?$", match["power"])[0].rstrip("} ")))
    return None if power is None else value * power


def _power_of_ten(exponent: int) -> Fraction | None:
    if abs(exponent) > MOST_DIGITS:
        return None
    return Fraction(10) ** exponent


def _bare(digits: str) -> str:
    return re.sub(r"[,\s{}()]", "", digits).rstrip(".") or "0"
