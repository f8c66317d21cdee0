"""Episodes: runs of an agent on an example, whose calls the server records as tokens, as they were
sampled. A call whose prompt begins with all tokens of an earlier sequence goes on with it."""

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunix_lite.basics.types import seed_of_call
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import DrawSettings
from tunix_lite.serving.answers import Piece
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.calls import Call

_IS_OVER = (
    "there is no such episode, or it is over: "
    "base_url is .../episodes/ID/v1, or the API key is ID"
)


@dataclass
class _TokenSequence:
    """Tokens that an agent's calls read and sampled. Example: _TokenSequence([2, 17, 9, 1], [F, F,
    T, T], [0.0, 0.0, -0.3, -0.1], num_calls=1)."""

    tokens: list[int] = field(default_factory=list)
    # True on tokens that the model sampled
    is_sampled: list[bool] = field(default_factory=list)
    # log-probabilities of sampled tokens, under softmax(logits / temperature); 0 on all others
    logprobs: list[float] = field(default_factory=list)
    num_calls: int = 0

    def is_start_of(self, prompt: Sequence[int]) -> bool:
        """Returns whether the prompt begins with all of these tokens."""
        return list(prompt[: len(self.tokens)]) == self.tokens


def add_choice(
    sequences: list[_TokenSequence],
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
) -> None:
    """Adds a choice of a call to the longest of the sequences that its prompt goes on with, or as a
    new one. logprobs: of its tokens, in nats."""
    beginnings = [one for one in sequences if one.is_start_of(prompt)]
    if not beginnings:
        beginnings = [_TokenSequence()]
        sequences += beginnings
    # the longest shares most: its tokens are then learned from once
    longest = max(beginnings, key=lambda one: len(one.tokens))
    read = prompt[len(longest.tokens) :]
    longest.tokens += [*read, *tokens]
    longest.is_sampled += [False] * len(read) + [True] * len(tokens)
    longest.logprobs += [0.0] * len(read) + list(logprobs)
    longest.num_calls += 1


def with_tokens_as_sampled(
    prompt: Sequence[int], sequences: Sequence[_TokenSequence], tokenizer: Tokenizer
) -> list[int]:
    """Returns the tokens of a prompt. Where its text begins with that of an earlier sequence, it
    gets the tokens of that sequence; its text stays the same, character by character."""
    # A client sends texts, and a tokenizer may cut a completion into others than were sampled.
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


@dataclass
class Episode:
    """One run of an agent on an example. Example: episodes.open({"question": "2 + 2"},
    seed=7).sequences after the agent has ended."""

    id: str
    example: dict[str, Any]
    # seed of the episode; sampling depends on it and on the number of a call
    seed: int
    # sampling settings that override the agent's; None: the agent's
    draw: DrawSettings | None = None
    # sequences in the order in which calls ended
    sequences: list[_TokenSequence] = field(default_factory=list)
    num_calls: int = 0
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(sum(one.is_sampled) for one in self.sequences)


class OpenEpisodes:
    """The episodes that are open now: the Recorder of a server. Example: episodes =
    OpenEpisodes(tokenizer, max_prompt_length=512, max_calls=32)."""

    def __init__(self, tokenizer: Tokenizer, max_prompt_length: int, max_calls: int):
        """max_prompt_length: tokens of a prompt, at most. max_calls: of an episode, at most."""
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.max_calls = max_calls
        self._lock = threading.Lock()
        self._open: dict[str, Episode] = {}

    def open(
        self, example: dict[str, Any], seed: int, draw: DrawSettings | None = None
    ) -> Episode:
        """Begins an episode. draw: how tokens are drawn in it; None: as the agent asks."""
        episode = Episode(secrets.token_hex(12), example, seed, draw)
        with self._lock:
            self._open[episode.id] = episode
        return episode

    def close(self, episode: Episode) -> None:
        """Ends an episode: it takes no more calls, and late answers are not recorded."""
        with self._lock:
            episode.is_over = True
            self._open.pop(episode.id, None)

    # ---- what the server calls

    def begin(self, episode: str, call: Call) -> Call:
        """See Recorder.begin."""
        with self._lock:
            opened = self._open.get(episode)
            if opened is None:
                raise BadCall(_IS_OVER, code="episode_is_over")
            if opened.num_calls >= self.max_calls:
                raise BadCall(
                    f"this episode has made {self.max_calls} calls, and it may make no more",
                    code="too_many_calls",
                )
            number = opened.num_calls
            opened.num_calls += 1
            # others of its calls may end meanwhile
            earlier = [_TokenSequence(list(one.tokens)) for one in opened.sequences]
        how = call.draw if opened.draw is None else opened.draw
        seed = seed_of_call(opened.seed, number, 0)
        draw = replace(how, seed=seed)
        prompts = []
        for prompt in call.prompts:
            sampled = prompt
            if call.is_text:
                sampled = with_tokens_as_sampled(prompt, earlier, self.tokenizer)
            prompts.append(sampled if len(sampled) <= self.max_prompt_length else prompt)
        return replace(call, draw=draw, prompts=prompts)

    @contextlib.contextmanager
    def submitting(self, episode: str) -> Iterator[None]:
        """See Recorder.submitting."""
        # What is sampled after the end of an episode would be sampled while its weights change.
        with self._lock:
            if episode not in self._open:
                raise BadCall(_IS_OVER, code="episode_is_over")
            yield

    def record(self, episode: str, call: Call, choices: list[Piece]) -> None:
        """See Recorder.record. What comes after the end of its episode is left out."""
        with self._lock:
            opened = self._open.get(episode)
            if opened is None:
                return
            for index, choice in enumerate(choices):
                prompt = call.prompts[index // call.body.n]
                add_choice(opened.sequences, prompt, choice.tokens, choice.logprobs)
