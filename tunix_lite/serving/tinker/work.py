"""One thread that owns the devices and does what clients ask for, in fair turns.

A model's requests are done in the order of their numbers. Sessions take turns: a client with a
thousand requests delays another one by no more than one of them. Sample requests for the same
weights are drawn together.
"""

import json
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from tunix_lite.plain_text import visible
from tunix_lite.serving.tinker import bodies, wire
from tunix_lite.serving.tinker.live_models import LiveModels
from tunix_lite.serving.tinker.store import (
    DONE,
    FAILED,
    Checkpoint,
    Model,
    Sampler,
    Store,
    TinkerRequest,
    delete,
    size_of,
)

# Sequences that are drawn in one turn, at most.
SEQUENCES_PER_TURN = 256
# Times that a request may end with the end of the server before it is given up.
MOST_ATTEMPTS = 3


class Waiting:
    """The requests that have no result: whose turn is next.

    Example: waiting.add(request, session="4f2a"); waiting.take(next_seq) is [request].
    """

    def __init__(self) -> None:
        # session -> owner -> number of the request -> request; the first session is next
        self.sessions: OrderedDict[str, dict[str, dict[int, TinkerRequest]]] = OrderedDict()
        self.count = 0

    def add(self, request: TinkerRequest, session: str) -> None:
        owners = self.sessions.setdefault(session, {})
        owners.setdefault(request.owner, {})[request.seq] = request
        self.count += 1

    def remove(self, name: str) -> TinkerRequest | None:
        """Takes out one request, wherever it stands; None if it does not wait."""
        for session, owners in self.sessions.items():
            for owner, requests in owners.items():
                for request in requests.values():
                    if request.id == name:
                        self._take(session, owner, [request])
                        return request
        return None

    def remove_all(self, session: str) -> list[TinkerRequest]:
        """Takes out all requests of a session."""
        owners = self.sessions.pop(session, {})
        requests = [request for waiting in owners.values() for request in waiting.values()]
        self.count -= len(requests)
        return requests

    def take(self, next_seq: Callable[[str], int]) -> list[TinkerRequest]:
        """The next turn: one request of a model, or sample requests of one sampler; [] if nothing
        can be done. next_seq: the number that a model's next request must have."""
        for session, owners in list(self.sessions.items()):
            ready = []
            for owner, requests in owners.items():
                first = min(requests.values(), key=lambda request: request.arrival)
                if first.kind != "sample":
                    first = requests.get(next_seq(owner))
                if first is not None:
                    ready.append(first)
            if ready:
                self.sessions.move_to_end(session)
                chosen = min(ready, key=lambda request: request.arrival)
                taken = [chosen]
                if chosen.kind == "sample":
                    same = owners[chosen.owner].values()
                    taken = sorted(same, key=lambda request: request.arrival)
                    taken = taken[:SEQUENCES_PER_TURN]
                self._take(session, chosen.owner, taken)
                return taken
        return []

    def _take(self, session: str, owner: str, requests: list[TinkerRequest]) -> None:
        owners = self.sessions[session]
        for request in requests:
            del owners[owner][request.seq]
            self.count -= 1
        if not owners[owner]:
            del owners[owner]
        if not owners:
            del self.sessions[session]


class Worker:
    """The thread. Other threads hand it requests that are in the journal.

    Example: worker = Worker(live, store, print); worker.submit(request, "4f2a"); worker.close().
    """

    def __init__(self, live: LiveModels, store: Store, on_end: Callable[[str], None]):
        """on_end: called in the thread with the name of each request that has a result."""
        self.live = live
        self.store = store
        self.on_end = on_end
        self.failure: BaseException | None = None
        self.done = 0
        self._waiting = Waiting()
        self._lock = threading.Condition()
        self._is_closing = False
        for request in store.waiting():
            self._waiting.add(request, session_of(request.owner))
        self._thread = threading.Thread(target=self._run, name="tinker", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    @property
    def num_waiting(self) -> int:
        return self._waiting.count

    def submit(self, request: TinkerRequest) -> None:
        with self._lock:
            self._waiting.add(request, session_of(request.owner))
            self._lock.notify()

    def cancel(self, name: str) -> None:
        """Gives up a sample request that nobody has begun."""
        with self._lock:
            found = self._waiting.remove(name) if ":sample:" in name else None
        if found is not None:
            self.store.end(found, FAILED, failure("the client cancelled it", "user"))
            self.on_end(name)

    def give_up(self, session: str) -> None:
        """Ends what still waits of a session: nobody will ask for it."""
        with self._lock:
            requests = self._waiting.remove_all(session)
        for request in requests:
            self.store.end(request, FAILED, failure("the session has ended", "user"))
            self.on_end(request.id)

    def close(self) -> None:
        """Ends after the request that is under way; the others stay in the journal."""
        with self._lock:
            self._is_closing = True
            self._lock.notify()
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    while not (taken := self._next()) and not self._is_closing:
                        self._lock.wait()
                    if self._is_closing:
                        return
                self._turn(taken)
        except BaseException as error:
            self.failure = error
            traceback.print_exc()

    def _next(self) -> list[TinkerRequest]:
        return [] if self._is_closing else self._waiting.take(self._next_seq)

    def _next_seq(self, owner: str) -> int:
        model = self.store.get("model", owner)
        return 0 if model is None else model.next_seq

    def _turn(self, requests: list[TinkerRequest]) -> None:
        """Does these requests and writes their results."""
        tried = [one for one in requests if self.store.begin(one) <= MOST_ATTEMPTS]
        for request in requests:
            if request not in tried:
                self._fail(request, "the server ended each time that it did this", "server")
        if tried and tried[0].kind == "sample":
            self._sample(tried)
        elif tried:
            self._train(tried[0])
        self.done += len(requests)
        for request in requests:
            self.on_end(request.id)

    def _train(self, request: TinkerRequest) -> None:
        try:
            OPERATIONS[request.kind](self, request, self.store.body(request))
        except ValueError as error:
            self._fail(request, str(error), "user")
        except Exception as error:
            traceback.print_exc()
            # The devices may hold half of it; what the journal holds is whole.
            self.live.forget(request.owner)
            self._fail(request, f"{type(error).__name__}: {error}", "server")

    def _fail(self, request: TinkerRequest, message: str, category: str) -> None:
        with self.store.transaction():
            model = self.store.get("model", request.owner)
            if model is not None:
                model.next_seq = request.seq + 1
                model.has_failed |= request.kind == "forward_backward"
                self.store.put(model)
            self.store.end(request, FAILED, failure(message, category))
        line = f"{request.id} {request.kind}: {message}"
        print(visible(line), file=sys.stderr, flush=True)

    def _end(
        self,
        request: TinkerRequest,
        model: Model,
        result: bytes | dict,
        made: Checkpoint | Sampler | None = None,
    ) -> None:
        """The result, how far the model is, and what the request made: all of it, or nothing."""
        raw = result if isinstance(result, bytes) else json.dumps(result).encode()
        with self.store.transaction():
            model.next_seq = request.seq + 1
            self.store.put(model)
            if made is not None:
                self.store.put(made)
            self.store.end(request, DONE, raw)
            self.store.forget_bodies(model.id, model.saved_seq)

    # ---- operations: each ends its request, or raises

    def _create(self, request: TinkerRequest, body: bytes) -> None:
        given = json.loads(body)
        model = made_model(request.owner, given)
        self.live.create(model)
        self._end(request, model, {"model_id": model.id, "type": "create_model"})

    def _create_from(self, request: TinkerRequest, body: bytes) -> None:
        """A new model that begins with the weights of a checkpoint."""
        given = json.loads(body)
        checkpoint = self.live.checkpoint(given["path"])
        model = Model(
            request.owner,
            session_of(request.owner),
            adapters=checkpoint.adapters,
            metadata=given.get("user_metadata") or {},
        )
        self._load_into(request, model, checkpoint, bool(given.get("optimizer")))

    def _load(self, request: TinkerRequest, body: bytes) -> None:
        given = json.loads(body)
        checkpoint = self.live.checkpoint(given["path"])
        model = self.store.get("model", request.owner)
        self._load_into(request, model, checkpoint, bool(given.get("optimizer")))

    def _load_into(
        self, request: TinkerRequest, model: Model, checkpoint: Checkpoint, optimizer: bool
    ) -> None:
        client = self.live.client(model)
        client.load(self.store.path(checkpoint.file), optimizer=optimizer)
        old = self._save(model, request.seq)
        answer = {"path": checkpoint.id, "model_id": model.id, "type": "load_weights"}
        self._end(request, model, answer)
        self._delete(old)

    def _forward_backward(self, request: TinkerRequest, body: bytes) -> None:
        asked = wire.read_forward_backward(body)
        model = self.store.get("model", request.owner)
        out = self.live.forward_backward(model, asked)
        logprobs = [np.asarray(row) for row in out.logprobs]
        self._end(request, model, wire.write_forward_backward(logprobs, {"loss:sum": out.loss}))

    def _optim_step(self, request: TinkerRequest, body: bytes) -> None:
        model = self.store.get("model", request.owner)
        if model.has_failed:
            # Half of the gradients would be another step than the one that was meant.
            model.has_failed = False
            model.saved_seq = request.seq
            self.live.forget(model.id)
            message = "a forward_backward since the last step failed: nothing was changed, and "
            raise ValueError(message + "all gradients since then are dropped")
        metrics = self.live.client(model).optim_step(**bodies.adam(json.loads(body)))
        old = self._save(model, request.seq)
        named = {name: float(value) for name, value in (metrics or {}).items()}
        self._end(request, model, {"metrics": named})
        self._delete(old)

    def _save(self, model: Model, seq: int) -> str | None:
        """Writes the weights and the optimizer of a model; returns the file that they replace."""
        draft, final = self.store.new_file("models", f"{model.id}.{seq}")
        self.live.client(model).save(draft, optimizer=True)
        old = model.saved
        model.saved = self.store.keep(draft, final)
        model.saved_seq = seq
        model.has_failed = False
        return old

    def _delete(self, file: str | None) -> None:
        if file is not None:
            delete(self.store.path(file))

    def _save_weights(self, request: TinkerRequest, body: bytes) -> None:
        given = json.loads(body)
        model = self.store.get("model", request.owner)
        checkpoint, old = self._write_checkpoint(request, model, given, "training")
        answer = {"path": checkpoint.id, "type": "save_weights"}
        self._end(request, model, answer, checkpoint)
        self._delete(old)

    def _save_for_sampler(self, request: TinkerRequest, body: bytes) -> None:
        given = json.loads(body)
        model = self.store.get("model", request.owner)
        old = None
        if given.get("path") is not None:
            record, old = self._write_checkpoint(request, model, given, "sampler")
            answer = {"path": record.id}
        else:
            number = bodies.whole_field(given, "sampling_session_seq_id")
            name = f"{model.session}:sample:{number}"
            draft, final = self.store.new_file("samplers", name)
            self.live.client(model).save(draft, optimizer=False)
            record = Sampler(name, model.session, self.store.keep(draft, final))
            answer = {"sampling_session_id": name}
        self._end(request, model, answer | {"type": "save_weights_for_sampler"}, record)
        self._delete(old)

    def _write_checkpoint(
        self, request: TinkerRequest, model: Model, given: dict[str, Any], kind: str
    ) -> tuple[Checkpoint, str | None]:
        """The checkpoint, on disk, and the file that it replaces."""
        folder = "weights" if kind == "training" else "sampler_weights"
        name = bodies.file_name(given, "path")
        path = f"tinker://{model.id}/{folder}/{name}"
        old = self.store.get("checkpoint", path)
        if old is not None and kind == "training" and not given.get("overwrite"):
            raise ValueError(f"{path} exists; overwrite=True replaces it")
        draft, final = self.store.new_file(
            "checkpoints", f"{model.id}/{folder}/{name}.{request.seq}"
        )
        self.live.client(model).save(draft, optimizer=kind == "training")
        file = self.store.keep(draft, final)
        checkpoint = Checkpoint(path, model.id, kind, file, model.adapters)
        checkpoint.size = size_of(final)
        checkpoint.metadata = given.get("user_metadata")
        if given.get("ttl_seconds") is not None:
            checkpoint.expires = checkpoint.created + given["ttl_seconds"]
        return checkpoint, None if old is None or old.file == file else old.file

    def _sample(self, requests: list[TinkerRequest]) -> None:
        """Sample requests of one sampler, those with as many samples together."""
        by_count: dict[int, list[tuple[TinkerRequest, dict]]] = {}
        for request in requests:
            body = json.loads(self.store.body(request))
            by_count.setdefault(body.get("num_samples", 1), []).append((request, body))
        for count, asked in by_count.items():
            most = max(1, SEQUENCES_PER_TURN // count)
            for start in range(0, len(asked), most):
                self._draw(count, asked[start : start + most])

    def _draw(self, count: int, asked: list[tuple[TinkerRequest, dict]]) -> None:
        try:
            results = self.live.sample(count, asked)
        except Exception as error:
            if len(asked) > 1:
                # One of them may be wrong, and the others are not to fail with it.
                for one in asked:
                    self._draw(count, [one])
                return
            is_user = isinstance(error, ValueError)
            if not is_user:
                traceback.print_exc()
            message = str(error) if is_user else f"{type(error).__name__}: {error}"
            self._fail(asked[0][0], message, "user" if is_user else "server")
            return
        with self.store.transaction():
            for (request, _), result in zip(asked, results):
                self.store.end(request, DONE, result)
        for request, _ in asked:
            self.store.forget_bodies(request.owner, request.seq)


OPERATIONS = {
    "create_model": Worker._create,
    "create_from": Worker._create_from,
    "load_weights": Worker._load,
    "forward_backward": Worker._forward_backward,
    "optim_step": Worker._optim_step,
    "save_weights": Worker._save_weights,
    "save_weights_for_sampler": Worker._save_for_sampler,
}


def session_of(owner: str) -> str:
    """The session that a model or a sampler belongs to: `4f2a` of `4f2a:train:0`."""
    return owner.partition(":")[0]


def failure(message: str, category: str) -> bytes:
    """A failed request, as the SDK reads it. category: user or server."""
    return json.dumps({"error": message, "category": category}).encode()


def made_model(name: str, given: dict[str, Any]) -> Model:
    """The record of a new model. Raises BadCall."""
    metadata = bodies.metadata_field(given)
    return Model(name, session_of(name), adapters=bodies.adapters(given), metadata=metadata)
