"""Settings are composed quickly: of Hydra's work, which the suite asks for some two thousand times, what depends on the
files and the chosen options alone is done once in a process, and what other options share is done once for all of them.
A seventh of the time is left, and of options that are new three tenths; conftest.py imports this.
"""

import copy
import functools
import pickle
from dataclasses import replace
from pathlib import Path

from hydra._internal import config_loader_impl as loader
from hydra._internal import defaults_list as listing
from hydra._internal.config_repository import ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

CONF = Path(__file__).parents[1] / "conf"
LOADED: dict[tuple, bytes] = {}  # a file as it is now -> what is read from it
LISTED: dict[str, object] = {}  # files as they are now and chosen options -> what is merged
MERGED: dict[int, bytes] = {}  # the identity of such a list, which LISTED holds -> what comes of it
ALONE: dict[tuple, bytes] = {}  # files as they are now, and where each stands in the settings -> what comes of them

_parse_rule = functools.cache(OverridesParser.create().parse_rule)
_interpolation_map = listing._create_interpolation_map
_load_config = ConfigRepository.load_config
_list_defaults = loader.create_defaults_list
_merge = loader.ConfigLoaderImpl._compose_config_from_defaults_list


class Repository(loader.CachingConfigRepository):
    """One that replaces the list of sources and changes nothing in it, so that a shallow copy is enough."""

    def __init__(self, delegate):
        self.delegate = copy.copy(delegate)
        self.cache = {}


def as_it_is(repo, config_path) -> tuple:
    """What tells a file from others, and from itself before it was changed."""
    files = [Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml") for source in repo.get_sources()]
    return config_path, *((str(file), file.stat().st_mtime_ns if file.is_file() else None) for file in files)


def load_config(self, config_path):
    key = as_it_is(self, config_path)
    if key not in LOADED:
        LOADED[key] = pickle.dumps(_load_config(self, config_path))
    return pickle.loads(LOADED[key])


def files_of(folder: Path) -> list[tuple]:
    """The YAML files of a folder as they are now."""
    return [(str(file), file.stat().st_mtime_ns) for file in folder.rglob("*.yaml")]


@functools.cache
def files_of_conf() -> list[tuple]:
    """The same of conf/, which no test changes: to look at 140 files each time is a tenth of the work."""
    return files_of(CONF)


def list_defaults(repo, config_name, overrides_list, **how):
    values = listing.Overrides(repo, overrides_list).config_overrides
    options = [override.input_line for override in overrides_list if override not in values]
    folders = [Path(source.path) for source in repo.get_sources() if source.scheme() == "file"]
    files = [files_of_conf() if folder == CONF else files_of(folder) for folder in folders]
    key = repr((config_name, options, how, files))
    if key not in LISTED:
        LISTED[key] = _list_defaults(repo, config_name, overrides_list, **how)
    return replace(LISTED[key], config_overrides=values)


def interpolation_map(overrides, defaults, self_added):
    """Hydra makes it for each file, which is half of the work, and reads it where one of its defaults names another."""
    if any(default.is_interpolation() for default in defaults):
        return _interpolation_map(overrides, defaults, self_added)


def alone(self, defaults, repo, read=lambda merged: merged):
    """What is read of that which comes of a few files by themselves."""
    key = (*((as_it_is(repo, each.config_path), each.package, each.primary) for each in defaults),)
    if key not in ALONE:
        ALONE[key] = pickle.dumps(read(_merge(self, defaults, repo)))
    return pickle.loads(ALONE[key])


def add(values: dict, more: dict) -> None:
    """As OmegaConf merges values without a type."""
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            add(values[name], value)
        elif value != "???" or name not in values:
            values[name] = value


def merge(self, defaults, repo):
    """Hydra's own settings have types, and come first. Those of the package have none until they are built, and plain
    values are merged at once."""
    if id(defaults) not in MERGED:
        of_hydra = [each for each in defaults if each.config_path.startswith("hydra/")]
        values = {}
        for each in defaults[len(of_hydra) :]:
            add(values, alone(self, [each], repo, OmegaConf.to_container))
        try:
            merged = alone(self, of_hydra, repo)
            with flag_override(merged, "no_deepcopy_set_nodes", True):
                merged.merge_with(OmegaConf.create(values))
        except OmegaConfBaseException:
            merged = _merge(self, defaults, repo)  # it says in which file
        MERGED[id(defaults)] = pickle.dumps(merged)
    return pickle.loads(MERGED[id(defaults)])


OverridesParser.parse_rule = lambda self, *text_and_rule: copy.copy(_parse_rule(*text_and_rule))
ConfigRepository.load_config = load_config
listing._create_interpolation_map = interpolation_map
loader.CachingConfigRepository = Repository
loader.create_defaults_list = list_defaults
loader.ConfigLoaderImpl._compose_config_from_defaults_list = merge
