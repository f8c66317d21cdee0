"""This machine, as far as no device is needed: Python, jax, and NVIDIA GPUs as `nvidia-smi`
describes them. jax is not asked: it would start on the device."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.distributed.agreement import installed_version
from tunix_lite.files.plain_text import escaped

# The packages that let jax use a kind of accelerator, and the extra of ours that brings them.
_PLUGINS = {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13", "libtpu": "tpu"}
# Files of a machine with TPUs.
_TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
# Seconds that nvidia-smi may take; on a machine with a hanging GPU it never ends.
SMI_SECONDS = 20
# MiB of a GPU in use before the check says so: a driver alone takes some.
_MUCH = 1024
_MARKS = {"ok": "ok  ", "warns": "warn", "fails": "FAIL"}


@dataclass(frozen=True)
class CheckLine:
    """One thing that was looked at: it is in order, needs a look, or must be mended.

    Example: `CheckLine("fails", "disk", "outputs/ is read-only", "hydra.run.dir=/a/folder")`.
    """

    # ok, warns or fails
    state: str
    name: str
    text: str
    # the command or the setting that mends it
    fix: str | None = None

    def __str__(self) -> str:
        """The line, and below it what mends it."""
        text = f"{_MARKS[self.state]} {self.name:<14}{escaped(self.text, 600)}"
        return text + (f"\n{' ' * 19}-> {escaped(self.fix, 600)}" if self.fix else "")


def ok(name: str, text: str) -> CheckLine:
    return CheckLine("ok", name, text)


def warns(name: str, text: str, fix: str) -> CheckLine:
    return CheckLine("warns", name, text, fix)


def fails(name: str, text: str, fix: str) -> CheckLine:
    return CheckLine("fails", name, text, fix)


def machine_lines(environ: Mapping[str, str] = os.environ) -> list[CheckLine]:
    """Python, jax and its plugins, and whether they are of one version and match the machine; and
    the GPUs."""
    num_gpus, of_gpus = gpu_lines(environ)
    jax = installed_version("jax")
    jaxlib = installed_version("jaxlib")
    lines = [ok("python", f"{platform.python_version()} at {sys.executable}")]
    lines.append(ok("jax", f"{jax}, jaxlib {jaxlib}"))

    # A plugin speaks to jaxlib, and must be of its version.
    there = {name: number for name in _PLUGINS if (number := installed_version(name))}
    for name, number in there.items():
        if name.startswith("jax-") and number != jaxlib:
            text = f"{name} {number} beside jaxlib {jaxlib}: they must be of one version"
            lines.append(
                fails("plugin", text, f"pip install -U 'jax[{_PLUGINS[name]}]=={jax}'")
            )
        else:
            lines.append(ok("plugin", f"{name} {number}"))

    # An accelerator that jax has no plugin for is not used. The user may want it so.
    missing = None
    if num_gpus and not any("cuda" in name for name in there):
        missing = f"{num_gpus} NVIDIA GPUs", "cuda12"
    elif not num_gpus and any(Path(f).exists() for f in _TPU_FILES) and "libtpu" not in there:
        missing = "TPUs", "tpu"
    if missing and "cpu" not in environ.get("JAX_PLATFORMS", ""):
        text = f"none for the {missing[0]} here, so jax uses the CPU"
        lines.append(fails("plugin", text, f"pip install -e '.[{missing[1]}]'"))
    return lines + of_gpus


def gpu_lines(environ: Mapping[str, str]) -> tuple[int, list[CheckLine]]:
    """The number of NVIDIA GPUs, and lines on their driver and on memory that others use, among
    those that CUDA_VISIBLE_DEVICES shows."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0, []
    query = "--query-gpu=index,name,driver_version,memory.used,memory.total"
    words = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_SECONDS)
        printed = (done.stdout + done.stderr).strip().splitlines() or [str(done.returncode)]
        error = f"nvidia-smi: {printed[0]}" if done.returncode else None
    except subprocess.TimeoutExpired:
        error = f"nvidia-smi gives no answer in {SMI_SECONDS} s"
    if error is not None:
        fix = "nvidia-smi  # must answer: reload the driver, or reboot"
        return 0, [fails("driver", error, fix)]

    # (index, name, driver, MiB used, MiB in all); a GPU may show its memory as [N/A]
    gpus = [re.split(r", *", line.strip()) for line in done.stdout.splitlines()]
    kinds = ", ".join(f"{n} x {name}" for name, n in Counter(gpu[1] for gpu in gpus).items())
    lines = [ok("driver", f"NVIDIA {gpus[0][2]}; {kinds}")]
    chosen = environ.get("CUDA_VISIBLE_DEVICES", "")
    is_chosen = re.fullmatch(r"[\d, ]+", chosen)
    uses = {
        index: (int(used), int(total))
        for index, _, _, used, total in gpus
        if (used + total).isdecimal() and (not is_chosen or index in re.split("[, ]+", chosen))
    }
    taken = {i: sizes for i, sizes in uses.items() if sizes[0] > max(_MUCH, sizes[1] // 20)}
    if taken:
        texts = [
            f"{i}: {u / 1024:.1f} of {all / 1024:.1f} GiB" for i, (u, all) in taken.items()
        ]
        free = ",".join(uses.keys() - taken.keys())
        who = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv  # who it is"
        fix = f"CUDA_VISIBLE_DEVICES={free}" if free else who
        lines.append(warns("GPU memory", f"others use GPU {', '.join(texts)}", fix))
    elif uses:
        lines.append(ok("GPU memory", f"free on all {len(uses)}"))
    return len(gpus), lines
