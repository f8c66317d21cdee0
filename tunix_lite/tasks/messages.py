"""The messages and the tools in a row of data, as chat templates read them. A null is absent, at
any depth, since a row of Parquet has every field of its structs."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tunix_lite.basics.plain_text import SHOWN, shortened
from tunix_lite.models.chat_template import with_read_arguments

ROLES = ("system", "user", "assistant", "tool")
# keys of a message that a chat template may leave out; a template need not read all the others,
# and one that does not read a key would drop it in silence
FREE = ("role", "content", "name", "tool_call_id")


class Message(NamedTuple):
    """A turn of a conversation.
    Example: Message("user", "What is 1 + 2?")."""

    role: str
    content: str | None  # None: there is none, beside tool calls
    # [start, end) of the fields of the example in the content; None: the content is all data
    data: list[tuple[int, int]] | None = None
    # all other keys, such as tool_calls and reasoning_content
    more: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The content; "" where there is none."""
        return self.content or ""


def conversation_of(example: Mapping) -> list[Message]:
    """The messages in `messages`, or in `prompt`: a text, or a list. Raises ValueError."""
    present = [name for name in ("messages", "prompt") if name in example]
    if not present:
        raise ValueError(
            "an example needs a field `prompt` or `messages`, or give "
            f"task.prompt='...{{column}}...'; this one has {fields_of(example)}"
        )
    # A row of Parquet has both columns, one of them null.
    name = next((name for name in present if example[name] is not None), present[0])
    if isinstance(example[name], str) and name == "prompt":
        return [Message("user", example[name])]
    return messages_in(name, example[name])


def fields_of(example: Mapping) -> str:
    """The names of the fields of an example, for a message."""
    fields = ", ".join(map(str, example))
    return fields if len(fields) <= SHOWN else f"{fields[:SHOWN]}…"


def messages_in(name: str, turns: object) -> list[Message]:
    """The messages of a list of dicts. name: the field that has it. Raises ValueError."""
    if not isinstance(turns, list | tuple) or not turns:
        raise ValueError(f"`{name}` is {shortened(turns)}; it is a list of {{role, content}}")
    messages = []
    for turn in turns:
        more = _without_nulls(turn) if isinstance(turn, Mapping) else {}
        role = more.pop("role", None)
        content = more.pop("content", None)
        # a turn of calls alone has no content
        has_content = isinstance(content, str) or (content is None and more.get("tool_calls"))
        if role not in ROLES or not has_content:
            raise ValueError(
                f"`{name}` holds {shortened(turn)}; a message has a role ({', '.join(ROLES)}) and "
                "a content, which is text"
            )
        try:
            if "tool_calls" in more:
                more["tool_calls"] = [with_read_arguments(call) for call in more["tool_calls"]]
        # TypeError: it is no list
        except (TypeError, ValueError) as error:
            why = f"`{name}` has tool_calls that cannot be read: {error}"
            raise ValueError(why) from error
        messages.append(Message(role, content, more=more or None))
    return messages


def tools_in(example: Mapping) -> list[dict] | None:
    """The tools of a row for the chat template: those of its field `tools`, a list of objects, or
    the JSON text of one. None: it has none. Raises ValueError for anything else."""
    tools = example.get("tools")
    if tools is None:
        return None
    listed = tools
    if isinstance(tools, str):
        try:
            listed = json.loads(tools)
        except (ValueError, RecursionError):
            listed = tools
    if not isinstance(listed, list | tuple) or not all(
        isinstance(one, Mapping) for one in listed
    ):
        raise ValueError(
            f"`tools` is {shortened(tools)}; the chat template takes a list of objects, such as "
            '[{"type": "function", "function": {"name": "add", ...}}]. Give a column that is not '
            "for it another name"
        )
    return _without_nulls(list(listed))


def _without_nulls(value: object) -> Any:
    """The value with no key whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value
