"""A client of OpenEnv servers (extra `openenv`): the environment runs wherever its server does."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix_lite.environments.environment import Turn
from tunix_lite.environments.examples import DrawnSource
from tunix_lite.files.plain_text import message_of

# Imported with this module, which a run imports only for this task: the start of a worker may take
# the seconds that it needs, a call may not.
try:
    from openenv.core import GenericEnvClient
except ImportError as error:
    GenericEnvClient = None
    WHY_NOT = str(error)

# fields of an observation that the model does not read
NOT_SHOWN = ("done", "reward", "metadata")


@dataclass(frozen=True)
class Episodes(DrawnSource):
    """Episodes of an OpenEnv server, each with a seed of its own. A task's source.

    Example: {"seed": 1608637542}.
    """

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one episode."""
        _check_openenv()
        return {"seed": int(rng.integers(2**31))}


@dataclass
class OpenEnv:
    """A session of an OpenEnv server for each conversation. What `reset` shows is the prompt.

    Example: OpenEnv("http://127.0.0.1:8000", action_field="message") sends {"message": completion}
    and shows the model the observation that comes back.
    """

    # Address of the server.
    url: str = "http://127.0.0.1:8000"
    # Field of an action that holds the completion.
    action_field: str = "message"
    # Function (completion) -> action, as a dict, instead of action_field.
    make_action: Callable | None = None
    # Field of an observation that the model reads. null shows all of them, as JSON.
    observation_field: str | None = None
    # Function (observation, as a dict) -> text, instead of observation_field.
    show: Callable | None = None
    # Fields of an example that `reset` gets.
    reset_fields: tuple[str, ...] = ("seed",)
    # Seconds that the server may take to answer. Below conversation.timeout, so that a server that
    # hangs ends one conversation, and not the process with all of them.
    answer_timeout: float = 8.0

    def __post_init__(self):
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(
                f"url={self.url!r} must begin with http://, https://, ws:// or wss://"
            )
        self._client = None

    def reset(self, example: dict) -> str | None:
        """Opens a session, and begins an episode."""
        _check_openenv()
        if missing := [name for name in self.reset_fields if name not in example]:
            raise ValueError(f"reset_fields has {missing[0]!r}, which the example has not")
        # It answers the server's pings in a thread of its own: the model may take minutes.
        self._client = GenericEnvClient(
            base_url=self.url,
            connect_timeout_s=self.answer_timeout / 2,
            message_timeout_s=self.answer_timeout,
        ).sync()
        self._ask("connect")
        result = self._ask("reset", **{name: example[name] for name in self.reset_fields})
        self._session = self._connection()
        return self._text(result.observation) or None

    def step(self, completion: str) -> Turn:
        """Sends an action, and shows what comes back."""
        action = {self.action_field: completion}
        if self.make_action is not None:
            action = self.make_action(completion)
        result = self._ask("step", action)
        # The client connects again by itself: to a new session, in which this episode is not.
        if self._connection() is not self._session:
            self.close()
            raise ConnectionError(
                f"the session at {self.url} was lost in the middle of an episode"
            )
        if result.done:
            self.close()
        return Turn(self._text(result.observation), result.reward or 0.0, bool(result.done))

    def close(self) -> None:
        """Ends the session, which makes room for another one."""
        if self._client is not None:
            with suppress(Exception):
                self._client.close()
        self._client = None

    def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        """Calls a method of the client. A session that failed is closed."""
        if self._client is None:
            raise ValueError("the episode is over: call reset first")
        try:
            return getattr(self._client, method)(*args, **named)
        except Exception as error:
            self.close()
            why = f"failed in {method}: {type(error).__name__}: {message_of(error)[:300]}"
            if isinstance(error, TimeoutError):
                why = (
                    f"did not answer {method} in {self.answer_timeout:g} seconds "
                    "(task.environment.answer_timeout)"
                )
            if method == "connect":
                why = f"does not answer ({type(error).__name__}: {message_of(error)[:300]})"
            raise RuntimeError(
                f"the OpenEnv server at task.environment.url={self.url} {' '.join(why.split())}"
            ) from error

    def _connection(self) -> Any:
        """Returns the object that stands for the session; it is another one after the client has
        connected again."""
        return getattr(self._client.async_client, "_ws", None)

    def _text(self, observation: object) -> str:
        """Writes an observation as the model reads it."""
        if self.show is not None:
            return str(self.show(observation))
        if not isinstance(observation, dict):
            return str(observation)
        value = {name: item for name, item in observation.items() if name not in NOT_SHOWN}
        if (name := self.observation_field) is not None:
            if name not in observation:
                raise ValueError(
                    f"observation_field={name!r}: the observations of {self.url} have "
                    f"{', '.join(value) or 'no fields'}"
                )
            value = observation[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_openenv() -> None:
    """Raises ValueError if OpenEnv is not installed."""
    if GenericEnvClient is None:
        raise ValueError(
            f"task=openenv needs OpenEnv ({WHY_NOT}): pip install -e '.[openenv]'"
        )
