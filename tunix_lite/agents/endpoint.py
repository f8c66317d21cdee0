"""The endpoint that agents talk to: the server of the OpenAI API over the engine of a trainer, in a
thread of its own."""

import asyncio
import threading

from tunix_lite.agents.episodes import Episode, OpenEpisodes
from tunix_lite.errors import ConfigError
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import LiveEngine
from tunix_lite.serving.app import Server
from tunix_lite.serving.calls import Limits
from tunix_lite.serving.face import ServerSettings

# Seconds that the server may take until it listens.
START_SECONDS = 30.0


class Endpoint:
    """A server on 127.0.0.1 that records the calls of episodes. `close` ends it.

    Example: endpoint.base_url(episode) is "http://127.0.0.1:41234/episodes/5f2c.../v1".
    """

    def __init__(
        self, engine: LiveEngine, tokenizer: Tokenizer, limits: Limits, episodes: OpenEpisodes
    ):
        settings = ServerSettings(port=0, max_body=2**24, stop_seconds=0.0)
        self._server = Server(engine, tokenizer, limits, settings, episodes)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._address = ""
        self._failure: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()
        if not self._is_ready.wait(START_SECONDS) or self._failure is not None:
            raise ConfigError(f"the endpoint of the agents did not start: {self._failure}")

    def base_url(self, episode: Episode) -> str:
        """Returns the base_url of an OpenAI client for the calls of this episode."""
        return f"{self._address}/episodes/{episode.id}/v1"

    def close(self) -> None:
        """Stops the server; calls under way end with an error."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        def ready(address: str) -> None:
            self._address = address
            self._is_ready.set()

        try:
            self._loop.run_until_complete(self._server.run(ready, self._stop))
        except BaseException as error:
            self._failure = error
            self._is_ready.set()
