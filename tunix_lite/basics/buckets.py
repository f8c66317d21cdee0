"""Copies of what lies in a bucket: `bring` brings it to its place on this machine, `send` takes
new files of that place to the bucket. gcsfs and s3fs do the transfers."""

import contextlib
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

from tunix_lite.basics.addresses import STORES, address_of, place_here
from tunix_lite.basics.locks import is_held
from tunix_lite.basics.plain_text import shown

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


@functools.cache
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
def explained(place: Path) -> Iterator[None]:
    """Inside, errors of a store become ValueError, with the address."""
    try:
        yield
    except ValueError:
        raise
    # What the stores raise is not known here.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0][:300]}"
        raise ValueError(f"{address_of(place)} cannot be reached ({why})") from error


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
    files beside their arrays. Raises ValueError if nothing has that name, or the store cannot be
    reached.
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
        there = {
            name.removeprefix(root).lstrip("/"): info
            for name, info in fs.find(root, detail=True).items()
        }
        # The bucket may be somebody else's.
        if outside := [name for name in there if ".." in name.split("/")]:
            raise ValueError(
                f"{address} holds {shown(outside[0])}, which is no name of a file"
            )
        steps = {match[0] for match in map(STEP.match, there) if match}
        whole = {step for step in steps if step + WHOLE in there}
        names = [n for n in there if not STEP.match(n) and not n.startswith(f"{LEASE}/")]
        if not (names or whole or is_mine):
            raise ValueError(f"{address}: the bucket has nothing of that name")

        # What is gone in the bucket is gone here, too.
        file.seek(0)
        known = {}
        # A kill may have cut it off.
        with contextlib.suppress(ValueError):
            known = json.loads(file.read())
        gone = [name for name in known if name not in names]
        if is_mine or RUN in names:
            local = [path.relative_to(place).as_posix() for path in place.rglob("*")]
            gone = [n for n in local if n not in names and not _OWN.fullmatch(n)]
            for folder in [*place.glob("checkpoints/*"), *place.glob("reference/*")]:
                if f"{folder.relative_to(place)}/" not in whole:
                    shutil.rmtree(folder)
        for path in (place / name for name in gone if not STEP.match(name)):
            if path.is_file():
                path.unlink()

        # Files are compared by what the store and this disk say of them; checkpoints below.
        def now(name: str) -> list:
            info = there[name]
            tag = info.get("ETag") or info.get("generation") or info.get("mtime")
            stat = (place / name).stat() if (place / name).is_file() else None
            return [str(tag), info["size"], stat and stat.st_size, stat and stat.st_mtime_ns]

        known = {name: known[name] for name in names if known.get(name) == now(name)}
        wanted = [
            n for n in names if n not in known and any(fnmatch.fnmatch(n, p) for p in only)
        ]
        if wanted:
            there_now = [f"{root}/{name}".rstrip("/") for name in wanted]
            fs.get(there_now, [str(place / name) for name in wanted])
        known |= {name: now(name) for name in wanted}

        # Of a checkpoint comes all or nothing, unless the same one is here. Its digests are of all
        # its bytes, and whoever reads it compares them with the files.
        for step in sorted(whole):
            inside = [name for name in there if name.startswith(step)]
            mark = f"{step}{_DIGESTS}"
            if not with_arrays:
                # Without digests no copy counts as whole.
                beside = [name for name in inside if name.count("/") == step.count("/")]
                inside = [name for name in beside if name != mark]
            is_here = mark in there and (place / mark).is_file()
            if is_here and (place / mark).read_bytes() == fs.cat_file(f"{root}/{mark}"):
                continue
            half = place / f"{step.rstrip('/')}.bucket-tmp"
            for path in (half, place / step):
                shutil.rmtree(path, ignore_errors=True)
            parts = [str(half / name.removeprefix(step)) for name in inside]
            fs.get([f"{root}/{name}" for name in inside], parts)
            half.rename(place / step)
        file.truncate(0)
        file.write(json.dumps(known))
    return place


def send(place: Path, since: float = 0.0) -> None:
    """Takes the files of a place that were written since this time to its bucket. Raises ValueError
    if the store cannot be reached."""
    with explained(place):
        fs, root = store_of(place)
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        files = [file for file in files if file.is_file() and file.stat().st_mtime >= since]
        names = [f"{root}/{file.relative_to(place).as_posix()}" for file in files]
        if files:
            fs.put([str(file) for file in files], [name.removesuffix("/.") for name in names])


# brings each address once in a process
brought = functools.cache(bring)
