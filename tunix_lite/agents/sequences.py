"""Calls of an agent as sequences of tokens.

Tokens are learned from as they were sampled. A call whose prompt begins with all the tokens of an
earlier sequence goes on with it, so that a conversation is one sequence. Any other call begins a
sequence of its own, and what it read counts for nothing there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunix_lite.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampledChoice:
    """One choice of one call.

    Example: SampledChoice((2, 17, 5), (9, 1), (-0.3, -0.1)): two tokens after a prompt of three.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    # log-probability of each token under softmax(logits / temperature), in nats
    logprobs: tuple[float, ...]


@dataclass
class TokenSequence:
    """Tokens that an agent's calls read and sampled.

    Example: TokenSequence([2, 17, 9, 1], [F, F, T, T], [0.0, 0.0, -0.3, -0.1], num_calls=1).
    """

    tokens: list[int] = field(default_factory=list)
    # True on tokens that the model sampled
    is_sampled: list[bool] = field(default_factory=list)
    # log-probabilities of sampled tokens; 0 on all others
    logprobs: list[float] = field(default_factory=list)
    num_calls: int = 0

    def add(self, sampled: SampledChoice) -> None:
        """Goes on with a choice whose prompt begins with these tokens."""
        read = sampled.prompt[len(self.tokens) :]
        self.tokens += [*read, *sampled.tokens]
        self.is_sampled += [False] * len(read) + [True] * len(sampled.tokens)
        self.logprobs += [0.0] * len(read) + list(sampled.logprobs)
        self.num_calls += 1

    def is_start_of(self, prompt: Sequence[int]) -> bool:
        """Returns whether the prompt begins with all of these tokens."""
        return list(prompt[: len(self.tokens)]) == self.tokens


def add_choice(sequences: list[TokenSequence], sampled: SampledChoice) -> None:
    """Adds a choice to the longest of the sequences that its prompt goes on with, or as a new
    one."""
    beginnings = [one for one in sequences if one.is_start_of(sampled.prompt)]
    if not beginnings:
        beginnings = [TokenSequence()]
        sequences += beginnings
    max(beginnings, key=lambda one: len(one.tokens)).add(sampled)


def with_tokens_as_sampled(
    prompt: Sequence[int], sequences: Sequence[TokenSequence], tokenizer: Tokenizer
) -> list[int]:
    """Returns the tokens of a prompt, where the model's own words keep the tokens that it sampled.

    A client sends texts, and a tokenizer may cut the text of a completion into other tokens than
    were sampled. Where the text of the prompt begins with that of an earlier sequence, it gets the
    tokens of that sequence. Its text stays the same, character by character.
    """
    prompt = list(prompt)
    if not sequences or any(one.is_start_of(prompt) for one in sequences):
        return prompt
    text = tokenizer.decode(prompt, skip_special=False)
    for one in sorted(sequences, key=lambda one: len(one.tokens), reverse=True):
        said = tokenizer.decode(one.tokens, skip_special=False)
        if not text.startswith(said) or said == text:
            continue
        tokens = [*one.tokens, *tokenizer.encode(text[len(said) :])]
        if tokenizer.decode(tokens, skip_special=False) == text:
            return tokens
    return prompt
