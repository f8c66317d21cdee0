"""What somebody else wrote, read as data: files of model folders, of runs and of adapters.

They come from anywhere. Read is only what is a file (a pipe would block), up to a size and a depth,
and as UTF-8. Whatever is wrong with it is one ValueError that begins with the file.
docs/references/trust.md says what this is for.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tunix_lite.plain_text import escaped, shown

# of a file: the index of a model of a trillion parameters has 9 MB
MOST_BYTES = 16 * 2**20
# bytes of a line of metrics.jsonl: a step has a few thousand
MOST_LINE = 2**20
# lists and objects in one another
MOST_DEPTH = 64

# in settings of the user's own it names what to call
TARGET = "_target_"


def read_object(file: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, beginning with the file."""
    return parse_object(read_text(file, most), str(file))


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in a text. Raises ValueError, beginning with `name`, which says where the
    text stands."""
    try:
        said = json.loads(text)
    except RecursionError:
        raise ValueError(
            f"{name} is nested too deep: {MOST_DEPTH} lists and objects in one another are read"
        ) from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON ({error})") from error
    if not isinstance(said, dict):
        raise ValueError(f"{name} does not hold an object")
    if text.count("[") + text.count("{") > MOST_DEPTH and _is_deeper(said, MOST_DEPTH):
        raise ValueError(
            f"{name} is nested too deep: {MOST_DEPTH} lists and objects in one another are read"
        )
    return said


def read_text(file: Path, most: int = MOST_BYTES) -> str:
    """The text in a file. Raises ValueError, beginning with the file."""
    with _opened(file) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(
            f"{file} has more than {most:,} bytes, which is the most that is read of such a file"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error})") from error


def read_lines(file: Path, most: int = MOST_LINE) -> Iterator[tuple[bytes, bool]]:
    r"""(line, whether that is all of it) for each line of a file, without the newline that ends it.

    Of a line longer than `most` bytes only the first `most` are given. Nothing but \n ends a line.
    Raises ValueError, beginning with the file.
    """
    with _opened(file) as stream:
        while part := stream.readline(most + 1):
            is_whole = len(part) <= most or part.endswith(b"\n")
            yield (part.removesuffix(b"\n") if is_whole else part[:most]), is_whole
            while not is_whole and part and not part.endswith(b"\n"):
                part = stream.readline(most)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The bytes of an ordinary file. Raises ValueError, beginning with the file."""
    try:
        # a pipe with nobody at its other end does not block so
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({_reason(error)})") from error
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ValueError(f"{file} is not a file")
        with os.fdopen(opened, "rb", closefd=False) as stream:
            yield stream
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({_reason(error)})") from error
    finally:
        os.close(opened)


def check_only_files(folder: Path) -> None:
    """Raises ValueError, with the place, if anything below a folder is neither a file nor a folder.

    Whoever reads a pipe or a device may wait for ever. Links to folders are refused, too, as they
    may lead anywhere.
    """
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place, name)
            try:
                kind = path.stat().st_mode
            except OSError:
                # gone since, or a link to nowhere: whoever reads it says so
                continue
            if not stat.S_ISREG(kind) and (path.is_symlink() or not stat.S_ISDIR(kind)):
                raise ValueError(f"{escaped(str(path.relative_to(folder)))} is not a file")


def as_path(name: str | Path) -> Path:
    """The path that a setting says. Raises ValueError for one that cannot be: no such user, or too
    long."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{shown(str(name))} is no path ({_reason(error)})") from error
    return path


def check_settings(values: Any, file: Path, where: str = "") -> None:
    """Raises ValueError, with the file and the key, if `_target_` stands anywhere in settings that
    a folder brought.

    It names what to import and to call, and a folder names nothing of that kind. A text that acts
    on a terminal is refused, too: settings stand in messages.
    """
    left = [(where, values)]
    while left:
        place, value = left.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                if key == TARGET:
                    raise ValueError(
                        f"{file}: {f'{place}.' if place else ''}{TARGET}: a folder is data, and "
                        "names nothing to call; "
                        f"remove this key. {TARGET} is for the command line and for conf/"
                    )
                left.append((f"{place}.{escaped(str(key))}" if place else escaped(str(key)), item))
        elif isinstance(value, list):
            left += [(f"{place}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{file}: {place}={shown(value)}; a text of one line is expected")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _is_deeper(value: Any, most: int) -> bool:
    """Whether containers stand deeper in one another than `most`, without going down into them by
    recursion."""
    level = [value]
    for _ in range(most):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True
