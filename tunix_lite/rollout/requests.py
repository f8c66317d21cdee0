"""Requests to the sampler, one completion each, and the checks of callers' arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.tokenizer import TextStream, Tokenizer
from tunix_lite.plain_text import shortened
from tunix_lite.rollout.settings import GenerationConfig
from tunix_lite.types import Prompts


@dataclass
class Request:
    """A completion that grows from chunk to chunk.

    Example: `Request(prompt=0, index=0, generation=1, limit=64)` is the second completion of the
    first prompt; after a chunk its `tokens` are [12, 7], say, and its `reason` is "eos".
    """

    # index of its prompt in the list of prompts
    prompt: int
    # the number of its prompt, from which its random key follows
    index: int
    # index among the completions of its prompt
    generation: int
    # most tokens
    limit: int
    # most tokens of a conversation's first turn; None: as many as `limit`
    first_limit: int | None = None
    tokens: list[int] = field(default_factory=list)
    # log-probability of each token under the distribution that was drawn from
    logprobs: list[float] = field(default_factory=list)
    # log-probability of each token under softmax(logits / temperature)
    full_logprobs: list[float] = field(default_factory=list)
    # one of types.FINISH, once it has ended
    reason: str | None = None
    # seconds from the start of the rollout until its first tokens were read
    began: float | None = None
    # seconds from the start of the rollout until it had ended
    ended: float | None = None
    # tokens of all prompts of the rollout that were read before its last chunk, and that were not
    prompts_read: tuple[int, int] = (0, 0)
    # its text so far, only where stop texts are looked for
    text: TextStream | None = None
    # the end of its text so far
    tail: str = ""


@dataclass(frozen=True)
class StopCriteria:
    """Tokens and texts that end a completion before its limit.

    Example: `StopCriteria({1: "eos"}, ("\\n\\n",), tokenizer)`.
    """

    # "eos" or "stop", by the token that ends a completion
    tokens: dict[int, str]
    # texts that end a completion and stay in it
    texts: tuple[str, ...] = ()
    # decodes tokens for the texts and for messages; None if there is none
    tokenizer: Tokenizer | None = None

    def check(self) -> None:
        """Raises ValueError if there are texts and no tokenizer."""
        if self.texts and self.tokenizer is None:
            raise ValueError(
                f"stop={list(self.texts)}: stop texts need a tokenizer, and there is none"
            )


def stop_text_end(
    request: Request,
    new: list[int],
    criteria: StopCriteria,
) -> int | None:
    """Returns how many of the new tokens complete a stop text; None if they complete none."""
    if not criteria.texts:
        return None
    if request.text is None:
        request.text = criteria.tokenizer.stream(skip_special=False)
    longest = max(map(len, criteria.texts))
    for count, token in enumerate(new, start=1):
        request.tail += request.text.feed([token])
        if any(text in request.tail for text in criteria.texts):
            return count
        request.tail = request.tail[-longest:]
    return None


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
        lowest = np.min(prompt)
        highest = np.max(prompt)
        if highest >= cfg.vocab_size or lowest < 0:
            wrong = highest if highest >= cfg.vocab_size else lowest
            raise ValueError(
                f"{name} holds token {wrong}, and the model has tokens 0 to {cfg.vocab_size - 1}: "
                f"the tokenizer is not this model's{quoted(prompt, tokenizer)}"
            )


def check_limits(
    limits: Sequence[int] | None,
    num_requests: int,
    generation: GenerationConfig,
) -> list[int]:
    """The most tokens of each completion; max_new_tokens where limits is None.

    Raises ValueError unless there is one limit from 1 to max_new_tokens for every request.
    """
    if limits is None:
        return [generation.max_new_tokens] * num_requests
    if len(limits) != num_requests:
        raise ValueError(f"{len(limits)} limits for {num_requests} completions; give one for each")
    for i, limit in enumerate(limits):
        if not 1 <= limit <= generation.max_new_tokens:
            raise ValueError(
                f"limits[{i}]={limit}; it is 1 to max_new_tokens={generation.max_new_tokens}"
            )
    return [int(limit) for limit in limits]


def not_finite(
    request: Request,
    prompt: Sequence[int],
    tokenizer: Tokenizer | None,
) -> str:
    """The message for a request whose log-probabilities are not finite."""
    place = (
        f"token {len(request.tokens) + 1} or a little later of completion "
        f"{request.generation + 1} of prompt {request.prompt + 1}{quoted(prompt, tokenizer)}"
    )
    return (
        f"the model's scores are not finite at {place}: the weights are damaged, "
        "or too large for the type of the computation, or the temperature is almost 0"
    )


def quoted(prompt: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """ ", " and the text of a prompt, shortened, for a message; empty without a tokenizer."""
    return "" if tokenizer is None else f", {shortened(tokenizer.decode(list(prompt)))}"
