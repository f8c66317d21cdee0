"""An engine without a model: what it says is written in the test, so that tests of servers compile nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server_thread import in_thread

from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import LiveSequence, NewTokens
from tunix_lite.serving.app import Server, ServerSettings
from tunix_lite.serving.calls import Limits


class ScriptedEngine:
    """Answers each sequence with say(text of its prompt), in pieces of three tokens, and an end of the turn.

    Token number t has log-probability -0.01 (t + 1). What say returns may be token ids, too; None never answers.
    """

    num_slots = 4
    is_alive = True
    failure = None

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], str | list[int] | None]):
        self.tokenizer = tokenizer
        self.say = say
        self.asked: list[LiveSequence] = []
        self.cancelled: list[LiveSequence] = []

    def submit(self, sequences: list[LiveSequence]) -> None:
        for one in sequences:
            self.asked.append(one)
            said = self.say(self.tokenizer.decode(one.ids, skip_special=False))
            if said is None:
                continue
            tokens = [*(self.tokenizer.encode(said) if isinstance(said, str) else said), self.tokenizer.eos_ids[-1]]
            reason = "eos" if len(tokens) <= one.limit else "length"
            tokens = tokens[: one.limit]
            logprobs = [-0.01 * (t + 1) for t in range(len(tokens))]
            for at in range(0, len(tokens), 3):
                part = slice(at, at + 3)
                is_last = at + 3 >= len(tokens)
                one.on_tokens(NewTokens(tokens[part], logprobs[part], logprobs[part], reason if is_last else None))

    def cancel(self, sequence: LiveSequence) -> None:
        self.cancelled.append(sequence)


@contextmanager
def listening(engine: ScriptedEngine, limits: Limits, **settings) -> Iterator[str]:
    """The address of a server over this engine."""
    server = Server(engine, engine.tokenizer, limits, ServerSettings(port=0, **settings))
    with in_thread(server.application()) as address:
        yield address
