"""Hydra in, RunConfig out. Settings are checked before Hydra makes a folder: a mistake leaves
nothing behind."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunix_lite.config import RunConfig, build, unknown_key
from tunix_lite.distributed.folder_lock import LOCK
from tunix_lite.distributed.host_memory import keep_freed_memory
from tunix_lite.distributed.launcher import (
    check_config_dir,
    conf_dir,
    config_dir,
    folder_given,
    folder_key,
)
from tunix_lite.errors import ConfigError, RunFailed, error_context
from tunix_lite.files.addresses import check_on_disk
from tunix_lite.inference.language_model import run_settings
from tunix_lite.plain_text import visible
from tunix_lite.tracking.disk import DiskError

EXIT_FAILED = 1
# another try would not change it
EXIT_WRONG_SETTINGS = 2
# as a shell says it
EXIT_INTERRUPTED = 130


def compose(overrides: list[str], more_conf: str | None = None) -> RunConfig:
    """The run that these overrides describe; `more_conf` is a folder of the user's own options.
    Raises ConfigError."""
    return build(RunConfig, compose_values(overrides, more_conf))


def compose_values(
    overrides: list[str], more_conf: str | None = None, of: tuple[str, ...] = ()
) -> dict:
    """The settings as plain values; `of` are overrides that a program begins with. Raises
    ConfigError."""
    overrides = expand_short_forms(overrides)
    with error_context(""):
        check_config_dir(more_conf)
    search = (
        [] if more_conf is None else [f"hydra.searchpath=[file://{Path(more_conf).absolute()}]"]
    )
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            return _plain_values(hydra.compose("config", [*search, *of, *overrides]))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, overrides, more_conf, of)) from error


def expand_short_forms(words: list[str]) -> list[str]:
    """The command line with what is short written out: resume=X is resume.folder=X."""
    return [
        "resume.folder=" + word.removeprefix("resume=") if word.startswith("resume=") else word
        for word in words
    ]


def _plain_values(settings: DictConfig) -> dict:
    return OmegaConf.to_container(settings, resolve=True)


def explain(
    error: Exception, overrides: list[str], more_conf: str | None = None, of: tuple[str, ...] = ()
) -> str:
    """One message for what Hydra refused, with the nearest right spelling. Call it inside
    initialize_config_dir."""
    groups = [folder.name for folder in sorted(conf_dir().iterdir()) if folder.is_dir()]
    read = {}
    for text in overrides:
        try:
            read[text] = OverridesParser.create().parse_override(text)
        except HydraException:
            return (
                f"{text}: cannot be read as an override; write key=value, and a value with "
                "brackets or spaces "
                "in two pairs of quotes: 'key=\"value\"'"
            )
    known = _known(
        [*of, *(text for text, override in read.items() if override.get_key_element() in groups)],
        of,
    )
    for text, override in read.items():
        key = override.get_key_element().lstrip("+~")
        if key.startswith("hydra."):
            continue
        folders = [conf_dir(), *([Path(more_conf)] if more_conf else [])]
        options = (
            sorted({f.stem for d in folders for f in (d / key).glob("*.yaml")})
            if key in groups
            else []
        )
        if options and override.value() not in options:
            return (
                f"{key}={override.value()}: there is no such {key}; there is {', '.join(options)}"
            )
        sections = {k[:i] for k in known for i, c in enumerate(k) if c == "."}
        if (
            key not in known
            and key not in groups
            and key not in sections
            and not text.startswith("+")
        ):
            return unknown_key(key, known)
    return str(error).replace("\n", " ")


def _known(options: list[str], of: tuple[str, ...]) -> list[str]:
    """The settings that there are with these options: model=random has some that the default model
    has not."""
    try:
        return [str(key) for key in _leaves(_plain_values(hydra.compose("config", options)))]
    except (HydraException, OmegaConfBaseException):
        # one of them is what is wrong
        return [str(key) for key in _leaves(_plain_values(hydra.compose("config", list(of))))]


def _leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def fill_in_folder(text: str, values: dict) -> str:
    """A folder as the command line gives it, with ${now:...} and plain settings filled in. Raises
    ConfigError."""
    setup_globals()
    try:
        return str(OmegaConf.create({**values, "hydra": {"folder": text}}).hydra.folder)
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"{text}: {why}; of several processes it can hold ${{now:...}} and settings"
        ) from error


def main(
    task: Callable[[RunConfig, Path], object], check: Callable[[RunConfig, Path], object]
) -> None:
    """Runs `task(run, folder)` with the settings on the command line; `check` looks at them first.

    Hydra's own flags (--help, --cfg job, --multirun ...) work as everywhere; of a sweep every run
    is checked first.
    """
    keep_freed_memory()
    sys.argv[1:] = expand_short_forms(sys.argv[1:])
    _or_exit(lambda: _check_places(sys.argv[1:]))
    _or_exit(lambda: _check(check, sys.argv[1:]))

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def job(settings: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        _or_exit(
            lambda: task(build(RunConfig, _plain_values(settings)), folder), made_by_hydra=folder
        )

    job()


def run_command(name: str, kind: type, action: Callable[[RunConfig, Any], None]) -> None:
    """Runs a program beside training: settings of its own, built as `kind`, and all those of a run.

    It makes no folder of its own. With checkpoint=RUN, `model` is what that run trained, where
    nothing else is given.
    """
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog=f"tunix-lite {name}", add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    known = parser.parse_intermixed_args()
    if known.help:
        print(f"usage: tunix-lite {name} [key=value ...] [--cfg job] [--config-dir DIR]\n")
        print((conf_dir() / "command" / f"{name}.yaml").read_text().partition("\n")[2])
        return

    def act() -> None:
        overrides = [text for text in known.overrides if text.partition("=")[0] not in LITERAL]
        values = compose_values(overrides, known.config_dir, (f"+command={name}",))
        for text in known.overrides:
            key, _, said = text.partition("=")
            if key in LITERAL and key not in values:
                raise ConfigError(unknown_key(key, list(values)))
            if key in LITERAL:
                values[key] = _unquoted(said)
        _on_disk({name: values.get(name) for name in ("checkpoint", "out", "prompts")})
        if values.get("checkpoint") is not None:
            if not isinstance(values["checkpoint"], str):
                raise ConfigError(f"checkpoint={values['checkpoint']!r} is not the folder of a run")
            # has no _target_ in it
            values["model"] = _of_run(values, overrides)
        if known.cfg:
            print(OmegaConf.to_yaml(values), end="")
            return
        own = {f.name: values.pop(f.name) for f in dataclasses.fields(kind)}
        settings = build(kind, own)
        action(build(RunConfig, values), settings)

    _or_exit(lambda: _as_long_as_read(act), interrupted="")


# what stands behind their = is text for the model, whatever Hydra would read there
LITERAL = {
    "prompt",
    "system",
}
# where the base is, and what belongs to the machine
BESIDE_A_RUN = {
    "weights",
    "tokenizer",
    "family",
    "mesh_shape",
}


def _unquoted(text: str) -> str | None:
    """The text, without quotes around it that a shell left; null as in YAML."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return None if text == "null" else text


def _of_run(values: dict, overrides: list[str]) -> dict:
    """The model of the run in values["checkpoint"], with what the command line says of `model` put
    over it.

    The mesh is that of the command line alone: it belongs to the machine.
    """
    own = {}
    for text in overrides:
        key = OverridesParser.create().parse_override(text).get_key_element()
        group, _, name = key.partition(".")
        if group.lstrip("+~") != "model":
            continue
        if group != "model" or name not in BESIDE_A_RUN:
            allowed = ", ".join(f"model.{n}" for n in sorted(BESIDE_A_RUN))
            raise ConfigError(
                f"{key}: the run in checkpoint= says which model it is; beside it there can be "
                f"{allowed}"
            )
        own[name] = values["model"][name]
    settings, _ = run_settings(Path(values["checkpoint"]), own.get("family"))
    return settings | own | {"mesh_shape": values["model"]["mesh_shape"]}


def _check_places(words: list[str]) -> None:
    """Raises ConfigError for a folder that a run writes to, which Hydra would make, or a missing
    one of options."""
    _on_disk({folder_key(words): folder_given(words)})
    with error_context(""):
        check_config_dir(config_dir(words))


def _on_disk(places: dict) -> None:
    """Raises ConfigError for a setting that says an address, such as gs://bucket/run, and no
    folder."""
    with error_context(""):
        for name, place in places.items():
            check_on_disk(name, place)


def _check(check: Callable[[RunConfig, Path], object], arguments: list[str]) -> None:
    """Looks at the run, or at every run of a sweep. Flags that only show something are Hydra's own
    business."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    known, others = parser.parse_known_intermixed_args(arguments)
    if others:
        return
    for overrides in _runs_of(known.overrides) if known.multirun else [known.overrides]:
        check(compose(overrides, known.config_dir), _run_dir(overrides))


def _runs_of(overrides: list[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: a=1,2 b=3 -> [[a=1, b=3], [a=2, b=3]]."""
    choices = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            # composing it says what is wrong
            return [overrides]
        swept = override.is_sweep_override()
        key = override.get_key_element()
        choices.append(
            [f"{key}={value}" for value in override.sweep_string_iterator()] if swept else [text]
        )
    return [list(run) for run in itertools.product(*choices)]


def sweep_folder() -> Path | None:
    """Of the sweep that the run which Hydra has started is one of; None where it is a run by
    itself."""
    settings = HydraConfig.get()
    return Path(settings.sweep.dir).absolute() if settings.mode == RunMode.MULTIRUN else None


def _run_dir(overrides: list[str]) -> Path:
    """The folder that the run will write to, as far as it is known before Hydra makes it."""
    return Path(folder_given(overrides) or "outputs/not-made-yet")


def _as_long_as_read(action: Callable[[], object]) -> None:
    """For programs whose output is what they are for: all is well if whoever read it has enough."""
    try:
        action()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


GOES_ON = "; if a checkpoint was saved, the same command with hydra.run.dir=FOLDER goes on from it"


def _or_exit(
    action: Callable[[], object], made_by_hydra: Path | None = None, interrupted: str = GOES_ON
) -> None:
    try:
        action()
    except KeyboardInterrupt:
        print(f"interrupted{interrupted}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except (
        FloatingPointError
    ) as error:  # says what to do about it, and where in the code does not help
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except DiskError as error:
        # they may be on that disk, too
        with contextlib.suppress(OSError):
            print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        # Else a thread that still writes would keep us, and what it leaves undone would fill the
        # screen.
        os._exit(EXIT_FAILED)
    except (ConfigError, RunFailed) as error:
        # as of who has it, and we do not
        is_ours = made_by_hydra is not None and not isinstance(error, RunFailed)
        if is_ours and {path.name for path in made_by_hydra.iterdir()} <= {".hydra", LOCK}:
            shutil.rmtree(made_by_hydra)
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(EXIT_FAILED if isinstance(error, RunFailed) else EXIT_WRONG_SETTINGS)
