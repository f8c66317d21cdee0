"""Flags of other launchers before the program: `--nproc_per_node=4` of torchrun and
`--num_processes 4` of accelerate are answered with the line to type here."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

# Flags of the launcher, each followed by a value.
OURS = ("--nprocs", "--max-restarts", "--stall-timeout", "--grace")
# They end the flags.
ENDS = ("-h", "--help", "--")
# A name elsewhere, in the spelling with underscores -> what it is here.
PER_MACHINE = {"nproc_per_node", "nproc", "np", "n", "num_gpus", "n_gpus_per_node", "gpus_per_node"}
PER_MACHINE |= {"nprocs", "num_procs", "ntasks_per_node"}
IN_ALL = {"num_processes", "world_size", "ntasks"}
MACHINES = {"nnodes", "num_machines", "num_nodes", "nodes"}
MACHINE = {"node_rank", "machine_rank"}
ADDRESS = {"master_addr", "main_process_ip", "rdzv_endpoint", "coordinator_address"}
PORT = {"master_port", "main_process_port"}
SAME = {name.lstrip("-").replace("-", "_"): name for name in OURS}
# What the launcher does or needs no word for; a flag without a value.
SWITCHES = {"standalone", "multi_gpu", "tpu", "cpu", "use_fsdp", "use_deepspeed", "same_network"}
SWITCHES |= {"no_python", "run_path", "module", "use_env", "m", "multirun"}
# The same, with a value.
NEEDLESS = {"rdzv_backend", "rdzv_id", "rdzv_conf", "gpu_ids", "num_cpu_threads_per_process"}
NEEDLESS |= {"dynamo_backend", "start_method", "monitor_interval", "log_dir", "tee", "redirects"}
PRECISION = {"bf16": "bf16", "fp16": "bf16", "no": "fp32", "fp32": "fp32"}
# Words with which a program begins, that are no value of a flag before them.
PROGRAMS = ("check", "evaluate", "train")


@dataclass
class _Meaning:
    """What the flags of a line come to here."""

    flags: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    machines: int = 1
    machine: int = 0
    # the number of processes, and whether it is that of all machines
    processes: int | None = None
    is_of_all: bool = False
    unknown: list[str] = field(default_factory=list)


# (name, value) of a flag -> the settings of a run that it means; (): none
OverridesOf = Callable[[str, str], Iterable[str]]


def foreign_flags_answer(
    arguments: list[str], overrides_of: OverridesOf = lambda name, value: ()
) -> str | None:
    """The message for flags that are not the launcher's; None: there are none.

    overrides_of: for flags of the run that stand before the program, such as --bf16.

    Example: ["--nproc_per_node=2", "run_training.py"] -> "--nproc_per_node=2: torchrun's and
    accelerate's flags have other names here; type: tunix-lite launch --nprocs=2 run_training.py".
    """
    flags, program = _split(arguments)
    foreign = [text for text, name, _ in flags if name not in OURS]
    if not foreign:
        return None
    meaning = _Meaning()
    for text, name, value in flags:
        name = name.lstrip("-").replace("-", "_").lower()
        if not _read(meaning, text, name, value):
            overrides = overrides_of(name, value)
            meaning.overrides += overrides
            meaning.unknown += [] if overrides else [text]
    shown = " ".join(foreign)
    if meaning.unknown:
        known = ", ".join(OURS)
        return (
            f"{' '.join(meaning.unknown)}: the launcher has no such flag; it has {known}, and "
            "settings of the run are written key=value, without dashes"
        )
    return f"{shown}: the flags of other launchers have other names here; type: " + _line(
        meaning, program
    )


def _split(arguments: list[str]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(as typed, flag, value) of each flag before the program, and the words of the program."""
    rest = list(arguments)
    found = []
    while rest and rest[0].startswith("-") and rest[0] not in ENDS:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        is_switch = flag.lstrip("-").replace("-", "_").lower() in SWITCHES
        if not equals and not is_switch and rest and _is_value(rest[0]):
            value = rest.pop(0)
            word = f"{word} {value}"
        found.append((word, flag, value))
    return found, rest


def _is_value(word: str) -> bool:
    return not (word.startswith("-") or "=" in word or word.endswith(".py") or word in PROGRAMS)


def _read(meaning: _Meaning, text: str, name: str, value: str) -> bool:
    """Adds what a flag means here. False: it is none of another launcher."""
    count = int(value) if value.isdecimal() else None
    if name in PER_MACHINE | IN_ALL:
        # `auto` and `gpu`: one process uses all devices of a machine
        meaning.processes = count
        meaning.is_of_all = name in IN_ALL
    elif name in MACHINES:
        # torchrun writes an elastic job as 1:4
        meaning.machines = int(value.rpartition(":")[2]) if value[-1:].isdecimal() else 1
    elif name in MACHINE:
        meaning.machine = count or 0
    elif name in ADDRESS:
        host, _, port = value.partition(":")
        meaning.variables["MASTER_ADDR"] = host
        meaning.variables |= {"MASTER_PORT": port} if port else {}
    elif name in PORT:
        meaning.variables["MASTER_PORT"] = value
    elif name in SAME:
        meaning.flags[SAME[name]] = value
    elif name == "mixed_precision" and value in PRECISION:
        meaning.overrides.append(f"training.mixed_precision={PRECISION[value]}")
    elif name == "gradient_accumulation_steps":
        meaning.overrides.append(f"training.gradient_accumulation_steps={value}")
    elif name in ("m", "multirun"):
        # Hydra's, which stands behind the program
        meaning.overrides.append("--multirun")
    else:
        return name in SWITCHES | NEEDLESS
    return True


def _line(meaning: _Meaning, program: Iterable[str]) -> str:
    """The line to type; of several machines, with the variables that name them."""
    here = meaning.processes or 1
    if meaning.is_of_all:
        here = max(1, here // meaning.machines)
    variables: Mapping[str, str] = meaning.variables
    after = ""
    if meaning.machines > 1:
        variables = {"MASTER_ADDR": "HOST"} | meaning.variables
        variables["WORLD_SIZE"] = str(here * meaning.machines)
        variables["RANK"] = str(here * meaning.machine)
        after = f" (RANK is {here} more on each further machine)"
    words = [f"{name}={value}" for name, value in variables.items()]
    words += ["tunix-lite", "launch", *([f"--nprocs={here}"] if here > 1 else [])]
    words += [f"{name}={value}" for name, value in meaning.flags.items()]
    words += [*program, *meaning.overrides]
    return shlex.join(words) + after
