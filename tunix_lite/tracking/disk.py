"""A disk that is full, cannot be written or is gone: what people should read of it, whoever noticed
it."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path


class DiskError(OSError):
    """A run could not go on writing. The message says where, why, after which step, and what goes
    on from there."""


ANYWHERE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
}
GONE = "the folder is gone or cannot be reached"
IN_THE_FOLDER = {
    errno.ENOENT: GONE,
    errno.ENOTDIR: GONE,
    errno.ENOTCONN: GONE,
    errno.ESTALE: GONE,
    errno.EACCES: "there is no permission to write",
    errno.EPERM: "there is no permission to write",
    errno.EFBIG: "a file is larger than it may be",
    errno.EIO: "the disk does not work",
}


@contextlib.contextmanager
def disk_errors_explained(folder: Path, when: Callable[[], str], whole: Callable[[], list[int]]):
    """Inside, an error of the disk that a run in `folder` writes to becomes a DiskError.

    `when`: "after step 5"; `whole`: the steps of the whole checkpoints, in order, as far as they
    can be seen.
    """
    try:
        yield
    except Exception as error:
        if (what := trouble(error, folder)) is None:
            raise
        raise DiskError(f"{what}. The run ended {when()}; {_from_where(folder, whole)}") from error


def _from_where(folder: Path, whole: Callable[[], list[int]]) -> str:
    """What the same command finds, by what is in the folder now."""
    again, steps = f"the same command with hydra.run.dir={folder} goes on from", []
    with contextlib.suppress(OSError):
        steps = whole()
    if steps and not (folder / "fingerprint.json").is_file():
        unknown = "fingerprint.json, which says what made it, is gone"
        return f"checkpoint {steps[-1]} is whole, but {unknown}: with resume.force=true {again} it"
    if steps:
        return f"checkpoint {steps[-1]} is whole: when the disk can be written, {again} it"
    return (
        f"no whole checkpoint can be seen: when the disk can be written, {again} what is there, or "
        "anew"
    )


def trouble(error: BaseException, folder: Path) -> str | None:
    """`the disk is full: /runs/7/metrics.jsonl`, if that is behind an error of a run in this
    folder; else None."""
    for e in _behind(error):
        if isinstance(e, OSError) and not isinstance(e, DiskError):
            # an open file does not say its name
            file = folder if e.filename is None else Path(os.fsdecode(e.filename))
            is_ours = file.absolute().is_relative_to(folder.absolute())
            if why := ANYWHERE.get(e.errno) or (IN_THE_FOLDER.get(e.errno) if is_ours else None):
                return f"{why}: {file}"
    return None


def reason(error: OSError) -> str:
    """In few words, why a file could not be written."""
    words = ANYWHERE | IN_THE_FOLDER
    return words.get(error.errno) or error.strerror or str(error)


def _behind(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
