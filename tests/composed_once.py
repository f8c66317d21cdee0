"""Settings are composed quickly: of Hydra's work, which the suite asks for some two thousand times, what depends on the
files and the chosen options alone is done once in a process. A seventh of the time is left; conftest.py imports this.
"""

import copy
import functools
import pickle
from dataclasses import replace
from pathlib import Path

from hydra._internal import config_loader_impl as loader
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import Overrides

CONF = Path(__file__).parents[1] / "conf"
LOADED: dict[tuple, bytes] = {}  # a file as it is now -> what is read from it
LISTED: dict[str, object] = {}  # files as they are now and chosen options -> what is merged
MERGED: dict[int, bytes] = {}  # the identity of such a list, which LISTED holds -> what comes of it

_load_config = ConfigRepository.load_config
_list_defaults = loader.create_defaults_list
_merge = loader.ConfigLoaderImpl._compose_config_from_defaults_list


class Repository(loader.CachingConfigRepository):
    """One that replaces the list of sources and changes nothing in it, so that a shallow copy is enough."""

    def __init__(self, delegate):
        self.delegate = copy.copy(delegate)
        self.cache = {}


def load_config(self, config_path):
    files = [Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml") for source in self.get_sources()]
    key = config_path, *((str(file), file.stat().st_mtime_ns if file.is_file() else None) for file in files)
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
    values = Overrides(repo, overrides_list).config_overrides
    options = [override.input_line for override in overrides_list if override not in values]
    folders = [Path(source.path) for source in repo.get_sources() if source.scheme() == "file"]
    files = [files_of_conf() if folder == CONF else files_of(folder) for folder in folders]
    key = repr((config_name, options, how, files))
    if key not in LISTED:
        LISTED[key] = _list_defaults(repo, config_name, overrides_list, **how)
    return replace(LISTED[key], config_overrides=values)


def merge(self, defaults, repo):
    if id(defaults) not in MERGED:
        MERGED[id(defaults)] = pickle.dumps(_merge(self, defaults, repo))
    return pickle.loads(MERGED[id(defaults)])


ConfigRepository.load_config = load_config
loader.CachingConfigRepository = Repository
loader.create_defaults_list = list_defaults
loader.ConfigLoaderImpl._compose_config_from_defaults_list = merge
