"""The part of both servers around a request: listening, its key and body, errors as JSON, a line of
the log."""

import asyncio
import contextlib
import hmac
import json
import resource
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunix_lite.basics.plain_text import escaped
from tunix_lite.basics.untrusted import parse_object
from tunix_lite.serving.bad_call import BadCall

if TYPE_CHECKING:
    from aiohttp import web

# A handler returns a response, or the body of one as JSON, with or without its status.
_Answer = "web.StreamResponse | dict | tuple[int, dict]"
Handler = Callable[["web.Request"], Awaitable[_Answer]]
# What logs call the status of a request whose client went away.
_CLIENT_LEFT = 499
# Seconds within which a client must have sent its body.
_BODY_SECONDS = 30.0
# Seconds between two looks at whether the server should end.
_LOOK_SECONDS = 0.5
# Open files that the server asks the system for: a connection costs one.
_OPEN_FILES = 8192
# Seconds after which a client that was refused may ask again.
_RETRY_AFTER = 1


@dataclass(frozen=True)
class ServerSettings:
    """How the server listens, and what it lets clients do."""

    host: str = "127.0.0.1"
    # 0 takes a free one
    port: int = 8000
    api_key: str | None = None
    max_body: int = 2**20  # bytes
    request_seconds: float = 600.0  # seconds from a request to its last token
    stop_seconds: float = 30.0  # seconds that requests under way may take after SIGTERM
    log_requests: bool = False  # a line on stderr for each request

    async def check_port(self) -> None:
        """Raises OSError if nothing can listen there now: it is known before a model is loaded."""
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, self.host, self.port)).close()


class TimedOut(Exception):
    """A request took too long."""


class Face:
    """The server of one protocol. A subclass says what its paths and errors are."""

    open_paths: tuple[str, ...] = ("/healthz",)  # paths that need no key
    # paths that are asked for all the time, so that a line for each would hide the others
    unlogged: tuple[str, ...] = ("/healthz",)
    # errors whose message is for the client, and the status of the answer; besides BadCall
    statuses: dict[type[Exception], int] = {}

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.is_stopping = False

    def routes(self) -> Iterable[tuple[str, str, Handler]]:
        """(get, post or delete; path; handler)."""
        raise NotImplementedError

    def error_body(self, error: Exception, status: int, message: str) -> dict:
        """An error as clients of the protocol read it."""
        raise NotImplementedError

    def check(self) -> None:
        """Called now and then; what it raises ends the server."""

    def stop(self) -> None:
        """Called when a signal came."""
        self.is_stopping = True

    def health(self, is_alive: bool) -> tuple[int, dict]:
        """Whether it takes requests. is_alive: whether what answers them does."""
        is_well = is_alive and not self.is_stopping
        if is_well:
            return (200, {"status": "ok"})
        return (503, {"status": "stopping"})

    def key_of(self, request: "web.Request") -> str:
        """The key that the client sent; "" if none."""
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    def application(self) -> "web.Application":
        """The aiohttp application."""
        from aiohttp import web

        # aiohttp marks functions, and methods cannot be marked.
        around = web.middleware(lambda request, handler: self._around(request, handler))
        app = web.Application(client_max_size=self.settings.max_body, middlewares=[around])
        for method, path, handler in self.routes():
            getattr(app.router, f"add_{method}")(path, handler)
        return app

    async def run(
        self, ready: Callable[[str], None], stop: asyncio.Event | None = None
    ) -> None:
        """Serves until SIGTERM or SIGINT, or until `stop` is set. ready(address) is called once it
        listens."""
        from aiohttp import web

        if stop is None:
            stop = asyncio.Event()
            for name in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(name, stop.set)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
            most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        # The request of a client that goes away is cancelled.
        runner = web.AppRunner(
            self.application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=self.settings.stop_seconds,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self.settings.host, self.settings.port).start()
            host, port = runner.addresses[0][:2]
            ready(f"http://{host}:{port}")
            while not stop.is_set():
                self.check()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), timeout=_LOOK_SECONDS)
            self.stop()
        finally:
            # takes no more requests, and waits for those under way
            await runner.cleanup()

    async def _around(self, request: "web.Request", handler: Handler) -> "web.StreamResponse":
        from aiohttp import web

        began = time.monotonic()
        status = 500
        key = self.settings.api_key
        try:
            if key is not None and request.path not in self.open_paths:
                # In constant time, so that the time tells nothing of the key. aiohttp reads bytes
                # of a header that are no UTF-8 as halves of characters.
                sent = self.key_of(request).encode(errors="surrogateescape")
                if not hmac.compare_digest(sent, key.encode()):
                    raise BadCall("the API key is wrong or missing", code="invalid_api_key")
            answer = await handler(request)
            if isinstance(answer, dict):
                answer = 200, answer
            if isinstance(answer, tuple):
                status, body = answer
                answer = web.json_response(body, status=status)
            status = answer.status
        except asyncio.CancelledError:
            status = _CLIENT_LEFT
            raise
        except Exception as error:
            status, message = self.status_of(error, request.path)
            body = self.error_body(error, status, message)
            headers = {"Retry-After": str(_RETRY_AFTER)} if status == 429 else None
            answer = web.json_response(body, status=status, headers=headers)
        finally:
            if self.settings.log_requests and request.path not in self.unlogged:
                seconds = time.monotonic() - began
                what = f"{request.method} {escaped(request.path)} {status} {seconds:.2f} s"
                line = f"{time.strftime('%H:%M:%S')} {what} {request.get('counts', '')}"
                print(line.rstrip(), file=sys.stderr, flush=True)
        return answer

    def status_of(self, error: Exception, path: str) -> tuple[int, str]:
        """Status and message of an answer. An error that nobody expects has a traceback."""
        from aiohttp import web

        if isinstance(error, web.HTTPException):
            return error.status, f"{error.status} {error.reason}: {path}"
        if isinstance(error, BadCall):
            return error.status, str(error)
        for kind, status in self.statuses.items():
            if isinstance(error, kind):
                return status, str(error)
        if isinstance(error, ConnectionResetError):
            # nobody reads this answer
            return _CLIENT_LEFT, ""
        traceback.print_exc()
        return 500, "the server failed; its log says why"


async def read_body(request: "web.Request") -> bytes:
    """Raises TimedOut for a client that does not send it."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise TimedOut(f"the body did not come within {_BODY_SECONDS:g} s") from None


async def read_json(request: "web.Request") -> dict:
    """The body of a request: a JSON object whose texts are UTF-8. Raises BadCall, TimedOut."""
    raw = await read_body(request)
    try:
        value = parse_object(raw.decode(), "the body")
        # half of a character (a lone surrogate) is no text
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise BadCall(str(error)) from error
    return value
