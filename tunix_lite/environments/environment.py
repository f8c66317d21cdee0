"""An environment: an object that answers the completions of the model in a conversation.

Anything with `reset` and `step` is one. Both may be plain or async. What they return may be a
`Turn`, or what environments of other projects return: gymnasium's tuple, a plain tuple, a dict, or
an object with `observation`, `reward` and `done`.
"""

import asyncio
import copy
import inspect
import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from tunix_lite.files.plain_text import escaped
from tunix_lite.rewards.scores import MOST_REWARD
from tunix_lite.workers.child import KEPT, short_repr

# Roles of messages in an environment's answer. A message of the assistant continues the model's
# own text.
ROLES = ("system", "user", "tool", "environment", "developer", "assistant")
# names of the parts of a turn, in a dict or as attributes; the first that is there counts
OBSERVATION = ("observation", "observations", "obs")
DONE = ("done", "terminated")
# keys of a message beside its role and content
MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")
# characters of a name in info, which becomes the name of a metric; longer names are cut
MOST_NAME = 100


@dataclass(frozen=True)
class Turn:
    """Answer of an environment to a completion.

    observation: the text that the model reads next, or messages ({role, content} each). reward: for
    this completion. done: whether the conversation is over; then nobody reads the observation.
    info: flags and numbers by name, for metrics.

    Example: Turn("Higher.", reward=0.1) lets the conversation go on.
    """

    observation: str | list[dict]
    reward: float = 0.0
    done: bool = False
    info: dict[str, bool | int | float] = field(default_factory=dict)


class Environment(Protocol):
    """One conversation. A run makes a fresh object for each.

    Example: class Echo with reset(example) -> None and step(completion) -> Turn(completion).
    """

    def reset(self, example: dict) -> str | list[dict] | None:
        """Begins the conversation about an example. Returns the prompt: a user's message, or
        messages. None: the prompt of the task. What happens later depends on nothing but the
        example and the completions."""

    def step(self, completion: str) -> Turn:
        """The answer to a completion of the model."""


# a function that makes one, or one that was not used yet
EnvironmentSource = Callable[[], Environment] | Environment


class NotATurn(Exception):
    """Raised for an object that is no environment, or a value that is no turn. Its text describes
    the object."""


def fresh(make: EnvironmentSource) -> Environment:
    """A new environment. make: a function that returns one; or one that was not used, of which this
    is a copy. Raises NotATurn if a method is missing."""
    is_one = hasattr(make, "reset") and hasattr(make, "step") and not isinstance(make, type)
    environment = copy.deepcopy(make) if is_one else make()
    for name in ("reset", "step"):
        if not callable(getattr(environment, name, None)):
            raise NotATurn(
                f"is {short_repr(environment)}, which has no method `{name}`; an environment has "
                "reset(example) and step(completion)"
            )
    return environment


def call_reset(environment: Environment, example: dict, loop: "Loop") -> str | list[dict] | None:
    """The prompt with which the environment begins; None: that of the task.

    A `reset` that takes no example, as gymnasium's, gets a seed that depends on nothing but the
    example, and the example as its options, as far as it takes them.
    """
    reset = environment.reset
    arguments: dict[str, Any] = {}
    takes_example = True
    with suppress(TypeError, ValueError):
        signature = inspect.signature(reset)
        arguments = {"seed": seed_of(example), "options": dict(example)}
        arguments = {name: arguments[name] for name in signature.parameters if name in arguments}
        takes_example = False
        signature.bind(example)
        takes_example = next(iter(signature.parameters), "") not in ("seed", "options")
    value = loop.finish(reset(example) if takes_example else reset(**arguments))
    # gymnasium: observation and info
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = value[0]
    if value is None:
        return None
    return _read_observation(_part(value, OBSERVATION, value), "reset")


def read_turn(value: object) -> Turn:
    """Reads the return value of `step` as a Turn. Raises NotATurn for anything that is not listed
    above."""
    # The parts of what `step` returned.
    truncated = False
    absent = object()
    if isinstance(value, tuple) and len(value) == 5:
        observation, reward, done, truncated, info = value
    elif isinstance(value, tuple) and len(value) in (3, 4):
        observation, reward, done, info = (*value, {})[:4]
    elif isinstance(value, str | tuple) or _part(value, OBSERVATION, absent) is absent:
        raise NotATurn(
            f"returned {short_repr(value)} from step; it is Turn(observation, reward, done), a "
            "tuple (observation, reward, done), gymnasium's tuple of five, or a dict of these names"
        )
    else:
        observation = _part(value, OBSERVATION, None)
        reward = _part(value, ("reward",), 0.0)
        done = _part(value, DONE, False)
        truncated = _part(value, ("truncated",), False)
        info = _part(value, ("info",), {})
    for flag in (done, truncated):
        if not isinstance(_plain(flag), bool):
            raise NotATurn(f"returned done={short_repr(flag)} from step; it is True or False")
    done = _plain(done) or _plain(truncated)

    # What the model reads, and a finite number. None, which some projects have before the end, is
    # a reward of 0.
    if done and (observation is None or observation == []):
        observation = ""
    observation = _read_observation(observation, "step")
    try:
        number = 0.0 if reward is None else math.nan
        if hasattr(reward, "__float__"):
            number = float(reward)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MOST_REWARD:
        raise NotATurn(
            f"returned the reward {short_repr(reward)} from step; it is a finite number, "
            f"{MOST_REWARD:g} at most"
        )

    # The flags and finite numbers of `info`; environments keep many other things there.
    items = info.items() if isinstance(info, Mapping) else ()
    plain = {escaped(str(name), MOST_NAME): _plain(item) for name, item in items}
    flags = {
        name: item
        for name, item in plain.items()
        if type(item) in (bool, int, float) and abs(item) <= sys.float_info.max
    }
    return Turn(observation, number, done, flags)


def _part(value: object, names: tuple[str, ...], default: object) -> Any:
    """The first entry or attribute of one of these names."""
    for name in names:
        if isinstance(value, Mapping) and name in value:
            return value[name]
        if not isinstance(value, Mapping | str | list) and hasattr(value, name):
            return getattr(value, name)
    return default


def _read_observation(value: object, where: str) -> str | list[dict]:
    if isinstance(value, str):
        _check_text(value, where)
        return str(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise NotATurn(
            f"returned the observation {short_repr(value)} from {where}; it is a text, or a list "
            "of messages {role, content}"
        )
    if not value:
        raise NotATurn(
            f"returned an empty list from {where}; it is a text, or a list of messages"
        )
    for message in value:
        is_message = (
            isinstance(message, Mapping)
            and message.get("role") in ROLES
            and isinstance(message.get("content"), str)
            and set(message) <= set(MESSAGE_KEYS)
            and all(isinstance(item, str) for item in message.values())
        )
        if not is_message:
            raise NotATurn(
                f"returned {short_repr(message)} as a message from {where}; it has a role "
                f"({', '.join(ROLES)}) and a content, which is text"
            )
        _check_text(message["content"], where)
    return [{key: str(item) for key, item in message.items()} for message in value]


def _check_text(text: str, where: str) -> None:
    if len(text) > KEPT:
        raise NotATurn(
            f"returned an observation of {len(text):,} characters from {where}; {KEPT:,} is the "
            "most"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NotATurn(
            f"returned {short_repr(text)} from {where}; it must be text in UTF-8: {error.reason}"
        ) from error


def _plain(value: object) -> Any:
    """A number of numpy, which environments of gymnasium often have, as one of Python."""
    return value.item() if hasattr(value, "item") and not hasattr(value, "__len__") else value


# ---- calls of methods


class Loop:
    """The event loop on which async environments of a process run.

    Example: Loop().finish(environment.step("7")) is the turn, whether or not `step` is async.
    """

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, value: object) -> Any:
        """Returns the value, or its result if it is awaitable."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def wait() -> Any:
            return await value

        return self._loop.run_until_complete(wait())


def seed_of(example: dict) -> int:
    """A number from 0 to 2^32 - 1 that depends on nothing but the example."""
    return zlib.crc32(json.dumps(example, sort_keys=True, default=str).encode())
