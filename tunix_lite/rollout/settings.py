"""The settings of sampling: the distribution (`generation`), and the sampler (`rollout`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunix_lite.basics.errors import check_choices, check_numbers
from tunix_lite.parallel.mesh import MeshShape, as_text, check_mesh_shape

# The least temperature or top_p above 0; its inverse is the highest temperature. The devices
# compute in float32, where 1e-300 is 0 and logits divided by 1e-38 are infinite.
LEAST_POSITIVE = 1e-30


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of sampling: the distribution of each token, and when a completion ends.
    Example: `GenerationConfig(max_prompt_length=64, max_new_tokens=256, temperature=0.7)`."""

    # conf/generation/default.yaml explains each setting
    max_prompt_length: int = 32
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    long_prompts: str = "error"

    def __post_init__(self):
        # As tuples, since a list has no hash.
        object.__setattr__(self, "stop", _tuple_of("stop", self.stop, str))
        tokens = _tuple_of("stop_token_ids", self.stop_token_ids, int)
        object.__setattr__(self, "stop_token_ids", tokens)

        check_choices(self, {"long_prompts": ("error", "truncate", "drop")})
        # The distribution: whether a value is right, and what it must be.
        least = LEAST_POSITIVE
        most = 1 / least
        temperatures = f"must be 0, or {least:g} to {most:g}"
        lengths = "max_prompt_length max_new_tokens"
        check_numbers(self, lengths, lambda x: x >= 1, "must be at least 1")
        check_numbers(self, "temperature", lambda x: not x or least <= x <= most, temperatures)
        check_numbers(self, "top_k", lambda x: x >= 0, "must not be negative")
        check_numbers(
            self, "top_p", lambda x: least <= x <= 1, "must be above 0 and at most 1"
        )
        check_numbers(self, "min_p", lambda x: 0 <= x <= 1, "is a share, from 0 to 1")

        # What ends a completion.
        if not all(self.stop):
            raise ValueError(
                f"stop={list(self.stop)}: an empty text would end every completion"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(
                f"stop_token_ids={list(self.stop_token_ids)} must not be negative"
            )

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest completion."""
        return self.max_prompt_length, self.max_new_tokens

    @property
    def has_cutoffs(self) -> bool:
        """Returns whether top_k, top_p or min_p cut tokens off."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    def limits_of(self, limits: Sequence[int] | None, num_requests: int) -> list[int]:
        """The most tokens of each completion. Raises ValueError for other numbers of limits, or
        beyond the most."""
        if limits is None:
            return [self.max_new_tokens] * num_requests
        if len(limits) != num_requests:
            raise ValueError(
                f"{len(limits)} limits for {num_requests} completions; give one for each"
            )
        for i, limit in enumerate(limits):
            if not 1 <= limit <= self.max_new_tokens:
                raise ValueError(
                    f"limits[{i}]={limit}; it is 1 to max_new_tokens={self.max_new_tokens}"
                )
        return [int(limit) for limit in limits]

    def check_fits(self, vocab_size: int) -> None:
        """Raises ValueError for tokens that a model does not have."""
        beyond = [token for token in self.stop_token_ids if token >= vocab_size]
        if beyond:
            raise ValueError(
                f"stop_token_ids: {beyond[0]} is beyond the model's vocab_size={vocab_size}"
            )


def _tuple_of(name: str, values: Any, kind: type) -> tuple:
    """The values as a tuple. Raises ValueError unless they are a list of this kind."""
    is_list = isinstance(values, list | tuple)
    if not is_list or any(type(value) is not kind for value in values):
        raise ValueError(f"{name}={values!r}; it is a list of {kind.__name__}")
    return tuple(values)


# Sequences decoded at once, at most, where rollout.num_slots does not say how many.
_MAX_SLOTS = 256


CHOICES = {
    "weights": ("auto", "gathered", "sharded"),
    "cache": ("compute", "int8"),
    "kernels": ("auto", "xla", "fused"),
    "overlap": ("none", "carry", "one_step"),
}


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of the sampler's memory and speed.
    Example: `RolloutConfig(num_slots=64, chunk=16, cache="int8")`."""

    # conf/rollout/default.yaml explains each setting
    num_slots: int | str | None = None
    chunk: int = 16
    weights: str = "auto"
    cache: str = "compute"
    kernels: str = "auto"
    replay_routes: bool = True
    overlap: str = "none"
    max_staleness: int = 2
    mesh_shape: MeshShape | None = None

    def __post_init__(self):
        check_choices(self, CHOICES)
        rule = "must be at least 1, auto, or null to derive it"
        check_numbers(
            self, "num_slots", lambda x: x == "auto" or (type(x) is int and x >= 1), rule
        )
        check_numbers(self, "chunk", lambda x: x >= 1, "must be at least 1")
        check_numbers(self, "max_staleness", lambda x: x >= 0, "must not be negative")
        if self.num_slots == "auto" and (self.overlap != "none" or self.mesh_shape):
            raise ValueError(
                "num_slots=auto is for overlap=none without rollout.mesh_shape; write a number"
            )
        if self.mesh_shape is None:
            return
        try:
            check_mesh_shape(self.mesh_shape)
        except ValueError as error:
            # The check names the setting of the model.
            text = str(error).replace("model.mesh_shape", "rollout.mesh_shape")
            raise ValueError(f"mesh_shape: {text}") from error
        if -1 in self.mesh_shape[0]:
            raise ValueError(
                f"mesh_shape={as_text(self.mesh_shape)}: write the number of devices that sample, "
                "'rollout.mesh_shape=[[1,1],[fsdp,tp]]'; -1 in model.mesh_shape takes the rest"
            )

    @property
    def is_fused(self) -> bool:
        """Returns whether our own kernels decode: auto is xla today."""
        return self.kernels == "fused"

    @property
    def is_stale(self) -> bool:
        """Returns whether an update may learn from tokens that earlier weights drew."""
        return self.overlap != "none" and self.max_staleness > 0

    @property
    def fixed_slots(self) -> int | None:
        """The number that num_slots says; None: null or auto."""
        return None if self.num_slots == "auto" else self.num_slots

    def slots(self, num_sequences: int, fsdp: int) -> int:
        """Slots for so many sequences: up to _MAX_SLOTS, rounded up to a multiple of fsdp. With
        auto these are the most that may be chosen."""
        return round_up_to_shards(self.fixed_slots or min(_MAX_SLOTS, num_sequences), fsdp)


def round_up_to_shards(num_slots: int, fsdp: int) -> int:
    """The next multiple of fsdp; of another number every device would hold all slots."""
    return -(-num_slots // fsdp) * fsdp
