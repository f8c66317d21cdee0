"""Settings are composed quickly: of Hydra's work, which the suite asks for some two thousand times, what depends on the
files and the chosen options alone is done once in a process. A fifth of the time is left; conftest.py imports this.
"""

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import yaml
from hydra._internal import config_loader_impl as loader
from hydra._internal.defaults_list import Overrides
from omegaconf import omegaconf

PARSED: dict[str, bytes] = {}  # the text of a file
LISTED: dict[str, object] = {}  # files as they are now and chosen options -> what is merged
MERGED: dict[int, bytes] = {}  # the identity of such a list, which LISTED holds -> what comes of it

_list_defaults = loader.create_defaults_list
_merge = loader.ConfigLoaderImpl._compose_config_from_defaults_list


def load_yaml(file, Loader):
    if isinstance(file, str):
        return yaml.load(file, Loader=Loader)
    text = file.read()
    if text not in PARSED:
        file.seek(0)  # so that an error names the file
        PARSED[text] = pickle.dumps(yaml.load(file, Loader=Loader))
    return pickle.loads(PARSED[text])


def list_defaults(repo, config_name, overrides_list, **how):
    values = Overrides(repo, overrides_list).config_overrides
    options = [override.input_line for override in overrides_list if override not in values]
    folders = [Path(source.path) for source in repo.get_sources() if source.scheme() == "file"]
    files = [(str(file), file.stat().st_mtime_ns) for folder in folders for file in folder.rglob("*.yaml")]
    key = repr((config_name, options, how, files))
    if key not in LISTED:
        LISTED[key] = _list_defaults(repo, config_name, overrides_list, **how)
    return replace(LISTED[key], config_overrides=values)


def merge(self, defaults, repo):
    if id(defaults) not in MERGED:
        MERGED[id(defaults)] = pickle.dumps(_merge(self, defaults, repo))
    return pickle.loads(MERGED[id(defaults)])


omegaconf.yaml = SimpleNamespace(**vars(yaml) | {"load": load_yaml})
loader.create_defaults_list = list_defaults
loader.ConfigLoaderImpl._compose_config_from_defaults_list = merge
