"""A call of a reward function, and the process in which such calls are made: a failure in there is an answer, too."""

import contextlib
import ctypes
import json
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

SHOWN = 200  # characters of a text that a message shows
PR_SET_PDEATHSIG = 1  # of prctl(2)


class NotANumber(Exception):
    """What a reward function returned, in words."""


def number(fn: Callable, completion: str, example: dict) -> float:
    """What a reward function says, as a float. NotANumber if it is none or not finite; '1' is a text, not a number."""
    value = fn(completion, example)
    if not hasattr(value, "__float__"):
        raise NotANumber(f"is {shortened(value)}, not a number,")
    try:
        as_float = float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise NotANumber(f"is {shortened(value)}, not a number,") from error
    if not math.isfinite(as_float):
        raise NotANumber(f"is {as_float}")
    return as_float


def text(fn: Callable, completion: str, example: dict) -> str | None:
    """What `extract` says of a completion."""
    said = fn(completion)
    return None if said is None else str(said)


def outcome(fn: Callable, completion: str, example: dict) -> tuple[str, Any]:
    """("", what fn says), or the kind of failure and in words how it failed."""
    try:
        return "", fn(completion, example)
    except NotANumber as error:
        return "not_number", str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit as well: a reward does not decide that a run ends
        return "error", f"failed with {_last_line(error)}"


def work(calls_fd: int, answers_fd: int, parent: int) -> None:
    """Answers calls until nobody can make any: at the end of the pipe, or when the process that started it is gone."""
    with contextlib.suppress(BaseException):
        _end_with(parent)
        for stop in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which may want to finish its step
            signal.signal(stop, _stay)
        calls, answers = Connection(calls_fd, writable=False), os.fdopen(answers_fd, "wb")
        functions = _read(calls, answers)
        _answer(answers, "ready", None)
        while True:
            for index, completion, example in _read(calls, answers):
                _answer(answers, *outcome(functions[index], completion, example))
            sys.stdout.flush()
    os._exit(1)  # whatever threads a reward may have left


def shortened(value: Any) -> str:
    """In one line, and not longer than SHOWN."""
    said = repr(value).replace("\n", " ")
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}…"


def _read(calls: Connection, answers: BinaryIO) -> Any:
    """The next message. What cannot be read, because something cannot be imported here, is said to the other side."""
    message = calls.recv_bytes()
    try:
        return pickle.loads(message)
    except BaseException as error:
        _answer(answers, "refused", _last_line(error))
        raise


def _answer(answers: BinaryIO, kind: str, value: Any) -> None:
    answers.write(json.dumps([kind, value]).encode() + b"\n")
    answers.flush()  # each at once: the first that is missing is the call that failed


def _last_line(error: BaseException) -> str:
    """As a traceback ends, in one line, and where in the code that was."""
    said = " ".join("".join(traceback.format_exception_only(error)).split())
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or place.tb_frame.f_code.co_filename == __file__:
        return said
    return f"{said} ({Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno})"


def _end_with(parent: int) -> None:
    """Not to live on in a loop, where the end of the pipe is not seen, when the run was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):  # where memory runs out, this process is the one to go
            Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    """Where the system does not do it, and if the parent was gone before we asked."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _stay(*_) -> None:
    """A handler and not SIG_IGN, which programs that a reward starts would inherit."""
