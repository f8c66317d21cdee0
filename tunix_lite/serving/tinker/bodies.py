"""JSON bodies of the Tinker protocol: what they must hold, checked before anything is written."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunix_lite.plain_text import shown
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.fields import FLOAT32, between, checked_number, read
from tunix_lite.serving.tinker.store import Adapters
from tunix_lite.trainer.sampling import SampleSettings

# Names of checkpoints, as files may have them.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Fields that ask for what this server does not have, unless they are empty.
NOT_SUPPORTED = (
    "optimizer_params",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)
ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
MOST_SAMPLES = 1024
MOST_RANK = 4096
# Bytes of what a client writes beside its models.
MOST_METADATA = 65536
# Seconds that a checkpoint may be kept for: a hundred years.
MOST_SECONDS = 100 * 365 * 24 * 3600


@dataclass(frozen=True)
class TinkerLimits:
    """The model that the server offers, and how much it takes on.

    Example: TinkerLimits("bundled", max_length=512).
    """

    model_name: str
    # tokens of a sequence
    max_length: int
    # requests of one session without a result
    max_waiting: int = 4096
    # models, and samplers, that stay on the devices
    max_models: int = 16


@dataclass(frozen=True)
class TinkerBody:
    """The fields of all requests, in the words of the SDK. Each endpoint needs some of them.

    Example: body_of({"session_id": "4f2a"}, "session_id").session_id is "4f2a".
    """

    session_id: str = ""
    model_id: str = ""
    sampling_session_id: str = ""
    request_id: str = ""
    # what the client counts: requests of a model or a sampler; models; samplers
    seq_id: int | None = None
    model_seq_id: int = 0
    sampling_session_seq_id: int = 0
    base_model: str = ""
    # names of checkpoints; `path` is one to load, or of one to save the last part
    model_path: str | None = None
    tinker_path: str = ""
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: float | None = between(0, MOST_SECONDS, None)
    kind: str = "snapshot"
    display_name: str | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    lora_config: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] = field(default_factory=dict)
    # whether the optimizer is loaded, too
    optimizer: bool = False
    adam_params: dict[str, Any] = field(default_factory=dict)
    prompt: dict[str, Any] = field(default_factory=dict)
    num_samples: int = between(1, MOST_SAMPLES, 1)
    sampling_params: dict[str, Any] = field(default_factory=dict)
    prompt_logprobs: bool = False


def body_of(body: Any) -> TinkerBody:
    """Raises BadCall, naming the field."""
    found = read(TinkerBody, body)
    for name in NOT_SUPPORTED:
        if body.get(name):
            raise BadCall(f"{name} is not supported", name)
    if found.kind != "snapshot":
        raise BadCall(f"kind={shown(found.kind)} is not supported; 'snapshot' is", "kind")
    for name in ("user_metadata", "display_name"):
        size = len(json.dumps(getattr(found, name)))
        if size > MOST_METADATA:
            raise BadCall(f"{name} has {size} bytes; there is room for {MOST_METADATA}", name)
    optimizer = found.optimizer_config.get("type", "adamw")
    if optimizer != "adamw":
        message = f"optimizer {shown(optimizer)} is not supported; adamw is"
        raise BadCall(message, "optimizer_config")
    adam(found)
    adapters(found)
    return found


def adam(body: TinkerBody) -> dict[str, float]:
    """The settings of an optimizer step. Raises BadCall for what is no number of float32."""
    given = {name: body.adam_params[name] for name in ADAM if name in body.adam_params}
    return {name: checked_number(name, value, float, *FLOAT32) for name, value in given.items()}


def adapters(body: TinkerBody) -> Adapters | None:
    """The adapters of a new model; None: all weights. Raises BadCall."""
    lora = body.lora_config
    if lora is None or body.base_model.endswith(":full"):
        return None
    rank = checked_number("rank", lora.get("rank"), int, 1, MOST_RANK)
    seed = checked_number("seed", lora.get("seed") or 0, int, 0, 2**62) % 2**32
    attention, mlp = (bool(lora.get(name, True)) for name in ("train_attn", "train_mlp"))
    return Adapters(rank, seed, attention, mlp)


def prompt_tokens(prompt: Mapping[str, Any]) -> list[int]:
    """The tokens of a ModelInput. Raises BadCall."""
    if not isinstance(prompt.get("chunks"), list):
        raise BadCall("prompt must be an object with chunks", "prompt")
    tokens: list[int] = []
    for chunk in prompt["chunks"]:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            raise BadCall("prompt: only chunks of encoded_text are supported", "prompt")
        tokens += chunk["tokens"]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise BadCall("prompt: tokens must be whole numbers", "prompt")
    return tokens


def check_sample(body: TinkerBody, max_length: int) -> None:
    """Raises BadCall for a sample request that no server could answer. max_length: tokens that the
    model takes."""
    tokens = prompt_tokens(body.prompt)
    if len(tokens) > max_length:
        message = f"prompt: {len(tokens)} tokens; this model takes up to {max_length}"
        raise BadCall(message, "prompt")
    sample_settings(body.sampling_params, "")


def sample_settings(given: Mapping[str, Any], request_id: str) -> SampleSettings:
    """The settings of a sample. Without a seed, the name of the request is one, so that a server
    that was killed draws the same tokens again. Raises BadCall."""
    stop = given.get("stop")
    if stop == []:
        raise BadCall("stop=[] (not even at the end of sequence) is not supported", "stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, int | str) for one in stop):
        raise BadCall("stop must hold texts or tokens", "stop")
    seed = given.get("seed")
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4])
    try:
        return SampleSettings(
            max_tokens=given.get("max_tokens"),
            temperature=given.get("temperature", 1.0),
            top_k=given.get("top_k", -1),
            top_p=given.get("top_p", 1.0),
            stop=tuple(one for one in stop if isinstance(one, str)),
            stop_token_ids=tuple(one for one in stop if isinstance(one, int)),
            seed=seed % 2**32 if isinstance(seed, int) else seed,
        )
    except (ValueError, TypeError) as error:
        raise BadCall(str(error), "sampling_params") from error
