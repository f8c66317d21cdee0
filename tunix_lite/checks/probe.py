"""Looks at the devices, in a process that may hang or crash; checks/devices.py starts it."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunix_lite.checks.lines import CheckLine, fails, ok, warns
from tunix_lite.distributed.agreement import process_info
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.join import (
    disable_compilation_cache,
    hosts,
    initialise,
    nodes_of,
)
from tunix_lite.distributed.meeting import NotMet
from tunix_lite.distributed.process_place import LaunchConfig, find_place
from tunix_lite.errors import is_of_a_peer
from tunix_lite.plain_text import device_name
from tunix_lite.planning import hardware

GiB = 2**30
# Bytes that each device puts into the all-reduce, and the side of the matrices of the arithmetic.
ON_CPU = (4 * 2**20, 256)
ON_ACCELERATOR = (64 * 2**20, 4096)
# Times that each is measured; the fastest counts.
REPEATS = 5
# Below this share of what the links between devices can do, something is in the way.
SLOW = 0.1


class Probe:
    """The stages of a look at the devices, in their order; each needs those before it.

    Example: `Probe(LaunchConfig(), Path("outputs"))("devices")` is (lines, facts), which JSON can
    hold.
    """

    def __init__(self, launch: LaunchConfig, folder: Path):
        """folder: where runs will be written."""
        self._launch = launch
        self._folder = folder
        self._stage = ""
        self._facts: dict[str, Any] = {}

    def __call__(self, stage: str) -> tuple[list[dict], dict[str, Any]]:
        """The lines of a stage, and the facts that were found so far."""
        stages = {
            "processes": self.meet,
            "devices": self.devices,
            "arithmetic": self.arithmetic,
            "all-reduce": self.all_reduce,
            "folder": self.shared_folder,
            "leaving": self.leave,
        }
        self._stage = stage
        try:
            lines = stages[stage]()
        except (Exception, SystemExit) as error:
            lines = [self.failed(error)]
        return [vars(line) for line in lines], self._facts

    def failed(self, error: BaseException) -> CheckLine:
        """The line for an error of the stage at hand."""
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, NotMet):
            return fails(self._stage, text, "start the same command on every machine, at one time")
        if self._stage == "processes" and isinstance(error, ValueError):
            same = "give every process the same checkout, packages, variables and settings"
            return fails(self._stage, text, same)
        if is_of_a_peer(error):
            return fails(self._stage, text, "look at the lines of the process that was lost")
        mends = {
            "devices": "python -c 'import jax; print(jax.devices())'  # prints the whole message",
            "all-reduce": "NCCL_DEBUG=INFO tunix-lite check  # NCCL says what it tries",
        }
        again = "JAX_PLATFORMS=cpu tunix-lite check  # leaves the accelerator out"
        return fails(self._stage, text, mends.get(self._stage, again))

    # ---- the stages

    def meet(self) -> list[CheckLine]:
        """The processes find each other and compare what they are."""
        place = find_place(self._launch, os.environ)
        began = time.perf_counter()
        initialise(self._launch, os.environ, process_info({}))
        if place.num_processes == 1 and not place.asks_jax:
            return []
        seconds = time.perf_counter() - began
        machines = Counter(hosts())
        text = f"{len(hosts())} met in {seconds:.1f} s by {place.source}: one version, one code"
        shown = ", ".join(f"{count} on {name}" for name, count in machines.items())
        return [ok("processes", f"{text}; {shown}")]

    def devices(self) -> list[CheckLine]:
        """Looks at the devices that jax sees, of all processes."""
        import jax

        devices = jax.devices()
        first = devices[0]
        local = jax.local_devices()
        limits = [hardware.memory_limit(device) for device in local]
        known = [limit for limit in limits if limit is not None]
        own = {"devices": len(local), "memory": min(known) if known else None}
        seen = allgather_values(own)
        memory = [each["memory"] for each in seen]
        least = None if None in memory else min(memory)
        self._facts |= {
            "platform": first.platform,
            "kind": first.device_kind,
            "devices": len(devices),
            "processes": len(seen),
            "memory_bytes": least,
            "process": jax.process_index(),
        }

        room = "" if least is None else f", {least / GiB:.1f} GiB each for a program"
        lines = [
            ok(
                "devices",
                f"{len(devices)} x {device_name(first.device_kind, first.platform)}{room}",
            )
        ]
        if len(seen) > 1:
            for index, (each, host) in enumerate(zip(seen, hosts())):
                text = f"{index} on {host}: {each['devices']} devices"
                lines.append(ok("process", text))
        nodes = nodes_of(devices)
        if len(nodes) > 1:
            sizes = ", ".join(str(len(node)) for node in nodes)
            lines.append(ok("topology", f"{len(nodes)} nodes, with {sizes} devices"))
        chips = [getattr(device, "coords", None) for device in devices]
        if first.platform == "tpu" and None not in chips:
            shape = "x".join(str(max(axis) - min(axis) + 1) for axis in zip(*chips))
            lines.append(ok("topology", f"a slice of {shape} chips"))
        return lines

    def arithmetic(self) -> list[CheckLine]:
        """Each device multiplies matrices of ones, whose product is known."""
        import jax
        import jax.numpy as jnp

        side = _sizes(jax.devices()[0].platform)[1]
        product = jax.jit(lambda x: x @ x)
        seconds = []
        for device in jax.local_devices():
            with jax.set_mesh(_row_of([device])):
                ones = jax.device_put(jnp.ones((side, side), jnp.bfloat16), device)
                is_right = bool(jnp.all(product(ones) == side))
                seconds.append(_fastest(lambda ones=ones: product(ones)))
            if not is_right:
                text = f"{device} gives wrong products"
                return [fails("arithmetic", text, "take the device out: CUDA_VISIBLE_DEVICES=...")]
        rate = 2 * side**3 / max(seconds)
        known = hardware.of_device(jax.devices()[0])
        peak = f" of {known.peak_flops / 1e12:.0f}" if known else ""
        text = f"right on each device, {rate / 1e12:.3g}{peak} TFLOP/s in bfloat16 on the slowest"
        return [ok("arithmetic", text)]

    def all_reduce(self) -> list[CheckLine]:
        """All devices sum what they hold: the sum is known, and the time gives the bandwidth."""
        import jax

        devices = jax.devices()
        count = len(devices)
        if count == 1:
            return [ok("all-reduce", "one device: nothing to send")]
        size, _ = _sizes(devices[0].platform)
        seconds, wrong = reduce_over(devices, size)
        if wrong is not None:
            text = f"{wrong} where {count * (count + 1) // 2} is right"
            return [fails("all-reduce", text, "NCCL_DEBUG=INFO tunix-lite check")]

        # Bus bandwidth, as nccl-tests count it: what each device sends and receives.
        bus = size / seconds * 2 * (count - 1) / count
        latency, _ = reduce_over(devices, 4096)
        self._facts |= {"all_reduce_bytes_per_second": bus, "latency_seconds": latency}
        text = f"right over {count} devices, {bus / 1e9:.2f} GB/s each, {latency * 1e6:.0f} µs"
        known = hardware.of_device(devices[0])
        is_one_node = len(nodes_of(devices)) == 1
        if known is not None:
            links = known.link_bandwidth if is_one_node else known.node_bandwidth
            text += f"; the links can do {links / 1e9:.0f} GB/s"
            if bus < SLOW * links:
                return [warns("all-reduce", text, "nvidia-smi topo -m; NCCL_DEBUG=INFO")]
        return [ok("all-reduce", text)]

    def shared_folder(self) -> list[CheckLine]:
        """Whether all machines see the folder that process 0 writes to, as checkpoints need."""
        if len(hosts()) == 1:
            return []
        is_first = allgather_values(os.getpid())[0] == os.getpid()
        name = f".tunix-lite-check-{allgather_values(os.getpid())[0]}"
        file = self._folder.absolute() / name
        if is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_text("")
        allgather_values(0)
        seen = allgather_values(file.exists())
        if is_first:
            file.unlink()
        missing = [str(index) for index, found in enumerate(seen) if not found]
        if missing:
            text = f"process {', '.join(missing)} does not see what process 0 writes to {file}"
            return [fails("folder", text, "hydra.run.dir=/a/folder/that/all/machines/share")]
        return [ok("folder", f"all processes see {self._folder}/")]

    def leave(self) -> list[CheckLine]:
        """The processes part, so that none of them waits for this one."""
        import jax

        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
        return []


def _sizes(platform: str) -> tuple[int, int]:
    return ON_CPU if platform == "cpu" else ON_ACCELERATOR


def _row_of(devices: list) -> Any:
    """A mesh of these devices with one axis, `all`."""
    import jax

    return jax.make_mesh((len(devices),), ("all",), (jax.sharding.AxisType.Auto,), devices=devices)


def _fastest(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of REPEATS calls, the first of which is warm."""
    import jax

    jax.block_until_ready(run())
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)


def reduce_over(devices: list, size: int) -> tuple[float, float | None]:
    """Seconds of an all-reduce of `size` bytes from each device, and a wrong number that came out;
    None: all are right."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count = len(devices)
    width = max(1, size // 4)
    disable_compilation_cache()  # with several CPUs, a program from disk may exchange wrong arrays
    mesh = _row_of(devices)
    split = NamedSharding(mesh, PartitionSpec("all"))

    # Device i holds i + 1 everywhere, so every element of the sum is n (n + 1) / 2.
    def piece(index: tuple) -> np.ndarray:
        return np.full((1, width), index[0].start + 1 if count > 1 else 1, np.float32)

    array = jax.make_array_from_callback((count, width), split, piece)
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "all"),
            mesh=mesh,
            in_specs=PartitionSpec("all"),
            out_specs=PartitionSpec(),
        )
    )
    right = count * (count + 1) / 2
    with jax.set_mesh(mesh):
        for shard in total(array).addressable_shards:
            found = np.asarray(shard.data)
            if not np.all(found == right):
                return 0.0, float(found[found != right][0])
        return _fastest(lambda: total(array)), None
