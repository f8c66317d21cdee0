"""Rows of data sets of the Hugging Face hub, by name, through its datasets library: read from its
cache, or streamed. `hub:openai/gsm8k@main:main:train` is name, revision, config and split."""

import contextlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tunix_lite.models.hub import commit_of_data

if TYPE_CHECKING:
    import datasets

HUB = "hub:"
_NAME = re.compile(r"hub:([^:@]+)(?:@([^:@]+))?(?::([^:]*))?(?::([^:]+))?")
_SHA = re.compile("[0-9a-f]{40}")
_USUAL_SPLITS = ("train", "test", "validation")


class HubData(NamedTuple):
    """One split of a data set. Example: HubData.parse("hub:openai/gsm8k:main:test").split."""

    # org/name, or a folder in the hub's layout
    repo: str
    revision: str | None
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, name: str) -> "HubData":
        """Raises ValueError, with the form to write, for a name that has another one."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{name}: a data set of the hub is hub:org/name, with @REVISION, :CONFIG and "
                ":SPLIT where they are needed, such as hub:openai/gsm8k@main:main:train"
            )
        return cls(*(part or None for part in match.groups()))

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.repo}{revision}:{self.config or ''}:{self.split or ''}".rstrip(":")


def is_hub(name: str | None) -> bool:
    """True for a name with `hub:` before it."""
    return name is not None and name.startswith(HUB)


def pinned(name: str, default_split: str) -> str:
    """The name with the commit, the config and the split that are read now: what it names later,
    too. default_split: where the name has none. Raises ValueError."""
    data = HubData.parse(name)
    with _explained(data):
        try:
            builder = _builder(data.repo, data.revision, data.config)
        except ValueError:
            # one part after the name may be a split
            if data.config is None or data.split is not None:
                raise
            data = data._replace(config=None, split=data.config)
            builder = _builder(data.repo, data.revision, None)
    splits = [*map(str, builder.info.splits or builder.config.data_files or {})]
    is_only = data.split is None and default_split == "train" and len(splits) == 1
    split = splits[0] if is_only else data.split or default_split
    if split not in splits:
        config = builder.config.name
        lines = ", ".join(str(data._replace(config=config, split=one)) for one in splits)
        raise ValueError(f"{name}: there is no split {split}; write {lines}")
    # a folder has no commits
    revision = None if Path(data.repo).is_dir() else builder.hash
    return str(HubData(data.repo, revision, builder.config.name, split))


def rows_of_hub(name: str, is_streamed: bool) -> Iterator[tuple[int, dict]]:
    """The rows of a pinned name, numbered from 1, streamed or of the cache. ValueError."""
    if not is_streamed:
        yield from enumerate(table_of_hub(name), start=1)
        return
    data = HubData.parse(name)
    with _explained(data):
        rows = _builder(*data[:3]).as_streaming_dataset(split=data.split)
        yield from enumerate(rows, start=1)


@lru_cache(maxsize=2)
def table_of_hub(name: str) -> "datasets.Dataset":
    """The rows of a pinned name, in the cache, which is filled before. Raises ValueError."""
    data = HubData.parse(name)
    with _explained(data):
        builder = _builder(*data[:3])
        builder.download_and_prepare()
        return builder.as_dataset(split=data.split)


# a start asks twice, for two splits
@lru_cache(maxsize=8)
def _builder(repo: str, revision: str | None, config: str | None) -> "datasets.DatasetBuilder":
    """The library's reader of a data set."""
    try:
        import datasets
    except ImportError as error:
        why = "it is read by the datasets library: pip install -e '.[hub]'"
        raise ValueError(why) from error
    if not Path(repo).is_dir():
        if repo.startswith(("/", ".", "~")):
            raise ValueError("there is no such folder; ~ is not replaced here")
        commit = commit_of_data(repo, revision)
        # else the library would try for minutes
        datasets.config.HF_HUB_OFFLINE |= commit is None
        revision = commit or revision
    builder = datasets.load_dataset_builder(repo, config, revision=revision)
    if revision is None or not _SHA.fullmatch(revision) or builder.hash == revision:
        return builder
    # Without a network the library takes the newest commit of its cache.
    folder = Path(builder.cache_dir).with_name(revision)
    if not folder.is_dir():
        raise ConnectionError(f"the cache has another commit, {builder.hash}")
    return type(builder)(
        repo_id=repo,
        dataset_name=builder.dataset_name,
        config_name=builder.config.name,
        version=folder.parent.name,
        hash=revision,
    )


@contextlib.contextmanager
def _explained(data: HubData) -> Iterator[None]:
    """Turns errors of the library into a ValueError that says what to do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno and not error.filename:
            # the disk is full
            raise
        if not isinstance(error, ConnectionError):
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{data}: {why}") from None
        from datasets import config

        # one part after the name may be a split
        has_config = data.config and (data.split or data.config not in _USUAL_SPLITS)
        line = f'"{data.repo}"' + (f', "{data.config}"' if has_config else "")
        line += f', revision="{data.revision}"' if data.revision else ""
        raise ValueError(
            f"{data} is not in the cache {config.HF_DATASETS_CACHE}, and the hub cannot be "
            "reached, or HF_HUB_OFFLINE is set. Where there is a network type python -c 'import "
            f"datasets; datasets.load_dataset({line})' and bring that cache here; or give a folder "
            "of its files: hub:FOLDER"
        ) from None
