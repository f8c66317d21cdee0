"""`python -m tunix_lite COMMAND ...`, the same as the console script `tunix-lite`."""

import importlib
import sys

from tunix_lite.commands import help as help_pages
from tunix_lite.commands.closed_pipe import as_long_as_read
from tunix_lite.commands.help import COMMANDS
from tunix_lite.hints import near_word

# Commands of other projects, and what they are here.
ELSEWHERE = {
    "sft": "tunix-lite train algorithm=sft",
    "grpo": "tunix-lite train algorithm=grpo",
    "dpo": "tunix-lite train algorithm=dpo",
    "rloo": "tunix-lite train algorithm=rloo",
    "run": "tunix-lite train",
    "fit": "tunix-lite train",
    "finetune": "tunix-lite train algorithm=sft",
    "resume": "tunix-lite train hydra.run.dir=FOLDER",
    "eval": "tunix-lite evaluate",
    "test": "tunix-lite evaluate",
    "validate": "tunix-lite evaluate",
    "infer": "tunix-lite generate",
    "inference": "tunix-lite generate",
    "sample": "tunix-lite generate",
    "merge": "tunix-lite export kind=merged",
    "convert": "tunix-lite export",
    "env": "tunix-lite check",
    "test_distributed_setup": "tunix-lite check",
    "gpu-info": "tunix-lite check",
    "memory-check": "tunix-lite plan",
    "estimate-memory": "tunix-lite plan",
    "sweep": "tunix-lite train --multirun seed=0,1",
    "multirun": "tunix-lite train --multirun seed=0,1",
}


@as_long_as_read()
def main() -> None:
    argv = sys.argv[1:]
    command = argv[0] if argv else ""
    # What shows something, and needs nothing that takes long to import.
    if command == "--version":
        print(help_pages.versions())
    elif command == "help" or command.partition("=")[0] in help_pages.HELP:
        help_pages.show_help(["--help", *argv[1:]] if command == "help" else argv)
    elif command == "train" and help_pages.topic(argv) is not None:
        help_pages.show_help(argv[1:])
    elif command in COMMANDS:
        sys.argv.pop(1)
        importlib.import_module(f"tunix_lite.commands.{command}").main()
    else:
        print(f"error: {_no_command(command)}", file=sys.stderr)
        sys.exit(2)


def _no_command(word: str) -> str:
    """Explains a first word that is no command."""
    there = f"there is {', '.join(COMMANDS)}"
    if not word:
        return f"which command? {there}; tunix-lite --help says what they do"
    if "=" in word or word.startswith("-"):
        return f"{word}: the command comes first: tunix-lite train {word}; {there}"
    meant = ELSEWHERE.get(word.lower()) or near_word(word, COMMANDS)
    if meant in COMMANDS:
        meant = f"tunix-lite {meant}"
    return f"there is no command {word}; {f'did you mean {meant}?' if meant else there}"


if __name__ == "__main__":
    main()
