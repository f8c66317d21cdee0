"""The endpoints of the Tinker SDK 0.38.0 over one trainer.

Quick questions are answered at once. What needs the devices is written into the journal and gets
the name of a future, which the client asks for until the result is there.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunix_lite.plain_text import shown
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.listen import (
    ServerSettings,
    TimedOut,
    is_key,
    listen,
    read_body,
    read_json,
)
from tunix_lite.serving.metrics import ServerMetrics
from tunix_lite.serving.tinker import bodies, lists, wire
from tunix_lite.serving.tinker.live_models import LiveModels
from tunix_lite.serving.tinker.store import (
    DONE,
    WAITING,
    Model,
    Sampler,
    Store,
    TinkerRequest,
    TinkerSession,
    delete,
)
from tunix_lite.serving.tinker.work import Worker

if TYPE_CHECKING:
    from aiohttp import web

# Paths that need no key.
OPEN = ("/healthz", "/api/v1/healthz")
# Seconds for which a question for a result waits for it. The SDK waits 45.
POLL_SECONDS = 30.0
# Results are kept for so long, in seconds, and looked over so often.
RESULT_SECONDS = 24 * 3600.0
TIDY_SECONDS = 600.0
# Requests whose results are protobuf.
AS_PROTOBUF = ("forward_backward", "sample")
PROTOBUF = "application/x-protobuf"
OUTPUT_LAYER = (
    "this server gives the output layer no adapter of its own: train_unembed has no effect"
)


class NotFound(Exception):
    """There is nothing of this name."""


class Gone(Exception):
    """It was there, and is not any more."""


class Busy(Exception):
    """Too many requests wait."""


@dataclass(frozen=True)
class TinkerLimits:
    """What the server offers, and how much it takes on.

    Example: TinkerLimits("bundled", max_length=512).
    """

    model_name: str
    # tokens of a sequence
    max_length: int
    # requests without a result
    max_waiting: int = 4096
    # models, and samplers, that stay on the devices
    max_models: int = 16


class TinkerServer:
    """The endpoints, the journal, and the thread that works.

    Example: asyncio.run(TinkerServer(trainer, store, limits, ServerSettings()).run(print))
    """

    def __init__(self, trainer: Any, store: Store, limits: TinkerLimits, settings: ServerSettings):
        """trainer: a tunix_lite.Trainer."""
        self.store = store
        self.limits = limits
        self.settings = settings
        self.metrics = ServerMetrics()
        self.is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # futures that somebody waits for
        self._ended: dict[str, list[asyncio.Event]] = {}
        self._began = time.time()
        self._tidied = 0.0
        self.worker = Worker(LiveModels(trainer, store, limits.max_models), store, self._on_end)

    def _on_end(self, name: str) -> None:
        """In the worker's thread, which must not end with the loop."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake, name)

    def _wake(self, name: str) -> None:
        for event in self._ended.get(name, ()):
            event.set()

    # ---- start and stop

    def application(self) -> "web.Application":
        """The aiohttp application."""
        from aiohttp import web

        # aiohttp marks functions, and methods cannot be marked.
        @web.middleware
        async def answer_errors(request: web.Request, handler: Callable) -> web.StreamResponse:
            return await self._answer_errors(request, handler)

        app = web.Application(client_max_size=self.settings.max_body, middlewares=[answer_errors])
        for path, handler in self._posts().items():
            app.router.add_post(path, self._answered(handler))
        for path, find in lists.PATHS.items():
            app.router.add_get(path, self._found(find))
        app.router.add_delete(lists.CHECKPOINT, self._delete_checkpoint)
        app.router.add_post("/api/v1/forward_backward", self._forward_backward)
        app.router.add_post("/api/v1/retrieve_future", self._retrieve)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/api/v1/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.on_startup.append(self._started)
        return app

    def _posts(self) -> dict[str, Callable[[dict], dict | Awaitable[dict]]]:
        """Paths whose body is a JSON object and whose answer is another."""
        return {
            "/api/v1/client/config": self._client_config,
            "/api/v1/client/dynamic_config": lambda body: {"sample_cancel_enabled": True},
            "/api/v1/create_session": self._create_session,
            "/api/v1/session_heartbeat": self._heartbeat,
            "/api/v1/create_sampling_session": self._create_sampler,
            "/api/v1/join_sampling_session": self._join_sampler,
            "/api/v1/create_model": self._create_model,
            "/api/v1/get_info": self._get_info,
            "/api/v1/optim_step": self._optim_step,
            "/api/v1/save_weights": self._save_weights,
            "/api/v1/save_weights_for_sampler": self._save_for_sampler,
            "/api/v1/load_weights": self._load_weights,
            "/api/v1/weights_info": self._weights_info,
            "/api/v1/asample": self._sample,
            "/api/v1/cancel_future": self._cancel,
            "/api/v1/sessions/{session}/finish": self._finish,
            "/api/v1/telemetry": lambda body: {"status": "accepted"},
        }

    async def _started(self, app: "web.Application") -> None:
        self._loop = asyncio.get_running_loop()

    async def run(self, ready: Callable[[str], None]) -> None:
        """Serves until SIGTERM or SIGINT, as `listen`; then ends the request that is under way.

        Raises RuntimeError if the worker ends by itself.
        """
        try:
            await listen(self.application(), self.settings, ready, self._check, self._stopping)
        finally:
            await asyncio.to_thread(self.worker.close)

    def _check(self) -> None:
        if not self.worker.is_alive:
            raise RuntimeError(f"the worker failed: {self.worker.failure}")
        if time.time() > self._tidied + TIDY_SECONDS:
            self._tidied = time.time()
            self._tidy(self._tidied)

    def _tidy(self, now: float) -> None:
        """Drops what nobody can ask for any more, so that memory and folder stay bounded."""
        self.store.forget_results(now - RESULT_SECONDS)
        for checkpoint in self.store.all("checkpoint"):
            if checkpoint.expires is not None and checkpoint.expires < now:
                self._drop_checkpoint(checkpoint.id)
        for session in self.store.all("session"):
            # While the server was away it could hear nobody.
            heard = session.heard if session.is_finished else max(session.heard, self._began)
            if heard < now - RESULT_SECONDS:
                self._forget_session(session)

    def _forget_session(self, session: TinkerSession) -> None:
        """A session that ended long ago, or whose client is gone: only what has a name is kept."""
        session.is_finished = True
        self.store.put(session)
        self.worker.give_up(session.id)
        self._drop_samplers(session)
        mine = [model for model in self.store.all("model") if model.session == session.id]
        for model in mine:
            if model.saved is not None:
                file = self.store.path(model.saved)
                model.saved = None
                self.store.put(model)
                delete(file)
        if not mine:
            self.store.remove("session", session.id)

    def _drop_samplers(self, session: TinkerSession) -> None:
        """Those without a name, of a session that has ended."""
        for sampler in self.store.all("sampler"):
            if sampler.session == session.id and sampler.model_path is None:
                self.store.remove("sampler", sampler.id)
                if sampler.file is not None:
                    delete(self.store.path(sampler.file))

    def _stopping(self) -> None:
        self.is_stopping = True
        for name in self._ended:
            self._wake(name)

    # ---- what stands around every request

    async def _answer_errors(
        self, request: "web.Request", handler: Callable
    ) -> "web.StreamResponse":
        """Errors with the status that makes the SDK do the right thing."""
        from aiohttp import web

        began = time.monotonic()
        status = 500
        try:
            given = request.headers.get("X-API-Key", "")
            given = given or request.headers.get("Authorization", "").removeprefix("Bearer ")
            if request.path not in OPEN and not is_key(given, self.settings.api_key):
                status = 401
                return web.json_response({"detail": "the API key is wrong or missing"}, status=401)
            response = await handler(request)
            status = response.status
            return response
        except ERRORS as error:
            [status] = [number for kind, number in STATUS.items() if isinstance(error, kind)][:1]
            return web.json_response({"detail": str(error)}, status=status)
        except web.HTTPException as error:
            status = error.status
            detail = f"{error.status} {error.reason}: {request.path}"
            return web.json_response({"detail": detail}, status=status)
        finally:
            path = request.match_info.route.resource
            name = path.canonical if path is not None else "other"
            self.metrics.request(name, status, time.monotonic() - began)

    def _answered(self, answer: Callable) -> Callable:
        """A handler of requests out of a function from a JSON object to another."""
        from aiohttp import web

        async def handler(request: "web.Request") -> "web.Response":
            body = await read_json(request)
            if not isinstance(body, dict):
                raise BadCall("the body is not a JSON object")
            body |= {f"path_{name}": value for name, value in request.match_info.items()}
            # The journal is on a disk, and other clients do not wait for it.
            return web.json_response(await asyncio.to_thread(answer, body))

        return handler

    def _found(self, find: Callable) -> Callable:
        from aiohttp import web

        async def handler(request: "web.Request") -> "web.Response":
            found = find(self.store, self.limits, dict(request.match_info) | dict(request.query))
            if found is None:
                raise NotFound(f"there is no {shown(request.path)}")
            return web.json_response(found)

        return handler

    async def _health(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        is_well = self.worker.is_alive and not self.is_stopping
        status = "ok" if is_well else "stopping"
        return web.json_response({"status": status}, status=200 if is_well else 503)

    async def _metrics(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        gauges = {
            "tinker_requests_waiting": self.worker.num_waiting,
            "tinker_models": len(self.store.all("model")),
            "tinker_sessions": sum(not one.is_finished for one in self.store.all("session")),
        }
        counters = {"tinker_requests_done_total": self.worker.done}
        return web.Response(text=self.metrics.text(gauges, counters))

    # ---- sessions

    def _client_config(self, body: dict) -> dict:
        # A request may be a little larger than the SDK estimates.
        return {
            "fwdbwd_max_chunk_bytes_count": self.settings.max_body // 2,
            "parallel_fwdbwd_chunks": True,
            "sample_join_sampling_session": True,
        }

    def _create_session(self, body: dict) -> dict:
        session = TinkerSession(
            uuid.uuid4().hex,
            metadata=bodies.metadata_field(body),
            display_name=bodies.name_field(body, "display_name"),
        )
        self.store.put(session)
        answer = {"type": "create_session", "session_id": session.id}
        return answer | {"info_message": OUTPUT_LAYER}

    def _session(self, name: str) -> TinkerSession:
        """Raises NotFound, Gone if it has ended."""
        session = self.store.get("session", name)
        if session is None:
            raise NotFound(f"there is no session {shown(name)}")
        if session.is_finished:
            raise Gone(f"the session {name} has ended")
        return session

    def _heartbeat(self, body: dict) -> dict:
        # Not written: a server that begins again waits for its clients anyway.
        self._session(bodies.text_field(body, "session_id")).heard = time.time()
        return {"type": "session_heartbeat"}

    def _finish(self, body: dict) -> dict:
        """The session ends: its models train no more, and samplers without a name are deleted."""
        session = self._session(body["path_session"])
        session.is_finished = True
        session.heard = time.time()
        self.store.put(session)
        self._drop_samplers(session)
        return {}

    # ---- samplers

    def _create_sampler(self, body: dict) -> dict:
        session = self._session(bodies.text_field(body, "session_id"))
        number = bodies.whole_field(body, "sampling_session_seq_id")
        sampler = Sampler(f"{session.id}:sample:{number}", session.id)
        if body.get("model_path") is not None:
            path = bodies.text_field(body, "model_path")
            checkpoint = self.store.get("checkpoint", path)
            if checkpoint is None:
                raise NotFound(f"there is no checkpoint {shown(path)}")
            sampler.file = checkpoint.file
            sampler.model_path = path
        else:
            self._check_base(body)
        self.store.put(sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _check_base(self, body: dict) -> None:
        name = bodies.text_field(body, "base_model")
        if name.removesuffix(":full") != self.limits.model_name:
            have = self.limits.model_name
            raise BadCall(f"base_model={shown(name)}: this server has {have!r}", "base_model")

    def _sampler(self, body: dict) -> Sampler:
        name = bodies.text_field(body, "sampling_session_id")
        sampler = self.store.get("sampler", name)
        if sampler is None:
            raise NotFound(f"there is no sampling session {shown(name)}")
        return sampler

    def _join_sampler(self, body: dict) -> dict:
        with self.store.transaction():
            sampler = self._sampler(body)
            sampler.clones += 1
            self.store.put(sampler)
        return {"type": "join_sampling_session", "client_counter": sampler.clones}

    def _sample(self, body: dict) -> dict:
        bodies.check_sample(body, self.limits.max_length)
        sampler = self._sampler(body)
        number = bodies.whole_field(body, "seq_id")
        answer = self._accept(sampler.id, number, "sample", body)
        count = body.get("num_samples", 1)
        name = answer["request_id"]
        return answer | {"sample_sequence_ids": [f"{name}:{i}" for i in range(count)]}

    # ---- models

    def _create_model(self, body: dict) -> dict:
        session = self._session(bodies.text_field(body, "session_id"))
        self._check_base(body)
        kind = bodies.object_field(body, "optimizer_config").get("type", "adamw")
        if kind != "adamw":
            raise BadCall(f"optimizer {shown(kind)} is not supported; adamw is", "optimizer_config")
        bodies.metadata_field(body)
        bodies.adapters(body)
        name = f"{session.id}:train:{bodies.whole_field(body, 'model_seq_id')}"
        return self._accept(name, 0, "create_model", body)

    def _model(self, body: dict) -> Model:
        return self._model_named(bodies.text_field(body, "model_id"))

    def _model_named(self, name: str) -> Model:
        """Raises NotFound, Gone if its session has ended."""
        model = self.store.get("model", name)
        if model is None:
            raise NotFound(f"there is no model {shown(name)}")
        self._session(model.session)
        return model

    def _get_info(self, body: dict) -> dict:
        model = self._model(body)
        name = self.limits.model_name
        return {
            "type": "get_info",
            "model_data": {"arch": "decoder", "model_name": name, "tokenizer_id": name},
            "model_id": model.id,
            "is_lora": model.adapters is not None,
            "lora_rank": lists.rank_of(model),
            "model_name": name,
        }

    def _number(self, body: dict, model: Model) -> int:
        """The number of a request; without one it is the next."""
        given = body.get("seq_id")
        return model.next_seq if given is None else bodies.whole_field(body, "seq_id", 1)

    def _optim_step(self, body: dict) -> dict:
        bodies.adam(body)
        return self._of_model(body, "optim_step")

    def _save_weights(self, body: dict) -> dict:
        bodies.check_checkpoint(body)
        return self._of_model(body, "save_weights")

    def _save_for_sampler(self, body: dict) -> dict:
        if body.get("path") is not None:
            bodies.check_checkpoint(body)
        else:
            bodies.whole_field(body, "sampling_session_seq_id")
        if body.get("kind", "snapshot") != "snapshot":
            raise BadCall("kind='inflight' is not supported; 'snapshot' is", "kind")
        return self._of_model(body, "save_weights_for_sampler")

    def _load_weights(self, body: dict) -> dict:
        path = bodies.text_field(body, "path")
        if self.store.get("checkpoint", path) is None:
            raise NotFound(f"there is no checkpoint {shown(path)}")
        if body.get("session_id") is None:
            return self._of_model(body, "load_weights")
        session = self._session(bodies.text_field(body, "session_id"))
        bodies.metadata_field(body)
        name = f"{session.id}:train:{bodies.whole_field(body, 'model_seq_id')}"
        return self._accept(name, 0, "create_from", body)

    def _of_model(self, body: dict, kind: str) -> dict:
        model = self._model(body)
        return self._accept(model.id, self._number(body, model), kind, body)

    async def _forward_backward(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        raw = await read_body(request)
        if request.content_type != PROTOBUF:
            raise BadCall(f"forward_backward must be {PROTOBUF}, as the SDK has it since 0.25")
        return web.json_response(await asyncio.to_thread(self._accept_data, raw))

    def _accept_data(self, raw: bytes) -> dict:
        try:
            asked = wire.read_forward_backward(raw)
        except wire.WireError as error:
            raise BadCall(str(error)) from error
        model = self._model_named(asked.model_id)
        number = asked.seq_id or model.next_seq
        return self._accept(model.id, number, "forward_backward", raw)

    def _weights_info(self, body: dict) -> dict:
        checkpoint = self.store.get("checkpoint", bodies.text_field(body, "tinker_path"))
        if checkpoint is None:
            raise NotFound(f"there is no checkpoint {shown(body['tinker_path'])}")
        return lists.weights_info(checkpoint, self.limits)

    async def _delete_checkpoint(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        path = lists.checkpoint_path(dict(request.match_info))
        if self.store.get("checkpoint", path) is None:
            raise NotFound(f"there is no checkpoint {shown(path)}")
        await asyncio.to_thread(self._drop_checkpoint, path)
        return web.json_response({})

    def _drop_checkpoint(self, path: str) -> None:
        checkpoint = self.store.get("checkpoint", path)
        self.store.remove("checkpoint", path)
        delete(self.store.path(checkpoint.file))

    # ---- futures

    def _accept(self, owner: str, number: int, kind: str, body: dict | bytes) -> dict:
        """Writes a request into the journal, and then says its name. Raises Busy."""
        if self.worker.num_waiting >= self.limits.max_waiting:
            raise Busy(f"{self.limits.max_waiting} requests wait already")
        model = self.store.get("model", owner)
        is_over = model is not None and number < model.next_seq
        # The result of a request is kept for a day. Nothing is done twice.
        if is_over and self.store.result(f"{owner}:{number}") is None:
            message = f"request {number} is over; the next one is {model.next_seq}"
            raise BadCall(message, "seq_id")
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        request, is_new = self.store.accept(owner, number, kind, raw)
        if is_new:
            self.worker.submit(request)
        elif request.kind != kind:
            raise BadCall(f"request {number} of {owner} was {request.kind}, not {kind}", "seq_id")
        return self._future(request)

    def _future(self, request: TinkerRequest) -> dict:
        model = None if request.kind == "sample" else request.owner
        return {"request_id": request.id, "model_id": model}

    def _cancel(self, body: dict) -> dict:
        self.worker.cancel(bodies.text_field(body, "request_id"))
        return {}

    async def _retrieve(self, request: "web.Request") -> "web.Response":
        """The result of a future. If there is none in time, 408 makes the SDK ask again."""
        from aiohttp import web

        body = await read_json(request)
        name = bodies.text_field(body if isinstance(body, dict) else {}, "request_id")
        found = await self._result(name)
        if found is None:
            waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(waiting, status=408)
        state, kind, result = found
        is_protobuf = state == DONE and kind in AS_PROTOBUF
        return web.Response(
            body=result, content_type=PROTOBUF if is_protobuf else "application/json"
        )

    async def _result(self, name: str) -> tuple[int, str, bytes | None] | None:
        """State, kind and result; None if there is none yet. Raises NotFound."""
        event = asyncio.Event()
        waiters = self._ended.setdefault(name, [])
        waiters.append(event)
        try:
            found = self.store.result(name)
            if found is None:
                raise NotFound(f"there is no request {shown(name)}")
            if found[0] == WAITING and not self.is_stopping:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), timeout=POLL_SECONDS)
                found = self.store.result(name)
            return None if found is None or found[0] == WAITING else found
        finally:
            waiters.remove(event)
            if not waiters:
                del self._ended[name]


STATUS = {
    BadCall: 400,
    NotFound: 404,
    TimedOut: 408,
    Gone: 410,
    Busy: 429,
}
ERRORS = tuple(STATUS)
