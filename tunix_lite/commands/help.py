"""`--help`: the commands, the groups and the settings that people change; with `all`, or with the
name of a group or a setting, everything.

It reads conf/ with its comments, and imports neither jax nor Hydra: it starts at once.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

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
OFTEN = (
    "model.weights",
    "model.mesh_shape",
    "model.lora.rank",
    "task.prompt",
    "algorithm.num_generations",
    "algorithm.kl_coef",
    "generation.max_prompt_length",
    "generation.max_new_tokens",
    "generation.temperature",
    "training.max_steps",
    "training.prompts_per_step",
    "training.micro_batch_size",
    "training.mixed_precision",
    "training.remat",
    "training.packing",
    "training.save_interval_steps",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "evaluation.num_examples",
    "evaluation.interval_steps",
    "seed",
    "resume",
    "runtime.dry_run",
)
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


@dataclass(frozen=True)
class Setting:
    """A line of conf/.

    Example: Setting("seed", "0", "Seed of the data order and of all sampling, 0 or more.").
    """

    key: str
    # the value as the file spells it
    default: str
    comment: str = ""


# ---- reading conf/

# the loader in C reads a file in a tenth of the time
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def settings_in(file: Path) -> dict[str, Setting]:
    """Reads the settings of an option by their dotted names, with those of the options it begins
    with."""
    text = file.read_text()
    tree = yaml.compose(text, LOADER)
    own = {setting.key: setting for setting in _own_settings(tree, text)}
    begins_with = [
        entry.value.removesuffix("@_here_")
        for key, value in tree.value
        for entry in (value.value if key.value == "defaults" else [])
        if isinstance(entry, yaml.ScalarNode)
    ]
    by_key: dict[str, Setting] = {}
    for name in begins_with:
        by_key |= own if name == "_self_" else settings_in(file.parent / f"{name}.yaml")
    # a comment stays where a later file only changes the value
    for key, setting in own.items():
        earlier = by_key.get(key)
        comment = setting.comment or (earlier.comment if earlier else "")
        by_key[key] = Setting(key, setting.default, comment)
    # a group that one file has as null, and a later one with settings
    sections = {key[:i] for key in by_key for i, char in enumerate(key) if char == "."}
    return {key: setting for key, setting in by_key.items() if key not in sections}


def _own_settings(tree: yaml.MappingNode, text: str, section: str = "") -> Iterator[Setting]:
    """The settings below a node of a file. A setting has its comment on its line or, if it is long,
    above; what stands above the first one is about the whole file."""
    lines = text.splitlines()
    for key, value in tree.value:
        name = f"{section}{key.value}"
        if name in ("defaults", "hydra"):
            continue
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _own_settings(value, text, f"{name}.")
            continue
        comment = lines[value.end_mark.line][value.end_mark.column :]
        begin = end = key.start_mark.line
        while begin and lines[begin - 1].lstrip().startswith("#"):
            begin -= 1
        if begin and not comment.strip():
            comment = " ".join(line.strip("# ") for line in lines[begin:end])
        default = text[value.start_mark.index : value.end_mark.index]
        yield Setting(name, re.sub(r"\$\{auto:\w+\}", "auto", default), comment.strip("# "))


def groups() -> dict[str, str]:
    """The groups of conf/config.yaml in their order, and the option of each that is the default."""
    text = (conf_dir() / "config.yaml").read_text()
    return dict(re.findall(r"^\s+- (\w+): (\S+)$", text, re.MULTILINE))


def options(group: str, more: str | None = None) -> list[str]:
    """The options of a group, in conf/ and in a folder of the user's."""
    folders = [conf_dir(), *([Path(more)] if more else [])]
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def all_settings(argv: Iterable[str] = ()) -> dict[str, Setting]:
    """Every setting by its dotted name, with the options that a command line chooses."""
    argv = list(argv)
    chosen = groups()
    for word in argv:
        group, _, option = word.partition("=")
        if group in chosen and option in options(group, config_dir(argv)):
            chosen[group] = option
    by_key: dict[str, Setting] = {}
    for group, option in chosen.items():
        # a recipe changes settings of other groups, and has none of its own
        if group == "experiment":
            continue
        folders = [conf_dir(), Path(config_dir(argv) or ".")]
        files = [folder / group / f"{option}.yaml" for folder in folders]
        file = next(file for file in files if file.is_file())
        for key, setting in settings_in(file).items():
            name = f"{group}.{key}"
            by_key[name] = Setting(name, setting.default, setting.comment)
    return by_key | settings_in(conf_dir() / "config.yaml")


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
    if not about:
        print("\n".join(short_help(argv)))
        return
    chosen = {
        key: setting
        for key, setting in all_settings(argv).items()
        if about == "all" or key == about or key.startswith(f"{about}.")
    }
    if not chosen and about not in groups():
        print(f"error: --help {about}: there is no such group or setting", file=sys.stderr)
        sys.exit(2)
    shown = list(groups()) if about == "all" else [about] if about in groups() else []
    choices = {
        f"{group}=": f"one of {', '.join(options(group, config_dir(argv)))}" for group in shown
    }
    lines = _table(choices)
    if about == "all":
        lines = ["Groups, chosen as group=option:", *lines, "", "Settings, given as key=value:"]
    for setting in chosen.values():
        lines += described(setting)
    print("\n".join(lines))


def short_help(argv: Iterable[str] = ()) -> list[str]:
    """One screen or two: commands, flags, groups, and the settings that people change."""
    settings = all_settings(argv)
    more = config_dir(list(argv))
    lines = [
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
    ]
    lines += _table(COMMANDS)
    lines += ["", "Flags:", *_table(FLAGS)]
    lines += ["", "Groups, chosen as group=option; the first is the default:"]
    choices = {}
    for group, default in groups().items():
        others = [option for option in options(group, more) if option != default]
        if others:
            choices[group] = ", ".join([default, *others])
    lines += _table(choices)
    lines += ["", "Settings that people change, as key=value; --help=all shows the others:"]
    for key in OFTEN:
        lines += described(settings.get(key) or _short_form(key, settings))
    return lines


def _short_form(key: str, settings: dict[str, Setting]) -> Setting:
    """`resume=X`, which is short for resume.folder=X."""
    return Setting(key, settings["resume.folder"].default, settings["resume.folder"].comment)


def described(setting: Setting) -> list[str]:
    """A setting with its default and its comment."""
    return _wrapped(f"{setting.key}={setting.default}", setting.comment, 32)


def _table(texts: dict[str, str]) -> list[str]:
    """Names and their texts in two columns, the first as wide as its longest name."""
    column = max(map(len, texts), default=0) + 2
    return [line for name, text in texts.items() for line in _wrapped(name, text, column)]


def _wrapped(name: str, text: str, column: int) -> list[str]:
    """A name, and beside or below it a text, within the width of the terminal."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines = textwrap.wrap(text, width - column - 2) or [""]
    if len(name) >= column:
        return [f"  {name}", *(f"  {'':<{column}}{line}" for line in lines if line)]
    first = f"  {name:<{column}}{lines[0]}".rstrip()
    return [first, *(f"  {'':<{column}}{line}" for line in lines[1:])]


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
