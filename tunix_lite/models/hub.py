"""Models of the Hugging Face hub: the folder of `org/name`, of the cache or downloaded."""

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tunix_lite.basics.plain_text import reason_of
from tunix_lite.basics.untrusted import read_object

# Configuration, tokenizer, index of the weights.
SMALL = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
# Weights for other programs are in subfolders; Mistral's second copy is beside the first.
_NEVER = ("*/*", "consolidated*")

# seconds that the hub has to name a commit
_TIMEOUT = 10.0

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9_./-]+))?")


def is_hub_name(text: str) -> bool:
    """True if `text` is `org/name` or `org/name@revision`, and no path of this machine."""
    match = _NAME.fullmatch(text)
    # What the hub does not allow in a name, and what is longer than the name of a file can be.
    if match is None or len(match[1]) > 96 or match[1].endswith(".git") or "--" in match[1]:
        return False
    return ".." not in text and len(text) <= 255 and not Path(text).exists()


def small_files(name: str) -> Path:
    """The folder of a model with everything but its weights. Raises as `snapshot`."""
    return _folder(name, SMALL, lambda folder: (folder / "config.json").is_file())


def snapshot(name: str) -> Path:
    """The folder of a model, `org/name` or `org/name@revision`, with its weights: from the cache,
    else downloaded. Raises ValueError that says what to do, and OSError if the disk is full."""
    folder = _folder(name, SMALL + _WEIGHTS, _has_weights)
    if not _has_weights(folder):
        raise ValueError(
            f"{name} has no *.safetensors files, and only safetensors are read from the hub (not "
            "pytorch_model.bin, *.pth or *.gguf). Take a repository that has them, or download a "
            "GGUF file and give model.weights=FILE.gguf"
        )
    return folder


def commit_of_data(repo: str, revision: str | None) -> str | None:
    """The commit of a data set that a branch, a tag or a commit names; None: `main`. Returns None
    if the hub cannot be reached. Raises ValueError that says what to do."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(repo, revision=revision, timeout=_TIMEOUT).sha
    except errors.HfHubHTTPError as error:
        raise ValueError(_explain(error, repo, revision, "data set")) from None
    except errors.HTTPError:
        return None


def _folder(name: str, patterns: tuple[str, ...], is_complete: Callable[[Path], bool]) -> Path:
    """The folder with the files that match `patterns`, from the cache if it is_complete there."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} is no model of the hub; one is written org/name or org/name@revision"
        )
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ValueError(
            f"{name} is a model of the Hugging Face hub: pip install -e '.[hub]'"
        ) from None
    repo, revision = match.groups()
    kinds = {"allow_patterns": list(patterns), "ignore_patterns": list(_NEVER)}
    download = partial(snapshot_download, repo, revision=revision, **kinds)

    # From the cache, else from the hub. Older caches do not record what is missing.
    with contextlib.suppress(errors.LocalEntryNotFoundError):
        folder = Path(download(local_files_only=True))
        if is_complete(folder):
            return folder
    try:
        return Path(download())
    except (errors.LocalEntryNotFoundError, errors.HTTPError) as error:
        raise ValueError(_explain(error, repo, revision)) from None


def _explain(error: Exception, repo: str, revision: str | None, kind: str = "model") -> str:
    """Explains why a model, or a data set, cannot be had, and what to do about it."""
    from huggingface_hub import constants, errors

    download = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    is_data = kind == "data set"
    place = f"datasets/{repo}" if is_data else repo
    instead = "task.train=FILE" if is_data else "model.weights=FOLDER"
    is_absent = isinstance(error, errors.LocalEntryNotFoundError)
    if is_absent and isinstance(error.__cause__, errors.HfHubHTTPError):
        # What the hub answered matters more than that the cache has no copy.
        error = error.__cause__

    # The hub answered, and refused.
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its licence at https://huggingface.co/{place}, then run `hf "
            "auth login` or set HF_TOKEN to a token of the account that did"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no {kind} {repo} on the hub (and no folder of that name here), or it is "
            "private: then run `hf auth login` or set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{repo} has no revision {revision or 'main'}; a revision is a branch, a tag or a full "
            f"commit hash, and https://huggingface.co/{place}/commits lists them"
        )

    # The hub did not answer.
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = f"the hub cannot be reached: {reason_of(error)}"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE=1 is set"
        return (
            f"{repo} is not, or not wholly, in the cache {constants.HF_HUB_CACHE}, and {why}. Run "
            f"`{download}` where there is a network and bring that cache here, or give "
            f"{instead}; tunix-lite plan needs no weights"
        )
    # A token that is refused, a hub out of order, a proxy that fails, a connection that breaks.
    return (
        f"{repo} could not be downloaded ({reason_of(error)}). What has come is kept, so try "
        "again; if the token is refused, `hf auth login` or HF_TOKEN sets another; or give "
        f"{instead}"
    )


def _has_weights(folder: Path) -> bool:
    """True if all files of weights are there. Raises ValueError for an index that is none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        indexed = read_object(index).get("weight_map")
        if not isinstance(indexed, dict):
            raise ValueError(f"{index} is not an index of tensors: it has no weight_map")
        # a download that was cut short has the index and some of its files
        shards = set(indexed.values())
        return all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards)
    is_there = (folder / "config.json").is_file()
    return is_there and any(file.is_file() for file in folder.glob("*.safetensors"))
