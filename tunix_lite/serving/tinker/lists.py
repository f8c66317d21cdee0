"""Lookups of a client: sessions, training runs, samplers, checkpoints."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tunix_lite.serving.tinker.bodies import TinkerLimits
from tunix_lite.serving.tinker.store import Checkpoint, Model, Sampler, Store, TinkerSession

# Entries of an answer where the client does not say how many.
PAGE = 20
# Digits of a number of entries; int() refuses thousands of them.
MOST_DIGITS = 18


Find = Callable[[Store, TinkerLimits, Mapping[str, str]], dict]
View = Callable[[Store, TinkerLimits, Any], Any]


def _lora(record: Model | Checkpoint) -> dict:
    adapters = record.adapters
    return {"is_lora": adapters is not None, "lora_rank": adapters and adapters.rank}


def model_info(model: Model, limits: TinkerLimits) -> dict:
    name = limits.model_name
    return _lora(model) | {
        "type": "get_info",
        "model_data": {"arch": "decoder", "model_name": name, "tokenizer_id": name},
        "model_id": model.id,
        "model_name": name,
    }


def weights_info(checkpoint: Checkpoint, limits: TinkerLimits) -> dict:
    adapters = checkpoint.adapters
    return _lora(checkpoint) | {
        "base_model": limits.model_name,
        "train_unembed": False,
        "train_mlp": adapters is None or adapters.mlp,
        "train_attn": adapters is None or adapters.attention,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(store: Store, limits: TinkerLimits, checkpoint: Checkpoint) -> dict:
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


def _checkpoints(store: Store, limits: TinkerLimits, model: Model) -> dict:
    mine = [one for one in store.all("checkpoint") if one.model == model.id]
    return {"checkpoints": [_checkpoint(store, limits, one) for one in mine]}


def _run(store: Store, limits: TinkerLimits, model: Model) -> dict:
    mine = _checkpoints(store, limits, model)["checkpoints"]
    newest = {one["checkpoint_type"]: one for one in mine}
    return _lora(model) | {
        "training_run_id": model.id,
        "base_model": limits.model_name,
        "model_owner": "local",
        "last_request_time": _time(model.last_request),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": model.metadata,
    }


def _sampler(store: Store, limits: TinkerLimits, sampler: Sampler) -> dict:
    where = {"base_model": limits.model_name, "model_path": sampler.model_path}
    return {"sampler_id": sampler.id} | where


def _session(store: Store, limits: TinkerLimits, session: TinkerSession) -> dict:
    return {
        "training_run_ids": [m.id for m in store.all("model") if m.session == session.id],
        "sampler_ids": [s.id for s in store.all("sampler") if s.session == session.id],
        "user_metadata": session.metadata,
        "display_name": session.display_name,
    }


def _capabilities(store: Store, limits: TinkerLimits, asked: Mapping[str, str]) -> dict:
    length = limits.max_length
    can = {"max_context_length": length, "trainable": True, "sampleable": True}
    names = (limits.model_name, f"{limits.model_name}:full")
    return {"supported_models": [{"model_name": name} | can for name in names]}


def _one(kind: str, view: View) -> Find:
    return lambda store, limits, asked: view(store, limits, store.found(kind, asked["id"]))


def _page(kind: str, key: str, view: View) -> Find:
    """The newest records of a kind, as many as the client asks for."""

    def find(store: Store, limits: TinkerLimits, asked: Mapping[str, str]) -> dict:
        newest = sorted(store.all(kind), key=lambda one: -one.created)
        cursor = {"total_count": len(newest)}
        for name, default in (("offset", 0), ("limit", PAGE)):
            text = asked.get(name, "")
            cursor[name] = int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else default
        some = newest[cursor["offset"] : cursor["offset"] + cursor["limit"]]
        return {key: [view(store, limits, one) for one in some], "cursor": cursor}

    return find


# What answers a GET below /api/v1.
PATHS: dict[str, Find] = {
    "get_server_capabilities": _capabilities,
    "training_runs": _page("model", "training_runs", _run),
    "training_runs/{id}": _one("model", _run),
    "training_runs/{id}/checkpoints": _one("model", _checkpoints),
    "checkpoints": _page("checkpoint", "checkpoints", _checkpoint),
    "samplers/{id}": _one("sampler", _sampler),
    "sessions": _page("session", "sessions", lambda store, limits, session: session.id),
    "sessions/{id}": _one("session", _session),
}
