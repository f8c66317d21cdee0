"""`--help`: the commands, the groups and the settings that people change; with `all`, or with the
name of a group or a setting, the settings as conf/ explains them.

It reads conf/ alone, and imports neither jax nor Hydra: it starts at once.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tunix_lite import __version__
from tunix_lite.commands.closed_pipe import as_long_as_read
from tunix_lite.distributed.command_line import conf_dir, config_dir

COMMANDS = {
    "train": "train a model; takes the same overrides as run_training.py",
    "launch": "start the processes of a run on this machine, and watch them",
    "generate": "complete a prompt, or a file of prompts",
    "chat": "talk to a model",
    "serve": "answer clients of the OpenAI API",
    "evaluate": "measure a model on tasks, with intervals, or compare two models",
    "plan": "memory and speed of a run, on devices that need not be here",
    "check": "test this machine, its devices and its processes",
    "doctor": "find in the files of a run why it does not learn",
    "watch": "show the numbers of a run that goes on elsewhere",
    "report": "write a page on the results of a run, or of several",
    "replay": "repeat a step, or find why an update was skipped",
    "export": "write a model as a Hugging Face folder or a PEFT adapter",
}
# What people change, in the order in which they do.
OFTEN = """\
  model.weights, model.mesh_shape, model.lora.rank, task.prompt,
  algorithm.num_generations, algorithm.kl_coef, generation.max_prompt_length,
  generation.max_new_tokens, generation.temperature, training.max_steps,
  training.prompts_per_step, training.micro_batch_size,
  training.mixed_precision, training.remat, training.packing,
  training.save_interval_steps, optimizer.learning_rate, optimizer.schedule,
  evaluation.num_examples, evaluation.interval_steps, seed, resume,
  runtime.dry_run"""
FLAGS = {
    "--help [GROUP|KEY|all]": "this help, or of a group, a setting, everything",
    "--cfg job": "show the settings of a run without running it",
    "--info defaults-tree": "show which files the settings come from",
    "--multirun, -m": "a run of each combination, such as seed=0,1",
    "--config-dir FOLDER": "options of your own, in the same subfolders as conf/",
    "--config-name NAME": "begin with your NAME.yaml, not with config.yaml",
    "--version": "the versions of tunix_lite and of its packages",
}
HELP = ("--help", "-h")


# ---- reading conf/


def groups() -> dict[str, str]:
    """The groups of settings, and the option of each that is the default."""
    text = (conf_dir() / "config.yaml").read_text()
    return dict(re.findall(r"^\s+- (\w+): (\S+)$", text, re.MULTILINE))


def options(group: str, more: str | None = None) -> list[str]:
    """The options of a group, in conf/ and in a folder of the user's."""
    folders = [conf_dir(), *([Path(more)] if more else [])]
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def files_of(group: str, argv: list[str]) -> list[Path]:
    """The file of the option that a command line chooses, after those that it begins with."""
    option = groups()[group]
    for word in argv:
        key, _, value = word.partition("=")
        if key == group and value in options(group, config_dir(argv)):
            option = value
    folders = [conf_dir(), Path(config_dir(argv) or ".")]
    files = [folder / group / f"{option}.yaml" for folder in folders]
    return [*_with_parts(next(file for file in files if file.is_file()))]


def _with_parts(file: Path) -> Iterator[Path]:
    """The file of an option, after those that it begins with."""
    before = re.findall(r"^\s+- ([\w/]+)(?:@_here_)?$", file.read_text(), re.MULTILINE)
    for name in before:
        if name != "_self_":
            yield from _with_parts(file.parent / f"{name}.yaml")
    yield file


# ---- showing it


def answered(argv: list[str]) -> bool:
    """Shows our help or our version if a command line of training asks for it, where Hydra would
    show its own. It needs no JAX, so it is there at once."""
    is_help = topic(argv) is not None
    if not is_help and "--version" not in argv:
        return False
    with as_long_as_read():
        show_help(argv) if is_help else print(versions())
    return True


def topic(argv: list[str]) -> str | None:
    """Returns the topic that help is asked about: "" for the short form; None: for nothing."""
    for i, word in enumerate(argv):
        flag, _, about = word.partition("=")
        if flag in HELP:
            after = argv[i + 1] if i + 1 < len(argv) else ""
            return about or ("" if "=" in after or after.startswith("-") else after)
    return None


def show_help(argv: list[str]) -> None:
    """Prints the help that a command line asks for; ends the process with 2 if it asks about an
    unknown topic."""
    about = topic(argv) or ""
    group = about.partition(".")[0]
    if not about:
        print("\n".join(short_help(argv)))
        return
    # The settings that are in no group: seed, resume and the like.
    others = (conf_dir() / "config.yaml").read_text().partition("\nhydra:")[0]
    is_other = re.search(rf"^{re.escape(group)}:", others, re.MULTILINE)
    if about != "all" and group not in groups() and not is_other:
        print(f"error: --help {about}: there is no such group or setting", file=sys.stderr)
        sys.exit(2)
    for name in groups() if about == "all" else [group] if group in groups() else []:
        print(f"{name}= is one of {', '.join(options(name, config_dir(argv)))}")
        # A recipe changes settings of other groups, and has none of its own.
        if name != "experiment":
            texts = [file.read_text() for file in files_of(name, argv)]
            print(f"{name}:\n{textwrap.indent(''.join(texts), '  ')}")
    if about == "all" or is_other:
        print(others)


def short_help(argv: Iterable[str] = ()) -> list[str]:
    """One screen or two: commands, flags, groups, and the settings that people change."""
    choices = {}
    for group, default in groups().items():
        others = [each for each in options(group, config_dir(list(argv))) if each != default]
        if others:
            choices[group] = ", ".join([default, *others])
    return [
        "tunix_lite: RL post-training of language models in JAX",
        "",
        "usage: tunix-lite COMMAND [key=value ...]",
        "       python run_training.py [key=value ...]     the same as tunix-lite train",
        "",
        "  tunix-lite train                                GRPO on a small model, on any devices",
        "  tunix-lite train training.max_steps=20 seed=1",
        "  tunix-lite train 'model.mesh_shape=[[2,2],[fsdp,tp]]'",
        "  tunix-lite train --multirun algorithm=grpo,dr_grpo",
        "",
        "Commands; `tunix-lite COMMAND --help` shows the settings of each:",
        *_table(COMMANDS),
        "",
        "Flags:",
        *_table(FLAGS),
        "",
        "Groups, chosen as group=option; the first is the default:",
        *_table(choices),
        "",
        "Settings that people change, as key=value; `--help GROUP` explains them:",
        OFTEN,
    ]


def _table(texts: dict[str, str]) -> Iterator[str]:
    """Names and their texts in two columns, the first as wide as its longest name."""
    column = max(map(len, texts)) + 2
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    for name, text in texts.items():
        for i, line in enumerate(textwrap.wrap(text, width - column - 2)):
            yield f"  {'' if i else name:<{column}}{line}"


def versions() -> str:
    """Names the versions of this package and its libraries: "tunix_lite 0.1.0 (python 3.11.2, jax
    0.10.2, ...)"."""
    texts = [f"python {sys.version.split()[0]}"]
    for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "hydra-core"):
        try:
            texts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            texts.append(f"{name} not installed")
    return f"tunix_lite {__version__} ({', '.join(texts)})"
