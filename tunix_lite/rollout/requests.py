"""What is asked of the sampler, one completion each, and what can be wrong with it."""

from dataclasses import dataclass, field

import numpy as np

from tunix_lite.models.decoder import Architecture
from tunix_lite.models.tokenizer import TextStream, Tokenizer
from tunix_lite.plain_text import shortened
from tunix_lite.rollout.settings import GenerationConfig


@dataclass
class Request:
    """A completion, growing from chunk to chunk."""

    prompt: int  # the prompt that it answers, counted in the list that was given
    index: int  # and as its randomness counts it
    generation: int  # which of its completions
    limit: int  # tokens, at most
    tokens: list[int] = field(default_factory=list)
    # under the distribution that was drawn from
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)  # under softmax(scores / temperature)
    reason: str | None = None  # one of types.FINISH, once it has ended
    # seconds from the start of the rollout until its first tokens were seen
    began: float | None = None
    ended: float | None = None  # and until it had ended
    text: TextStream | None = None  # only where stop texts are looked for
    tail: str = ""  # the end of its text so far


def up_to_stop(
    answer: Request, new: list[int], stop: tuple[str, ...], tokenizer: Tokenizer
) -> int | None:
    """How many of the new tokens it takes until a stop text is complete; None if none is."""
    if answer.text is None:
        answer.text = tokenizer.stream(skip_special=False)
    for count, token in enumerate(new, start=1):
        answer.tail += answer.text.feed([token])
        if any(piece in answer.tail for piece in stop):
            return count
        answer.tail = answer.tail[-max(map(len, stop)) :]
    return None


def check_prompts(
    prompts, cfg: Architecture, generation: GenerationConfig, tokenizer: Tokenizer | None
) -> None:
    """Raises ValueError, naming the prompt, for what cannot be continued."""
    if not len(prompts):
        raise ValueError("there are no prompts to continue")
    for i, row in enumerate(prompts):
        name = f"prompt {i + 1} of {len(prompts)}"
        if not 0 < len(row) <= generation.max_prompt_length:
            raise ValueError(
                f"{name} has {len(row)} tokens; it takes 1 to "
                f"max_prompt_length={generation.max_prompt_length}"
            )
        least, top = np.min(row), np.max(row)
        if top >= cfg.vocab_size or least < 0:
            raise ValueError(
                f"{name} holds token {top if top >= cfg.vocab_size else least}, and the model has "
                "tokens 0 to "
                f"{cfg.vocab_size - 1}: the tokenizer is not this model's{quoted(row, tokenizer)}"
            )


def check_limits(limits, count: int, generation: GenerationConfig) -> list[int]:
    if limits is None:
        return [generation.max_new_tokens] * count
    if len(limits) != count:
        raise ValueError(f"{len(limits)} limits for {count} completions; give one for each")
    for i, limit in enumerate(limits):
        if not 1 <= limit <= generation.max_new_tokens:
            raise ValueError(
                f"limits[{i}]={limit}; it is 1 to max_new_tokens={generation.max_new_tokens}"
            )
    return [int(limit) for limit in limits]


def not_finite(answer: Request, prompt, tokenizer: Tokenizer | None) -> str:
    return (
        f"the model's scores are not finite at token {len(answer.tokens) + 1} or a little later of "
        "completion "
        f"{answer.generation + 1} of prompt {answer.prompt + 1}{quoted(prompt, tokenizer)}: the "
        "weights are damaged, "
        "or too large for the type of the computation, or the temperature is all but 0"
    )


def quoted(prompt, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else f", {shortened(tokenizer.decode(list(prompt)))}"
