"""`--help`: the commands, the groups and the settings that people change; with `all` or a group,
the settings as conf/ explains them. It imports neither jax nor Hydra, so it starts at once."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from tunix_lite import __version__
from tunix_lite.commands.closed_pipe import as_long_as_read
from tunix_lite.distributed.agreement import installed_version
from tunix_lite.distributed.command_line import conf_dir, config_dir
from tunix_lite.settings.hints import options_of

COMMANDS = {
    "train": "train a model; takes the same overrides as run_training.py",
    "launch": "start the processes of a run on this machine, and watch them",
    "generate": "talk to a model, complete a prompt, or a file of prompts",
    "serve": "answer clients of the OpenAI API",
    "evaluate": "measure a model on a task, with intervals, or compare two models",
    "plan": "memory and speed of a run, on devices that need not be here",
    "tokenizer": "train a tokenizer on the texts of a task",
    "check": "test this machine, its devices and its processes",
    "doctor": "find why a run does not learn, or compare several",
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
_FLAGS = {
    "--help [GROUP|all]": "this help, or all settings of a group, or all there are",
    "--cfg job": "show the settings of a run without running it",
    "--info defaults-tree": "show which files the settings come from",
    "--multirun, -m": "a run of each combination, such as seed=0,1",
    "--config-dir FOLDER": "options of your own, in the same subfolders as conf/",
    "--config-name NAME": "begin with your NAME.yaml, not with config.yaml",
    "--version": "the versions of tunix_lite and of its packages",
}
_INTRODUCTION = """\
tunix_lite: RL post-training of language models in JAX

usage: tunix-lite COMMAND [key=value ...]
       python run_training.py [key=value ...]     the same as tunix-lite train

  tunix-lite train                                GRPO on a small model, on any devices
  tunix-lite train training.max_steps=20 seed=1
  tunix-lite train 'model.mesh_shape=[[2,2],[fsdp,tp]]'
  tunix-lite train --multirun algorithm=grpo,dr_grpo

Commands; `tunix-lite COMMAND --help` shows the settings of each:"""


def answered(argv: list[str]) -> bool:
    """Shows our help or our version if a command line of training asks for it, where Hydra would
    show its own. It needs no JAX, so it is there at once."""
    about = _topic(argv)
    if about is None and "--version" not in argv:
        return False
    with as_long_as_read():
        if about is not None:
            print(help_on(about, argv))
            return True
        texts = [f"python {sys.version.split()[0]}"]
        # by their metadata: importing jax takes seconds
        for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "hydra-core"):
            texts.append(f"{name} {installed_version(name) or 'not installed'}")
        print(f"tunix_lite {__version__} ({', '.join(texts)})")
    return True


def _topic(argv: list[str]) -> str | None:
    """Returns the topic that help is asked about: "" for the short form; None: for nothing."""
    for i, word in enumerate(argv):
        flag, _, about = word.partition("=")
        if flag in ("--help", "-h"):
            # the topic may be the next word, or stand behind a sign
            after = argv[i + 1] if i + 1 < len(argv) else ""
            if about or "=" in after or after.startswith("-"):
                return about
            return after
    return None


def help_on(about: str, argv: Iterable[str] = ()) -> str:
    """The help on a group of settings, on "all", or in short, ""; the options that the words of the
    command line choose are shown. Ends the process with 2 for another topic."""
    argv = list(argv)
    config = (conf_dir() / "config.yaml").read_text().partition("\nhydra:")[0]
    defaults = dict(re.findall(r"^\s+- (\w+): (\S+)$", config, re.MULTILINE))
    folders = [conf_dir(), *filter(None, [config_dir(argv) and Path(config_dir(argv))])]
    options = {group: options_of(group, folders) for group in defaults}
    if not about:
        choices = {
            group: ", ".join(dict.fromkeys([default, *options[group]]))
            for group, default in defaults.items()
            if len(options[group]) > 1
        }
        lines = [_INTRODUCTION, *_table(COMMANDS), "", "Flags:", *_table(_FLAGS), ""]
        lines += [
            "Groups, chosen as group=option; the first is the default:",
            *_table(choices),
        ]
        lines += ["", "Settings that people change; `--help GROUP` explains them:", OFTEN]
        return "\n".join(lines)

    group = about.partition(".")[0]
    if about != "all" and group not in defaults:
        print(f"error: --help {about}: there is no such group of settings", file=sys.stderr)
        sys.exit(2)
    lines = []
    for name in defaults if about == "all" else [group]:
        lines.append(f"{name}= is one of {', '.join(options[name])}")
        # A recipe changes settings of other groups, and has none of its own.
        if name != "experiment":
            chosen = defaults[name]
            for word in argv:
                if word.startswith(f"{name}="):
                    chosen = word.removeprefix(f"{name}=")
            if chosen not in options[name]:
                chosen = defaults[name]
            files = [folder / name / f"{chosen}.yaml" for folder in folders]
            text = "".join(_with_parts(next(file for file in files if file.is_file())))
            lines.append(f"{name}:\n{textwrap.indent(text, '  ')}")
    return "\n".join([*lines, config] if about == "all" else lines)


def _with_parts(file: Path) -> Iterator[str]:
    """The text of an option's file, after those of the options that it begins with."""
    text = file.read_text()
    for name in re.findall(r"^\s+- ([\w/]+)(?:@_here_)?$", text, re.MULTILINE):
        if name != "_self_":
            yield from _with_parts(file.parent / f"{name}.yaml")
    yield text


def _table(texts: dict[str, str]) -> Iterator[str]:
    """Names and their texts in two columns, the first as wide as its longest name."""
    column = max(map(len, texts)) + 2
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    for name, text in texts.items():
        for i, line in enumerate(textwrap.wrap(text, width - column - 2)):
            yield f"  {'' if i else name:<{column}}{line}"
