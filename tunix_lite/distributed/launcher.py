"""`python -m tunix_lite.launch --nprocs=4 run_training.py key=value ...`: starts a run's processes.

On one machine nothing else is needed. On several machines, start a launcher on each, with the same
MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and with the number of its first process as RANK. The
launcher also watches its processes (distributed/supervisor.py). It imports neither jax nor Hydra,
so it starts at once; the processes report what their files of settings say of it.
"""

import argparse
import contextlib
import math
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tunix_lite.distributed.process_place import (
    IDS,
    LaunchConfig,
    check_no_process_ids,
    find_place,
    is_of_a_service,
)
from tunix_lite.distributed.supervisor import RestartPolicy, supervise
from tunix_lite.files.addresses import check_on_disk

# Flags of the launcher, each followed by a value.
OURS = ("--nprocs", "--max-restarts", "--stall-timeout", "--grace")
# Flags of torchrun and accelerate, with underscores, and what they are here. Of several machines
# only a person knows which variables are set where.
ELSEWHERE = {"nproc_per_node": "--nprocs", "num_processes": "--nprocs"}
ELSEWHERE |= {name.lstrip("-").replace("-", "_"): name for name in OURS}
MACHINES = {"nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "num_machines"}
MACHINES |= {"machine_rank", "main_process_ip", "main_process_port"}
NEEDLESS = {"standalone", "multi_gpu"}
# (name, value) of a flag -> the settings of a run that it means; (): none
OverridesOf = Callable[[str, str], Iterable[str]]
# Flags of Hydra that show something, and run nothing.
SHOWS_ONLY = {
    "--help",
    "-h",
    "--hydra-help",
    "--cfg",
    "-c",
    "--info",
    "-i",
}
MANY = (
    " (on each machine, with MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in the environment; "
    "--nprocs counts the processes of this one)"
)
# The commands that several processes can run together.
COMMANDS = ("train", "evaluate", "check")
FOLDER_KEYS = r"hydra\.(?:run|sweep)\.dir"
SWEEPS = {"--multirun", "-m"}
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class LocalProcesses:
    """The processes that this launcher starts, among all of the run.

    Example: `LocalProcesses(4, 8, 4, "10.0.0.1", "29500")`, the second of two machines with four
    processes each.
    """

    # how many are started here
    nprocs: int
    # how many the whole run has
    world: int
    # the id of the first one here
    first: int = 0
    # where process 0 listens; port None: a free one of this machine, a new one for each attempt
    address: str = "127.0.0.1"
    port: str | None = None

    def environments(self) -> list[dict[str, str]]:
        """The variables for each process here, with the names of torchrun."""
        shared = {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port or str(free_port()),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
        }
        return [
            shared | {"RANK": str(self.first + i), "LOCAL_RANK": str(i)} for i in range(self.nprocs)
        ]


def main(
    arguments: list[str] | None = None, overrides_of: OverridesOf = lambda name, value: ()
) -> None:
    """The command `tunix-lite launch`. arguments: of the command line; None: those of this process.
    overrides_of: as foreign_flags_answer takes it.

    Ends the process: with 2 after a message if the arguments or settings are wrong, else with the
    exit code of the run.
    """
    known = parsed(sys.argv[1:] if arguments is None else arguments, overrides_of)
    program = known.program[1:] if known.program[:1] == ["--"] else known.program

    # All that can be wrong is found before a process is started.
    try:
        late = next((word for word in program if word.startswith(OURS)), None)
        if late is not None:
            raise ValueError(
                f"{late} is a flag of the launcher: write it before the program and its settings"
            )
        check_on_disk(folder_key(program), folder_given(program))
        check_config_dir(config_dir(program))
        group = local_processes(known.nprocs, os.environ)
        ids = {name: setting_given(f"launch.{name}", program) for name in IDS}
        check_no_process_ids(ids, group.world)
        rules = restart_policy(known, program)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

    # The folder is chosen here, so that every restart writes to the same one.
    writes = program[:1] not in (["check"], ["evaluate"]) and not SHOWS_ONLY & set(program)
    if group.first == 0 and writes and folder_given(program) is None:
        program = program + in_folder(fresh_folder(project_name(program), program), program)

    try:
        code = supervise(process_command(program), group.environments, logs_of(program), rules)
    # No memory for another process, or no temporary folder.
    except OSError as error:
        print(
            f"error: the launcher has stopped, and has ended its processes: {error}",
            file=sys.stderr,
        )
        code = 1
    sys.exit(code)


def parsed(
    arguments: list[str], overrides_of: OverridesOf = lambda name, value: ()
) -> argparse.Namespace:
    """The launcher's own flags, and as `program` the words that follow them."""
    about = (
        "Starts the processes of a run on this machine and watches them; the first one has the "
        "screen."
    )
    parser = argparse.ArgumentParser(
        "tunix-lite launch", description=about, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument(
        "--nprocs", type=_count, default=1, metavar="N", help="processes on this machine; 1"
    )
    parser.add_argument("--max-restarts", type=int, metavar="N", help="as launch.max_restarts=N")
    parser.add_argument(
        "--stall-timeout", type=float, metavar="SECONDS", help="as launch.stall_timeout=SECONDS"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5,
        metavar="SECONDS",
        help="between asking a process to end and ending it; 5",
    )
    what = "what each runs: FILE.py key=value ..., check or evaluate ...; else tunix-lite train"
    parser.add_argument("program", nargs=argparse.REMAINDER, help=what)
    try:
        if (answer := foreign_flags_answer(arguments, overrides_of)) is not None:
            raise ValueError(answer)
        return parser.parse_args(arguments)
    except (ValueError, argparse.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def foreign_flags_answer(
    arguments: list[str], overrides_of: OverridesOf = lambda name, value: ()
) -> str | None:
    """The message for flags that are not the launcher's; None: there are none.

    overrides_of: for flags of the run that stand before the program, such as --bf16.

    Example: ["--nproc_per_node=2", "run_training.py"] -> "--nproc_per_node=2: the flags of other
    launchers have other names here; type: tunix-lite launch --nprocs=2 run_training.py".
    """
    foreign = []
    flags = []
    overrides: list[str] = []
    after = ""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-h", "--help", "--"):
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        follows = rest[0] if rest and not equals and name not in NEEDLESS else ""
        if re.fullmatch(r"[\w.:]+", follows) and follows[-3:] != ".py" and follows not in COMMANDS:
            value = rest.pop(0)
        foreign += [] if flag in OURS else [word]
        if name in ELSEWHERE:
            # `auto` and `gpu`: one process uses all devices of a machine
            flags += [f"{ELSEWHERE[name]}={value}"] if flag in OURS or value.isdecimal() else []
        elif name in MACHINES:
            is_one = name in ("nnodes", "num_machines") and value == "1"
            after = after if is_one else MANY
        elif settings := overrides_of(name, value):
            overrides += settings
        elif name not in NEEDLESS:
            return (
                f"{word}: the launcher has no such flag; it has {', '.join(OURS)}, and settings of "
                "the run are written key=value, without dashes, after the program"
            )
    if not foreign:
        return None
    line = shlex.join(["tunix-lite", "launch", *flags, *rest, *overrides])
    shown = " ".join(foreign)
    return f"{shown}: the flags of other launchers have other names here; type: {line}{after}"


def _count(text: str) -> int:
    """--nprocs as a number. Raises ArgumentTypeError, for torchrun's `auto` and `gpu`, too."""
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text}: it is a number; one process uses all devices that it sees, so the default "
            "of 1 is enough on a machine"
        )
    return int(text)


def local_processes(nprocs: int, environ: Mapping[str, str]) -> LocalProcesses:
    """The processes to start here, by --nprocs and by the variables that name other machines.

    Raises ValueError if they contradict each other.
    """
    if nprocs < 1:
        raise ValueError(f"--nprocs={nprocs} must be at least 1")

    # On one machine the launcher finds a port itself.
    port = environ.get("MASTER_PORT")
    port = None if is_of_a_service(port) else port

    # Slurm and xpk number the machines; each machine has one launcher.
    if "WORLD_SIZE" not in environ:
        node = find_place(LaunchConfig(), environ)
        if node.coordinator is None:
            return LocalProcesses(nprocs, nprocs, port=port)
        host, _, port = node.coordinator.rpartition(":")
        return LocalProcesses(
            nprocs, node.num_processes * nprocs, node.process_id * nprocs, host, port
        )

    # All processes of the run are on this machine.
    if environ["WORLD_SIZE"].strip() == str(nprocs):
        rank = environ.get("RANK", "0").strip()
        if rank.strip("0"):
            raise ValueError(
                f"RANK={rank}, but WORLD_SIZE={nprocs} and --nprocs={nprocs}: then all processes "
                "are on this machine, and RANK must be 0; WORLD_SIZE counts the processes of all "
                "machines"
            )
        address = environ.get("MASTER_ADDR", "127.0.0.1")
        address = "127.0.0.1" if is_of_a_service(address) else address
        return LocalProcesses(nprocs, nprocs, 0, address, port)

    # Several machines, with the variables of torchrun.
    place = find_place(LaunchConfig(), {name: environ[name] for name in TORCH if name in environ})
    if place.process_id + nprocs > place.num_processes:
        raise ValueError(
            f"RANK={place.process_id} and --nprocs={nprocs} are processes {place.process_id} to "
            f"{place.process_id + nprocs - 1}, but WORLD_SIZE={place.num_processes}: RANK is the "
            "number of the first "
            "process on this machine, and WORLD_SIZE counts the processes of all machines"
        )
    host, _, port = place.coordinator.rpartition(":")
    return LocalProcesses(nprocs, place.num_processes, place.process_id, host, port)


TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def restart_policy(known: argparse.Namespace, program: list[str]) -> RestartPolicy:
    """When to give up and restart: by the launcher's flags, else by the command line of the run.

    What neither of them says, the processes report from the files of their settings. Raises
    ValueError.
    """
    restarts = known.max_restarts
    stall = known.stall_timeout
    if restarts is None:
        restarts = _number("max_restarts", program, int, "a whole number, 0 or more")
    if stall is None:
        stall = _number("stall_timeout", program, float, "a number of seconds; 0 sets no limit")
    if not all(0 <= number < math.inf for number in (restarts or 0, stall or 0, known.grace)):
        raise ValueError(
            "--max-restarts, --stall-timeout and --grace must be finite and not negative"
        )

    # Why a run of this command line cannot be started again.
    never = ""
    if SWEEPS & set(program):
        never = "is for one run: with --multirun it would begin all of them again"
    elif "${now" in (folder_given(program) or ""):
        never = "needs a hydra.run.dir that is the same at every start, without ${now:...}"
    never = never and f"launch.max_restarts {never}"
    if restarts and never:
        raise ValueError(never)
    return RestartPolicy(stall, restarts, known.grace, never)


def _number(name: str, program: list[str], kind: type, meant: str) -> int | float | None:
    """The setting launch.NAME of a command line as a number; None: it is not given.

    meant: what it must be, for the error.
    """
    value = setting_given(f"launch.{name}", program)
    if value is None:
        return None
    try:
        number = kind(value)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise ValueError(f"launch.{name}={value}: it is {meant}")
    return number


# ---- settings, read without Hydra


def conf_dir() -> Path:
    """The folder conf/ of this checkout, or the copy of it in an installed package."""
    checkout = PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "conf"


def setting_given(key: str, words: list[str]) -> str | None:
    """The value of a setting on a command line, without quotes; None if it is not given.

    key: a regular expression for its name. Hydra's ways to write it are key=, +key= and ++key=. The
    last one counts.
    """
    matches = [re.fullmatch(rf"\+{{0,2}}(?:{key})=(.*)", word, re.DOTALL) for word in words]
    found = [match[1] for match in matches if match]
    return _unquoted(found[-1]) if found else None


def _unquoted(text: str) -> str:
    """A value without quotes or backslashes, as Hydra reads it."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text)


def process_command(program: list[str]) -> list[str]:
    """The command that each process runs: a file, one of COMMANDS, or else `tunix-lite train`."""
    first = program[0] if program else ""
    module = ["-m", "tunix_lite"]
    if first.endswith(".py"):
        module = []
    elif first not in COMMANDS:
        module += ["train"]
    return [sys.executable, *module, *program]


def free_port() -> int:
    """A port of this machine that no program listens at."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


# ---- one folder for all processes


def folder_given(words: list[str]) -> str | None:
    """The folder of the run, or of the sweep, that a command line gives; None if it gives none."""
    return setting_given(FOLDER_KEYS, words)


def folder_key(words: list[str]) -> str:
    """The setting that gives it: hydra.run.dir or hydra.sweep.dir, the last one on the line."""
    matches = [re.match(rf"\+{{0,2}}({FOLDER_KEYS})=", word) for word in words]
    keys = [match[1] for match in matches if match]
    return keys[-1] if keys else "hydra.run.dir"


def config_dir(words: list[str]) -> str | None:
    """The folder of the user's own options that --config-dir gives; None if it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    return parser.parse_known_args(words)[0].config_dir


def check_config_dir(folder: str | None) -> None:
    """Raises ValueError if --config-dir names no folder. None: it is not given."""
    check_on_disk("--config-dir", folder)
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"--config-dir={folder}: there is no such folder")


def in_folder(folder: str, words: list[str]) -> list[str]:
    """The words to add to a command line, so that its run or sweep writes to `folder`."""
    key = "sweep" if SWEEPS & set(words) else "run"
    if not re.fullmatch(r"[\w./:@+~$-]+", folder):
        folder = "'" + folder.replace("'", "\\'") + "'"
    return [f"hydra.{key}.dir={folder}"]


def fresh_folder(project: str, words: list[str]) -> str:
    """The folder that conf/config.yaml gives a run, or a sweep, that starts now."""
    sweep = "-sweep" if SWEEPS & set(words) else ""
    return f"outputs/{project}/{datetime.now():%Y-%m-%d/%H-%M-%S}{sweep}"


def project_name(words: list[str]) -> str:
    """The setting project_name, by the command line or conf/config.yaml."""
    given = setting_given("project_name", words)
    if given:
        return given
    import yaml

    # If the file cannot be read, the run itself will say why.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return str(yaml.safe_load((conf_dir() / "config.yaml").read_text())["project_name"])
    return "tunix_lite"


def logs_of(program: list[str]) -> Path:
    """The folder for the output of the processes: in the run's folder, if that is known."""
    if program[:1] == ["check"]:
        return Path("outputs") / "check"
    folder = folder_given(program)
    return Path("launch-logs") if folder is None or "$" in folder else Path(folder) / "launch"


if __name__ == "__main__":
    main()
