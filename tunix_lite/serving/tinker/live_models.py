"""Models and samplers on the devices. What is not there is made again from the store."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from tunix_lite.serving.tinker import bodies, wire
from tunix_lite.serving.tinker.store import Checkpoint, Model, Sampler, Store, TinkerRequest

if TYPE_CHECKING:
    from tunix_lite.trainer.trainer import Trainer

# Weights that get adapters, as paths name them.
ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")
# Stop reasons of samples in the SDK's words.
STOP_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class LiveModels:
    """The trainer's clients and samplers, the ones used last. One thread calls it.

    Example: LiveModels(trainer, store, most=16).client(model).optim_step(learning_rate=1e-4).
    """

    def __init__(self, trainer: "Trainer", store: Store, most: int = 16):
        """most: models, and samplers, that stay on the devices."""
        self.trainer = trainer
        self.store = store
        self.most = most
        self._clients: OrderedDict[str, Any] = OrderedDict()
        self._samplers: OrderedDict[str, Any] = OrderedDict()

    def forget(self, name: str) -> None:
        """Takes a model from the devices; the store has it."""
        client = self._clients.pop(name, None)
        if client is not None:
            client.close()

    def create(self, model: Model) -> None:
        """A new model on the devices. Raises ValueError for settings that cannot be."""
        self._keep(self._clients, model.id, self._made(model.adapters))

    def client(self, model: Model) -> Any:
        """The trainer's client of a model, with all that it was asked to do."""
        client = self._clients.get(model.id)
        if client is None:
            client = self._made(model.adapters)
            if model.saved is not None:
                client.load(self.store.path(model.saved), optimizer=True)
            self._keep(self._clients, model.id, client)
            # Gradients since then are in no file.
            for done in self.store.done_after(model.id, model.saved_seq, "forward_backward"):
                self.forward_backward(model, wire.read_forward_backward(self.store.body(done)))
        self._clients.move_to_end(model.id)
        return client

    def _made(self, adapters: dict[str, int] | None) -> Any:
        if adapters is None:
            # There is room for one of them. Another one comes back when its client asks again.
            for name in [name for name, one in self._clients.items() if one.lora is None]:
                self.forget(name)
            return self.trainer.full()
        parts = ATTENTION * adapters["attention"] + MLP * adapters["mlp"]
        if not parts:
            raise ValueError("train_attn and train_mlp are both off: nothing would train")
        targets = f".*/({'|'.join(parts)})"
        return self.trainer.adapter(rank=adapters["rank"], seed=adapters["seed"], targets=targets)

    def _keep(self, kept: OrderedDict[str, Any], name: str, made: Any) -> None:
        kept[name] = made
        while len(kept) > self.most:
            _, oldest = kept.popitem(last=False)
            oldest.close()

    def forward_backward(self, model: Model, asked: wire.ForwardBackward) -> Any:
        """The trainer's result, of forward if the request says so. Raises ValueError."""
        data = [bodies.datum(one) for one in asked.data]
        client = self.client(model)
        call = client.forward if asked.forward_only else client.forward_backward
        return call(data, loss=asked.loss, settings=dict(asked.settings))

    def checkpoint(self, path: str) -> Checkpoint:
        """Raises ValueError if there is none of this name."""
        found = self.store.get("checkpoint", path)
        if found is None:
            raise ValueError(f"there is no checkpoint {path}")
        return found

    def sampler(self, sampler: Sampler) -> Any:
        """The trainer's sampler of these weights."""
        name = sampler.file or ""
        found = self._samplers.get(name)
        if found is None:
            found = self.trainer.sampler(self.store.path(sampler.file) if sampler.file else None)
            self._keep(self._samplers, name, found)
        self._samplers.move_to_end(name)
        return found

    def sample(self, count: int, asked: list[tuple[TinkerRequest, dict]]) -> list[bytes]:
        """The results of sample requests of one sampler, each with `count` samples."""
        record = self.store.get("sampler", asked[0][0].owner)
        if record is None:
            raise ValueError("the sampling session has ended")
        sampler = self.sampler(record)
        prompts = [bodies.prompt_tokens(body) for _, body in asked]
        settings = [bodies.sample_settings(body, request.id) for request, body in asked]
        drawn = sampler.sample(prompts, count, settings)
        results = []
        for i, (_, body) in enumerate(asked):
            mine = drawn[i * count : (i + 1) * count]
            sequences = [(s.tokens, s.logprobs, STOP_REASONS[s.stop_reason]) for s in mine]
            scores = None
            if body.get("prompt_logprobs"):
                [scores] = sampler.logprobs([prompts[i]])
            results.append(wire.write_samples(sequences, scores))
        return results
