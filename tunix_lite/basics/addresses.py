"""Refuses addresses such as gs://bucket/run where a setting must name a file or a folder."""

import re

# One slash, because pathlib makes one of two.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

NO_ADDRESSES = (
    "addresses are not supported yet, only folders and files of a disk; a bucket can be mounted as "
    "one (gcsfuse, s3fs)"
)


def check_on_disk(name: str, path: object) -> None:
    """Raises ValueError if the value of the setting `name` is an address. Values but text pass."""
    if isinstance(path, str) and is_address(path):
        raise ValueError(f"{name}={path}: {NO_ADDRESSES}")


def is_address(path: str) -> bool:
    """Returns whether a text names a place on the network: gs://bucket/run."""
    return ADDRESS.match(path.strip("'\"")) is not None
