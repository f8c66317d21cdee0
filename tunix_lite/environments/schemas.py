"""Describes Python functions as tools for a model, and checks its calls of them.

The schema is made of the type hints and the docstring, in the form that chat templates take
(OpenAI's, JSON schema). Where it cannot be made, one message says why.
"""

import inspect
import re
import types
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tunix_lite.workers.child import short_repr

PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
PLAIN[dict] = "object"
NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# `name: what it is`, as docstrings have it under `Args:`
ARGUMENT = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?\s*:\s+(.+)")


def tool_name(tool: Callable) -> str:
    """The name by which a model calls it: its attribute `name`, that of the function, or of the
    class in lower case."""
    plain = tool.func if isinstance(tool, partial) else tool
    named = getattr(plain, "name", None) or getattr(plain, "__name__", None)
    name = named or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(plain).__name__).lower()
    if not NAMES.fullmatch(str(name)):
        raise ValueError(
            f"a tool is called {name!r}; give it a name of letters, digits and _, as `def` does"
        )
    return name


def schema_of(tool: Callable) -> dict:
    """Makes the schema of a tool for a chat template: {"type": "function", "function": {name,
    description, parameters}}. Raises ValueError where it cannot be made."""
    name = tool_name(tool)
    text = inspect.getdoc(_documented(tool)) or ""
    described, arguments = _described(text)
    if not described:
        raise ValueError(
            f"the tool {name} has no docstring: it is what the model reads; write a line that says "
            "what the tool does"
        )
    properties = {}
    required = []
    for parameter, hint in parameters_of(tool).items():
        properties[parameter.name] = _schema_of_type(hint, f"{name}: {parameter.name}")
        if parameter.name in arguments:
            properties[parameter.name]["description"] = arguments[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def parameters_of(tool: Callable) -> dict[inspect.Parameter, Any]:
    """The parameters that a call may give, and their types. Raises ValueError for one without a
    type hint, and for *args and **kwargs."""
    name = tool_name(tool)
    plain = _documented(tool)
    bound = set(tool.keywords) if isinstance(tool, partial) else set()
    try:
        hints = get_type_hints(plain)
        parameters = inspect.signature(tool).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"the types of the tool {name} cannot be read: {error}") from error
    types_of = {}
    for parameter in parameters:
        if parameter.name in bound:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"the tool {name} takes *{parameter.name}; name each of its arguments")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"the tool {name} takes {parameter.name} without its name")
        if parameter.name not in hints:
            raise ValueError(
                f"the tool {name} has no type hint for {parameter.name}; write, for example, "
                f"{parameter.name}: str"
            )
        types_of[parameter] = hints[parameter.name]
    return types_of


def misfit(tool: Callable, arguments: Any) -> str:
    """Explains why the tool cannot be called with these arguments; "" if it can be."""
    name = tool_name(tool)
    parameters = {parameter.name: (parameter, hint) for parameter, hint in _known(tool)}
    if not isinstance(arguments, dict):
        return f"the arguments of {name} are {short_repr(arguments)}; they are a JSON object"
    unknown = [key for key in arguments if key not in parameters]
    if unknown:
        known = ", ".join(parameters) or "none"
        return f"{name} has no argument {short_repr(unknown[0])}; it has: {known}"
    for key, (parameter, hint) in parameters.items():
        if key not in arguments:
            if parameter.default is parameter.empty:
                return f"{name} needs the argument {key}"
        elif not _fits(arguments[key], hint):
            wanted = _schema_of_type(hint, key)
            kind = wanted.get("type", wanted.get("enum"))
            return f"{key} of {name} is {short_repr(arguments[key])}; it is of the type {kind}"
    return ""


def _known(tool: Callable) -> list[tuple[inspect.Parameter, Any]]:
    return list(parameters_of(tool).items())


def _documented(tool: Callable) -> Callable:
    """Returns the object that has the docstring and the type hints: a function, or the method that
    calls an object."""
    plain = tool.func if isinstance(tool, partial) else tool
    return plain if inspect.isroutine(plain) else type(plain).__call__


def _described(text: str) -> tuple[str, dict[str, str]]:
    """Splits a docstring into its first paragraph and its descriptions of arguments."""
    first, _, rest = text.partition("\n\n")
    arguments = {}
    for line in rest.splitlines():
        if match := ARGUMENT.fullmatch(line):
            arguments[match[1]] = match[2].strip()
    return " ".join(first.split()), arguments


def _schema_of_type(hint: Any, where: str) -> dict:
    """JSON schema of a type."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if origin is Literal and all(type(value) in (str, int, bool) for value in inner):
        kinds = {PLAIN[type(value)] for value in inner}
        kind = {"type": kinds.pop()} if len(kinds) == 1 else {}
        return kind | {"enum": list(inner)}
    if origin in (types.UnionType, Union):
        others = [kind for kind in inner if kind is not type(None)]
        if len(others) == 1 and len(inner) == 2:
            return _schema_of_type(others[0], where) | {"nullable": True}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema_of_type(inner[1], where)}
    raise ValueError(
        f"the tool {where} has the type {getattr(hint, '__name__', hint)}; a tool takes str, int, "
        "float, bool, list, dict, Literal, or one of them or None"
    )


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is Literal:
        return any(type(value) is type(item) and value == item for item in inner)
    if origin in (types.UnionType, Union):
        return any(value is None if kind is type(None) else _fits(value, kind) for kind in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
