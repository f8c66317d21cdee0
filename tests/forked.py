"""Commands in a child of a process that has imported the package: as in a process of its own, without the seconds of
importing. For claims about texts and exit codes of commands that end by themselves."""

import multiprocessing
import os
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# A server that has imported these forks the children. It has used no device yet.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tunix_lite.commands.train", "tunix_lite.commands.plan", "forked"])


@dataclass(frozen=True)
class Ended:
    """How a command ended: code is None if it was stopped at its limit. seconds: of the processor."""

    code: int | None
    out: str
    err: str
    seconds: float


def called(words: list[str], folder: Path, limit: float = 120, **variables: str) -> Ended:
    """`tunix-lite WORDS`, or run_training.py if the first word is a setting, in this working folder.

    Of one thread alone: `start` asks for the exit codes of all children, and each can be read once.
    """
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / part for part in ("out", "err", "seconds")]
        child = CONTEXT.Process(target=_call, args=(words, folder, files, variables))
        child.start()
        child.join(limit)
        if child.is_alive():
            child.kill()
            child.join()
            return Ended(None, *(file.read_text(errors="replace") for file in files[:2]), limit)
        out, err, seconds = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        return Ended(child.exitcode, out, err, float(seconds or "nan"))


def _call(words: list[str], folder: Path, files: list[Path], variables: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ |= variables
    for number, file in ((1, files[0]), (2, files[1])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    sys.argv = ["tunix-lite", *words]
    # Python has imported what it needs: the folder of a script is no longer first, as with the console script.
    sys.path[:] = [path for path in sys.path if path]
    try:
        if words[0].startswith("-") or "=" in words[0]:
            from tunix_lite.commands import train

            train.main()
        else:
            from tunix_lite.__main__ import main

            main()
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        files[2].write_text(str(used.ru_utime + used.ru_stime))
