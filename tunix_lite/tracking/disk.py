"""Errors of the disk that a run writes to, as messages that say what to do."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tunix_lite.basics.addresses import shown_place


class DiskError(OSError):
    """A run could not write. The message says where, why, after which step, and how to resume."""


# Errors that are always of the disk, in whatever file.
ANYWHERE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
}
_GONE = "the folder is gone or cannot be reached"
# Errors that are of the disk only if the file is in the folder of the run.
_IN_THE_FOLDER = {
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ENOTCONN: _GONE,
    errno.ESTALE: _GONE,
    errno.EACCES: "there is no permission to write",
    errno.EPERM: "there is no permission to write",
    errno.EFBIG: "a file is larger than it may be",
    errno.EIO: "the disk does not work",
    errno.EREMOTEIO: "the bucket cannot be written",
}


@contextlib.contextmanager
def disk_errors_explained(
    folder: Path, when: Callable[[], str], whole: Callable[[], list[int]]
) -> Iterator[None]:
    """Raises errors of the run's disk as DiskError; other errors pass through. when: how far the
    run is, "after step 5". whole: the steps of its whole checkpoints; it may raise OSError."""
    try:
        yield
    except Exception as error:
        what = trouble(error, folder)
        if what is None:
            raise

        # The same command will find what is in the folder now.
        again = f"the same command with hydra.run.dir={shown_place(folder)} goes on from"
        hint = "no whole checkpoint can be seen: when the disk can be written, "
        hint += f"{again} what is there, or anew"
        steps = []
        with contextlib.suppress(OSError):
            steps = whole()
        if steps and not (folder / "fingerprint.json").is_file():
            unknown = "fingerprint.json, which says what made it, is gone"
            force = f"with resume.force=true {again} it"
            hint = f"checkpoint {steps[-1]} is whole, but {unknown}: {force}"
        elif steps:
            hint = f"checkpoint {steps[-1]} is whole: when the disk can be written, {again} it"
        raise DiskError(f"{what}. The run ended {when()}; {hint}") from error


def trouble(error: BaseException, folder: Path) -> str | None:
    """The trouble with the disk behind an error, `the disk is full: /runs/7/metrics.jsonl`. None if
    the error and its causes have nothing to do with the disk of the run in `folder`."""
    cause = error
    while cause is not None:
        if isinstance(cause, OSError) and not isinstance(cause, DiskError):
            # An error of a file that was open before has no file name.
            file = folder if cause.filename is None else Path(os.fsdecode(cause.filename))
            why = ANYWHERE.get(cause.errno)
            if file.absolute().is_relative_to(folder.absolute()):
                why = why or _IN_THE_FOLDER.get(cause.errno)
            if why:
                if cause.errno == errno.EREMOTEIO:
                    return f"{why}: {cause.strerror}"
                return f"{why}: {file}"
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def reason(error: OSError) -> str:
    """Why a file could not be written, in few words."""
    words = ANYWHERE | _IN_THE_FOLDER
    return words.get(error.errno) or error.strerror or str(error)
