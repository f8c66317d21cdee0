"""Lookups of a client: sessions, training runs, samplers, checkpoints."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial

from tunix_lite.serving.tinker.bodies import TinkerLimits
from tunix_lite.serving.tinker.store import (
    Checkpoint,
    Model,
    Record,
    Sampler,
    Store,
    TinkerSession,
)

# Entries of an answer where the client does not say how many.
PAGE = 20
# Digits of a number of entries; int() refuses thousands of them.
MOST_DIGITS = 18
# (values in the path of a request and after it) -> the answer
LookUp = Callable[[Mapping[str, str]], dict]


class Lists:
    """What a client may read of the store."""

    def __init__(self, store: Store, limits: TinkerLimits):
        self.store = store
        self.limits = limits
        # path below /api/v1 -> what answers a GET
        self.paths: dict[str, LookUp] = {
            "get_server_capabilities": self._capabilities,
            "training_runs": partial(self._page, "model", "training_runs", self._run),
            "training_runs/{id}": partial(self._one, "model", self._run),
            "training_runs/{id}/checkpoints": partial(self._one, "model", self._checkpoints),
            "checkpoints": partial(self._page, "checkpoint", "checkpoints", self._checkpoint),
            "samplers/{id}": partial(self._one, "sampler", self._sampler),
            "sessions": partial(self._page, "session", "sessions", lambda session: session.id),
            "sessions/{id}": partial(self._one, "session", self._session),
        }

    def _one(self, kind: str, view: Callable[[Record], dict], query: Mapping[str, str]) -> dict:
        return view(self.store.found(kind, query["id"]))

    def _page(
        self, kind: str, key: str, view: Callable[[Record], dict | str], query: Mapping[str, str]
    ) -> dict:
        """The newest records of a kind, as many as the client asks for."""
        newest = sorted(self.store.all(kind), key=lambda one: -one.created)
        cursor = {"total_count": len(newest)}
        for name, default in (("offset", 0), ("limit", PAGE)):
            text = query.get(name, "")
            cursor[name] = int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else default
        some = newest[cursor["offset"] : cursor["offset"] + cursor["limit"]]
        return {key: [view(one) for one in some], "cursor": cursor}

    def _capabilities(self, query: Mapping[str, str]) -> dict:
        length = self.limits.max_length
        can = {"max_context_length": length, "trainable": True, "sampleable": True}
        names = (self.limits.model_name, f"{self.limits.model_name}:full")
        return {"supported_models": [{"model_name": name} | can for name in names]}

    def model_info(self, model: Model) -> dict:
        name = self.limits.model_name
        return _lora(model) | {
            "type": "get_info",
            "model_data": {"arch": "decoder", "model_name": name, "tokenizer_id": name},
            "model_id": model.id,
            "model_name": name,
        }

    def weights_info(self, checkpoint: Checkpoint) -> dict:
        adapters = checkpoint.adapters
        return _lora(checkpoint) | {
            "base_model": self.limits.model_name,
            "train_unembed": False,
            "train_mlp": adapters is None or adapters.mlp,
            "train_attn": adapters is None or adapters.attention,
        }

    def _checkpoint(self, checkpoint: Checkpoint) -> dict:
        return {
            "checkpoint_id": "/".join(checkpoint.id.split("/")[-2:]),
            "checkpoint_type": checkpoint.kind,
            "time": _time(checkpoint.created),
            "tinker_path": checkpoint.id,
            "size_bytes": checkpoint.size,
            "public": False,
            "user_metadata": checkpoint.metadata,
            "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
        }

    def _checkpoints(self, model: Model) -> dict:
        records = [one for one in self.store.all("checkpoint") if one.model == model.id]
        return {"checkpoints": [self._checkpoint(one) for one in records]}

    def _run(self, model: Model) -> dict:
        checkpoints = self._checkpoints(model)["checkpoints"]
        newest = {one["checkpoint_type"]: one for one in checkpoints}
        return _lora(model) | {
            "training_run_id": model.id,
            "base_model": self.limits.model_name,
            "model_owner": "local",
            "last_request_time": _time(model.last_request),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": model.metadata,
        }

    def _sampler(self, sampler: Sampler) -> dict:
        where = {"base_model": self.limits.model_name, "model_path": sampler.model_path}
        return {"sampler_id": sampler.id} | where

    def _session(self, session: TinkerSession) -> dict:
        return {
            "training_run_ids": [m.id for m in self.store.all("model") if m.session == session.id],
            "sampler_ids": [s.id for s in self.store.all("sampler") if s.session == session.id],
            "user_metadata": session.metadata,
            "display_name": session.display_name,
        }


def _lora(record: Model | Checkpoint) -> dict:
    adapters = record.adapters
    return {"is_lora": adapters is not None, "lora_rank": adapters and adapters.rank}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
