"""Copies of what lies in a bucket: `bring` brings it to its place on this machine, `send` takes
new files of that place to the bucket. gcsfs and s3fs do the transfers."""

import contextlib
import errno
import fcntl
import fnmatch
import functools
import importlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_lite.basics.addresses import COPIES, STORES, address_of, copies, place_here
from tunix_lite.basics.locks import is_held, lock_owner
from tunix_lite.basics.plain_text import reason_of, shown

if TYPE_CHECKING:
    import fsspec

# An object of this name in a checkpoint says that all others are there; orbax has the same on gs://
WHOLE = "commit_success.txt"
# The folder of the objects that say which run writes to a folder.
LEASE = ".lease"
STEP = re.compile(r"(?:checkpoints|reference)/\d+/")
# In a checkpoint, the digests of its other files: basics/digests.py.
_DIGESTS = "digests.json"
# The file that every folder of a run has.
RUN = "model.json"
# What a run's folder holds that is of this machine: bringing it anew leaves these as they are.
_OWN = re.compile(r"\.lock|\.hydra/.*|launch/.*")


def file_system(scheme: str) -> "fsspec.AbstractFileSystem":
    """The store of gs:// or s3://. Raises ValueError, with the extra to install."""
    package, extra = STORES[scheme]
    try:
        importlib.import_module(package)
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise ValueError(
            f"{scheme}:// needs {package}: pip install -e '.[{extra}]'"
        ) from error
    # Another machine may write at any time, so no listing is kept.
    return fsspec.filesystem(scheme, use_listings_cache=False)


def store_of(place: Path) -> tuple["fsspec.AbstractFileSystem", str]:
    """The store of an address's place, and the name there: bucket/run. Raises ValueError."""
    scheme, _, name = (address_of(place) or "").partition("://")
    return file_system(scheme), name


@contextlib.contextmanager
def explained(place: Path, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Inside, errors of a store become ValueError with the address, or OSError of the place."""
    try:
        yield
    # What the stores raise is not known here.
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError):
            why = f"{type(error).__name__}: {reason_of(error)}"
            text = f"{address_of(place)} cannot be reached ({why})"
        if kind is ValueError:
            raise ValueError(text) from error
        raise kind(errno.EREMOTEIO, text, str(place)) from error


def bring(
    address: str,
    only: Sequence[str] = ("*",),
    is_mine: bool = False,
    with_arrays: bool = True,
) -> Path:
    """Brings a file or a folder to its place, as far as it is not there already. Returns the place.

    only: patterns of the names to bring. is_mine: this process will write there; the folder may not
    be there yet, and what the bucket does not hold is removed from its place. Otherwise a place in
    which a run of this machine writes stays as it is. with_arrays: False: of checkpoints only the
    files beside their arrays. Raises ValueError if nothing has that name, it is too large, or the
    store cannot be reached.
    """
    place = place_here(address)
    record = place.parent / f".{place.name}.bucket"
    place.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a+") as file, explained(place):
        # Several processes may want the same.
        fcntl.flock(file, fcntl.LOCK_EX)
        if not is_mine and is_held(place):
            return place
        fs, root = store_of(place)
        objects = fs.find(root, detail=True).items()
        there = {name.removeprefix(root).lstrip("/"): info for name, info in objects}
        # The bucket may be somebody else's.
        if outside := [name for name in there if ".." in name.split("/")]:
            raise ValueError(
                f"{address} holds {shown(outside[0])}, which is no name of a file"
            )

        # The place is newer if its last owner had the lease last, and all that the bucket had.
        leases = [name for name in there if name.startswith(f"{LEASE}/")]
        is_newer = False
        if leases:
            lease = json.loads(fs.cat_file(f"{root}/{max(leases)}"))
            is_newer = lease.get("has_all") and lease.get("owner") == lock_owner(place)

        # Checkpoints come if they are whole.
        steps = {match[0] for match in map(STEP.match, there) if match}
        whole = {step for step in steps if step + WHOLE in there}

        def counts(name: str) -> bool:
            if (match := STEP.match(name)) is None:
                return not name.startswith(f"{LEASE}/")
            # Without digests no copy counts as whole.
            is_beside = name.count("/") == 2 and not name.endswith(f"/{_DIGESTS}")
            return match[0] in whole and (with_arrays or is_beside)

        there = {name: info for name, info in there.items() if counts(name)}
        if not there and not is_mine:
            raise ValueError(f"{address}: the bucket has nothing of that name")

        file.seek(0)
        known = {}
        # A kill may have cut it off.
        with contextlib.suppress(ValueError):
            known = json.loads(file.read())
        # What is gone in the bucket is gone here, too.
        local = known
        if is_mine or RUN in there:
            files = (path.relative_to(place).as_posix() for path in place.rglob("*"))
            local = [name for name in files if not _OWN.fullmatch(name)]
        for name in local:
            if is_newer or name in there:
                continue
            if (place / name).is_file():
                (place / name).unlink()
            elif STEP.fullmatch(f"{name}/") and f"{name}/" not in whole:
                shutil.rmtree(place / name, ignore_errors=True)
        stays = []
        for name in there:
            is_ours = is_newer and (place / name).is_file()
            if is_ours or known.get(name) == _state(place / name, there[name]):
                stays.append(name)
        matching = {name for pattern in only for name in fnmatch.filter(there, pattern)}
        wanted = sorted(matching.difference(stays))
        size = sum(there[name]["size"] for name in wanted)
        if size > (free := shutil.disk_usage(place.parent).free):
            needs = (
                f"{size / 1e9:,.1f} GB to bring, and {copies()} has {free / 1e9:,.1f} GB left"
            )
            raise ValueError(f"{address} has {needs}; {COPIES}=FOLDER names another disk")

        # Under other names first: a file is here as a whole, or not.
        half = place.parent / f".{place.name}.half"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        parts = [half / str(i) for i in range(len(wanted))]
        if wanted:
            fs.get([f"{root}/{n}".rstrip("/") for n in wanted], [*map(str, parts)])
        for name, part in zip(wanted, parts):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(place / name)
        half.rmdir()
        file.truncate(0)
        states = {name: _state(place / name, there[name]) for name in {*stays, *wanted}}
        file.write(json.dumps(states))
    return place


def _state(file: Path, info: dict) -> list:
    """What the store and this disk say of a file, by which two of them are compared."""
    tags = [str(info.get(key)) for key in ("ETag", "generation", "mtime", "size")]
    if not file.is_file():
        return [tags, None]
    stat = file.stat()
    return [tags, [stat.st_size, stat.st_mtime_ns]]


def send(place: Path, since: float = 0.0, half: Path | None = None) -> None:
    """Takes files of a place that were written since to its bucket. half: the folder that they are
    still in. Raises ValueError if the bucket is away."""
    with explained(place):
        fs, root = store_of(place)
        here = half or place
        sources = []
        targets = []
        for file in [here] if here.is_file() else sorted(here.rglob("*")):
            if file.is_file() and file.stat().st_mtime >= since:
                sources.append(str(file))
                name = f"{root}/{file.relative_to(here).as_posix()}"
                targets.append(name.removesuffix("/."))
        if sources:
            fs.put(sources, targets)


# brings each address once in a process
brought = functools.cache(bring)
