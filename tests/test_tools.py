"""Tools: schemas from type hints, calls as each family writes them, errors as observations, and the bundled ones."""

import json
from functools import partial
from typing import Literal, Optional

import pytest

from tunix_lite.environments.bundled_tools import calculator
from tunix_lite.environments.environment import Turn
from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.environments.tool_calls import ToolCall, calls_in
from tunix_lite.environments.tools import NO_CALLS_LEFT, ToolEnvironment, schema_of


def weather(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    limits: list[float] | None = None,
    extra: Optional[dict[str, int]] = None,  # noqa: UP045
) -> str:
    """Say what the weather
    will be.

    Args:
        city: The name of the city.
        unit: Celsius or Fahrenheit.
    """
    if city == "Atlantis":
        raise LookupError("it is under water")
    return f"{city}: {20 + days} {unit}"


def is_seven(completion: str, example: dict) -> float:
    return float("7" in completion)


def test_the_schema_of_a_tool_by_hand():
    assert schema_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say what the weather will be.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The name of the city."},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"], "description": "Celsius or Fahrenheit."},
                    "limits": {"type": "array", "items": {"type": "number"}, "nullable": True},
                    "extra": {"type": "object", "additionalProperties": {"type": "integer"}, "nullable": True},
                },
                "required": ["city"],
            },
        },
    }
    bound = schema_of(partial(weather, unit="F"))["function"]
    assert bound["name"] == "weather" and "unit" not in bound["parameters"]["properties"]


def no_docstring(x: int) -> int:
    return x


def no_hint(x) -> int:
    """Double it."""


def a_set(x: set[int]) -> int:
    """Add them."""


def many(*x: int) -> int:
    """Add them."""


def unnamed(x: int, /) -> int:
    """Double it."""


def unknown_type(x: "Nowhere") -> int:  # noqa: F821
    """Double it."""


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (no_docstring, "the tool no_docstring has no docstring"),
        (no_hint, "the tool no_hint has no type hint for x; write, for example, x: str"),
        (a_set, "the tool a_set: x has the type set"),
        (many, "the tool many takes `*x: int`; a call gives each argument by its name"),
        (unnamed, "the tool unnamed takes `x: int`"),
        (unknown_type, "the types of the tool unknown_type cannot be read"),
        (lambda x: x, "a tool is called '<lambda>'"),
    ],
)
def test_a_tool_without_a_schema_is_named_when_the_environment_is_made(tool, message):
    with pytest.raises(ValueError, match="tool") as caught:
        ToolEnvironment((tool,))
    assert message in str(caught.value)


ADD = ToolCall("add", {"a": 1, "b": 2})
AS_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
AS_LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # Qwen and Hermes
        (f"<tool_call>\n{AS_JSON}\n</tool_call>", [ADD]),
        (f"I add.\n<tool_call>{AS_JSON}</tool_call>\n<tool_call>\n{AS_JSON}\n</tool_call>", [ADD, ADD]),
        (f"<think>so</think>\n<tool_call>{AS_JSON}", [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        (f'<tool_call>{{"function": {AS_JSON}}}</tool_call>', [ADD]),
        # arguments as the text of JSON, as OpenAI has them
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [ADD]),
        # Gemma
        ("```tool_code\nadd(a=1, b=2)\n```", [ADD]),
        ("```tool_code\nprint(add(a=1, b=2))\nadd(a=1, b=2)\n```", [ADD, ADD]),
        ("```tool_code\n[add(a=1, b=2), now()]\n```", [ADD, ToolCall("now", {})]),
        (f"```json\n{AS_LLAMA}\n```", [ADD]),
        (f"```tool_call\n[{AS_JSON}, {AS_JSON}]\n```", [ADD, ADD]),
        # Llama
        (AS_LLAMA, [ADD]),
        (f"<|python_tag|>{AS_LLAMA}; {AS_LLAMA}", [ADD, ADD]),
        ('<function=add>{"a": 1, "b": 2}</function>', [ADD]),
        # Gemma 4
        ("<|tool_call>call:add{a:1,b:2}<tool_call|>", [ADD]),
        (
            "I add.<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_call>call:now{}<tool_call|>",
            [ADD, ToolCall("now", {})],
        ),
        ("<|tool_call>call:add{a:1,b:2}", [ADD]),
        (
            '<|tool_call>call:log.in{to:<|"|>say "a:1", {b:2}\n<|"|>,no:None,deep:{x:[true,-1.5e3,<|"|><|"|>,null]}}<tool_call|>',
            [ToolCall("log.in", {"to": 'say "a:1", {b:2}\n', "no": None, "deep": {"x": [True, -1500.0, "", None]}})],
        ),
        # answers
        ("The answer is 3.", []),
        ("", []),
        ('{"answer": 3}', []),
        ("```json\n[1, 2]\n```", []),
        ("```python\nadd(a=1, b=2)\n```", []),
        ("{" * 50_000, []),
    ],
)
def test_calls_are_read_as_each_family_writes_them(text, calls):
    assert calls_in(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "the call is no JSON"),
        ("<tool_call>add(1)</tool_call>", "a call is JSON of a name and arguments"),
        ('<tool_call>{"arguments": {}}</tool_call>', "a call has a name and arguments"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "the arguments of add are no JSON"),
        ("<function=add>no</function>", "the arguments of add are no JSON"),
        ("<|tool_call>add{a:1}<tool_call|>", "a call is call:name{argument:value}; this is"),
        ('<|tool_call>call:add{a:<|"|>1}<tool_call|>', "the arguments of add are no JSON"),
        ("```tool_code\nadd(1, 2)\n```", "give each argument by its name"),
        ("```tool_code\nadd(a=b)\n```", "an argument is no plain value"),
        ("```tool_code\nos.getcwd()\n```", "a call is name(argument=value)"),
        ("```tool_code\nadd(\n```", "the call is no Python"),
        ("```tool_code\nadd(a=" + "(" * 5000 + "\n```", "the call is no Python"),
    ],
)
def test_a_call_with_a_mistake_says_which(text, problem):
    (call,) = calls_in(text)
    assert problem in call.problem and "\n" not in call.problem


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_conversation_with_tools_by_hand():
    environment = ToolEnvironment((weather, calculator), reward=is_seven, max_calls=3)
    environment.reset({})
    turn = environment.step(call("weather", city="Ulm") + call("calculator", expression="3 + 4"))
    assert turn.observation == [
        {"role": "tool", "name": "weather", "content": "Ulm: 21 C"},
        {"role": "tool", "name": "calculator", "content": "7"},
    ]
    assert (turn.reward, turn.done, turn.info) == (
        0.0,
        False,
        {"tool_calls": 2, "tool_errors": 0, "called_a_tool": True},
    )
    turn = environment.step("It is 7.")
    # said once, with the first call
    assert (turn.reward, turn.done, turn.info["called_a_tool"]) == (1.0, True, False)


@pytest.mark.parametrize(
    ("completion", "observation"),
    [
        (call("sum", a=1), "Error: there is no tool 'sum'; there are: weather, calculator"),
        (call("weather"), "Error: TypeError: weather() missing 1 required positional argument: 'city'"),
        (call("weather", city="Atlantis"), "Error: LookupError: it is under water"),
        (call("calculator", expression="1 / 0"), "Error: ZeroDivisionError: division by zero"),
        ("<tool_call>{</tool_call>", "Error: the call is no JSON"),
    ],
)
def test_what_goes_wrong_in_a_call_is_what_the_model_reads(completion, observation):
    environment = ToolEnvironment((weather, calculator))
    environment.reset({})
    turn = environment.step(completion)
    assert turn.observation[0]["content"].startswith(observation)
    assert not turn.done and turn.info == {"tool_calls": 1, "tool_errors": 1, "called_a_tool": True}


def test_a_budget_of_calls_ends_the_conversation():
    environment = ToolEnvironment((calculator,), max_calls=2, role="user", max_result=3)
    environment.reset({})
    many = call("calculator", expression="10 ** 5") * 3
    assert environment.step(many).observation == [
        {"role": "user", "content": f"100... and 3 more characters\n100... and 3 more characters\n{NO_CALLS_LEFT}"}
    ]
    assert environment.step(many).done


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": ()}, "tools is empty"),
        ({"tools": (weather,), "result": "it is"}, "result='it is' has no {result}"),
        ({"tools": (weather, weather)}, "two tools are called weather"),
        ({"tools": (weather,), "max_calls": 0}, "max_calls=0"),
        ({"tools": (weather,), "role": "model"}, "role='model'"),
    ],
)
def test_settings_of_tools_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ToolEnvironment(**settings)


def test_tools_are_called_in_a_worker_process():
    environment = ToolEnvironment((weather,))
    with EnvironmentPool(environment, ConversationConfig(on_error="drop", timeout=20.0)) as pool:
        assert pool.reset(0, {}).result().turn is None
        reply = pool.step(0, call("weather", city="Ulm")).result()
        assert reply.turn.observation == [{"role": "tool", "name": "weather", "content": "Ulm: 21 C"}]
        info = {"tool_calls": 0, "tool_errors": 0, "called_a_tool": False}
        assert pool.step(0, "done").result().turn == Turn("", 0.0, True, info)


# ---- the bundled tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * (3 + 4)", "84"),
        ("7 / 2", "3.5"),
        ("-7 // 2 + 2 ** 10 % 1000", "20"),
        ("6 / 3", "2"),
        ("1e3", "1000"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 0.5", "1.41421356237"),
    ],
)
def test_the_calculator_by_hand(expression, value):
    assert calculator(expression) == value


def test_the_tools_of_an_environment_reach_the_chat_template(tmp_path):
    from test_tokenizer import QWEN_25_TEMPLATE, qwen

    from tunix_lite.models.tokenizer import Tokenizer
    from tunix_lite.settings.compose import compose
    from tunix_lite.tasks.task import Task

    run = compose(["task=calculator", "task.environment.role=tool"])
    tokenizer = Tokenizer.load(qwen(tmp_path / "q", QWEN_25_TEMPLATE))
    task = Task(run.task, tokenizer, 4096, 64)
    example = run.task.source.held_out[0]
    written = tokenizer.decode(task.text.prompt(example), skip_special=False)
    schema = written.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(schema) == schema_of(calculator)
    messages = [{"role": "tool", "name": "calculator", "content": "4"}]
    tokens = task.text.turn_tokens.between(messages, ended=True)
    expected = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens, skip_special=False) == expected
