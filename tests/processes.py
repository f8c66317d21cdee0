"""Several processes of this machine that are one run, as on several hosts: what starts them, and what they do."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import tunix_lite
from tunix_lite.distributed import join
from tunix_lite.distributed.agreement import process_info
from tunix_lite.distributed.process_place import LaunchConfig

LIMIT = 240  # seconds until all of them must be done, where nobody says
LINES = 40  # of each one's output that are shown where one fails


def run_together(script: str | Path, count: int, devices: int, folder: Path, *arguments, limit=LIMIT) -> list[dict]:
    """What `count` processes with `devices` together answer. They are gone afterwards, whatever happens."""
    address, deadline = f"127.0.0.1:{free_port()}", time.monotonic() + limit
    processes = []
    try:
        for index in range(count):
            call = [script, address, str(count), str(index), folder / f"{index}.json", *arguments]
            processes.append(_started(call, devices // count, folder / f"{index}.log"))
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
            if any(codes):
                break  # the others would wait for the one that failed
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * count, f"exit codes {codes}; None is one that was still running\n{_last_words(folder, count)}"
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(count)]


def answer(*works: Callable[..., dict]) -> None:
    """What a script of `run_together` does: of these functions the one that its first argument names is called with the
    others as one of the processes, and what it saw is JSON."""
    address, count, index, file, name, *arguments = sys.argv[1:]
    work = {work.__name__: work for work in works}[name]
    if int(count) > 1:
        join.initialise(LaunchConfig(address, int(count), int(index)), {}, process_info({}, ""))
    said = work(*arguments) | {"devices": [jax.device_count(), jax.local_device_count()]}
    with open(file, "w") as out:
        json.dump(said, out, default=np.ndarray.tolist)
    if int(count) > 1:
        jax.distributed.shutdown()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


# what gloo says of each connection; its threads mix the pieces
GLOO = re.compile(
    r"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*"
)


def own_lines(text: str) -> list[str]:
    """The lines of a run's output that gloo has not printed."""
    return [line for line in text.splitlines() if not GLOO.fullmatch(line)]


def _started(call: list, devices: int, log_file: Path) -> subprocess.Popen:
    folders = Path(tunix_lite.__file__).parents[1], Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}  # distributed/join.py
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": " ".join(flags),  # as here, without the pretend devices of this process
    }
    with open(log_file, "w") as log:
        return subprocess.Popen([sys.executable, *call], env=environment, stdout=log, stderr=log)


def _last_words(folder: Path, count: int) -> str:
    logs = ((folder / f"{index}.log").read_text().splitlines() for index in range(count))
    return "\n".join(f"---- process {index}\n" + "\n".join(log[-LINES:]) for index, log in enumerate(logs))
