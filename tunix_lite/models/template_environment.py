"""What a chat template, a jinja2 program, finds around it: what transformers gives it, to the byte,
and no more.

Imported by the process that runs templates of strangers, so it needs jinja2 and nothing else.
"""

import json
import traceback
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.sandbox

# characters that a template may write
MOST_TEXT = 16 * 2**20


class TemplateFailed(ValueError):
    """What a template did, as the end of a sentence that begins with where it comes from."""


def compile_template(text: str) -> jinja2.Template:
    """The template as a program. Raises TemplateFailed."""
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailed(f"has an error in line {error.lineno}: {error}") from error
    except Exception as error:
        # nested too deep for Python, and what else a parser meets
        raise TemplateFailed(f"cannot be compiled: {_reason(error)}") from error


def render_template(template: jinja2.Template, values: dict, now: datetime) -> str:
    """What it writes. Raises TemplateFailed."""

    def strftime_now(
        format,
    ):  # makes Llama 3's prompt depend on the day, as it does in transformers
        return now.strftime(format)

    try:
        text = template.render({"strftime_now": strftime_now, **values})
    except Exception as error:
        # a template can fail in all the ways that Python can
        lines = [
            f.lineno
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename == "<template>"
        ]
        raise TemplateFailed(
            f"fails{f' in line {lines[-1]}' if lines else ''}: {_reason(error)}"
        ) from error
    if len(text) > MOST_TEXT:
        raise TemplateFailed(
            f"writes {len(text):,} characters; {MOST_TEXT:,} are the most that are taken"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateFailed(f"writes what is no text ({error})") from error
    return text


def _reason(error: Exception) -> str:
    """What went wrong, never empty: a MemoryError says nothing of itself."""
    return str(error) or type(error).__name__


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model says; the text is that of the
    inside."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno
        )


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
            raise jinja2.exceptions.SecurityError(
                f"a namespace takes no name with an underscore in front: {name!r}"
            )


def _environment() -> jinja2.Environment:
    """What chat templates expect to find; tests/test_tokenizer.py compares it with
    transformers'."""

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        x, ensure_ascii=False, indent=None, separators=None, sort_keys=False
    ):  # jinja's own escapes HTML
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def namespace(*args, **values):
        _no_underscore(*dict(*args, **values))
        return _Namespace(*args, **values)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, namespace=namespace)
    environment.globals["dict"] = _Dict()
    return environment
