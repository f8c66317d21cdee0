"""`python -m tunix_lite.launch --nprocs=4 run_training.py key=value ...`: starts a run's processes.

On one machine nothing else is needed. On several machines, start a launcher on each, with the same
MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and with the number of its first process as RANK. The
launcher also watches its processes (distributed/supervisor.py). It imports neither jax nor Hydra,
so it starts at once; hence it reads the few settings that concern it by itself.
"""

import argparse
import contextlib
import math
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tunix_lite.distributed.launcher_flags import OURS, OverridesOf, foreign_flags_answer
from tunix_lite.distributed.process_place import ASK_JAX, LaunchConfig, find_place
from tunix_lite.distributed.supervisor import RestartPolicy, supervise
from tunix_lite.files.addresses import check_on_disk

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
    overrides_of: as launcher_flags.foreign_flags_answer takes it.

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
        check_no_process_ids(program, group.world)
        rules = restart_policy(known, program)
        if rules.max_restarts and SWEEPS & set(program):
            raise ValueError(
                "launch.max_restarts is for one run: with --multirun it would begin all of them "
                "again"
            )
        if rules.max_restarts and "${now" in (folder_given(program) or ""):
            raise ValueError(
                "launch.max_restarts needs a hydra.run.dir that is the same at every start, "
                "without ${now:...}"
            )
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

    # Slurm and xpk number the machines; each machine has one launcher.
    if "WORLD_SIZE" not in environ:
        node = find_place(LaunchConfig(), environ)
        if node.coordinator is None:
            return LocalProcesses(nprocs, nprocs, port=environ.get("MASTER_PORT"))
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
        return LocalProcesses(
            nprocs, nprocs, 0, environ.get("MASTER_ADDR", "127.0.0.1"), environ.get("MASTER_PORT")
        )

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
    """When to give up and restart: by the launcher's flags, else by the settings of the run.

    Raises ValueError.
    """
    restarts = known.max_restarts
    stall = known.stall_timeout
    settings = settings_of_launch(program) if None in (restarts, stall) else {}
    if restarts is None:
        restarts = _number("max_restarts", settings, int, "a whole number, 0 or more")
    if stall is None:
        stall = _number("stall_timeout", settings, float, "a number of seconds; 0 sets no limit")
    if not all(0 <= number < math.inf for number in (restarts, stall, known.grace)):
        raise ValueError(
            "--max-restarts, --stall-timeout and --grace must be finite and not negative"
        )
    return RestartPolicy(stall or None, restarts, known.grace)


def _number(name: str, settings: dict, kind: type, meant: str) -> int | float:
    """The setting launch.NAME as a number. meant: what it must be, for the error."""
    value = settings.get(name, getattr(LaunchConfig, name))
    if "${" in str(value):
        raise ValueError(
            f"launch.{name}={value}: the launcher does not resolve references; {REMEDY}"
        )
    try:
        number = kind(str(value))
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise ValueError(f"launch.{name}={'null' if value is None else value}: it is {meant}")
    return number


def check_no_process_ids(program: list[str], world: int) -> None:
    """Raises ValueError if settings say which process this is: all here would be the same one.

    world: the number of processes of the run. launch.coordinator=auto is allowed for one process.
    """
    removed = next((word for word in program if re.match(r"~launch\b", word)), None)
    if removed is not None:
        raise ValueError(
            f"{removed}: the launcher needs the settings of launch; give a value instead"
        )
    settings = _of_command_line(program)
    with contextlib.suppress(ValueError):
        settings = settings_of_launch(program)
    for name in ("coordinator", "num_processes", "process_id"):
        value = settings.get(name)
        if value in (None, "null") or (value == ASK_JAX and world == 1):
            continue
        raise ValueError(
            f"launch.{name}={value}: the launcher numbers the processes; for several "
            "machines it reads "
            "MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK"
        )


# ---- settings, read without Hydra


REMEDY = "give them to the launcher: tunix-lite launch --max-restarts=N --stall-timeout=SECONDS"


def settings_of_launch(program: list[str]) -> dict:
    """The settings launch.* by the files and the command line of the run.

    Raises ValueError where only Hydra could say what they are.
    """
    folders = conf_folders(program)
    chosen, own = _of_main_file(_hydra_flags(program).config_name or "config", folders)
    option = str(setting_given("launch", program) or chosen or "default")

    # Another option that sets launch.* would be overlooked.
    for file in _other_options(program, folders):
        if re.search(r"(?m)^[^#\n]*\blaunch[\w.]*:", file.read_text(errors="replace")):
            raise ValueError(
                f"{file} has settings of launch, which the launcher does not read there; {REMEDY}"
            )

    # config.yaml comes after the option that it names, and the command line last.
    return _of_option(option, folders) | own | _of_command_line(program)


def _of_main_file(
    config_name: str, folders: list[Path], within: tuple[str, ...] = ()
) -> tuple[str | None, dict]:
    """The option of launch that config.yaml names, and the settings launch.* in it; or those of the
    file that --config-name names, after those of the files in its defaults list.

    within: the files that name this one. Raises ValueError.
    """
    name = config_name.removesuffix(".yaml")
    file = next((f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").is_file()), None)
    if file is None or name in within:
        raise ValueError(f"--config-name={config_name} cannot be read; {REMEDY}")
    main = _yaml(file)
    option = None
    own: dict = {}
    for entry in main.get("defaults") or []:
        if isinstance(entry, dict):
            option = entry.get("launch", entry.get("override launch", option))
        elif entry != "_self_":
            found, settings = _of_main_file(str(entry), folders, (*within, name))
            option = found or option
            own |= settings
    more = main.get("launch")
    return option, own | more if isinstance(more, dict) else own


def _other_options(program: list[str], folders: list[Path]) -> list[Path]:
    """The files of the options that are chosen as group=option, of all groups but launch."""
    files = []
    for word in program:
        match = re.fullmatch(r"\+?(\w[\w/]*)=(['\"]?)([\w./-]{1,100})\2", word)
        if match and match[1] != "launch":
            files += [folder / match[1] / f"{match[3]}.yaml" for folder in folders]
    return [file for file in files if file.is_file()]


def conf_folders(program: list[str]) -> list[Path]:
    """The folders in which Hydra looks for options, in its order: conf/ comes first.

    Raises ValueError.
    """
    known = _hydra_flags(program)
    if known.config_path:
        raise ValueError(f"--config-path is not read by the launcher; {REMEDY}")
    search_path = (setting_given("hydra.searchpath", program) or "").strip("[] ")
    more = [known.config_dir]
    for entry in re.split(r"[\s,]+", search_path):
        if "pkg:" not in entry:
            more.append(_unquoted(entry).removeprefix("file://"))
    return [conf_dir(), *(Path(folder) for folder in more if folder)]


def _hydra_flags(program: list[str]) -> argparse.Namespace:
    """Hydra's flags on the command line of a program that say where settings come from."""
    parser = argparse.ArgumentParser(add_help=False)
    for flags in (
        ("--config-dir", "-cd"),
        ("--config-name", "-cn"),
        ("--config-path", "-cp"),
        ("--cfg", "-c"),
    ):
        parser.add_argument(*flags, nargs="?")
    known, _ = parser.parse_known_args(program)
    return known


def conf_dir() -> Path:
    """The folder conf/ of this checkout, or the copy of it in an installed package."""
    checkout = PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "conf"


def _of_option(option: str, folders: list[Path], within: tuple[str, ...] = ()) -> dict:
    """The settings in conf/launch/OPTION.yaml, and in the options that its defaults list names.

    within: the options that name this one; an option that names itself would never end. Raises
    ValueError.
    """
    name = option.removesuffix(".yaml")
    if name in within or len(name) > 100:
        raise ValueError(f"launch={option} cannot be read; {REMEDY}")
    files = [folder / "launch" / f"{name}.yaml" for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        where = " or ".join(str(folder / "launch") for folder in folders)
        raise ValueError(f"launch={option}: there is no {name}.yaml in {where}; {REMEDY}")

    # Later entries of the defaults list override earlier ones; _self_ is the file itself.
    own = _yaml(file)
    order = own.pop("defaults", None) or []
    if "_self_" not in order:
        order = [*order, "_self_"]
    values = {}
    for entry in order:
        if not isinstance(entry, str):
            raise ValueError(f"{file}: the launcher does not read {entry} in defaults; {REMEDY}")
        values |= own if entry == "_self_" else _of_option(entry, folders, (*within, name))
    return values


def _yaml(file: Path) -> dict:
    """What a YAML file holds. Raises ValueError."""
    import yaml

    try:
        return dict(yaml.safe_load(file.read_text()) or {})
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _of_command_line(program: list[str]) -> dict[str, str]:
    """The settings launch.* that the command line gives."""
    matches = [re.match(r"\+{0,2}launch\.(\w+)=", word) for word in program]
    names = {match[1] for match in matches if match}
    return {name: setting_given(f"launch.{name}", program) for name in names}


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
    # If the file cannot be read, the run itself will say why.
    with contextlib.suppress(ValueError):
        given = setting_given("project_name", words)
        return given or str(_yaml(conf_dir() / "config.yaml")["project_name"])
    return "tunix_lite"


def logs_of(program: list[str]) -> Path:
    """The folder for the output of the processes: in the run's folder, if that is known."""
    if program[:1] == ["check"]:
        return Path("outputs") / "check"
    folder = folder_given(program)
    return Path("launch-logs") if folder is None or "$" in folder else Path(folder) / "launch"


if __name__ == "__main__":
    main()
