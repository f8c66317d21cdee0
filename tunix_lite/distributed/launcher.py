"""`python -m tunix_lite.launch --nprocs=4 run_training.py key=value ...`: starts and watches a
run's processes. On several machines, one launcher each has MASTER_ADDR, MASTER_PORT, WORLD_SIZE and
the RANK of its first process. It imports neither jax nor Hydra, so it starts at once."""

import argparse
import contextlib
import ctypes
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tunix_lite.distributed import command_line
from tunix_lite.distributed.command_line import folder_given
from tunix_lite.distributed.folder_lock import LOCK
from tunix_lite.distributed.join import HEARTBEAT, LOST_A_PEER, RESTARTS, SETTINGS, STARTED
from tunix_lite.distributed.process_place import TORCH_SETS, LaunchConfig, find_place

# The commands that several processes can run together.
COMMANDS = ("train", "evaluate", "check")
# Seconds between two looks at the processes.
POLL = 0.05
# Seconds between asking a process to end and ending it.
GRACE = 5.0
# Seconds in which the process that others have lost must be seen to end. The kernel closes the
# connections of a killed process a moment before it reports that process's end.
_CAUSE_ENDS_WITHIN = 1.0
# Lines of a failed process's output that are shown, and bytes of its end that are searched.
_LAST_LINES = 20
_LAST_BYTES = 1 << 16
# The exit codes of wrong settings, of a stall (that of timeout(1)), and of Ctrl-C.
_WRONG_SETTINGS = 2
_STALLED = 124
_INTERRUPTED = 130
# Signals that are sent on, and the exit codes of a process that one of them ended at once.
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_SIGNAL = {code for number in _HANDED_ON for code in (-number, 128 + number)}


# ---- the command line


def main(arguments: list[str] | None = None) -> None:
    """The command `tunix-lite launch`; ends the process, with 2 where arguments are wrong."""
    about = "Starts and watches the processes of a run here; the first one has the screen."
    parser = argparse.ArgumentParser(
        "tunix-lite launch", description=about, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument(
        "--nprocs", type=int, default=1, metavar="N", help="processes on this machine; 1"
    )
    what = (
        "what each runs: FILE.py key=value ..., check or evaluate ...; else tunix-lite train"
    )
    # Whatever stands behind the program is its own, also words with dashes.
    parser.add_argument("program", nargs=argparse.REMAINDER, help=what)
    # All that can be wrong is found before a process is started.
    try:
        known, unknown = parser.parse_known_args(arguments)
        program = known.program[1:] if known.program[:1] == ["--"] else known.program
        flags = [word.partition("=")[0] for word in [*unknown, *program]]
        if "--nprocs" in flags and not unknown:
            raise ValueError(
                "--nprocs is a flag of the launcher: write it before the program and its settings"
            )
        if unknown:
            raise ValueError(
                f"{unknown[0]}: the launcher has no such flag; it has --nprocs. torchrun's "
                "--nproc_per_node is --nprocs, for several machines set MASTER_ADDR, MASTER_PORT, "
                "WORLD_SIZE and RANK on each, and settings of the run are written key=value, "
                "without dashes, after the program"
            )
        program = command_line.on_this_machine(program)
        command_line.check_config_dir(command_line.config_dir(program))
        group = local_processes(known.nprocs, os.environ)
    except (ValueError, argparse.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

    # The folder is chosen here, so that every restart writes to the same one.
    is_check = program[:1] == ["check"]
    shows_only = command_line.SHOWS_ONLY & set(program)
    only_reads = is_check or program[:1] == ["evaluate"] or shows_only
    if group.first == 0 and not only_reads and folder_given(program) is None:
        project = command_line.project_name(program)
        folder = command_line.fresh_folder(project, program)
        program = program + command_line.in_folder(folder, program)
    folder = folder_given(program)
    # Only Hydra can resolve ${...}, so the logs go elsewhere.
    logs = Path("launch-logs") if folder is None or "$" in folder else Path(folder) / "launch"
    if is_check:
        logs = Path("outputs") / "check"

    no_restart = ""
    if command_line.SWEEPS & set(program):
        no_restart = (
            "launch.max_restarts is for one run: with --multirun it would begin all again"
        )
    elif "${now" in (folder or ""):
        # Each start would make a folder of its own, without the checkpoint of the last one.
        no_restart = "launch.max_restarts needs a hydra.run.dir without ${now:...}"
    # Each process runs a file, one of COMMANDS, or else `tunix-lite train`.
    first = program[0] if program else ""
    if not first.endswith(".py"):
        train = [] if first in COMMANDS else ["train"]
        program = ["-m", "tunix_lite", *train, *program]
    try:
        command = [sys.executable, *program]
        code = _supervise(command, group.environments, logs, no_restart)
    # The logs cannot be written, or there is no memory for another process.
    except OSError as error:
        text = f"error: the launcher has stopped, and has ended its processes: {error}"
        print(text, file=sys.stderr)
        code = 1
    sys.exit(code)


@dataclass(frozen=True)
class _LocalProcesses:
    """The processes that this launcher starts, among all of the run.
    Example: `_LocalProcesses(4, 8, 4, "10.0.0.1", "29500")`, on the second of two machines."""

    # how many are started here, how many the whole run has, and the id of the first one here
    nprocs: int
    world: int
    first: int = 0
    # where process 0 listens; port None: a free one of this machine, a new one for each attempt
    address: str = "127.0.0.1"
    port: str | None = None

    def environments(self) -> list[dict[str, str]]:
        """The variables for each process here, with the names of torchrun."""
        port = self.port
        if not port:
            # If another program takes it before process 0 does, the roll-call says so.
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                port = str(listening.getsockname()[1])
        shared = {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": port,
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
        }
        return [
            shared | {"RANK": str(self.first + i), "LOCAL_RANK": str(i)}
            for i in range(self.nprocs)
        ]


def local_processes(nprocs: int, environ: Mapping[str, str]) -> _LocalProcesses:
    """The processes to start here, by --nprocs and by the variables that name other machines.
    Raises ValueError."""
    if nprocs < 1:
        raise ValueError(f"--nprocs={nprocs} must be at least 1")
    port = environ.get("MASTER_PORT")
    world = environ.get("WORLD_SIZE", "").strip()
    if world == str(nprocs) and not environ.get("RANK", "0").strip(" 0"):
        address = environ.get("MASTER_ADDR", "127.0.0.1")
        return _LocalProcesses(nprocs, nprocs, 0, address, port)

    of_torchrun = {name: environ[name] for name in TORCH_SETS if name in environ}
    place = find_place(LaunchConfig(), of_torchrun if world else environ)
    first = place.process_id
    count = place.num_processes
    # Slurm numbers the machines; each machine has one launcher.
    if not world:
        if place.source == "srun" and place.asks_jax:
            raise ValueError(
                "MASTER_ADDR is not set: under srun each node has a launcher, and all need the "
                "node of process 0; export MASTER_ADDR=$(scontrol show hostnames | head -n 1)"
            )
        if place.coordinator is None:
            return _LocalProcesses(nprocs, nprocs, port=port)
        first *= nprocs
        count *= nprocs
    if first + nprocs > count or place.coordinator is None:
        raise ValueError(
            f"RANK={first} and --nprocs={nprocs} are processes {first} to "
            f"{first + nprocs - 1}, but WORLD_SIZE={count}: RANK is the number of the first "
            "process on this machine, and WORLD_SIZE counts the processes of all machines"
        )
    host, _, port = place.coordinator.rpartition(":")
    return _LocalProcesses(nprocs, count, first, host, port)


# ---- a run, from its first attempt to its end


class _Failure(NamedTuple):
    """The end of a failed run: what to print, "" if a process has done so, and the exit code."""

    text: str
    code: int


def _supervise(
    command: list[str],
    environments: Callable[[], list[dict]],
    logs: Path,
    no_restart: str,
) -> int:
    """Runs `command` in one process for each environment, and returns the exit code of the run.
    environments: called for each attempt. logs: the folder for the output. no_restart: why the run
    cannot be started again; "": it can. Raises OSError if a process cannot be started."""
    # Folders that we make, the innermost first. A run that never begins leaves none of them.
    made = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    signals = []
    for number in _HANDED_ON:
        # nohup has SIGHUP ignored, and so do we.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda came, _: signals.append(came))

    # training.max_minutes counts from here, over all attempts, unless a job script says otherwise.
    started = os.environ.get(STARTED) or str(time.time())
    with tempfile.TemporaryDirectory(prefix="tunix_lite_") as temporary:
        beats = Path(temporary)
        for restarts in itertools.count():
            attempt = _Attempt(signals, beats)
            try:
                logs.mkdir(parents=True, exist_ok=True)
                for environment in environments():
                    own = environment | {STARTED: started, RESTARTS: str(restarts)}
                    process = _Process(command, own, len(attempt.processes), logs, beats)
                    attempt.processes.append(process)
                failure = attempt.watch()
            finally:
                # Also after an error of our own: no process outlives its launcher.
                attempt.end(0.0)

            # Try again, unless it succeeded, was asked to stop, or would fail in the same way.
            if failure is not None and failure.text:
                _say(failure.text)
            if failure is None or signals or failure.code == _WRONG_SETTINGS:
                break
            most = attempt.settings()["max_restarts"]
            if most and no_restart:
                _say(no_restart)
                break
            if restarts >= most:
                break
            _say(f"restart {restarts + 1} of {most}, from the newest checkpoint")
    if failure is None:
        # All have stopped by themselves. As of a run without a launcher: commands/train.py.
        if signals[-1:] == [signal.SIGINT]:
            return _INTERRUPTED
        return 0
    unused = {".hydra", LOCK, logs.name}
    has_begun = {path.name for path in logs.parent.iterdir()} - unused
    if failure.code == _WRONG_SETTINGS and not has_begun:
        shutil.rmtree(logs, ignore_errors=True)
        for folder in made[1:]:
            # rmdir fails where something else is in the folder.
            with contextlib.suppress(OSError):
                folder.rmdir()
    return failure.code


class _Attempt:
    """The processes of this machine from one start to their end."""

    def __init__(self, signals: list[int], beats: Path):
        """signals: those that the launcher has received. beats: the folder of heartbeat files."""
        self.processes: list[_Process] = []
        self._signals = signals
        self._beats = beats

    def settings(self) -> dict[str, float]:
        """launch.stall_timeout and launch.max_restarts, as the processes report them."""
        settings = {"stall_timeout": LaunchConfig.stall_timeout, "max_restarts": 0}
        for file in self._beats.glob(f"*{SETTINGS}"):
            # Its process may be writing it at this moment.
            with contextlib.suppress(OSError, ValueError):
                settings |= json.loads(file.read_text())
        return settings

    def watch(self) -> _Failure | None:
        """Waits until all have ended; None: well, or as asked. Ends the others if one fails."""
        until = math.inf
        stalled = None
        sent = 0
        while (left := self._running()) and time.monotonic() < until:
            # The first signal is sent on, once: two would cut a save off. The second ends all.
            if self._signals and not sent:
                sent = self._signals[0]
                until = math.inf
                for process in self.processes:
                    process.send_signal(sent)
            if len(self._signals) > 1:
                break
            failed = self._failed()
            if not failed and (stalled := self._stalled()):
                break
            are_victims = all(process.is_victim() for process in failed)
            if failed and not sent and not are_victims:
                break
            # While all that failed only report a lost peer, that one is probably about to end here.
            if failed and until == math.inf:
                until = time.monotonic() + (GRACE if sent else _CAUSE_ENDS_WITHIN)
            time.sleep(POLL)

        # Whoever signals us may have ended all processes, too, before we look.
        sent = sent or next(iter(self._signals), 0)
        # A process that the signal ended at once takes others with it: they lost a peer.
        failed = self._failed()
        early = []
        if sent:
            early = [process for process in failed if process.returncode in _BY_SIGNAL]
        guilty = [process for process in failed if process not in early]
        if early:
            guilty = [process for process in guilty if not process.is_victim()]
        failure = stalled or _blamed(guilty)
        began = time.monotonic()
        is_stopped = sent and stalled is None
        self.end(0.0 if is_stopped else GRACE)
        end = ""
        if is_stopped and left and len(self._signals) == 1:
            end = (
                f"\n{' and '.join(map(str, left))}: still running {GRACE:g} s later, and ended"
            )
        elif not is_stopped and left and len(self.processes) > 1:
            end = f"\nthe others were ended in {time.monotonic() - began:.1f} s"
        if failure is not None:
            return _Failure(failure.text and failure.text + end, failure.code)
        if not (sent and (left or failed)):
            return None
        number = self._signals[-1]
        return _Failure(f"stopped by {signal.Signals(number).name}{end}", 128 + number)

    def end(self, grace: float) -> None:
        """Ends all: SIGTERM, then SIGKILL after `grace` seconds, or at a new signal."""
        deadline = time.monotonic() + grace
        signals_before = len(self._signals)
        if grace > 0:
            for process in self.processes:
                process.send_signal(signal.SIGTERM)
        while self._running() and time.monotonic() < deadline:
            # Whoever sends one more signal does not want to wait.
            if len(self._signals) > signals_before:
                break
            time.sleep(POLL)
        # Those that have ended, too: what they have started may still run.
        for process in self.processes:
            process.kill()

    def _running(self) -> list["_Process"]:
        """Those that still run, after a look at all."""
        return [process for process in self.processes if process.look() is None]

    def _failed(self) -> list["_Process"]:
        """Those that had failed at the last look."""
        return [process for process in self.processes if process.returncode]

    def _stalled(self) -> _Failure | None:
        """The failure of a run whose processes have all been silent too long; None: not so."""
        # All wait for one: that has not made its first step, or has been silent the longest.
        limit = self.settings()["stall_timeout"]
        running = [process for process in self.processes if process.returncode is None]
        # Seconds since the last heartbeat of each; None: before the first.
        silent = {process: process.silence() for process in running}
        seconds = [s for s in silent.values() if s is not None]
        if limit == 0 or not seconds or min(seconds) < limit:
            return None
        without = [process for process in running if silent[process] is None]
        if without:
            culprit = without[0]
            since = "before its first step"
        else:
            culprit = max(running, key=silent.get)
            since = f"for {silent[culprit]:.0f} s"
        signs = []
        for process, lasted in silent.items():
            when = "none" if lasted is None else f"{lasted:.0f} s ago"
            signs.append(f"{process} {when}{process.doing()}")
        text = (
            f"{culprit} stalled {since}, and launch.stall_timeout={limit:g}. Last signs: "
            f"{'; '.join(signs)}"
        )
        return _Failure(f"{text}\n{culprit.last_lines()}", _STALLED)


def _blamed(failed: list["_Process"]) -> _Failure | None:
    """The failure of the process that probably failed first; None if none has failed."""
    if not failed:
        return None
    # A process that reports a lost peer, or that jax aborted, comes after all others.
    culprit = min(
        failed,
        key=lambda p: (p.lost_a_peer(), p.returncode == -signal.SIGABRT, p.ended, p.index),
    )
    code = culprit.returncode
    # Process 0 has printed on the screen what is wrong with the settings.
    if culprit.index == 0 and code == _WRONG_SETTINGS:
        return _Failure("", _WRONG_SETTINGS)
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += "; perhaps the machine ran out of memory"
    if culprit.lost_a_peer():
        how += ": it lost a process on another machine, whose own output says why"
    return _Failure(
        f"{culprit} {how}\n{culprit.last_lines()}", code if code > 0 else 128 - code
    )


# ---- one process


class _Process(subprocess.Popen):
    """A process of the run: started, read, and asked whether it is alive."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        index: int,
        logs: Path,
        beats: Path,
    ):
        """Starts it. index: among the processes here; 0 has the screen. Raises OSError."""
        self.index = index
        self.rank = int(environment["RANK"])
        # when we saw that it had ended
        self.ended = math.inf

        # the file that the process writes when it is alive
        self._beat = beats / f"p{self.rank}"
        # What an earlier attempt has left is no sign of life.
        self._beat.unlink(missing_ok=True)
        # Its log, to which earlier attempts have written; this one begins at `_began`.
        self._log = logs / f"p{self.rank}.log"
        self._file = self._log.open("ab", buffering=0)
        self._began = self._file.tell()

        # Without it, the last lines of a process that is killed would be lost.
        own = {HEARTBEAT: str(self._beat), "PYTHONUNBUFFERED": "1"}
        output = {"stdout": self._file, "stderr": subprocess.STDOUT}
        # What the first one says goes to the screen, too; a lost peer is looked for in the log.
        if index == 0:
            output = {"stderr": subprocess.PIPE}
        super().__init__(
            command,
            env=os.environ | environment | own,
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches the launcher alone, and a session can be killed as one.
            start_new_session=True,
            preexec_fn=_end_with_us,
            **output,
        )
        if self.stderr is not None:
            # `look` must return where there is nothing to read.
            os.set_blocking(self.stderr.fileno(), False)

    def __str__(self) -> str:
        return f"process {self.rank}"

    def look(self) -> int | None:
        """Its exit code, None while it runs. Shows what it has written to standard error."""
        # Ask for the exit code first: what it wrote before its end is then all there to read.
        code = self.poll()
        if code is not None:
            self.ended = min(self.ended, time.monotonic())
        if self.stderr is not None:
            while output := self.stderr.read(1 << 16):
                _show(output)
                # The disk of its log may be full.
                with contextlib.suppress(OSError):
                    self._file.write(output)
        return code

    def kill(self) -> None:
        """Kills it, and all processes that it has started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        # What it wrote before its end is still in the pipe.
        self.look()
        self._file.close()
        if self.stderr is not None:
            self.stderr.close()
            self.stderr = None

    def last_lines(self) -> str:
        """The last lines of its output in this attempt; of process 0, where they are."""
        if self.index == 0:
            return f"its last words are above, and in {self._log}"
        lines = self._output().decode(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join(
            [f"its last lines, of {self._log}:", *(f"  {line}" for line in lines)]
        )

    def is_victim(self) -> bool:
        """Whether it ended as a process does that has lost another one."""
        return self.returncode == -signal.SIGABRT or self.lost_a_peer()

    def lost_a_peer(self) -> bool:
        """Whether its output says that it has lost another process of the run."""
        output = self._output()
        return LOST_A_PEER.encode() in output or b"The following tasks are unhealthy" in output

    def _output(self) -> bytes:
        """The end of its output in this attempt, at most _LAST_BYTES."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._began, self._log.stat().st_size - _LAST_BYTES))
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


def _end_with_us() -> None:
    """Runs in a new process: the kernel will send it SIGTERM if the launcher is killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _say(text: str) -> None:
    """Prints lines of the launcher's own."""
    _show("".join(f"launch: {line}\n" for line in text.splitlines()).encode())


def _show(output: bytes) -> None:
    """Writes to the screen. It may be a file on a full disk, or gone: then nothing is written."""
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(output)
        sys.stderr.buffer.flush()


if __name__ == "__main__":
    main()
