"""Makes text safe to show and to keep: what controls a terminal is escaped, secrets are hidden."""

import hashlib
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


# What somebody wrote before the @ of a URL: a name, and mostly a password.
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@'\"\\]+(?=@)")
# Secrets that the settings of this process hold, and what is shown in their place.
_SECRETS: dict[str, str] = {}


def hide(secret: str, before: str = "", after: str = "") -> None:
    """Hides a text: from now on it is shown as `<secret:1a2b>`. before, after: what must stand
    around it."""
    # Four digits tell two secrets apart, and help nobody to guess one.
    digest = hashlib.sha256(secret.encode(errors="replace")).hexdigest()[:4]
    _SECRETS[f"{before}{secret}{after}"] = f"{before}<secret:{digest}>{after}"


def hide_users_of_urls(value: object) -> None:
    """Hides the name and the password of each URL in texts of nested plain values."""
    if isinstance(value, str):
        for user in _USER_OF_URL.findall(value):
            # A name such as `a` stands in other texts, too.
            hide(user, "//", "@")
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            hide_users_of_urls(item)


def without_secrets(value: object) -> Any:
    """Returns nested plain values, or a text, without any hidden secret."""
    if isinstance(value, str):
        # A longer one may hold a shorter one.
        for secret in sorted(_SECRETS, key=len, reverse=True):
            value = value.replace(secret, _SECRETS[secret])
    elif isinstance(value, dict):
        return {without_secrets(key): without_secrets(item) for key, item in value.items()}
    elif isinstance(value, list):
        return [without_secrets(item) for item in value]
    return value


def visible(text: str) -> str:
    """The text with such characters escaped as Python writes them; newlines and tabs stay. Hides
    secrets."""
    return _ACTS.sub(_escaped, without_secrets(text))


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it, for JSON, which escapes all else itself. Hides secrets."""
    return _NO_TEXT.sub(_escaped, without_secrets(text))


def shortened(value: object) -> str:
    """`repr` of a row or a text in one line; if SHOWN characters are too few, with its length."""
    is_text = type(value) is str
    # Cut first, as `repr` would copy all of a long text.
    part = value[: SHOWN + 1] if is_text else value
    written = repr(part).replace("\n", " ")
    if len(written) <= SHOWN:
        return visible(written)
    length = len(value) if is_text else len(written)
    return f"{visible(written[:SHOWN])}… ({length:,} characters)"


def shown(value: object, most: int = 120) -> str:
    """A value as a message shows it: `repr`, cut after `most` characters."""
    return _cut(repr(value), most)


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 step`, `1,200 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def message_of(error: BaseException) -> str:
    """str(error); other words where it has none: an exception of a user's code may raise there."""
    try:
        return str(error)
    except Exception as second:
        return f"<its text cannot be read: str() raised {type(second).__name__}>"


def reason_of(error: BaseException) -> str:
    """The first line of the error that caused this one, without the details of tensorstore; of one
    without words its type."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.split(r" \[(?:tensorstore_spec|source locations)", str(error).strip())[0]
    return (text.splitlines() or [type(error).__name__])[0][:300]


def escaped(text: str, most: int = 120) -> str:
    """A text as a message shows it: in one line, without control characters, cut after `most`."""
    characters = [c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1]]
    return _cut("".join(characters), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _escaped(match: re.Match) -> str:
    return match.group().encode("unicode_escape").decode()


def device_name(kind: str, platform: str) -> str:
    """A device in words: `NVIDIA H100 80GB HBM3 (gpu)`; of a CPU `cpu`. kind, platform: as jax has
    them."""
    return kind if kind == platform else f"{kind} ({platform})"
