"""Requests to the sampler, one completion each; the arrays that they become; checks of
arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tunix_lite.basics.plain_text import shortened
from tunix_lite.basics.types import FINISH, Metrics, Prompts, Rollout
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.tokenizer import TextStream, Tokenizer
from tunix_lite.rollout.settings import GenerationConfig


@dataclass(frozen=True)
class DrawSettings:
    """Settings that draw the tokens of one request of a server.
    Example: DrawSettings(temperature=0.7, top_p=0.95, seed=3)."""

    # 0 takes the likeliest token
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    # 0: all tokens
    min_p: float = 0.0
    seed: int = 0
    generation: int = 0  # index among the completions of the same prompt and seed

    @property
    def has_cutoffs(self) -> bool:
        """Returns whether some tokens can never be drawn."""
        is_cut = bool(self.top_k or self.top_p < 1 or self.min_p)
        return is_cut and self.temperature > 0


# An array of routes [..., L * k] on the devices or of the host, and the index of the piece in it.
RoutePiece = tuple[Any, Any]


def joined(pieces: Sequence[RoutePiece]) -> np.ndarray:
    """The routes [n, L * k] of these pieces; those of the devices are copied only here."""
    return np.concatenate([np.asarray(array)[index] for array, index in pieces])


@dataclass(eq=False)
class Request:
    """A completion that grows from chunk to chunk.
    Example: `Request(prompt=0, index=0, generation=1, limit=64)` is the second completion of prompt
    0."""

    prompt: int  # index of its prompt in the list of prompts
    index: int  # the number of its prompt, from which its random key follows
    generation: int  # index among the completions of its prompt
    limit: int  # most tokens
    ids: Sequence[int] = ()  # the tokens of its prompt
    # data of the random key that `index` and `generation` are folded into
    key_data: np.ndarray | None = None
    row: int = 0  # row of the Rollout
    draw: DrawSettings | None = None  # settings of its own; None: those of the sampler
    # what else ends it, beside the end tokens that the devices know; None: the sampler's texts
    criteria: "StopCriteria | None" = None
    # most tokens of a conversation's first turn; None: as many as `limit`
    first_limit: int | None = None
    tokens: list[int] = field(default_factory=list)
    # log-probability of each token under the distribution that was drawn from
    logprobs: list[float] = field(default_factory=list)
    # log-probability of each token under softmax(logits / temperature)
    full_logprobs: list[float] = field(default_factory=list)
    # the routes of its prompt, and of its tokens piece by piece; None, []: none are recorded
    prompt_routes: "RoutePiece | None" = None
    routes: "list[RoutePiece]" = field(default_factory=list)
    reason: str | None = None  # one of types.FINISH, once it has ended; error on a server
    number: int = -1  # its number in the engine, once its prompt was read
    # the first chunk that decodes it; None: the tokens that it had before wait to be read
    first_chunk: int | None = 0
    num_new: int = 0  # tokens of the last chunk
    # seconds from the start of the rollout until its first tokens were read
    began: float | None = None
    ended: float | None = None  # seconds from the start of the rollout until it had ended
    text: TextStream | None = None  # its text so far, only where stop texts are looked for
    tail: str = ""  # the end of its text so far


@dataclass(frozen=True)
class StopCriteria:
    """Tokens and texts that end a completion before its limit.
    Example: `StopCriteria({1: "eos"}, ("\\n\\n",), tokenizer)`."""

    tokens: dict[int, str]  # "eos" or "stop", by the token that ends a completion
    texts: tuple[str, ...] = ()  # texts that end a completion and stay in it
    # decodes tokens for the texts and for messages; None if there is none
    tokenizer: Tokenizer | None = None

    def check(self) -> None:
        """Raises ValueError if there are texts and no tokenizer."""
        if self.texts and self.tokenizer is None:
            raise ValueError(
                f"stop={list(self.texts)}: stop texts need a tokenizer, and there is none"
            )

    def end_of(self, request: Request, new: list[int]) -> int | None:
        """How many of the new tokens there are up to a stop text, or a token of the request's own
        criteria; None."""
        tokens = () if request.criteria is None else request.criteria.tokens
        criteria = request.criteria or self
        if not criteria.texts and not tokens:
            return None
        if request.text is None and criteria.texts:
            # A stop text may be the text of a special token.
            request.text = criteria.tokenizer.stream(skip_special=False)
        longest = max(map(len, criteria.texts), default=0)
        for count, token in enumerate(new, start=1):
            if criteria.texts:
                request.tail += request.text.feed([token])
            if token in tokens or any(text in request.tail for text in criteria.texts):
                return count
            # A stop text may begin in one token and end in a later one.
            request.tail = request.tail[-longest:]
        return None

    def not_finite(self, request: Request) -> str:
        """The message for a request whose log-probabilities are not finite."""
        place = (
            f"token {len(request.tokens) + 1} or a little later of completion "
            f"{request.generation + 1} of prompt {request.prompt + 1}"
            f"{_quoted(request.ids, self.tokenizer)}"
        )
        return (
            f"the model's scores are not finite at {place}: the weights are damaged, "
            "or too large for the type of the computation, or the temperature is almost 0"
        )


@dataclass(frozen=True)
class RolloutArrays:
    """The arrays of a `Rollout`, [B, T] each, while completions come in, from column
    max_prompt_length on.
    Example: of `GenerationConfig(4, 3)`, a prompt [5, 6] with the completion [7, 1] is the row [0,
    0, 5, 6, 7, 1, 0]."""

    # the first column of completions
    width: int
    tokens: np.ndarray
    completion_mask: np.ndarray
    logprobs: np.ndarray
    full_logprobs: np.ndarray
    finish: np.ndarray  # [B]
    seconds: np.ndarray  # [B, 2]
    # by row, the routes of the prompt and of the completion; {}: none are recorded
    routes: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        num_rows: int,
        generation: GenerationConfig,
        pad_id: int,
    ) -> "RolloutArrays":
        """Makes so many rows of padding."""
        width = generation.max_prompt_length
        shape = (num_rows, width + generation.max_new_tokens)
        return cls(
            width=width,
            tokens=np.full(shape, pad_id, np.int32),
            completion_mask=np.zeros(shape, bool),
            logprobs=np.zeros(shape, np.float32),
            full_logprobs=np.zeros(shape, np.float32),
            finish=np.zeros(num_rows, np.int8),
            seconds=np.zeros((num_rows, 2), np.float32),
        )

    def only(self, row: int) -> "RolloutArrays":
        """A copy of one row, without routes."""
        arrays = (getattr(self, part.name) for part in fields(self)[1:-1])
        return RolloutArrays(self.width, *(array[row : row + 1].copy() for array in arrays))

    def write_completion(self, row: int, request: Request) -> None:
        """Writes a request that has ended."""
        here = np.s_[row, self.width : self.width + len(request.tokens)]
        self.tokens[here] = request.tokens
        self.completion_mask[here] = True
        self.logprobs[here] = request.logprobs
        self.full_logprobs[here] = request.full_logprobs
        self.finish[row] = FINISH.index(request.reason)
        if request.prompt_routes is not None:
            self.routes[row] = joined([request.prompt_routes, *request.routes])
        self.seconds[row] = (request.began, request.ended)

    def rollout(
        self,
        prompts: Prompts,
        num_generations: int,
        metrics: Metrics,
    ) -> Rollout:
        """The rollout, with each prompt left of its completions."""
        token_mask = self.completion_mask.copy()
        for p, prompt in enumerate(prompts):
            rows = slice(p * num_generations, (p + 1) * num_generations)
            # Prompts end at one column, so that all completions begin at the same one.
            begin = self.width - len(prompt)
            self.tokens[rows, begin : self.width] = prompt
            token_mask[rows, begin : self.width] = True
        routes = None
        for row, of_row in self.routes.items():
            if routes is None:
                routes = np.zeros((*self.tokens.shape, of_row.shape[1]), of_row.dtype)
            # prompt and completion stand side by side
            begin = np.flatnonzero(token_mask[row])[0]
            routes[row, begin : begin + len(of_row)] = of_row
        return Rollout(
            tokens=self.tokens,
            token_mask=token_mask,
            completion_mask=self.completion_mask,
            logprobs=self.logprobs,
            finish=self.finish,
            full_logprobs=self.full_logprobs,
            seconds=self.seconds,
            metrics=metrics,
            routes=routes,
        )


# on_chunk(requests that got tokens, those that ended by row, each as a Rollout of one row)
OnChunk = Callable[[Sequence[Request], dict[int, Rollout]], None]


def check_prompts(
    prompts: Prompts,
    cfg: Architecture,
    generation: GenerationConfig,
    tokenizer: Tokenizer | None,
) -> None:
    """Raises ValueError, which names the prompt, for a prompt that cannot be continued."""
    if not len(prompts):
        raise ValueError("there are no prompts to continue")
    for i, prompt in enumerate(prompts):
        name = f"prompt {i + 1} of {len(prompts)}"
        if not 0 < len(prompt) <= generation.max_prompt_length:
            raise ValueError(
                f"{name} has {len(prompt)} tokens; it takes 1 to "
                f"max_prompt_length={generation.max_prompt_length}"
            )
        unknown = [token for token in prompt if not 0 <= token < cfg.vocab_size]
        if unknown:
            raise ValueError(
                f"{name} holds token {unknown[0]}, and the model has tokens 0 to "
                f"{cfg.vocab_size - 1}: the tokenizer is not this model's"
                f"{_quoted(prompt, tokenizer)}"
            )


def _quoted(prompt: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """ ", " and the text of a prompt, shortened, for a message; empty without a tokenizer."""
    return "" if tokenizer is None else f", {shortened(tokenizer.decode(list(prompt)))}"
