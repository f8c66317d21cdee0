"""Listening until a signal, and reading of keys and bodies, for every server of this package."""

import asyncio
import hmac
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunix_lite.plain_text import escaped
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.connections import Connections

if TYPE_CHECKING:
    from aiohttp import web

# Seconds within which a client must have sent its body.
BODY_SECONDS = 30.0
# Seconds between two looks at whether the server should end.
LOOK_SECONDS = 0.5
# Lists and objects of a body stand in one another so deep, at most: what reads them recurses.
MOST_DEPTH = 100
# A whole number with so many digits is no float, and takes long to write.
LONG_NUMBER = re.compile("(?<![0-9])[0-9]{300}")


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
    # a line on stderr for each request
    log_requests: bool = False


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
    connections = Connections()
    app.middlewares.insert(0, connections.middleware())
    await runner.setup()
    try:
        listening = await connections.listen(runner.server, settings.host, settings.port)
        host, port = listening.sockets[0].getsockname()[:2]
        ready(f"http://{host}:{port}")
        while not stop.is_set():
            check()
            connections.close_silent()
            try:
                await asyncio.wait_for(stop.wait(), timeout=LOOK_SECONDS)
            except TimeoutError:
                continue
        stopping()
        listening.close()
    finally:
        # waits for the requests under way
        await runner.cleanup()


async def check_port(host: str, port: int) -> None:
    """Raises OSError if nothing can listen there now: it is known before a model is loaded."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    server.close()


def log_request(request: "web.Request", status: int, seconds: float, more: str = "") -> None:
    """The line of one answered request."""
    what = f"{request.method} {escaped(request.path)} {status} {seconds:.2f} s"
    print(f"{time.strftime('%H:%M:%S')} {what} {more}".rstrip(), file=sys.stderr, flush=True)


def is_key(sent: str, key: str | None) -> bool:
    """Whether a client may ask: in constant time, so that the time tells nothing of the key."""
    # aiohttp reads bytes of a header that are no UTF-8 as halves of characters.
    return key is None or hmac.compare_digest(sent.encode(errors="surrogateescape"), key.encode())


async def read_body(request: "web.Request") -> bytes:
    """Raises TimedOut for a client that does not send it."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise TimedOut(f"the body did not come within {BODY_SECONDS:g} s") from None


async def read_json(request: "web.Request") -> object:
    """The body of a request: JSON of texts that are UTF-8, of numbers that a float holds, and
    nested no deeper than MOST_DEPTH. Raises BadCall, TimedOut."""
    raw = await read_body(request)
    try:
        text = raw.decode()
        value = json.loads(text, parse_int=_whole if LONG_NUMBER.search(text) else None)
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadCall(f"the body is no JSON: {error}") from error
    # Brackets are counted first, as most bodies have few.
    if text.count("[") + text.count("{") > MOST_DEPTH and _is_deep(value):
        raise BadCall(f"the body is nested deeper than {MOST_DEPTH} lists and objects")
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = "the body holds half of a character (a lone surrogate), which is no text"
            raise BadCall(message) from error
    return value


def _whole(digits: str) -> int:
    value = int(digits)
    float(value)  # raises OverflowError
    return value


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return False
        level = inner
    return True
