"""Environments in the killable processes of workers/pool.py. Where a process is lost, the next one
resets its conversations and steps through their completions again: so what an environment answers
must depend on the example and the completions alone."""

import itertools
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NamedTuple

from tunix_lite.environments.environment import (
    Environment,
    EnvironmentSource,
    Turn,
    call_reset,
    fresh,
    read_turn,
)
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.workers.child import short_repr
from tunix_lite.workers.pool import Pool, RewardsConfig

# times that one call is made again because its process was lost by other conversations
_MOST_REPLAYS = 100
_NAME = "environment"


class Reply(NamedTuple):
    """Result of a call. turn: of a reset, its observation alone, or None for the task's own prompt.
    failure: "", error, timeout, crash or not_a_turn; message: how it failed. seconds: of the call.
    Example: Reply(Turn("Higher."), seconds=0.001)."""

    turn: Turn | None
    failure: str = ""
    message: str = ""
    seconds: float = 0.0


class _Conversations:
    """The conversations of a process: what a worker calls.
    Example: _Conversations(make)("7", {"do": "step", "id": 3, "turn": 0}) is None if conversation 3
    is not in this process, or not at this turn."""

    def __init__(self, make: EnvironmentSource):
        self.make = make
        # (environment, number of completions it has answered), by number of the conversation
        self._live: dict[int, tuple[Environment | None, int]] = {}

    def __reduce__(self) -> tuple:
        # A worker gets the source of environments, and no conversation of this process.
        return _Conversations, (self.make,)

    def __call__(self, completion: str, call: dict) -> dict | None:
        began = time.perf_counter()
        number = call["id"]
        turn = Turn("")
        if call["do"] == "reset":
            environment = fresh(self.make)
            turn = Turn(call_reset(environment, call["example"]))
            self._live[number] = (environment, 0)
        elif call["do"] == "close":
            environment, _ = self._live.pop(number, (None, 0))
            if callable(close := getattr(environment, "close", None)):
                close()
        else:
            environment, turns = self._live.get(number, (None, -1))
            if turns != call["turn"]:
                return None
            # one that fails answers no more, and is still to be closed
            self._live[number] = (environment, -1)
            turn = read_turn(environment.step(completion))
            self._live[number] = (environment, turns + 1)
        seconds = time.perf_counter() - began
        return {"turn": asdict(turn), "seconds": seconds}


@dataclass
class _Conversation:
    """State of one conversation in the run's process."""

    number: int
    pool: Pool
    example: dict
    # answers so far, that of reset first, and the completions between
    turns: list[Turn | None] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    failed: bool = False


class EnvironmentPool:
    """Environments in `settings.workers` processes or, if that is 0, here: a context manager. make:
    a function that returns one, or one that was not used yet. A row has one conversation at a time.
    Example: EnvironmentPool(GuessingGame, ConversationConfig()).reset(0, example).result().turn"""

    def __init__(self, make: EnvironmentSource, settings: ConversationConfig):
        self.settings = settings
        # With drop a failure comes back as an outcome; `_fail` says what becomes of it.
        own = RewardsConfig("drop", settings.timeout, min(settings.workers, 1))
        # One worker for each pool, so that all calls of a conversation reach one process.
        self._pools = [
            Pool({_NAME: _Conversations(make)}, own, group="conversation")
            for _ in range(max(1, settings.workers))
        ]
        self._numbers = itertools.count()
        self._rows: dict[int, _Conversation] = {}

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_) -> None:
        for pool in self._pools:
            pool.close()

    def reset(self, row: int, example: dict) -> "Future[Reply]":
        """Begins the conversation of a row about an example. The future raises ValueError if the
        environment fails and on_error=raise."""
        self.close(row)
        pool = self._pools[row % len(self._pools)]
        # nobody asks this pool for them, and they would only grow
        pool.taken_seconds()
        self._rows[row] = _Conversation(next(self._numbers), pool, example)
        return _Call(self.settings, self._rows[row], []).submit(0)

    def step(self, row: int, completion: str) -> "Future[Reply]":
        """Gives the environment of a row the next completion. The future raises ValueError if the
        environment fails and on_error=raise, and if there is no conversation to go on with."""
        conversation = self._rows.get(row)
        if conversation is None or conversation.failed or not conversation.turns:
            raise ValueError(f"row {row} has no conversation to go on with: call reset first")
        completions = [*conversation.completions, completion]
        return _Call(self.settings, conversation, completions).submit(len(completions))

    def close(self, row: int) -> None:
        """Ends the conversation of a row, if there is one, and calls `close` of its environment."""
        conversation = self._rows.pop(row, None)
        if conversation is not None and conversation.turns:
            conversation.pool.submit("", {"do": "close", "id": conversation.number})


@dataclass
class _Call:
    """A call of an environment, on its way, and the calls before it where the process is new. Place
    0 is the reset, place n the n-th of `completions`; the last place is the call itself."""

    settings: ConversationConfig
    conversation: _Conversation
    completions: list[str]
    reply: Future = field(default_factory=Future)
    replays: int = 0
    # when the last call was made
    began: float = 0.0

    def submit(self, at: int) -> "Future[Reply]":
        """Makes the call at this place; the next one is made when it is answered."""
        self.began = time.monotonic()
        conversation = self.conversation
        call = {"do": "step", "id": conversation.number, "turn": at - 1}
        if at == 0:
            call = {"do": "reset", "id": conversation.number, "example": conversation.example}
        called = conversation.pool.submit(self.completions[at - 1] if at else "", call)
        # no thread waits for an environment, which may take seconds
        called.add_done_callback(partial(self._answered, at))
        return self.reply

    def _answered(self, at: int, called: Future) -> None:
        """Handles an answer, in the thread that feeds the worker."""
        conversation = self.conversation
        try:
            kind, answer = called.result()[_NAME]
            turn = None
            if not kind and answer is not None:
                turn = Turn(**answer["turn"])
                if turn.observation is None:
                    turn = None
            if kind:
                self._fail(kind, answer, at)
            elif answer is None:
                # the process is a new one: the conversation begins there again
                self.replays += 1
                if self.replays > _MOST_REPLAYS:
                    self._fail("crash", f"was lost with its process {_MOST_REPLAYS} times", at)
                else:
                    self.submit(0)
            elif at == len(self.completions):
                conversation.turns.append(turn)
                conversation.completions = self.completions
                self.reply.set_result(Reply(turn, seconds=answer["seconds"]))
            elif turn == conversation.turns[at]:
                self.submit(at + 1)
            else:
                # a call that is made again must be answered as the first time
                before = short_repr(conversation.turns[at])
                how = (
                    f"answered {short_repr(turn)}, and {before} before its process was lost; what "
                    "it answers must depend on the example and the completions alone,"
                )
                self._fail("error", how, at)
        except BaseException as error:
            # else nobody would ever hear of it
            with suppress(Exception):
                self.reply.set_exception(error)

    def _fail(self, kind: str, how: str | None, at: int) -> None:
        settings = self.settings
        self.conversation.failed = True
        if kind == "timeout":
            how = f"took more than conversation.timeout={settings.timeout:g} seconds"
        what = f"the example {short_repr(self.conversation.example)}"
        if at:
            what = f"the completion {short_repr(self.completions[at - 1])}"
        # the correct form comes last in the message
        wrong, _, right = how.rpartition("; ") if kind == "not_a_turn" else (how, "", "")
        message = f"the environment {wrong} for {what}" + (f"; {right}" if right else "")
        if settings.on_error == "raise":
            raise ValueError(
                f"{message}; conversation.on_error=zero or drop continues without it"
            )
        # it may have waited behind others, and has not taken longer than it may
        seconds = min(time.monotonic() - self.began, settings.timeout)
        self.reply.set_result(Reply(None, kind, message, seconds))
