"""Sampling with the live engine, whose weights change between two calls. All clients of a trainer
share it, and the weights of the base; each attaches its adapters."""

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from tunix_lite.basics.plain_text import shown
from tunix_lite.basics.types import Params, check_seed
from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.inference.live import live_engine
from tunix_lite.models.lora import LoraConfig, attach
from tunix_lite.rollout.generate import make_prepare
from tunix_lite.rollout.live import LiveEngine, LiveSequence, NewTokens
from tunix_lite.rollout.requests import DrawSettings, StopCriteria
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.training_clients.data import check_tokens

# Sequences that may wait for a slot: one call may ask for many.
_MOST_WAITING = 1 << 20


@dataclass(frozen=True)
class SampleSettings:
    """How completions are drawn.
    Example: SampleSettings(max_tokens=64, temperature=0.7, seed=3)."""

    max_tokens: int | None = None  # tokens, at most; None: as many as there is room for
    temperature: float = 1.0  # 0 takes the likeliest token
    # 0 or -1: all tokens
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    # texts that end a completion; the tokens that hold them are part of it
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()  # tokens that end a completion, and are part of it
    # the same seed gives the same completion of a prompt; None: another one in each call
    seed: int | None = None

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        most = self.max_tokens
        if most is not None and not (isinstance(most, int) and most >= 1):
            raise ValueError(f"max_tokens={shown(most)}; it is 1 or more")
        # -1 is 0 to others
        if not isinstance(self.top_k, int) or self.top_k < -1:
            raise ValueError(
                f"top_k={shown(self.top_k)}; it is a whole number, 0 for all tokens"
            )
        names = ("temperature", "top_p", "min_p", "stop", "stop_token_ids")
        try:
            # what a run may set, with its checks
            GenerationConfig(**{name: getattr(self, name) for name in names})
        except TypeError as error:
            raise ValueError(f"settings: {error}") from error
        if self.seed is not None:
            check_seed(self.seed)


def as_settings(settings: SampleSettings | Mapping[str, Any] | None) -> SampleSettings:
    """Settings from a mapping, too. Raises ValueError for a name that there is not."""
    if isinstance(settings, SampleSettings):
        return settings
    known = [item.name for item in fields(SampleSettings)]
    for name in settings or {}:
        if name not in known:
            raise ValueError(f"settings: there is no {name!r}; there is {', '.join(known)}")
    return SampleSettings(**(settings or {}))


@dataclass
class Sample:
    """One completion.
    Example: Sample(0, 1, [17, 1], [-0.3, -0.1], [-0.4, -0.1], "eos"): the second of prompt 0."""

    prompt: int
    generation: int
    tokens: list[int] = field(default_factory=list)
    # of each token, under softmax(logits / temperature)
    logprobs: list[float] = field(default_factory=list)
    # of each token, under the distribution that was drawn from, after top_k, top_p and min_p
    sampled_logprobs: list[float] = field(default_factory=list)
    # eos: an end-of-sequence token; stop: a stop text or token; length: no room left
    stop_reason: str = ""


class SamplingEngine:
    """The live engine of a trainer. Its users hold the trainer's lock.
    Example: SamplingEngine(model, RolloutConfig(), 2048, 512)."""

    def __init__(
        self,
        model: LanguageModel,
        rollout: RolloutConfig,
        max_prompt_length: int,
        max_new_tokens: int,
    ):
        """model: without weights (params is None)."""
        most = model.cfg.max_positions - 1
        self.model = model
        self.rollout = rollout
        self.generation = GenerationConfig(
            min(max_prompt_length, most), min(max_new_tokens, most)
        )
        how = (model.cfg, model.dtype, rollout.weights != "sharded")
        self._prepare = make_prepare(*how)
        # Adapters are attached by the names of weights.
        self._prepare_named = make_prepare(*how, may_join=False)
        self._base: Params | None = None
        self._engine: LiveEngine | None = None
        self._holds: object | None = None

    def use(
        self,
        owner: object,
        frozen: Params | None,
        params: Params | None,
        lora: LoraConfig | None,
    ) -> None:
        """Samples with these weights from now on; params: None: the base alone. owner: stands for
        them."""
        if self._holds is not None and self._holds is owner:
            return
        if self._engine is not None:
            # sequences that nobody waits for any more may still leave their slots
            self._engine.wait_until_idle()
        # Layer by layer; those of a base are made once.
        if frozen is None:
            prepared = self._prepare(params)
        else:
            if self._base is None:
                self._base = self._prepare_named(frozen)
            prepared = self._base
        if frozen is not None and params is not None:
            adapters = self._prepare_named(params)
            with_lora = partial(attach, lora=lora)
            both = {"layers": list(map(with_lora, prepared["layers"], adapters["layers"]))}
            if "per_layer" in adapters:
                both["per_layer"] = with_lora(prepared["per_layer"], adapters["per_layer"])
            prepared = prepared | both
        if self._engine is None:
            self._engine = live_engine(
                self.model, self.generation, self.rollout, _MOST_WAITING, prepared
            )
        self._engine.set_params(prepared)
        self._holds = owner

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        settings: Sequence[SampleSettings],
    ) -> list[Sample]:
        """Completions of each prompt, in their order. settings: one per prompt, with a seed. Raises
        ValueError, RuntimeError where the engine fails."""
        vocab_size = self.model.cfg.vocab_size
        for i, prompt in enumerate(prompts):
            check_tokens(f"prompt {i}", prompt, vocab_size, self.generation.max_prompt_length)
        # the engine calls in its own thread
        ended = queue.SimpleQueue()

        def on_tokens(new: NewTokens) -> None:
            if new.reason is not None:
                ended.put(new.message)

        sequences: dict[tuple[int, int], LiveSequence] = {}
        for p, (prompt, how) in enumerate(zip(prompts, settings)):
            # what the model has positions for, whatever was asked
            room = self.model.cfg.max_positions - len(prompt)
            limit = min(room, self.generation.max_new_tokens, how.max_tokens or room)
            tokens = dict.fromkeys(how.stop_token_ids, "stop")
            for g in range(num_samples):
                draw = DrawSettings(
                    temperature=float(how.temperature),
                    top_p=float(how.top_p),
                    top_k=max(0, int(how.top_k)),
                    min_p=float(how.min_p),
                    seed=how.seed,
                    generation=g,
                )
                criteria = StopCriteria(tokens, tuple(how.stop), self.model.tokenizer)
                ids = tuple(map(int, prompt))
                sequences[p, g] = LiveSequence(ids, draw, limit, on_tokens, criteria)
        try:
            self._engine.submit(list(sequences.values()))
            for _ in sequences:
                if failure := ended.get():
                    raise RuntimeError(f"sampling failed: {failure}")
        except BaseException:
            # The engine is shared, and nobody else would free their slots.
            for sequence in sequences.values():
                self._engine.cancel(sequence)
            raise
        finally:
            # After this call, an update may donate the weights that the engine reads.
            self._engine.wait_until_idle()
        return [
            Sample(p, g, one.tokens, one.full_logprobs, one.logprobs, one.reason)
            for (p, g), one in sequences.items()
        ]

    def close(self) -> None:
        """Ends the engine's thread, and frees its memory."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._base = None
        self._holds = None
