"""NVIDIA GPUs as `nvidia-smi` describes them: the driver, and memory in use.

jax is not asked here: it would start on the device.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.checks.lines import CheckLine, fails, ok, warns

# Seconds that nvidia-smi may take; on a machine with a hanging GPU it never ends.
SECONDS = 20
# CUDA's major version -> the oldest driver that runs it (CUDA's release notes).
OLDEST_DRIVER = {12: (525, 60), 13: (580, 0)}
# MiB of a GPU in use before the check says so: a driver alone takes some.
MUCH = 1024
QUERY = ("--query-gpu=index,name,driver_version,memory.used,memory.total",)
QUERY += ("--format=csv,noheader,nounits",)
DRIVER = Path("/proc/driver/nvidia/version")


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


def gpus() -> tuple[list[GpuInUse], str | None]:
    """The GPUs of this machine, and why they cannot be listed; None: no reason to complain."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "there is a driver, but no nvidia-smi" if DRIVER.exists() else None
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi gives no answer in {SECONDS} s"
    except OSError as error:
        return [], f"nvidia-smi cannot be run ({error.strerror})"
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        return [], f"nvidia-smi: {lines[0]}"
    found = []
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        # A GPU may show its memory as [N/A].
        sizes = [int(part) if part.isdecimal() else 0 for part in parts[3:]]
        if len(sizes) == 2:
            found.append(GpuInUse(*parts[:3], *sizes))
    return found, None


def driver_line(found: list[GpuInUse], error: str | None, cuda: int | None) -> CheckLine:
    """cuda: the major version of CUDA that jax's plugin is made for; None: it has no plugin."""
    if error is not None:
        return fails("driver", error, "nvidia-smi  # must answer: reload the driver, or reboot")
    if not found:
        return ok("driver", "no NVIDIA GPU here")
    driver = found[0].driver
    kinds = ", ".join(f"{n} x {name}" for name, n in Counter(gpu.name for gpu in found).items())
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


def memory_lines(found: list[GpuInUse], environ: Mapping[str, str] = os.environ) -> list[CheckLine]:
    """Which GPUs hold memory of other programs, before ours uses them.

    Only those that CUDA_VISIBLE_DEVICES lets a program see.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"[\d, ]+", visible):
        wanted = [index.strip() for index in visible.split(",")]
        found = [gpu for gpu in found if gpu.index in wanted]
    if not found:
        return []
    taken = [gpu for gpu in found if gpu.used > max(MUCH, gpu.total // 20)]
    if not taken:
        most = max(gpu.used for gpu in found)
        return [ok("GPU memory", f"free on all {len(found)}: others use {most} MiB at most")]
    uses = [f"{gpu.index}: {gpu.used / 1024:.1f} of {gpu.total / 1024:.1f} GiB" for gpu in taken]
    free = ",".join(gpu.index for gpu in found if gpu not in taken)
    who = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv  # who it is"
    fix = f"CUDA_VISIBLE_DEVICES={free}" if free else who
    return [warns("GPU memory", f"others use GPU {', '.join(uses)}", fix)]
