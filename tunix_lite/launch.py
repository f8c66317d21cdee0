"""`python -m tunix_lite.launch --nprocs=4 run_training.py key=value ...`: starts the processes of a run, and watches.

On one machine nothing else is needed. On several, MASTER_ADDR, MASTER_PORT and WORLD_SIZE are the same on all and RANK
is the number of the first process of this one. Whatever happens to a process, the others do not outlive it for long.
"""

import argparse
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tunix_lite.parallel.place import Launch, find_place
from tunix_lite.supervisor import Rules, supervise

SHOWS_ONLY = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}  # flags of Hydra's that run nothing
OWN = ("--nprocs", "--max-restarts", "--stall-timeout", "--grace")
SWEEPS = {"--multirun", "-m"}


@dataclass(frozen=True)
class Group:
    """The processes that are started here, among all of the run."""

    nprocs: int
    world: int
    first: int = 0  # the number of the first one here
    address: str = "127.0.0.1"
    port: str | None = None  # null: a free one of this machine, another each time

    def environments(self) -> list[dict[str, str]]:
        port = self.port or str(free_port())
        same = {"MASTER_ADDR": self.address, "MASTER_PORT": port, "WORLD_SIZE": str(self.world)}
        same |= {"LOCAL_WORLD_SIZE": str(self.nprocs)}
        return [same | {"RANK": str(self.first + i), "LOCAL_RANK": str(i)} for i in range(self.nprocs)]


def main(arguments: list[str] | None = None) -> None:
    known = parsed(sys.argv[1:] if arguments is None else arguments)
    program = known.program[1:] if known.program[:1] == ["--"] else known.program
    try:
        if late := next((word for word in program if word.startswith(OWN)), None):
            raise ValueError(f"{late} is the launcher's: it stands before the program and its settings")
        group, rules = group_of(known.nprocs, os.environ), rules_of(known, program)
        if rules.max_restarts and SWEEPS & set(program):
            raise ValueError("launch.max_restarts is for one run: with --multirun it would begin all of them again")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if group.first == 0 and not SHOWS_ONLY & set(program) and folder_given(program) is None:
        program = program + in_folder(fresh_folder(project_name(program)), program)  # of every restart, too
    sys.exit(supervise(command(program), group.environments, logs_of(program), rules))


def parsed(arguments: list[str]) -> argparse.Namespace:
    about = "Starts the processes of a run on this machine and watches them; the first one has the screen."
    parser = argparse.ArgumentParser("tunix-lite launch", description=about, allow_abbrev=False)
    parser.add_argument("--nprocs", type=int, default=1, metavar="N", help="processes on this machine; 1")
    parser.add_argument("--max-restarts", type=int, metavar="N", help="as launch.max_restarts=N")
    parser.add_argument("--stall-timeout", type=float, metavar="SECONDS", help="as launch.stall_timeout=SECONDS")
    parser.add_argument(
        "--grace", type=float, default=5, metavar="SECONDS", help="between asking a process to end and ending it; 5"
    )
    what = "what each runs: FILE.py key=value ...; without a file it is tunix-lite train"
    parser.add_argument("program", nargs=argparse.REMAINDER, help=what)
    return parser.parse_args(arguments)


def group_of(nprocs: int, environ: Mapping[str, str]) -> Group:
    """Who is started here, by what the environment says of other machines. Raises ValueError."""
    if nprocs < 1:
        raise ValueError(f"--nprocs={nprocs} must be at least 1")
    if "WORLD_SIZE" not in environ:  # Slurm and xpk number machines: each has one launcher
        node = find_place(Launch(), environ)
        if node.coordinator is None:
            return Group(nprocs, nprocs, port=environ.get("MASTER_PORT"))
        host, _, port = node.coordinator.rpartition(":")
        return Group(nprocs, node.num_processes * nprocs, node.process_id * nprocs, host, port)
    if environ["WORLD_SIZE"] == str(nprocs):
        return Group(nprocs, nprocs, 0, environ.get("MASTER_ADDR", "127.0.0.1"), environ.get("MASTER_PORT"))
    place = find_place(Launch(), {name: environ[name] for name in TORCH if name in environ})
    if place.process_id + nprocs > place.num_processes:
        raise ValueError(
            f"RANK={place.process_id} and --nprocs={nprocs} are processes {place.process_id} to "
            f"{place.process_id + nprocs - 1}, but WORLD_SIZE={place.num_processes}: RANK is the number of the first "
            "process on this machine, WORLD_SIZE the number of all on all"
        )
    host, _, port = place.coordinator.rpartition(":")
    return Group(nprocs, place.num_processes, place.process_id, host, port)


TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def rules_of(known: argparse.Namespace, program: list[str]) -> Rules:
    """What the flags say, else what the settings of the run do. Raises ValueError."""
    restarts, stall = known.max_restarts, known.stall_timeout
    if restarts is None:
        restarts = int(_setting("launch.max_restarts", program, Launch.max_restarts))
    if stall is None:
        stall = float(_setting("launch.stall_timeout", program, Launch.stall_timeout))
    if min(restarts, stall, known.grace) < 0:
        raise ValueError("--max-restarts, --stall-timeout and --grace must not be negative")
    return Rules(stall or None, restarts, known.grace)


def _setting(name: str, program: list[str], default):
    return next((word.partition("=")[2] for word in reversed(program) if word.startswith(f"{name}=")), default)


def command(program: list[str]) -> list[str]:
    is_file = bool(program) and program[0].endswith(".py")
    return [sys.executable, *([] if is_file else ["-m", "tunix_lite", "train"]), *program]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


# ---- one folder for all


def folder_given(words: list[str]) -> str | None:
    """The folder that a command line says a run, or a sweep, writes to."""
    given = [match[1] for word in words if (match := re.fullmatch(r"hydra\.(?:run|sweep)\.dir=(.*)", word))]
    return given[-1] if given else None


def in_folder(folder: str, words: list[str]) -> list[str]:
    """What a command line lacks to write there."""
    return [f"hydra.sweep.dir={folder}-sweep" if SWEEPS & set(words) else f"hydra.run.dir={folder}"]


def fresh_folder(project: str) -> str:
    """Where a run that starts now writes to by itself, as conf/config.yaml says."""
    return f"outputs/{project}/{datetime.now():%Y-%m-%d/%H-%M-%S}"


def project_name(words: list[str]) -> str:
    return _setting("project_name", words, "tunix_lite")


def logs_of(program: list[str]) -> Path:
    """Where what the processes say is kept: with the run, as far as its folder is known."""
    folder = folder_given(program)
    return Path("launch-logs") if folder is None or "$" in folder else Path(folder) / "launch"


if __name__ == "__main__":
    main()
