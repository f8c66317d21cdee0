"""What every server of this package does: it listens until a signal, and checks keys."""

import asyncio
import hmac
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunix_lite.serving.bad_call import BadCall

if TYPE_CHECKING:
    from aiohttp import web

# Seconds within which a client must have sent its body.
BODY_SECONDS = 30.0
# Seconds between two looks at whether the server should end.
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class ServerSettings:
    """How the server listens, and what it lets clients do.

    Example: ServerSettings(port=8000, api_key="secret").
    """

    host: str = "127.0.0.1"
    # 0 takes a free one
    port: int = 8000
    api_key: str | None = None
    # bytes
    max_body: int = 2**20
    # seconds from a request to its last token
    request_seconds: float = 600.0
    # seconds that requests under way may take after SIGTERM
    stop_seconds: float = 30.0


class TimedOut(Exception):
    """A request took too long."""


async def listen(
    app: "web.Application",
    settings: ServerSettings,
    ready: Callable[[str], None],
    check: Callable[[], None],
    stopping: Callable[[], None],
) -> None:
    """Serves until SIGTERM or SIGINT. ready(address) is called once it listens; check() now and
    then, and what it raises ends the server; stopping() when a signal came.

    Then it takes no more requests, and those under way have stop_seconds to end.
    """
    from aiohttp import web

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    # The request of a client that goes away is cancelled.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=settings.stop_seconds,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        ready(f"http://{host}:{port}")
        while not stop.is_set():
            check()
            try:
                await asyncio.wait_for(stop.wait(), timeout=LOOK_SECONDS)
            except TimeoutError:
                continue
        stopping()
        await site.stop()
    finally:
        # waits for the requests under way
        await runner.cleanup()


def is_key(given: str, key: str | None) -> bool:
    """Whether a client may ask: in constant time, so that the time tells nothing of the key."""
    return key is None or hmac.compare_digest(given.encode(), key.encode())


async def read_body(request: "web.Request") -> bytes:
    """Raises TimedOut for a client that does not send it."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise TimedOut(f"the body did not come within {BODY_SECONDS:g} s") from None


async def read_json(request: "web.Request") -> object:
    """The body of a request. Raises BadCall if it is no JSON, TimedOut."""
    raw = await read_body(request)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the body is no JSON: {error}") from error
