"""One run of several processes: they meet, agree, and start jax.distributed; what they owe each
other at the end.

A process of several runs the same program as one alone: after `initialise` `jax.devices()` are
those of all.
"""

import contextlib
import os
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tunix_lite.distributed import gloo
from tunix_lite.distributed.agreement import (
    Agreement,
    ProcessInfo,
    accelerator,
    agree_through_jax,
    describe_differences,
    host_name,
)
from tunix_lite.distributed.meeting import is_loopback, meet
from tunix_lite.distributed.process_place import LaunchConfig, ProcessPlace, find_place
from tunix_lite.errors import is_of_a_peer

# a file that `heartbeat` touches, and a launcher looks at
HEARTBEAT = "TUNIX_LITE_HEARTBEAT"
# when the job began, in seconds since 1970, as a launcher or a job script says it
STARTED = "TUNIX_LITE_STARTED"

_joined: list[tuple[ProcessPlace, Agreement]] = []


def initialise(
    launch: LaunchConfig, environ: Mapping[str, str], about: ProcessInfo
) -> tuple[ProcessPlace, Agreement]:
    """Joins the processes of this run, once, before a device is used: they meet, agree, and start
    jax.distributed.

    Raises ValueError where they cannot be a run, on all of them with the same words.
    """
    if _joined:
        return _joined[0]
    place = find_place(launch, environ)
    agreed = Agreement([about.host], about.folder)
    if place.coordinator is not None:
        agreed = meet(place, about, launch.timeout)
    if place.num_processes > 1 or place.asks_jax:
        _start_jax(launch, place, local_devices(place, environ))
    if place.asks_jax:
        place, agreed = _as_jax_says(place), agree_through_jax(about)
    check_devices(launch, place, environ)
    if place.num_processes > 1:
        disable_compilation_cache()
    _joined.append((place, agreed))
    return _joined[0]


def is_alone(launch: LaunchConfig, environ: Mapping[str, str]) -> bool:
    """Whether this process is a run by itself, as far as that is known before jax starts; else
    others may join."""
    place = find_place(launch, environ)
    return place.num_processes == 1 and not place.asks_jax


def agree(values: dict[str, str], error: str | None = None) -> None:
    """Raises ValueError, on all processes, if one of them has another value than the rest, or an
    error; alone, its own.

    For what is found only after they have joined. All of them must come here.
    """
    if len(hosts()) > 1:
        agree_through_jax(ProcessInfo(values, host=host_name()), error)
    elif error is not None:
        raise ValueError(error)


def _start_jax(launch: LaunchConfig, place: ProcessPlace, devices: list[int] | None) -> None:
    import jax

    if accelerator() == "CPU":
        gloo.redirect_greetings()
    # it would take SIGTERM for itself: stopping.py
    jax.config.update("jax_enable_preemption_service", False)
    limits = {
        "initialization_timeout": launch.timeout,
        "heartbeat_timeout_seconds": launch.heartbeat_timeout,
    }
    if place.asks_jax:
        try:
            jax.distributed.initialize(**limits)
        except ValueError as error:
            # in the words of jax's arguments
            raise ValueError(
                f"{place.source}: jax found no other processes here ({error}); say "
                "launch.coordinator=HOST:PORT, "
                "launch.num_processes and launch.process_id"
            ) from error
        return
    host, _, port = place.coordinator.rpartition(":")
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        devices,
        # or Slurm's variables would give each process one GPU
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"{host}:{port}" if is_loopback(host) else None,
        **limits,
    )


def disable_compilation_cache() -> None:
    """On several CPU devices, programs that are read from disk mix up their collectives: none is
    kept there.

    Measured with jaxlib 0.10.2 (docs/log.md): they crash or hang, or could exchange arrays of one
    size without a word.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    used = jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache
    if used and jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
        # jax asks that once, at its first program, and keeps the answer
        compilation_cache.reset_cache()
        if not _joined and jax.process_count() > 1 and jax.process_index() == 0:
            text = "JAX_COMPILATION_CACHE_DIR is not used: several CPU devices need fresh programs"
            print(text, file=sys.stderr)


def _as_jax_says(place: ProcessPlace) -> ProcessPlace:
    import jax

    return replace(place, process_id=jax.process_index(), num_processes=jax.process_count())


def local_devices(place: ProcessPlace, environ: Mapping[str, str]) -> list[int] | None:
    """The GPUs of this process: its own of several on a machine, else None, all that it sees.

    A launcher that shows each process only its own GPU has chosen already.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    is_chosen = visible != "" and "," not in visible
    return [place.local_id] if place.num_local > 1 and not is_chosen else None


def check_devices(launch: LaunchConfig, place: ProcessPlace, environ: Mapping[str, str]) -> None:
    """Raises ValueError if jax has other devices than it should; all processes see the same."""
    import jax

    # on TPU VMs no variable says so, and libtpu shows the whole slice
    if jax.process_count() != place.num_processes:
        raise ValueError(
            f"jax sees the devices of {jax.process_count()} processes here, as on the hosts of a "
            "TPU slice, and this "
            f"run knows of {place.num_processes}: start every host with launch.coordinator=auto"
        )
    if place.num_processes == 1 and launch.expect_devices is None:
        return
    devices = jax.devices()
    counts = Counter(d.process_index for d in devices)
    kinds = {d.process_index: d.device_kind for d in devices}
    values = {p: {"devices": str(counts[p]), "device": kinds[p]} for p in sorted(counts)}
    if text := describe_differences({p: (f"process {p}", said) for p, said in values.items()}):
        raise ValueError(
            f"{text}. Every process must have as many devices, of one kind: look at its machine"
        )
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if (
        on_node.isdecimal()
        and place.num_local == 1
        and devices[0].platform == "gpu"
        and counts[0] < int(on_node)
    ):
        raise ValueError(
            f"Slurm has {on_node} GPUs for us on this node and shows this process {counts[0]}: say "
            f"--gpus-per-task={on_node}, or start a process for each GPU with "
            f"--ntasks-per-node={on_node}"
        )
    if launch.expect_devices not in (None, len(devices)):
        raise ValueError(
            f"launch.expect_devices={launch.expect_devices}, but jax sees {len(devices)}: "
            f"{counts[0]} "
            f"({kinds[0]}) in each of {len(counts)} processes. "
            + (
                "A process of several on a machine has one GPU: start one for each. "
                if place.num_local > 1
                else ""
            )
            + "Look at CUDA_VISIBLE_DEVICES, at what the cluster was asked for, and whether jax "
            "has its GPU or TPU package"
        )


def has_joined() -> bool:
    return bool(_joined)


def is_first() -> bool:
    """Whether this is process 0 of the run, which writes what all share."""
    return not _joined or _joined[0][0].process_id == 0


def hosts() -> list[str]:
    """The machine of each process of this run, by process; of one alone, one."""
    return _joined[0][1].hosts if _joined else [host_name()]


def nodes_of(devices: list) -> list[list]:
    """The devices, by the fast network that they share: that of a TPU slice, else of a machine."""
    machines = hosts()

    def node(device):
        if device.platform == "tpu":
            return getattr(device, "slice_index", 0)
        return machines[device.process_index] if device.process_index < len(machines) else ""

    names = list(dict.fromkeys(map(node, devices)))
    return [[device for device in devices if node(device) == name] for name in names]


# ---- while it runs


def heartbeat(doing: str = "") -> None:
    """Tells a launcher that this process is alive, and what it does. Without a launcher,
    nothing."""
    if file := os.environ.get(HEARTBEAT):
        # a full disk is not a reason to end a run
        with contextlib.suppress(OSError):
            Path(file).write_text(doing)


@contextlib.contextmanager
def exit_at_once_on_failure():
    """Inside, a process of several that fails ends at once: jax would wait minutes for the others
    to end, too."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code in (0, None) or not _has_joined_jax():
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        gloo.restore_stdout()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


@contextlib.contextmanager
def exit_when_a_peer_is_lost():
    """Inside, the error that another process is gone becomes a line that says so, and the end of
    this one."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not _has_joined_jax() or not is_of_a_peer(error):
            raise
        print(f"error: {LOST_A_PEER} ({str(error).strip().splitlines()[0][:200]})", file=sys.stderr)
        sys.exit(1)


LOST_A_PEER = "this process lost another one of its run; that one's own output says why"
# how often our launcher has started this process before
RESTARTS = "TUNIX_LITE_RESTARTS"
RESTART_COUNTS = (RESTARTS, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_restart(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether whoever started this process had started it before, with the same command."""
    return any(environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)


def _has_joined_jax() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
