"""Files are on a disk: what is named by an address such as gs://bucket/run is refused before
anything is made."""

import re

# with one slash it is what pathlib makes of one with two
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def check_on_disk(name: str, place) -> None:
    """Raises ValueError if the setting `name` says an address where it must say a file or a
    folder."""
    if isinstance(place, str) and ADDRESS.match(place.strip("'\"")):
        raise ValueError(
            f"{name}={place}: addresses are not supported yet, only folders and files of a disk; "
            "a bucket can be mounted as one (gcsfuse, s3fs)"
        )
