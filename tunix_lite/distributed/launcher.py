"""`python -m tunix_lite.launch --nprocs=4 run_training.py key=value ...`: starts the processes of a
run, and watches.

On one machine nothing else is needed. On several, MASTER_ADDR, MASTER_PORT and WORLD_SIZE are the
same on all and RANK is the number of the first process of this one. Whatever happens to a process,
the others do not outlive it for long.
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

from tunix_lite.distributed.process_place import ASK_JAX, LaunchConfig, find_place
from tunix_lite.distributed.supervisor import RestartPolicy, supervise
from tunix_lite.files.addresses import check_on_disk

# flags of Hydra's that run nothing
SHOWS_ONLY = {
    "--help",
    "-h",
    "--hydra-help",
    "--cfg",
    "-c",
    "--info",
    "-i",
}
FOLDER_KEYS = r"hydra\.(?:run|sweep)\.dir"
OWN = ("--nprocs", "--max-restarts", "--stall-timeout", "--grace")
SWEEPS = {"--multirun", "-m"}
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class LocalProcesses:
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
        return [
            same | {"RANK": str(self.first + i), "LOCAL_RANK": str(i)} for i in range(self.nprocs)
        ]


def main(arguments: list[str] | None = None) -> None:
    known = parsed(sys.argv[1:] if arguments is None else arguments)
    program = known.program[1:] if known.program[:1] == ["--"] else known.program
    try:
        if late := next((word for word in program if word.startswith(OWN)), None):
            raise ValueError(
                f"{late} is the launcher's: it stands before the program and its settings"
            )
        check_on_disk(folder_key(program), folder_given(program))
        check_config_dir(config_dir(program))
        group = local_processes(known.nprocs, os.environ)
        check_places(program, group.world)
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
    if group.first == 0 and not SHOWS_ONLY & set(program) and folder_given(program) is None:
        # of every restart, too
        program = program + in_folder(fresh_folder(project_name(program), program), program)
    try:
        code = supervise(training_command(program), group.environments, logs_of(program), rules)
    except OSError as error:
        # no memory for another process, no temporary folder
        print(
            f"error: the launcher cannot go on, and has ended its processes: {error}",
            file=sys.stderr,
        )
        code = 1
    sys.exit(code)


def parsed(arguments: list[str]) -> argparse.Namespace:
    about = (
        "Starts the processes of a run on this machine and watches them; the first one has the "
        "screen."
    )
    parser = argparse.ArgumentParser("tunix-lite launch", description=about, allow_abbrev=False)
    parser.add_argument(
        "--nprocs", type=int, default=1, metavar="N", help="processes on this machine; 1"
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
    what = "what each runs: FILE.py key=value ...; without a file it is tunix-lite train"
    parser.add_argument("program", nargs=argparse.REMAINDER, help=what)
    return parser.parse_args(arguments)


def local_processes(nprocs: int, environ: Mapping[str, str]) -> LocalProcesses:
    """Who is started here, by what the environment says of other machines. Raises ValueError."""
    if nprocs < 1:
        raise ValueError(f"--nprocs={nprocs} must be at least 1")
    # Slurm and xpk number machines: each has one launcher
    if "WORLD_SIZE" not in environ:
        node = find_place(LaunchConfig(), environ)
        if node.coordinator is None:
            return LocalProcesses(nprocs, nprocs, port=environ.get("MASTER_PORT"))
        host, _, port = node.coordinator.rpartition(":")
        return LocalProcesses(
            nprocs, node.num_processes * nprocs, node.process_id * nprocs, host, port
        )
    if environ["WORLD_SIZE"].strip() == str(nprocs):
        if (rank := environ.get("RANK", "0").strip()).strip("0"):
            raise ValueError(
                f"RANK={rank}, but WORLD_SIZE={nprocs} and --nprocs={nprocs}: then all are on this "
                "machine, and RANK=0 "
                "is the first; WORLD_SIZE is the number of all on all machines"
            )
        return LocalProcesses(
            nprocs, nprocs, 0, environ.get("MASTER_ADDR", "127.0.0.1"), environ.get("MASTER_PORT")
        )
    place = find_place(LaunchConfig(), {name: environ[name] for name in TORCH if name in environ})
    if place.process_id + nprocs > place.num_processes:
        raise ValueError(
            f"RANK={place.process_id} and --nprocs={nprocs} are processes {place.process_id} to "
            f"{place.process_id + nprocs - 1}, but WORLD_SIZE={place.num_processes}: RANK is the "
            "number of the first "
            "process on this machine, WORLD_SIZE the number of all on all"
        )
    host, _, port = place.coordinator.rpartition(":")
    return LocalProcesses(nprocs, place.num_processes, place.process_id, host, port)


TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def restart_policy(known: argparse.Namespace, program: list[str]) -> RestartPolicy:
    """What the flags say, else what the settings of the run do. Raises ValueError."""
    restarts, stall = known.max_restarts, known.stall_timeout
    settings = settings_of_launch(program) if None in (restarts, stall) else {}
    if restarts is None:
        restarts = _number("max_restarts", settings, int, "a whole number, 0 or more")
    if stall is None:
        stall = _number("stall_timeout", settings, float, "a number of seconds, and 0 for ever")
    if not all(0 <= number < math.inf for number in (restarts, stall, known.grace)):
        raise ValueError(
            "--max-restarts, --stall-timeout and --grace must not be negative, nor without end"
        )
    return RestartPolicy(stall or None, restarts, known.grace)


def _number(name: str, settings: dict, kind: type, meant: str) -> int | float:
    value = settings.get(name, getattr(LaunchConfig, name))
    if "${" in str(value):
        raise ValueError(f"launch.{name}={value}: the launcher cannot fill that in; {REMEDY}")
    try:
        number = kind(str(value))
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise ValueError(f"launch.{name}={'null' if value is None else value}: it is {meant}")
    return number


def check_places(program: list[str], world: int) -> None:
    """Raises ValueError where settings say who the processes are: all that are started here would
    be the same one."""
    if removed := next((word for word in program if re.match(r"~launch\b", word)), None):
        raise ValueError(
            f"{removed}: the launcher reads launch, and cannot do without; give it a value instead"
        )
    settings = _of_command_line(program)
    with contextlib.suppress(ValueError):
        settings = settings_of_launch(program)
    for name in ("coordinator", "num_processes", "process_id"):
        value = settings.get(name)
        if value in (None, "null") or (value == ASK_JAX and world == 1):
            continue
        raise ValueError(
            f"launch.{name}={value}: the launcher says which process each one is; for several "
            "machines it reads "
            "MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK"
        )


# ---- settings, as far as they can be read without Hydra


REMEDY = "--max-restarts=N and --stall-timeout=SECONDS tell the launcher"


def settings_of_launch(program: list[str]) -> dict:
    """launch.* as the files and the command line of the run have it. Raises ValueError where only
    Hydra can tell."""
    folders = conf_folders(program)
    main = _yaml(folders[0] / "config.yaml")
    chosen = [
        entry["launch"]
        for entry in main.get("defaults") or []
        if isinstance(entry, dict) and "launch" in entry
    ]
    option = str(said("launch", program) or next(iter(chosen), "default"))
    for file in _other_options(program, folders):
        if re.search(r"(?m)^[^#\n]*\blaunch[\w.]*:", file.read_text(errors="replace")):
            raise ValueError(
                f"{file} has settings of launch, which the launcher does not read there; {REMEDY}"
            )
    own = main.get("launch")
    return (
        _of_option(option, folders)
        | (own if isinstance(own, dict) else {})
        | _of_command_line(program)
    )


def _other_options(program: list[str], folders: list[Path]) -> list[Path]:
    """The files of the options that are chosen as group=option, of all groups but launch."""
    chosen = [re.fullmatch(r"\+?(\w[\w/]*)=(['\"]?)([\w./-]{1,100})\2", word) for word in program]
    files = [f / m[1] / f"{m[3]}.yaml" for m in chosen if m and m[1] != "launch" for f in folders]
    return [file for file in files if file.is_file()]


def conf_folders(program: list[str]) -> list[Path]:
    """Where Hydra looks, in its order: what conf/ has comes before an option of that name
    elsewhere."""
    parser = argparse.ArgumentParser(add_help=False)
    for flags in (
        ("--config-dir", "-cd"),
        ("--config-name", "-cn"),
        ("--config-path", "-cp"),
        ("--cfg", "-c"),
    ):
        parser.add_argument(*flags, nargs="?")
    known, _ = parser.parse_known_args(program)
    if known.config_name or known.config_path:
        raise ValueError(f"--config-name and --config-path are not read by the launcher; {REMEDY}")
    places = re.split(r"[\s,]+", (said("hydra.searchpath", program) or "").strip("[] "))
    more = [
        known.config_dir,
        *(_unquoted(place).removeprefix("file://") for place in places if "pkg:" not in place),
    ]
    return [conf_dir(), *(Path(folder) for folder in more if folder)]


def conf_dir() -> Path:
    """conf/ of the checkout that this package stands in, or the copy inside an installed
    package."""
    checkout = PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "conf"


def _of_option(option: str, folders: list[Path], within: tuple[str, ...] = ()) -> dict:
    """What conf/launch/OPTION.yaml says, and the options that it begins with. Raises ValueError."""
    name = option.removesuffix(".yaml")
    if name in within or len(name) > 100:
        raise ValueError(f"launch={option} cannot be read; {REMEDY}")
    file = next(
        (f for folder in folders if (f := folder / "launch" / f"{name}.yaml").is_file()), None
    )
    if file is None:
        where = " or ".join(str(folder / "launch") for folder in folders)
        raise ValueError(f"launch={option}: there is no {name}.yaml in {where}; {REMEDY}")
    own = _yaml(file)
    order, values = own.pop("defaults", None) or [], {}
    for entry in order if "_self_" in order else [*order, "_self_"]:
        if not isinstance(entry, str):
            raise ValueError(f"{file}: the launcher does not read {entry} in defaults; {REMEDY}")
        values |= own if entry == "_self_" else _of_option(entry, folders, (*within, name))
    return values


def _yaml(file: Path) -> dict:
    import yaml

    try:
        return dict(yaml.safe_load(file.read_text()) or {})
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _of_command_line(program: list[str]) -> dict[str, str]:
    names = {match[1] for word in program if (match := re.match(r"\+{0,2}launch\.(\w+)=", word))}
    return {name: said(f"launch.{name}", program) for name in names}


def said(key: str, words: list[str]) -> str | None:
    """What a command line says of a setting, written in any of Hydra's ways: key=, +key= or ++key=,
    with quotes."""
    found = [
        match[1]
        for word in words
        if (match := re.fullmatch(rf"\+{{0,2}}(?:{key})=(.*)", word, re.DOTALL))
    ]
    return _unquoted(found[-1]) if found else None


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text)


def training_command(program: list[str]) -> list[str]:
    is_file = bool(program) and program[0].endswith(".py")
    return [sys.executable, *([] if is_file else ["-m", "tunix_lite", "train"]), *program]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


# ---- one folder for all


def folder_given(words: list[str]) -> str | None:
    """The folder that a command line says a run, or a sweep, writes to."""
    return said(FOLDER_KEYS, words)


def folder_key(words: list[str]) -> str:
    """The setting, as it is written last on this command line, that says so."""
    keys = [match[1] for word in words if (match := re.match(rf"\+{{0,2}}({FOLDER_KEYS})=", word))]
    return keys[-1] if keys else "hydra.run.dir"


def config_dir(words: list[str]) -> str | None:
    """The folder of the user's own options that a command line names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    return parser.parse_known_args(words)[0].config_dir


def check_config_dir(folder: str | None) -> None:
    """Raises ValueError unless this is a folder; None is none."""
    check_on_disk("--config-dir", folder)
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"--config-dir={folder}: there is no such folder")


def in_folder(folder: str, words: list[str]) -> list[str]:
    """What a command line lacks to write there."""
    key = "sweep" if SWEEPS & set(words) else "run"
    if not re.fullmatch(r"[\w./:@+~$-]+", folder):
        folder = "'" + folder.replace("'", "\\'") + "'"
    return [f"hydra.{key}.dir={folder}"]


def fresh_folder(project: str, words: list[str]) -> str:
    """Where a run, or a sweep, that starts now writes to by itself, as conf/config.yaml says."""
    sweep = "-sweep" if SWEEPS & set(words) else ""
    return f"outputs/{project}/{datetime.now():%Y-%m-%d/%H-%M-%S}{sweep}"


def project_name(words: list[str]) -> str:
    # the run itself says what is wrong with the file
    with contextlib.suppress(ValueError):
        return said("project_name", words) or str(_yaml(conf_dir() / "config.yaml")["project_name"])
    return "tunix_lite"


def logs_of(program: list[str]) -> Path:
    """Where what the processes say is kept: with the run, as far as its folder is known."""
    folder = folder_given(program)
    return Path("launch-logs") if folder is None or "$" in folder else Path(folder) / "launch"


if __name__ == "__main__":
    main()
