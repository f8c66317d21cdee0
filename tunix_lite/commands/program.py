"""Hydra in, RunConfig out. Settings are checked before Hydra makes a folder: a mistake leaves nothing behind."""

import argparse
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import tunix_lite
from tunix_lite.config import ConfigError, RunConfig, build, unknown_key
from tunix_lite.parallel.host import keep_freed_memory

PACKAGE = Path(tunix_lite.__file__).parent
EXIT_WRONG_SETTINGS = 2
EXIT_INTERRUPTED = 130  # as a shell says it


def conf_dir() -> Path:
    """conf/ of the checkout that this package stands in, or the copy inside an installed package."""
    checkout = PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "conf"


def compose(overrides: list[str], more_conf: str | None = None) -> RunConfig:
    """The run that these overrides describe; `more_conf` is a folder of the user's own options. Raises ConfigError."""
    return build(RunConfig, composed(overrides, more_conf))


def composed(overrides: list[str], more_conf: str | None = None) -> dict:
    """The settings as plain values. Raises ConfigError for what Hydra refuses."""
    search = [] if more_conf is None else [f"hydra.searchpath=[file://{Path(more_conf).absolute()}]"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            return plain(hydra.compose("config", [*search, *overrides]))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, overrides, more_conf)) from error


def plain(settings: DictConfig) -> dict:
    return OmegaConf.to_container(settings, resolve=True)


def explain(error: Exception, overrides: list[str], more_conf: str | None = None) -> str:
    """One message for what Hydra refused, with the nearest right spelling. Call it inside initialize_config_dir."""
    known = [str(key) for key in _leaves(OmegaConf.to_container(hydra.compose("config"), resolve=True))]
    groups = [folder.name for folder in sorted(conf_dir().iterdir()) if folder.is_dir()]
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            return (
                f"{text}: cannot be read as an override; write key=value, and quote it if it holds brackets or spaces"
            )
        key = override.get_key_element().lstrip("+~")
        if key.startswith("hydra."):
            continue
        folders = [conf_dir(), *([Path(more_conf)] if more_conf else [])]
        options = sorted({f.stem for d in folders for f in (d / key).glob("*.yaml")}) if key in groups else []
        if options and override.value() not in options:
            return f"{key}={override.value()}: there is no such {key}; there is {', '.join(options)}"
        sections = {k[:i] for k in known for i, c in enumerate(k) if c == "."}
        if key not in known and key not in groups and key not in sections and not text.startswith("+"):
            return unknown_key(key, known)
    return str(error).replace("\n", " ")


def _leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def main(task: Callable[[RunConfig, Path], object], check: Callable[[RunConfig, Path], object]) -> None:
    """Runs `task(run, folder)` with the settings on the command line; `check` looks at them first.

    Hydra's own flags (--help, --cfg job, --multirun ...) work as everywhere; of a sweep every run is checked first.
    """
    keep_freed_memory()
    _or_exit(lambda: _check(check, sys.argv[1:]))

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def job(settings: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        _or_exit(lambda: task(build(RunConfig, plain(settings)), folder), made_by_hydra=folder)

    job()


def _check(check: Callable[[RunConfig, Path], object], arguments: list[str]) -> None:
    """Looks at the run, or at every run of a sweep. Flags that only show something are Hydra's own business."""
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
            return [overrides]  # composing it says what is wrong
        swept = override.is_sweep_override()
        key = override.get_key_element()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()] if swept else [text])
    return [list(run) for run in itertools.product(*choices)]


def _run_dir(overrides: list[str]) -> Path:
    """The folder that the run will write to, as far as it is known before Hydra makes it."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("hydra.run.dir=")]
    return Path(given[-1]) if given else Path("outputs/not-made-yet")


def _or_exit(action: Callable[[], object], made_by_hydra: Path | None = None) -> None:
    try:
        action()
    except KeyboardInterrupt:
        print("interrupted; the same command with hydra.run.dir=FOLDER goes on from its checkpoint", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except ConfigError as error:
        if made_by_hydra is not None and [path.name for path in made_by_hydra.iterdir()] == [".hydra"]:
            shutil.rmtree(made_by_hydra)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_SETTINGS)
