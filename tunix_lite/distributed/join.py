"""Joins the processes of a run: they meet, agree, and start jax.distributed. Also the heartbeat for
a launcher, and what a process does when it fails or loses another one."""

import contextlib
import json
import os
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_lite.basics.errors import is_of_a_peer
from tunix_lite.distributed.agreement import (
    Agreement,
    ProcessInfo,
    agree_through_jax,
    describe_differences,
)
from tunix_lite.distributed.meeting import is_loopback, meet
from tunix_lite.distributed.process_place import (
    ASK_JAX,
    IDS,
    LaunchConfig,
    ProcessPlace,
    find_place,
)

if TYPE_CHECKING:
    import jax

# What a process says that ends because another one of its run is gone.
LOST_A_PEER = (
    "this process lost another process of its run; the output of that process says why"
)
# The variable with the path of the file that `heartbeat` writes and the launcher watches.
HEARTBEAT = "TUNIX_LITE_HEARTBEAT"
# The ending of a file beside it, in which a process tells the launcher its settings of launch.
SETTINGS = ".settings"
# The variable with the start time of the job, in seconds since 1970; a launcher or script sets it.
STARTED = "TUNIX_LITE_STARTED"
# The variable with the number of times that our launcher has restarted this process; and the same
# of torchrun and Slurm.
RESTARTS = "TUNIX_LITE_RESTARTS"
_RESTART_COUNTS = (RESTARTS, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

# The place of this process, and what all agreed on; None: it has joined no run yet.
_joined: tuple[ProcessPlace, Agreement] | None = None


def initialise(
    launch: LaunchConfig, environ: Mapping[str, str], about: ProcessInfo
) -> tuple[ProcessPlace, Agreement]:
    """Joins the processes of this run: they meet, agree, and start jax.distributed; further calls
    return the same. environ: usually `os.environ`. about: of `agreement.process_info`. Raises
    NotMet if a process does not come in time, ValueError if they cannot be one run: on all of them,
    with the same message."""
    global _joined
    if _joined is not None:
        return _joined

    tell_launcher(launch, environ)

    # Where we know the address of process 0, the processes compare themselves before jax starts.
    place = find_place(launch, environ)
    agreed = Agreement([about.host], about.folder)
    if place.coordinator is not None:
        agreed = meet(place, about, launch.timeout)

    # Where only jax knows the others, they compare themselves through jax.
    if not place.is_alone:
        _start_jax(launch, place, local_devices(place, environ))
    if place.asks_jax:
        import jax

        place = replace(
            place, process_id=jax.process_index(), num_processes=jax.process_count()
        )
        agreed = agree_through_jax(about)

    check_devices(launch, place)
    if place.num_processes > 1:
        disable_compilation_cache()
    _joined = place, agreed
    return _joined


def tell_launcher(launch: LaunchConfig, environ: Mapping[str, str]) -> None:
    """Tells our launcher when to give up and restart. Raises ValueError if settings say which
    process this is."""
    if HEARTBEAT not in environ:
        return
    is_only = environ.get("WORLD_SIZE", "1") == "1"
    given = {name: getattr(launch, name) for name in IDS}
    for name, value in given.items():
        if value is not None and not (value == ASK_JAX and is_only):
            raise ValueError(
                f"launch.{name}={value}: the launcher numbers the processes; for several machines "
                "it reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK"
            )
    settings = {"stall_timeout": launch.stall_timeout, "max_restarts": launch.max_restarts}
    # A full disk must not end a run here.
    with contextlib.suppress(OSError):
        Path(environ[HEARTBEAT] + SETTINGS).write_text(json.dumps(settings))


def agree(values: dict[str, str], error: str | None = None) -> None:
    """Raises ValueError on all processes if their values differ, or if one of them has an error.
    Every process must call this, after `initialise`."""
    if len(hosts()) > 1:
        agree_through_jax(ProcessInfo(values, host=socket.gethostname()), error)
    elif error is not None:
        raise ValueError(error)


def _start_jax(launch: LaunchConfig, place: ProcessPlace, devices: list[int] | None) -> None:
    """Starts jax.distributed. devices: the local GPUs of this process; None: all that it sees."""
    import jax

    # This service would take over SIGTERM, which distributed/stopping.py handles.
    jax.config.update("jax_enable_preemption_service", False)
    limits = {
        "initialization_timeout": launch.timeout,
        "heartbeat_timeout_seconds": launch.heartbeat_timeout,
    }
    if place.asks_jax:
        # Under srun jax counts the tasks of the job, not those of the step, and gives a process one
        # GPU, even one that is alone on its node. An empty list is all that it sees.
        known = {"num_processes": place.num_processes, "local_device_ids": devices or []}
        try:
            jax.distributed.initialize(**(known if place.num_processes > 1 else {}), **limits)
        except ValueError as error:
            # jax's message names the arguments of its function, which the user does not know.
            raise ValueError(
                f"{place.source}: jax found no other processes here ({error}); give "
                "launch.coordinator=HOST:PORT, launch.num_processes and launch.process_id"
            ) from error
        return

    host, _, port = place.coordinator.rpartition(":")
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        devices,
        # Otherwise jax reads Slurm's variables, and gives each process one GPU.
        cluster_detection_method="deactivate",
        # By default jax listens at every address of the machine.
        coordinator_bind_address=f"{host}:{port}" if is_loopback(host) else None,
        **limits,
    )


def disable_compilation_cache() -> None:
    """Turns off jax's compilation cache on disk if there are several CPU devices."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # With jaxlib 0.10.2 such programs that are read from there mix up their collectives: they hang,
    # crash (docs/log.md), or exchange wrong arrays without an error.
    used = jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache
    if used and jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
        # jax reads the setting only when it compiles its first program, unless the cache is reset.
        compilation_cache.reset_cache()


def local_devices(place: ProcessPlace, environ: Mapping[str, str]) -> list[int] | None:
    """The indices of the GPUs that this process uses; None: all that it sees."""
    # Of several on a machine each uses one, unless this shows it a single one.
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    is_chosen = visible != "" and "," not in visible
    if place.num_local > 1 and not is_chosen:
        return [place.local_id]
    return None


def check_devices(launch: LaunchConfig, place: ProcessPlace) -> None:
    """Raises ValueError, on all processes, if jax has other devices than it should."""
    import jax

    # On TPU VMs no variable names the other hosts, but libtpu shows the devices of the whole slice.
    if jax.process_count() != place.num_processes:
        raise ValueError(
            f"jax sees the devices of {jax.process_count()} processes here, as on the hosts of a "
            f"TPU slice, and this run was given {place.num_processes}: start every host with "
            "launch.coordinator=auto"
        )
    if place.num_processes == 1 and launch.expect_devices is None:
        return

    # Every process must have as many devices as the others, of one kind.
    devices = jax.devices()
    counts = Counter(d.process_index for d in devices)
    kinds = {d.process_index: d.device_kind for d in devices}
    values = {p: {"devices": str(counts[p]), "device": kinds[p]} for p in sorted(counts)}
    text = describe_differences({p: (f"process {p}", own) for p, own in values.items()})
    if text is not None:
        raise ValueError(
            f"{text}. All must have as many devices of one kind: check its machine"
        )

    if launch.expect_devices not in (None, len(devices)):
        raise ValueError(
            f"launch.expect_devices={launch.expect_devices}, but jax sees {len(devices)}: "
            f"{counts[0]} ({kinds[0]}) in each of {len(counts)} processes. Several processes on a "
            "machine have one GPU each. Look at CUDA_VISIBLE_DEVICES, at what the cluster was "
            "asked for, and whether jax has its GPU or TPU package"
        )


def has_joined() -> bool:
    """Whether `initialise` has joined the processes of this run."""
    return _joined is not None


def is_first() -> bool:
    """Whether this is process 0 of the run, which writes the files of the run."""
    return _joined is None or _joined[0].process_id == 0


def hosts() -> list[str]:
    """The machine name of each process of this run, in the order of process ids."""
    if _joined is None:
        return [socket.gethostname()]
    return _joined[1].hosts


def nodes_of(devices: list["jax.Device"]) -> list[list["jax.Device"]]:
    """Groups devices that share a fast network: those of a TPU slice, else those of a machine."""
    machines = hosts()

    groups: dict[int | str, list[jax.Device]] = {}
    for device in devices:
        node = getattr(device, "slice_index", 0)
        # A slice is one network, however many hosts it spans.
        if device.platform != "tpu":
            node = dict(enumerate(machines)).get(device.process_index, "")
        groups.setdefault(node, []).append(device)
    return list(groups.values())


# ---- during the run


def heartbeat(doing: str) -> None:
    """Tells a launcher that this process is alive, and what it does: "step 3"."""
    if file := os.environ.get(HEARTBEAT):
        # A full disk must not end a run here.
        with contextlib.suppress(OSError):
            Path(file).write_text(doing)


@contextlib.contextmanager
def exit_at_once_on_failure() -> Iterator[None]:
    """Inside, a process of several exits at once when it fails: jax would wait for minutes."""
    try:
        yield
        if _has_joined_jax():
            _sum_over_all_devices()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code in (0, None) or not _has_joined_jax():
            raise
        # `os._exit` prints no traceback and writes out no buffer.
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


@contextlib.contextmanager
def exit_when_a_peer_is_lost() -> Iterator[None]:
    """A context in which an error of jax about a lost process ends this one, with one line."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not _has_joined_jax() or not is_of_a_peer(error):
            raise
        why = str(error).strip().splitlines()[0][:200]
        print(f"error: {LOST_A_PEER} ({why})", file=sys.stderr)
        sys.exit(1)


def is_restart(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (ours, torchrun or Slurm) restarted this process after a failure."""
    return any(environ.get(name, "0") not in ("", "0") for name in _RESTART_COUNTS)


def _sum_over_all_devices() -> None:
    """Waits until each CPU device of this process has taken part in a sum over all devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    # Whoever exits while gloo sets up connections leaves a peer waiting for 100 seconds.
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    mesh = Mesh(np.array(jax.devices()), ("all",))
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
    ones = jax.make_array_from_callback((mesh.size,), spread, lambda _: np.ones(1, np.int32))
    try:
        jax.block_until_ready(jax.jit(jnp.sum, out_shardings=whole)(ones))
    except (RuntimeError, ValueError) as error:
        # What this process had to do is done, whatever has happened to another one.
        if not is_of_a_peer(error):
            raise


def _has_joined_jax() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
