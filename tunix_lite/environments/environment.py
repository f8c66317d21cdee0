"""An environment: an object with `reset` and `step` that answers the completions of the model in a
conversation. `step` may return a `Turn`, a plain tuple, or gymnasium's tuple of five."""

import contextlib
import copy
import inspect
import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tunix_lite.basics.plain_text import escaped
from tunix_lite.workers.child import KEPT, MOST_REWARD, NotANumber, short_repr

# Roles of messages in an environment's answer. A message of the assistant continues the model's
# own text.
_ROLES = ("system", "user", "tool", "environment", "developer", "assistant")
# keys of a message beside its role and content
_MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")
# characters of a name in info, which becomes the name of a metric; longer names are cut
_MOST_NAME = 100


@dataclass(frozen=True)
class Turn:
    """Answer of an environment to a completion: what the model reads next, a text or messages
    ({role, content} each), the reward of the completion, whether the conversation is over, and
    flags and numbers for metrics.
    Example: Turn("Higher.", reward=0.1) lets the conversation go on."""

    observation: str | list[dict]
    reward: float = 0.0
    done: bool = False
    info: dict[str, bool | int | float] = field(default_factory=dict)


class Environment(Protocol):
    """One conversation. A run makes a fresh object for each.
    Example: class Echo with reset(example) -> None and step(completion) -> Turn(completion)."""

    def reset(self, example: dict) -> str | list[dict] | None:
        """Begins the conversation about an example. Returns the prompt: a user's message, or
        messages. None: the prompt of the task. What happens later depends on nothing but the
        example and the completions."""

    def step(self, completion: str) -> Turn:
        """The answer to a completion of the model."""


# a function that makes one, or one that was not used yet
EnvironmentSource = Callable[[], Environment] | Environment


class NotATurn(NotANumber):
    """Raised for an object that is no environment, or a value that is no turn."""

    kind = "not_a_turn"


def fresh(make: EnvironmentSource) -> Environment:
    """A new environment. make: a function that returns one; or one that was not used, of which this
    is a copy. Raises NotATurn if a method is missing."""
    is_one = hasattr(make, "reset") and hasattr(make, "step") and not isinstance(make, type)
    # Conversations must not share what an environment remembers.
    environment = copy.deepcopy(make) if is_one else make()
    if name := missing_method(environment):
        raise NotATurn(f"is {short_repr(environment)}, which has no {name}")
    return environment


def missing_method(environment: object) -> str:
    """The method that an object lacks to be an environment, for a message; "" for none."""
    for name in ("reset", "step"):
        if not callable(getattr(environment, name, None)):
            return f"method `{name}`; an environment has reset(example) and step(completion)"
    return ""


def call_reset(environment: Environment, example: dict) -> str | list[dict] | None:
    """The prompt with which the environment begins; None: that of the task. A `reset` that takes no
    example, as gymnasium's, gets a seed made of the example, and it as options."""
    parameters = inspect.signature(environment.reset).parameters
    text = json.dumps(example, sort_keys=True, default=str)
    # Not `hash`, which differs from process to process.
    known = {"seed": zlib.crc32(text.encode()), "options": dict(example)}
    first = next(iter(parameters.values()), None)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if first is None or first.name in known or first.kind in by_name:
        arguments = {name: known[name] for name in parameters if name in known}
        value = environment.reset(**arguments)
    else:
        value = environment.reset(example)
    # gymnasium: observation and info
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = value[0]
    if value is None:
        return None
    return _read_observation(value, "reset")


def read_turn(value: object) -> Turn:
    """Reads what `step` returned as a Turn. Raises NotATurn for what is not listed above."""
    if isinstance(value, Turn):
        value = (value.observation, value.reward, value.done, value.info)
    if not isinstance(value, tuple) or len(value) not in (3, 4, 5):
        raise NotATurn(
            f"returned {short_repr(value)} from step; it is Turn(observation, reward, done), a "
            "tuple (observation, reward, done), or gymnasium's tuple of five"
        )
    observation, reward, done, *rest = value
    info = rest[-1] if rest else {}
    for flag in (done, *rest[:-1]):
        if not isinstance(_plain(flag), bool):
            raise NotATurn(f"returned done={short_repr(flag)} from step; it is True or False")
    # gymnasium's `truncated` ends a conversation, too
    done = any(map(_plain, (done, *rest[:-1])))

    # What the model reads, and a finite number. None, which some projects have before the end, is
    # a reward of 0.
    if done and (observation is None or observation == []):
        observation = ""
    observation = _read_observation(observation, "step")
    number = 0.0 if reward is None else math.nan
    with contextlib.suppress(OverflowError, TypeError, ValueError):
        # A text such as "1" has no such method, though float() would read it.
        if hasattr(reward, "__float__"):
            number = float(reward)
    # Not `>`: every comparison with NaN is false.
    if not abs(number) <= MOST_REWARD:
        raise NotATurn(
            f"returned the reward {short_repr(reward)} from step; it is a finite number, "
            f"{MOST_REWARD:g} at most"
        )

    # The flags and finite numbers of `info`; environments keep many other things there.
    items = info.items() if isinstance(info, Mapping) else ()
    plain = {escaped(str(name), _MOST_NAME): _plain(item) for name, item in items}
    flags = {
        name: item
        for name, item in plain.items()
        if type(item) in (bool, int, float) and abs(item) <= sys.float_info.max
    }
    return Turn(observation, number, done, flags)


def _read_observation(value: object, where: str) -> str | list[dict]:
    if isinstance(value, str):
        return _checked_text(value, where)
    # one message need not stand in a list
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list | tuple) or not messages:
        raise NotATurn(
            f"returned the observation {short_repr(value)} from {where}; it is a text, or a list "
            "of messages {role, content}"
        )
    for message in messages:
        is_message = (
            isinstance(message, Mapping)
            and message.get("role") in _ROLES
            and {"content"} <= set(message) <= set(_MESSAGE_KEYS)
            and all(isinstance(item, str) for item in message.values())
        )
        if not is_message:
            raise NotATurn(
                f"returned {short_repr(message)} as a message from {where}; it has a role "
                f"({', '.join(_ROLES)}) and a content, which is text"
            )
        _checked_text(message["content"], where)
    return [{key: str(item) for key, item in message.items()} for message in messages]


def _checked_text(text: str, where: str) -> str:
    if len(text) > KEPT:
        raise NotATurn(
            f"returned an observation of {len(text):,} characters from {where}; {KEPT:,} is the "
            "most"
        )
    try:
        # half a surrogate pair can be no token
        text.encode()
    except UnicodeEncodeError as error:
        raise NotATurn(
            f"returned {short_repr(text)} from {where}; it must be text in UTF-8: {error.reason}"
        ) from error
    return str(text)


def _plain(value: object) -> Any:
    """A number of numpy, which environments of gymnasium often have, as one of Python."""
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        return value.item()
    return value
