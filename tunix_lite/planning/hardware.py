"""What accelerators are, and devices to plan and compile for that need not be there. Peaks are
those of NVIDIA's data sheets (SXM boards, dense) and of docs.cloud.google.com/tpu/docs; memory and
`device_kind` are as the software reports them."""

import difflib
import importlib.util
import math
import os
import re
from dataclasses import dataclass

import jax

from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.host_memory import GPU_SHARE

GiB = 2**30
# What Python, jax and other libraries take of a CPU's memory once weights are loaded: pages of
# their files 0.17 GB, objects, and freed memory (docs/log.md, 28 November 2026). A tokenizer is
# counted apart.
_PROCESS_BYTES = 350_000_000
# What XLA's compiler takes for an update, and then frees.
_COMPILER_BYTES = 310_000_000


@dataclass(frozen=True)
class _Gpu:
    """What XLA's code generator asks of a GPU: by CUDA's table, and as a board reports it."""

    capability: int  # major; the minor one is 0 for all here
    multiprocessors: int
    fpus: int  # float32 units of one multiprocessor
    shared_memory: int  # bytes of one multiprocessor
    l2_cache: int  # bytes
    clock_ghz: float


@dataclass(frozen=True)
class _Tpu:
    """How TPUs come in slices."""

    shapes: tuple[str, ...]  # chips along each axis of the slices that exist
    # what a name counts, per device: v5p-64 has 64 cores that jax shows as 32 devices
    cores: int = 1
    devices: int = 1  # per chip
    config: str = "default"  # libtpu's name for how the cores of a chip are joined


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator; all numbers are of one jax device.
    Example: find_machine("h100x8").hardware."""

    name: str
    platform: str  # cuda or tpu
    memory_bytes: int  # what the runtime offers a program
    peak_flops: float  # bfloat16, dense, per second
    memory_bandwidth: float  # bytes per second
    # bytes per second sent to others of the node or slice, over all links together
    link_bandwidth: float
    # the same to other nodes; a TPU slice is one network however many hosts it spans
    node_bandwidth: float
    host_devices: int  # devices of one host
    kinds: tuple[str, ...]  # what `device_kind` says
    chip: _Gpu | _Tpu

    @property
    def slices(self) -> dict[int, str]:
        """The shapes of this TPU's slices by number of devices."""
        chips = {math.prod(map(int, shape.split("x"))): shape for shape in self.chip.shapes}
        return {n * self.chip.devices: shape for n, shape in chips.items()}


# What a kernel takes beside its work, until the next one can begin: assumptions, which no device
# has confirmed yet.
# cuda: the low end of the 2 to 4 microseconds between two small kernels that depend on each other,
# as XLA launches them in CUDA graphs. tpu: the 1,826 cycles that libtpu writes into its programs as
# its estimate for copying 64 numbers, at the v5e's 1.5 GHz.
LAUNCH_SECONDS = {"cuda": 2e-6, "tpu": 1.2e-6, "cpu": 1e-6}

# v5e and v6e: a pod is 256 chips
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12", "4x8x8", "4x8x12",
          "8x8x8", "8x8x12", "8x8x16", "8x12x16", "8x16x16", "12x16x16")  # fmt: skip
# v5p: the largest job is 6144 chips
_LARGE_CUBES = (*_CUBES, "16x16x16", "16x16x24")
# chips of a host, where not 2x2x1
_HOSTS = {"1x1": [1, 1, 1], "1x1x1": [1, 1, 1], "2x4": [2, 4, 1]}

# GPU memory is what CUDA calls the total (PyTorch: "total capacity"), the lowest seen; nvidia-smi
# shows half a GiB more (81559 MiB on an H100), which the driver keeps. NVLink 4 is 900 GB/s and
# NVLink 3 600 GB/s, both directions together. Nodes are DGX and HGX: a network card of 400 (A100:
# 200) Gb/s for each GPU. TPU memory is the "available HBM" in libtpu's out-of-memory error. ICI is
# half of Google's bidirectional figure, and for v4, which has none, six links of 45 GB/s
# (jax-ml.github.io/scaling-book); small slices are no rings and use fewer. A tpu7x chip is two
# devices with half of everything each; their short cut within the chip is not counted.
TABLE = (
    Hardware("a100", "cuda", int(79.1 * GiB), 312e12, 2.039e12, 300e9, 25e9, 8,
             ("NVIDIA A100-SXM4-80GB",), _Gpu(8, 108, 64, 167936, 40 * 2**20, 1.41)),
    Hardware("h100", "cuda", int(79.1 * GiB), 989e12, 3.35e12, 450e9, 50e9, 8,
             ("NVIDIA H100 80GB HBM3",), _Gpu(9, 132, 128, 233472, 50 * 2**20, 1.98)),
    Hardware("h200", "cuda", int(139.7 * GiB), 989e12, 4.8e12, 450e9, 50e9, 8, ("NVIDIA H200",),
             _Gpu(9, 132, 128, 233472, 60 * 2**20, 1.98)),
    Hardware("v4", "tpu", int(30.75 * GiB), 275e12, 1.2e12, 270e9, 270e9, 4, ("TPU v4",),
             _Tpu(_CUBES, cores=2, config="megacore")),
    Hardware("v5e", "tpu", int(15.75 * GiB), 197e12, 819e9, 200e9, 200e9, 4,
             ("TPU v5 lite", "TPU v5e"), _Tpu(_FLAT)),
    Hardware("v5p", "tpu", int(95.74 * GiB), 459e12, 2.765e12, 600e9, 600e9, 4,
             ("TPU v5", "TPU v5p"), _Tpu(_LARGE_CUBES, cores=2)),
    Hardware("v6e", "tpu", int(31.25 * GiB), 918e12, 1.638e12, 400e9, 400e9, 4,
             ("TPU v6 lite", "TPU v6e"), _Tpu(_FLAT)),
    Hardware("tpu7x", "tpu", int(94.75 * GiB), 1153.5e12, 3.69e12, 300e9, 300e9, 8, ("TPU7x",),
             _Tpu(("1x1x1", *_LARGE_CUBES, "16x24x24"), devices=2)),
)  # fmt: skip
HARDWARE = {hardware.name: hardware for hardware in TABLE}
# Google Cloud's accelerator type
_ALIASES = {"v5litepod": "v5e"}
EXTRAS = {"cuda": "plan-gpu", "tpu": "plan-tpu"}
# any of these modules
COMPILERS = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}


# Of a GPU's memory, what programs can have: XLA's allocator takes a fixed share at its start, the
# one that our programs ask for, and CUDA's context, cuBLAS, cuDNN and NCCL keep about 0.5 GiB
# outside of it. A TPU's runtime has taken its part already: the table has what is left.
_GPU_LIBRARIES = GiB // 2


@dataclass(frozen=True)
class Machine:
    """The devices that a plan is for.
    Example: find_machine("h100x8"); attached_machine() for the devices that jax sees."""

    name: str  # as typed: v5e-16; or attached
    platform: str
    num_devices: int
    hardware: Hardware | None  # None: not in the table, so there is no roofline
    # bytes that the programs of a run can have on a device; None: nobody knows
    capacity: int | None
    capacity_is: str = ""  # in words
    # of a device, what libraries take there, and what the compiler has freed
    process_bytes: int = 0
    compiler_bytes: int = 0


@error_context("target")
def find_machine(text: str) -> Machine:
    """The devices that jax sees, `attached`, or that a name means: h100x8, or v5e-16, a slice as
    Google Cloud names it. v5e and v6e names count chips, others TensorCores, of which a v4 or v5p
    chip joins two into one device. Raises ConfigError, with a name that would do."""
    if text == "attached":
        return attached_machine()
    typed = text.strip().lower()
    match = re.fullmatch(r"([a-z0-9]+?)(?:([x-])([0-9]+))?", typed)
    name, mark, count = match.groups() if match else (text, None, None)
    # people write what their cloud calls it
    hardware = HARDWARE.get(_ALIASES.get(name, name))
    if hardware is None:
        gpus, tpus = ([h.name for h in TABLE if h.platform == platform] for platform in EXTRAS)
        examples = [*(f"{name}x8" for name in gpus), *(f"{name}-16" for name in tpus)]
        near = difflib.get_close_matches(typed, examples, n=1)
        hint = f"did you mean {near[0]}? There are" if near else "there are"
        raise ValueError(
            f"{text!r} is no hardware that is known; {hint} {', '.join(gpus)}, "
            "written like h100x8 (h100x16 is two nodes of eight), and "
            f"{', '.join(tpus)}, written like v5e-16"
        )
    count = 1 if count is None else int(count)
    if hardware.platform == "cuda":
        if mark == "-" or count < 1:
            raise ValueError(
                f"{text!r}: GPUs are written {name}x{max(count, 1)}, one or more of them"
            )
        node = hardware.host_devices
        if count > node and count % node:
            fits = " or ".join(f"{name}x{(count // node + more) * node}" for more in (0, 1))
            raise ValueError(
                f"{text!r}: nodes have {node} GPUs, and several are used whole; {fits} would do"
            )
        capacity = int(GPU_SHARE * (hardware.memory_bytes - _GPU_LIBRARIES))
        capacity_is = (
            f"{GPU_SHARE:.0%} of {hardware.memory_bytes / GiB:.1f} GiB less "
            f"{_GPU_LIBRARIES / GiB:.1f} for CUDA's libraries"
        )
        return Machine(text.strip(), "cuda", count, hardware, capacity, capacity_is)
    # Google Cloud sells slices of these sizes alone
    sizes = [devices * hardware.chip.cores for devices in hardware.slices]
    if mark != "-" or count not in sizes:
        nearest = min(sizes, key=lambda size: abs(size - count))
        known = ", ".join(map(str, sizes))
        raise ValueError(
            f"{text!r} is no TPU slice; {name}-{nearest} would do. The sizes of {name} are {known}"
        )
    capacity_is = "all that its runtime offers"
    num_devices = count // hardware.chip.cores
    return Machine(
        text.strip(), "tpu", num_devices, hardware, hardware.memory_bytes, capacity_is
    )


def devices_of(machine: Machine) -> list:
    """Devices to compile for, which need not be there. Raises ConfigError, naming what to install
    or analytic=true, if there is no compiler."""
    if machine.name == "attached":
        return jax.devices()
    platform = machine.platform
    where = f"target={machine.name}"
    if not any(importlib.util.find_spec(module) for module in COMPILERS[platform]):
        raise ConfigError(
            f"{where}: to compile for it without having it, install its compiler, on Linux: pip "
            f"install -e '.[{EXTRAS[platform]}]'; or estimate without it: analytic=true"
        )
    hardware = machine.hardware
    count = machine.num_devices
    if platform == "cuda":
        nodes = max(1, count // hardware.host_devices)
        # A GPU as XLA wants it described, its GpuTargetConfigProto as text. What is a number below
        # is the same for compute capability 8.0 and 9.0.
        chip = hardware.chip
        target_config = f"""gpu_device_info {{
  cuda_compute_capability {{ major: {chip.capability} }}
  core_count: {chip.multiprocessors} fpus_per_core: {chip.fpus} clock_rate_ghz: {chip.clock_ghz}
  memory_bandwidth: {int(hardware.memory_bandwidth)} device_memory_size: {hardware.memory_bytes}
  l2_cache_size: {chip.l2_cache} shared_memory_per_core: {chip.shared_memory}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {chip.shared_memory - 1024}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  runtime_version: "12.8.0" driver_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{hardware.kinds[0]}"
"""
        # <slices>x<nodes>x<devices of a node>; jax.make_mesh takes only devices of one slice
        topology = {
            "topology": f"1x{nodes}x{count // nodes}",
            "target_config": target_config,
        }
    else:
        # Read when libtpu is loaded: there is no metadata server to ask, and others may compile.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        shapes = hardware.slices
        if count not in shapes:
            some = ", ".join(map(str, shapes))
            raise ConfigError(
                f"{where}: no {hardware.name} slice shows {count} devices; some show {some}; or "
                "estimate without its compiler: analytic=true"
            )
        topology = {
            "topology_name": f"{hardware.name}:{shapes[count]}",
            "chips_per_host_bounds": _HOSTS.get(shapes[count], [2, 2, 1]),
            "chip_config_name": hardware.chip.config,
        }
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform=platform, **topology).devices)
    except NotImplementedError as error:
        raise ConfigError(
            f"{where}: its compiler is installed, but jax has not loaded it ({error}); set "
            "JAX_PLATFORMS=cpu before the program starts; or estimate without it: analytic=true"
        ) from error


def of_device(device: jax.Device) -> Hardware | None:
    """The hardware that a device says it is."""
    return next((hardware for hardware in TABLE if device.device_kind in hardware.kinds), None)


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that a program may have on this device; those of a CPU share its memory evenly."""
    if device.platform == "cpu":
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return size // jax.local_device_count("cpu")
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        # a compile-only device
        return None


def attached_machine() -> Machine:
    """The devices that jax sees; a CPU's share its memory evenly. All processes must ask: they
    decide by the least."""
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    # a program that one device refuses ends the run on all
    limits = allgather_values(memory_limit(device))
    of_process = (_PROCESS_BYTES, _COMPILER_BYTES)
    return Machine(
        "attached",
        device.platform,
        jax.device_count(),
        of_device(device),
        None if None in limits else min(limits),
        "physical memory" if on_cpu else "what the runtime allows",
        *(size // jax.local_device_count() for size in of_process if on_cpu),
    )
