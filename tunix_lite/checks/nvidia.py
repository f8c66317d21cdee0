"""NVIDIA GPUs as `nvidia-smi` describes them: the driver, memory in use, and how they are linked.

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
FIELDS = "index,name,driver_version,memory.used,memory.total"
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
    text, error = _ask(program, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    if error is not None:
        return [], error
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        # A GPU may show its memory as [N/A].
        if len(parts) == 5:
            sizes = [int(part) if part.isdecimal() else 0 for part in parts[3:]]
            found.append(GpuInUse(*parts[:3], *sizes))
    return found, None


def _ask(program: str, *words: str) -> tuple[str, str | None]:
    """What nvidia-smi prints, and what is wrong with it."""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi gives no answer in {SECONDS} s"
    except OSError as error:
        return "", f"nvidia-smi cannot be run ({error.strerror})"
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        return "", f"nvidia-smi: {lines[0]}"
    return done.stdout, None


def driver_line(found: list[GpuInUse], error: str | None, cuda: int | None) -> CheckLine:
    """cuda: the major version of CUDA that jax's plugin is made for; None: it has no plugin."""
    if error is not None:
        return fails("driver", error, "nvidia-smi  # must answer: reload the driver, or reboot")
    if not found:
        return ok("driver", "no NVIDIA GPU here")
    driver = found[0].driver
    kinds = ", ".join(f"{n} x {name}" for name, n in Counter(gpu.name for gpu in found).items())
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    oldest = OLDEST_DRIVER.get(cuda or 0)
    if oldest is not None and numbers < oldest:
        needed = ".".join(map(str, oldest))
        fix = "pip install -e '.[cuda12]'" if cuda == 13 and numbers >= OLDEST_DRIVER[12] else None
        return fails(
            "driver",
            f"NVIDIA {driver}, and CUDA {cuda} needs {needed} or newer; {kinds}",
            fix or f"install NVIDIA's driver {needed} or newer",
        )
    return ok("driver", f"NVIDIA {driver}; {kinds}")


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
    uses = ", ".join(f"{gpu.index}: {_gib(gpu.used)} of {_gib(gpu.total)} GiB" for gpu in taken)
    free = ",".join(gpu.index for gpu in found if gpu not in taken)
    who = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv  # who it is"
    fix = f"CUDA_VISIBLE_DEVICES={free}" if free else who
    return [warns("GPU memory", f"others use GPU {uses}", fix)]


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f}"


def topology_lines(num_gpus: int) -> list[CheckLine]:
    """How the GPUs of this machine are linked, as `nvidia-smi topo -m` draws it."""
    program = shutil.which("nvidia-smi")
    if num_gpus < 2 or program is None:
        return []
    text, error = _ask(program, "topo", "-m")
    if error is not None:
        return [warns("topology", error)]
    links = Counter(gpu_links(text))
    shown = ", ".join(f"{count} pairs {link}" for link, count in sorted(links.items()))
    if links and not any(link.startswith("NV") for link in links):
        return [warns("topology", f"{shown}: no NVLink, so GPUs exchange over PCIe")]
    return [ok("topology", shown or "nvidia-smi topo -m shows no links")]


def gpu_links(text: str) -> list[str]:
    """The link of each pair of GPUs in the table of `nvidia-smi topo -m`: NV18, PIX, SYS ..."""
    rows = []
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words:
            rows.append(words[1:])
    return [row[j] for i, row in enumerate(rows) for j in range(i + 1, min(len(rows), len(row)))]
