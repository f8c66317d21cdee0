"""Calls of tools in a completion, as the families of models write them; nothing is run to read it.

Qwen, Hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, once for each call
Gemma          ```tool_code, then add(a=1) on a line for each call; or the JSON of a call
Llama          {"name": "add", "parameters": {"a": 1}}, several with ; between; <|python_tag|>
               or <function=add>{"a": 1}</function> around them
Gemma 4        <|tool_call>call:add{a:1,to:<|"|>text as it is<|"|>}<tool_call|>, once for each
               call; values may be lists and objects, and null is None"""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from tunix_lite.workers.child import short_repr

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_FENCE = re.compile(
    r"```(tool_code|tool_call|json|python)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL
)
PYTHON_TAG = "<|python_tag|>"
# Gemma 4: a call, what is in it, what stands around a text, and what is no JSON beside texts.
GEMMA4_TAG = "<|tool_call>"
GEMMA4 = re.compile(r"<\|tool_call>(.*?)(?:<tool_call\|>|\Z)", re.DOTALL)
_GEMMA4_CALL = re.compile(r"call:([\w.-]+)\s*(\{.*\})", re.DOTALL)
_GEMMA4_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\]:,\"]+)(?=\s*:)")
_BARE_NONE = re.compile(r"([:,\[]\s*)None\b")
ARGUMENTS = ("arguments", "parameters", "args")
# characters of a completion that are read as code, so that no nesting is too deep for the parser
_LONGEST = 16 * 1024
# a line that only works something out: 12 + 3 = 15
_EXPRESSION = re.compile(r"[\d\s.()+*/-]*\d\s*[-+*/][\d\s.()+*/-]*")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. problem: why it cannot be read; "" if it can.
    Example: ToolCall("add", {"a": 1, "b": 2})."""

    name: str
    arguments: Any = None
    problem: str = ""


def calls_in(completion: str) -> list[ToolCall]:
    """All calls of a completion, in their order; [] if it has none."""
    if bodies := HERMES.findall(completion):
        calls = []
        for text in bodies:
            calls += _of_json(text, is_call=True)
        return calls
    if named := _FUNCTION.findall(completion):
        return [_with_arguments(name, text) for name, text in named]
    if bodies := GEMMA4.findall(completion):
        return [_of_gemma4(text) for text in bodies]
    text = completion.strip()
    calls = []
    for kind, body in _FENCE.findall(text):
        # a block of JSON or Python may be part of an answer
        of_block = _of_json(body, is_call=kind == "tool_call")
        if kind == "tool_code" and not of_block:
            of_block = _of_python(body)
        calls += of_block
    if calls:
        return calls
    is_tagged = text.startswith(PYTHON_TAG)
    return _of_json(text.removeprefix(PYTHON_TAG), is_call=is_tagged)


def expression_in(completion: str) -> list[ToolCall]:
    """The last line of a completion as a call of `calculator`, if it is an expression, such as
    "12 + 3 =" or "12 + 3 = 16". For models that know no other form."""
    lines = [line.strip() for line in completion[-_LONGEST:].splitlines() if line.strip()]
    expression = lines[-1].partition("=")[0].strip() if lines else ""
    if len(expression) > 200 or not _EXPRESSION.fullmatch(expression):
        return []
    return [ToolCall("calculator", {"expression": expression})]


def _of_json(text: str, is_call: bool) -> list[ToolCall]:
    """The calls of a text that holds JSON: an object, a list of them, or several with ; between.
    is_call: whether what cannot be read is a call with a mistake; else it is no call."""

    def mistake(problem: str) -> list[ToolCall]:
        if is_call:
            return [ToolCall("", problem=problem)]
        return []

    text = text.strip()
    if len(text) > _LONGEST or text[:1] not in ("{", "["):
        return mistake(f"a call is JSON of a name and arguments; this is {short_repr(text)}")
    values = []
    try:
        # models write several calls one after the other, with ; or , between them
        while text:
            value, end = json.JSONDecoder().raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[end:].lstrip("; \n\t\r,")
    except (ValueError, RecursionError) as error:
        return mistake(f"the call is no JSON: {error}")
    calls = []
    for value in values:
        call = value if isinstance(value, dict) else {}
        # some models wrap a call as the API does
        if isinstance(call.get("function"), dict):
            call = call["function"]
        name = call.get("name")
        keys = [key for key in ARGUMENTS if key in call]
        # An object with a name and other fields may be an answer.
        if isinstance(name, str) and (keys or set(call) == {"name"}):
            calls.append(_with_arguments(name, call[keys[0]] if keys else {}))
        elif is_call:
            calls += mistake(f"a call has a name and arguments; this is {short_repr(value)}")
        else:
            # With one value that is no call, all of it is an answer.
            return []
    return calls


def _with_arguments(name: str, arguments: object) -> ToolCall:
    """A call whose arguments may be the text of JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f"the arguments of {name} are no JSON: {error}")
    return ToolCall(name, arguments)


def _of_gemma4(text: str) -> ToolCall:
    """A call as Gemma 4 writes it: JSON with bare keys, and texts that nothing is escaped in."""
    call = _GEMMA4_CALL.fullmatch(text.strip())
    if call is None or len(text) > _LONGEST:
        problem = f"a call is call:name{{argument:value}}; this is {short_repr(text)}"
        return ToolCall("", problem=problem)
    name, arguments = call.groups()
    parts = arguments.split(_GEMMA4_QUOTE)
    # Every second part is a text.
    parts[0::2] = [_BARE_NONE.sub(r"\1null", _BARE_KEY.sub(r'\1"\2"', x)) for x in parts[0::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return _with_arguments(name, "".join(parts))


def _of_python(text: str) -> list[ToolCall]:
    """Calls in Python's syntax with plain values: add(a=1, b=2), also in a list or print()."""
    try:
        # The parser raises MemoryError where operators are nested deeply.
        statements = ast.parse(text.strip()[:_LONGEST]).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [ToolCall("", problem=f"the call is no Python: {error}")]
    nodes = []
    for statement in statements:
        value = getattr(statement, "value", None)
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    return [_of_node(node) for node in nodes]


def _of_node(node: ast.AST | None) -> ToolCall:
    match node:
        case ast.Call(func=ast.Name(id="print"), args=[inner]):
            node = inner
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return ToolCall("", problem="a call is name(argument=value), with plain values")
    name = node.func.id
    # tools are called by name, and the order of arguments is not known
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name, problem=f"{name}: give each argument by its name, name=value")
    try:
        arguments = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return ToolCall(name, problem=f"{name}: an argument is no plain value")
    return ToolCall(name, arguments)
