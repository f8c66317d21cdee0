"""JSON bodies of the Tinker protocol: what they must hold, checked before anything is written."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tunix_lite.plain_text import shown
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.tinker.wire import WireDatum
from tunix_lite.trainer.data import Datum
from tunix_lite.trainer.sampling import SampleSettings

# Names of checkpoints, as files may have them.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Fields of a sample request that ask for what this server does not have, unless they are empty.
NOT_SAMPLED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)
# loss_fn_inputs -> the argument of Datum.
INPUTS = {
    "target_tokens": "targets",
    "weights": "weights",
    "logprobs": "logprobs",
    "advantages": "advantages",
}
ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
MOST_SAMPLES = 1024
MOST_RANK = 4096
# Bytes of what a client writes beside its models.
MOST_METADATA = 65536
# Seconds that a checkpoint may be kept for: a hundred years.
MOST_SECONDS = 100 * 365 * 24 * 3600


def text_field(body: Mapping[str, Any], name: str) -> str:
    """A field that must be a text. Raises BadCall."""
    value = body.get(name)
    if not isinstance(value, str) or not value or not _is_utf8(value):
        raise BadCall(f"{name}={shown(value)}; it must be a text", name)
    return value


def _is_utf8(value: str) -> bool:
    """JSON can hold halves of characters, and the journal cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def whole_field(body: Mapping[str, Any], name: str, least: int = 0, most: int = 2**62) -> int:
    """A field that must be a whole number. Raises BadCall."""
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadCall(f"{name}={shown(value)}; it must be a whole number from {least}", name)
    return value


def object_field(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A field that must be an object, or absent. Raises BadCall."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadCall(f"{name}={shown(value)}; it must be an object", name)
    return value


def name_field(body: Mapping[str, Any], name: str) -> str | None:
    """A field that must be a short text, or absent. Raises BadCall."""
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > MOST_METADATA):
        raise BadCall(f"{name}={shown(value)}; it must be a short text", name)
    return value


def metadata_field(body: Mapping[str, Any]) -> dict[str, Any]:
    """The user_metadata of a session, a model or a checkpoint. Raises BadCall."""
    value = object_field(body, "user_metadata")
    size = len(json.dumps(value))
    if size > MOST_METADATA:
        message = f"user_metadata has {size} bytes; there is room for {MOST_METADATA}"
        raise BadCall(message, "user_metadata")
    return value


def adapters(body: Mapping[str, Any]) -> dict[str, int] | None:
    """The adapters of a new model, as its record holds them; None: all weights. Raises BadCall."""
    if text_field(body, "base_model").endswith(":full") or body.get("lora_config") is None:
        return None
    lora = object_field(body, "lora_config")
    return {
        "rank": whole_field(lora, "rank", 1, MOST_RANK),
        "seed": 0 if lora.get("seed") is None else whole_field(lora, "seed") % 2**32,
        "attention": bool(lora.get("train_attn", True)),
        "mlp": bool(lora.get("train_mlp", True)),
    }


def check_checkpoint(body: Mapping[str, Any]) -> None:
    """Raises BadCall for a checkpoint that cannot be written as asked."""
    file_name(body, "path")
    metadata_field(body)
    seconds = body.get("ttl_seconds")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 <= seconds <= MOST_SECONDS):
        message = f"ttl_seconds={shown(seconds)}; it must be a number from 0 to {MOST_SECONDS}"
        raise BadCall(message, "ttl_seconds")


def file_name(body: Mapping[str, Any], name: str) -> str:
    """The name of a checkpoint. Raises BadCall for one that could be a path."""
    value = text_field(body, name)
    if not NAME.fullmatch(value):
        raise BadCall(f"{name}={shown(value)}; letters, digits and ._- only, up to 128", name)
    return value


def datum(given: WireDatum) -> Datum:
    """The SDK's datum as the trainer takes it. Raises ValueError."""
    for name, values in given.inputs.items():
        if name not in INPUTS:
            raise ValueError(f"loss_fn_inputs[{name!r}] is not supported; {', '.join(INPUTS)} are")
        if values.ndim != 1:
            raise ValueError(f"loss_fn_inputs[{name!r}] has {values.ndim} dims; 1 is supported")
    if "target_tokens" not in given.inputs:
        raise ValueError("loss_fn_inputs['target_tokens'] is missing")
    return Datum(given.tokens, **{INPUTS[name]: given.inputs[name] for name in given.inputs})


def prompt_tokens(body: Mapping[str, Any]) -> list[int]:
    """The tokens of a ModelInput. Raises ValueError."""
    chunks = body.get("prompt", {}).get("chunks") if isinstance(body.get("prompt"), dict) else None
    if not isinstance(chunks, list):
        raise BadCall("prompt must be an object with chunks", "prompt")
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            raise BadCall("prompt: only chunks of encoded_text are supported", "prompt")
        tokens += chunk["tokens"]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise BadCall("prompt: tokens must be whole numbers", "prompt")
    return tokens


def check_sample(body: Mapping[str, Any], max_length: int) -> None:
    """Raises BadCall for a sample request that no server could answer. max_length: tokens that the
    model takes."""
    tokens = prompt_tokens(body)
    if len(tokens) > max_length:
        message = f"prompt: {len(tokens)} tokens; this model takes up to {max_length}"
        raise BadCall(message, "prompt")
    whole_field(body | {"num_samples": body.get("num_samples", 1)}, "num_samples", 1, MOST_SAMPLES)
    for name in NOT_SAMPLED:
        if body.get(name):
            raise BadCall(f"{name} is not supported", name)
    if body.get("prompt_logprobs_last_n") is not None:
        raise BadCall("prompt_logprobs_last_n is not supported", "prompt_logprobs_last_n")
    sample_settings(body, "")


def sample_settings(body: Mapping[str, Any], request_id: str) -> SampleSettings:
    """How the tokens of this request are drawn. Without a seed, the name of the request is one, so
    that a server that was killed draws the same tokens again. Raises ValueError."""
    given = object_field(body, "sampling_params")
    stop = given.get("stop")
    if stop is None:
        stop = ()
    elif stop == []:
        raise BadCall("stop=[] (not even at the end of sequence) is not supported", "stop")
    elif isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple):
        raise BadCall("stop must hold texts or tokens", "stop")
    tokens = tuple(one for one in stop if isinstance(one, int))
    texts = tuple(one for one in stop if isinstance(one, str))
    if len(tokens) + len(texts) != len(stop):
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
            stop=texts,
            stop_token_ids=tokens,
            seed=seed % 2**32 if isinstance(seed, int) else seed,
        )
    except (ValueError, TypeError) as error:
        raise BadCall(str(error), "sampling_params") from error


def adam(body: Mapping[str, Any]) -> dict[str, float]:
    """The settings of an optimizer step. Raises BadCall for another optimizer or no number."""
    if body.get("optimizer_params") is not None:
        raise BadCall("only AdamParams are supported", "optimizer_params")
    given = object_field(body, "adam_params")
    found = {}
    for name in ADAM:
        if name in given:
            value = given[name]
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise BadCall(f"adam_params.{name}={shown(value)}; it must be a number", name)
            found[name] = float(value)
    return found
