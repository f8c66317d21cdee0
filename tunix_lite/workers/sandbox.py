"""Runs a piece of code once, with limits (Linux), in three processes: this one watches; its child
is the first of a new process namespace, so that all ends with it; the child of that runs the code.
It imports nothing of the package, starts once for each test, and is no security boundary."""

import builtins
import contextlib
import ctypes
import json
import operator
import os
import platform
import resource
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# seconds that starting and ending the processes of a job may take beside the code
_GRACE = 5.0
# name of each limit by which code was stopped
STOPPED = {
    "time": "took more than `seconds`",
    "output": "printed more than output_kib",
    "memory": "took more than memory_mib",
    "processes": "started more than max_processes",
}
# protections that the kernel refused, of which this process has told
_told: set[str] = set()
# seconds between two looks at what the code does
_LOOK_SECONDS = 0.02
# bytes of a traceback that are kept
_KEPT = 2_000
# bytes of what a test reports
_LONGEST_REPORTS = 16 * 1024 * 1024
# files that the code may have open, and bytes of one that it writes
_OPEN_FILES = 64
# the file that holds the nonce while the code runs
_NONCE_FD = _OPEN_FILES - 1
_MIB = 1024 * 1024
# the user that code runs as, if this one is root and that one can read Python
_NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)

# of unshare(2), prctl(2), mount(2)
# new ones of mounts, IPC, users, processes and the network
_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_MS_NOSUID_NODEV = 2 | 4
_MNT_DETACH = 2
_MS_REC_PRIVATE = 16384 | 1 << 18
_CAPABILITY_VERSION = 0x20080522
# of landlock(7): system calls, and what may be done to files; the bits of writing
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13
_TRUNCATE = 1 << 14


RUNNER = __file__


def run_job(code: str, test: str | None, text: str = "", **limits: float) -> dict:
    """Runs code, and returns its outcome (see `run`). Raises RuntimeError if it cannot. test: run
    after the code; None: the code is a program, which reads `text` from stdin. limits: seconds,
    memory_mib, output_bytes, and disk_mib and processes, which have defaults."""
    job = {"code": code, "test": test, "input": text, "disk_mib": 16, "processes": 8} | limits
    process = subprocess.Popen(
        # Without Python's variables, and without modules of the current folder.
        [sys.executable, "-I", RUNNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(
            json.dumps(job).encode(), timeout=limits["seconds"] + _GRACE
        )
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"status": "could not be ended in time", "why": ""}
    if process.returncode < 0:
        how = f"killed the process that watched it (signal {-process.returncode})"
        return {"status": how, "why": ""}
    try:
        verdict = json.loads(output)
    except ValueError as error:
        raise RuntimeError(
            f"{os.path.basename(RUNNER)} ended with exit code {process.returncode}"
        ) from error
    if verdict["status"] == "failed":
        raise RuntimeError(f"code could not be run: {verdict['why']}")
    for refused in verdict["missing"]:
        if refused not in _told:
            _told.add(refused)
            print(f"code of completions: {refused}", flush=True)
    return verdict


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    # A reward worker, which starts this, may be killed at any time.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = tempfile.mkdtemp(prefix="tunix-lite-code-")
    try:
        verdict = run(job, folder)
    except OSError as error:
        verdict = {"status": "failed", "why": str(error)}
    finally:
        # what is mounted there, if anything is
        libc.umount2(folder.encode(), _MNT_DETACH)
        shutil.rmtree(folder, ignore_errors=True)
    json.dump(verdict, sys.stdout)


def run(job: dict, folder: str) -> dict:
    """Runs the code of a job once: `status` (ended, or by which limit it was stopped), what it
    printed, whether it came to its end, and which protections this kernel refused."""
    missing = _isolate(folder, job)
    output, writes_output = os.pipe()
    # pipe of the code's last words: that it came to its end, or why not
    reports_fd, writes_reports = os.pipe()
    # No pipe: writing more than it holds would block.
    code_input = os.memfd_create("input")
    os.write(code_input, job["input"].encode("utf-8", "surrogatepass"))
    os.lseek(code_input, 0, os.SEEK_SET)

    # Which nobody but the last line of the harness can say. It is made after the fork, so that no
    # frame of the code's process holds it.
    secret = os.memfd_create("secret")
    first = os.fork()
    if first == 0:
        # Waits for the code, and takes all that it started with it.
        with contextlib.suppress(BaseException):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            pipes = (code_input, writes_output, writes_reports, secret)
            code = os.fork()
            if code == 0:
                _code_process(job, folder, pipes)
            for pipe in pipes:
                os.close(pipe)
            while os.waitpid(-1, 0)[0] != code:
                pass
        os._exit(0)
    nonce = secrets.token_hex(16)
    os.write(secret, nonce.encode())
    os.close(writes_output)
    os.close(writes_reports)

    # Reads what the code prints until it ends or goes beyond a limit.
    deadline = time.monotonic() + job["seconds"]
    received = {output: bytearray(), reports_fd: bytearray()}
    arriving = select.poll()
    for pipe in received:
        os.set_blocking(pipe, False)
        arriving.register(pipe, select.POLLIN)
    status = "ended"
    is_gone = False
    while status == "ended":
        arriving.poll(1000 * _LOOK_SECONDS)
        for pipe, read in received.items():
            with contextlib.suppress(BlockingIOError):
                read += os.read(pipe, 65536)
        too_long = len(received[reports_fd]) > _LONGEST_REPORTS
        if len(received[output]) > job["output_bytes"] or too_long:
            status = "output"
        elif is_gone:
            break
        elif time.monotonic() > deadline:
            status = "time"
        else:
            status = _too_much(job, first) or status
        # once more after its end, for what it printed last
        is_gone = os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    # With the first process of a namespace, the kernel ends all in it before it can be waited for.
    os.kill(first, signal.SIGKILL)
    # Only now: until then, its number could belong to nobody else.
    os.waitpid(first, 0)
    *reports, last = received[reports_fd].decode(errors="replace").split("\n")
    return {
        "status": status,
        "printed": received[output][: job["output_bytes"]].decode(errors="replace"),
        "is_done": last == nonce,
        "reports": reports,
        "why": "" if last == nonce else last[-_KEPT:],
        "missing": missing,
    }


def _too_much(job: dict, first: int) -> str | None:
    """The limit that all processes of the code together exceed; None: none of them."""
    # also those that left its group
    processes = [first]
    for parent in processes:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    processes += map(int, file.read().split())
        # Code that forks without end must not keep this loop going.
        if len(processes) > 10_000:
            break
    # Beside the first of the namespace, and the code's own.
    if len(processes) > job["processes"] + 2:
        return "processes"
    pages = 0
    for pid in processes:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
            pages += int(file.read().split()[1])
    if pages * resource.getpagesize() > job["memory_mib"] * _MIB * 1.25:
        return "memory"
    return None


# ---- what keeps the code apart


def _isolate(folder: str, job: dict) -> list[str]:
    """Makes new namespaces for the processes that start from here on, or raises OSError. Returns
    which other protections the kernel refused, in words."""
    missing = []
    if os.getuid() == 0 and not _become_nobody(folder):
        missing.append(
            "it can read what root can, and change owners, modes and times of files (the user "
            f"nobody cannot read {sys.executable}; install Python where others can read it)"
        )
    user, group = os.getuid(), os.getgid()
    if _landlock_version() < 1:
        missing.append(
            "it can write wherever this user may write (this kernel has no landlock)"
        )
    if libc.unshare(_NAMESPACES):
        # Without a process namespace nothing ends code that forks faster than it can be looked for.
        refused = os.strerror(ctypes.get_errno())
        raise OSError(
            f"this kernel refuses namespaces (unshare: {refused}), without which code that starts "
            "processes without end could not be stopped; allow user namespaces, or leave "
            "rewards.code out"
        )

    # who it is there
    with contextlib.suppress(OSError):
        # Without it Linux refuses the map of groups to a user without rights.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{_NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{_NOBODY} {group} 1")

    # a file system of its own for its folder, which ends with it and cannot fill the disk
    size = f"size={job['disk_mib']}m,mode=700".encode()
    # What is mounted here must not show outside.
    libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID_NODEV, size):
        refused = os.strerror(ctypes.get_errno())
        missing.append(
            f"its files are on the disk, and their total is not limited (mount: {refused})"
        )
    return missing


def _become_nobody(folder: str) -> bool:
    """Turns root into a user without rights, if that one can read Python: did it?"""
    needed = [sys.executable, os.__file__, json.__file__, *filter(os.path.exists, sys.path)]
    # For a moment, to ask as that user.
    os.seteuid(_NOBODY)
    can_read = all(os.access(path, os.R_OK, effective_ids=True) for path in needed)
    can_read = can_read and os.access(os.path.dirname(folder), os.X_OK, effective_ids=True)
    os.seteuid(0)
    if can_read:
        os.chown(folder, _NOBODY, _NOBODY)
        # Groups first: a user without rights could not change them any more.
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        # a change of user forgets the first, and takes /proc/self from that user
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_DUMPABLE, 1)
    return can_read


def _landlock_version() -> int:
    return libc.syscall(_LANDLOCK_CREATE, None, 0, 1)


def _restrict_writes(folder: str) -> None:
    """Restricts the process by Landlock, where the kernel has it: files are written in the folder
    only, no TCP, no signals to others. Raises OSError."""
    version = _landlock_version()
    if version < 1:
        return
    files = _WRITES
    if version >= 2:
        files |= _REFER
    if version >= 3:
        files |= _TRUNCATE
    # access to files; to TCP (connect, bind) from version 4; signals and sockets from 6
    num_bytes = 8
    if version >= 4:
        num_bytes = 16
    if version >= 6:
        num_bytes = 24
    rules = struct.pack("QQQ", files, 3, 3)[:num_bytes]
    ruleset = libc.syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    for path, access in ((folder, files), (os.devnull, files & (1 << 1 | _TRUNCATE))):
        with contextlib.suppress(OSError):
            opened = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", access, opened)
            libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0)
            os.close(opened)
    # Without it Linux refuses Landlock to a user without rights.
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


# ---- the processes of the code


def _code_process(job: dict, folder: str, pipes: tuple[int, int, int, int]) -> None:
    """Runs the code and its test. While the code runs, no frame below it holds the nonce or the
    text of the test, and what runs afterwards was looked up before."""
    code_input, output, reports, secret = pipes
    # It is written after the forks, so that no frame of this process holds it.
    while not os.fstat(secret).st_size:
        time.sleep(0.001)
    os.dup2(secret, _NONCE_FD)
    os.dup2(code_input, 0)
    os.dup2(output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(reports, 3)
    os.closerange(4, _NONCE_FD)
    os.closerange(_NONCE_FD + 1, 256)
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", HOME=folder, TMPDIR=folder, LANG="C.UTF-8")
    # numpy's threads would count as processes
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    _restrict_writes(folder)
    # no rights in its own namespaces either
    libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))

    # the kernel's limits for each process of the code
    seconds = int(job["seconds"]) + 1
    # threads and processes count alike; a kernel before 5.14 counts those of the whole machine
    release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if release >= (5, 14):
        resource.setrlimit(resource.RLIMIT_NPROC, (job["processes"] + 2,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (job["memory_mib"] * _MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["disk_mib"] * _MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # where memory runs out, the code goes first
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

    is_program = job["test"] is None
    steps = [(job["code"], "solution.py"), (job["test"], "test.py")][: 1 if is_program else 2]
    job.clear()
    # Looked up now, as the code may replace them.
    write = os.write
    read = os.pread
    leave = os._exit
    try:
        _call(steps, "__main__" if is_program else "solution")
    except BaseException as error:
        is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if not (is_exit and is_program):
            said = " ".join(traceback.format_exception_only(error)[-1].split())
            write(3, said.encode(errors="replace")[:_KEPT])
            leave(1)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    write(3, read(_NONCE_FD, 64, 0))
    leave(0)


def _call(steps: list[tuple[str, str]], name: str) -> None:
    """The code as a program that reads stdin, or as a module that a test looks at. The test is
    compiled before the code runs, and run by the `exec` of before."""
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.argv = ["solution.py"]
    run, report, builtins_before = exec, _reporter(os.write), dict(vars(builtins))
    code, *tests = (compile(text, file, "exec") for text, file in steps)
    steps.clear()
    names = {"__name__": name}
    run(code, names)
    # The code may have put its own in their place, and the tests would call them.
    builtins.__dict__.update(builtins_before)
    names["__report__"] = report
    for test in tests:
        run(test, names)


# ---- what a test reports


_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _reporter(write: Callable[[int, bytes], int]) -> Callable[..., None]:
    """Makes the function that replaces an assert in a test (code_checks.py): it writes the values
    of the operands, a line each, for the process that compares them."""
    # not looked up by a name that the code can change
    compare = dict(_COMPARE)
    dumps = json.dumps

    def report(number: int, signs: tuple[str, ...], *values: Any) -> None:
        written = []
        for value in values:
            try:
                written.append(encoded(value))
            except (TypeError, RecursionError):
                written.append({"opaque": 0})
        own = None
        if {"opaque": 0} in written:
            # of objects of the code alone: what they make of each other
            pairs = zip(signs, values, values[1:], strict=False)
            own = all(compare[sign](*pair) for sign, *pair in pairs) and bool(
                signs or values[0]
            )
        line = dumps([number, written, own]).encode() + b"\n"
        while line:
            line = line[write(3, line) :]

    return report


_KEYS = type({}.keys())
_ITEMS = type({}.items())


def encoded(value: object) -> Any:
    """A plain value as JSON holds it. Subclasses become what they are a subclass of. Raises
    TypeError for one that is not plain."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {"int": hex(int.__index__(value))}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encoded(item) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(item)] for key, item in dict.items(value)]}
    if isinstance(value, tuple):
        return {"tuple": [encoded(item) for item in tuple.__iter__(value)]}
    if isinstance(value, set | frozenset | _KEYS | _ITEMS):
        return {"set": [encoded(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [encoded(value.real), encoded(value.imag)]}
    if isinstance(value, range):
        return {"range": [encoded(n) for n in (value.start, value.stop, value.step)]}
    # Numbers of modules that the code may have imported.
    kind = type(value)
    if kind.__name__ == "Fraction" and kind.__module__ == "fractions":
        return {"Fraction": [encoded(value.numerator), encoded(value.denominator)]}
    if kind.__name__ == "Decimal" and kind.__module__ == "decimal":
        return {"Decimal": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encoded(value.item())
    raise TypeError(f"{kind.__name__} is not plain")


if __name__ == "__main__":
    main()
