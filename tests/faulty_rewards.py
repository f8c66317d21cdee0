"""Reward functions that fail where their completion says so, or return more than a number. Workers import this."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

from tunix_lite.rewards.scores import Score, no_answer

FORKS = ("fork return", "fork raise", "fork exit", "fork exec")  # whose child comes back

FAILS = {
    "raise": lambda: {}["missing"],
    "deep": lambda: (lambda f: f(f))(lambda f: f(f)),
    "memory": lambda: bytearray(1 << 60),
    "loop": lambda: spin(),
    "sleep": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "leave": lambda: os._exit(3),
    "no pipes": lambda: (os.closerange(3, 256), time.sleep(3600)),
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "large": lambda: -1e308,
    "several": lambda: numpy().array([1.0, 2.0]),
    "numpy": lambda: numpy().float32(0.5),
    "true": lambda: True,
    "print": lambda: print("x" * 1_000_000) or 1.0,
    "thread": lambda: threading.Thread(target=spin, daemon=True).start() or 1.0,
    "stubborn thread": lambda: threading.Thread(target=time.sleep, args=(3600,)).start() or 1.0,
    "process": lambda: os.getpid(),
    "fork return": lambda: forked(lambda: 4.0),
    "fork raise": lambda: forked(lambda: {}["missing"]),
    "fork exit": lambda: forked(lambda: sys.exit(3)),
    "fork exec": lambda: forked(lambda: os.execvp("no-such-program", ["no-such-program"])),
    "fork and run": lambda: forked(lambda: os.execvp("true", ["true"])),
    "fork and stay": lambda: forked(lambda: time.sleep(3600)),
    "surrogate": lambda: surrogate(),
    "digits": lambda: 10**5000,
    "unspeakable": lambda: Unspeakable(),
    "pipe": lambda: scribble(),
    "impostor": lambda: impostor(),
}
KINDS = {  # what becomes of them; of the others there is nothing to say
    "error": ("raise", "deep", "memory", "surrogate"),
    "timeout": ("loop", "sleep", "stop"),
    "crash": ("segfault", "leave", "no pipes", "pipe", "impostor"),
    "not_number": ("none", "nan", "large", "several", "digits", "unspeakable"),
}


def numpy():
    """Imported by those that need it: a worker that is replaced a lot should start fast."""
    import numpy

    return numpy


def spin():
    while True:
        pass


def forked(child) -> float:
    """A reward whose child does this. The parent goes on, as one does that waits for nobody, and returns 2."""
    if os.fork() == 0:
        return child()
    return 2.0


def surrogate():
    """As of a file whose name is no text."""
    raise ValueError("no file \udc80\x1b[2J\x07")


class Unspeakable:
    """Is no number, and cannot say what it is."""

    def __repr__(self):
        raise RuntimeError("no words")


def pipes() -> list[int]:
    """The numbers of the pipes that this process may write to, its own output aside."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.readlink(f"/proc/self/fd/{name}"), os.O_ACCMODE & fcntl.fcntl(int(name), fcntl.F_GETFL)
        except OSError:
            continue
        if int(name) > 2 and mode[0].startswith("pipe:") and mode[1] == os.O_WRONLY:
            found.append(int(name))
    return found


def scribble() -> float:
    for pipe in pipes():
        os.write(pipe, b"not an answer\n")
    return 1.0


def impostor() -> float:
    """Writes what looks like the answer to another call."""
    for pipe in pipes():
        os.write(pipe, b'[123456789, "", 7.0, 0.1]\n')
    return 1.0


def faulty(completion: str, example: dict) -> float:
    """What FAILS says of the completion; else its length."""
    return FAILS[completion]() if completion in FAILS else float(len(completion))


def now_and_then(completion: str, example: dict) -> float:
    """One in 16 completions raises, one is not a number, one ends the worker; else shorter is better."""
    dice = sum(completion.encode()) % 16
    return FAILS[("raise", "nan", "segfault")[dice]]() if dice < 3 else -float(len(completion))


def length(completion: str, example: dict) -> float:
    return float(len(completion))


def shown(completion: str) -> str:
    return FAILS[completion[1:]]() if completion.startswith("!") else completion.upper()


def undecodable(completion: str) -> str:
    return completion + "\ud800\x1b"


def once(completion: str, example: dict) -> float:
    """The length; at the completion of `example["at"]` characters, what FAILS says of `example["word"]` first."""
    if len(completion) == example["at"]:
        FAILS[example["word"]]()
    return float(len(completion))


def negative(completion: str, example: dict) -> float:
    return -float(len(completion))


def imported(name: str, completion: str, example: dict) -> bool:
    return name in sys.modules


def variable(name: str, completion: str, example: dict) -> str:
    return os.environ[name]


def begins(completion: str, example: dict) -> float:
    """When it was called, by the clock of all processes. It takes a while."""
    now = time.monotonic()
    time.sleep(example["seconds"])
    return now


def slowly(completion: str, example: dict) -> float:
    """Late where the example says so, so that later ones are done before."""
    time.sleep(example["seconds"])
    return float(len(completion))


nameless, bound_nameless = (lambda completion, example: 1.0), partial(lambda completion, example: 1.0)


def ranked(completions: list[str], example: dict) -> list[float]:
    """Of a group: 0 for the shortest, 1 for the longest, evenly between; or it fails as its example says."""
    if example.get("fails") == "loop":
        while True:
            time.sleep(1)
    order = sorted(completions, key=len)
    ranks = [order.index(completion) / max(len(order) - 1, 1) for completion in completions]
    return ranks[1:] if example.get("fails") == "count" else ranks


def leaves_a_child(completion: str, example: dict) -> float:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    return float(child.pid)


# ---- more than plain numbers


def of_text(completion: str, example: dict):
    """`none`, `no answer`, `stopped`, or a number."""
    if completion == "none":
        return None
    if completion == "no answer":
        return no_answer("it holds no number")
    if completion == "stopped":
        return Score(0.25, "stopped", "its code took more than `seconds`")
    return float(completion)


def of_group(completions: list[str], example: dict) -> list:
    return [of_text(completion, example) for completion in completions]


def one(completion: str, example: dict) -> float:
    return 1.0


def as_it_is(completion: str) -> str:
    return completion
