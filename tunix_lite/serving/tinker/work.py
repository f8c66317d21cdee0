"""One thread that owns the devices and does what clients ask for: sessions take turns, a model's
requests go in order, and sample requests for the same weights are drawn together."""

import json
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from tunix_lite.basics.plain_text import visible
from tunix_lite.serving.tinker import bodies, wire
from tunix_lite.serving.tinker.bodies import TinkerBody
from tunix_lite.serving.tinker.store import (
    DONE,
    FAILED,
    Checkpoint,
    Model,
    Sampler,
    Store,
    TinkerRequest,
    disk_trouble,
    session_of,
)

if TYPE_CHECKING:
    from tunix_lite.training_clients.trainer import (
        LossOutput,
        Trainer,
        TrainingClient,
        Weights,
    )

# Weights that get adapters, as paths name them.
_ATTENTION = ("q", "k", "v", "o")
_MLP = ("gate", "up", "down")
# Sequences that are drawn in one turn, at most.
_SEQUENCES_PER_TURN = 256
# Times that a request may end with the end of the server before it is given up: somebody else may
# have ended the server each time.
_MOST_ATTEMPTS = 12
# A sample request, and its body.
Sampling = tuple[TinkerRequest, TinkerBody]


class WorkerFailed(Exception):
    """The worker's thread has ended, and the server with it."""


class LiveModels:
    """The trainer's clients and samplers on the devices; others come from the store."""

    def __init__(self, trainer: "Trainer", store: Store, most: int):
        """most: models, and samplers, that stay on the devices."""
        self.trainer = trainer
        self.store = store
        self.most = most
        # the one used last is the last; a sampler has the name of its file
        self._clients: dict[str, Weights] = {}
        self._samplers: dict[str, Weights] = {}

    def forget(self, name: str) -> None:
        """Takes a model from the devices; the store has it."""
        if name in self._clients:
            self._clients.pop(name).close()

    def _newest(
        self, live: "dict[str, Weights]", name: str, make: "Callable[[], Weights]"
    ) -> "Weights":
        # Put in again, as a dict keeps the order in which keys came.
        live[name] = live.pop(name, None) or make()
        while len(live) > self.most:
            live.pop(next(iter(live))).close()
        return live[name]

    def client(self, model: Model) -> "TrainingClient":
        """The trainer's client of a model, with all that it was asked to do. Raises ValueError."""

        def make() -> "TrainingClient":
            if (adapters := model.adapters) is None:
                # There is room for one of them. Another one comes back when its client asks again.
                for name in [name for name, one in self._clients.items() if one.lora is None]:
                    self.forget(name)
                client = self.trainer.full()
            else:
                parts = _ATTENTION * adapters.train_attn + _MLP * adapters.train_mlp
                if not parts:
                    raise ValueError(
                        "train_attn and train_mlp are both off: nothing would train"
                    )
                targets = f".*/({'|'.join(parts)})"
                client = self.trainer.adapter(adapters.rank, adapters.seed, targets=targets)
            if model.saved is not None:
                client.load(self.store.folder / model.saved, optimizer=True)
            return client

        is_live = model.id in self._clients
        client = self._newest(self._clients, model.id, make)
        if not is_live:
            # Gradients since the weights were saved are in no file.
            for done in self.store.gradients_after(model.id, model.saved_seq):
                self.forward_backward(model, self.store.body(done))
        return client

    def forward_backward(self, model: Model, body: bytes) -> "LossOutput":
        """The trainer's result, of forward if the request says so. Raises ValueError."""
        message = wire.wire_message("Request", body)
        data = wire.data_of(message)
        client = self.client(model)
        call = client.forward if message.forward_only else client.forward_backward
        return call(data, loss=message.loss, settings=wire.loss_settings(message))

    def sample(self, samples: list[Sampling]) -> list[bytes]:
        """The results of sample requests of one sampler, each with as many samples."""
        file = self.store.found("sampler", samples[0][0].owner).file
        path = None if file is None else self.store.folder / file
        sampler = self._newest(self._samplers, str(file), lambda: self.trainer.sampler(path))
        count = samples[0][1].num_samples
        prompts = [body.prompt_tokens for _, body in samples]
        settings = [body.sample_settings(request.id) for request, body in samples]
        # all at once: slots are shared, and the weights are read once a token
        drawn = sampler.sample(prompts, count, settings)
        results = []
        for i, (_, body) in enumerate(samples):
            scores = sampler.logprobs([prompts[i]])[0] if body.prompt_logprobs else None
            results.append(wire.write_samples(drawn[i * count : (i + 1) * count], scores))
        return results


def next_turn(
    waiting: list[TinkerRequest], turns: dict[str, int], next_seq: dict[str, int]
) -> list[TinkerRequest]:
    """One request of a model, or sample requests of one sampler, of the session whose last turn (of
    `turns`) is longest ago. next_seq: model -> the number of its next request."""
    ready: dict[str, list[TinkerRequest]] = {}
    for one in waiting:
        # requests of a model are done in their order, whichever came first
        if one.kind == "sample" or one.seq == next_seq.get(one.owner, 0):
            ready.setdefault(session_of(one.owner), []).append(one)
    if not ready:
        return []
    session = min(ready, key=lambda name: turns.get(name, 0))
    # sessions take turns, so that one with many requests does not stop the others
    turns[session] = max(turns.values(), default=0) + 1
    first = ready[session][0]
    same = [one for one in ready[session] if one.owner == first.owner]
    return same[: _SEQUENCES_PER_TURN if first.kind == "sample" else 1]


class Worker:
    """The thread. What it has to do is in the journal; `wake` says that there is more."""

    def __init__(self, live: LiveModels, store: Store, on_end: Callable[[str], None]):
        """on_end: called in the thread with the name of each request that has a result."""
        self.live = live
        self.store = store
        self.on_end = on_end
        self.failure: BaseException | None = None
        self._lock = threading.Condition()
        self._is_closing = False
        self._turns: dict[str, int] = {}
        self._current: list[TinkerRequest] = []
        # A server that was killed may not have come to it.
        for session in store.all("session"):
            if session.is_finished:
                self.give_up(session.id)
        self._thread = threading.Thread(target=self._run, name="tinker", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    def wake(self) -> None:
        with self._lock:
            self._lock.notify()

    def give_up(self, session: str) -> None:
        """Ends what still waits of a session: nobody will ask for it."""
        result = _as_json(error="the session has ended", category="user")
        with self._lock:
            for request in self.store.waiting(session):
                # What is under way cannot be ended, and gets a result of its own.
                if request not in self._current:
                    self.store.end(request, FAILED, result)
                    self.on_end(request.id)
            self._turns.pop(session, None)

    def close(self) -> None:
        """Ends after the request that is under way; the others stay in the journal."""
        self._is_closing = True
        self.wake()
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._wait_for_turn():
                tried = [
                    # counted on the disk first: a request that ends the process must not end it for
                    # ever
                    one
                    for one in self._current
                    if self.store.begin(one) <= _MOST_ATTEMPTS
                ]
                for request in self._current:
                    if request not in tried:
                        why = "the server ended each time that it did this"
                        self._fail(request, why, "server")
                if tried and tried[0].kind == "sample":
                    self._sample(tried)
                elif tried:
                    self._train(tried[0])
                for request in self._current:
                    self.on_end(request.id)
                self._current = []
        except BaseException as error:
            self.failure = error
            if disk_trouble(error) is None:
                traceback.print_exc()

    def _wait_for_turn(self) -> bool:
        """Waits until there is something to do; False: until the server closes."""
        with self._lock:
            # Under the lock, so that `give_up` knows what is under way.
            while not self._is_closing and not self._current:
                waiting = self.store.waiting()
                models = {model.id: model.next_seq for model in self.store.all("model")}
                self._current = next_turn(waiting, self._turns, models)
                if not self._current:
                    self._lock.wait()
        return not self._is_closing

    def _train(self, request: TinkerRequest) -> None:
        try:
            body = TinkerBody()
            if request.kind != "forward_backward":
                body = bodies.body_of(json.loads(self.store.body(request)))
            model = self.store.get("model", request.owner)
            if model is None:
                adapters = body.adapters
                if body.path is not None:
                    adapters = self.store.found("checkpoint", body.path).adapters
                model = Model(request.owner, session_of(request.owner), adapters=adapters)
            files = {model.saved}
            result, made = self._do(request, model, body)
            if made is not None and (old := self.store.get("checkpoint", made.id)) is not None:
                files.add(old.file)
            # Together: whenever a server is killed, the request was done or it was not.
            with self.store.transaction():
                model.next_seq = request.seq + 1
                self.store.put(model)
                if made is not None:
                    self.store.put(made)
                self.store.end(request, DONE, result)
                self.store.forget_bodies(model.id, model.saved_seq)
            # What a client saves by name outlives a loss of power, too, which the write-ahead
            # log alone does not promise.
            if isinstance(made, Checkpoint):
                self.store.settle()
            # What they are replaced by stands in the journal.
            for file in files - {model.saved, made and made.file}:
                self.store.delete(file)
        except Exception as error:
            message, category = _blame(error)
            if category == "server":
                # The devices may hold half of it; what the journal holds is whole.
                self.live.forget(request.owner)
            self._fail(request, message, category)

    def _fail(self, request: TinkerRequest, message: str, category: str) -> None:
        with self.store.transaction():
            model = self.store.get("model", request.owner)
            if model is not None:
                model.next_seq = request.seq + 1
                model.has_failed |= request.kind == "forward_backward"
                self.store.put(model)
            # Clients need not know where the server keeps its files.
            message = message.replace(f"{self.store.folder}/", "")
            self.store.end(request, FAILED, _as_json(error=message, category=category))
        print(visible(f"{request.id} {request.kind}: {message}"), file=sys.stderr, flush=True)

    def _do(
        self, request: TinkerRequest, model: Model, body: TinkerBody
    ) -> tuple[bytes, Checkpoint | Sampler | None]:
        match request.kind:
            case "create_model":
                self.live.client(model)
                return _as_json(model_id=model.id, type="create_model"), None
            case "create_from" | "load_weights":
                checkpoint = self.store.found("checkpoint", body.path)
                client = self.live.client(model)
                client.load(self.store.folder / checkpoint.file, optimizer=body.optimizer)
                self._save(model, request.seq)
                return _as_json(
                    path=checkpoint.id, model_id=model.id, type="load_weights"
                ), None
            case "forward_backward":
                out = self.live.forward_backward(model, self.store.body(request))
                return wire.write_forward_backward(out.logprobs, {"loss:sum": out.loss}), None
            case "optim_step" if model.has_failed:
                # Half of the gradients would be another step than the one that was meant.
                model.has_failed = False
                model.saved_seq = request.seq
                self.live.forget(model.id)
                message = (
                    "a forward_backward since the last step failed: nothing was changed, and "
                )
                raise ValueError(message + "all gradients since then are dropped")
            case "optim_step":
                metrics = self.live.client(model).optim_step(**asdict(body.adam_params))
                self._save(model, request.seq)
                return _as_json(metrics=metrics), None
            case "save_weights" | "save_weights_for_sampler":
                # Weights under a name, or those of a sampler without one.
                is_training = request.kind == "save_weights"
                save = partial(self.live.client(model).save, optimizer=is_training)
                if body.path is None:
                    name = f"{model.session}:sample:{body.sampling_session_seq_id}"
                    sampler = Sampler(
                        name, model.session, self.store.write("samplers", name, save)
                    )
                    return _as_json(sampling_session_id=name, type=request.kind), sampler
                folder = "weights" if is_training else "sampler_weights"
                path = f"tinker://{model.id}/{folder}/{body.path}"
                if (
                    is_training
                    and not body.overwrite
                    and self.store.get("checkpoint", path) is not None
                ):
                    raise ValueError(f"{path} exists; overwrite=True replaces it")
                # A file of its own for each request, as above.
                name = f"{model.id}/{folder}/{body.path}.{request.seq}"
                file = self.store.write("checkpoints", name, save)
                kind = "training" if is_training else "sampler"
                checkpoint = Checkpoint(path, model.id, kind, file, model.adapters)
                written = self.store.folder / file
                parts = (written, *written.rglob("*"))
                checkpoint.size = sum(part.stat().st_size for part in parts if part.is_file())
                return _as_json(path=path, type=request.kind), checkpoint
        raise ValueError(
            f"this server knows no {request.kind}; another version has accepted it"
        )

    def _save(self, model: Model, seq: int) -> None:
        save = partial(self.live.client(model).save, optimizer=True)
        # A file of its own for each step: until the journal names it, the one before is the truth.
        model.saved = self.store.write("models", f"{model.id}.{seq}", save)
        model.saved_seq = seq
        model.has_failed = False

    def _sample(self, requests: list[TinkerRequest]) -> None:
        """Draws for requests of one sampler, for those with as many samples together."""
        by_count: dict[int, list[Sampling]] = {}
        for request in requests:
            try:
                body = bodies.body_of(json.loads(self.store.body(request)))
                by_count.setdefault(body.num_samples, []).append((request, body))
            except ValueError as error:
                self._fail(request, *_blame(error))
        for count, samples in by_count.items():
            most = max(1, _SEQUENCES_PER_TURN // count)
            for start in range(0, len(samples), most):
                self._draw(samples[start : start + most])

    def _draw(self, samples: list[Sampling]) -> None:
        try:
            results = self.live.sample(samples)
        except Exception as error:
            if len(samples) == 1 or disk_trouble(error) is not None:
                self._fail(samples[0][0], *_blame(error))
                return
            # One of them may be wrong, and the others are not to fail with it.
            for one in samples:
                self._draw([one])
            return
        with self.store.transaction():
            for (request, _), result in zip(samples, results):
                self.store.end(request, DONE, result)
                self.store.forget_bodies(request.owner, request.seq)


def _blame(error: Exception) -> tuple[str, str]:
    """The message of a failed request, and whose fault it is. Raises an error of the disk again."""
    if disk_trouble(error) is not None:
        raise error
    if isinstance(error, ValueError):
        return str(error), "user"
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}", "server"


def _as_json(**values: object) -> bytes:
    return json.dumps(values).encode()
