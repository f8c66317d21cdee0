"""Chat templates: jinja2 programs that come with a model and write a conversation as it was trained to see it.

They come from anywhere, so they run in a sandbox. What they find there is what transformers gives them, to the byte.
"""

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template that says where it comes from when it fails."""

    compiled: jinja2.Template
    where: str

    @classmethod
    def compile(cls, text: str, where: str) -> "ChatTemplate":
        try:
            return cls(_environment().from_string(text), where)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template in {where} has an error in line {error.lineno}: {error}") from error

    def render(self, **values) -> str:
        try:
            return self.compiled.render(**values)
        except Exception as error:  # a template can fail in all the ways that Python can
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
            line = f" in line {lines[-1]}" if lines else ""
            raise ValueError(f"the chat template in {self.where} fails{line}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model says; the text is that of the inside."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Dict:
    """Makes dicts as the class does, and is not the class."""

    __call__, fromkeys = staticmethod(dict), staticmethod(dict.fromkeys)


class _Namespace(jinja2.utils.Namespace):
    """Templates may keep values in it, but not under names that mean something to Python."""

    def __setitem__(self, name, value):
        _no_underscore(name)
        super().__setitem__(name, value)


def _no_underscore(*names):
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name with an underscore in front: {name!r}")


def _environment() -> jinja2.Environment:
    """What chat templates expect to find, and no more: they come with weights from anywhere.

    It does what transformers' does, to the byte; tests/test_tokenizer.py compares the two.
    """

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(format):  # makes Llama 3's prompt depend on the day, as it does in transformers
        return datetime.now().strftime(format)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # jinja's own escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def namespace(*args, **values):
        _no_underscore(*dict(*args, **values))
        return _Namespace(*args, **values)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=namespace)
    environment.globals["dict"] = _Dict()
    return environment


def plain(value):
    """`value` in plain types: a template is a stranger's program and is handed nothing that can act."""
    for kind, made in ((str, str.__str__), (bool, bool), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return made(value)
    if value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else [plain(item) for item in value]
    raise ValueError(f"a chat template takes texts, numbers, lists and dicts; this is a {type(value).__name__}")


def as_template_reads(message: dict) -> dict:
    """A message as templates read it: keys that hold nothing left out, reasoning under each of its names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is a dict of role and content; this one is {message!r}")
    message = {key: value for key, value in plain(message).items() if value is not None}
    said = [message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message]
    return {"thinking": said[0], **message, "reasoning_content": said[0]} if said else message
