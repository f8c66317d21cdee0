"""Several hosts draw what one host with the same devices draws."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import rollout_worker

import tunix_lite

HERE = Path(__file__).parent
LIMIT = 120  # seconds


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def started(index: int, count: int, address: str, folder: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(Path(tunix_lite.__file__).parents[1])}
    environment.pop("XLA_FLAGS", None)  # of this process: four devices
    command = [HERE / "rollout_worker.py", address, str(count), str(index), folder / f"{index}.json"]
    with open(folder / f"{index}.log", "w") as log:
        return subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)


def drawn_by(count: int, folder: Path) -> list[dict]:
    """What each of `count` processes on this machine saw. They are gone afterwards, whatever happens."""
    address, deadline = f"127.0.0.1:{free_port()}", time.monotonic() + LIMIT
    processes = []
    try:
        for index in range(count):
            processes.append(started(index, count, address, folder))
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
            if any(codes):
                break  # the others would wait for the one that failed
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join((folder / f"{index}.log").read_text()[-3000:] for index in range(count))
    assert codes == [0] * count, f"exit codes {codes}; None is one that was still running\n{said}"
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(count)]


def test_two_processes_draw_what_one_draws_and_both_see_all_of_it(tmp_path):
    first, second = drawn_by(2, tmp_path)
    assert first["devices"] == second["devices"] == [4, 2]
    assert first == second, "to the bit"
    assert len(jax.devices()) == 4
    alone = rollout_worker.draw()
    for what in ("tokens", "reasons", "took"):
        assert first[what] == alone[what]
    np.testing.assert_allclose(np.concatenate(first["logprobs"]), np.concatenate(alone["logprobs"]), atol=1e-5)
    assert {"eos", "length"} == set(first["reasons"]) and len({tuple(row) for row in first["tokens"]}) == 10
