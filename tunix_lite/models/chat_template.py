"""Chat templates: jinja2 programs that come with a model. Those of anyone run in a process that has
limits and can be killed (workers/confined.py); our own, recognised by their text, run in this
one."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.models.template_environment import (
    TemplateFailed,
    check_text,
    compile_template,
    names_read,
    render_template,
    render_text,
)
from tunix_lite.workers import confined

# Characters of a template. Published ones have up to 20,000.
MOST = 2**20
OURS = Path(__file__).parent / "bundled" / "chat_template.jinja"
# Templates for base models, by the name that model.chat_template takes.
PRESETS = {
    name: Path(__file__).parent / "presets" / f"{name}.jinja"
    for name in ("chatml", "gemma", "llama3", "plain")
}
# Names that every template gets, beside the special tokens.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, which names its file when it fails.

    Example: ChatTemplate.compile(text, "chat_template.jinja").render(messages=[{"role": "user",
    "content": "hi"}], add_generation_prompt=True) is the text of the prompt.
    """

    text: str
    where: str  # the file that it is from
    compiled: jinja2.Template | None  # our own; None: one that we do not trust
    # of the settings; those of a call come first
    variables: dict = field(default_factory=dict)

    @classmethod
    def compile(cls, text: str, where: str) -> "ChatTemplate":
        """The template. Raises ValueError, naming the file `where`, if the text is no template."""
        if not isinstance(text, str) or len(text) > MOST:
            raise ValueError(
                f"the chat template in {where} is {shown(text)}; it is a text of up to {MOST:,} "
                "characters"
            )
        # ours are known, and need no process to be tried in
        if text in _ours():
            return cls(text, where, compile_template(text))
        try:
            confined.ask(check_text, text)
        except confined.Refused as error:
            raise ValueError(f"the chat template in {where} {_in_a_line(error)}") from error
        return cls(text, where, None)

    def names(self, key: str) -> bool:
        """True if the text of the template has this name, without which it cannot read a key."""
        return re.search(rf"\b{re.escape(key)}\b", self.text) is not None

    def with_variables(self, variables: dict) -> "ChatTemplate":
        """The template with defaults for its variables. ValueError: a name that is not read."""
        try:
            names = json.loads(confined.ask(names_read, self.text))
        except confined.Refused as error:
            raise ValueError(
                f"the chat template in {self.where} {_in_a_line(error)}"
            ) from error
        # what we give ourselves, nobody sets
        names = [one for one in names if one not in _GIVEN and not one.endswith("_token")]
        for name in variables:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1)
                meant = f"; did you mean model.template.{near[0]}=...?" if near else ""
                there = f"reads {', '.join(names)}" if names else "has no variables"
                raise ValueError(
                    f"the chat template in {self.where} does not read {shown(name)}"
                    f"{escaped(meant, 120)}; it {escaped(there, 400)}"
                )
        return replace(self, variables=to_plain_values(variables))

    @property
    def standalone(self) -> str:
        """The text of the template, which begins with defaults of its variables."""
        sets = (f"{{% set {k} = {k} | default({v!r}) %}}" for k, v in self.variables.items())
        return "".join([*sets, "\n" if self.variables else "", self.text])

    def render(self, **values: object) -> str:
        """Renders the template with these plain values. Raises ValueError, naming the file."""
        values = self.variables | values
        now = datetime.now()
        try:
            if self.compiled is not None:
                return render_template(self.compiled, values, now)
            return confined.ask(render_text, self.text, values, now)
        except (TemplateFailed, confined.Refused) as error:
            # Clients of a server read this, so it has no path beyond the folder.
            where = "/".join(Path(self.where).parts[-2:])
            raise ValueError(f"the chat template in {where} {_in_a_line(error)}") from error


@cache
def _ours() -> tuple[str, ...]:
    return tuple(file.read_text(encoding="utf-8") for file in (OURS, *PRESETS.values()))


def _in_a_line(error: Exception) -> str:
    # without the marks of tokenizer.as_data, as they are or as `repr` has them
    text = re.sub(r"[\U000FF000-\U000FFFFD]|\\U000ff[0-9a-f]{3}", "", str(error))
    return escaped(text.replace("\n", " "), 500)


# A type of plain values, and what makes one out of an instance of a subclass.
_PLAIN_TYPES = ((str, str.__str__), (bool, bool), (int, int.__int__), (float, float.__float__))


def to_plain_values(value: object) -> Any:
    """`value` in plain types, which have no methods of their own. Raises ValueError for others."""
    for kind, make in _PLAIN_TYPES:
        if isinstance(value, kind):
            return make(value)
    if value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {to_plain_values(key): to_plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_plain_values(item) for item in value]
        return tuple(items) if type(value) is tuple else items
    raise ValueError(
        f"a chat template takes texts, numbers, lists and dicts; this is a {type(value).__name__}"
    )


# The names under which a message may have its reasoning. Templates read any of them.
REASONING = ("reasoning_content", "thinking", "reasoning")


def as_template_reads(message: dict) -> dict:
    """A message without None, and with its reasoning under each name. Raises ValueError."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a dict of role and content; this one is {message!r}")
    message = {
        key: value for key, value in to_plain_values(message).items() if value is not None
    }
    names = [name for name in REASONING if name in message]
    if not names:
        return message
    # templates differ in the name, and a conversation may come from another model
    reasoning = message[names[0]]
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def with_read_arguments(call: object) -> dict:
    """A tool call whose arguments, perhaps JSON text, are an object. Raises ValueError."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a call has a function with a name; this is {shown(call)}")
    # a call without arguments is one without
    if "arguments" not in function:
        return dict(call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"arguments of the call of {shown(function['name'])} are no JSON: {error}"
            ) from error
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"arguments of the call of {shown(function['name'])} are {shown(arguments)}; they are "
            "an object, or its JSON text"
        )
    function = {**function, "arguments": arguments}
    if "function" in call:
        return {**call, "function": function}
    return function
