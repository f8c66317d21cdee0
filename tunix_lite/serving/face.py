"""The part of both servers around a request: its key, errors as JSON, counts, a line of the log."""

import asyncio
import threading
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.listen import ServerSettings, is_key, listen, log_request

if TYPE_CHECKING:
    from aiohttp import web

# A handler returns a response, or the body of one as JSON, with or without its status.
Answer = "web.StreamResponse | dict | tuple[int, dict]"
Handler = Callable[["web.Request"], Awaitable[Answer]]
# What logs call the status of a request whose client went away.
CLIENT_LEFT = 499
# Upper bounds of the histograms of /metrics, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Seconds after which a client that was refused may ask again.
RETRY_AFTER = 1


class Histogram:
    """How many values lie below each of BUCKETS.

    Example: histogram.add(0.2) counts in all buckets from 0.25 on.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        lines = [f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*BUCKETS, "+Inf"), self.counts):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class ServerMetrics:
    """Counts of requests and tokens, and how long clients wait.

    Example: metrics.request("/v1/completions", 200, seconds=0.8, first_token=0.05).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter = Counter()
        self._first = Histogram()
        self._whole = Histogram()

    def request(
        self, path: str, status: int, seconds: float, first_token: float | None = None
    ) -> None:
        """Counts one answered request."""
        with self._lock:
            self._requests[path, status] += 1
            self._whole.add(seconds)
            if first_token is not None:
                self._first.add(first_token)

    def text(self, gauges: dict[str, float], counters: dict[str, float]) -> str:
        """All numbers. gauges and counters: those that others count, by name."""
        lines = []
        with self._lock:
            lines.append("# TYPE tunix_lite_requests_total counter")
            for (path, status), count in sorted(self._requests.items()):
                labels = f'path="{path}",status="{status}"'
                lines.append(f"tunix_lite_requests_total{{{labels}}} {count}")
            lines += self._first.lines("tunix_lite_time_to_first_token_seconds")
            lines += self._whole.lines("tunix_lite_request_seconds")
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
        self.metrics = ServerMetrics()
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

    async def run(self, ready: Callable[[str], None]) -> None:
        """Serves until SIGTERM or SIGINT, as `listen`. Raises what `check` raises."""
        await listen(self.application(), self.settings, ready, self.check, self.stop)

    async def _metrics(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        return web.Response(text=self.metrics.text(*self.numbers()))

    async def _around(self, request: "web.Request", handler: Handler) -> "web.StreamResponse":
        from aiohttp import web

        began = time.monotonic()
        status = 500
        try:
            is_open = request.path in self.open_paths
            if not is_open and not is_key(self.key_of(request), self.settings.api_key):
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
                log_request(request, status, seconds, request.get("counts", ""))
        return answer
