"""The endpoints of the Tinker SDK 0.38.0 over one trainer. What needs the devices is written into
the journal and gets the name of a future, which the client asks for."""

import asyncio
import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from tunix_lite.basics.plain_text import shown
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.face import (
    Face,
    Handler,
    ServerSettings,
    TimedOut,
    read_body,
    read_json,
)
from tunix_lite.serving.tinker import bodies, wire
from tunix_lite.serving.tinker.bodies import TinkerBody, TinkerLimits
from tunix_lite.serving.tinker.store import (
    DONE,
    WAITING,
    Adapters,
    Checkpoint,
    Model,
    Sampler,
    Store,
    TinkerSession,
    disk_trouble,
    session_of,
)
from tunix_lite.serving.tinker.work import LiveModels, Worker, WorkerFailed

if TYPE_CHECKING:
    from aiohttp import web

    from tunix_lite.training_clients.trainer import Trainer

API = "/api/v1"
# Seconds for which a question for a result waits for it. The SDK waits 45.
_POLL_SECONDS = 30.0
# Results are kept for so long, in seconds, and looked over so often.
_RESULT_SECONDS = 24 * 3600.0
_TIDY_SECONDS = 600.0
_SAVES = ("save_weights", "save_weights_for_sampler")
PROTOBUF = "application/x-protobuf"


class TinkerServer(Face):
    """The endpoints, the journal, and the thread that works."""

    open_paths = ("/healthz", f"{API}/healthz")
    unlogged = (*open_paths, f"{API}/retrieve_future", f"{API}/session_heartbeat")
    # 408 makes the SDK ask again
    statuses = {TimedOut: 408}

    def __init__(
        self, trainer: "Trainer", store: Store, limits: TinkerLimits, settings: ServerSettings
    ):
        super().__init__(settings)
        self.store = store
        self.limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        # requests whose result somebody waits for
        self._ended: dict[str, asyncio.Event] = {}
        self._began = time.time()
        self._tidied = 0.0
        self.worker = Worker(
            LiveModels(trainer, store, limits.max_models), store, self._on_end
        )

    def _on_end(self, name: str) -> None:
        # Called in the worker's thread, which must not end with the loop.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake, name)

    def _wake(self, name: str) -> None:
        if name in self._ended:
            self._ended.pop(name).set()

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        # A request may be a little larger than the SDK estimates.
        most = self.settings.max_body // 2
        config = {"fwdbwd_max_chunk_bytes_count": most, "parallel_fwdbwd_chunks": True}
        answers: dict[str, Callable[[TinkerBody], dict | None]] = {
            "client/config": lambda body: config,
            "client/dynamic_config": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": lambda body: self._end(
                self._session(body.session_id)
            ),
            "create_sampling_session": self._create_sampler,
            "get_info": self._model_info,
            "weights_info": self._weights_info,
        }
        for path in ("create_model", "optim_step", "load_weights", *_SAVES, "asample"):
            answers[path] = partial(self._enqueue, path)
        for path, answer in answers.items():
            yield "post", f"{API}/{path}", partial(self._answered, answer)
        runs = f"{API}/training_runs"
        yield "get", f"{runs}/{{id}}", self._run_info
        yield "get", f"{runs}/{{id}}/checkpoints", self._checkpoints_of
        yield (
            "delete",
            f"{runs}/{{run}}/checkpoints/{{folder}}/{{name}}",
            self._delete_checkpoint,
        )
        yield "post", f"{API}/forward_backward", self._forward_backward
        yield "post", f"{API}/retrieve_future", self._retrieve
        yield "get", f"{API}/get_server_capabilities", self._capabilities
        for path in self.open_paths:
            yield "get", path, self._health

    async def _answered(
        self, answer: Callable[[TinkerBody], dict | None], request: "web.Request"
    ) -> dict:
        body = await read_json(request) | dict(request.match_info)
        # The journal is on a disk, and other clients do not wait for it.
        return await asyncio.to_thread(answer, bodies.body_of(body)) or {}

    def key_of(self, request: "web.Request") -> str:
        return request.headers.get("X-API-Key") or super().key_of(request)

    def status_of(self, error: Exception, path: str) -> tuple[int, str]:
        if not isinstance(error, BadCall) and (trouble := disk_trouble(error)) is not None:
            return 503, f"the journal of this server cannot be written: {trouble}"
        return super().status_of(error, path)

    def error_body(self, error: Exception, status: int, message: str) -> dict:
        return {"detail": message}

    async def run(
        self, ready: Callable[[str], None], stop: asyncio.Event | None = None
    ) -> None:
        """Serves; then waits for the request that is under way. Raises WorkerFailed, sqlite3.Error
        if the journal cannot be written."""
        try:
            await super().run(ready, stop)
        finally:
            await asyncio.to_thread(self.worker.close)

    def stop(self) -> None:
        super().stop()
        # A copy, as `_wake` takes names out.
        for name in list(self._ended):
            self._wake(name)

    async def _health(self, request: "web.Request") -> tuple[int, dict]:
        try:
            # A disk that is full shows only where something is written.
            await asyncio.to_thread(self.store.settle)
        except sqlite3.Error as error:
            return 503, {"status": f"the journal cannot be written: {error}"}
        return self.health(self.worker.is_alive)

    def check(self) -> None:
        """Drops what nobody can ask for any more. Raises WorkerFailed."""
        if not self.worker.is_alive:
            raise WorkerFailed(f"the worker failed: {self.worker.failure}")
        if time.time() > self._tidied + _TIDY_SECONDS:
            self._tidied = time.time()
            self._tidy(self._tidied)

    def _tidy(self, now: float) -> None:
        self.store.forget_results(now - _RESULT_SECONDS)
        for session in self.store.all("session"):
            # While the server was away it could hear nobody.
            heard = session.heard if session.is_finished else max(session.heard, self._began)
            if heard >= now - _RESULT_SECONDS:
                continue
            # All of it goes but what has a name.
            self._end(session)
            models = [one for one in self.store.all("model") if one.session == session.id]
            for model in models:
                file = model.saved
                # first in the journal, and then on the disk: a file without a record is only waste
                model.saved = None
                self.store.put(model)
                self.store.delete(file)
            if not models:
                self.store.remove(session)

    def _end(self, session: TinkerSession) -> None:
        """Gives up what still waits of a session, and deletes its samplers without a name."""
        session.is_finished = True
        session.heard = time.time()
        self.store.put(session)
        self.worker.give_up(session.id)
        for sampler in self.store.all("sampler"):
            if sampler.session == session.id and sampler.model_path is None:
                self.store.remove(sampler)

    def _create_session(self, body: TinkerBody) -> dict:
        name = uuid.uuid4().hex
        self.store.put(TinkerSession(name))
        return {"type": "create_session", "session_id": name}

    def _session(self, name: str) -> TinkerSession:
        session = self.store.found("session", name)
        if session.is_finished:
            raise BadCall(f"the session {name} has ended", code="session_is_over")
        return session

    def _heartbeat(self, body: TinkerBody) -> dict:
        # Not written: a server that begins again waits for its clients anyway.
        self._session(body.session_id).heard = time.time()
        return {"type": "session_heartbeat"}

    def _model(self, body: TinkerBody) -> Model:
        model = self.store.found("model", body.model_id)
        self._session(model.session)
        return model

    def _check_base(self, body: TinkerBody) -> None:
        name = self.limits.model_name
        if body.base_model.removesuffix(":full") != name:
            raise BadCall(
                f"base_model={shown(body.base_model)}: this server has {name!r}", "base_model"
            )

    def _create_sampler(self, body: TinkerBody) -> dict:
        session = self._session(body.session_id)
        name = f"{session.id}:sample:{body.sampling_session_seq_id}"
        sampler = Sampler(name, session.id, model_path=body.model_path)
        if body.model_path is None:
            self._check_base(body)
        else:
            sampler.file = self.store.found("checkpoint", body.model_path).file
        self.store.put(sampler)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def _delete_checkpoint(self, request: "web.Request") -> dict:
        path = "tinker://{run}/{folder}/{name}".format(**request.match_info)
        await asyncio.to_thread(self.store.remove, self.store.found("checkpoint", path))
        return {}

    async def _forward_backward(self, request: "web.Request") -> dict:
        raw = await read_body(request)
        if request.content_type != PROTOBUF:
            raise BadCall(f"forward_backward must be {PROTOBUF}, as the SDK has it since 0.25")
        message = wire.wire_message("Request", raw)
        body = TinkerBody(model_id=message.model_id, seq_id=message.seq_id)
        return await asyncio.to_thread(self._enqueue, "forward_backward", body, raw)

    def _enqueue(self, path: str, body: TinkerBody, raw: bytes | None = None) -> dict:
        kind, owner, number = self._turn_of(path, body)
        session = session_of(owner)
        model = self.store.get("model", owner)
        next_seq = model.next_seq if model else 0
        # The result of a request is kept for a day. Nothing is done twice.
        is_new = number is None or self.store.result(f"{owner}:{number}") is None
        if is_new and number is not None and number < next_seq:
            raise BadCall(f"request {number} is over; the next one is {next_seq}", "seq_id")
        # The next request of a model always has room, as those that wait may wait for it.
        is_next = model is not None and number == next_seq
        most = self.limits.max_waiting
        if is_new and not is_next and len(self.store.waiting(session)) >= most:
            raise BadCall(
                f"{most} requests of this session wait already", code="rate_limit_exceeded"
            )
        # In one order, as its digest tells a request that is sent once more.
        raw = raw or json.dumps(vars(body), sort_keys=True, default=vars).encode()
        name = self.store.accept(owner, number, kind, raw, next_seq).id
        self.worker.wake()
        # The session may have ended meanwhile, and then nobody gives up what comes after it.
        record = self.store.get("session", session)
        if record is not None and record.is_finished:
            self.worker.give_up(session)
        if kind != "sample":
            return {"request_id": name, "model_id": owner}
        samples = [f"{name}:{i}" for i in range(body.num_samples)]
        return {"request_id": name, "model_id": None, "sample_sequence_ids": samples}

    def _turn_of(self, path: str, body: TinkerBody) -> tuple[str, str, int | None]:
        """Kind and owner of a request, and its number; None: the first that is free."""
        if path == "asample":
            body.sample_settings("")
            length = len(body.prompt_tokens)
            if length > (most := self.limits.max_length):
                raise BadCall(
                    f"prompt: {length} tokens; this model takes up to {most}", "prompt"
                )
            sampler = self.store.found("sampler", body.sampling_session_id)
            return "sample", sampler.id, body.seq_id
        if path == "load_weights":
            self.store.found("checkpoint", body.path)
        if path == "create_model" or (path == "load_weights" and body.session_id):
            owner = f"{self._session(body.session_id).id}:train:{body.model_seq_id}"
            if path == "load_weights":
                return "create_from", owner, 0
            self._check_base(body)
            return path, owner, 0
        is_named = path == "save_weights" or body.path is not None
        if path in _SAVES and is_named and not bodies.NAME.fullmatch(body.path or ""):
            raise BadCall(
                f"path={shown(body.path)}; letters, digits and ._- only, up to 128", "path"
            )
        # The number 0 is none.
        return path, self._model(body).id, body.seq_id or None

    async def _retrieve(self, request: "web.Request") -> "tuple[int, dict] | web.Response":
        """The result of a request. If there is none in time, 408 makes the SDK ask again."""
        from aiohttp import web

        name = bodies.body_of(await read_json(request)).request_id
        self._loop = asyncio.get_running_loop()
        row = self.store.result(name)
        if row is None:
            raise BadCall(f"there is no request {shown(name)}", code="not_found")
        if row[0] == WAITING and not self.is_stopping:
            # No `await` since the look, so whoever ends it meanwhile wakes this event.
            event = self._ended.setdefault(name, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout=_POLL_SECONDS)
            row = self.store.result(name) or row
        state, kind, result = row
        if state == WAITING:
            return 408, {"type": "try_again", "request_id": name, "queue_state": "active"}
        # errors are JSON for the SDK, whatever the request was
        is_protobuf = state == DONE and kind in ("forward_backward", "sample")
        content = PROTOBUF if is_protobuf else "application/json"
        return web.Response(body=result, content_type=content)

    async def _capabilities(self, request: "web.Request") -> dict:
        length = self.limits.max_length
        can = {"max_context_length": length, "trainable": True, "sampleable": True}
        names = (self.limits.model_name, f"{self.limits.model_name}:full")
        return {"supported_models": [{"model_name": name} | can for name in names]}

    def _model_info(self, body: TinkerBody) -> dict:
        model = self._model(body)
        name = self.limits.model_name
        return _lora(model.adapters) | {
            "type": "get_info",
            "model_data": {"arch": "decoder", "model_name": name, "tokenizer_id": name},
            "model_id": model.id,
            "model_name": name,
        }

    def _weights_info(self, body: TinkerBody) -> dict:
        adapters = self.store.found("checkpoint", body.tinker_path).adapters
        return _lora(adapters) | {
            "base_model": self.limits.model_name,
            "train_unembed": False,
            "train_mlp": adapters is None or adapters.train_mlp,
            "train_attn": adapters is None or adapters.train_attn,
        }

    async def _checkpoints_of(self, request: "web.Request") -> dict:
        model = self.store.found("model", request.match_info["id"])
        checkpoints = [
            {
                "checkpoint_id": "/".join(one.id.split("/")[-2:]),
                "checkpoint_type": one.kind,
                "time": _time(one),
                "tinker_path": one.id,
                "size_bytes": one.size,
                "public": False,
            }
            for one in self.store.all("checkpoint")
            if one.model == model.id
        ]
        return {"checkpoints": checkpoints}

    async def _run_info(self, request: "web.Request") -> dict:
        model = self.store.found("model", request.match_info["id"])
        return _lora(model.adapters) | {
            "training_run_id": model.id,
            "base_model": self.limits.model_name,
            "model_owner": "local",
            "last_request_time": _time(model),
        }


def _time(record: Model | Checkpoint) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat()


def _lora(adapters: Adapters | None) -> dict:
    return {"is_lora": adapters is not None, "lora_rank": adapters and adapters.rank}
