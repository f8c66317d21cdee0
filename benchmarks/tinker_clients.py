"""What clients of `tunix-lite serve api=tinker` get who train side by side, and what one waits for beside a greedy one.

    python benchmarks/tinker_clients.py [--clients 4] [--steps 12] [--out FILE.json]

The server has the bundled model. Each client has adapters of rank 8 of its own, and does steps of 8 sequences of 64
tokens: forward_backward and optim_step, sent together, then it waits for both. First one client does so, then several
at once. Then one does it while another has 100 forward_backward requests waiting. Printed are steps a second of each,
tokens a second of all, and the seconds of a step alone and beside the greedy client.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from processes import free_port
from tinker_client import PROTOBUF, Client, request_bytes

from tunix_lite.training_clients.data import Datum

SEQUENCES, LENGTH = 8, 64
GREEDY = 100


class Learner:
    """A client with adapters of its own."""

    def __init__(self, client: Client, seed: int):
        self.client = client
        self.model = client.model(rank=8, seed=seed)
        self.number = 0
        texts = np.random.default_rng(seed).integers(4, 380, (SEQUENCES, LENGTH + 1)).tolist()
        self.data = [Datum(text[:-1], text[1:]) for text in texts]

    def gradient(self) -> dict:
        self.number += 1
        raw = request_bytes(self.model, self.number, self.data, "cross_entropy")
        return self.client.post("forward_backward", raw, kind=PROTOBUF)

    def step(self) -> float:
        """Seconds until both results are there."""
        began = time.perf_counter()
        gradient = self.gradient()
        self.number += 1
        update = self.client.optim_step(self.model, self.number, 1e-3)
        self.client.result(gradient)
        self.client.result(update)
        return time.perf_counter() - began

    def steps(self, count: int, rates: list[float]) -> None:
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        rates.append(count / (time.perf_counter() - began))


def together(learners: list[Learner], steps: int) -> dict:
    """Steps a second of each, and tokens a second of all."""
    rates: list[float] = []
    threads = [threading.Thread(target=one.steps, args=(steps, rates)) for one in learners]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    tokens = len(learners) * steps * SEQUENCES * LENGTH
    return {"steps_a_second_of_each": sorted(rates), "tokens_a_second": tokens / seconds}


def beside_a_greedy_one(learner: Learner, greedy: Learner) -> dict:
    alone = [learner.step() for _ in range(5)]
    waiting = [greedy.gradient() for _ in range(GREEDY)]
    beside = [learner.step() for _ in range(5)]
    for future in waiting:
        greedy.client.result(future)
    return {
        "step_alone": statistics.median(alone),
        "step_beside": statistics.median(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"port={port}", f"state_folder={folder}/state", f"hydra.run.dir={folder}/hydra"]
        command = [sys.executable, "-m", "tunix_lite", "serve", "api=tinker", *settings]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
        try:
            client = Client(f"http://127.0.0.1:{port}", patience=120.0)
            learners = [Learner(client, seed) for seed in range(asked.clients)]
            # The first compiles.
            together(learners, 2)
            found = {"one": together(learners[:1], asked.steps), "several": together(learners, asked.steps)}
            found["greedy"] = beside_a_greedy_one(*learners[:2])
        finally:
            server.terminate()
            server.wait(60)
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
