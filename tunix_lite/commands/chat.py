"""`tunix-lite chat checkpoint=outputs/latest`: a conversation on the terminal."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.commands import program
from tunix_lite.commands.generate import print_while_sampled
from tunix_lite.commands.which_weights import WhichWeights, open_chosen_model
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.files.plain_text import visible

HELP = "/reset begins anew, /system TEXT does so with a system message, exit or Ctrl-D ends"


@dataclass(frozen=True)
class ChatConfig(WhichWeights):
    """The model to talk to, and how the conversation begins."""

    # Text of the system message. null sends none.
    system: str | None = None


def main() -> None:
    program.run_command("chat", ChatConfig, chat, positional="checkpoint")


def chat(run: RunConfig, settings: ChatConfig) -> None:
    """Reads lines from standard input, and prints the model's answer to each.

    Raises ConfigError if the model has no chat template.
    """
    model = open_chosen_model(run, settings)
    if not model.tokenizer.has_chat_template:
        raise ConfigError(
            f"{model.source.name} has no chat template; model.chat_template=FILE.jinja gives it "
            "one, and tunix-lite generate continues a text"
        )
    if settings.checkpoint is not None:
        of_run = f"the model of {Path(settings.checkpoint).resolve()}"
        print(visible(of_run), file=sys.stderr)
    print(HELP, file=sys.stderr)
    if model.source.name == "bundled":
        sums = "the bundled model does sums of three or four numbers, one at a time"
        print(sums, file=sys.stderr)
    start = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    messages = list(start)
    turn = 0
    while (line := _read_line()) is not None:
        # commands of the chat itself
        if line.strip() in ("/exit", "/quit", "exit", "quit"):
            return
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/system "):
            start = [{"role": "system", "content": line.removeprefix("/system ")}]
            messages = list(start)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)

        # a message for the model
        elif line.strip():
            conversation = [*messages, {"role": "user", "content": line}]
            try:
                # Each turn has a seed of its own, or a repeated question would get the same answer.
                seed = (run.seed + turn) % 2**32
                answer = print_while_sampled(model, conversation, run, seed)
            except ValueError as error:
                # Too long, or not what the template allows: the conversation stays as it was.
                print(f"{visible(str(error))}. /reset begins anew", file=sys.stderr)
                continue
            messages = [*conversation, {"role": "assistant", "content": answer}]
            turn += 1


def _read_line() -> str | None:
    """The next line of the user; None when there are no more."""
    # Standard input is None where the process was started without one.
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
