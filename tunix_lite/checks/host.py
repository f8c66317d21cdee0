"""This machine, as far as no device is needed: Python, jax, memory, disk, and the hub's token."""

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from tunix_lite.checks.lines import CheckLine, fails, ok, warns

GiB = 2**30
# GiB of disk below which a run is likely to end in the middle, and below which it may.
DISK_FAILS = 1
DISK_WARNS = 10
# GiB of memory below which even a small run is swapped or killed.
MEMORY_WARNS = 2
# The packages that let jax use a kind of accelerator, and the extra of ours that brings them.
PLUGINS = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13", "libtpu": "tpu"}
# Files of a machine with TPUs.
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")


def version(package: str) -> str | None:
    """Of an installed package; None: it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def python_line() -> CheckLine:
    return ok("python", f"{platform.python_version()} at {sys.executable}")


def jax_lines(num_gpus: int, environ: Mapping[str, str] = os.environ) -> list[CheckLine]:
    """jax and its plugins, and whether they are of one version and match the machine.

    num_gpus: NVIDIA GPUs of this machine.
    """
    jax = version("jax")
    jaxlib = version("jaxlib")
    if jax is None or jaxlib is None:
        return [fails("jax", "is not installed", "pip install -e .")]
    lines = [ok("jax", f"{jax}, jaxlib {jaxlib}")]

    # A plugin speaks to jaxlib, and must be of its version.
    there = {name: number for name in PLUGINS if (number := version(name))}
    for name, number in there.items():
        if name.startswith("jax-") and number != jaxlib:
            text = f"{name} {number} beside jaxlib {jaxlib}: they must be of one version"
            lines.append(fails("plugin", text, f"pip install -U 'jax[{PLUGINS[name]}]=={jax}'"))
        else:
            lines.append(ok("plugin", f"{name} {number}"))

    # An accelerator that jax has no plugin for is not used. The user may want it so.
    if wants_cpu(environ):
        return lines
    has_tpus = not num_gpus and any(Path(file).exists() for file in TPU_FILES)
    if num_gpus and not any("cuda" in name for name in there):
        text = f"none for the {num_gpus} NVIDIA GPUs here, so jax uses the CPU"
        lines.append(fails("plugin", text, "pip install -e '.[cuda12]'"))
    if has_tpus and "libtpu" not in there:
        text = "none for the TPUs here, so jax uses the CPU"
        lines.append(fails("plugin", text, "pip install -e '.[tpu]'"))
    return lines


def wants_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks jax for the CPU."""
    return "cpu" in (environ.get("JAX_PLATFORMS") or environ.get("JAX_PLATFORM_NAME") or "")


def cuda_version() -> int | None:
    """CUDA's major version that jax's plugin is made for; None: there is no plugin."""
    return next((n for n in (13, 12) if version(f"jax-cuda{n}-plugin")), None)


def host_memory() -> CheckLine:
    """Of the host: what there is, what is free, and what a container may have of it."""
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
    if free < MEMORY_WARNS * GiB:
        return warns("memory", text, "end other programs: less than 2 GiB is too little for a run")
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
    has_file = os.path.isfile(file) and os.path.getsize(file) > 0
    where = "HF_TOKEN" if environ.get("HF_TOKEN") else str(file) if has_file else None
    offline = "; HF_HUB_OFFLINE: only what is in the cache" if environ.get("HF_HUB_OFFLINE") else ""
    if hub_model is not None and version("huggingface_hub") is None:
        text = f"{hub_model} comes from the hub, and huggingface_hub is not installed"
        return fails("hub", text, "pip install -e '.[hub]'")
    if where is not None:
        return ok("hub", f"a token in {where}{offline}")
    if hub_model is None:
        return ok("hub", f"no token, and these settings need none{offline}")
    return warns("hub", f"no token; {hub_model} may need one{offline}", "hf auth login")
