"""Agents at work: each episode in a thread of its own, with a time-out."""

import asyncio
import inspect
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tunix_lite.basics.plain_text import message_of, shown
from tunix_lite.rewards.scores import MOST_REWARD
from tunix_lite.runs.agents.episodes import Episode, OpenEpisodes

# (client, example) -> the reward, or a text that is graded
Agent = Callable[[Any, dict], Any]
_ON_ERROR = ("raise", "zero", "drop")
# between two looks at whether the run is asked to stop
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class AgentConfig:
    """Settings that run agents. Example: AgentConfig(timeout=30.0, on_error="zero")."""

    # Seconds that an episode may take. A longer one has failed.
    timeout: float = 120.0
    # When an agent fails: raise stops the training, zero counts the episode as 0, drop learns
    # nothing from it.
    on_error: str = "raise"
    # Episodes at once.
    parallel: int = 32
    # Calls of an episode, at most. One more is refused.
    max_calls: int = 64

    def __post_init__(self):
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be above 0")
        if self.on_error not in _ON_ERROR:
            raise ValueError(f"on_error={self.on_error!r}; it is {', '.join(_ON_ERROR)}")
        if self.parallel < 1 or self.max_calls < 1:
            raise ValueError("parallel and max_calls must be at least 1")


@dataclass(frozen=True)
class Ended:
    """The end of an episode. Example: Ended(1.0, seconds=0.8); Ended(None, 30.0, failure="timeout",
    message="30 s")."""

    # None where it failed
    reward: float | None
    seconds: float
    # "", error, timeout or no_reward
    failure: str = ""
    message: str = ""


class Runner:
    """Runs an agent on examples, one episode each. Example: Runner(agent, reward, episodes,
    endpoint.base_url, AgentConfig()).run(opened)."""

    def __init__(
        self,
        agent: Agent,
        reward: Callable[[str, dict], float] | None,
        episodes: OpenEpisodes,
        base_url: Callable[[Episode], str],
        config: AgentConfig,
    ):
        """reward: (completion, example) -> number, for agents that return a text."""
        import openai

        self.agent = agent
        self.reward = reward
        self.episodes = episodes
        self.base_url = base_url
        self.config = config
        # an object with `async def __call__`, too
        called = vars(type(agent)).get("__call__")
        self._is_async = any(inspect.iscoroutinefunction(one) for one in (agent, called))

        class SharedConnections(openai.DefaultHttpxClient):
            def close(self) -> None:
                """Does nothing: an agent that closes its client would close those of all."""

        # Clients of one address share their connections. It needs no certificates, which take long
        # to load, and no proxy, which HTTP_PROXY may name.
        self._connections = SharedConnections(verify=False, trust_env=False)
        self._client = openai.OpenAI(
            base_url="http://127.0.0.1",
            api_key="none",
            timeout=config.timeout,
            http_client=self._connections,
        )

    def close(self) -> None:
        """Closes the connections of all clients."""
        super(type(self._connections), self._connections).close()

    def run(
        self, opened: Sequence[Episode], between: Callable[[], None] = lambda: None
    ) -> list[Ended]:
        """Runs the agent once for each episode, and closes it. How each ended, in their order.
        between: called once a second or more often; it may raise to end them all."""
        # A thread cannot be ended from outside: one that takes too long goes on, but its calls are
        # refused, and what it returns is not used.
        waiting = deque(enumerate(opened))
        began = {}
        results: dict[int, Ended] = {}
        ended = queue.SimpleQueue()
        try:
            while waiting or began:
                while waiting and len(began) < self.config.parallel:
                    place, episode = waiting.popleft()
                    began[place] = time.monotonic()
                    arguments = (place, episode, ended)
                    # a daemon: an agent that hangs must not keep the process from ending
                    threading.Thread(target=self._run_one, args=arguments, daemon=True).start()
                between()

                # until one ends or takes too long, a second at most
                first = min(began, key=began.get)
                left = began[first] + self.config.timeout - time.monotonic()
                try:
                    place, how = ended.get(timeout=min(max(0.0, left), _LOOK_SECONDS))
                except queue.Empty:
                    if left > _LOOK_SECONDS:
                        continue
                    place = first
                    message = f"the agent took more than {self.config.timeout:g} s"
                    how = Ended(None, self.config.timeout, "timeout", message)
                # it may have been given up before
                if place in began:
                    del began[place]
                    self.episodes.close(opened[place])
                    results[place] = how
        finally:
            for episode in opened:
                self.episodes.close(episode)
        return [results[place] for place in range(len(opened))]

    def _run_one(self, place: int, episode: Episode, ended: queue.SimpleQueue) -> None:
        """Runs one episode in a thread of its own."""
        import openai

        start = time.monotonic()
        # The agent gets the client that it would use elsewhere.
        names = {"base_url": self.base_url(episode), "api_key": episode.id}

        async def finish() -> float | str | None:
            http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
            timeout = self.config.timeout
            async with openai.AsyncOpenAI(
                **names, timeout=timeout, http_client=http
            ) as client:
                return await self.agent(client, episode.example)

        try:
            if self._is_async:
                returned = asyncio.run(finish())
            else:
                returned = self.agent(self._client.with_options(**names), episode.example)
            reward, message = self._reward_of(returned, episode)
            failure = "no_reward" if reward is None else ""
            how = Ended(reward, time.monotonic() - start, failure, message)
        except BaseException as error:
            # the line of the agent's file where it failed; the first frames are those of this file
            frames = traceback.extract_tb(error.__traceback__)
            own = [one for one in frames if one.filename != __file__]
            where = f"{own[0].filename}, line {own[0].lineno}: " if own else ""
            message = f"{type(error).__name__}: {where}{shown(message_of(error), 300)}"
            how = Ended(None, time.monotonic() - start, "error", message)
        ended.put((place, how))

    def _reward_of(self, returned: object, episode: Episode) -> tuple[float | None, str]:
        """The reward that an agent returned; or None, and why that is none."""
        if isinstance(returned, str):
            if self.reward is None:
                return None, "the agent returned a text, and there is no reward for texts"
            returned = self.reward(returned, episode.example)
        # Numbers of numpy and jax are not all numbers.Real: numpy.bool_ is none.
        try:
            reward = float(returned) if hasattr(returned, "__float__") else math.nan
        except (OverflowError, TypeError, ValueError):
            reward = math.nan
        if abs(reward) <= MOST_REWARD:
            return reward, ""
        right = f"it is a finite number, {MOST_REWARD:g} at most, or a text"
        return None, f"the agent returned {shown(returned)}; {right}"
