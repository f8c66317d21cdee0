"""Output that nobody reads to its end, `tunix-lite doctor RUN | head`, or that is closed, `>&-`."""

import contextlib
import os
import select
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def as_long_as_read() -> Iterator[None]:
    """Takes a closed standard output for success: `| head` has read all that it wants."""
    open_closed_streams()
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # A pipe of something else that breaks, such as one to a worker, is an error as before.
        watched = select.poll()
        # ValueError, OSError: standard output is no file, as in a notebook
        with contextlib.suppress(OSError, ValueError):
            watched.register(sys.stdout.fileno(), 0)
        gone = select.POLLERR | select.POLLHUP
        if not any(event & gone for _, event in watched.poll(0)):
            raise
        # What is left to be written must not fail at the exit, whose code stays.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, SystemExit):
            raise


def open_closed_streams() -> None:
    """Lets output that the shell has closed go nowhere: Python has no stream for it, and a print
    of another package fails."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
