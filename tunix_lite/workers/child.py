"""The process in which calls are made for another one (workers/process.py): a failure in here is an
answer, too."""

import contextlib
import ctypes
import json
import os
import pickle
import resource
import select
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
SHOWN = 200
# characters of a text that leave this process; for the rest, a text says how many there were
KEPT = 64 * 1024
# that a child has to exec or end before a call that forked counts as done
CAME_BACK_SECONDS = 0.1
# of prctl(2)
PR_SET_PDEATHSIG = 1


class NotANumber(Exception):
    """A function returned something else than it should. `kind` is the kind of the outcome, and the
    message says it in words."""

    kind = "not_number"


def outcome(fn: Callable, *arguments: Any) -> tuple[str, Any]:
    """Returns ("", the result of fn), or the kind of failure and a description of it.

    It returns in the process that called it and in no other: a child that fn forked and that comes
    back here ends.
    """
    mine = os.getpid()
    try:
        result = "", fn(*arguments)
    except NotANumber as error:
        result = error.kind, str(error)
    except KeyboardInterrupt:
        if os.getpid() == mine:
            raise
        result = "error", "was interrupted"
    except BaseException as error:
        # SystemExit as well: a reward does not decide that a run ends
        result = "error", f"failed with {_last_line(error)}"
    if os.getpid() != mine:
        _Forks.come_back(result)
    return result


def work(
    calls_fd: int, answers_fd: int, parent: int, limits: tuple[int, float] | None = None
) -> None:
    """Answers calls until nobody can make any: at the end of the pipe, or when the process that
    started it is gone.

    limits: bytes of memory, and seconds of the processor for a call; with them, the process reads
    the end of the pipe in time and needs no other watch.
    """
    with contextlib.suppress(BaseException):
        if limits is None:
            _end_with(parent)
        else:
            _confine(limits[0])
        # these signals are meant for the run, which may want to finish its step
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, _stay)

        # programs that a reward starts have nothing to do with the pipes
        for pipe in (calls_fd, answers_fd):
            os.set_inheritable(pipe, False)
        forks = _Forks(calls_fd, answers_fd)
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
                seconds = time.perf_counter() - began
                _answer(answers, number, *(forks.that_came_back() or result), seconds)
            sys.stdout.flush()
    # whatever threads a reward may have left
    os._exit(1)


def short_repr(value: Any) -> str:
    """Shows a value in one line, and not longer than SHOWN."""
    try:
        said = repr(value[: SHOWN + 1] if type(value) in (str, bytes) else value).replace("\n", " ")
    except Exception as error:
        # of integers beyond 4300 digits, and of objects that cannot say what they are
        said = f"<{type(value).__name__}, of which Python cannot say more: {error}>"
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}…"


def bounded(said: str) -> str:
    """The first KEPT characters, and how many more there were."""
    return (
        said if len(said) <= KEPT else f"{said[:KEPT]}... and {len(said) - KEPT:,} more characters"
    )


class _Forks:
    """The children that a call of a reward forks: none of them reaches the pipes of its worker.

    A child must exec, or end with os._exit. One that returns, raises or exits instead, as after an
    os.execvp of a program that is not there, would go on as a second worker and answer the calls of
    the first. It ends when it comes back from the reward, and the call has failed.
    """

    # pipe on which a forked child reports that it returned; closes when it ends or execs
    report_pipe: int | None = None

    def __init__(self, *pipes: int):
        self.pipes, self.nowhere, self.heard = pipes, os.open(os.devnull, os.O_RDWR), None
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        if self.heard is None:
            self.heard, _Forks.report_pipe = os.pipe()

    def _in_child(self) -> None:
        # not closed: what the child opens next would take their numbers
        for pipe in self.pipes:
            os.dup2(self.nowhere, pipe, inheritable=False)

    @staticmethod
    def come_back(result: tuple[str, Any]) -> None:
        with contextlib.suppress(BaseException):
            kind, how = result
            which = f", which {how}" if kind else ""
            said = f"failed: a process that it forked came back from it{which}"
            remedy = f"{said[:SHOWN]}; end it with os._exit"
            os.write(_Forks.report_pipe, remedy.encode(errors="backslashreplace"))
        os._exit(1)

    def that_came_back(self) -> tuple[str, str] | None:
        """The failure of the call that was made, if one of its children came back; of no other
        call."""
        if self.heard is None:
            return None
        heard, self.heard = self.heard, None
        os.close(_Forks.report_pipe)
        try:
            arriving = select.poll()
            arriving.register(heard, select.POLLIN)
            said = os.read(heard, 4096) if arriving.poll(1000 * CAME_BACK_SECONDS) else b""
            # b"": all have ended, or go on as something else
            return ("error", said.decode()) if said else None
        finally:
            os.close(heard)


def _read(calls: Connection, answers: BinaryIO) -> Any:
    """The next message. What cannot be read, because something cannot be imported here, is said to
    the other side."""
    message = calls.recv_bytes()
    try:
        return pickle.loads(message)
    except BaseException as error:
        _answer(answers, None, "refused", _last_line(error))
        raise


def _answer(
    answers: BinaryIO, number: int | None, kind: str, value: Any, seconds: float = 0.0
) -> None:
    """Sends an answer. number: of its call, so that no answer is ever taken for that of another.
    seconds: that the call took."""
    answers.write(json.dumps([number, kind, value, seconds]).encode() + b"\n")
    # each at once: the first that is missing is the call that failed
    answers.flush()


def _last_line(error: BaseException) -> str:
    """Shows an error in one line, as a traceback ends, and where in the code that was."""
    said = bounded("".join(traceback.format_exception_only(error)).rstrip("\n"))
    said = " ".join(said.split())
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or place.tb_frame.f_code.co_filename == __file__:
        return said
    return f"{said} ({Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno})"


def _end_with(parent: int) -> None:
    """Ends this process with its parent. It must not live on in a loop, where it does not see the
    end of the pipe, when the run was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # where memory runs out, this process is the one to go
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    """Watches the parent where the system does not, and if it was gone before we asked."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _confine(memory: int) -> None:
    """Confines the process: no more memory than this, no file that is written, and no dump of its
    memory."""
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        # macOS has no limit on addresses
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))


def _stay(*_) -> None:
    """A handler and not SIG_IGN, which programs that a reward starts would inherit."""
