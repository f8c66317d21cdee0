"""Flags of other projects on our command lines: `--learning_rate 1e-5` is answered with the setting
to type.

Settings are key=value here, and the flags that there are belong to Hydra.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tunix_lite.errors import ConfigError
from tunix_lite.hints import (
    Hint,
    foreign_value,
    near_option,
    nearest_settings,
    options_of,
    shell_quoted,
    translated,
    unknown_key,
)

# Flags of Hydra, and how many words follow each.
ALONE = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r")
ALONE += ("--multirun", "-m", "--shell-completion")
WITH_A_WORD = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn")
WITH_A_WORD += ("--config-dir", "-cd", "--experimental-rerun", "--info", "-i", "-sc")
HYDRA = dict.fromkeys(ALONE, 0) | dict.fromkeys(WITH_A_WORD, 1)
# Those of the commands beside training.
OF_COMMANDS = {
    flag: HYDRA[flag] for flag in ("--help", "-h", "--cfg", "-c", "--config-dir", "-cd")
}
FILES = {"config", "config_file", "yaml", "config_path"}


class Flag(NamedTuple):
    """A word that begins with a dash, and is no flag of ours.

    Example: `--lr 1e-5` is Flag("--lr 1e-5", "lr", "1e-5").
    """

    # the words as they were typed
    text: str
    name: str
    # "true" for a flag without a value
    value: str


def foreign_flags(argv: list[str], ours: dict[str, int]) -> list[Flag]:
    """The flags that are not ours, each with its value.

    ours: our flags, and how many words follow each.
    """
    return _parted(argv, ours)[1]


def flags_first(argv: list[str], ours: dict[str, int]) -> list[str]:
    """The words with our flags and their values before the others, which keep their order. Hydra's
    parser takes no override behind a flag that comes behind an override.

    ours: as foreign_flags takes it; the words must have no other flags.
    """
    flags, _, others = _parted(argv, ours)
    return flags + others


def _parted(argv: list[str], ours: dict[str, int]) -> tuple[list[str], list[Flag], list[str]]:
    """Our flags with the words that follow them, the flags that are not ours, and the others."""
    mine: list[str] = []
    foreign: list[Flag] = []
    others: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in ours:
            count = 0 if equals else ours[flag]
            mine += [word, *rest[:count]]
            del rest[:count]
        elif re.match(r"-[^\d]", word) is None:
            others.append(word)
        else:
            text = word
            if not equals:
                # --bf16 is followed by another flag, an override or nothing; -1 is a value
                has_value = bool(rest) and re.match(r"-\D|.*=", rest[0]) is None
                value = rest.pop(0) if has_value else "true"
                text = f"{word} {value}" if has_value else word
            foreign.append(Flag(text, flag.lstrip("-").replace("-", "_"), value))
    return mine, foreign, others


def refuse_foreign(argv: list[str], known: Iterable[str], ours: dict[str, int]) -> None:
    """Raises ConfigError if there are flags that are not ours, with what to write for each.

    known: the names of all settings. ours: as foreign_flags takes it.
    """
    flags = foreign_flags(argv, ours)
    if not flags:
        return
    # One line to paste, and after it what cannot be in it.
    known = list(known)
    overrides = []
    others = []
    for flag in flags:
        hint = meant(flag.name, flag.value, known) or Hint((), "there is no such setting")
        if hint.overrides:
            overrides.append(hint.paste)
        else:
            others.append(f"{flag.text.split()[0]}: {hint.note}")
    shown = " ".join(flag.text for flag in flags)
    write = f": {' '.join(overrides)}" if overrides else ""
    parts = [f"{shown}: settings are written key=value, without dashes{write}", *others]
    raise ConfigError("; ".join(parts))


def meant(name: str, value: str, known: list[str]) -> Hint | None:
    """Translates a name with a value into our settings and groups."""
    if name in FILES:
        return Hint((), "a YAML file of yours is --config-dir FOLDER --config-name NAME")
    if name in known:
        return foreign_value(name, value) or Hint((f"{name}={value}",))
    if any(key.startswith(f"{name}.") for key in known) and options_of(name):
        return _option_meant(name, value)
    hint = translated(name, value, known)
    if hint is not None:
        return hint
    near = nearest_settings(name, known)
    return Hint((f"{near[0]}={value}",)) if len(near) == 1 else None


def _option_meant(group: str, value: str, folders: Iterable[Path] = ()) -> Hint | None:
    """The option of a group that is meant by a value."""
    if group == "model" and ("/" in value or value.startswith((".", "~"))):
        return Hint((f"model.weights={value}",))
    if group == "algorithm" and value.lower() == "ppo":
        return Hint((), "there is no critic; algorithm=grpo compares completions of a prompt")
    option = near_option(group, value, folders)
    return Hint((f"{group}={option}",)) if option else None


def wrong_override(
    key: str,
    value: object,
    known: list[str],
    groups: list[str],
    folders: Iterable[Path] = (),
) -> str | None:
    """The message for an override that names no setting, group or option; None: it names one.

    known: the names of all settings. groups: the folders of conf/. folders: more of them, with
    options of the user's own.
    """
    if key in groups:
        options = options_of(key, folders)
        if value is None or str(value) in options:
            return None
        there = f"here is {', '.join(options)}"
        hint = _option_meant(key, str(value), folders)
        text = f"{key}={value}: there is no such {key}; "
        if hint is None:
            return f"{text}t{there}"
        # The hint comes first: some groups have thirty options.
        is_override = bool(hint.overrides)
        return (
            f"{text}did you mean {hint}? T{there}" if is_override else f"{text}{hint}; t{there}"
        )
    if any(name == key or name.startswith(f"{key}.") for name in known):
        return None
    near = nearest_settings(key, groups) if "." not in key else []
    if len(near) == 1:
        line = shell_quoted(f"{near[0]}={value}")
        return f"{key}: there is no such group; did you mean {line}?"
    return unknown_key(key, known, value)


def check_values(overrides: Iterable[str]) -> None:
    """Raises ConfigError for a value that is another project's word for one of ours."""
    for text in overrides:
        key, _, value = text.partition("=")
        if (hint := foreign_value(key, value)) is not None:
            raise ConfigError(f"{text}: there is no such value; write {hint}")
