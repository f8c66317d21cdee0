"""The recorder that a server tells of the calls of its clients, by episode."""

from contextlib import AbstractContextManager
from typing import Protocol

from tunix_lite.serving.answers import Piece
from tunix_lite.serving.calls import Call


class Recorder(Protocol):
    """Keeps what was asked and sampled in an episode, a run of an agent. The id of an episode is
    part of the path, /episodes/ID/v1, or the API key."""

    def begin(self, episode: str, call: Call) -> Call:
        """The call as it shall be made: other settings, or other tokens of the same prompt. Raises
        BadCall for an episode that there is not, or that is over."""

    def submitting(self, episode: str) -> AbstractContextManager:
        """Inside, the sequences of a call go to the engine, and its episode does not end. Raises
        BadCall as `begin`."""

    def record(self, episode: str, call: Call, choices: list[Piece]) -> None:
        """Gets all choices of a call, whole, before the client has the last of them."""

    def reward(self, episode: str, value: float) -> None:
        """Gets the reward that somebody sends for an episode. Raises BadCall as `begin`."""
