"""Watches the processes of a run on this machine: one ends badly or stalls, and the others are
ended and it is named.

The first process has the screen; what the others say goes to files. The first signal is handed on,
and they stop by themselves, with a checkpoint; the second ends them. Both ways they are watched
until the last one is gone.
"""

import contextlib
import ctypes
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.distributed.folder_lock import LOCK
from tunix_lite.distributed.join import HEARTBEAT, LOST_A_PEER, RESTARTS, STARTED

# seconds
POLL = 0.05
LAST_LINES = 20
# an exit code that another try would not change
WRONG_SETTINGS = 2
# as timeout(1) says it
STALLED = 124
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# exit codes: it had nothing to save
BY_SIGNAL = {code for number in HANDED_ON for code in (-number, 128 + number)}
# bytes of what a process said that are looked at when it has ended
KEPT = 1 << 16


@dataclass(frozen=True)
class RestartPolicy:
    """When a run is given up, and when it is tried again."""

    # seconds without a heartbeat, after the first; None: for ever
    stall_timeout: float | None = None
    max_restarts: int = 0
    grace: float = 5.0  # seconds between asking a process to end and ending it


@dataclass(frozen=True)
class Failure:
    """What ended a run: in words, if that needs any, and as an exit code."""

    text: str
    code: int


def supervise(
    command: list[str], environments: Callable[[], list[dict]], logs: Path, rules: RestartPolicy
) -> int:
    """Runs `command` once in each environment, again if that fails and the rules allow it. The exit
    code of it all.

    Raises OSError if a process cannot be started; then none is left.
    """
    made = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    # of a whole job where its script says so
    started = os.environ.get(STARTED) or str(time.time())
    with (
        Signals() as signals,
        tempfile.TemporaryDirectory(prefix="tunix_lite_") as beats,
        guarded(Path(beats)) as guard,
    ):
        for restarts in range(rules.max_restarts + 1):
            processes, kept = [], writable(logs)
            try:
                for environment in environments():
                    environment = (
                        environment
                        | ({RESTARTS: str(restarts)} if restarts else {})
                        | {STARTED: started}
                    )
                    processes.append(
                        Process(command, environment, len(processes), kept, Path(beats))
                    )
                    guard(processes[-1].pid)
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


def watch(processes: list["Process"], rules: RestartPolicy, signals: "Signals") -> Failure | None:
    """Until all have ended well (None), or one has not and the others are ended. A signal goes to
    all of them."""
    while not signals.count:
        codes = [process.look() for process in processes]
        if None not in codes:
            return _named(processes)
        if failure := _named(processes) or _stalled(processes, rules.stall_timeout):
            return _others_ended(failure, processes, rules.grace, signals)
        time.sleep(POLL)
    return _stopping(processes, rules, signals)


def _stopping(
    processes: list["Process"], rules: RestartPolicy, signals: "Signals"
) -> Failure | None:
    """After a signal: they stop by themselves. Where one does not end well, the others have `grace`
    seconds more.

    They are not asked a second time: that would stop them in the middle of saving.
    """
    asked, until = 1, math.inf
    for process in processes:
        process.send(signals.last)
    while (
        None in [process.look() for process in processes]
        and signals.count == asked
        and time.monotonic() < until
    ):
        if until == math.inf and any(process.code for process in processes):
            until = time.monotonic() + rules.grace
        if until == math.inf and (failure := _stalled(processes, rules.stall_timeout)):
            return _others_ended(failure, processes, rules.grace, signals)
        time.sleep(POLL)
    left = [process for process in processes if process.code is None]
    failed = [process for process in processes if process.code and process.code not in BY_SIGNAL]
    # the others may have lost it
    if any(process.code in BY_SIGNAL for process in processes):
        failed = [process for process in failed if not process.is_victim()]
    failure = _named(failed)
    end(left, 0.0)
    too_late = _ended(left, rules.grace) if left and signals.count == asked else ""
    if failure is not None:
        return Failure(f"{failure.text}\n{too_late}", failure.code) if failure.text else failure
    if not left and not any(process.code for process in processes):
        return None
    text = f"stopped by {signal.Signals(signals.last).name}"
    if too_late:
        early = next(process for process in processes if process.code in BY_SIGNAL)
        text += f"; {early} ended at once, and {too_late}"
    return Failure(text, 128 + signals.last)


def _others_ended(
    failure: Failure, processes: list["Process"], grace: float, signals: "Signals"
) -> Failure:
    began = time.monotonic()
    end(processes, grace, signals)
    if len(processes) == 1 or not failure.text:
        return failure
    return Failure(
        f"{failure.text}\nthe others were ended in {time.monotonic() - began:.1f} s", failure.code
    )


def _ended(left: list["Process"], grace: float) -> str:
    names = " and ".join(str(process) for process in left)
    return f"{names}, still running {grace:g} s later, {'was' if len(left) == 1 else 'were'} ended"


def end(processes: list["Process"], grace: float, signals: "Signals | None" = None) -> None:
    """Asks those that still run to end, and ends them when their time is up, or a signal says it
    should be at once."""
    until, asked = time.monotonic() + grace, signals.count if signals else 0
    if grace > 0:
        for process in processes:
            process.send(signal.SIGTERM)
    while (
        None in [p.look() for p in processes]
        and time.monotonic() < until
        and (not signals or signals.count == asked)
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
    culprit = min(
        failed, key=lambda p: (p.lost_a_peer(), p.code == -signal.SIGABRT, p.ended, p.index)
    )
    if culprit.index == 0 and culprit.code == WRONG_SETTINGS:
        # it has said so on the screen
        return Failure("", WRONG_SETTINGS)
    text = f"{culprit} {how(culprit.code)}"
    if culprit.lost_a_peer():
        text += ": it lost a process on another machine, whose own output says why"
    return Failure(
        f"{text}\n{culprit.last_lines()}", culprit.code if culprit.code > 0 else 128 - culprit.code
    )


def how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = {
        "SIGKILL": ", as by a machine that is out of memory",
        "SIGSEGV": ", in compiled code",
    }.get(name, "")
    return f"was ended by {name}{hint}"


def _stalled(processes: list["Process"], limit: float | None) -> Failure | None:
    """All wait for one, so all are silent: it is one that is stopped, else one that has not
    finished the step that others have, else the one that has been silent the longest. Before the
    first step only a stopped one counts."""
    running = [p for p in processes if p.code is None]
    if limit is None or not running:
        return None
    silent = {p: p.silence() for p in running}
    stopped = {p: seconds for p in running if (seconds := p.stopped_for()) is not None}
    seconds = [s for s in silent.values() if s is not None]
    if max(stopped.values(), default=0) < limit and (not seconds or min(seconds) < limit):
        return None
    culprit = max(stopped or silent, key=lambda p: math.inf if silent[p] is None else silent[p])
    state = "is stopped, as by SIGSTOP," if stopped else "stalled"
    lasted = silent[culprit] if silent[culprit] is not None else stopped.get(culprit)
    since = "before its first step" if lasted is None else f"for {lasted:.0f} s"
    doing = "; ".join(
        f"{p} {'none' if s is None else f'{s:.0f} s ago'}{p.doing()}" for p, s in silent.items()
    )
    text = f"{culprit} {state} {since}, and launch.stall_timeout={limit:g}. Last signs: {doing}"
    return Failure(f"{text}\n{culprit.last_lines()}", STALLED)


# ---- one process


class Process:
    """One of them, its output, and its heartbeat."""

    def __init__(
        self, command: list[str], environment: dict[str, str], index: int, logs: Path, beats: Path
    ):
        self.index, self.rank, self.code, self.ended = (
            index,
            int(environment["RANK"]),
            None,
            math.inf,
        )
        self._beat, self._stopped = beats / f"p{self.rank}", None
        self._beat.unlink(missing_ok=True)
        self._is_kept = logs is not None
        self._log = (beats if logs is None else logs) / f"p{self.rank}.log"
        self._file = self._log.open("ab", buffering=0)
        self._began, self._trace, self._heard = self._file.tell(), Trace(), b""
        environment = (
            os.environ | environment | {HEARTBEAT: str(self._beat), "PYTHONUNBUFFERED": "1"}
        )
        output = (
            {"stderr": subprocess.PIPE}
            if index == 0
            else {"stdout": self._file, "stderr": subprocess.STDOUT}
        )
        output |= {
            "stdin": subprocess.DEVNULL,
            "start_new_session": True,
            "preexec_fn": _end_with_us,
        }
        self._started = subprocess.Popen(command, env=environment, **output)
        if self._started.stderr is not None:
            os.set_blocking(self._started.stderr.fileno(), False)

    def __str__(self) -> str:
        return f"process {self.rank}"

    @property
    def pid(self) -> int:
        return self._started.pid

    def look(self) -> int | None:
        """Its exit code, if it has ended; shows what it has said on its standard error since."""
        # before its last words are read
        self.code = self._started.poll()
        if self.code is not None:
            self.ended = min(self.ended, time.monotonic())
        if self._started.stderr is not None:
            while said := self._started.stderr.read(1 << 16):
                self._heard = (self._heard + said)[-KEPT:]
                self._keep(said)
                show(self._trace.without(said))
        return self.code

    def _keep(self, said: bytes) -> None:
        try:
            self._file.write(said)
        except OSError as error:
            if self._is_kept:
                say(
                    f"{self._log} cannot be written ({error.strerror}): what {self} says is on the "
                    "screen only"
                )
            self._is_kept = False

    def send(self, number: int) -> None:
        if self._started.poll() is None:
            self._started.send_signal(number)

    def kill(self) -> None:
        """Ends it and whatever it has started itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._started.pid, signal.SIGKILL)
        self._started.wait()
        self.look()
        show(self._trace.rest)
        self._trace = Trace()
        for file in (self._file, self._started.stderr):
            if file is not None:
                file.close()
        self._started.stderr = None

    def last_lines(self) -> str:
        """The end of what it said in this attempt, as far as it is not on the screen."""
        lines = (
            Trace()
            .without(self._said().rstrip(b"\n") + b"\n")
            .decode(errors="replace")
            .splitlines()
        )
        # it says so on every new connection
        said = [line for line in lines if not line.startswith("[Gloo] Rank")]
        if self.index == 0:
            return "its last words are above" + (f", and in {self._log}" if self._is_kept else "")
        where = "its last lines" + (f", of {self._log}:" if self._is_kept else ":")
        return "\n".join([where, *(f"  {line}" for line in said[-LAST_LINES:])])

    def is_victim(self) -> bool:
        """Whether it ended as those do that another one has left."""
        return self.code == -signal.SIGABRT or self.lost_a_peer()

    def lost_a_peer(self) -> bool:
        said = self._said()
        return LOST_A_PEER.encode() in said or b"The following tasks are unhealthy" in said

    def _said(self) -> bytes:
        if self.index == 0:
            return self._heard
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._began, self._log.stat().st_size - KEPT))
            return log.read()
        return b""

    def silence(self) -> float | None:
        """Seconds since its last heartbeat; None before the first."""
        with contextlib.suppress(FileNotFoundError):
            return time.time() - self._beat.stat().st_mtime
        return None

    def doing(self) -> str:
        said = self._beat.read_text().strip() if self._beat.exists() else ""
        return f" ({said})" if said else ""

    def stopped_for(self) -> float | None:
        """Seconds since it was first seen stopped, each time that it is asked; None: it is not."""
        self._stopped = (self._stopped or time.monotonic()) if self._is_stopped() else None
        return None if self._stopped is None else time.monotonic() - self._stopped

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._started.pid}/stat").read_text().rpartition(")")[2].split()[
                0
            ] in ("T", "t")
        return False


class Trace:
    """Takes the C++ trace out of what a process says when another one is gone: it is in the log,
    not on the screen."""

    BEGINS = re.compile(
        rb"[EF]\d{4} [\d:.]+ +\d+ (coordination_\w+|client|distributed_runtime\w*)\.(cc|h):"
    )
    GOES_ON = re.compile(
        rb"\d*\n?$|The tasks have crashed|RPC: |Additional GRPC|:UNKNOWN:|\*\*\* Check| +@ +0x"
    )

    def __init__(self):
        self._inside, self.rest = False, b""

    def without(self, said: bytes) -> bytes:
        *lines, rest = (self.rest + said).splitlines(keepends=True) or [b""]
        # half a line of a trace waits
        if rest.endswith(b"\n") or not re.match(rb"[EF]\d|[ \d*TRa]", rest):
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
        # nohup ignores one
        heard = [number for number in HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._asked) for number in heard}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _) -> None:
        self.count, self.last = self.count + 1, number


# the guard is started with Python's own paths alone, and finds the package by its third argument
START_GUARD = (
    "import sys; sys.path.append(sys.argv[3]); "
    "from tunix_lite.distributed.guard import main; main()"
)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Callable[[int], None]]:
    """Inside, should we be killed, whatever has this folder in its environment is gone soon after
    (Linux): guard.py.

    Gives a function that is told of each process that was started.
    """
    if not sys.platform.startswith("linux"):
        yield lambda _: None
        return
    reading, writing = os.pipe()
    call = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        START_GUARD,
        str(reading),
        str(folder),
        str(Path(__file__).parents[2]),
    ]
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    guard = subprocess.Popen(call, pass_fds=(reading,), cwd="/", **nothing)
    os.close(reading)

    def say_to_it(text: str) -> None:
        # somebody ended it
        with contextlib.suppress(OSError):
            os.write(writing, text.encode())

    try:
        yield lambda pid: say_to_it(f"{pid}\n")
    finally:
        say_to_it(".")
        os.close(writing)
        guard.wait()


def _end_with_us() -> None:
    """In a process that has just begun: should the launcher be killed, it is asked to end, too
    (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def writable(logs: Path) -> Path | None:
    """The folder of the logs, made; None where nothing can be written there, which it says."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            return logs
    except OSError as error:
        say(f"{logs} cannot be written ({error.strerror}): what the processes say is not kept")
        return None


def leave_nothing(logs: Path, made: list[Path]) -> None:
    """Removes the folders, the innermost first, that were made for a run, if that never began."""
    if logs.is_dir() and {path.name for path in logs.parent.iterdir()} <= {
        ".hydra",
        LOCK,
        logs.name,
    }:
        shutil.rmtree(logs, ignore_errors=True)
        for folder in made[1:]:
            # it holds something else
            with contextlib.suppress(OSError):
                folder.rmdir()


def say(text: str) -> None:
    show("".join(f"launch: {line}\n" for line in text.splitlines()).encode())


def show(said: bytes) -> None:
    # the screen may be a file on a full disk, or gone
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(said)
        sys.stderr.buffer.flush()
