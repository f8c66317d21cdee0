"""Reads files that somebody else may have written, as data: only ordinary files, as UTF-8, up to a
size and a depth. A ValueError begins with the file. docs/references/trust.md has the reasons."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from tunix_lite.basics.addresses import is_address
from tunix_lite.basics.buckets import brought
from tunix_lite.basics.plain_text import escaped, shown

# Most bytes of a file. The index of a model of a trillion parameters has 9 MB.
MOST_BYTES = 16 * 2**20
# Most bytes of a YAML file, which takes far longer to read. The settings of a run have 10 KB.
MOST_YAML = 2**18
# Most bytes of a line of metrics.jsonl. A step has a few thousand.
MOST_LINE = 2**20
# Most bytes of a line of samples/. A token has 30, with its id, its text and its log-probability.
MOST_SAMPLE_LINE = 2**23
# Most bytes that are read in search of the end of a longer line.
MOST_SKIPPED = 2**26
# Most lists and objects inside one another.
MOST_DEPTH = 64

# libyaml reads ten times as fast, where PyYAML has it.
_SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The key with which a user's own settings name what to import and call.
TARGET = "_target_"


def read_object(file: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, beginning with the file."""
    return parse_object(read_text(file, most), str(file))


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in a text. name: where the text is from, for the message of a ValueError."""
    try:
        content = parse_json(text, MOST_DEPTH)
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} does not hold an object")
    return content


def parse_json(text: str, most: int) -> Any:
    """The value in JSON. ValueError ends a sentence, also for lists too deep in one another."""
    try:
        value = json.loads(text)
    except ValueError as error:
        # JSONDecodeError, or an integer of more than 4300 digits
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError:
        value = None
    # Counting brackets is cheap, and mostly shows that the text cannot be too deep.
    could_be = text.count("[") + text.count("{") > most
    if could_be and (value is None or is_deeper(value, most)):
        raise ValueError(f"nested too deep: more than {most} lists and objects in one another")
    return value


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping of plain values in a YAML file. Raises ValueError, also for anchors."""
    content = _parsed_yaml(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a mapping")
    return content


def read_yaml_texts(file: Path) -> list[str]:
    """The texts of a list in a YAML file, as Hydra keeps overrides. Raises ValueError."""
    content = _parsed_yaml(file)
    if not isinstance(content, list) or not all(isinstance(text, str) for text in content):
        raise ValueError(f"{file} does not hold a list of texts")
    return content


def _parsed_yaml(file: Path) -> Any:
    text = read_text(file, MOST_YAML)
    try:
        # Ends at the first alias or place that is nested too deep: the rest may take minutes.
        depth = 0
        for event in yaml.parse(text, _SAFE):
            if isinstance(event, yaml.events.AliasEvent):
                raise ValueError("aliases (*name) are not read")
            depth += isinstance(event, yaml.events.CollectionStartEvent)
            depth -= isinstance(event, yaml.events.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise ValueError(f"nested too deep: more than {MOST_DEPTH} in one another")
        return yaml.load(text, _SAFE)
    # ValueError: a number of too many digits, a date that is none
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{file} is not YAML ({str(error).splitlines()[0]})") from error


def read_text(file: Path, most: int = MOST_BYTES) -> str:
    """The text in a file of at most `most` bytes. Raises ValueError, beginning with the file."""
    with opened(file) as stream:
        # One byte more shows that there are more: the size that a file states may change.
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
    """Yields (line, is_whole), without newlines; of a long line `most` bytes. ValueError."""
    with opened(file) as stream:
        while part := stream.readline(most + 1):
            is_whole = len(part) <= most or part.endswith(b"\n")
            yield (part.removesuffix(b"\n") if is_whole else part[:most]), is_whole
            skipped = 0
            while not is_whole and part and not part.endswith(b"\n"):
                part = stream.readline(most)
                skipped += len(part)
                # A file of holes has a line without an end, and takes no room on a disk.
                if skipped > MOST_SKIPPED:
                    raise ValueError(f"{file} has a line of more than {MOST_SKIPPED:,} bytes")


@contextlib.contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Opens an ordinary file for reading. Raises ValueError, beginning with the file."""
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({_reason(error)})") from error
    try:
        # Of what is open: by its name, it could be another file by now.
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ValueError(f"{file} is not a file")
        # `finally` closes it, also where this line fails.
        with os.fdopen(opened, "rb", closefd=False) as stream:
            yield stream
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({_reason(error)})") from error
    finally:
        os.close(opened)


def check_only_files(folder: Path) -> None:
    """Raises ValueError if anything below a folder is a pipe, a device or a link to a folder."""
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            # Gone since, or a link to nowhere: reading it will raise an error of its own.
            try:
                kind = path.stat().st_mode
            except OSError:
                continue
            if not stat.S_ISREG(kind) and (path.is_symlink() or not stat.S_ISDIR(kind)):
                raise ValueError(f"{escaped(str(path.relative_to(folder)))} is not a file")


def as_path(name: str | Path) -> Path:
    """The path that a setting names, with ~ filled in; of an address its place on this machine,
    where everything is brought that the bucket has. Raises ValueError for one that cannot exist."""
    if is_address(str(name)):
        return brought(str(name))
    try:
        path = Path(name).expanduser()
        # This raises for a name that no file system can hold.
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{shown(str(name))} is no path ({_reason(error)})") from error
    return path


def check_settings(values: object, file: Path, where: str) -> None:
    """Raises ValueError if settings from a folder hold a `_target_`, or control characters. where:
    their dotted name."""
    # Walk down without recursion: a file may be nested deeply.
    left = [(where, values)]
    while left:
        place, value = left.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                if key == TARGET:
                    raise ValueError(
                        f"{file}: {place}.{TARGET}: a folder is data, and names nothing to call; "
                        f"remove this key. {TARGET} is for the command line and for conf/"
                    )
                left.append((f"{place}.{escaped(str(key))}", item))
        elif isinstance(value, list):
            left += [(f"{place}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{file}: {place}={shown(value)}; a text of one line is expected")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def is_deeper(value: object, most: int) -> bool:
    """Returns whether more than `most` lists and objects are in one another."""
    # Level by level: recursion would end with an error of its own where the input is deep.
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inside = []
        for outer in level:
            items = outer.values() if isinstance(outer, dict) else outer
            inside += [item for item in items if isinstance(item, dict | list)]
        level = inside
        if not level:
            return False
    return True
