"""Watches the processes of a run on this machine: one ends badly or stalls, and the others are ended and it is named.

The first process has the screen; what the others say goes to files. The first signal is handed on, and they stop by
themselves, with a checkpoint; the second ends them.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.parallel.distributed import HEARTBEAT, LOST_A_PEER
from tunix_lite.tracking.claim import LOCK

POLL = 0.05  # seconds
LAST_LINES = 20
WRONG_SETTINGS = 2  # an exit code that another try would not change
STALLED = 124  # as timeout(1) says it
HANDED_ON = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Rules:
    """When a run is given up, and when it is tried again."""

    stall_timeout: float | None = None  # seconds without a heartbeat, after the first; None: for ever
    max_restarts: int = 0
    grace: float = 5.0  # seconds between asking a process to end and ending it


@dataclass(frozen=True)
class Failure:
    """What ended a run: in words, if that needs any, and as an exit code."""

    text: str
    code: int


def supervise(command: list[str], environments: Callable[[], list[dict]], logs: Path, rules: Rules) -> int:
    """Runs `command` once in each environment, again if that fails and the rules allow it. The exit code of it all."""
    made = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="tunix_lite_") as beats:
        for restarts in range(rules.max_restarts + 1):
            processes = [Process(command, e, i, logs, Path(beats)) for i, e in enumerate(environments())]
            try:
                failure = watch(processes, rules, signals)
            finally:
                end(processes, 0.0)
            if failure is not None and failure.text:
                say(failure.text)
            if failure is None or signals.count or failure.code == WRONG_SETTINGS:
                break
            if restarts < rules.max_restarts:
                say(f"restart {restarts + 1} of {rules.max_restarts}, from the newest checkpoint")
    if failure is not None and failure.code == WRONG_SETTINGS:
        leave_nothing(logs, made)
    return 0 if failure is None else failure.code


def watch(processes: list["Process"], rules: Rules, signals: "Signals") -> Failure | None:
    """Until all have ended well (None), or one has not and the others are ended. A signal goes to all of them."""
    handed_on = 0
    while True:
        codes = [process.look() for process in processes]
        if signals.count > handed_on:
            handed_on = signals.count
            for process in processes:
                process.send(signals.last if handed_on == 1 else signal.SIGKILL)
        if None not in codes:
            return _ended_on_request(processes, signals) if handed_on else _named(processes)
        if not handed_on and (failure := _named(processes) or _stalled(processes, rules.stall_timeout)):
            began = time.monotonic()
            end(processes, rules.grace, signals)
            if len(processes) == 1 or not failure.text:
                return failure
            return Failure(f"{failure.text}\nthe others were ended in {time.monotonic() - began:.1f} s", failure.code)
        time.sleep(POLL)


def end(processes: list["Process"], grace: float, signals: "Signals | None" = None) -> None:
    """Asks those that still run to end, and ends them when their time is up, or a signal says it should be at once."""
    until, asked = time.monotonic() + grace, signals.count if signals else 0
    if grace > 0:
        for process in processes:
            process.send(signal.SIGTERM)
    while (
        None in [p.look() for p in processes] and time.monotonic() < until and (not signals or signals.count == asked)
    ):
        time.sleep(POLL)
    for process in processes:
        process.kill()


# ---- who it was


def _named(processes: list["Process"]) -> Failure | None:
    """Of those that ended badly, the one that the others probably ended because of."""
    failed = [p for p in processes if p.code not in (None, 0)]
    if not failed:
        return None
    culprit = min(failed, key=lambda p: (p.lost_a_peer(), p.code == -signal.SIGABRT, p.index))
    if culprit.index == 0 and culprit.code == WRONG_SETTINGS:
        return Failure("", WRONG_SETTINGS)  # it has said so on the screen
    text = f"{culprit} {how(culprit.code)}"
    if culprit.lost_a_peer():
        text += ": it lost a process on another machine, whose own output says why"
    return Failure(f"{text}\n{culprit.last_lines()}", culprit.code if culprit.code > 0 else 128 - culprit.code)


def how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = {"SIGKILL": ", as by a machine that is out of memory", "SIGSEGV": ", in compiled code"}.get(name, "")
    return f"was ended by {name}{hint}"


def _stalled(processes: list["Process"], limit: float | None) -> Failure | None:
    """All wait for one, so all are silent: it is one that is stopped, else the one that has been silent the longest."""
    silent = {p: seconds for p in processes if (seconds := p.silence()) is not None and p.code is None}
    if limit is None or not silent or min(silent.values()) < limit:
        return None
    stopped = [p for p in silent if p.is_stopped()]
    culprit = max(stopped or silent, key=lambda p: silent[p])
    state = "is stopped, as by SIGSTOP," if stopped else "stalled"
    doing = "; ".join(f"{p} {silent[p]:.0f} s ago{p.doing()}" for p in silent)
    text = f"{culprit} {state} for {silent[culprit]:.0f} s, and launch.stall_timeout={limit:g}. Last signs: {doing}"
    return Failure(f"{text}\n{culprit.last_lines()}", STALLED)


def _ended_on_request(processes: list["Process"], signals: "Signals") -> Failure | None:
    if all(p.code == 0 for p in processes):
        return None
    return Failure(f"stopped by {signal.Signals(signals.last).name}", 128 + signals.last)


# ---- one process


class Process:
    """One of them, its output, and its heartbeat."""

    def __init__(self, command: list[str], environment: dict[str, str], index: int, logs: Path, beats: Path):
        self.index, self.rank, self.code = index, int(environment["RANK"]), None
        self._log, self._beat = logs / f"p{self.rank}.log", beats / f"p{self.rank}"
        self._beat.unlink(missing_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        self._file = self._log.open("ab")
        self._began, self._trace = self._file.tell(), Trace()
        environment = os.environ | environment | {HEARTBEAT: str(self._beat), "PYTHONUNBUFFERED": "1"}
        output = {"stderr": subprocess.PIPE} if index == 0 else {"stdout": self._file, "stderr": subprocess.STDOUT}
        output |= {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": _end_with_us}
        self._started = subprocess.Popen(command, env=environment, **output)
        if self._started.stderr is not None:
            os.set_blocking(self._started.stderr.fileno(), False)

    def __str__(self) -> str:
        return f"process {self.rank}"

    def look(self) -> int | None:
        """Its exit code, if it has ended; shows what it has said on its standard error since."""
        self.code = self._started.poll()  # before its last words are read
        if self._started.stderr is not None:
            while said := self._started.stderr.read(1 << 16):
                self._file.write(said)
                self._file.flush()
                sys.stderr.buffer.write(self._trace.without(said))
                sys.stderr.buffer.flush()
        return self.code

    def send(self, number: int) -> None:
        if self._started.poll() is None:
            self._started.send_signal(number)

    def kill(self) -> None:
        """Ends it and whatever it has started itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._started.pid, signal.SIGKILL)
        self._started.wait()
        self.look()
        sys.stderr.buffer.write(self._trace.rest)
        self._trace = Trace()
        for file in (self._file, self._started.stderr):
            if file is not None:
                file.close()
        self._started.stderr = None

    def last_lines(self) -> str:
        """The end of what it said in this attempt, as far as it is not on the screen."""
        lines = self._said().decode(errors="replace").splitlines()
        said = [line for line in lines if not line.startswith("[Gloo] Rank")]  # it says so on every new connection
        where = f"its last lines, of {self._log}:" if self.index else f"its last words are above, and in {self._log}"
        return "\n".join([where, *(f"  {line}" for line in said[-LAST_LINES:] if self.index)])

    def lost_a_peer(self) -> bool:
        said = self._said()
        return LOST_A_PEER.encode() in said or b"The following tasks are unhealthy" in said

    def _said(self) -> bytes:
        with self._log.open("rb") as log:
            log.seek(max(self._began, self._log.stat().st_size - (1 << 16)))
            return log.read()

    def silence(self) -> float | None:
        """Seconds since its last heartbeat; None before the first."""
        with contextlib.suppress(FileNotFoundError):
            return time.time() - self._beat.stat().st_mtime
        return None

    def doing(self) -> str:
        said = self._beat.read_text().strip()
        return f" ({said})" if said else ""

    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._started.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        return False


class Trace:
    """Takes the C++ trace out of what a process says when another one is gone: it is in the log, not on the screen."""

    BEGINS = re.compile(rb"[EF]\d{4} [\d:.]+ +\d+ (coordination_\w+|client|distributed_runtime\w*)\.(cc|h):")
    GOES_ON = re.compile(rb"\d*\n?$|The tasks have crashed|RPC: |Additional GRPC|:UNKNOWN:|\*\*\* Check| +@ +0x")

    def __init__(self):
        self._inside, self.rest = False, b""

    def without(self, said: bytes) -> bytes:
        *lines, rest = (self.rest + said).splitlines(keepends=True) or [b""]
        if rest.endswith(b"\n") or not re.match(rb"[EF]\d|[ \d*TRa]", rest):  # half a line of a trace waits
            lines, rest = [*lines, rest], b""
        self.rest = rest
        return b"".join(line for line in lines if not self._is_of_a_trace(line))

    def _is_of_a_trace(self, line: bytes) -> bool:
        self._inside = bool(self.BEGINS.match(line) or (self._inside and self.GOES_ON.match(line)))
        return self._inside


class Signals:
    """Inside `with`, how often we were asked to stop, and by what."""

    def __init__(self):
        self.count, self.last, self._before = 0, signal.SIGTERM, {}

    def __enter__(self) -> "Signals":
        self._before = {number: signal.signal(number, self._asked) for number in HANDED_ON}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _) -> None:
        self.count, self.last = self.count + 1, number


def _end_with_us() -> None:
    """In a process that has just begun: should the launcher be killed, it is asked to end, too (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def leave_nothing(logs: Path, made: list[Path]) -> None:
    """Removes the folders, the innermost first, that were made for a run, if that never began."""
    if {path.name for path in logs.parent.iterdir()} <= {".hydra", LOCK, logs.name}:
        shutil.rmtree(logs)
        for folder in made[1:]:
            with contextlib.suppress(OSError):  # it holds something else
                folder.rmdir()


def say(text: str) -> None:
    print("\n".join(f"launch: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)
