"""Tools: Python functions that the model may call in a conversation before it answers. Their
schemas, in OpenAI's form, are made of type hints and docstrings."""

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tunix_lite.basics.plain_text import message_of
from tunix_lite.environments.environment import Turn
from tunix_lite.environments.tool_calls import calls_in
from tunix_lite.workers.child import short_repr

_ROLES = ("tool", "user", "assistant")
NO_CALLS_LEFT = "There are no calls left. Give your answer."
_PLAIN: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# `name: what it is`, as docstrings have it under `Args:`
_ARGUMENT = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?\s*:\s+(.+)")


@dataclass
class ToolEnvironment:
    """A conversation in which the model calls tools, and reads what each returns, or how it failed.
    A completion without a call is its answer, which gets `reward`. After `max_calls` calls it is
    asked for the answer once.
    Example: ToolEnvironment(tools=(calculator,)) answers the call calculator(expression="2 + 2")
    with "4"."""

    # conf/task/calculator.yaml explains each setting
    tools: tuple[Callable, ...]
    reward: Callable | None = None
    max_calls: int = 8
    role: str = "tool"
    result: str = "{result}"
    max_result: int = 2000
    calls: Callable = calls_in

    def __post_init__(self):
        if not self.tools:
            raise ValueError("tools is empty: name at least one function")
        for name in ("max_calls", "max_result"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.role not in _ROLES:
            raise ValueError(f"role={self.role!r}; it is tool, user or assistant")
        if "{result}" not in self.result:
            raise ValueError(
                f"result={self.result!r} has no {{result}}, where a result would stand"
            )
        # made once, which also checks them before the run
        self.schemas = [schema_of(tool) for tool in self.tools]
        self.names = [schema["function"]["name"] for schema in self.schemas]
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise ValueError(f"two tools are called {twice[0]}")

    @property
    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template beside the messages."""
        if self.role == "tool":
            return {"tools": self.schemas}
        return {}

    def reset(self, example: dict) -> None:
        """Begins a conversation about an example."""
        self.example = example
        self.num_calls = 0
        self.was_asked = False

    def step(self, completion: str) -> Turn:
        """Makes the calls of a completion; without any, it is the answer."""
        calls = self.calls(completion)
        if not calls or self.was_asked:
            reward = 0.0 if self.reward is None else self.reward(completion, self.example)
            info = {"tool_calls": 0, "tool_errors": 0, "called_a_tool": False}
            return Turn("", reward, done=True, info=info)
        left = max(0, self.max_calls - self.num_calls)
        is_first = self.num_calls == 0
        self.num_calls += len(calls)
        tools = dict(zip(self.names, self.tools))
        texts = []
        failed = 0
        # Makes the calls. A result is text for the model.
        for call in calls[:left]:
            problem = call.problem
            text = ""
            if not problem and call.name not in tools:
                problem = f"there is no tool {call.name[:80]!r}; there are: {', '.join(tools)}"
            elif not problem and not isinstance(call.arguments, dict):
                wrong = short_repr(call.arguments)
                problem = f"the arguments of {call.name} are {wrong}; they are a JSON object"
            elif not problem:
                try:
                    # Whatever it raises, the model reads it, and may do better in its next turn.
                    text = str(tools[call.name](**call.arguments))
                except Exception as error:
                    problem = f"{type(error).__name__}: {message_of(error)}"
            if problem:
                text = f"Error: {problem}"
            more = len(text) - self.max_result
            if more > 0:
                text = f"{text[: self.max_result]}... and {more} more characters"
            texts.append(text)
            failed += bool(problem)
        # once in a conversation, whether or not it comes to an answer
        info = {"tool_calls": len(texts), "tool_errors": failed, "called_a_tool": is_first}
        if len(calls) > left:
            self.was_asked = True
            texts.append(NO_CALLS_LEFT)

        texts = [self.result.replace("{result}", text) for text in texts]
        if self.role == "tool":
            messages = [
                {"role": "tool", "name": call.name or "tool", "content": text}
                for call, text in zip(calls, texts)
            ]
        else:
            # One message, where templates want user and assistant in turns.
            between = "\n" if self.role == "user" else ""
            messages = [{"role": self.role, "content": between.join(texts)}]
        return Turn(messages, info=info)


def schema_of(tool: Callable[..., object]) -> dict:
    """Makes the schema of a tool for a chat template: {"type": "function", "function": {name,
    description, parameters}}. Its name is its attribute `name`, that of the function, or of the
    class in lower case. Raises ValueError where it cannot be made."""
    plain = tool.func if isinstance(tool, partial) else tool
    name = getattr(plain, "name", None) or getattr(plain, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(plain).__name__).lower()
    if not _NAMES.fullmatch(str(name)):
        raise ValueError(
            f"a tool is called {name!r}; give it a name of letters, digits and _, as `def` does"
        )

    # The docstring has a first paragraph, and descriptions of arguments. An object has those of the
    # method that calls it.
    documented = plain if inspect.isroutine(plain) else type(plain).__call__
    first, _, rest = (inspect.getdoc(documented) or "").partition("\n\n")
    matches = [_ARGUMENT.fullmatch(line) for line in rest.splitlines()]
    described = {match[1]: match[2].strip() for match in matches if match}
    if not first.strip():
        raise ValueError(
            f"the tool {name} has no docstring: it is what the model reads; write a line that says "
            "what the tool does"
        )
    try:
        hints = get_type_hints(documented)
        parameters = inspect.signature(tool).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"the types of the tool {name} cannot be read: {error}") from error

    properties = {}
    required = []
    for parameter in parameters:
        key = parameter.name
        if isinstance(tool, partial) and key in tool.keywords:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"the tool {name} takes `{parameter}`; a call gives each argument by its name"
            )
        if key not in hints:
            raise ValueError(
                f"the tool {name} has no type hint for {key}; write, for example, {key}: str"
            )
        properties[key] = _schema_of_type(hints[key], f"{name}: {key}")
        if key in described:
            properties[key]["description"] = described[key]
        if parameter.default is parameter.empty:
            required.append(key)
    wanted = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": " ".join(first.split()), "parameters": wanted}
    return {"type": "function", "function": function}


def _schema_of_type(hint: object, where: str) -> dict:
    """JSON schema of a type."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal and all(type(value) in (str, int, bool) for value in inner):
        kinds = {_PLAIN[type(value)] for value in inner}
        kind = {"type": kinds.pop()} if len(kinds) == 1 else {}
        return kind | {"enum": list(inner)}
    # `X | None` alone: a template has no word for other unions
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
