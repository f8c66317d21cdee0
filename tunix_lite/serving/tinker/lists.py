"""What a client can look up: sessions, training runs, samplers, checkpoints."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tunix_lite.serving.tinker.store import Checkpoint, Model, Store

if TYPE_CHECKING:
    from tunix_lite.serving.tinker.app import TinkerLimits

CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints/{folder}/{name}"
# Entries of an answer where the client does not say how many.
PAGE = 20
OWNER = "local"


def checkpoint_path(where: dict[str, str]) -> str:
    return f"tinker://{where['run']}/{where['folder']}/{where['name']}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(checkpoint: Checkpoint) -> dict:
    folder, name = checkpoint.id.split("/")[-2:]
    expires = checkpoint.expires
    return {
        "checkpoint_id": f"{folder}/{name}",
        "checkpoint_type": checkpoint.kind,
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.id,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if expires is None else _time(expires),
    }


def rank_of(weights: Model | Checkpoint) -> int | None:
    return None if weights.adapters is None else weights.adapters["rank"]


def weights_info(checkpoint: Checkpoint, limits: "TinkerLimits") -> dict:
    adapters = checkpoint.adapters
    return {
        "base_model": limits.model_name,
        "is_lora": adapters is not None,
        "lora_rank": rank_of(checkpoint),
        "train_unembed": False,
        "train_mlp": adapters is None or adapters["mlp"],
        "train_attn": adapters is None or adapters["attention"],
    }


def _run(store: Store, model: Model, limits: "TinkerLimits") -> dict:
    newest: dict[str, dict] = {}
    for checkpoint in store.all("checkpoint"):
        if checkpoint.model == model.id:
            newest[checkpoint.kind] = _checkpoint(checkpoint)
    return {
        "training_run_id": model.id,
        "base_model": limits.model_name,
        "model_owner": OWNER,
        "is_lora": model.adapters is not None,
        "lora_rank": rank_of(model),
        "last_request_time": _time(model.last_request),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": model.metadata,
    }


def _page(entries: Sequence[Any], asked: dict[str, str]) -> tuple[list[Any], dict]:
    """The entries that were asked for, and the cursor."""
    limit = int(asked.get("limit", PAGE)) if asked.get("limit", "1").isdecimal() else PAGE
    offset = int(asked["offset"]) if asked.get("offset", "").isdecimal() else 0
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return list(entries[offset : offset + limit]), cursor


def _capabilities(store: Store, limits: "TinkerLimits", asked: dict[str, str]) -> dict:
    names = (limits.model_name, f"{limits.model_name}:full")
    models = [
        {
            "model_name": name,
            "max_context_length": limits.max_length,
            "trainable": True,
            "sampleable": True,
        }
        for name in names
    ]
    return {"supported_models": models}


def _runs(store: Store, limits: "TinkerLimits", asked: dict[str, str]) -> dict:
    newest = sorted(store.all("model"), key=lambda model: -model.created)
    models, cursor = _page(newest, asked)
    return {"training_runs": [_run(store, one, limits) for one in models], "cursor": cursor}


def _one_run(store: Store, limits: "TinkerLimits", asked: dict[str, str]) -> dict | None:
    model = store.get("model", asked["run"])
    return None if model is None else _run(store, model, limits)


def _checkpoints(store: Store, limits: "TinkerLimits", asked: dict[str, str]) -> dict | None:
    """Those of one training run, or all of them."""
    run = asked.get("run")
    if run is not None and store.get("model", run) is None:
        return None
    found = [one for one in store.all("checkpoint") if run in (None, one.model)]
    if run is not None:
        return {"checkpoints": [_checkpoint(one) for one in found]}
    some, cursor = _page(sorted(found, key=lambda one: -one.created), asked)
    return {"checkpoints": [_checkpoint(one) for one in some], "cursor": cursor}


def _sampler(store: Store, limits: "TinkerLimits", asked: dict[str, str]) -> dict | None:
    sampler = store.get("sampler", asked["sampler"])
    if sampler is None:
        return None
    return {
        "sampler_id": sampler.id,
        "base_model": limits.model_name,
        "model_path": sampler.model_path,
    }


def _session(store: Store, limits: "TinkerLimits", asked: dict[str, str]) -> dict | None:
    session = store.get("session", asked["session"])
    if session is None:
        return None
    return {
        "training_run_ids": [m.id for m in store.all("model") if m.session == session.id],
        "sampler_ids": [s.id for s in store.all("sampler") if s.session == session.id],
        "user_metadata": session.metadata,
        "display_name": session.display_name,
    }


def _sessions(store: Store, limits: "TinkerLimits", asked: dict[str, str]) -> dict:
    names = [one.id for one in sorted(store.all("session"), key=lambda one: -one.created)]
    return {"sessions": _page(names, asked)[0]}


# What answers a GET: a JSON object, or None if there is nothing of this name.
PATHS: dict[str, Callable[[Store, "TinkerLimits", dict[str, str]], dict | None]] = {
    "/api/v1/get_server_capabilities": _capabilities,
    "/api/v1/training_runs": _runs,
    "/api/v1/training_runs/{run}": _one_run,
    "/api/v1/training_runs/{run}/checkpoints": _checkpoints,
    "/api/v1/checkpoints": _checkpoints,
    "/api/v1/samplers/{sampler}": _sampler,
    "/api/v1/sessions": _sessions,
    "/api/v1/sessions/{session}": _session,
}
