"""Digests of the files in a folder, kept in digests.json, so that a reader notices every change."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from tunix_lite.basics.plain_text import escaped
from tunix_lite.basics.untrusted import read_object

NAME = "digests.json"
# The command sha256sum prints the same digests.
ALGORITHM = "sha256"
# Most threads that read files.
MOST_THREADS = 8
# Most bytes of digests.json, which has some 200 for each file.
MOST_BYTES = 2**28


def write_digests(folder: Path, but: Collection[str]) -> None:
    """Writes digests.json: size and digest of all files but these. Raises OSError."""
    paths = [
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    ]
    names = [name for name in sorted(paths) if name not in {NAME, *but}]
    num_threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 4))
    with ThreadPoolExecutor(num_threads) as threads:
        digests = list(threads.map(lambda name: _digest(folder / name), names))

    files = {
        n: {"bytes": size, ALGORITHM: digest} for n, (size, digest) in zip(names, digests)
    }
    # Under another name until it is whole, so that no reader finds half of it.
    fresh = folder / f"{NAME}.tmp"
    with fresh.open("w") as file:
        file.write(json.dumps({"files": files}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / NAME)


def read_digests(folder: Path) -> dict[str, tuple[int, str]] | None:
    """Reads digests.json: name -> (bytes, digest); None without it. ValueError: it is damaged."""
    # A link to nowhere is there, too, and is damage.
    if not os.path.lexists(folder / NAME):
        return None
    try:
        files = read_object(folder / NAME, MOST_BYTES)["files"]
        recorded = {name: (file["bytes"], file[ALGORITHM]) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is damaged") from error
    # Each name must be of a file inside the folder.
    paths = map(PurePosixPath, recorded)
    if any(path.is_absolute() or ".." in path.parts for path in paths):
        raise ValueError(f"{NAME} is damaged")
    return recorded


def changed_files(
    folder: Path, recorded: dict[str, tuple[int, str]], names: Iterable[str]
) -> list[str]:
    """Lists the files of these names that have changed, each with its damage."""

    def compare(name: str) -> str | None:
        size, digest = recorded[name]
        try:
            there = (folder / name).stat().st_size
            if there != size:
                return f"{escaped(name)} has {there:,} bytes, and had {size:,} when it was written"
            if _digest(folder / name)[1] != digest:
                return (
                    f"{escaped(name)} was changed after it was written, by the {ALGORITHM} "
                    f"in {NAME}"
                )
        except FileNotFoundError:
            return f"{escaped(name)} is gone"
        # ValueError: a name that no file can have.
        except (OSError, ValueError) as error:
            return f"{escaped(name)}: {getattr(error, 'strerror', None) or error}"

    with ThreadPoolExecutor(MOST_THREADS) as threads:
        return [problem for problem in threads.map(compare, names) if problem]


def _digest(file: Path) -> tuple[int, str]:
    """The number of bytes of a file, and their digest."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, ALGORITHM).hexdigest()
        return opened.tell(), digest
