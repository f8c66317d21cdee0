"""This machine, as far as no device is needed: Python, jax, memory, disk, the hub's token, and
NVIDIA GPUs as `nvidia-smi` describes them. jax is not asked: it would start on the device."""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.commands.checks.lines import CheckLine, fails, ok, warns
from tunix_lite.distributed.agreement import installed_version

GiB = 2**30
# GiB of disk below which a run is likely to end in the middle, and below which it may.
DISK_FAILS = 1
DISK_WARNS = 10
# The packages that let jax use a kind of accelerator, and the extra of ours that brings them.
PLUGINS = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13", "libtpu": "tpu"}
# Files of a machine with TPUs, and of one with NVIDIA's driver.
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
DRIVER = Path("/proc/driver/nvidia/version")

# Seconds that nvidia-smi may take; on a machine with a hanging GPU it never ends.
SMI_SECONDS = 20
SMI_QUERY = "--query-gpu=index,name,driver_version,memory.used,memory.total"
# CUDA's major version -> the oldest driver that runs it (CUDA's release notes).
OLDEST_DRIVER = {12: (525, 60), 13: (580, 0)}
# MiB of a GPU in use before the check says so: a driver alone takes some.
MUCH = 1024


def jax_lines(num_gpus: int, environ: Mapping[str, str] = os.environ) -> list[CheckLine]:
    """jax and its plugins, and whether they are of one version and match the machine.

    num_gpus: NVIDIA GPUs of this machine.
    """
    jax = installed_version("jax")
    jaxlib = installed_version("jaxlib")
    lines = [ok("jax", f"{jax}, jaxlib {jaxlib}")]

    # A plugin speaks to jaxlib, and must be of its version.
    there = {name: number for name in PLUGINS if (number := installed_version(name))}
    for name, number in there.items():
        if name.startswith("jax-") and number != jaxlib:
            text = f"{name} {number} beside jaxlib {jaxlib}: they must be of one version"
            lines.append(fails("plugin", text, f"pip install -U 'jax[{PLUGINS[name]}]=={jax}'"))
        else:
            lines.append(ok("plugin", f"{name} {number}"))

    # An accelerator that jax has no plugin for is not used. The user may want it so.
    missing = None
    if num_gpus and not any("cuda" in name for name in there):
        missing = f"{num_gpus} NVIDIA GPUs", "cuda12"
    elif not num_gpus and any(Path(f).exists() for f in TPU_FILES) and "libtpu" not in there:
        missing = "TPUs", "tpu"
    if missing and not wants_cpu(environ):
        text = f"none for the {missing[0]} here, so jax uses the CPU"
        lines.append(fails("plugin", text, f"pip install -e '.[{missing[1]}]'"))
    return lines


def wants_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks jax for the CPU."""
    return "cpu" in (environ.get("JAX_PLATFORMS") or environ.get("JAX_PLATFORM_NAME") or "")


def cuda_version() -> int | None:
    """CUDA's major version that jax's plugin is made for; None: there is no plugin."""
    return next((n for n in (13, 12) if installed_version(f"jax-cuda{n}-plugin")), None)


# ---- memory, disk, hub


def host_memory_line() -> CheckLine:
    """The host's memory: what there is, what is free, and what a container may have of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text() if meminfo.exists() else "")
    free = int(match[1]) * 1024 if match else total
    text = f"{free / GiB:.1f} of {total / GiB:.1f} GiB free, {os.cpu_count()} processors"

    # A container's limit counts, not what the machine has.
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()).isdecimal() and int(most) < total:
        text += f"; this container may use {int(most) / GiB:.1f} GiB"
        free = min(free, int(most))
    if free < 2 * GiB:
        return warns(
            "memory", text, "end other programs: less than 2 GiB is too little for a run"
        )
    return ok("memory", text)


def disk_line(folder: Path) -> CheckLine:
    """Whether runs can be written below `folder`, and how much room there is."""
    here = folder.absolute()
    there = next(place for place in (here, *here.parents) if place.exists())
    elsewhere = "hydra.run.dir=/a/folder/with/room"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".tunix-lite-check-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return fails("disk", f"{there} cannot be written ({error.strerror})", elsewhere)
    free = shutil.disk_usage(there).free / GiB
    text = f"{free:.1f} GiB free for {folder}/"
    if free < DISK_FAILS:
        return fails("disk", text, elsewhere)
    if free < DISK_WARNS:
        return warns("disk", f"{text}; a checkpoint of 1B weights takes some 12 GiB", elsewhere)
    return ok("disk", text)


def token_line(hub_model: str | None, environ: Mapping[str, str] = os.environ) -> CheckLine:
    """Whether there is a token for the Hugging Face hub. The token itself is never shown.

    hub_model: the name of the run's model on the hub; None: it is not from there.
    """
    home = Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    file = Path(environ.get("HF_TOKEN_PATH") or home / "token")
    if hub_model is not None and installed_version("huggingface_hub") is None:
        text = f"{hub_model} comes from the hub, and huggingface_hub is not installed"
        return fails("hub", text, "pip install -e '.[hub]'")
    if environ.get("HF_TOKEN") or (file.is_file() and file.stat().st_size > 0):
        return ok("hub", f"a token in {'HF_TOKEN' if environ.get('HF_TOKEN') else file}")
    if hub_model is None:
        return ok("hub", "no token, and these settings need none")
    return warns("hub", f"no token; {hub_model} may need one", "hf auth login")


# ---- NVIDIA GPUs


@dataclass(frozen=True)
class GpuInUse:
    """One GPU, before our program uses it.

    Example: GpuInUse("0", "NVIDIA H100 80GB HBM3", "570.86.15", 4, 81559).
    """

    index: str
    name: str
    driver: str
    # MiB
    used: int
    total: int


def nvidia_gpus() -> tuple[list[GpuInUse], str | None]:
    """The GPUs of this machine, and why they cannot be listed; None: no reason to complain."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "there is a driver, but no nvidia-smi" if DRIVER.exists() else None
    words = [program, SMI_QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gives no answer in {SMI_SECONDS} s"
    except OSError as error:
        return [], f"nvidia-smi cannot be run ({error.strerror})"
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [
            f"exit code {done.returncode}"
        ]
        return [], f"nvidia-smi: {lines[0]}"
    gpus = []
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        # A GPU may show its memory as [N/A].
        sizes = [int(part) if part.isdecimal() else 0 for part in parts[3:]]
        if len(sizes) == 2:
            gpus.append(GpuInUse(*parts[:3], *sizes))
    return gpus, None


def driver_line(gpus: list[GpuInUse], error: str | None, cuda: int | None) -> CheckLine:
    """cuda: the major version of CUDA that jax's plugin is made for; None: it has no plugin."""
    if error is not None:
        return fails("driver", error, "nvidia-smi  # must answer: reload the driver, or reboot")
    if not gpus:
        return ok("driver", "no NVIDIA GPU here")
    driver = gpus[0].driver
    kinds = ", ".join(f"{n} x {name}" for name, n in Counter(gpu.name for gpu in gpus).items())
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    oldest = OLDEST_DRIVER.get(cuda or 0, (0,))
    if numbers >= oldest:
        return ok("driver", f"NVIDIA {driver}; {kinds}")
    needed = ".".join(map(str, oldest))
    fix = f"install NVIDIA's driver {needed} or newer"
    if cuda == 13 and numbers >= OLDEST_DRIVER[12]:
        fix = "pip install -e '.[cuda12]'"
    text = f"NVIDIA {driver}, and CUDA {cuda} needs {needed} or newer; {kinds}"
    return fails("driver", text, fix)


def gpu_memory_lines(
    gpus: list[GpuInUse], environ: Mapping[str, str] = os.environ
) -> list[CheckLine]:
    """Which GPUs hold memory of other programs, among those that CUDA_VISIBLE_DEVICES shows."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"[\d, ]+", visible):
        gpus = [gpu for gpu in gpus if gpu.index in re.split(r"[, ]+", visible)]
    if not gpus:
        return []
    taken = [gpu for gpu in gpus if gpu.used > max(MUCH, gpu.total // 20)]
    if not taken:
        return [ok("GPU memory", f"free on all {len(gpus)}")]
    uses = [f"{gpu.index}: {gpu.used / 1024:.1f} of {gpu.total / 1024:.1f} GiB" for gpu in taken]
    free = ",".join(gpu.index for gpu in gpus if gpu not in taken)
    who = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv  # who it is"
    fix = f"CUDA_VISIBLE_DEVICES={free}" if free else who
    return [warns("GPU memory", f"others use GPU {', '.join(uses)}", fix)]
