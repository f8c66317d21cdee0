"""Looks at the devices from another process, which is ended where it hangs.

Starting a device, and everything that several processes do together, can wait for ever or end the
process from C++ code. So checks/probe.py does it in a process that can be killed.
"""

import dataclasses
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tunix_lite.checks.lines import CheckLine, fails
from tunix_lite.checks.probe import Probe
from tunix_lite.distributed.process_place import LaunchConfig
from tunix_lite.workers.process import WorkerProcess

# Seconds more than the time-out until the probe is ended: it may say by itself what is missing.
GRACE = 15
# Characters of a library's last words that are shown.
MOST = 300
PRETENDS = re.compile(r"--xla_force_host_platform_device_count=\S*")

STAGES = {
    "start": "Python and jax start",
    "processes": "the processes meet",
    "devices": "jax starts on the devices",
    "arithmetic": "each device computes",
    "all-reduce": "all devices sum",
    "folder": "all processes look at the folder",
    "leaving": "the processes part",
}
HANGS = {
    "start": "python -X importtime -c 'import jax'  # what takes so long",
    "processes": "start the same command on every machine, at one time",
    "devices": "end the program that holds the device (fuser -v /dev/nvidia* /dev/accel*)",
    "arithmetic": "reset the device, or leave it out: CUDA_VISIBLE_DEVICES=...",
    "all-reduce": "NCCL_DEBUG=INFO tunix-lite check  # NCCL says what it tries",
}
ANY_HANG = "look at the lines of the other processes"


def probe_environment(pretend: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the probe. pretend: so many devices of the CPU in place of those attached.

    It takes as little of a GPU's memory as it can: another program may be using it.
    """
    found = dict(environ)
    found["PYTHONPATH"] = os.pathsep.join([path for path in sys.path if path])
    found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if pretend is not None:
        found["JAX_PLATFORMS"] = "cpu"
        found["JAX_NUM_CPU_DEVICES"] = str(pretend)
        found["XLA_FLAGS"] = PRETENDS.sub("", found.get("XLA_FLAGS", "")).strip()
    return found


def look_at_devices(
    launch: LaunchConfig,
    folder: Path,
    timeout: float,
    environment: dict[str, str],
    show: Callable[[CheckLine], None],
    waiting: Callable[[str, float], None] = lambda what, seconds: None,
) -> dict[str, Any]:
    """Shows each line as it comes. Returns the facts about the devices, {} where nothing came.

    timeout: seconds for each stage. waiting: (what, seconds so far), called a few times a second.
    """
    launch = dataclasses.replace(launch, timeout=min(launch.timeout, max(1, int(timeout))))
    facts: dict[str, Any] = {}
    with tempfile.TemporaryFile() as noise:
        # What libraries print goes into a file, of which a failure shows the end.
        worker = WorkerProcess(environment, output=noise)
        try:
            worker.send(pickle.dumps([Probe(launch, folder)]), timeout)
            for number, (stage, doing) in enumerate(STAGES.items()):
                call = None if stage == "start" else number
                seconds = timeout + (GRACE if stage == "processes" else 0)
                if call is not None:
                    worker.send(pickle.dumps([(call, 0, (stage,))]), seconds)
                kind, found = worker.answer(seconds, call, partial(waiting, doing))
                if kind not in ("", "ready"):
                    show(_ended(stage, kind, found, timeout, _last_words(noise)))
                    break
                lines, seen = found or ([], {})
                facts |= seen
                for line in lines:
                    show(CheckLine(**line))
                if any(line["state"] == "fails" for line in lines):
                    break
        finally:
            # Nobody is left behind, whatever it waits for.
            worker.kill()
            worker.release()
    return facts


def _ended(stage: str, kind: str, how: str | None, timeout: float, words: str) -> CheckLine:
    """A line about a probe that ended without an answer, or still hangs."""
    if kind == "timeout":
        text = f"no answer in {timeout:.0f} s"
    else:
        text = how.replace("ended its process with SIG", "ended its process with signal SIG")
        text = text.replace("ended its process", "the process ended")
    last = f"; its last words: {words}" if words else ""
    return fails(stage, f"{STAGES[stage]}: {text}{last}", HANGS.get(stage, ANY_HANG))


def _last_words(noise: BinaryIO) -> str:
    """The last line that a library printed."""
    size = noise.seek(0, os.SEEK_END)
    noise.seek(max(0, size - 20_000))
    lines = noise.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-MOST:] if lines else ""
