"""A loop over HTTP gives the numbers of the same loop in Python, bit for bit, also when the server is killed in it."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import free_port
from test_tinker import listening
from test_trainer import ONE
from test_trainer import TINY as OF_A_TRAINER
from tinker_client import RANK, SEED, TARGETS, Client, InPython, OverHttp, loop

import tunix_lite
from tunix_lite.serving.tinker.store import Store

pytest.importorskip("aiohttp")

TINY = [*OF_A_TRAINER, ONE, "rollout.num_slots=4", "rollout.chunk=4"]
LENGTHS = {"max_prompt_length": 16, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def trainer():
    with tunix_lite.Trainer(*TINY, **LENGTHS) as trainer:
        yield trainer


def new_client(trainer, is_full: bool):
    return trainer.full() if is_full else trainer.adapter(rank=RANK, seed=SEED, targets=TARGETS)


@pytest.mark.parametrize("base", ["bundled", pytest.param("bundled:full", marks=pytest.mark.wide)])
def test_a_loop_over_http_is_the_loop_in_python(trainer, base, tmp_path):
    is_full = base.endswith(":full")
    expected = looped(trainer, is_full, 2, tmp_path / "mine")
    # Of all weights there is one client at a time.
    with listening(tmp_path / "state", trainer) as (http, server):
        face = OverHttp(http, base)
        assert loop(face, 2) == expected
        checkpoint = server.store.get("checkpoint", face.save())
        server.worker.live.forget(face.model)
    assert_same(trainer, is_full, tmp_path / "mine", tmp_path / "state" / checkpoint.file)


def looped(trainer, is_full: bool, steps: int, saved: Path) -> list:
    """What the loop gives in Python; its last checkpoint is saved."""
    client = new_client(trainer, is_full)
    found = loop(InPython(client), steps)
    client.save(saved)
    client.close()
    return found


def assert_same(trainer, is_full: bool, *folders: Path) -> None:
    """That step, weights and optimizer of two checkpoints are the same to the bit."""
    both = []
    for folder in folders:
        client = new_client(trainer, is_full)
        client.load(folder)
        both.append([np.asarray(x) for x in jax.tree.leaves(client.state)])
        client.close()
    assert len(both[0]) == len(both[1]) > 0 and all(map(np.array_equal, *both))


class Process:
    """`tunix-lite serve api=tinker` on a folder, which can be killed and started again at the same address."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port = free_port()
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        command = ["-m", "tunix_lite", "serve", "api=tinker", "served_name=bundled", f"port={self.port}", *TINY]
        command += [f"generation.{name}={value}" for name, value in LENGTHS.items()]
        command += [f"state_folder={self.folder}", f"hydra.run.dir={self.folder.parent}/hydra"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        with open(self.folder.with_suffix(".log"), "a") as log:
            self._process = subprocess.Popen([sys.executable, *command], stderr=log, env=environment)

    def kill(self) -> None:
        """SIGKILL: it can write nothing more."""
        self._process.kill()
        self._process.wait()

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", patience=120.0)


class Killing(Client):
    """Kills the server a moment after it has begun certain calls, and starts it again."""

    def __init__(self, process: Process, seed: int):
        super().__init__(process.client.address, patience=120.0)
        draw = random.Random(seed)
        self.process = process
        self.calls = 0
        # A loop of six steps has about 60 calls.
        self.places = {draw.randrange(5, 30): draw.uniform(0, 0.03), draw.randrange(35, 60): draw.uniform(0, 0.03)}
        self.threads = []

    def call(self, *arguments, **settings):
        self.calls += 1
        if self.calls in self.places:
            self.threads.append(threading.Thread(target=self._kill, args=[self.places[self.calls]]))
            self.threads[-1].start()
        return super().call(*arguments, **settings)

    def _kill(self, delay: float) -> None:
        time.sleep(delay)
        self.process.kill()
        self.process.start()


@pytest.mark.wide
def test_a_server_killed_twice_in_a_loop_changes_no_bit(trainer, tmp_path):
    expected = looped(trainer, False, 6, tmp_path / "mine")
    process = Process(tmp_path / "state")
    http = Killing(process, seed=0)
    try:
        face = OverHttp(http)
        found = loop(face, 6)
        path = face.save()
        for thread in http.threads:
            thread.join()
        assert process.starts == 3
    finally:
        process.kill()
    assert found == expected
    store = Store(tmp_path / "state")
    file = store.get("checkpoint", path).file
    store.close()
    assert_same(trainer, False, tmp_path / "mine", tmp_path / "state" / file)
