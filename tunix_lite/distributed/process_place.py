"""The place of this process in its run: from its settings, or its launcher's variables."""

from collections.abc import Mapping
from dataclasses import dataclass

# The default port of torchrun.
_TORCH_PORT = "29500"
# The value of launch.coordinator with which jax finds the other processes itself.
ASK_JAX = "auto"


@dataclass(frozen=True)
class LaunchConfig:
    """How the processes of a run find each other, and what their launcher watches."""

    # conf/launch/default.yaml explains each setting
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout: int = 300
    heartbeat_timeout: int = 100
    expect_devices: int | None = None
    tp_across_nodes: bool = False
    stall_timeout: int = 1800
    max_restarts: int = 0

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 0 if name in ("process_id", "stall_timeout", "max_restarts") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                what = "must be at least 1" if least else "must not be negative"
                raise ValueError(f"{name}={value} {what}")


@dataclass(frozen=True)
class ProcessPlace:
    """The place of a process among those of its run.
    Example: `ProcessPlace(5, 8, "10.0.0.1:29500", 1, 4)`, on the second of two machines."""

    # the id of this process, from 0, and how many the run has
    process_id: int = 0
    num_processes: int = 1
    # host:port of process 0; None: this is the only process, or jax knows the address
    coordinator: str | None = None
    # the number of this process among those of its machine, from 0, and how many these are
    local_id: int = 0
    num_local: int = 1
    source: str = "nothing"  # the settings or variables that this comes from, for messages
    asks_jax: bool = False  # whether jax's own detection must find the rest

    @property
    def is_alone(self) -> bool:
        """Returns whether it is a run by itself, as far as that is known before jax starts."""
        return self.num_processes == 1 and not self.asks_jax


# The settings, and the variables of torchrun, that say which process this is.
IDS = ("coordinator", "num_processes", "process_id")
TORCH_SETS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
# Variables of a task of srun. Those of its step come before those of the job: a shell in a job is a
# step of one task.
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


def find_place(launch: LaunchConfig, environ: Mapping[str, str]) -> ProcessPlace:
    """The place of this process: from the settings, the variables of torchrun, of Slurm, or those
    that jax detects. Raises ValueError that names what is wrong, and what would be right."""
    # What the user wrote comes first, and then the innermost launcher: torchrun may run under srun.
    place = (
        _of_settings(launch)
        or _of_torchrun(environ)
        or _of_slurm(environ)
        or _of_jax(environ)
        or ProcessPlace()
    )
    if place.is_alone:
        return ProcessPlace(source=place.source)
    return place


def _of_settings(launch: LaunchConfig) -> ProcessPlace | None:
    """By launch.coordinator, launch.num_processes and launch.process_id."""
    # jax knows the cluster, and would contradict any number given beside it
    if launch.coordinator == ASK_JAX:
        return ProcessPlace(source="launch.coordinator=auto", asks_jax=True)
    given = {f"launch.{name}": getattr(launch, name) for name in IDS}
    if all(value is None for value in given.values()) or launch.num_processes == 1:
        if launch.num_processes is None:
            return None
        return ProcessPlace(source="launch.num_processes")
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(
            f"{missing[0]} is missing: launch.coordinator=HOST:PORT, launch.num_processes=N and "
            "launch.process_id=0 to N-1 belong together"
        )
    _, _, port = launch.coordinator.rpartition(":")
    _port("launch.coordinator", port)
    rank = launch.process_id
    count = launch.num_processes
    _check_rank("launch.process_id", rank, "launch.num_processes", count)
    return ProcessPlace(rank, count, launch.coordinator, source="launch.coordinator")


def _of_torchrun(environ: Mapping[str, str]) -> ProcessPlace | None:
    """By WORLD_SIZE, RANK, MASTER_ADDR and their like, which our own launcher sets, too."""
    # Scripts often export WORLD_SIZE under srun, where Slurm counts the processes.
    if "WORLD_SIZE" not in environ or ("RANK" not in environ and "SLURM_PROCID" in environ):
        return None
    count = _number("WORLD_SIZE", environ)
    if count == 1:
        return ProcessPlace(source="WORLD_SIZE=1")
    needed = {"MASTER_ADDR": "address of process 0", "RANK": "number of this process, from 0"}
    for name, meaning in needed.items():
        if not environ.get(name):
            raise ValueError(f"WORLD_SIZE={count}, but {name} is not set: it is the {meaning}")
    rank = _number("RANK", environ)
    _check_rank("RANK", rank, "WORLD_SIZE", count)

    # torchrun itself listens at MASTER_PORT, so process 0 takes the next port.
    host = environ["MASTER_ADDR"]
    port = _port("MASTER_PORT", environ.get("MASTER_PORT", _TORCH_PORT))
    source = "MASTER_ADDR and MASTER_PORT"
    if "TORCHELASTIC_RUN_ID" in environ:
        port = port % 65535 + 1
        source = "MASTER_ADDR and MASTER_PORT + 1, torchrun having the port itself"

    local_id = _number("LOCAL_RANK", environ, 0)
    num_local = _number("LOCAL_WORLD_SIZE", environ, 1)
    _check_rank("LOCAL_RANK", local_id, "LOCAL_WORLD_SIZE", num_local)
    return ProcessPlace(rank, count, f"{host}:{port}", local_id, num_local, source)


def _of_slurm(environ: Mapping[str, str]) -> ProcessPlace | None:
    """By the variables of srun. Without MASTER_ADDR the processes meet through jax."""
    if any(name not in environ for name in _SLURM):
        return None
    of_step = "SLURM_STEP_NUM_TASKS"
    counter = of_step if of_step in environ else "SLURM_NTASKS"
    count = _number(counter, environ)
    rank = _number("SLURM_PROCID", environ)
    _check_rank("SLURM_PROCID", rank, counter, count)
    if count == 1:
        return ProcessPlace(source="srun")

    # the most that a node has: Slurm may fill them unevenly
    num_local = -(-count // _number("SLURM_STEP_NUM_NODES", environ, count))
    local_id = _number("SLURM_LOCALID", environ)
    if not environ.get("MASTER_ADDR"):
        if environ.get("MASTER_PORT"):
            raise ValueError(
                "MASTER_PORT is set, but MASTER_ADDR is not: export "
                "MASTER_ADDR=$(scontrol show hostnames | head -n 1), or unset MASTER_PORT"
            )
        return ProcessPlace(rank, count, None, local_id, num_local, "srun", asks_jax=True)
    # Without MASTER_PORT all processes derive one port from the id of the job.
    port_of_job = str(_number("SLURM_JOB_ID", environ) % 4096 + 61440)
    port = _port("MASTER_PORT", environ.get("MASTER_PORT", port_of_job))
    address = f"{environ['MASTER_ADDR']}:{port}"
    return ProcessPlace(rank, count, address, local_id, num_local, "srun")


def _of_jax(environ: Mapping[str, str]) -> ProcessPlace | None:
    """By variables that jax itself detects: Open MPI, and TPU slices of several hosts."""
    if "OMPI_MCA_orte_hnp_uri" in environ and _number("OMPI_COMM_WORLD_SIZE", environ, 1) > 1:
        return ProcessPlace(source="Open MPI", asks_jax=True)
    workers = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    if "," in workers or _number("MEGASCALE_NUM_SLICES", environ, 1) > 1:
        return ProcessPlace(source="TPU_WORKER_HOSTNAMES", asks_jax=True)
    return None


def _number(name: str, environ: Mapping[str, str], default: int | None = None) -> int:
    """A variable as a whole number; without it the default. Raises ValueError."""
    text = environ.get(name)
    if not text and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise ValueError(f"{name}={text!r}: it is a whole number")
    return int(text)


def _port(name: str, text: str) -> int:
    """A text as the number of a port. name: where it is from. Raises ValueError."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(
            f"{name}: {text!r} is not a port: it is a number from 1 to 65535, as in "
            f"192.168.1.10:{_TORCH_PORT}"
        )
    return int(text)


def _check_rank(name: str, rank: int, counter: str, count: int) -> None:
    """Raises ValueError unless 0 <= rank < count. The texts name the variables."""
    if not 0 <= rank < count:
        raise ValueError(
            f"{name}={rank}, but {counter}={count}: processes count from 0 to {count - 1}"
        )
