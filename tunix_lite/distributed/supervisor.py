"""Starts and watches the processes of a run on this machine.

If one of them fails or stalls, the supervisor ends the others and names the one that was first. The
first process has the screen; the output of the others goes to files. The supervisor sends the first
signal on to all processes, which then stop by themselves, with a checkpoint. A second signal ends
them. It always waits until the last process is gone.
"""

import contextlib
import ctypes
import itertools
import json
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
from tunix_lite.distributed.join import HEARTBEAT, LOST_A_PEER, RESTARTS, SETTINGS, STARTED
from tunix_lite.distributed.process_place import LaunchConfig

# Seconds between two looks at the processes.
POLL = 0.05
# Seconds in which the process that others have lost must be seen to end. The kernel closes the
# connections of a killed process a moment before it reports that process's end.
CAUSE_ENDS_WITHIN = 1.0
# Lines of a failed process's output that are shown.
LAST_LINES = 20
# The exit code of wrong settings: a restart would not help.
WRONG_SETTINGS = 2
# The exit code after a stall, the one of timeout(1).
STALLED = 124
# The exit code after Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130
# Signals that are sent on to the processes.
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Exit codes of a process that such a signal ended at once, before it had anything to save.
BY_SIGNAL = {code for number in HANDED_ON for code in (-number, 128 + number)}
# Bytes at the end of a process's output that are searched after it has ended.
KEPT = 1 << 16


@dataclass
class RestartPolicy:
    """When the supervisor gives an attempt up, and how often it tries again.

    Example: `RestartPolicy(stall_timeout=1800, max_restarts=3)`.
    """

    # seconds without a heartbeat, after the first one, until the run counts as stalled; 0: never
    # None: as the settings of the run have it, and so below
    stall_timeout: float | None = None
    # how often a failed run is started again
    max_restarts: int | None = None
    # seconds between SIGTERM and SIGKILL
    grace: float = 5.0
    # why the run cannot be started again; "": it can
    never: str = ""

    def complete(self, beats: Path) -> None:
        """Takes what the settings of the run say from the report of a process, if it has come.

        beats: the folder of the heartbeat files, with the reports beside them.
        """
        if None not in (self.stall_timeout, self.max_restarts):
            return
        for file in beats.glob(f"*{SETTINGS}"):
            with contextlib.suppress(OSError, ValueError):
                told = json.loads(file.read_text())
                for name in ("stall_timeout", "max_restarts"):
                    if getattr(self, name) is None:
                        setattr(self, name, told[name])
                return


@dataclass(frozen=True)
class Failure:
    """The end of a run that failed.

    Example: `Failure("process 1 ended with exit code 1\\n...", 1)`.
    """

    # what to print; empty if a process has printed it already
    text: str
    # the exit code of the launcher
    code: int


def supervise(
    command: list[str], environments: Callable[[], list[dict]], logs: Path, rules: RestartPolicy
) -> int:
    """Runs `command` in one process for each environment, and returns the exit code of the run.

    environments: called for each attempt, so that each has a free port of its own. logs: the folder
    for the output of the processes. rules: when to give up, and how often to try again. Raises
    OSError if a process cannot be started; then all others have been ended.
    """
    # Folders that we make, the innermost first: `leave_nothing` removes them.
    made = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    # training.max_minutes counts from here, over all attempts, unless a job script says otherwise.
    started = os.environ.get(STARTED) or str(time.time())
    with (
        Signals() as signals,
        tempfile.TemporaryDirectory(prefix="tunix_lite_") as beats,
        guarded(Path(beats)) as guard,
    ):
        for restarts in itertools.count():
            processes = []
            kept = writable(logs)
            try:
                # Start all processes of this attempt, and watch them.
                for environment in environments():
                    own = environment | {STARTED: started}
                    if restarts:
                        own[RESTARTS] = str(restarts)
                    process = Process(command, own, len(processes), kept, Path(beats))
                    processes.append(process)
                    guard(process.pid)
                failure = watch(processes, rules, signals, Path(beats))
            finally:
                end(processes, 0.0)

            # Try again, unless it succeeded, was asked to stop, or would fail in the same way.
            if failure is not None and failure.text:
                say(failure.text)
            if failure is None or signals.count or failure.code == WRONG_SETTINGS:
                break
            rules.complete(Path(beats))
            if rules.max_restarts and rules.never:
                say(rules.never)
                break
            if restarts >= (rules.max_restarts or 0):
                break
            say(f"restart {restarts + 1} of {rules.max_restarts}, from the newest checkpoint")
    if failure is not None and failure.code == WRONG_SETTINGS:
        leave_nothing(logs, made)
    if failure is None:
        # All have stopped by themselves. As of a run without a launcher: commands/train.py.
        return INTERRUPTED if signals.count and signals.last == signal.SIGINT else 0
    return failure.code


def watch(
    processes: list["Process"], rules: RestartPolicy, signals: "Signals", beats: Path
) -> Failure | None:
    """Waits until all processes have ended. None: all succeeded.

    If one fails or stalls, ends the others. After a signal, lets them stop by themselves. beats:
    the folder of the heartbeat files.
    """
    while not signals.count:
        rules.complete(beats)
        codes = [process.look() for process in processes]
        if None not in codes:
            return _named(processes)
        if any(process.code for process in processes):
            _wait_for_the_cause(processes)
        if failure := _named(processes) or _stalled(processes, rules.stall_timeout):
            return _others_ended(failure, processes, rules.grace, signals)
        time.sleep(POLL)
    return _stopping(processes, rules, signals)


def _wait_for_the_cause(processes: list["Process"]) -> None:
    """Waits at most CAUSE_ENDS_WITHIN while all that have failed only report a lost peer.

    The lost process is probably one of this machine, about to end: then it is the one to name.
    """
    deadline = time.monotonic() + CAUSE_ENDS_WITHIN
    while (
        all(process.is_victim() for process in processes if process.code)
        and None in [process.look() for process in processes]
        and time.monotonic() < deadline
    ):
        time.sleep(POLL)


def _stopping(
    processes: list["Process"], rules: RestartPolicy, signals: "Signals"
) -> Failure | None:
    """After the first signal: sends it on, and waits while the processes stop by themselves.

    If one fails, the others have `rules.grace` seconds more. A second signal ends all at once. The
    first one is not sent twice: that would stop the processes in the middle of saving.
    """
    deadline = math.inf
    for process in processes:
        process.send(signals.last)
    while (
        None in [process.look() for process in processes]
        and signals.count == 1
        and time.monotonic() < deadline
    ):
        if deadline == math.inf and any(process.code for process in processes):
            deadline = time.monotonic() + rules.grace
        if deadline == math.inf and (failure := _stalled(processes, rules.stall_timeout)):
            return _others_ended(failure, processes, rules.grace, signals)
        time.sleep(POLL)

    # Who failed? A process that the signal ended at once takes others with it: they lost a peer.
    left = [process for process in processes if process.code is None]
    failed = [process for process in processes if process.code and process.code not in BY_SIGNAL]
    if any(process.code in BY_SIGNAL for process in processes):
        failed = [process for process in failed if not process.is_victim()]
    failure = _named(failed)

    # End those that still run, and say what happened.
    end(left, 0.0)
    too_late = _ended(left, rules.grace) if left and signals.count == 1 else ""
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
    """Ends the other processes after a failure, and adds to its text how long that took."""
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
    """Ends all processes that still run: SIGTERM, then SIGKILL after `grace` seconds.

    A new signal to us, counted in `signals`, ends the waiting. grace=0: SIGKILL at once.
    """
    deadline = time.monotonic() + grace
    signals_before = signals.count if signals else 0
    if grace > 0:
        for process in processes:
            process.send(signal.SIGTERM)
    while (
        None in [p.look() for p in processes]
        and time.monotonic() < deadline
        and (not signals or signals.count == signals_before)
    ):
        time.sleep(POLL)
    for process in processes:
        process.kill()


# ---- which process is to blame


def _named(processes: list["Process"]) -> Failure | None:
    """The failure of the process that probably failed first; None if none has failed.

    A process that reports a lost peer, or that jax aborted, comes after all others.
    """
    failed = [p for p in processes if p.code not in (None, 0)]
    if not failed:
        return None
    culprit = min(
        failed, key=lambda p: (p.lost_a_peer(), p.code == -signal.SIGABRT, p.ended, p.index)
    )
    # Process 0 has printed on the screen what is wrong with the settings.
    if culprit.index == 0 and culprit.code == WRONG_SETTINGS:
        return Failure("", WRONG_SETTINGS)
    text = f"{culprit} {how(culprit.code)}"
    if culprit.lost_a_peer():
        text += ": it lost a process on another machine, whose own output says why"
    return Failure(
        f"{text}\n{culprit.last_lines()}", culprit.code if culprit.code > 0 else 128 - culprit.code
    )


def how(code: int) -> str:
    """How a process ended, from its exit code as subprocess has it: -9 is SIGKILL."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = {
        "SIGKILL": "; perhaps the machine ran out of memory",
        "SIGSEGV": ", in compiled code",
    }.get(name, "")
    return f"was ended by {name}{hint}"


def _stalled(processes: list["Process"], limit: float | None) -> Failure | None:
    """The failure of a run whose processes have all been silent for `limit` seconds; None: not so.

    All processes wait for one, so all are silent. To blame is one that is stopped (SIGSTOP), else
    one that has not made its first step, else the one that has been silent the longest. Before the
    first step of all only a stopped process counts.
    """
    running = [p for p in processes if p.code is None]
    limit = LaunchConfig.stall_timeout if limit is None else limit
    if limit == 0 or not running:
        return None

    # Seconds since the last heartbeat of each (None: before the first), and since it was stopped.
    silent = {p: p.silence() for p in running}
    stopped_for = {p: p.stopped_for() for p in running}
    stopped = {p: seconds for p, seconds in stopped_for.items() if seconds is not None}
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
    """A process of the run: started, read, and asked whether it is alive."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        index: int,
        logs: Path | None,
        beats: Path,
    ):
        """Starts it. index: among the processes of this machine; 0 has the screen.

        environment: variables beside our own. logs: the folder of its log; None: the log is not
        kept. beats: the folder of the heartbeat files. Raises OSError.
        """
        self.index = index
        self.rank = int(environment["RANK"])
        # the exit code, None while it runs; and when we saw that it had ended
        self.code: int | None = None
        self.ended = math.inf

        # the file that the process writes when it is alive, and since when it is stopped
        self._beat = beats / f"p{self.rank}"
        self._beat.unlink(missing_ok=True)
        self._stopped: float | None = None

        # Its log, to which earlier attempts have written; this one begins at `_began`.
        self._is_kept = logs is not None
        self._log = (beats if logs is None else logs) / f"p{self.rank}.log"
        self._file = self._log.open("ab", buffering=0)
        self._began = self._file.tell()

        # what process 0 has written to standard error, of which C++ traces are not shown
        self._trace = Trace()
        self._received = b""

        environment = (
            os.environ | environment | {HEARTBEAT: str(self._beat), "PYTHONUNBUFFERED": "1"}
        )
        output = {"stdout": self._file, "stderr": subprocess.STDOUT}
        if index == 0:
            output = {"stderr": subprocess.PIPE}
        self._started = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_us,
            **output,
        )
        if self._started.stderr is not None:
            os.set_blocking(self._started.stderr.fileno(), False)

    def __str__(self) -> str:
        return f"process {self.rank}"

    @property
    def pid(self) -> int:
        """Its id in the operating system."""
        return self._started.pid

    def look(self) -> int | None:
        """Its exit code, None while it runs. Shows what it has written to standard error."""
        # Ask for the exit code first: what it wrote before its end is then all there to read.
        self.code = self._started.poll()
        if self.code is not None:
            self.ended = min(self.ended, time.monotonic())
        if self._started.stderr is not None:
            while output := self._started.stderr.read(1 << 16):
                self._received = (self._received + output)[-KEPT:]
                self._write_log(output)
                show(self._trace.without(output))
        return self.code

    def _write_log(self, output: bytes) -> None:
        """Appends to its log. The first time that this fails, a line says so."""
        try:
            self._file.write(output)
        except OSError as error:
            if self._is_kept:
                say(
                    f"{self._log} cannot be written ({error.strerror}): what {self} says is on the "
                    "screen only"
                )
            self._is_kept = False

    def send(self, number: int) -> None:
        """Sends it a signal, if it still runs."""
        if self._started.poll() is None:
            self._started.send_signal(number)

    def kill(self) -> None:
        """Kills it, and all processes that it has started in its session."""
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
        """The last lines of its output in this attempt; of process 0, where they are."""
        if self.index == 0:
            return "its last words are above" + (f", and in {self._log}" if self._is_kept else "")
        output = Trace().without(self._output().rstrip(b"\n") + b"\n")
        # Gloo prints a greeting for every new connection.
        lines = [
            line
            for line in output.decode(errors="replace").splitlines()
            if not line.startswith("[Gloo] Rank")
        ]
        where = "its last lines" + (f", of {self._log}:" if self._is_kept else ":")
        return "\n".join([where, *(f"  {line}" for line in lines[-LAST_LINES:])])

    def is_victim(self) -> bool:
        """Whether it ended as a process does that has lost another one."""
        return self.code == -signal.SIGABRT or self.lost_a_peer()

    def lost_a_peer(self) -> bool:
        """Whether its output says that it has lost another process of the run."""
        output = self._output()
        return LOST_A_PEER.encode() in output or b"The following tasks are unhealthy" in output

    def _output(self) -> bytes:
        """The end of its output in this attempt, at most KEPT bytes."""
        if self.index == 0:
            return self._received
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
        """Its work by its last heartbeat, such as " (step 3)"; empty if it says nothing."""
        text = self._beat.read_text().strip() if self._beat.exists() else ""
        return f" ({text})" if text else ""

    def stopped_for(self) -> float | None:
        """Seconds since we first saw it stopped, as by SIGSTOP; None: it is not stopped.

        Call it regularly: it counts from the call that first finds the process stopped.
        """
        if not self._is_stopped():
            self._stopped = None
            return None
        self._stopped = self._stopped or time.monotonic()
        return time.monotonic() - self._stopped

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self._started.pid}/stat").read_text()
            # The state is the first word after the command's name, which stands in brackets.
            return stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False


class Trace:
    """Removes the C++ stack traces that jax prints when a process is lost, from a stream of output.

    The traces are still in the log.
    """

    BEGINS = re.compile(
        rb"[EF]\d{4} [\d:.]+ +\d+ (coordination_\w+|client|distributed_runtime\w*)\.(cc|h):"
    )
    GOES_ON = re.compile(
        rb"\d*\n?$|The tasks have crashed|RPC: |Additional GRPC|:UNKNOWN:|\*\*\* Check| +@ +0x"
    )

    def __init__(self):
        self._inside = False
        # half a line that may belong to a trace
        self.rest = b""

    def without(self, output: bytes) -> bytes:
        """The next piece of output, without the lines of traces."""
        *lines, rest = (self.rest + output).splitlines(keepends=True) or [b""]
        # The last line is held back if it is not whole and may belong to a trace.
        if rest.endswith(b"\n") or not re.match(rb"[EF]\d|[ \d*TRa]", rest):
            lines.append(rest)
            rest = b""
        self.rest = rest
        return b"".join(line for line in lines if not self._is_of_a_trace(line))

    def _is_of_a_trace(self, line: bytes) -> bool:
        self._inside = bool(self.BEGINS.match(line) or (self._inside and self.GOES_ON.match(line)))
        return self._inside


class Signals:
    """Counts the signals to the launcher, inside `with`."""

    def __init__(self):
        # how many came, and the number of the last one
        self.count = 0
        self.last = signal.SIGTERM
        self._handlers_before = {}

    def __enter__(self) -> "Signals":
        for number in HANDED_ON:
            # nohup has SIGHUP ignored, and so do we.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers_before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _) -> None:
        self.count += 1
        self.last = number


# the guard is started with Python's own paths alone, and finds the package by its third argument
START_GUARD = (
    "import sys; sys.path.append(sys.argv[3]); "
    "from tunix_lite.distributed.guard import main; main()"
)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Callable[[int], None]]:
    """A context in which distributed/guard.py ends the run if we are killed (on Linux only).

    folder: our temporary folder, which all processes of the run have in their environment. Yields a
    function: call it with the id of each process that was started.
    """
    if not sys.platform.startswith("linux"):
        yield lambda _: None
        return
    # The guard reads a pipe. When we are gone, the pipe closes.
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

    def send_to_guard(text: str) -> None:
        # Somebody may have ended the guard.
        with contextlib.suppress(OSError):
            os.write(writing, text.encode())

    try:
        yield lambda pid: send_to_guard(f"{pid}\n")
    finally:
        send_to_guard(".")
        os.close(writing)
        guard.wait()


def _end_with_us() -> None:
    """Runs in a new process: the kernel will send it SIGTERM if the launcher is killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def writable(logs: Path) -> Path | None:
    """Makes the folder of the logs. None, with a line that says so, if it cannot be written."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            return logs
    except OSError as error:
        say(f"{logs} cannot be written ({error.strerror}): what the processes say is not kept")
        return None


def leave_nothing(logs: Path, made: list[Path]) -> None:
    """Removes the folders that were made for a run that never began, if nothing else is in them.

    made: the folders, the innermost first; the first one is `logs`.
    """
    unused = {".hydra", LOCK, logs.name}
    if logs.is_dir() and {path.name for path in logs.parent.iterdir()} <= unused:
        shutil.rmtree(logs, ignore_errors=True)
        for folder in made[1:]:
            # rmdir fails where something else is in the folder.
            with contextlib.suppress(OSError):
                folder.rmdir()


def say(text: str) -> None:
    """Prints lines of the launcher's own."""
    show("".join(f"launch: {line}\n" for line in text.splitlines()).encode())


def show(output: bytes) -> None:
    """Writes to the screen. It may be a file on a full disk, or gone: then nothing is written."""
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(output)
        sys.stderr.buffer.flush()
