"""Tools: Python functions that the model may call in a conversation before it answers.

Their schemas are made of type hints and docstrings, in the form that chat templates take (OpenAI's,
JSON schema). Where one cannot be made, one message says why.
"""

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tunix_lite.environments.environment import Loop, Turn
from tunix_lite.environments.tool_calls import ToolCall, calls_in
from tunix_lite.files.plain_text import message_of
from tunix_lite.workers.child import short_repr

ROLES = ("tool", "user", "assistant")
NO_CALLS_LEFT = "There are no calls left. Give your answer."
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
PLAIN[dict] = "object"
NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# `name: what it is`, as docstrings have it under `Args:`
ARGUMENT = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?\s*:\s+(.+)")


@dataclass
class ToolEnvironment:
    """A conversation in which the model calls tools. A completion without a call is its answer.

    What a tool returns, or how it failed, is what the model reads next: one message for each call.
    After `max_calls` calls it is asked for its answer once; then the conversation ends. The answer
    gets `reward`, if it is given; the rewards of the task see the answer, too.

    Example: ToolEnvironment(tools=(calculator,)) answers `<tool_call>{"name": "calculator",
    "arguments": {"expression": "2 + 2"}}</tool_call>` with "4".
    """

    # Functions with type hints and a docstring, by their dotted paths.
    tools: tuple[Callable, ...]
    # Function (completion, example) -> number for the answer. null leaves it to task.rewards.
    reward: Callable | None = None
    # Calls in a conversation, at most. Parallel ones count each.
    max_calls: int = 8
    # Role of the messages with results: tool, user where the chat template knows no tools, or
    # assistant, which puts results into the model's own text.
    role: str = "tool"
    # How a result is written, where {result} stands for it.
    result: str = "{result}"
    # Characters of a result that the model reads.
    max_result: int = 2000
    # Function (completion) -> calls, for a form of your own.
    calls: Callable = calls_in
    loop: Loop = field(init=False, default_factory=Loop)

    def __post_init__(self):
        if not self.tools:
            raise ValueError("tools is empty: name at least one function")
        if self.max_calls < 1:
            raise ValueError(f"max_calls={self.max_calls} must be at least 1")
        if self.max_result < 1:
            raise ValueError(f"max_result={self.max_result} must be at least 1")
        if self.role not in ROLES:
            raise ValueError(f"role={self.role!r}; it is tool, user or assistant")
        if "{result}" not in self.result:
            raise ValueError(
                f"result={self.result!r} has no {{result}}, where a result would stand"
            )
        names = [_tool_name(tool) for tool in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tools are called {twice[0]}")
        self.schemas = [schema_of(tool) for tool in self.tools]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template beside the messages."""
        return {"tools": self.schemas} if self.role == "tool" else {}

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
        results = [self._make(call) for call in calls[:left]]
        texts = [text for text, _ in results]
        if len(calls) > left:
            self.was_asked = True
            texts.append(NO_CALLS_LEFT)
        failed = sum(not is_right for _, is_right in results)
        # once in a conversation, whether or not it comes to an answer
        info = {"tool_calls": len(results), "tool_errors": failed, "called_a_tool": is_first}

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

    def _make(self, call: ToolCall) -> tuple[str, bool]:
        """Makes a call. Returns its result, as the model reads it, and whether it went well."""
        tools = {_tool_name(tool): tool for tool in self.tools}
        problem = call.problem
        if not problem and call.name not in tools:
            problem = f"there is no tool {call.name[:80]!r}; there are: {', '.join(tools)}"
        problem = problem or misfit(tools[call.name], call.arguments)
        if problem:
            return f"Error: {problem}", False
        is_right = True
        try:
            text = str(self.loop.finish(tools[call.name](**call.arguments)))
        except Exception as error:
            text = f"Error: {type(error).__name__}: {message_of(error)}"
            is_right = False
        more = len(text) - self.max_result
        if more > 0:
            text = f"{text[: self.max_result]}... and {more} more characters"
        return text, is_right


# ---- schemas, and checks of arguments


def _tool_name(tool: Callable[..., object]) -> str:
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


def schema_of(tool: Callable[..., object]) -> dict:
    """Makes the schema of a tool for a chat template: {"type": "function", "function": {name,
    description, parameters}}. Raises ValueError where it cannot be made."""
    name = _tool_name(tool)
    # The docstring has a first paragraph, and descriptions of arguments.
    first, _, rest = (inspect.getdoc(_documented(tool)) or "").partition("\n\n")
    described = " ".join(first.split())
    matches = [ARGUMENT.fullmatch(line) for line in rest.splitlines()]
    arguments = {match[1]: match[2].strip() for match in matches if match}
    if not described:
        raise ValueError(
            f"the tool {name} has no docstring: it is what the model reads; write a line that says "
            "what the tool does"
        )
    properties = {}
    required = []
    for parameter, hint in _parameters_of(tool).items():
        properties[parameter.name] = _schema_of_type(hint, f"{name}: {parameter.name}")
        if parameter.name in arguments:
            properties[parameter.name]["description"] = arguments[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def _parameters_of(tool: Callable[..., object]) -> dict[inspect.Parameter, Any]:
    """The parameters that a call may give, and their types. Raises ValueError for one without a
    type hint, and for *args and **kwargs."""
    name = _tool_name(tool)
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
            raise ValueError(
                f"the tool {name} takes *{parameter.name}; name each of its arguments"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"the tool {name} takes {parameter.name} without its name")
        if parameter.name not in hints:
            raise ValueError(
                f"the tool {name} has no type hint for {parameter.name}; write, for example, "
                f"{parameter.name}: str"
            )
        types_of[parameter] = hints[parameter.name]
    return types_of


def misfit(tool: Callable[..., object], arguments: object) -> str:
    """Explains why the tool cannot be called with these arguments; "" if it can be."""
    name = _tool_name(tool)
    parameters = {key.name: (key, hint) for key, hint in _parameters_of(tool).items()}
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


def _documented(tool: Callable[..., object]) -> Callable:
    """Returns the object that has the docstring and the type hints: a function, or the method that
    calls an object."""
    plain = tool.func if isinstance(tool, partial) else tool
    return plain if inspect.isroutine(plain) else type(plain).__call__


def _schema_of_type(hint: object, where: str) -> dict:
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


def _fits(value: object, hint: object) -> bool:
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
