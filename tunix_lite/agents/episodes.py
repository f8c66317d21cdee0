"""Episodes: runs of an agent on an example, whose calls the server records."""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tunix_lite.agents.sequences import (
    SampledChoice,
    TokenSequence,
    add_choice,
    with_tokens_as_sampled,
)
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import DrawSettings
from tunix_lite.seeds import seed_of_call
from tunix_lite.serving.answers import Piece
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.calls import Call

IS_OVER = (
    "there is no such episode, or it is over: base_url is .../episodes/ID/v1, or the API key is ID"
)


@dataclass
class Episode:
    """One run of an agent on an example.

    Example: episodes.open({"question": "2 + 2"}, seed=7).sequences after the agent has ended.
    """

    id: str
    example: dict[str, Any]
    # seed of the episode; sampling depends on it and on the number of a call
    seed: int
    # sampling settings that override the agent's; None: the agent's
    draw: DrawSettings | None = None
    # sequences in the order in which calls ended
    sequences: list[TokenSequence] = field(default_factory=list)
    # the last value sent to /episodes/ID/reward
    reward: float | None = None
    num_calls: int = 0
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(sum(one.is_sampled) for one in self.sequences)


class OpenEpisodes:
    """The episodes that are open now: the Recorder of a server.

    Example: episodes = OpenEpisodes(tokenizer, max_prompt_length=512, max_calls=32).
    """

    def __init__(self, tokenizer: Tokenizer, max_prompt_length: int, max_calls: int):
        """max_prompt_length: tokens of a prompt, at most. max_calls: of an episode, at most."""
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.max_calls = max_calls
        self._lock = threading.Lock()
        self._open: dict[str, Episode] = {}

    def open(self, example: dict[str, Any], seed: int, draw: DrawSettings | None = None) -> Episode:
        """A new episode. draw: how tokens are drawn in it; None: as the agent asks."""
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
        opened = self._found(episode)
        with self._lock:
            if opened.num_calls >= self.max_calls:
                raise BadCall(
                    f"this episode has made {self.max_calls} calls, and it may make no more",
                    code="too_many_calls",
                )
            number = opened.num_calls
            opened.num_calls += 1
            # others of its calls may end meanwhile
            earlier = [TokenSequence(list(one.tokens)) for one in opened.sequences]
        how = call.draw if opened.draw is None else opened.draw
        seed = seed_of_call(opened.seed, number, 0)
        draw = replace(how, seed=seed, top_logprobs=call.draw.top_logprobs)
        prompts = call.prompts
        if call.is_text:
            prompts = [self._as_sampled(prompt, earlier) for prompt in prompts]
        return replace(call, draw=draw, prompts=prompts)

    def _as_sampled(self, prompt: list[int], earlier: list[TokenSequence]) -> list[int]:
        as_sampled = with_tokens_as_sampled(prompt, earlier, self.tokenizer)
        return prompt if len(as_sampled) > self.max_prompt_length else as_sampled

    @contextlib.contextmanager
    def submitting(self, episode: str) -> Iterator[None]:
        """See Recorder.submitting. What is sampled after the end of an episode would be sampled
        while its weights are updated."""
        with self._lock:
            if episode not in self._open:
                raise BadCall(IS_OVER, code="episode_is_over")
            yield

    def record(self, episode: str, call: Call, choices: list[Piece]) -> None:
        """See Recorder.record. What comes after the end of its episode is left out."""
        with self._lock:
            opened = self._open.get(episode)
            if opened is None:
                return
            for index, choice in enumerate(choices):
                prompt = call.prompts[index // call.choices]
                sampled = SampledChoice(tuple(prompt), tuple(choice.tokens), tuple(choice.logprobs))
                add_choice(opened.sequences, sampled)

    def reward(self, episode: str, value: float) -> None:
        """See Recorder.reward."""
        self._found(episode).reward = value

    def _found(self, episode: str) -> Episode:
        with self._lock:
            opened = self._open.get(episode)
        if opened is None:
            raise BadCall(IS_OVER, code="episode_is_over")
        return opened
