"""Tools: Python functions that the model may call in a conversation before it answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tunix_lite.environments.environment import Loop, Turn
from tunix_lite.environments.schemas import misfit, schema_of, tool_name
from tunix_lite.environments.tool_calls import ToolCall, calls_in
from tunix_lite.plain_text import message_of

ROLES = ("tool", "user", "assistant")
NO_CALLS_LEFT = "There are no calls left. Give your answer."


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
        names = [tool_name(tool) for tool in self.tools]
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
            return self._answered(completion, calls)
        left = max(0, self.max_calls - self.num_calls)
        is_first = self.num_calls == 0
        self.num_calls += len(calls)
        made = [self._made(call) for call in calls[:left]]
        messages = [self._message(call, text) for call, (text, _) in zip(calls, made)]
        if len(calls) > left:
            self.was_asked = True
            messages.append(self._message(calls[left], NO_CALLS_LEFT))
        failed = sum(not is_right for _, is_right in made)
        # once in a conversation, whether or not it comes to an answer
        info = {"tool_calls": len(made), "tool_errors": failed, "called_a_tool": is_first}
        return Turn(self._joined(messages), info=info)

    def _answered(self, completion: str, calls: list[ToolCall]) -> Turn:
        reward = 0.0 if self.reward is None else self.reward(completion, self.example)
        info = {"tool_calls": 0, "tool_errors": 0, "called_a_tool": False}
        return Turn("", reward, done=True, info=info)

    def _made(self, call: ToolCall) -> tuple[str, bool]:
        """Makes a call. Returns its result, as the model reads it, and whether it went well."""
        problem = call.problem or self._misfit(call)
        if problem:
            return f"Error: {problem}", False
        tool = self._by_name()[call.name]
        try:
            result = str(self.loop.finish(tool(**call.arguments)))
        except Exception as error:
            result = f"Error: {type(error).__name__}: {message_of(error)}"
            return self._shortened(result), False
        return self._shortened(result), True

    def _misfit(self, call: ToolCall) -> str:
        tools = self._by_name()
        if call.name not in tools:
            return f"there is no tool {call.name[:80]!r}; there are: {', '.join(tools)}"
        return misfit(tools[call.name], call.arguments)

    def _by_name(self) -> dict[str, Callable]:
        return {tool_name(tool): tool for tool in self.tools}

    def _shortened(self, text: str) -> str:
        more = len(text) - self.max_result
        return text if more <= 0 else f"{text[: self.max_result]}... and {more} more characters"

    def _message(self, call: ToolCall, text: str) -> dict:
        text = self.result.replace("{result}", text)
        if self.role != "tool":
            return {"role": self.role, "content": text}
        return {"role": "tool", "name": call.name or "tool", "content": text}

    def _joined(self, messages: list[dict]) -> list[dict]:
        """Results in one message where templates want user and assistant in turns."""
        if self.role == "tool":
            return messages
        between = "\n" if self.role == "user" else ""
        return [{"role": self.role, "content": between.join(m["content"] for m in messages)}]
