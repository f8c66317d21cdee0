"""`python -m tunix_lite COMMAND ...`, the same as the console script `tunix-lite`."""

import importlib
import sys

COMMANDS = {
    "train": "train a model; takes the same overrides as run_training.py",
    "launch": "start the processes of a run on this machine, and watch them",
    "generate": "complete a prompt, or a file of prompts",
    "chat": "talk to a model",
    "evaluate": "how good a model is at a task, and how sure that is; or two models",
    "plan": "what fits on which devices, there or not, and how fast it can be",
    "check": "whether this machine, its devices and its processes are in order",
    "doctor": "why a run does not learn, from its files alone",
    "watch": "the numbers of a run that goes on elsewhere, from its files",
    "report": "what came of a run, or of several, on one page",
    "replay": "why an update was skipped, sequence by sequence",
    "export": "write a model as a Hugging Face folder or a PEFT adapter",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        asked_for_help = sys.argv[1:2] in (["--help"], ["-h"])
        lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
        text = "\n".join(["usage: tunix-lite COMMAND [key=value ...]", "", *lines])
        print(text, file=sys.stdout if asked_for_help else sys.stderr)
        sys.exit(0 if asked_for_help else 2)
    command = sys.argv.pop(1)
    importlib.import_module(f"tunix_lite.commands.{command}").main()


if __name__ == "__main__":
    main()
