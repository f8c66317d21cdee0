"""Flags of other projects on our command lines: `--learning_rate 1e-5` is answered with the setting
to type. Settings are key=value here, and the flags that there are belong to Hydra."""

import re
from collections.abc import Iterable
from pathlib import Path

from tunix_lite.basics.errors import ConfigError
from tunix_lite.settings.hints import (
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
_ALONE = "--help -h --hydra-help --version --resolve --run -r --multirun -m --shell-completion"
_WITH_A_WORD = "--cfg -c --package -p --config-path -cp --config-name -cn --config-dir -cd"
_WITH_A_WORD += " --experimental-rerun --info -i -sc"
HYDRA = dict.fromkeys(_ALONE.split(), 0) | dict.fromkeys(_WITH_A_WORD.split(), 1)
# Those of the commands beside training.
OF_COMMANDS = {
    flag: HYDRA[flag] for flag in ("--help", "-h", "--cfg", "-c", "--config-dir", "-cd")
}
# Sizes that the rule of model.target_params gives (models/sizes.py).
_RULED = re.compile(
    r"model\.architecture\.(num_(layers|heads|kv_heads)|(embed|head|mlp)_dim|vocab_size|pattern|"
    r"window|query_scale)="
)


def flags_first(argv: list[str]) -> list[str]:
    """The words with Hydra's flags and their values before the others, which keep their order.
    Hydra's parser takes no override behind a flag that comes behind an override."""
    flags, _, others = _parted(argv, HYDRA)
    return flags + others


def _parted(
    argv: list[str], ours: dict[str, int]
) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Our flags with the words that follow them, each other flag with its value, and the others.
    ours: our flags, and how many words follow each."""
    mine: list[str] = []
    foreign: list[tuple[str, str]] = []
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
        elif equals:
            foreign.append((word, value))
        # --bf16 is followed by another flag, an override or nothing; -1 is a value
        elif rest and re.match(r"-\D|.*=", rest[0]) is None:
            foreign.append((f"{word} {rest[0]}", rest.pop(0)))
        else:
            foreign.append((word, "true"))
    return mine, foreign, others


def refuse_foreign(argv: list[str], known: Iterable[str], ours: dict[str, int]) -> None:
    """Raises ConfigError if there are flags that are not ours, with what to write for each. known:
    the names of all settings. ours: our flags, and how many words follow each."""
    _, flags, _ = _parted(argv, ours)
    if not flags:
        return
    # One line to paste, and after it what cannot be in it.
    known = list(known)
    overrides = []
    others = []
    for text, value in flags:
        # the value may stand behind a space or a sign
        typed = re.split("[ =]", text)[0]
        name = typed.lstrip("-").replace("-", "_")
        hint = _meant(name, value, known) or Hint((), "there is no such setting")
        if hint.overrides:
            overrides.append(hint.paste)
        else:
            others.append(f"{text.split()[0]}: {hint.note}")
    shown = " ".join(text for text, _ in flags)
    write = f": {' '.join(overrides)}" if overrides else ""
    parts = [f"{shown}: settings are written key=value, without dashes{write}", *others]
    raise ConfigError("; ".join(parts))


def _meant(name: str, value: str, known: list[str]) -> Hint | None:
    """Translates a name with a value into our settings and groups."""
    if name in ("config", "config_file", "yaml", "config_path"):
        return Hint((), "a YAML file of yours is --config-dir FOLDER --config-name NAME")
    if name in known:
        return foreign_value(name, value) or Hint((f"{name}={value}",))
    # a group of settings, of which an option is chosen
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
    option = near_option(group, value, folders)
    return Hint((f"{group}={option}",)) if option else None


def wrong_override(
    key: str, value: object, known: list[str], groups: list[str], folders: Iterable[Path] = ()
) -> str | None:
    """The message for an override that names no setting, group or option; None: it names one.
    known: all settings. groups: the folders of conf/. folders: more of them, with options of the
    user's own."""
    if key in groups:
        options = options_of(key, folders)
        if value is None or str(value) in options:
            return None
        there = f"here is {', '.join(options)}"
        hint = _option_meant(key, str(value), folders)
        text = f"{key}={value}: there is no such {key}; "
        # The hint comes first: some groups have thirty options.
        if hint is None:
            return f"{text}t{there}"
        if hint.overrides:
            return f"{text}did you mean {hint}? T{there}"
        return f"{text}{hint}; t{there}"
    if any(name == key or name.startswith(f"{key}.") for name in known):
        return None
    near = nearest_settings(key, groups) if "." not in key else []
    if len(near) == 1:
        line = shell_quoted(f"{near[0]}={value}")
        return f"{key}: there is no such group; did you mean {line}?"
    return unknown_key(key, known, value)


def check_values(overrides: Iterable[str]) -> None:
    """Raises ConfigError for a value that is another project's word for one of ours, and for sizes
    beside model.target_params, which gives them."""
    overrides = list(overrides)
    ruled = [text for text in overrides if _RULED.match(text)]
    for text in overrides if ruled else ():
        if re.match(r"model\.target_params=(?!null)", text):
            rest = " ".join(shell_quoted(one) for one in overrides if one not in ruled)
            raise ConfigError(
                f"{text} gives all sizes by a rule, so {' '.join(ruled)} would change nothing; "
                f"write {rest}, or leave {text} out"
            )
    for text in overrides:
        key, _, value = text.partition("=")
        if (hint := foreign_value(key, value)) is not None:
            raise ConfigError(f"{text}: there is no such value; write {hint}")
