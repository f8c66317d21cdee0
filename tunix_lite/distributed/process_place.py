"""Which of the processes of a run this one is, from its settings or the variables of what started
it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# what torchrun takes where nobody says another
TORCH_PORT = "29500"
# what MaxText does
JAX_PORT = "1234"
ASK_JAX = "auto"


@dataclass(frozen=True)
class LaunchConfig:
    """How the processes of a run find each other, and what their launcher watches; as one process,
    nothing."""

    # host:port of process 0; null: from the variables of what started us; auto: ask jax
    coordinator: str | None = None
    num_processes: int | None = None  # with coordinator: of the whole run
    process_id: int | None = None  # with coordinator: of this one, from 0
    timeout: int = 300  # seconds that processes wait for each other at the start
    heartbeat_timeout: int = 100  # seconds of silence after which jax gives a process up
    # devices of the whole run, or it does not start; null: as many as there are
    expect_devices: int | None = None
    # let tp cross from one machine to another, over a network that is much slower
    tp_across_nodes: bool = False
    # of the launcher: seconds without a step until it stops the run; 0: it waits for ever
    stall_timeout: int = 1800
    # of the launcher: times that a run that failed goes on from its newest checkpoint
    max_restarts: int = 0

    def __post_init__(self):
        for name in ("num_processes", "timeout", "heartbeat_timeout", "expect_devices"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("process_id", "stall_timeout", "max_restarts"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative")


@dataclass(frozen=True)
class ProcessPlace:
    """Which of the processes of a run this one is."""

    process_id: int = 0
    num_processes: int = 1
    coordinator: str | None = None  # host:port of process 0; None: alone, or jax knows
    local_id: int = 0  # among those of this machine
    num_local: int = 1
    source: str = "nothing"  # what said so, as people would look for it
    asks_jax: bool = False  # jax's own detection says the rest


def find_place(launch: LaunchConfig, environ: Mapping[str, str]) -> ProcessPlace:
    """Our place, from settings, torchrun's variables, xpk's, Slurm's, or those that jax knows;
    without any, alone.

    Raises ValueError naming the setting or variable that cannot be, and what would be right.
    """
    places = (
        _of_settings(launch),
        _of_torchrun(environ),
        _of_xpk(environ),
        _of_slurm(environ),
        _of_jax(environ),
    )
    place = next((place for place in places if place is not None), ProcessPlace())
    return place if place.num_processes > 1 or place.asks_jax else ProcessPlace(source=place.source)


def _of_settings(launch: LaunchConfig) -> ProcessPlace | None:
    if launch.coordinator == ASK_JAX:
        return ProcessPlace(source="launch.coordinator=auto", asks_jax=True)
    given = {
        f"launch.{name}": getattr(launch, name)
        for name in ("coordinator", "num_processes", "process_id")
    }
    if all(value is None for value in given.values()) or launch.num_processes == 1:
        return None if launch.num_processes is None else ProcessPlace(source="launch.num_processes")
    if missing := [name for name, value in given.items() if value is None]:
        raise ValueError(
            f"{missing[0]} is missing: launch.coordinator=HOST:PORT, launch.num_processes=N and "
            "launch.process_id=0 "
            "to N-1 belong together"
        )
    host, port = _host_and_port("launch.coordinator", launch.coordinator)
    _check_rank(
        "launch.process_id", launch.process_id, "launch.num_processes", launch.num_processes
    )
    return ProcessPlace(
        launch.process_id, launch.num_processes, f"{host}:{port}", source="launch.coordinator"
    )


def _of_torchrun(environ: Mapping[str, str]) -> ProcessPlace | None:
    if "WORLD_SIZE" not in environ or ("RANK" not in environ and "SLURM_PROCID" in environ):
        # under srun a script often exports WORLD_SIZE, and Slurm counts the processes
        return None
    if (count := _number("WORLD_SIZE", environ)) == 1:
        return ProcessPlace(source="WORLD_SIZE=1")
    if missing := [name for name in ("MASTER_ADDR", "RANK") if not environ.get(name)]:
        means = {
            "MASTER_ADDR": "the address of process 0",
            "RANK": "the number of this process, from 0",
        }[missing[0]]
        raise ValueError(f"WORLD_SIZE={count}, but {missing[0]} is not set: it is {means}")
    rank = _number("RANK", environ)
    _check_rank("RANK", rank, "WORLD_SIZE", count)
    port, source = (
        _port("MASTER_PORT", environ.get("MASTER_PORT", TORCH_PORT)),
        "MASTER_ADDR and MASTER_PORT",
    )
    # torchrun itself listens on its port
    if "TORCHELASTIC_RUN_ID" in environ:
        port, source = (
            port % 65535 + 1,
            "MASTER_ADDR and MASTER_PORT + 1, torchrun having the port itself",
        )
    local = _number("LOCAL_RANK", environ, 0), _number("LOCAL_WORLD_SIZE", environ, 1)
    _check_rank("LOCAL_RANK", local[0], "LOCAL_WORLD_SIZE", local[1])
    return ProcessPlace(rank, count, f"{environ['MASTER_ADDR']}:{port}", *local, source)


def _of_xpk(environ: Mapping[str, str]) -> ProcessPlace | None:
    name = next(
        (n for n in ("JAX_COORDINATOR_IP", "JAX_COORDINATOR_ADDRESS") if environ.get(n)), None
    )
    counter = next((n for n in ("NNODES", "JAX_PROCESS_COUNT") if environ.get(n)), None)
    if name is None or counter is None:
        # on TPUs xpk says no more than the address, and jax knows the rest
        return None
    count = _number(counter, environ)
    if counter == "NNODES":
        said, rank = "NODE_RANK", _number("NODE_RANK", environ)
    else:
        said = "JOB_INDEX * PROCESSES_IN_JOB + JOB_COMPLETION_INDEX"
        rank = _number("JOB_INDEX", environ, 0) * _number("PROCESSES_IN_JOB", environ, 1)
        rank += _number("JOB_COMPLETION_INDEX", environ)
    _check_rank(said, rank, counter, count)
    address = environ[name]
    if not re.search(r"[^:]:\d+$", address):
        address = f"{address}:{environ.get('JAX_COORDINATOR_PORT', JAX_PORT)}"
    host, port = _host_and_port(f"{name} and JAX_COORDINATOR_PORT", address)
    return ProcessPlace(rank, count, f"{host}:{port}", source=f"{name} and JAX_COORDINATOR_PORT")


SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def _of_slurm(environ: Mapping[str, str]) -> ProcessPlace | None:
    """Inside srun. jax detects it too, but then gives each process one GPU, though it be alone on
    its node."""
    if any(name not in environ for name in SLURM):
        return None
    count, rank = _number("SLURM_NTASKS", environ), _number("SLURM_PROCID", environ)
    _check_rank("SLURM_PROCID", rank, "SLURM_NTASKS", count)
    host = environ.get("MASTER_ADDR") or first_node(environ["SLURM_STEP_NODELIST"])
    port = _port(
        "MASTER_PORT",
        environ.get("MASTER_PORT", str(_number("SLURM_JOB_ID", environ) % 4096 + 61440)),
    )
    per_node = tasks_per_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
    )
    node = _number("SLURM_NODEID", environ, 0)
    num_local = per_node[node] if node < len(per_node) else 1
    return ProcessPlace(
        rank, count, f"{host}:{port}", _number("SLURM_LOCALID", environ), num_local, "srun"
    )


def first_node(text: str) -> str:
    """Of Slurm's list: gpu[003-007,012] begins with gpu003, and rack[1-2]n[1-4] with rack1n1.
    Raises ValueError."""
    first = re.match(r"(?:[\w.-]|\[\d+[\d,-]*\])+(?=,|$)", text)
    if first is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={text!r} is not understood: launch.coordinator=HOST:PORT, with "
            "launch.num_processes "
            "and launch.process_id, or MASTER_ADDR says where process 0 is"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Of Slurm: 2(x3),1 is 2, 2, 2, 1."""
    return [
        int(n)
        for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]


def _of_jax(environ: Mapping[str, str]) -> ProcessPlace | None:
    """What jax detects by itself, where it says by variables that there are several processes."""
    if "OMPI_MCA_orte_hnp_uri" in environ and _number("OMPI_COMM_WORLD_SIZE", environ, 1) > 1:
        return ProcessPlace(source="Open MPI", asks_jax=True)
    workers = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    if "," in workers or int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        return ProcessPlace(source="TPU_WORKER_HOSTNAMES", asks_jax=True)
    return None


# ---- numbers, ports, addresses


def _number(name: str, environ: Mapping[str, str], default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise ValueError(
            f"{name}={text!r}: it is a whole number" if text is not None else f"{name} is not set"
        )
    return int(text)


def _port(name: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(
            f"{name}={text!r} is not a port: it is a number from 1 to 65535, for example "
            f"{TORCH_PORT}"
        )
    return int(text)


def _host_and_port(name: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{name}={text!r}: it is HOST:PORT, for example 192.168.1.10:{TORCH_PORT}")
    return host, _port(name, port)


def _check_rank(name: str, rank: int, counter: str, count: int) -> None:
    if not 0 <= rank < count:
        raise ValueError(
            f"{name}={rank}, but {counter}={count}: processes count from 0 to {count - 1}"
        )
