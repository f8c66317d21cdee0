"""Looks at the devices from another process, which is ended where it hangs.

Starting a device, and everything that several processes do together, can wait for ever or end the
process from C++ code. So `Probe` does it in a process that can be killed.
"""

import dataclasses
import os
import pickle
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.commands.checks.machine import CheckLine, fails, machine_lines, ok
from tunix_lite.distributed.agreement import installed_version, process_info
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.join import (
    disable_compilation_cache,
    hosts,
    initialise,
    is_first,
)
from tunix_lite.distributed.meeting import NotMet
from tunix_lite.distributed.process_place import LaunchConfig, find_place
from tunix_lite.errors import is_of_a_peer
from tunix_lite.files.plain_text import device_name
from tunix_lite.planning import hardware
from tunix_lite.workers.process import WorkerProcess

# Seconds more than the time-out until the probe is ended: it may say by itself what is missing.
_GRACE = 15

_NCCL = "NCCL_DEBUG=INFO tunix-lite check  # NCCL says what it tries"
_TOGETHER = "start the same command on every machine, at one time"
# stage -> what it does, and what mends it where it hangs or fails
_STAGES = {
    "start": (
        "Python and jax start",
        "python -X importtime -c 'import jax'  # what takes so long",
    ),
    "machine": ("Python, jax, the driver", "look at the disk or the driver behind it"),
    "processes": ("the processes meet", _TOGETHER),
    "devices": (
        "jax starts on the devices",
        "end the program that holds the device: fuser -v /dev/nvidia* /dev/accel*",
    ),
    "arithmetic": (
        "each device computes",
        "reset the device, or leave it out: CUDA_VISIBLE_DEVICES=...",
    ),
    "all-reduce": ("all devices sum", _NCCL),
    "folder": ("all processes look at the folder", "look at the lines of the other processes"),
    "leaving": ("the processes part", "look at the lines of the other processes"),
}


def look_at_devices(
    launch: LaunchConfig,
    folder: Path,
    timeout: float,
    pretend: int | None,
    show: Callable[[CheckLine], None],
) -> dict[str, Any]:
    """Shows each line as it comes. Returns the facts about the devices, {} where nothing came.

    folder: where runs will be written. timeout: seconds for each stage. pretend: so many devices of
    the CPU in place of those attached.
    """
    # As little of a GPU's memory as can be: another program may be using it.
    variables = dict(os.environ) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if pretend is not None:
        pretends = r"--xla_force_host_platform_device_count=\S*"
        variables["JAX_PLATFORMS"] = "cpu"
        variables["JAX_NUM_CPU_DEVICES"] = str(pretend)
        variables["XLA_FLAGS"] = re.sub(pretends, "", variables.get("XLA_FLAGS", "")).strip()
    launch = dataclasses.replace(launch, timeout=min(launch.timeout, max(1, int(timeout))))
    facts: dict[str, Any] = {}
    with tempfile.TemporaryFile() as noise:
        # What libraries print goes into a file, of which a failure shows the end.
        worker = WorkerProcess(variables, output=noise)
        try:
            worker.send(pickle.dumps([_Probe(launch, folder)]), timeout)
            for number, (stage, (doing, fix)) in enumerate(_STAGES.items()):
                call = None if stage == "start" else number
                seconds = timeout + (_GRACE if stage == "processes" else 0)
                if call is not None:
                    worker.send(pickle.dumps([(call, 0, (stage,))]), seconds)
                kind, answer = worker.answer(seconds, call)
                if kind not in ("", "ready"):
                    # It ended without an answer, or still hangs.
                    text = f"no answer in {timeout:.0f} s" if kind == "timeout" else answer
                    noise.seek(max(0, noise.seek(0, os.SEEK_END) - 20_000))
                    printed = noise.read().decode(errors="replace").strip().splitlines()
                    last = f"; its last words: {printed[-1][-300:]}" if printed else ""
                    show(fails(stage, f"{doing}: {text}{last}", fix))
                    break
                lines, seen = answer or ([], {})
                facts |= seen
                for line in lines:
                    show(CheckLine(**line))
                if any(line["state"] == "fails" for line in lines) and stage != "machine":
                    break
        finally:
            # The whole process group, whatever it waits for.
            worker.kill()
            worker.release()
    return facts


class _Probe:
    """The stages of a look at the devices, in their order; each needs those before it.

    Example: `Probe(LaunchConfig(), Path("outputs"))("devices")` is (lines, facts), which JSON can
    hold.
    """

    def __init__(self, launch: LaunchConfig, folder: Path):
        """folder: where runs will be written."""
        self._launch = launch
        self._folder = folder
        self._facts: dict[str, Any] = {}

    def __call__(self, stage: str) -> tuple[list[dict], dict[str, Any]]:
        """The lines of a stage, and the facts that were found so far."""
        stages = {
            "machine": machine_lines,
            "processes": self._meet,
            "devices": self._devices,
            "arithmetic": self._arithmetic,
            "all-reduce": self._all_reduce,
            "folder": self._shared_folder,
            "leaving": self._leave,
        }
        try:
            lines = stages[stage]()
        except (Exception, SystemExit) as error:
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            fix = _STAGES[stage][1]
            if is_of_a_peer(error):
                fix = "look at the lines of the process that was lost"
            elif isinstance(error, ValueError) and not isinstance(error, NotMet):
                fix = "give every process the same checkout, packages, variables and settings"
            lines = [fails(stage, text, fix)]
        return [vars(line) for line in lines], self._facts

    def _meet(self) -> list[CheckLine]:
        """The processes find each other and compare what they are."""
        place = find_place(self._launch, os.environ)
        began = time.perf_counter()
        initialise(self._launch, os.environ, process_info({}))
        if place.num_processes == 1 and not place.asks_jax:
            return []
        seconds = time.perf_counter() - began
        text = (
            f"{len(hosts())} met in {seconds:.1f} s by {place.source}: one version, one code"
        )
        shown = ", ".join(f"{count} on {name}" for name, count in Counter(hosts()).items())
        return [ok("processes", f"{text}; {shown}")]

    def _devices(self) -> list[CheckLine]:
        """Looks at the devices that jax sees, of all processes."""
        devices = jax.devices()
        first = devices[0]
        limits = [hardware.memory_limit(device) for device in jax.local_devices()]
        known = [limit for limit in limits if limit is not None]
        seen = allgather_values([len(limits), min(known) if known else None])
        memory = [least for _, least in seen]
        least = None if None in memory else min(memory)
        self._facts |= {
            "platform": first.platform,
            "kind": first.device_kind,
            "devices": len(devices),
            "processes": len(seen),
            "memory_bytes": least,
            "process": jax.process_index(),
        }
        room = "" if least is None else f", {least / 2**30:.1f} GiB each for a program"
        name = device_name(first.device_kind, first.platform)
        lines = [ok("devices", f"{len(devices)} x {name}{room}")]
        has_gpus = shutil.which("nvidia-smi") and installed_version("jax-cuda12-plugin")
        if first.platform == "cpu" and has_gpus and not os.environ.get("JAX_PLATFORMS"):
            text = "jax runs on the CPU, though it has a plugin for the GPUs here"
            why = "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'  # says why"
            lines = [fails("devices", text, why)]
        if len(seen) > 1:
            for index, ((count, _), host) in enumerate(zip(seen, hosts())):
                lines.append(ok("process", f"{index} on {host}: {count} devices"))
        return lines

    def _arithmetic(self) -> list[CheckLine]:
        """Each device multiplies matrices of ones, whose product is known."""
        first = jax.devices()[0]
        side = 256 if first.platform == "cpu" else 4096
        product = jax.jit(lambda x: x @ x)
        seconds = []
        for device in jax.local_devices():
            with jax.set_mesh(_row_of([device])):
                ones = jax.device_put(jnp.ones((side, side), jnp.bfloat16), device)
                is_right = bool(jnp.all(product(ones) == side))
                seconds.append(_fastest(lambda ones=ones: product(ones)))
            if not is_right:
                fix = "take the device out: CUDA_VISIBLE_DEVICES=..."
                return [fails("arithmetic", f"{device} gives wrong products", fix)]
        rate = 2 * side**3 / max(seconds)
        text = f"right on each device, {rate / 1e12:.3g} TFLOP/s in bfloat16 on the slowest"
        return [ok("arithmetic", text)]

    def _all_reduce(self) -> list[CheckLine]:
        """All devices sum what they hold: the sum is known, and the time gives the bandwidth."""
        devices = jax.devices()
        count = len(devices)
        if count == 1:
            return [ok("all-reduce", "one device: nothing to send")]
        size = (4 if devices[0].platform == "cpu" else 64) * 2**20
        seconds, wrong = reduce_over(devices, size)
        if wrong is not None:
            text = f"{wrong} where {count * (count + 1) // 2} is right"
            return [fails("all-reduce", text, _NCCL)]

        # Bus bandwidth, as nccl-tests count it: what each device sends and receives.
        bus = size / seconds * 2 * (count - 1) / count
        self._facts["all_reduce_bytes_per_second"] = bus
        return [ok("all-reduce", f"right over {count} devices, {bus / 1e9:.2f} GB/s each")]

    def _shared_folder(self) -> list[CheckLine]:
        """Whether all machines see the folder that process 0 writes to, as checkpoints need."""
        if len(hosts()) == 1:
            return []
        file = (
            self._folder.absolute() / f".tunix-lite-check-{allgather_values(os.getpid())[0]}"
        )
        if is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_text("")
        allgather_values(0)
        seen = allgather_values(file.exists())
        if is_first():
            file.unlink()
        missing = [str(index) for index, is_there in enumerate(seen) if not is_there]
        if missing:
            text = f"process {', '.join(missing)} does not see what process 0 writes to {file}"
            return [fails("folder", text, "hydra.run.dir=/a/folder/that/all/machines/share")]
        return [ok("folder", f"all processes see {self._folder}/")]

    def _leave(self) -> list[CheckLine]:
        """The processes part, so that none of them waits for this one."""
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
        return []


def _row_of(devices: list[jax.Device]) -> jax.sharding.Mesh:
    """A mesh of these devices with one axis, `all`."""
    return jax.make_mesh(
        (len(devices),), ("all",), (jax.sharding.AxisType.Auto,), devices=devices
    )


def _fastest(run: Callable[[], jax.Array]) -> float:
    """Seconds of the fastest of five calls, after one that warms up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)


def reduce_over(devices: list[jax.Device], size: int) -> tuple[float, float | None]:
    """Seconds of an all-reduce of `size` bytes from each device, and a wrong number that came out;
    None: all are right."""
    count = len(devices)
    disable_compilation_cache()  # with several CPUs, a program from disk may exchange wrong arrays
    mesh = _row_of(devices)

    # Device i holds i + 1 everywhere, so every element of the sum is n (n + 1) / 2.
    def piece(index: tuple) -> np.ndarray:
        return np.full((1, size // 4), index[0].start + 1 if count > 1 else 1, np.float32)

    array = jax.make_array_from_callback(
        (count, size // 4), NamedSharding(mesh, P("all")), piece
    )
    psum = partial(jax.lax.psum, axis_name="all")
    total = jax.jit(jax.shard_map(psum, mesh=mesh, in_specs=P("all"), out_specs=P()))
    right = count * (count + 1) / 2
    with jax.set_mesh(mesh):
        for shard in total(array).addressable_shards:
            sums = np.asarray(shard.data)
            if not np.all(sums == right):
                return 0.0, float(sums[sums != right][0])
        return _fastest(lambda: total(array)), None
