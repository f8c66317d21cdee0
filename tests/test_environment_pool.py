"""Environments in worker processes: what they return is read, what fails follows conversation.on_error; and tools."""

import json
import os
import signal
import time
from functools import partial
from typing import Literal, Optional

import numpy as np
import pytest

from tunix_lite.environments.bundled_tools import calculator
from tunix_lite.environments.environment import NotATurn, Turn, read_turn
from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.environments.tool_calls import ToolCall, calls_in
from tunix_lite.environments.tools import NO_CALLS_LEFT, ToolEnvironment, schema_of

DROP = ConversationConfig(on_error="drop", timeout=20.0)
SHORT = ConversationConfig(on_error="drop", timeout=0.5)


class Adds:
    """Adds the numbers that it gets to that of the example."""

    def reset(self, example):
        self.total = example["start"]
        return f"The sum is {self.total}."

    def step(self, completion):
        if completion == "raise":
            raise KeyError("no such number")
        if completion == "loop":
            while True:
                pass
        if completion == "exit":
            os._exit(3)
        if completion == "nonsense":
            return "Higher."
        self.total += int(completion)
        return Turn(f"The sum is {self.total}.", reward=0.5, done=self.total > 9)


class Gymnasium:
    """As gymnasium's, which takes no example: a seed, and options."""

    def reset(self, *, seed=None, options=None):
        self.state = seed % 2**32 + options["start"]
        return str(options["start"]), {"info": 1}

    def step(self, action):
        return action, 1, False, action == "stop", {}


class Clock:
    """Answers otherwise every time, as nothing that must be replayed may."""

    def reset(self, example):
        return f"{os.getpid()}"

    def step(self, completion):
        if completion == "exit":
            os._exit(3)
        return Turn(f"{os.getpid()}")


def adds_from():
    return Adds()


def observed(pool, row, *completions):
    return [pool.step(row, completion).result().turn.observation for completion in completions]


@pytest.mark.parametrize("make", [Adds, Adds(), adds_from])
def test_a_class_an_object_and_a_function_make_a_fresh_environment_for_each_conversation(make):
    with EnvironmentPool(make, ConversationConfig(workers=0)) as pool:
        first = [pool.reset(row, {"start": row}).result() for row in (0, 1)]
        assert [reply.turn.observation for reply in first] == ["The sum is 0.", "The sum is 1."]
        assert observed(pool, 0, "1", "2") == ["The sum is 1.", "The sum is 3."]
        assert pool.step(1, "9").result().turn == Turn("The sum is 10.", 0.5, True)
        # a row that begins again begins from its example
        assert pool.reset(0, {"start": 5}).result().turn.observation == "The sum is 5."


def test_an_environment_of_gymnasium_needs_no_adapter():
    with EnvironmentPool(Gymnasium, ConversationConfig(workers=0)) as pool:
        assert pool.reset(0, {"start": 3}).result().turn.observation == "3"
        assert pool.step(0, "go").result().turn == Turn("go", 1.0, False)
        assert pool.step(0, "stop").result().turn == Turn("stop", 1.0, True)


MESSAGE = {"role": "tool", "content": "4", "name": "add"}


@pytest.mark.parametrize(
    ("returned", "turn"),
    [
        (Turn("a", 1.0, True), Turn("a", 1.0, True)),
        (("a", 0.5, False, True, {"won": True, "map": "x"}), Turn("a", 0.5, True, {"won": True})),
        (([MESSAGE], 0.0, False), Turn([MESSAGE])),
        (("a", np.float32(0.5), np.False_, np.False_, {"won": np.True_}), Turn("a", 0.5, False, {"won": True})),
    ],
)
def test_what_environments_of_other_projects_return_is_read(returned, turn):
    assert read_turn(returned) == turn


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("a", "returned 'a' from step; it is Turn"),
        (("a", float("nan"), False), "the reward nan"),
        (("a", 1.0, "no"), "done='no'"),
        (([{"role": "model", "content": "a"}], 1.0, False), "as a message from step"),
        (("a" * 100_000, 1.0, False), "100,000 characters"),
    ],
)
def test_what_is_no_turn_is_refused_in_a_line(returned, message):
    with pytest.raises(NotATurn, match="returned") as caught:
        read_turn(returned)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def adding():
    with EnvironmentPool(Adds, DROP) as pool:
        yield pool


@pytest.mark.parametrize(
    ("completion", "kind", "message"),
    [
        ("raise", "error", "failed with KeyError: 'no such number' (test_environment_pool.py, line"),
        ("nonsense", "not_a_turn", "returned 'Higher.' from step"),
        ("exit", "crash", "ended its process with exit code 3"),
    ],
)
def test_a_failure_is_a_reply_and_the_other_conversations_go_on(adding, completion, kind, message):
    for row in (0, 1):
        adding.reset(row, {"start": row}).result()
    assert observed(adding, 1, "1", "1") == ["The sum is 2.", "The sum is 3."]
    failed = adding.step(0, completion)
    # it waits behind the one that fails, and is answered from its recorded completions
    later = adding.step(1, "2")
    assert (failed.result().turn, failed.result().failure) == (None, kind)
    assert message in failed.result().message
    assert f"for the completion '{completion}'" in failed.result().message
    assert later.result().turn.observation == "The sum is 5."
    with pytest.raises(ValueError, match="row 0 has no conversation to go on with"):
        adding.step(0, "1")


def test_a_call_that_loops_ends_in_the_stated_seconds():
    with EnvironmentPool(Adds, SHORT) as pool:
        pool.reset(0, {"start": 0}).result()
        began = time.monotonic()
        pool.reset(1, {"start": 0}).result()
        reply, behind = [one.result(60) for one in (pool.step(0, "loop"), pool.step(1, "loop"))]
        # the second one waited for the first one, which is not its own time
        assert behind.failure == "timeout" and behind.seconds == 0.5
        assert reply.failure == "timeout"
        assert "took more than conversation.timeout=0.5 seconds" in reply.message
        assert reply.seconds >= 0.5
        assert time.monotonic() - began >= 0.5


def test_a_worker_that_is_killed_while_idle_costs_no_conversation(adding):
    for row in (0, 1):
        adding.reset(row, {"start": row}).result()
        observed(adding, row, "1")
    worker = adding._pools[0]._workers[0].process
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert [observed(adding, row, "1") for row in (0, 1)] == [["The sum is 2."], ["The sum is 3."]]


def test_an_environment_that_answers_otherwise_when_replayed_is_named():
    with EnvironmentPool(Clock, DROP) as pool:
        for row in (0, 1):
            pool.reset(row, {}).result()
        pool.step(0, "exit").result()
        reply = pool.step(1, "go").result()
        assert reply.failure == "error"
        assert "must depend on the example and the completions alone" in reply.message


class Closes(Adds):
    """Notes in a file that it was closed."""

    def reset(self, example):
        self.file = example["file"]
        return super().reset(example)

    def close(self):
        with open(self.file, "a") as file:
            file.write(f"{self.total};")


def test_each_environment_is_closed_once_also_one_that_failed(tmp_path):
    file = tmp_path / "closed"
    with EnvironmentPool(Closes, DROP) as pool:
        for row in range(3):
            pool.reset(row, {"start": row, "file": str(file)}).result()
        replies = [pool.step(row, said).result() for row, said in enumerate(("1", "raise", "nonsense"))]
        assert [reply.failure for reply in replies] == ["", "error", "not_a_turn"]
        for row in (0, 1, 2, 2):
            pool.close(row)
        # calls are made in their order
        pool.reset(3, {"start": 3, "file": str(file)}).result()
        assert file.read_text() == "1;1;2;"


def test_raise_names_the_environment_the_completion_and_what_to_do():
    with EnvironmentPool(Adds, ConversationConfig(workers=0)) as pool:
        with pytest.raises(ValueError, match="for the example") as of_reset:
            pool.reset(0, {}).result()
        assert "the environment failed with KeyError: 'start'" in str(of_reset.value)
        pool.reset(0, {"start": 1}).result()
        with pytest.raises(ValueError, match="conversation.on_error=zero or drop continues without it"):
            pool.step(0, "raise").result()


# ---- tools: schemas from type hints, calls as each family writes them, errors as observations, and the bundled ones


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


def many(*x: int) -> int:
    """Add them."""


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (no_docstring, "the tool no_docstring has no docstring"),
        (no_hint, "the tool no_hint has no type hint for x; write, for example, x: str"),
        (many, "the tool many takes `*x: int`; a call gives each argument by its name"),
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
        # arguments as the text of JSON, as OpenAI has them
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [ADD]),
        # Gemma
        ("```tool_code\nadd(a=1, b=2)\n```", [ADD]),
        (f"```json\n{AS_LLAMA}\n```", [ADD]),
        # Llama
        (AS_LLAMA, [ADD]),
        (f"<|python_tag|>{AS_LLAMA}; {AS_LLAMA}", [ADD, ADD]),
        # Gemma 4
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
        ('{"answer": 3}', []),
        ("{" * 50_000, []),
    ],
)
def test_calls_are_read_as_each_family_writes_them(text, calls):
    assert calls_in(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "the call is no JSON"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "the arguments of add are no JSON"),
        ("<|tool_call>add{a:1}<tool_call|>", "a call is call:name{argument:value}; this is"),
        ('<|tool_call>call:add{a:<|"|>1}<tool_call|>', "the arguments of add are no JSON"),
        ("```tool_code\nadd(1, 2)\n```", "give each argument by its name"),
        ("```tool_code\nos.getcwd()\n```", "a call is name(argument=value)"),
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
    said = [(one["role"], one["name"], one["content"]) for one in turn.observation]
    assert said == [("tool", "weather", "Ulm: 21 C"), ("tool", "calculator", "7")]
    assert (turn.reward, turn.done) == (0.0, False)
    assert turn.info == {"tool_calls": 2, "tool_errors": 0, "called_a_tool": True}
    turn = environment.step("It is 7.")
    # said once, with the first call
    assert (turn.reward, turn.done, turn.info["called_a_tool"]) == (1.0, True, False)


@pytest.mark.parametrize(
    ("completion", "observation"),
    [
        (call("sum", a=1), "Error: there is no tool 'sum'; there are: weather, calculator"),
        (call("weather"), "Error: TypeError: weather() missing 1 required positional argument: 'city'"),
        (call("weather", city="Atlantis"), "Error: LookupError: it is under water"),
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
    ("make", "settings", "message"),
    [
        (ToolEnvironment, {"tools": ()}, "tools is empty"),
        (ToolEnvironment, {"tools": (weather,), "result": "it is"}, "result='it is' has no {result}"),
        (ConversationConfig, {"max_turns": 0}, "max_turns=0"),
        (ConversationConfig, {"credit": "discount", "discount": 1.5}, "from 0 to 1"),
        (ConversationConfig, {"limit_reward": -1.0}, "on_limit=penalise alone"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


# ---- the bundled tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * (3 + 4)", "84"),
        ("-7 // 2 + 2 ** 10 % 1000", "20"),
        ("0.1 + 0.2", "0.3"),
    ],
)
def test_the_calculator_by_hand(expression, value):
    assert calculator(expression) == value
