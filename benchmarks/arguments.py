"""Numbers and files on the command line of a benchmark, refused before anything is measured."""

import argparse
from pathlib import Path


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def new_file(text: str) -> Path:
    """A file in a folder that is there."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {file.parent}")
    return file


def new_folder(text: str) -> Path:
    """A folder that is there or can be made."""
    folder = Path(text)
    first = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not first.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {first} is a file; name a folder")
    return folder
