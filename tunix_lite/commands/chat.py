"""`tunix-lite chat checkpoint=outputs/latest`: a conversation on the terminal."""

import sys
from dataclasses import dataclass

from tunix_lite.commands import program
from tunix_lite.commands.generate import escape_for_terminal, open_chosen_model
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.plain_text import visible

HELP = "/reset begins anew, /system TEXT does so with a system message, /exit or Ctrl-D ends"


@dataclass(frozen=True)
class ChatConfig:
    """Whom to talk to."""

    # the folder of a run, whose newest weights speak; null: model.weights as they are
    checkpoint: str | None = None
    step: int | None = None  # of an older checkpoint of that run; null: the newest
    system: str | None = None  # what the system message says; null: there is none

    def __post_init__(self):
        if self.step is not None and self.checkpoint is None:
            raise ValueError("step= is of a run: give checkpoint=FOLDER, too")


def main() -> None:
    program.run_command("chat", ChatConfig, chat)


def chat(run: RunConfig, settings: ChatConfig) -> None:
    """Reads lines until there are no more, and answers each as the conversation so far asks."""
    model = open_chosen_model(run, settings)
    if not model.tokenizer.has_chat_template:
        raise ConfigError(
            f"{model.source.name} has no chat template; tunix-lite generate continues a text"
        )
    print(HELP, file=sys.stderr)
    start = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    said, turn = list(start), 0
    while (line := _ask()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            said = list(start)
        elif line.startswith("/system "):
            start = [{"role": "system", "content": line.removeprefix("/system ")}]
            said = list(start)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line.strip():
            asked = [*said, {"role": "user", "content": line}]
            try:
                answer = _answer(model, asked, run, turn)
            except ValueError as error:
                # too long, or not as the template wants it: the conversation stays as it was
                print(f"{visible(str(error))}. /reset begins anew", file=sys.stderr)
                continue
            said, turn = [*asked, {"role": "assistant", "content": answer}], turn + 1


def _ask() -> str | None:
    """A line of the user's; None when there are no more."""
    # closed
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(model, asked: list[dict], run: RunConfig, turn: int) -> str:
    pieces = []
    # each turn draws anew
    seed = (run.seed + turn) % 2**32
    for text in model.stream(asked, run.generation, seed, run.rollout):
        pieces.append(text)
        print(escape_for_terminal(text), end="", flush=True)
    print()
    return "".join(pieces)
