"""The process in which calls are made for another one (workers/process.py): a failure in here is an
answer, too."""

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

# characters of a text that a message shows
_SHOWN = 200
# characters of a text that leave this process; for the rest, a text says how many there were
KEPT = 64 * 1024
# of prctl(2)
_PR_SET_PDEATHSIG = 1
# the largest size of a reward: its square is a number of float32, in which the loss is computed
MOST_REWARD = 1e18


class NotANumber(Exception):
    """A function returned something else than it should: the kind of the outcome, and its words."""

    kind = "not_number"


def outcome(fn: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Returns ("", the result of fn), or the kind of failure and a description of it. A child that
    fn forked and that comes back here ends: it must not go on as a second worker."""
    mine = os.getpid()
    try:
        result = "", fn(*arguments)
    except NotANumber as error:
        result = error.kind, str(error)
    except KeyboardInterrupt:
        # In the process that trains (workers=0) it is the user's Ctrl-C.
        if os.getpid() == mine:
            raise
    except BaseException as error:
        # SystemExit as well: a reward does not decide that a run ends
        result = "error", f"failed with {_last_line(error)}"
    if os.getpid() != mine:
        os._exit(1)
    return result


def work(
    calls_fd: int, answers_fd: int, parent: int, limits: tuple[int, float] | None = None
) -> None:
    """Answers calls until the end of the pipe, or until the process that started it is gone.
    limits: bytes of memory, and seconds of the processor for a call."""
    with contextlib.suppress(BaseException):
        if limits is None:
            # It ends with its parent: in a loop it would not see the end of the pipe.
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                # where memory runs out, this process is the one to go
                with contextlib.suppress(OSError):
                    Path("/proc/self/oom_score_adj").write_text("1000")
            threading.Thread(target=_watch, args=(parent,), daemon=True).start()
        else:
            # no more memory than this, no file that is written, and no dump of its memory
            for limit, most in (
                (resource.RLIMIT_AS, limits[0]),
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_FSIZE, 0),
            ):
                # macOS has no limit on addresses
                with contextlib.suppress(ValueError, OSError):
                    resource.setrlimit(limit, (most, most))
        # These signals are meant for the run, which may want to finish its step. A handler and not
        # SIG_IGN, which programs that a reward starts would inherit.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, lambda *_: None)

        # Programs and children that a reward starts have nothing to do with the pipes. The pipes
        # of a child are not closed: what it opens next would take their numbers.
        pipes = (calls_fd, answers_fd)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.register_at_fork(after_in_child=lambda: [os.dup2(nowhere, p, False) for p in pipes])
        for pipe in pipes:
            os.set_inheritable(pipe, False)

        calls = Connection(calls_fd, writable=False)
        answers = os.fdopen(answers_fd, "wb")
        functions = _read(calls, answers)
        _answer(answers, None, "ready", None)
        while True:
            for number, index, arguments in _read(calls, answers):
                began = time.perf_counter()
                # SIGPROF ends the process, whatever Python is doing
                if limits is not None:
                    signal.setitimer(signal.ITIMER_PROF, limits[1])
                result = outcome(functions[index], *arguments)
                if limits is not None:
                    signal.setitimer(signal.ITIMER_PROF, 0)
                _answer(answers, number, *result, time.perf_counter() - began)
            sys.stdout.flush()
    # whatever threads a reward may have left
    os._exit(1)


def short_repr(value: object) -> str:
    """Shows a value in one line, and not longer than _SHOWN."""
    try:
        # Cut first: the repr of a huge text would take its memory once more.
        text = repr(value[: _SHOWN + 1] if type(value) in (str, bytes) else value).replace(
            "\n", " "
        )
    except Exception as error:
        # of integers beyond 4300 digits, and of objects that cannot say what they are
        text = f"<{type(value).__name__}, of which Python cannot say more: {error}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def bounded(text: str) -> str:
    """The first KEPT characters, and how many more there were."""
    more = len(text) - KEPT
    return text if more <= 0 else f"{text[:KEPT]}... and {more:,} more characters"


def _read(calls: Connection, answers: BinaryIO) -> Any:
    """The next message. The other side is told what cannot be imported here."""
    message = calls.recv_bytes()
    try:
        return pickle.loads(message)
    except BaseException as error:
        # To read it may import a module of the user, which may raise anything.
        _answer(answers, None, "refused", _last_line(error))
        raise


def _answer(
    answers: BinaryIO, number: int | None, kind: str, value: object, seconds: float = 0.0
) -> None:
    """Sends an answer with the number of its call, so that none is taken for that of another."""
    answers.write(json.dumps([number, kind, value, seconds]).encode() + b"\n")
    # each at once: the first that is missing is the call that failed
    answers.flush()


def _last_line(error: BaseException) -> str:
    """Shows an error in one line, as a traceback ends, and where in the code that was."""
    text = bounded("".join(traceback.format_exception_only(error)).rstrip("\n"))
    text = " ".join(text.split())
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    # What is raised in here has no place in the code of the user.
    if place is None or place.tb_frame.f_code.co_filename == __file__:
        return text
    return f"{text} ({Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno})"


def _watch(parent: int) -> None:
    """Watches the parent where the system does not, and if it was gone before we asked."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
