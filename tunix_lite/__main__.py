"""`python -m tunix_lite COMMAND ...`, the same as the console script `tunix-lite`."""

import importlib
import shlex
import sys

from tunix_lite.commands import help as help_pages
from tunix_lite.commands.closed_pipe import as_long_as_read
from tunix_lite.commands.help import COMMANDS
from tunix_lite.settings.hints import near_word

# Commands that were here, and those of other projects, and what they are now.
_ELSEWHERE = {
    "chat": "generate",
    "report": "doctor",
    "sft": "train algorithm=sft",
    "grpo": "train algorithm=grpo",
    "dpo": "train algorithm=dpo",
    "rloo": "train algorithm=rloo",
    "resume": "train hydra.run.dir=FOLDER",
    "eval": "evaluate",
    "merge": "export kind=merged",
    "test_distributed_setup": "check",
    "gpu-info": "check",
    "memory-check": "plan",
    "estimate-memory": "plan",
    "sweep": "train --multirun seed=0,1",
}


@as_long_as_read()
def main() -> None:
    argv = sys.argv[1:]
    command = argv[0] if argv else ""
    # Help needs nothing that takes long to import. Other commands have one of their own.
    words = ["--help", *argv[1:]] if command == "help" else argv
    is_of_all = command in ("help", "train") or command.startswith("-")
    if is_of_all and help_pages.answered(words):
        return
    if command in COMMANDS:
        sys.argv.pop(1)
        place = "tunix_lite" if command == "launch" else "tunix_lite.commands"
        importlib.import_module(f"{place}.{command}").main()
    else:
        print(f"error: {_no_command(command, argv[1:])}", file=sys.stderr)
        sys.exit(2)


def _no_command(word: str, others: list[str]) -> str:
    """Explains a first word that is no command."""
    there = f"there is {', '.join(COMMANDS)}"
    if not word:
        return f"which command? {there}; tunix-lite --help says what they do"
    if "=" in word or word.startswith("-"):
        return f"{word}: the command comes first: tunix-lite train {word}; {there}"
    meant = _ELSEWHERE.get(word.lower()) or near_word(word, COMMANDS)
    if meant is None:
        return f"there is no command {word}; {there}"
    line = " ".join(["tunix-lite", meant, *map(shlex.quote, others)])
    return f"there is no command {word}; did you mean {line}?"


if __name__ == "__main__":
    main()
