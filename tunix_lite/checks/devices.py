"""Looks at the devices from another process, which is ended where it hangs.

Starting a device, and everything that several processes do together, can wait for ever or end the
process from C++ code. So checks/probe.py does it, and what it says is read here.
"""

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tunix_lite.checks.lines import CheckLine, fails
from tunix_lite.distributed.process_place import LaunchConfig

PROBE = "tunix_lite.checks.probe"
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
    settings = {"launch": dataclasses.asdict(launch), "folder": str(folder)}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryFile() as noise:
        process = subprocess.Popen(
            [sys.executable, "-m", PROBE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            env=environment,
            start_new_session=True,
        )
        try:
            process.stdin.write(json.dumps(settings).encode())
            process.stdin.close()
            stage, has_failed, is_done = _read(process, timeout, facts, show, waiting)
            if not is_done and not has_failed:
                show(_ended(process, stage, timeout, _last_words(noise)))
        finally:
            # Nobody is left behind, whatever it waits for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    return facts


def _read(
    process: subprocess.Popen,
    timeout: float,
    facts: dict[str, Any],
    show: Callable[[CheckLine], None],
    waiting: Callable[[str, float], None],
) -> tuple[str, bool, bool]:
    """Reads what the probe says until it is done, ends, or is silent for too long.

    Returns its last stage, whether a line failed, and whether it said that it is done.
    """
    stage = "start"
    has_failed = False
    began = time.monotonic()
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() - began < timeout + (GRACE if stage == "processes" else 0):
            if not ready.select(0.2):
                waiting(STAGES.get(stage, stage), time.monotonic() - began)
                continue
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                # Its end: give it a moment to become an exit code.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                return stage, has_failed, False
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                said = json.loads(line)
                began = time.monotonic()
                stage = said.get("stage", stage)
                facts |= said.get("facts", {})
                if "line" in said:
                    found = CheckLine(**said["line"])
                    has_failed |= found.state == "fails"
                    show(found)
                if "done" in said:
                    return stage, has_failed, True
    return stage, has_failed, False


def _ended(process: subprocess.Popen, stage: str, timeout: float, words: str) -> CheckLine:
    """Of a probe that has ended without a word, or that still hangs."""
    doing = STAGES.get(stage, stage)
    last = f"; its last words: {words}" if words else ""
    mends = HANGS.get(stage, ANY_HANG)
    code = process.poll()
    if code is None:
        return fails(stage, f"{doing}: no answer in {timeout:.0f} s{last}", mends)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return fails(stage, f"{doing}: the process ended with {how}{last}", mends)


def _last_words(noise: BinaryIO) -> str:
    """The last line that a library printed."""
    size = noise.seek(0, os.SEEK_END)
    noise.seek(max(0, size - 20_000))
    lines = noise.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-MOST:] if lines else ""
