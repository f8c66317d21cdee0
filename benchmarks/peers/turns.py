"""A worker's side of taking turns: it computes only between `wait` and `done`. Standard library alone.

The runner writes one line of JSON, the workload, and then a line for each turn: `step`, `peak` or `quit`. The
worker answers each with one line of JSON.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class Turns:
    """One worker's turns.

    Example: `turns = Turns()`, then `while turns.wait(): ...; turns.done()`.
    """

    def __init__(self, peak: Callable[[], float] | None = None):
        # whatever a framework prints goes to stderr, so that answers stay alone
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._peak = peak
        self._began = 0.0
        self._began_cpu = 0.0
        self.seconds: dict[str, float] = {}
        # tokens of each completion of this step, the last one included
        self.lengths: list[int] = []
        self.work = json.loads(sys.stdin.readline())

    def ready(self, **facts: object) -> None:
        """The model stands; nothing has been compiled for a step."""
        self._answer(event="ready", peak_rss_mb=peak_rss_mb(), **facts)

    def wait(self) -> bool:
        """Waits for the next turn. False: there is none."""
        while True:
            asked = sys.stdin.readline().strip()
            if asked != "peak":
                break
            self._answer(event="peak", gflops=self._peak())
        self.seconds = {}
        self.lengths = []
        self._began_cpu = time.process_time()
        self._began = time.perf_counter()
        return asked == "step"

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside to this phase of the step."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def done(self, **facts: object) -> None:
        """The turn is over: its seconds, with the rest of the step as `update`, those of all cores, the lengths that
        were sampled, and other facts of this step."""
        step = time.perf_counter() - self._began
        cpu_seconds = time.process_time() - self._began_cpu
        self.seconds["update"] = step - sum(self.seconds.values())
        seconds = self.seconds | {"step": step}
        measured = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_rss_mb": peak_rss_mb()}
        self._answer(event="step", lengths=self.lengths, **measured, **facts)

    def _answer(self, **facts: object) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()


def peak_rss_mb() -> float:
    """The most memory that this process ever had resident, in MB of 10^6 bytes."""
    # Linux counts the peak of a new program from zero only in this file
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def words(tokens: list[int]) -> str:
    """Tokens as the text that the peers' tokenizers take apart again: `t5 t17`."""
    return " ".join(f"t{token}" for token in tokens)


def reward(tokens: list[int]) -> float:
    """The share of tokens that seven divides: cheap, and different within a group."""
    return sum(token % 7 == 0 for token in tokens) / max(1, len(tokens))


def reward_of_text(text: str) -> float:
    return reward([int(word[1:]) for word in text.split() if word[1:].isdigit()])


def share_of_e(completion: str, example: dict) -> float:
    """A reward of any text: cheap, and different within a group."""
    return completion.count("e") / (1 + len(completion))
