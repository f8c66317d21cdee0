"""Runs chat templates, code from a folder that we do not trust, in another process with limits on
memory and time and no secrets in its environment. It answers with text, and is killed beyond a
limit."""

import atexit
import os
import pickle
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import jinja2
import markupsafe

from tunix_lite.workers.process import START_SECONDS, WorkerProcess

# Bytes of addresses. An interpreter with jinja2 takes some 50 MB.
_MEMORY = 512 * 2**20
# Of the processor, for one call; and by the clock, for a process that was stopped.
_SECONDS = 1.0
_WAITED = 30.0
# Attempts. A signal that was meant for the run may end the process.
_STARTS = 3
# Bytes of one answer.
_LONGEST_ANSWER = 2**28
# Variables that Python may need to start. None of them holds a secret.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")
# Neither PYTHONPATH nor start-up code of site-packages, and no compiled files.
_FLAGS = ("-I", "-S", "-B")
# How a process ended that exceeded a limit, and what is said of it.
_OVERRUNS = {
    "ended its process with SIGPROF": f"takes more than {_SECONDS:g} second of the processor",
    "closed the pipes of its process": "closes its pipes",
    f"wrote more than {_LONGEST_ANSWER:,} bytes to the pipe of its process": "answers without end",
}


class Refused(ValueError):
    """The call failed, or exceeded a limit. The message is the end of a sentence: what it did."""


def ask(function: Callable[..., str], *arguments: object) -> str:
    """The answer of a function, called in the other process with plain values. Raises Refused."""
    global _running
    calls = pickle.dumps([(0, 0, (function, *arguments))])
    how = ""
    with _LOCK:
        for _ in range(_STARTS):
            if _running is None:
                # An editable install is found by a hook, not by sys.path: packages are named.
                files = (jinja2.__file__, markupsafe.__file__)
                _running = WorkerProcess(
                    {name: os.environ[name] for name in _KEPT if name in os.environ},
                    limits=(_MEMORY, _SECONDS),
                    output=subprocess.DEVNULL,
                    flags=_FLAGS,
                    import_path=[
                        str(Path(__file__).parents[2]),
                        *(str(Path(file).parents[1]) for file in files),
                    ],
                    longest=_LONGEST_ANSWER,
                )
                _running.send(pickle.dumps([_call]), START_SECONDS)
                _running.answer(START_SECONDS)
            _running.send(calls, _WAITED)
            kind, answer = _running.answer(_WAITED, 0)
            if not kind:
                succeeded, text = answer
                if succeeded:
                    return text
                raise Refused(text)
            # It may still be busy with this call, so the next one gets a new process.
            close()
            if kind == "timeout":
                raise Refused(f"takes more than {_WAITED:g} seconds")
            how = answer
            # It would exceed the limit again.
            if how in _OVERRUNS:
                raise Refused(_OVERRUNS[how])
    raise Refused(
        f"ends the process that runs it ({how.removeprefix('ended its process with ')})"
    )


def _call(function: Callable[..., str], *arguments: object) -> tuple[bool, str]:
    """Calls the function; returns whether it succeeded, and its result or its error."""
    try:
        return True, function(*arguments)
    except Exception as error:
        return False, str(error) or type(error).__name__


@atexit.register
def close() -> None:
    """Ends the process, if there is one."""
    global _running
    if _running is not None:
        _running.kill()
        _running.release()
        _running = None


_running: WorkerProcess | None = None
_LOCK = threading.Lock()
# A fork has the same pipes, and may not use them; a thread that is not there may hold the lock.
os.register_at_fork(
    after_in_child=lambda: globals().update(_LOCK=threading.Lock(), _running=None)
)
