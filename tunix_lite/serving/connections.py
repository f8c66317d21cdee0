"""The connections of a server: how many there are, and how long one may be silent.

A connection costs an open file before anybody has shown a key, so the server bounds both. aiohttp
times neither the head of a request nor a connection that sends nothing.
"""

import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

# Seconds that a connection may be open without a whole request: a new one, and one that was
# answered.
SILENT_SECONDS = 60.0
# Connections at once, at most. With few open files there are fewer.
MOST_CONNECTIONS = 4096
# Seconds between two lines about connections that could not be taken.
SAY_SECONDS = 60.0


class Connections:
    """All connections of one server.

    When there is no room for another one, the one that has been silent for longest is closed. If
    all of them have a request under way, the new one is closed.

    Example: connections = Connections(); await connections.listen(runner.server, "127.0.0.1", 0).
    """

    def __init__(self) -> None:
        files = _room_for_files()
        self.most = min(MOST_CONNECTIONS, files // 2)
        # Connections that the kernel holds are taken all at once, before any can be closed.
        self.backlog = max(1, min(128, files // 16))
        # aiohttp's protocol -> its transport, and since when it is silent; the oldest first
        self._silent: dict[asyncio.Protocol, tuple[asyncio.Transport, float]] = {}
        self._busy: dict[asyncio.Protocol, asyncio.Transport] = {}
        self._said = -SAY_SECONDS

    async def listen(
        self, server: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> asyncio.Server:
        """server: makes aiohttp's protocol of a new connection."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        return await loop.create_server(
            lambda: _Connection(self, server()), host, port, backlog=self.backlog
        )

    def middleware(self) -> Callable:
        """The application calls it first: it marks connections with a request under way."""
        from aiohttp import web

        @web.middleware
        async def mark(
            request: "web.Request", handler: "Callable[[web.Request], Awaitable]"
        ) -> "web.StreamResponse":
            protocol = request.protocol
            transport, _ = self._silent.pop(protocol, (request.transport, 0.0))
            self._busy[protocol] = transport
            try:
                return await handler(request)
            finally:
                if self._busy.pop(protocol, None) is not None:
                    self._silent[protocol] = transport, time.monotonic()

        return mark

    def close_silent(self) -> None:
        """Closes the connections that have been silent for too long."""
        before = time.monotonic() - SILENT_SECONDS
        for transport, since in list(self._silent.values()):
            if since > before:
                break
            transport.abort()

    def opened(self, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._silent[protocol] = transport, time.monotonic()
        if len(self._silent) + len(self._busy) > self.most:
            oldest = next(iter(self._silent))
            self._silent.pop(oldest)[0].abort()
            self._say(f"{self.most} connections are open: the one that was silent for longest ends")

    def closed(self, protocol: asyncio.Protocol) -> None:
        self._silent.pop(protocol, None)
        self._busy.pop(protocol, None)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        # asyncio reports every connection that it could not take, with a traceback.
        if "accept" in context.get("message", ""):
            self._say(f"a connection could not be taken: {context.get('exception')}")
        else:
            loop.default_exception_handler(context)

    def _say(self, line: str) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            print(line, file=sys.stderr, flush=True)


class _Connection(asyncio.Protocol):
    """aiohttp's protocol of one connection, whose beginning and end are counted."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol):
        self.connections = connections
        self.inner = inner
        self.data_received = inner.data_received
        self.eof_received = inner.eof_received
        self.pause_writing = inner.pause_writing
        self.resume_writing = inner.resume_writing

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.inner.connection_made(transport)
        self.connections.opened(self.inner, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.connections.closed(self.inner)
        self.inner.connection_lost(error)


def _room_for_files() -> int:
    """Files that this process may open, after asking for enough of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
