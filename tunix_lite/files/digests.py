"""Digests of the files in a folder, kept in the folder: whoever reads it later sees whether a bit
has changed."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from tunix_lite.files.untrusted import read_object
from tunix_lite.plain_text import escaped

NAME = "digests.json"
# `sha256sum` says the same
ALGORITHM = "sha256"
MOST_THREADS = 8
# of digests.json: some 200 for each file
MOST_BYTES = 2**28


def write_digests(folder: Path, but: Collection[str] = ()) -> None:
    """Writes digests.json: size and digest of every other file in the folder, but for these names.

    It is there as a whole or not at all. Takes a quarter of the cores at most, as a run goes on
    beside it. Raises OSError.
    """
    names = sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )
    names = [name for name in names if name not in {NAME, *but}]
    with ThreadPoolExecutor(min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 4))) as threads:
        digests = list(threads.map(lambda name: _digest(folder / name), names))
    files = {
        name: {"bytes": size, ALGORITHM: digest} for name, (size, digest) in zip(names, digests)
    }
    fresh = folder / f"{NAME}.tmp"
    with fresh.open("w") as file:
        file.write(json.dumps({"files": files}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / NAME)


def read_digests(folder: Path) -> dict[str, tuple[int, str]] | None:
    """(size, digest) by the name of the file; None where no digests are kept. Raises ValueError if
    they are damaged."""
    if not os.path.lexists(folder / NAME):
        return None
    try:
        files = read_object(folder / NAME, MOST_BYTES)["files"]
        kept = {name: (file["bytes"], file[ALGORITHM]) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is damaged") from error
    if not all(map(_is_below, kept)):
        raise ValueError(f"{NAME} is damaged")
    return kept


def _is_below(name: str) -> bool:
    """Whether a name leads to a place in the folder, and to no other."""
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts


def changed_files(
    folder: Path, kept: dict[str, tuple[int, str]], names: Iterable[str]
) -> list[str]:
    """What is no longer as it was written, of these files; each in words: `default/d/ab12 has other
    bytes than ...`."""

    def look(name: str) -> str | None:
        size, digest = kept[name]
        try:
            there = (folder / name).stat().st_size
            if there != size:
                return f"{escaped(name)} has {there:,} bytes, and had {size:,} when it was written"
            if _digest(folder / name)[1] != digest:
                return (
                    f"{escaped(name)} has other bytes than when it was written, by the {ALGORITHM} "
                    f"in {NAME}"
                )
        except FileNotFoundError:
            return f"{escaped(name)} is gone"
        except (OSError, ValueError) as error:
            # ValueError: a name that no file can have
            return f"{escaped(name)}: {getattr(error, 'strerror', None) or error}"

    with ThreadPoolExecutor(MOST_THREADS) as threads:
        return [found for found in threads.map(look, names) if found]


def _digest(file: Path) -> tuple[int, str]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, ALGORITHM).hexdigest()
        return opened.tell(), digest
