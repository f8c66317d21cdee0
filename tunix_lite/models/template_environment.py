"""The environment of a chat template, a jinja2 program: exactly what transformers gives it. It
needs jinja2 alone, for the process that runs templates which we do not trust imports it."""

import json
import traceback
from datetime import datetime
from functools import cache

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

# Characters that a template may write.
MOST_TEXT = 16 * 2**20


class TemplateFailed(ValueError):
    """A template failed. The message is the end of a sentence that begins with the template."""


def compile_template(text: str) -> jinja2.Template:
    """The template as a program. Raises TemplateFailed."""
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailed(f"has an error in line {error.lineno}: {error}") from error
    except Exception as error:
        # Nested too deep for Python, or anything else that stops a parser.
        raise TemplateFailed(f"cannot be compiled: {_reason(error)}") from error


def render_template(
    template: jinja2.Template,
    values: dict,
    now: datetime,
) -> str:
    """Renders the template. now: for templates that write the date. Raises TemplateFailed."""

    # It makes Llama 3's prompt depend on the day, as it does in transformers.
    def strftime_now(format: str) -> str:
        return now.strftime(format)

    try:
        text = template.render({"strftime_now": strftime_now, **values})
    except Exception as error:
        # A template can fail in all the ways that Python can.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
        where = f" in line {lines[-1]}" if lines else ""
        raise TemplateFailed(f"fails{where}: {_reason(error)}") from error
    if len(text) > MOST_TEXT:
        raise TemplateFailed(
            f"writes {len(text):,} characters; {MOST_TEXT:,} are the most that are taken"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateFailed(f"writes what is no text ({error})") from error
    return text


_compiled = cache(compile_template)


def check_text(text: str) -> str:
    """Raises TemplateFailed if the text is no template."""
    _compiled(text)
    return ""


def names_read(text: str) -> str:
    """The JSON list of the names that a template reads and whoever renders it may give."""
    tree = _environment().parse(text)
    # jinja2 also lists what a branch sets and a later one reads. Such a name may be given only if
    # the template asks whether it is there, or first sets it to a value made of itself.
    own: dict[str | None, bool] = {}
    for node in tree.find_all((nodes.Assign, nodes.AssignBlock)):
        names = [*node.find_all(nodes.Name)]
        reads = {one.name for one in names if one.ctx == "load"}
        for one in names:
            if one.ctx == "store":
                own.setdefault(one.name, one.name not in reads)
    for node in tree.find_all((nodes.Test, nodes.Filter)):
        if node.name in ("defined", "undefined", "default", "d"):
            own[getattr(node.node, "name", None)] = False
    read = jinja2.meta.find_undeclared_variables(tree)
    return json.dumps(sorted(name for name in read if not own.get(name)))


def render_text(text: str, values: dict, now: datetime) -> str:
    """`render_template` of a text, which is compiled once."""
    return render_template(_compiled(text), values, now)


def _reason(error: Exception) -> str:
    """The message of an error, or its type where it has none, as a MemoryError."""
    return str(error) or type(error).__name__


class _Generation(jinja2.ext.Extension):
    """Writes the text of `{% generation %} ... {% endgeneration %}`, which marks the model's."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A scope of the statements up to the end tag."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _environment() -> jinja2.Environment:
    """The environment that chat templates expect; tests/test_tokenizer.py compares it."""

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    # jinja's own filter escapes HTML.
    def tojson(
        x: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    # A template changes nothing that it is given, and reaches nothing behind it.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
