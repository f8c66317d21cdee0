"""Tools in a chat: what a client offers goes to the chat template, and calls are read in what the
model says, as in conversations of a run (environments/tool_calls.py)."""

import json
import secrets

from tunix_lite.basics.plain_text import shown
from tunix_lite.environments.tool_calls import GEMMA4_TAG, PYTHON_TAG, calls_in
from tunix_lite.models.chat_template import with_read_arguments
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.serving.bad_call import BadCall

# What a call begins with. A bare one begins with a bracket, at the start of what is said.
_MARKS = ("<tool_call>", "<function=", GEMMA4_TAG, PYTHON_TAG, "```")
_BRACKETS = ("{", "[")
_NO_FORM = (
    "the chat template of this model has no form for tools; leave tools out, and write into a "
    "message which there are"
)


def tools_of(
    tools: object, choice: object, is_parallel: object, tokenizer: Tokenizer
) -> list[dict]:
    """The tools of a body as chat templates read them; [] where none may be called. choice,
    is_parallel: tool_choice and parallel_tool_calls. Raises BadCall, naming the field."""
    if choice not in (None, "none", "auto"):
        raise BadCall(
            f"tool_choice={shown(choice)} would force a call, which this server cannot; it is auto "
            "or none",
            "tool_choice",
        )
    if not tools:
        return []
    if not isinstance(tools, list):
        raise BadCall("tools is a list of functions", "tools")
    checked = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        is_function = isinstance(function, dict) and tool.get("type") == "function"
        name = function.get("name") if is_function else None
        if not (name and isinstance(name, str)):
            form = '{"type": "function", "function": {"name": ...}}'
            raise BadCall(f"a tool is {form}; this is {shown(tool)}", "tools")
        # `strict` says how answers are checked, and is nothing for the model.
        function = {name: value for name, value in function.items() if name != "strict"}
        checked.append({"type": "function", "function": function})
    if not tokenizer.writes_tools:
        raise BadCall(_NO_FORM, "tools")
    if choice == "none":
        return []
    if is_parallel is False:
        raise BadCall(
            "parallel_tool_calls=false is not supported; leave it out, and take the first call",
            "parallel_tool_calls",
        )
    return checked


def with_tool_messages(messages: list[dict], tokenizer: Tokenizer) -> list[dict]:
    """The messages with arguments as objects, and results with their tools. Raises BadCall."""
    names = {}
    for_template = []
    for message in messages:
        calls = message.get("tool_calls")
        is_of_tool = message["role"] == "tool"
        if (calls or is_of_tool) and not tokenizer.writes_tools:
            raise BadCall(_NO_FORM, "messages")
        if calls:
            if not isinstance(calls, list):
                calls = [calls]
            try:
                # without a function a call is refused
                calls = [
                    with_read_arguments(
                        {"function": None} | one if isinstance(one, dict) else one
                    )
                    for one in calls
                ]
            except ValueError as error:
                raise BadCall(f"tool_calls: {error}", "messages") from error
            names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            # Templates join it with other texts, and null is none.
            message = {**message, "content": message.get("content") or "", "tool_calls": calls}
        elif not isinstance(message.get("content"), str):
            raise BadCall(
                f"content of a message is text; this is {shown(message)}", "messages"
            )
        if is_of_tool and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        for_template.append(message)
    return for_template


class CallReader:
    """Divides what a model says into text and calls; what may be a call is held to the end."""

    def __init__(self) -> None:
        self._text = ""
        self._released = 0

    def feed(self, text: str) -> str:
        """The text that is part of no call, as far as one can know."""
        self._text += text
        text = self._text
        places = [text.find(mark) for mark in _MARKS]
        marks = [place for place in places if place >= 0]
        end = min(marks, default=len(text))
        if not marks:
            # The last characters may be the beginning of a mark.
            longest = max(map(len, _MARKS)) - 1
            for length in range(min(longest, len(text)), 0, -1):
                if any(mark.startswith(text[-length:]) for mark in _MARKS):
                    end = len(text) - length
                    break
        if text.lstrip().startswith(_BRACKETS):
            # It may be a bare call, which only its end shows.
            end = 0
        free = len(text[:end].rstrip())
        released = text[self._released : free]
        self._released = max(self._released, free)
        return released

    def end(self) -> tuple[str, list[dict]]:
        """The rest of the text, and the calls as the API writes them; one that cannot be read makes
        all of it text."""
        calls = calls_in(self._text)
        if not calls or any(call.problem for call in calls):
            return self._text[self._released :], []
        return "", [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in calls
        ]
