"""Flags of other projects on our command lines: `--learning_rate 1e-5` is answered with the setting
to type.

Settings are key=value here, and the flags that there are belong to Hydra.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.errors import ConfigError
from tunix_lite.hints import (
    Hint,
    Refusal,
    foreign_value,
    near_option,
    nearest_settings,
    options_of,
    shell_quoted,
    takes_all,
    translated,
    unknown_key,
)

# Flags of Hydra, and how many words follow each.
HYDRA = {
    "--help": 0,
    "-h": 0,
    "--hydra-help": 0,
    "--version": 0,
    "--cfg": 1,
    "-c": 1,
    "--resolve": 0,
    "--package": 1,
    "-p": 1,
    "--run": 0,
    "-r": 0,
    "--multirun": 0,
    "-m": 0,
    "--shell-completion": 0,
    "-sc": 1,
    "--config-path": 1,
    "-cp": 1,
    "--config-name": 1,
    "-cn": 1,
    "--config-dir": 1,
    "-cd": 1,
    "--experimental-rerun": 1,
    "--info": 1,
    "-i": 1,
}
# Those of the commands beside training.
OF_COMMANDS = {"--help": 0, "-h": 0, "--cfg": 1, "-c": 1, "--config-dir": 1, "-cd": 1}
FILES = {"config", "config_file", "yaml", "config_path"}


@dataclass(frozen=True)
class Flag:
    """A word that begins with a dash, and is no flag of ours.

    Example: `--lr 1e-5` is Flag("--lr 1e-5", "lr", "1e-5").
    """

    # as it was typed
    text: str
    name: str
    # "true" for a flag without a value
    value: str


def foreign_flags(words: list[str], ours: dict[str, int]) -> list[Flag]:
    """The flags that are not ours, each with its value.

    ours: our flags, and how many words follow each.
    """
    found = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in ours:
            del rest[: 0 if equals else ours[flag]]
            continue
        if not word.startswith("-") or len(word) < 2 or word[1].isdigit():
            continue
        # A flag without a value, as --bf16, is followed by another flag, an override or nothing.
        text = word
        if not equals:
            has_value = bool(rest) and is_value(rest[0])
            value = rest.pop(0) if has_value else "true"
            text = f"{word} {value}" if has_value else word
        found.append(Flag(text, flag.lstrip("-").replace("-", "_"), value))
    return found


def is_value(word: str) -> bool:
    """Whether a word after a flag is its value, and not another flag or an override. -1 is one."""
    is_negative = re.fullmatch(r"-\d+(\.\d*)?(e[+-]?\d+)?", word) is not None
    return is_negative or not (word.startswith("-") or "=" in word)


def refuse_foreign(
    words: list[str],
    known: Iterable[str],
    ours: dict[str, int],
    refusal: Refusal = takes_all,
) -> None:
    """Raises ConfigError if there are flags that are not ours, with what to write for each.

    known: the names of all settings. ours: as foreign_flags takes it. refusal: what a run says of
    overrides, so that none is offered that it refuses.
    """
    flags = foreign_flags(words, ours)
    if not flags:
        return
    # One line to paste, and after it what cannot be in it.
    known = list(known)
    overrides = []
    others = []
    for flag in flags:
        hint = meant(flag.name, flag.value, known)
        hint = hint and hint.checked(refusal)
        if hint is None:
            others.append(f"{flag.text.split()[0]}: there is no such setting")
        elif hint.overrides:
            overrides.append(hint.paste)
        else:
            others.append(f"{flag.text.split()[0]}: {hint.note}")
    shown = " ".join(flag.text for flag in flags)
    write = f": {' '.join(overrides)}" if overrides else ""
    parts = [f"{shown}: settings are written key=value, without dashes{write}", *others]
    raise ConfigError("; ".join(parts))


def meant(name: str, value: str, known: list[str]) -> Hint | None:
    """What a name with a value is among our settings and groups."""
    if name in FILES:
        return Hint((), "a YAML file of yours is --config-dir FOLDER --config-name NAME")
    if name in known:
        return foreign_value(name, value) or Hint((f"{name}={value}",))
    groups = {key.partition(".")[0] for key in known if "." in key}
    if name in groups and options_of(name):
        return option_meant(name, value)
    hint = translated(name, value, known)
    if hint is not None:
        return hint
    near = nearest_settings(name, known)
    return Hint((f"{near[0]}={value}",)) if len(near) == 1 else None


def option_meant(group: str, value: str, folders: Iterable[Path] = ()) -> Hint | None:
    """The option of a group that is meant by a value that is none of them."""
    if value in options_of(group, folders):
        return Hint((f"{group}={value}",))
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
    refusal: Refusal = takes_all,
) -> str | None:
    """The message for an override that names no setting, group or option; None: it names one.

    known: the names of all settings. groups: the folders of conf/. folders: more of them, with
    options of the user's own. refusal: what a run says of overrides, so that none is offered that
    it refuses.
    """
    if key in groups:
        is_option = value is None or str(value) in options_of(key, folders)
        return None if is_option else unknown_option(key, value, folders)
    is_section = any(name.startswith(f"{key}.") for name in known)
    if key in known or is_section:
        return None
    is_group = misspelt_group(key, value, groups) if "." not in key else None
    return is_group or unknown_key(key, known, value, refusal)


def check_values(overrides: Iterable[str]) -> None:
    """Raises ConfigError for a value that is another project's word for one of ours."""
    for text in overrides:
        key, _, value = text.partition("=")
        if (hint := foreign_value(key, value)) is not None:
            raise ConfigError(f"{text}: there is no such value; write {hint}")


def unknown_option(group: str, value: object, folders: Iterable[Path]) -> str:
    """The message for an option that a group does not have."""
    options = options_of(group, folders)
    text = f"{group}={value}: there is no such {group}; "
    there = f"there is {', '.join(options)}"
    hint = option_meant(group, str(value), folders)
    if hint is None:
        return text + there
    # The hint comes first: some groups have thirty options.
    if hint.overrides:
        return f"{text}did you mean {hint}? T{there[1:]}"
    return f"{text}{hint.note}; {there}"


def misspelt_group(key: str, value: object, groups: list[str]) -> str | None:
    """The message for `algoritm=grpo`; None if the key is no group, misspelt."""
    near = nearest_settings(key, groups)
    if len(near) != 1:
        return None
    return f"{key}: there is no such group; did you mean {shell_quoted(f'{near[0]}={value}')}?"
