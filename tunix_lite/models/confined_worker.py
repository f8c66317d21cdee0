"""The process in which programs of strangers run: chat templates, and patterns of a folder's
settings.

It has a limit on memory, one on the processor's time of each request, no environment to read
secrets from, and it is killed when it overruns. `confined` starts it and asks. It answers with text
only.
"""

import contextlib
import os
import pickle
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from functools import cache

from tunix_lite.models.template_environment import TemplateFailed, compile_template, render_template

# of an answer: whether it succeeded, and how many bytes follow
HEAD = struct.Struct("<?Q")
# of a request
LENGTH = struct.Struct("<Q")

_compiled = cache(compile_template)


def serve(memory: int, seconds: float) -> None:
    """Answers requests until there are no more. `memory`: bytes at most; `seconds`: of the
    processor for a request."""
    answers = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    # Ctrl-C is for who started us, and closes our input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        # macOS has no limit on addresses
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    while request := _exactly(LENGTH.size):
        # from who started us
        kind, arguments = pickle.loads(_exactly(LENGTH.unpack(request)[0]))
        # SIGPROF ends us, whatever Python is doing
        signal.setitimer(signal.ITIMER_PROF, seconds)
        succeeded, said = _answer(ASKED[kind], arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, HEAD.pack(succeeded, len(said)))
        _write(answers, said)


def _answer(act: Callable[..., str], arguments: tuple) -> tuple[bool, bytes]:
    try:
        return True, act(*arguments).encode()
    except TemplateFailed as error:
        return False, str(error).encode(errors="backslashreplace")
    except Exception as error:
        return False, (str(error) or type(error).__name__).encode(errors="backslashreplace")


def _compile(text: str) -> str:
    _compiled(text)
    return ""


def _render(text: str, values: dict, now: datetime) -> str:
    return render_template(_compiled(text), values, now)


def _match(pattern: str, texts: list[str]) -> str:
    """Raises if the pattern is none; that it takes too long is seen from outside."""
    for text in texts:
        re.fullmatch(pattern, text)
    return ""


ASKED = {"compile": _compile, "render": _render, "match": _match}


def _exactly(count: int) -> bytes:
    """This many bytes of a request; b"" if there are no more requests."""
    return sys.stdin.buffer.read(count)


def _write(to: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(to, left) :]
