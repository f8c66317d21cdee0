"""Suggests the intended setting, and nothing when unsure: by the table of other projects' words
(conf/words.yaml), then a setting of that name in another section, then one that is spelt alike.
Settings are key=value here, and the flags that there are belong to Hydra."""

import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from tunix_lite.basics.errors import ConfigError
from tunix_lite.distributed.command_line import conf_dir

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
# Sections that other projects do not have: a word of theirs does not stand in one of these, unless
# what it means here does, too.
_STRICT = {"optimizer", "evaluation", "tracking", "rewards", "launch", "sharding", "resume"}


@dataclass(frozen=True)
class _Hint:
    """The overrides to write, and a note about them; one of the two may be missing.
    Example: `_translated("lr", "1e-5", known)` is _Hint(("optimizer.learning_rate=1e-5",), "")."""

    # ready to be typed, but for a shell's quotes
    overrides: tuple[str, ...]
    note: str = ""

    @property
    def paste(self) -> str:
        """The overrides as a shell takes them."""
        return " ".join(shell_quoted(text) for text in self.overrides)

    def __str__(self) -> str:
        if not self.overrides:
            return self.note
        if self.note:
            return f"{self.paste} ({self.note})"
        return self.paste


def shell_quoted(override: str) -> str:
    """An override in single quotes where a shell would take it apart."""
    if re.fullmatch(r"[\w.,:/=@+~-]*", override):
        return override
    return shlex.quote(override)


def unknown_key(key: str, known: Iterable[str], value: object) -> str:
    """The message for a setting that does not exist, with the one that was meant, or those beside
    it. known: the names of all settings. value: what it was to be, as text or as YAML read it."""
    known = list(known)
    # The words of others first: training.lr is the learning rate, and no misspelt setting.
    hint = _translated(key, value, known)
    if hint is not None:
        link = "; write" if hint.overrides else ":"
        return f"{key}: there is no such setting{link} {hint}"
    near = _nearest_settings(key, known)
    if near:
        return f"{key}: there is no such setting; did you mean {' or '.join(map(repr, near))}?"

    # The settings of the section that the key names, of a group inside it only its own name;
    # without a section, all sections.
    section = key.lstrip("+~").rpartition(".")[0]
    here = [name for name in known if section and name.startswith(f"{section}.")]
    parts = section.count(".") + 2
    names = dict.fromkeys(".".join(name.split(".")[:parts]) for name in here)
    sections = (f"{name.partition('.')[0]}.*" if "." in name else name for name in known)
    names = names or dict.fromkeys(sections)
    return f"{key}: there is no such setting; known here: {', '.join(names)}"


@dataclass(frozen=True)
class Word:
    """A row of conf/words.yaml, which describes its fields."""

    # project -> its names for this, separated by spaces
    names: Mapping[str, str]
    ours: tuple[str, ...]
    note: str
    values: Mapping[str, str]

    def all_names(self) -> Iterator[tuple[str, str]]:
        """(project, name) of each name."""
        for project, names in self.names.items():
            for name in names.split():
                yield project, name


@functools.cache
def foreign_words() -> tuple[list[Word], dict[str, str]]:
    """The words of other projects, and the families of settings that have no equivalent."""
    # the loader in C reads the file in a tenth of the time
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = yaml.load((conf_dir() / "words.yaml").read_text(), loader)
    rows = []
    for row in table["words"]:
        ours = row.pop("write", [])
        if isinstance(ours, str):
            ours = [ours]
        rest = (row.pop("note", ""), row.pop("values", {}))
        rows.append(Word(row, tuple(ours), *rest))
    return rows, table["families"]


@functools.cache
def _index() -> dict[str, tuple[Word, bool]]:
    """Name, in small letters -> the word, and whether it is the name of a setting of ours."""
    index = {}
    for each in foreign_words()[0]:
        for project, name in each.all_names():
            index[name.lower()] = (each, project == "ours")
    return index


def _normal(key: str) -> str:
    return key.strip().lstrip("+~-").replace("-", "_").lower()


def _translated(key: str, value: object, known: Iterable[str] | None) -> _Hint | None:
    """Translates a word of another project; None if the table does not have it. value: None if it
    is not known. known: all settings; None: whatever the word's first meaning is."""
    name = _normal(key)
    families = foreign_words()[1]
    for family, note in families.items():
        if "." in family and f".{family}" in f".{name}":
            return _Hint((), note)
    # The longest name first: rollout.n is known, n is not.
    # other projects nest their settings, and may nest them in another way
    parts = name.split(".")
    for start in range(len(parts)):
        each, is_ours = _index().get(".".join(parts[start:]), (None, False))
        if each is not None and not is_ours:
            return _fitting(each, parts[:start], value, known)
    last = parts[-1]
    for family, note in families.items():
        if "." not in family and last.startswith(family):
            return _Hint((), note)
    return None


def _fitting(
    each: Word, sections: list[str], value: object, known: Iterable[str] | None
) -> _Hint | None:
    """The word with this value, if it can be meant in these sections."""
    text = _text(value)
    overrides = ()
    if (chosen := each.values.get(text.lower())) is not None:
        overrides = tuple(chosen.split())
    elif known is not None or len(each.ours) == 1:
        # The first template whose settings exist, with the value in it; the parts first, for a
        # value may hold spaces.
        names = None if known is None else set(known)
        for template in each.ours:
            if names is None or all(_exists(part, names) for part in template.split()):
                overrides = tuple(
                    part.replace("{}", text or "...") for part in template.split()
                )
                break
    # optimizer.beta is not the KL's: whoever names a section of ours means it.
    section = sections[0] if sections else ""
    in_place = all(text.lstrip("+~").startswith(f"{section}.") for text in overrides)
    # there the same word means another thing
    is_elsewhere = section in _STRICT and overrides and not in_place
    if is_elsewhere or not (overrides or each.note):
        return None
    return _Hint(overrides, each.note)


def _exists(override: str, known: set[str]) -> bool:
    """Returns whether the setting, or what a `+` adds it to, is there. Options of groups are, and
    those of a task depend on its option."""
    key = override.partition("=")[0]
    if "." not in key or key.startswith(("hydra.", "task.")):
        return True
    if key.startswith("+"):
        section = key[1:].rpartition(".")[0]
        return any(name.startswith(f"{section}.") for name in known)
    return key.lstrip("~") in known


def _text(value: object) -> str:
    """A value as it is typed; None: ""."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(item) for item in value)}]"
    text = str(value).strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if text.lower() in ("true", "false"):
        return text.lower()
    return text


def options_of(group: str, folders: Iterable[Path]) -> list[str]:
    """The options of a group, in conf/ and in these folders."""
    options = set()
    for folder in (conf_dir(), *folders):
        options |= {file.stem for file in (folder / group).glob("*.yaml")}
    return sorted(options)


# What other projects call an option: (group, name without separators before digits) -> ours.
_KNOWN_OPTIONS = {
    ("algorithm", "drgrpo"): "dr_grpo",
    ("algorithm", "reinforce++"): "reinforce_pp",
    ("algorithm", "reinforce_plus_plus"): "reinforce_pp",
    ("algorithm", "gspo_token"): "gspo",
    ("algorithm", "finetune"): "sft",
    ("algorithm", "supervised"): "sft",
    ("optimizer", "adam"): "adamw",
    ("optimizer", "adamw_torch"): "adamw",
    ("sharding", "ddp"): "data_parallel",
    ("sharding", "fsdp"): "default",
}


def _plain(name: str) -> str:
    """A name in one spelling: gemma-3-1b-it, Gemma3_1B and gemma3-1b are gemma3_1b."""
    name = re.sub(r"[-_ ](it|instruct|chat)$", "", name.strip().lower())
    name = re.sub(r"(?<=[a-z])[-_ ](?=\d)", "", name)
    return re.sub(r"[- ]", "_", name)


def _nearest_settings(key: str, known: Iterable[str]) -> list[str]:
    """The settings that are meant by a misspelt one: one, or two that fit equally well; else []."""
    wanted = key.strip().lstrip("+~")
    section, _, name = wanted.rpartition(".")
    top = section.partition(".")[0]
    same = []
    # In the same section, or in any if it names none: setting -> its last name.
    beside = {}
    for setting in known:
        # Names of `sharding` are words of everybody: they are meant in their own section only.
        if setting.startswith("sharding.") and top != "sharding":
            continue
        own_section, _, own_name = setting.rpartition(".")
        if own_name == name and not name.startswith("_"):
            same.append(setting)
        if section in ("", own_section):
            beside[setting] = own_name
    if same and top not in _STRICT:
        return same if len(same) <= 2 else []
    names = _closest(name, beside.values())
    nearest = [setting for setting, own_name in beside.items() if own_name in names]
    return nearest if len(nearest) <= 2 else []


def near_word(word: str, choices: Iterable[str]) -> str | None:
    """The one of these words that is meant by a misspelt one; None: not exactly one."""
    nearest = _closest(word, choices)
    return nearest[0] if len(nearest) == 1 else None


def _closest(name: str, names: Iterable[str]) -> list[str]:
    """The names that are this one but for a typing mistake, the nearest first."""
    # top_n is not top_k, min_steps not max_steps, and a model of 22b not one of 2b
    near = get_close_matches(name, sorted(set(names)), cutoff=0.88)
    numbers = re.findall(r"\d+", name)
    near = [each for each in near if re.findall(r"\d+", each) == numbers]
    swapped = [each for each in set(names) if sorted(each) == sorted(name)]
    return near or swapped


# ---- command lines


def flags_first(argv: list[str], ours: dict[str, int]) -> list[str]:
    """The words with our flags and their values before the others, which keep their order: Hydra's
    parser takes no override behind a flag that comes behind an override. ours: our flags, and how
    many words follow each. Raises ConfigError for other flags, as `--lr 1e-5`, with the settings
    that they would be, `lr=1e-5`."""
    mine = []
    others = []
    foreign = []
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
            if not equals:
                # --bf16 is followed by another flag, an override or nothing; -1 is a value
                has_value = rest and re.match(r"-\D|.*=", rest[0]) is None
                value = rest.pop(0) if has_value else "true"
            foreign.append(f"{flag.lstrip('-').replace('-', '_')}={value}")
    if foreign:
        settings = " ".join(map(shell_quoted, foreign))
        raise ConfigError(f"settings are written key=value, without dashes: {settings}")
    return [*mine, *others]


def wrong_override(
    key: str, value: object, known: list[str], groups: list[str], folders: Iterable[Path] = ()
) -> str | None:
    """The message for an override that names no setting, group or option; None: it names one.
    known: all settings. groups: the folders of conf/. folders: with the user's own options."""
    if key in groups:
        options = options_of(key, folders)
        if value is None or str(value) in options:
            return None
        names = ", ".join(options)
        text = f"{key}={value}: there is no such {key}; "
        # The hint comes first: some groups have thirty options.
        value = str(value)
        if key == "model" and ("/" in value or value.startswith((".", "~"))):
            return f"{text}did you mean {shell_quoted(f'model.weights={value}')}? There is {names}"
        # gemma-3-1b-it is gemma3_1b
        value = _KNOWN_OPTIONS.get((key, _plain(value)), value)
        plain = _plain(value)
        same = [option for option in options if _plain(option) == plain]
        option = same[0] if same else near_word(value, options)
        if option:
            return f"{text}did you mean {key}={option}? There is {names}"
        return f"{text}there is {names}"
    if any(name == key or name.startswith(f"{key}.") for name in known):
        return None
    near = _nearest_settings(key, groups) if "." not in key else []
    if len(near) == 1:
        line = shell_quoted(f"{near[0]}={value}")
        return f"{key}: there is no such group; did you mean {line}?"
    return unknown_key(key, known, value)


def check_values(overrides: Iterable[str]) -> None:
    """Raises ConfigError for a value that is another project's word for one of ours, and for sizes
    beside model.target_params, which gives them."""
    overrides = list(overrides)
    ruled = [text for text in overrides if _RULED.match(text)]
    for text in overrides:
        if ruled and re.match(r"model\.target_params=(?!null)", text):
            rest = " ".join(shell_quoted(one) for one in overrides if one not in ruled)
            raise ConfigError(
                f"{text} gives all sizes by a rule, so {' '.join(ruled)} would change nothing; "
                f"write {rest}, or leave {text} out"
            )
    for text in overrides:
        key, _, value = text.partition("=")
        each, is_ours = _index().get(_normal(key), (None, False))
        if is_ours and (ours := each.values.get(_text(value).lower())) is not None:
            raise ConfigError(
                f"{text}: there is no such value; write {_Hint(tuple(ours.split()))}"
            )
