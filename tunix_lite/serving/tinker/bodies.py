"""JSON bodies of the Tinker protocol: what they must hold, checked before anything is written."""

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import Any

from tunix_lite.basics.plain_text import shown
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.fields import between, read
from tunix_lite.serving.tinker.store import MOST_RANK, Adapters
from tunix_lite.training_clients.sampling import SampleSettings, as_settings

# Numbers of a sample, which the trainer checks.
_DRAWN_BY = ("max_tokens", "temperature", "top_k", "top_p")
# Names of checkpoints, as files may have them.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Fields that ask for what this server does not have, unless they are empty.
_NOT_SUPPORTED = (
    "ttl_seconds",
    "optimizer_params",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)
_MOST_SAMPLES = 1024


@dataclass(frozen=True)
class TinkerLimits:
    """The model that the server offers, and how much it takes on."""

    model_name: str
    max_length: int  # tokens of a sequence
    max_waiting: int = 4096  # requests of one session without a result
    max_models: int = 16  # models, and samplers, that stay on the devices


@dataclass(frozen=True)
class _AdamBody:
    """The numbers of an optimizer step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class TinkerBody:
    """The fields of all requests, in the words of the SDK. Each endpoint needs some of them."""

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
    kind: str = "snapshot"
    # a model of all weights may leave the rank out
    lora_config: Adapters | None = None
    optimizer_config: dict[str, Any] = field(default_factory=dict)
    # whether the optimizer is loaded, too
    optimizer: bool = False
    adam_params: _AdamBody = _AdamBody()
    prompt: dict[str, Any] = field(default_factory=dict)
    num_samples: int = between(1, _MOST_SAMPLES, 1)
    sampling_params: dict[str, Any] = field(default_factory=dict)
    prompt_logprobs: bool = False

    def __post_init__(self):
        optimizer = self.optimizer_config.get("type", "adamw")
        for name, value, ours in (
            ("kind", self.kind, "snapshot"),
            ("optimizer", optimizer, "adamw"),
        ):
            if value != ours:
                raise BadCall(f"{name}={shown(value)} is not supported; {ours} is", name)

    @property
    def adapters(self) -> Adapters | None:
        """Those of a new model; None: all weights."""
        lora = self.lora_config
        if lora is None or self.base_model.endswith(":full"):
            return None
        if lora.rank < 1:
            raise BadCall(
                f"rank={lora.rank}; it is a whole number from 1 to {MOST_RANK}", "rank"
            )
        # Our seeds have 32 bits.
        return replace(lora, seed=lora.seed % 2**32)

    @property
    def prompt_tokens(self) -> list[int]:
        """The tokens of `prompt`, a ModelInput, which the trainer checks. Raises BadCall."""
        tokens = []
        chunks = self.prompt.get("chunks")
        if not isinstance(chunks, list):
            chunks = [None]
        for chunk in chunks:
            kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
            if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
                raise BadCall("prompt: a list of chunks, all of them encoded_text", "prompt")
            tokens += chunk["tokens"]
        return tokens

    def sample_settings(self, request_id: str) -> SampleSettings:
        """Without a seed, the name of the request is one: a server that was killed draws the same
        again. Raises BadCall."""
        params = {name: one for name, one in self.sampling_params.items() if one is not None}
        stop = params.get("stop", ())
        # to the SDK it means no end at all, and to us no further one
        if stop == []:
            raise BadCall("stop=[] (not even at the end of sequence) is not supported", "stop")
        stops = stop if isinstance(stop, list | tuple) else [stop]
        if not all(isinstance(one, int | str) for one in stops):
            raise BadCall("stop must hold texts or tokens", "stop")
        by_name = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4])
        seed = params.get("seed", by_name)
        values = {name: params[name] for name in _DRAWN_BY if name in params}
        values["seed"] = seed % 2**32 if isinstance(seed, int) else seed
        values["stop"] = tuple(one for one in stops if isinstance(one, str))
        values["stop_token_ids"] = tuple(one for one in stops if isinstance(one, int))
        try:
            return as_settings(values)
        except (ValueError, TypeError) as error:
            raise BadCall(str(error), "sampling_params") from error


def body_of(body: object) -> TinkerBody:
    """Raises BadCall, naming the field."""
    checked = read(TinkerBody, body)
    for name in _NOT_SUPPORTED:
        if body.get(name):
            raise BadCall(f"{name} is not supported", name)
    return checked
