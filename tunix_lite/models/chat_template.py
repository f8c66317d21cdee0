"""Chat templates: jinja2 programs that come with a model and write a conversation as it was trained
to see it.

They come from anywhere. jinja2's sandbox lets nothing out, and bounds neither time nor memory:
those of strangers run in a process that has limits and can be killed (confined). Ours, known by its
text, runs here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import jinja2
import numpy as np

from tunix_lite.models import confined
from tunix_lite.models.template_environment import TemplateFailed, compile_template, render_template
from tunix_lite.plain_text import escaped, shown

# characters of a template; published ones have up to 20,000
MOST = 2**20
OURS = Path(__file__).parent / "bundled" / "chat_template.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template that says where it comes from when it fails."""

    text: str
    where: str
    compiled: jinja2.Template | None  # of ours; None: a stranger's

    @classmethod
    def compile(cls, text: str, where: str) -> "ChatTemplate":
        """Raises ValueError, naming the file, if it is no template."""
        if not isinstance(text, str) or len(text) > MOST:
            raise ValueError(
                f"the chat template in {where} is {shown(text)}; it is a text of up to {MOST:,} "
                "characters"
            )
        if text == _ours():
            return cls(text, where, compile_template(text))
        try:
            confined.ask("compile", text)
        except confined.Refused as error:
            raise ValueError(f"the chat template in {where} {_in_a_line(error)}") from error
        return cls(text, where, None)

    def render(self, **values) -> str:
        """Raises ValueError, naming the file, if it fails, takes too long or too much memory."""
        now = datetime.now()
        try:
            if self.compiled is not None:
                return render_template(self.compiled, values, now)
            return confined.ask("render", self.text, values, now)
        except (TemplateFailed, confined.Refused) as error:
            raise ValueError(f"the chat template in {self.where} {_in_a_line(error)}") from error


@cache
def _ours() -> str:
    return OURS.read_text(encoding="utf-8")


def _in_a_line(error: Exception) -> str:
    return escaped(str(error).replace("\n", " "), 500)


def to_plain_values(value):
    """`value` in plain types: a template is a stranger's program and is handed nothing that can
    act."""
    for kind, made in (
        (str, str.__str__),
        (bool, bool),
        (int, int.__int__),
        (float, float.__float__),
    ):
        if isinstance(value, kind):
            return made(value)
    if value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {to_plain_values(key): to_plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(map(to_plain_values, value))
            if type(value) in (list, tuple)
            else [to_plain_values(item) for item in value]
        )
    raise ValueError(
        f"a chat template takes texts, numbers, lists and dicts; this is a {type(value).__name__}"
    )


def as_template_reads(message: dict) -> dict:
    """A message as templates read it: keys that hold nothing left out, reasoning under each of its
    names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a dict of role and content; this one is {message!r}")
    message = {key: value for key, value in to_plain_values(message).items() if value is not None}
    said = [
        message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message
    ]
    return {"thinking": said[0], **message, "reasoning_content": said[0]} if said else message
