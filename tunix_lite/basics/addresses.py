"""Addresses: gs://bucket/run and s3://bucket/run have a place on this machine, where the package
works with files; others are refused."""

import os
import re
from pathlib import Path, PurePosixPath

# One slash, because pathlib makes one of two.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
# The stores that can be read and written, and what each needs: (package, extra).
STORES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
# The variable that names the folder for the places of all addresses.
COPIES = "TUNIX_LITE_BUCKETS"


def check_on_disk(name: str, path: object) -> None:
    """Raises ValueError if the value of the setting `name` is an address. Values but text pass."""
    if isinstance(path, str) and is_address(path):
        raise ValueError(
            f"{name}={path}: no address can stand here, only a folder or a file of a disk"
        )


def is_address(path: str) -> bool:
    """Returns whether a text names a place on the network: gs://bucket/run."""
    return ADDRESS.match(path.strip("'\"")) is not None


def copies() -> Path:
    """The folder of all places: TUNIX_LITE_BUCKETS, or ~/.cache/tunix_lite/buckets."""
    return (
        Path(os.environ.get(COPIES) or "~/.cache/tunix_lite/buckets").expanduser().absolute()
    )


def place_here(address: str) -> Path:
    """The place of an address on this machine, such as ~/.cache/tunix_lite/buckets/gs/bucket/run.
    Raises ValueError for other addresses than those of STORES."""
    scheme, _, rest = address.partition(":")
    parts = PurePosixPath(rest.lstrip("/")).parts
    if scheme not in STORES:
        raise ValueError(
            f"{address}: of addresses, gs://BUCKET/NAME and s3://BUCKET/NAME can be used; other "
            "stores can be mounted as a folder"
        )
    if len(parts) < 2 or ".." in parts or not address.isprintable():
        raise ValueError(
            f"{address}: give the bucket and a name in it, {scheme}://BUCKET/NAME"
        )
    return copies().joinpath(scheme, *parts)


def address_of(path: Path) -> str | None:
    """The address whose place this path is; None for a path of a disk."""
    if not path.absolute().is_relative_to(copies()):
        return None
    scheme, *parts = path.absolute().relative_to(copies()).parts or ("",)
    if scheme in STORES and len(parts) > 1:
        return f"{scheme}://{'/'.join(parts)}"
    return None


def shown_place(path: Path) -> str:
    """The address whose place this path is, or the path itself: what a person types for it."""
    return address_of(path) or str(path)
