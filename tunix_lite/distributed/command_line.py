"""Reads settings of a run from its command line, without Hydra, which takes seconds to start."""

import argparse
import contextlib
import re
from datetime import datetime
from pathlib import Path

from tunix_lite.basics.addresses import check_on_disk, is_address, place_here
from tunix_lite.basics.errors import error_context

# Flags of Hydra that show something, and run nothing.
SHOWS_ONLY = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
SWEEPS = {"--multirun", "-m"}
_FOLDER_KEYS = r"hydra\.(?:run|sweep)\.dir"
PACKAGE = Path(__file__).parents[1]


def conf_dir() -> Path:
    """The folder conf/ of this checkout, or the copy of it in an installed package."""
    checkout = PACKAGE.parent / "conf"
    if (checkout / "config.yaml").is_file():
        return checkout
    return PACKAGE / "conf"


def _setting_given(key: str, words: list[str]) -> str | None:
    """The value of a setting on a command line, unquoted; None: none. key: a pattern."""
    # Hydra takes +key and ++key as well.
    matches = [re.fullmatch(rf"\+{{0,2}}(?:{key})=(.*)", word, re.DOTALL) for word in words]
    texts = [match[1].strip() for match in matches if match]
    if not texts:
        return None
    # Hydra takes the last of several.
    text = texts[-1]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text)


def folder_given(words: list[str]) -> str | None:
    """The folder of the run, or of the sweep, that a command line gives; None if it gives none."""
    return _setting_given(_FOLDER_KEYS, words)


def folder_key(words: list[str]) -> str:
    """The setting that gives it: hydra.run.dir or hydra.sweep.dir, the last one on the line."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    return next(
        (key for key in keys[::-1] if re.fullmatch(_FOLDER_KEYS, key)), "hydra.run.dir"
    )


def on_this_machine(arguments: list[str]) -> list[str]:
    """A command line with the place of a run in a bucket. Raises ValueError for a sweep there."""
    folder = folder_given(arguments)
    key = folder_key(arguments)
    if folder is None or not is_address(folder):
        return arguments
    if key != "hydra.run.dir" or SWEEPS & set(arguments):
        raise ValueError(
            f"{key}={folder}: a sweep goes to a disk; a single run can use a bucket"
        )
    others = [text for text in arguments if text.partition("=")[0].lstrip("+") != key]
    with error_context(key, ValueError):
        return [*others, *in_folder(str(place_here(folder)), arguments)]


def in_folder(folder: str, words: list[str]) -> list[str]:
    """The words to add to a command line, so that its run or sweep writes to `folder`."""
    key = "sweep" if SWEEPS & set(words) else "run"
    # Other characters are syntax to Hydra.
    if not re.fullmatch(r"[\w./:@+~$-]+", folder):
        folder = "'" + folder.replace("'", "\\'") + "'"
    return [f"hydra.{key}.dir={folder}"]


def fresh_folder(project: str, words: list[str]) -> str:
    """The folder that conf/config.yaml gives a run, or a sweep, that starts now."""
    sweep = "-sweep" if SWEEPS & set(words) else ""
    return f"outputs/{project}/{datetime.now():%Y-%m-%d/%H-%M-%S}{sweep}"


def project_name(words: list[str]) -> str:
    """The setting project_name, by the command line or conf/config.yaml."""
    given = _setting_given("project_name", words)
    if given:
        return given
    import yaml

    # If the file cannot be read, the run itself will say why.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return str(yaml.safe_load((conf_dir() / "config.yaml").read_text())["project_name"])
    return "tunix_lite"


def config_dir(words: list[str]) -> str | None:
    """The folder of the user's own options that --config-dir gives; None if it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    return parser.parse_known_args(words)[0].config_dir


def check_config_dir(folder: str | None) -> None:
    """Raises ValueError if --config-dir names no folder."""
    check_on_disk("--config-dir", folder)
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"--config-dir={folder}: there is no such folder")
