"""The devices that a plan is for: those that a name means, or those that are there."""

from dataclasses import dataclass

import jax

from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.host_memory import GPU_SHARE
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.planning import hardware
from tunix_lite.planning.hardware import GiB, Hardware
from tunix_lite.rollout.memory import free_host_bytes

# Of a GPU's memory, what programs can have: XLA's allocator takes a fixed share at its start, the
# one that our programs ask for, and CUDA's context, cuBLAS, cuDNN and NCCL keep about 0.5 GiB
# outside of it. A TPU's runtime has taken its part already: the table has what is left.
GPU_LIBRARIES = GiB // 2


@dataclass(frozen=True)
class Machine:
    """The devices that a plan is for.

    Example: find_machine("h100x8"); attached_machine() for the devices that jax sees.
    """

    name: str  # as typed: v5e-16; or attached
    platform: str
    num_devices: int
    hardware: Hardware | None  # None: not in the table, so there is no roofline
    # bytes that the programs of a run can have on a device; None: nobody knows
    capacity: int | None
    capacity_is: str  # in words
    # of a host's memory, what is free now; None: the hosts are not here
    host_bytes: int | None = None


def find_machine(target: str) -> Machine:
    """The devices that a name means, or those that jax sees. Raises ConfigError for a name of
    nothing."""
    if target == "attached":
        return attached_machine()
    with error_context("target"):
        found = hardware.find_target(target)
    kind = found.hardware
    if kind.platform == "tpu":
        capacity = kind.memory_bytes
        capacity_is = "all that its runtime offers"
    else:
        capacity = int(GPU_SHARE * (kind.memory_bytes - GPU_LIBRARIES))
        capacity_is = (
            f"{GPU_SHARE:.0%} of {kind.memory_bytes / GiB:.1f} GiB less {GPU_LIBRARIES / GiB:.1f} "
            "for CUDA's libraries"
        )
    return Machine(found.name, kind.platform, found.num_devices, kind, capacity, capacity_is)


def attached_machine() -> Machine:
    """The devices that jax sees; a CPU's share its memory evenly. All processes must ask: they
    decide by the least."""
    device = jax.local_devices()[0]
    limits = allgather_values(hardware.memory_limit(device))
    platform = device.platform
    limit = None if None in limits else min(limits)
    capacity_is = "physical memory" if platform == "cpu" else "what the runtime allows"
    return Machine(
        "attached",
        platform,
        jax.device_count(),
        hardware.of_device(device),
        limit,
        capacity_is,
        min(allgather_values(free_host_bytes())),
    )


def devices_of(machine: Machine) -> list:
    """To compile for. Raises ConfigError, naming what to install or analytic=true, if there is no
    compiler."""
    if machine.name == "attached":
        return jax.devices()
    try:
        return hardware.compile_only_devices(hardware.find_target(machine.name))
    except ValueError as error:
        raise ConfigError(
            f"target={machine.name}: {error}; or estimate without it: analytic=true"
        ) from error
