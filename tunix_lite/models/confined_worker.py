"""The process that runs code from folders that we do not trust: chat templates, and regular
expressions of settings.

It has a limit on memory, one on the processor's time of each request, and no environment to read
secrets from. It is killed when it exceeds a limit. `confined` starts it and sends requests. It
answers with text only.
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

# The head of an answer: whether it succeeded, and how many bytes follow.
HEAD = struct.Struct("<?Q")
# The head of a request: how many bytes follow.
LENGTH = struct.Struct("<Q")

_compiled = cache(compile_template)


def serve(memory: int, seconds: float) -> None:
    """Answers requests until there are no more. memory: bytes at most; seconds: of the processor,
    for a request."""
    # Answers go to what was standard output; anything that prints goes nowhere.
    answers = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    # Ctrl-C is for the process that started this one, which then closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        # macOS has no limit on addresses.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))

    while head := _read(LENGTH.size):
        # Unpickling is safe: the request is from the process that started this one.
        kind, arguments = pickle.loads(_read(LENGTH.unpack(head)[0]))
        # SIGPROF ends the process, whatever Python is doing.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        succeeded, text = _answer(HANDLERS[kind], arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, HEAD.pack(succeeded, len(text)))
        _write(answers, text)


def _answer(handler: Callable[..., str], arguments: tuple) -> tuple[bool, bytes]:
    """Whether the handler succeeded, and its result or its error."""
    try:
        return True, handler(*arguments).encode()
    except TemplateFailed as error:
        return False, str(error).encode(errors="backslashreplace")
    except Exception as error:
        return False, (str(error) or type(error).__name__).encode(errors="backslashreplace")


def _compile(text: str) -> str:
    _compiled(text)
    return ""


def _render(
    text: str,
    values: dict,
    now: datetime,
) -> str:
    return render_template(_compiled(text), values, now)


def _match(pattern: str, texts: list[str]) -> str:
    """Raises if the pattern is none. If it takes too long, the limits end the process."""
    for text in texts:
        re.fullmatch(pattern, text)
    return ""


HANDLERS = {"compile": _compile, "render": _render, "match": _match}


def _read(count: int) -> bytes:
    """So many bytes of a request; b"" if there are no more requests."""
    return sys.stdin.buffer.read(count)


def _write(to: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(to, left) :]
