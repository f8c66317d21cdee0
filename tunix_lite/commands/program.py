"""The command line: Hydra reads it, and programs get a built `RunConfig`.

Settings are checked before Hydra makes a folder, so a mistake leaves nothing behind. For that the
settings of a run are composed here first, and once more by `hydra.main`, which takes no composed
ones; they are built only once.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import hydra
import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunix_lite.commands import help as help_pages
from tunix_lite.commands.closed_pipe import as_long_as_read, end_when_unread
from tunix_lite.commands.flags import (
    HYDRA,
    OF_COMMANDS,
    check_values,
    refuse_foreign,
    wrong_override,
)
from tunix_lite.config import RunConfig, build
from tunix_lite.distributed.folder_lock import LOCK
from tunix_lite.distributed.host_memory import keep_freed_memory
from tunix_lite.distributed.launcher import (
    SHOWS_ONLY,
    check_config_dir,
    conf_dir,
    config_dir,
    folder_given,
    folder_key,
)
from tunix_lite.errors import ConfigError, RunFailed, error_context
from tunix_lite.files.addresses import check_on_disk
from tunix_lite.hints import Refusal, unknown_key
from tunix_lite.inference.language_model import run_settings
from tunix_lite.plain_text import visible
from tunix_lite.tracking.disk import DiskError

EXIT_FAILED = 1
# A launcher does not start the run again after this one.
EXIT_WRONG_SETTINGS = 2
# 128 + SIGINT, as shells have it.
EXIT_INTERRUPTED = 130


def compose(overrides: list[str], more_conf: str | None = None) -> RunConfig:
    """The settings of a run, built from conf/ and these overrides.

    overrides: as on the command line, `["model=gemma3_1b", "seed=1"]`. more_conf: a folder with the
    user's own options. Raises ConfigError.

    Example: `compose(["algorithm=dr_grpo", "training.max_steps=20"]).training.max_steps` is 20.
    """
    return build(RunConfig, compose_values(overrides, more_conf))


def compose_values(
    overrides: list[str],
    more_conf: str | None = None,
    of: tuple[str, ...] = (),
    config_name: str = "config",
) -> dict:
    """The settings as nested plain values, not built yet.

    of: overrides that a command adds before those of the user, `("+command=generate",)`.
    config_name: of the file that everything begins with. Raises ConfigError.
    """
    overrides = expand_short_forms(overrides)
    with error_context(""):
        check_config_dir(more_conf)
    check_values(overrides)
    with _options_in(more_conf):
        try:
            return _plain_values(hydra.compose(config_name, [*of, *overrides]))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, overrides, more_conf, of, config_name)) from error
        except yaml.YAMLError as error:
            raise ConfigError(not_yaml(error)) from error


def not_yaml(error: yaml.YAMLError) -> str:
    """The message for a file that is no YAML: the file, the line, and what is wrong there.

    Example: `conf/model/mine.yaml, line 2: while parsing a flow mapping: expected ',' or '}'`.
    """
    # PyYAML says where the structure began, which is where a bracket was left open.
    mark = getattr(error, "context_mark", None) or getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    parts = [text for text in (error.context, error.problem) if text]
    return f"{mark.name}, line {mark.line + 1}: no YAML: {': '.join(parts)}"


@contextlib.contextmanager
def _options_in(more_conf: str | None) -> Iterator[None]:
    """Inside, Hydra composes from conf/ and from this folder, as with --config-dir."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        if more_conf is not None:
            search_path = create_config_search_path(str(conf_dir()))
            # where --config-dir puts it: before Hydra's own entry, which must be the last
            place = f"file://{Path(more_conf).absolute()}"
            search_path.prepend("command-line", place, SearchPathQuery(provider="schema"))
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("app", search_path)
        yield


def expand_short_forms(words: list[str]) -> list[str]:
    """The words of a command line, with `resume=X` written out as `resume.folder=X`, and with the
    quotes that Hydra wants around a text with braces, commas or spaces."""
    short = "resume="
    words = [
        "resume.folder=" + word.removeprefix(short) if word.startswith(short) else word
        for word in words
    ]
    return [_quoted(word) if word.partition("=")[0] in TEXTS else word for word in words]


# Settings of a run whose value is a text: a shell's quotes around it are enough.
TEXTS = {
    "task.prompt",
    "task.system",
}


def _quoted(word: str) -> str:
    """`key=text` as `key='text'`, unless it is null or has such quotes already."""
    key, _, text = word.partition("=")
    has_quotes = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if text == "null" or has_quotes:
        return word
    # backslashes are doubled before a quote, and nowhere else
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"{key}='{escaped}'"


def _plain_values(settings: DictConfig) -> dict:
    return OmegaConf.to_container(settings, resolve=True)


def explain(
    error: Exception,
    overrides: list[str],
    more_conf: str | None = None,
    of: tuple[str, ...] = (),
    config_name: str = "config",
) -> str:
    """The message for an error of Hydra: which override is wrong, with the nearest right spelling.

    error: Hydra's own error; its text is the message where no override is found wrong. The other
    arguments are those of `compose_values`. Call it inside `hydra.initialize_config_dir`.
    """
    # An override that Hydra's grammar refuses.
    groups = [folder.name for folder in sorted(conf_dir().iterdir()) if folder.is_dir()]
    parsed = {}
    for text in overrides:
        try:
            parsed[text] = OverridesParser.create().parse_override(text)
        except HydraException:
            return _not_an_override(text, of)

    # The overrides whose option or key does not exist, all of them.
    chosen = [text for text, override in parsed.items() if override.get_key_element() in groups]
    known = _known_settings([*of, *chosen], of, config_name)
    if not known:
        return _unknown_config(config_name, more_conf) or str(error).replace("\n", " ")
    folders = [conf_dir(), *([Path(more_conf)] if more_conf else [])]
    refusal = partial(_refusal, [*of, *chosen], config_name)
    wrong: list[str] = []
    for text, override in parsed.items():
        key = override.get_key_element().lstrip("+~")
        if text.startswith("+") and key in groups and "Multiple values" in str(error):
            # Hydra takes a + for a group that the defaults list does not have.
            return f"{text}: write it without the +: {text.lstrip('+')}"
        is_added = text.startswith("+") and key not in groups
        if key.startswith("hydra/") and (extra := PLUGINS.get(text.split("/")[-1])):
            return (
                f"{text} needs a package that is not installed: pip install 'tunix_lite[{extra}]'"
            )
        if key.startswith(("hydra.", "hydra/")) or is_added:
            continue
        value = override.value() if key in groups else text.partition("=")[2]
        message = wrong_override(key, value, known, groups, folders, refusal)
        if message is not None:
            wrong.append(message)
    if wrong:
        return ". ".join(wrong)
    for text, override in parsed.items():
        if override.is_sweep_override():
            return f"{text}: {_sweep_or_list(override.get_key_element(), text)}"
    return str(error).replace("\n", " ")


def _not_an_override(text: str, of: tuple[str, ...]) -> str:
    """What to do about a word that Hydra's grammar refuses. of: as in `compose_values`."""
    start = f"{text}: cannot be read as an override; write "
    if "=" not in text and "+command=generate" in of:
        return f"{start}prompt='...'"
    return (
        f"{start}key=value, and a value with brackets or spaces in two pairs of quotes: "
        "'key=\"value\"'"
    )


def _sweep_or_list(key: str, text: str) -> str:
    """What to do about `key=1,2`, which a sweep alone can have."""
    if key == "model.mesh_shape":
        sizes = text.partition("=")[2]
        return (
            f"a list has brackets: 'model.mesh_shape=[[{sizes}],[fsdp,tp]]'; without them it is a "
            "sweep, which needs --multirun"
        )
    return "several values are a sweep, which needs --multirun"


# Options of Hydra that a package brings, and the extra of ours that installs it.
PLUGINS = {
    "launcher=submitit_local": "submitit",
    "launcher=submitit_slurm": "submitit",
    "sweeper=optuna": "optuna",
}


def _known_settings(options: list[str], of: tuple[str, ...], config_name: str) -> list[str]:
    """The dotted names of all settings, with these options chosen; model=random has more of them.

    If the options cannot be composed, those of the default options; [] if the file of this name
    cannot be composed at all.
    """
    for chosen in (options, list(of)):
        with contextlib.suppress(HydraException, OmegaConfBaseException):
            return list(_leaves(_plain_values(hydra.compose(config_name, chosen))))
    return []


def _unknown_config(config_name: str, more_conf: str | None) -> str:
    """The message for a --config-name that names no file; "" if there is one."""
    folders = [conf_dir(), *([Path(more_conf)] if more_conf else [])]
    name = config_name.removesuffix(".yaml")
    if any((folder / f"{name}.yaml").is_file() for folder in folders):
        return ""
    places = " or ".join(str(folder) for folder in folders)
    return f"--config-name={config_name}: there is no {name}.yaml in {places}; --config-dir=FOLDER"


def _all_settings(of: tuple[str, ...] = (), words: Iterable[str] = ()) -> Iterator[str]:
    """The dotted names of all settings, composed when they are asked for: of the options that these
    words of a command line choose, or of the default ones where that fails."""
    with _options_in(None):
        yield from _known_settings([*of, *_options_chosen(words)], of, "config")


def _options_chosen(words: Iterable[str]) -> list[str]:
    """The words of a command line that choose an option of a group: `algorithm=dpo`."""
    is_option = re.compile(r"(\w+)=\w+")
    found = [(word, is_option.fullmatch(word)) for word in words]
    return [word for word, match in found if match and (conf_dir() / match[1]).is_dir()]


def _refusal(chosen: list[str], config_name: str, overrides: tuple[str, ...]) -> str | None:
    """What a run with the options `chosen` says of these overrides: a hints.Refusal.

    Call it inside `hydra.initialize_config_dir`.
    """
    try:
        for text in overrides:
            check_on_disk(*text.partition("=")[::2])
        values = _plain_values(hydra.compose(config_name, [*chosen, *overrides]))
        is_of_a_run = not any(text.startswith("+command=") for text in chosen)
        if is_of_a_run and all("..." not in text for text in overrides):
            build(RunConfig, values)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        return str(error).partition("\n")[0]
    return None


def _refusal_of_a_run(words: list[str]) -> Refusal:
    """What a run with the options that this command line chooses says of overrides."""

    def refusal(overrides: tuple[str, ...]) -> str | None:
        with _options_in(None):
            return _refusal(_options_chosen(words), "config", overrides)

    return refusal


def _leaves(values: dict, prefix: str = "") -> Iterator[str]:
    """The dotted names of all values in nested dicts."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def fill_in_folder(text: str, values: dict) -> str:
    """Fills in `${now:...}` and settings in the folder that a command line gives.

    text: the folder as given. values: the settings as plain values. Raises ConfigError for what
    only Hydra could fill in.
    """
    setup_globals()
    try:
        return str(OmegaConf.create({**values, "hydra": {"folder": text}}).hydra.folder)
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"{text}: {why}; a run of several processes fills in only ${{now:...}} and settings"
        ) from error


def main(
    task: Callable[[RunConfig, Path], object], check: Callable[[RunConfig, Path], object]
) -> None:
    """Runs `task(run, folder)` with the settings on the command line, after `check(run, folder)`.

    The folder that `check` gets is the one that Hydra will make, as far as it is known. `task` gets
    the same `run` object as `check`. Hydra's own flags (--help, --cfg job, --multirun ...) work as
    in every Hydra program. All runs of a sweep are checked before the first one starts. Errors end
    the process with a message and an exit code.
    """
    keep_freed_memory()
    if SHOWS_ONLY & set(sys.argv[1:]):
        end_when_unread()
    if help_pages.answered(sys.argv[1:]):
        return
    sys.argv[1:] = expand_short_forms(sys.argv[1:])
    checked: list[tuple[dict, RunConfig]] = []
    words = sys.argv[1:]
    known = _all_settings((), words)
    _or_exit(lambda: refuse_foreign(words, known, HYDRA, _refusal_of_a_run(words)))
    _or_exit(lambda: _check_folders(sys.argv[1:]))
    _or_exit(lambda: checked.extend(_check_runs(check, sys.argv[1:])))
    # The check has shown what the run would be, and Hydra would make its folder.
    if checked and all(run.runtime.dry_run for _, run in checked):
        return

    if {"--info", "-i"} & set(sys.argv[1:]):
        # Hydra prints by a handler of its own, beside that which absl made when it was imported.
        logging.getLogger().handlers.clear()

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def job(settings: DictConfig) -> object:
        folder = Path(HydraConfig.get().runtime.output_dir)
        found: list[object] = []
        _or_exit(lambda: found.append(task(_run_of(settings, checked), folder)), folder)
        # what a sweeper that looks for the best settings compares, as optuna
        return found[0] if found else None

    job()


def _run_of(settings: DictConfig, checked: list[tuple[dict, RunConfig]]) -> RunConfig:
    """The run that was built and checked from these very values; if none was, it is built now.

    None was where a value depends on the clock, or is not a number (which equals nothing).
    """
    values = _plain_values(settings)
    for i, (known_values, _) in enumerate(checked):
        if known_values == values:
            return checked.pop(i)[1]
    return build(RunConfig, values)


def run_command(
    name: str,
    kind: type,
    action: Callable[..., None],
    composes_again: bool = False,
    positional: str | None = None,
    is_list: bool = False,
    change_settings: Callable[[dict, list[str]], dict] | None = None,
    without_run: Callable[..., None] | None = None,
) -> None:
    """Runs a command beside training, `action(run, settings)`, with what its command line says.

    name: the command, with defaults in conf/command/NAME.yaml. kind: the dataclass of its own
    settings. A command has all settings of a run, too, but makes no folder as a run does. With
    checkpoint=FOLDER the settings of `model` are those of the run in that folder.

    composes_again: `action` gets a third argument, a function from overrides that come last,
    ["task=gsm8k"], to the RunConfig that the command line makes with them. positional: the setting
    that a first word is short for: one without `=`, or the name of a folder that is there; is_list:
    all such words are, as a list. change_settings: (values, keys that the command line gives) ->
    the values to build from, all plain. without_run: (settings, error) is called where the settings
    of a run are wrong, in place of ending. Errors end the process with a message and an exit code.
    """
    keep_freed_memory()
    known = _words_of(name)
    if known.help:
        _print_help(name, f"{positional} ..." if is_list else positional)
        return
    folders = _folders_of(known.overrides, is_list) if positional else []

    def act() -> None:
        # Hydra reads all but the texts for the model, which are taken as they are.
        overrides = [text for text in known.overrides if text.partition("=")[0] not in LITERAL]
        values = compose_values(overrides, known.config_dir, (f"+command={name}",))
        _take_literals(values, known.overrides)
        if folders:
            values[positional] = folders if is_list else folders[0]
        _check_on_disk({name: values.get(name) for name in ("checkpoint", "out", "prompts")})

        # A folder is data: `_of_run` refuses one whose settings hold a _target_.
        if values.get("checkpoint") is not None:
            if not isinstance(values["checkpoint"], str):
                raise ConfigError(f"checkpoint={values['checkpoint']!r} is not the folder of a run")
            values["model"] = _of_run(values, overrides)
        if change_settings is not None:
            values = change_settings(values, [_key(text) for text in overrides])

        if known.cfg:
            print(OmegaConf.to_yaml(values), end="")
            return
        own = {f.name: values.pop(f.name) for f in dataclasses.fields(kind)}
        settings = build(kind, own)
        run = build(RunConfig, values)
        if composes_again:
            action(run, settings, _composer(values, list(own), name, overrides, known.config_dir))
        else:
            action(run, settings)

    guarded = _wrong_settings_to(without_run, name, kind, known.overrides)
    _or_exit(as_long_as_read()(guarded(act)), interrupted="")


@contextlib.contextmanager
def _wrong_settings_to(
    without_run: Callable[..., None] | None, name: str, kind: type, overrides: list[str]
) -> Iterator[None]:
    """Calls `without_run`, if there is one, where the settings are wrong."""
    try:
        yield
    except ConfigError as error:
        if without_run is None:
            raise
        without_run(_own_settings(name, kind, overrides), error)


def _own_settings(name: str, kind: type, overrides: list[str]) -> object:
    """The settings of a command alone, whatever the command line says of a run. Raises
    ConfigError."""
    names = [f.name for f in dataclasses.fields(kind)]
    words = [text for text in overrides if text.partition("=")[0] in names]
    values = compose_values(words, None, (f"+command={name}",))
    return build(kind, {key: values[key] for key in names})


def _words_of(name: str) -> argparse.Namespace:
    """The command line of a command: its flags, and `overrides`, the other words.

    Flags that it does not have end the process, with what to write instead.
    """
    known = _all_settings((f"+command={name}",))
    _or_exit(lambda: refuse_foreign(sys.argv[1:], known, OF_COMMANDS))
    parser = argparse.ArgumentParser(prog=f"tunix-lite {name}", add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_intermixed_args()


def _take_literals(values: dict, words: list[str]) -> None:
    """Puts the texts for the model among the settings. Raises ConfigError where there is none."""
    for text in words:
        key, _, literal = text.partition("=")
        if key in LITERAL and key not in values:
            raise ConfigError(unknown_key(key, list(values)))
        if key in LITERAL:
            values[key] = _unquoted(literal)


@as_long_as_read()
def _print_help(name: str, positional: str | None) -> None:
    place = f" [{positional.upper()}]" if positional else ""
    print(f"usage: tunix-lite {name}{place} [key=value ...] [--cfg job] [--config-dir DIR]\n")
    print((conf_dir() / "command" / f"{name}.yaml").read_text().partition("\n")[2])


def _folders_of(words: list[str], is_list: bool) -> list[str]:
    """Takes the first word out if it is a folder, and with is_list all that are; returns them.

    A word with `=` is a folder if there is one of that name: `sweep/seed=1`.
    """
    looked_at = words[:] if is_list else words[:1]
    taken = [word for word in looked_at if "=" not in word or os.path.isdir(word)]
    for word in taken:
        words.remove(word)
    return taken


def _composer(
    values: dict, own: list[str], command: str, overrides: list[str], more_conf: str | None
) -> Callable[[list[str]], RunConfig]:
    """A function from overrides that come last to the RunConfig of a command with them.

    values: the settings without them, of which the model stays. own: the keys of the command.
    """

    def composed_again(more: list[str]) -> RunConfig:
        everything = compose_values([*overrides, *more], more_conf, (f"+command={command}",))
        others = {key: item for key, item in everything.items() if key not in own}
        return build(RunConfig, others | {"model": values["model"]})

    return composed_again


# Settings whose value is text for the model: Hydra does not parse it.
LITERAL = {
    "prompt",
    "system",
}
# Settings of `model` that may stand beside checkpoint=: where the base is, and the machine's own.
BESIDE_A_RUN = {
    "weights",
    "tokenizer",
    "family",
    "mesh_shape",
}


def _unquoted(text: str) -> str | None:
    """The text without quotes that a shell may have left around it; `null` is None, as in YAML."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return None if text == "null" else text


def _key(override: str) -> str:
    """The key of an override, `model.weights` or `+model.more`."""
    return OverridesParser.create().parse_override(override).get_key_element()


def _of_run(values: dict, overrides: list[str]) -> dict:
    """The `model` settings of the run in values["checkpoint"], with the command line's on top.

    The mesh comes from the command line alone: it belongs to the machine. Raises ConfigError for a
    setting that is not in BESIDE_A_RUN.
    """
    own = {}
    for text in overrides:
        key = _key(text)
        group, _, name = key.partition(".")
        if group.lstrip("+~") != "model":
            continue
        if group != "model" or name not in BESIDE_A_RUN:
            allowed = ", ".join(f"model.{n}" for n in sorted(BESIDE_A_RUN))
            raise ConfigError(
                f"{key}: the run in checkpoint= determines the model; beside it you can give "
                f"{allowed}"
            )
        own[name] = values["model"][name]
    settings, _ = run_settings(Path(values["checkpoint"]), own.get("family"))
    return settings | own | {"mesh_shape": values["model"]["mesh_shape"]}


def _check_folders(words: list[str]) -> None:
    """Raises ConfigError if the run's folder is an address, or if --config-dir names no folder."""
    _check_on_disk({folder_key(words): folder_given(words)})
    with error_context(""):
        check_config_dir(config_dir(words))


def _check_on_disk(folders: dict) -> None:
    """Raises ConfigError if a setting, by its name, is an address such as gs://bucket/run."""
    with error_context(""):
        for name, folder in folders.items():
            check_on_disk(name, folder)


def _check_runs(
    check: Callable[[RunConfig, Path], object], arguments: list[str]
) -> list[tuple[dict, RunConfig]]:
    """Builds and checks the run, or every run of a sweep: (plain values, run) of each.

    If there are flags of Hydra that only show something, such as --cfg, there is nothing to check.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("overrides", nargs="*")
    known, others = parser.parse_known_intermixed_args(arguments)
    if others:
        return []
    checked = []
    for overrides in _runs_of(known.overrides) if known.multirun else [known.overrides]:
        values = compose_values(overrides, known.config_dir, config_name=known.config_name)
        run = build(RunConfig, values)
        check(run, _run_dir(overrides))
        checked.append((values, run))
    return checked


def _runs_of(overrides: list[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: a=1,2 b=3 -> [[a=1, b=3], [a=2, b=3]]."""
    choices = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            # Composing this override will raise an error that says what is wrong.
            return [overrides]
        values = [text]
        if override.is_interval_sweep():
            # of optuna, which draws numbers from it: its lower end stands for them
            values = [f"{override.get_key_element()}={override.value().start}"]
        elif override.is_sweep_override():
            key = override.get_key_element()
            values = [f"{key}={value}" for value in override.sweep_string_iterator()]
        choices.append(values)
    return [list(run) for run in itertools.product(*choices)]


def sweep_folder() -> Path | None:
    """The folder of the sweep that the current run belongs to; None if it is no run of a sweep.

    Call it while Hydra runs the task of `main`.
    """
    settings = HydraConfig.get()
    return Path(settings.sweep.dir).absolute() if settings.mode == RunMode.MULTIRUN else None


def _run_dir(overrides: list[str]) -> Path:
    """The folder that the run will write to, as far as it is known before Hydra makes it.

    Without hydra.run.dir Hydra takes a new folder, named after the time: it holds nothing.
    """
    return Path(folder_given(overrides) or "outputs/not-made-yet")


RESUME_HINT = (
    "; if a checkpoint was saved, the same command with hydra.run.dir=FOLDER goes on from it"
)


def _or_exit(
    action: Callable[[], object],
    made_by_hydra: Path | None = None,
    interrupted: str = RESUME_HINT,
) -> None:
    """Runs `action`; errors that a user can cause become one line of text and an exit code.

    made_by_hydra: the folder that Hydra made for this run, which is removed if wrong settings are
    found and nothing else is in it. interrupted: what follows "interrupted" after Ctrl-C.
    """
    try:
        action()
    except KeyboardInterrupt:
        print(f"interrupted{interrupted}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except FloatingPointError as error:
        # The message says what to do; a traceback would not help.
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except DiskError as error:
        # Standard output and error may be files on that disk, too.
        with contextlib.suppress(OSError):
            print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        # A usual exit would wait for a thread that still writes a checkpoint, and print its error.
        os._exit(EXIT_FAILED)
    except (ConfigError, RunFailed) as error:
        # RunFailed: another run may have the folder, so it stays.
        is_ours = made_by_hydra is not None and not isinstance(error, RunFailed)
        if is_ours and {path.name for path in made_by_hydra.iterdir()} <= {".hydra", LOCK}:
            shutil.rmtree(made_by_hydra)
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(EXIT_FAILED if isinstance(error, RunFailed) else EXIT_WRONG_SETTINGS)
