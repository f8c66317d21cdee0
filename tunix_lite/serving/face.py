"""The part of both servers around a request: listening, its key and body, errors as JSON, counts, a
line of the log."""

import asyncio
import contextlib
import hmac
import json
import resource
import signal
import sys
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunix_lite.files.plain_text import escaped
from tunix_lite.files.untrusted import parse_object
from tunix_lite.serving.bad_call import BadCall

if TYPE_CHECKING:
    from aiohttp import web

# A handler returns a response, or the body of one as JSON, with or without its status.
Answer = "web.StreamResponse | dict | tuple[int, dict]"
Handler = Callable[["web.Request"], Awaitable[Answer]]
# What logs call the status of a request whose client went away.
CLIENT_LEFT = 499
# Seconds within which a client must have sent its body.
BODY_SECONDS = 30.0
# Seconds between two looks at whether the server should end.
LOOK_SECONDS = 0.5
# Open files that the server asks the system for: a connection costs one.
OPEN_FILES = 8192
# Seconds after which a client that was refused may ask again.
RETRY_AFTER = 1
# Upper bounds of the histograms of /metrics, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FIRST_TOKEN = "tunix_lite_time_to_first_token_seconds"
WHOLE_REQUEST = "tunix_lite_request_seconds"


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


class _ServerMetrics:
    """Counts of requests, and how long clients wait.

    Example: metrics.request("/v1/completions", 200, seconds=0.8, first_token=0.05).
    """

    def __init__(self) -> None:
        self._requests: Counter = Counter()
        # of each histogram: counts of values between two bounds, and their sum
        self._counts = {name: [0] * (len(BUCKETS) + 1) for name in (FIRST_TOKEN, WHOLE_REQUEST)}
        self._sums = Counter({FIRST_TOKEN: 0.0, WHOLE_REQUEST: 0.0})

    def request(
        self, path: str, status: int, seconds: float, first_token: float | None = None
    ) -> None:
        """Counts one answered request."""
        self._requests[path, status] += 1
        for name, value in ((WHOLE_REQUEST, seconds), (FIRST_TOKEN, first_token)):
            if value is not None:
                self._counts[name][bisect_left(BUCKETS, value)] += 1
                self._sums[name] += value

    def text(self, gauges: dict[str, float], counters: dict[str, float]) -> str:
        """All numbers as Prometheus reads them. gauges and counters: those that others count."""
        lines = ["# TYPE tunix_lite_requests_total counter"]
        for (path, status), count in sorted(self._requests.items()):
            labels = f'path="{path}",status="{status}"'
            lines.append(f"tunix_lite_requests_total{{{labels}}} {count}")
        for name, counts in self._counts.items():
            lines.append(f"# TYPE {name} histogram")
            for i, bound in enumerate((*BUCKETS, "+Inf"), start=1):
                lines.append(f'{name}_bucket{{le="{bound}"}} {sum(counts[:i])}')
            lines += [f"{name}_sum {self._sums[name]:.6f}", f"{name}_count {sum(counts)}"]
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines += [f"# TYPE tunix_lite_{name} {kind}", f"tunix_lite_{name} {value:g}"]
        return "\n".join(lines) + "\n"


class Face:
    """The server of one protocol. A subclass says what its paths, errors and numbers are.

    Example: asyncio.run(Server(engine, tokenizer, limits, ServerSettings()).run(print))
    """

    # paths that need no key
    open_paths: tuple[str, ...] = ("/healthz",)
    # paths that are asked for all the time, so that a line for each would hide the others
    unlogged: tuple[str, ...] = ("/healthz", "/metrics")
    # errors besides BadCall whose message is for the client, and the status of the answer
    statuses: dict[type[Exception], int] = {}

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.metrics = _ServerMetrics()
        self.is_stopping = False

    def routes(self) -> Iterable[tuple[str, str, Handler]]:
        """(get, post or delete; path; handler)."""
        raise NotImplementedError

    def error_body(self, error: Exception, status: int, message: str) -> dict:
        """An error as clients of the protocol read it."""
        raise NotImplementedError

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Gauges and counters for /metrics."""
        raise NotImplementedError

    def check(self) -> None:
        """Called now and then; what it raises ends the server."""

    def stop(self) -> None:
        """Called when a signal came."""
        self.is_stopping = True

    def key_of(self, request: "web.Request") -> str:
        """The key that the client sent; "" if none."""
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    def application(self) -> "web.Application":
        """The aiohttp application."""
        from aiohttp import web

        # aiohttp marks functions, and methods cannot be marked.
        around = web.middleware(lambda request, handler: self._around(request, handler))
        app = web.Application(client_max_size=self.settings.max_body, middlewares=[around])
        app.router.add_get("/metrics", self._metrics)
        for method, path, handler in self.routes():
            getattr(app.router, f"add_{method}")(path, handler)
        return app

    async def run(self, ready: Callable[[str], None], stop: asyncio.Event | None = None) -> None:
        """Serves until SIGTERM or SIGINT, or until `stop` is set; requests under way then have
        stop_seconds to end. ready(address) is called once it listens. Raises what `check` raises.
        """
        from aiohttp import web

        if stop is None:
            stop = asyncio.Event()
            for name in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(name, stop.set)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
            most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
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
                    await asyncio.wait_for(stop.wait(), timeout=LOOK_SECONDS)
            self.stop()
        finally:
            # takes no more requests, and waits for those under way
            await runner.cleanup()

    async def _metrics(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        return web.Response(text=self.metrics.text(*self.numbers()))

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
            status = CLIENT_LEFT
            raise
        except Exception as error:
            status, message = self.status_of(error, request.path)
            body = self.error_body(error, status, message)
            headers = {"Retry-After": str(RETRY_AFTER)} if status == 429 else None
            answer = web.json_response(body, status=status, headers=headers)
        finally:
            path = request.match_info.route.resource
            name = path.canonical if path is not None else "other"
            seconds = time.monotonic() - began
            self.metrics.request(name, status, seconds, request.get("first_token"))
            if self.settings.log_requests and request.path not in self.unlogged:
                what = f"{request.method} {escaped(request.path)} {status} {seconds:.2f} s"
                line = f"{time.strftime('%H:%M:%S')} {what} {request.get('counts', '')}".rstrip()
                print(line, file=sys.stderr, flush=True)
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
            return CLIENT_LEFT, ""
        traceback.print_exc()
        return 500, "the server failed; its log says why"


async def check_port(host: str, port: int) -> None:
    """Raises OSError if nothing can listen there now: it is known before a model is loaded."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    server.close()


async def read_body(request: "web.Request") -> bytes:
    """Raises TimedOut for a client that does not send it."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise TimedOut(f"the body did not come within {BODY_SECONDS:g} s") from None


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
