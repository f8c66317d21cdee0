"""`tunix-lite check`: whether this machine, its devices and the processes of a run are in order.
Each stage could wait for ever, so it has a time, after which the process says so and ends."""

import contextlib
import dataclasses
import faulthandler
import os
import platform
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.basics.plain_text import device_name, escaped
from tunix_lite.commands import program
from tunix_lite.distributed.agreement import installed_version, process_info
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.host_memory import prepare_gpu
from tunix_lite.distributed.join import (
    disable_compilation_cache,
    exit_when_a_peer_is_lost,
    hosts,
    initialise,
    is_first,
)
from tunix_lite.distributed.process_place import LaunchConfig, find_place
from tunix_lite.planning import hardware
from tunix_lite.settings.config import RunConfig

# Seconds that a process has beside the time-out to end by itself, where Python cannot run.
_GRACE = 15
_FOLDER = Path("outputs")
_NCCL = "NCCL_DEBUG=INFO tunix-lite check  # NCCL says what it tries"


@dataclass(frozen=True)
class Check:
    """How a machine is looked at.
    Example: `tunix-lite check devices=4` is Check(devices=4)."""

    # conf/command/check.yaml explains each setting
    devices: int | None = None
    timeout: int = 60

    def __post_init__(self):
        if self.timeout < 1 or (self.devices is not None and self.devices < 1):
            raise ValueError(
                f"devices={self.devices} and timeout={self.timeout} must be at least 1"
            )


def main() -> None:
    # What a run would have of a GPU.
    prepare_gpu()
    program.run_command("check", Check, _check_machine)


def _check_machine(run: RunConfig, settings: Check) -> None:
    """Prints a line for each stage, and ends the process with 1 after the first that fails."""
    # As little of a GPU's memory as can be: another program may be using it.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if settings.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", settings.devices)
    launch = dataclasses.replace(run.launch, timeout=min(run.launch.timeout, settings.timeout))
    again = "start the same command on every machine, at one time"
    holder = "end the program that holds the device: fuser -v /dev/nvidia* /dev/accel*"
    share = "hydra.run.dir=/a/folder/that/all/machines/share"
    stages: tuple[tuple[str, Callable[[], str], str], ...] = (
        ("processes", partial(_meet, launch), again),
        (
            "versions",
            _versions,
            "pip install -U 'jax[cuda12]'  # jax and plugin of one version",
        ),
        ("devices", _devices, holder),
        ("arithmetic", _arithmetic, "leave the device out: CUDA_VISIBLE_DEVICES=..."),
        ("all-reduce", _all_reduce, _NCCL),
        ("folder", _shared_folder, share),
    )
    with exit_when_a_peer_is_lost():
        for name, look, fix in stages:
            with _in_time(name, fix, settings.timeout):
                text = look()
            # Of several processes only the first prints what is in order.
            if text and is_first():
                print(f"ok   {name:<11}{escaped(text, 600)}", flush=True)


@contextlib.contextmanager
def _in_time(name: str, fix: str, seconds: float) -> Iterator[None]:
    """Ends the process, with a line, if the block fails, or takes longer than this."""

    def fail(text: str) -> None:
        line = f"FAIL {name:<11}{escaped(text, 600)}\n{' ' * 16}-> {fix}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        # a usual exit would wait for a device or for other processes
        os._exit(program.EXIT_FAILED)

    timer = threading.Timer(seconds, fail, [f"no answer in {seconds:.0f} s"])
    timer.daemon = True
    timer.start()
    # A driver that hangs may hold Python's lock, and then no thread of Python ends the process.
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True)
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines()
        fail(lines[0] if lines else type(error).__name__)
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


# ---- the stages: each returns what is in order, "" for nothing to say, and raises what is not


def _versions() -> str:
    """Python, jax and its plugins, which must be of one version."""
    # plugins speak to jaxlib, and of another version they fail in odd places
    version = installed_version("jaxlib")
    texts = [f"python {platform.python_version()}", f"jax {installed_version('jax')}"]
    texts.append(f"jaxlib {version}")
    for plugin in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        if number := installed_version(plugin):
            texts.append(f"{plugin} {number}")
            if number != version:
                raise ValueError(f"{', '.join(texts)}: they must be of one version")
    return ", ".join(texts)


def _meet(launch: LaunchConfig) -> str:
    """The processes find each other and compare what they are."""
    place = find_place(launch, os.environ)
    began = time.perf_counter()
    initialise(launch, os.environ, process_info({}))
    if len(hosts()) <= 1:
        return ""
    seconds = time.perf_counter() - began
    shown = ", ".join(f"{count} on {name}" for name, count in Counter(hosts()).items())
    return f"{len(hosts())} met in {seconds:.1f} s by {place.source}: one code; {shown}"


def _devices() -> str:
    """What jax sees, of all processes."""
    devices = jax.devices()
    first = devices[0]
    is_chosen = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms == "cpu"
    # jax says nothing where its CUDA package is missing, and trains on the CPU
    if first.platform == "cpu" and shutil.which("nvidia-smi") and not is_chosen:
        raise ValueError("jax runs on the CPU, though there is nvidia-smi here")
    limits = [hardware.memory_limit(device) for device in jax.local_devices()]
    # the least of all machines: it decides what fits
    every = [limit for part in allgather_values(limits) for limit in part]
    room = "" if None in every else f", {min(every) / 2**30:.1f} GiB each for a program"
    return f"{len(devices)} x {device_name(first.device_kind, first.platform)}{room}"


def _arithmetic() -> str:
    """Each device multiplies matrices of ones, whose product is known."""
    side = 256 if jax.devices()[0].platform == "cpu" else 4096
    for device in jax.local_devices():
        with jax.set_mesh(_row_of([device])):
            ones = jax.device_put(jnp.ones((side, side), jnp.bfloat16), device)
            if not bool(jnp.all(jax.jit(lambda x: x @ x)(ones) == side)):
                raise ValueError(f"{device} gives wrong products")
    return "right on each device"


def _all_reduce() -> str:
    """All devices sum what they hold, and the sum is known. The time gives the bandwidth."""
    devices = jax.devices()
    count = len(devices)
    if count == 1:
        return "one device: nothing to send"
    disable_compilation_cache()  # with several CPUs, a program from disk may exchange wrong arrays
    size = (4 if devices[0].platform == "cpu" else 64) * 2**20
    mesh = _row_of(devices)

    # Device i holds i + 1 everywhere, so every element of the sum is n (n + 1) / 2.
    def piece(index: tuple) -> np.ndarray:
        return np.full((1, size // 4), index[0].start + 1, np.float32)

    places = NamedSharding(mesh, P("all"))
    array = jax.make_array_from_callback((count, size // 4), places, piece)
    psum = partial(jax.lax.psum, axis_name="all")
    total = jax.jit(jax.shard_map(psum, mesh=mesh, in_specs=P("all"), out_specs=P()))
    right = count * (count + 1) // 2
    with jax.set_mesh(mesh):
        for shard in total(array).addressable_shards:
            if (wrong := np.unique(shard.data)).tolist() != [right]:
                raise ValueError(f"{wrong[wrong != right][0]} where {right} is right")
        began = time.perf_counter()
        jax.block_until_ready(total(array))
    # Bus bandwidth, as nccl-tests count it: what each device sends and receives.
    bus = size / (time.perf_counter() - began) * 2 * (count - 1) / count
    return f"right over {count} devices, {bus / 1e9:.2f} GB/s each"


def _shared_folder() -> str:
    """Whether all machines see the folder that process 0 writes to, as checkpoints need."""
    if len(hosts()) == 1:
        return ""
    file = _FOLDER.absolute() / f".tunix-lite-check-{allgather_values(os.getpid())[0]}"
    if is_first():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    # nobody looks before the file is there
    allgather_values(0)
    seen = allgather_values(file.exists())
    if is_first():
        file.unlink()
    missing = [str(index) for index, is_there in enumerate(seen) if not is_there]
    if missing:
        who = f"process {', '.join(missing)}"
        raise ValueError(f"{who} does not see what process 0 writes to {file}")
    return f"all processes see {_FOLDER}/"


def _row_of(devices: list[jax.Device]) -> jax.sharding.Mesh:
    """A mesh of these devices with one axis, `all`."""
    return jax.make_mesh(
        (len(devices),), ("all",), (jax.sharding.AxisType.Auto,), devices=devices
    )
