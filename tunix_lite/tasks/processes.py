"""A run's processes in a task: they take the same examples, and each grades its share."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix_lite.tasks.sources import digest


class SharedError(ValueError):
    """An error that all processes of a run raise at the same place, as all have the same data."""


@contextlib.contextmanager
def shared_errors() -> Iterator[None]:
    """Makes the errors inside shared, where the examples are the same on all processes."""
    try:
        yield
    except ValueError as error:
        raise SharedError(str(error)) from error


@dataclass(frozen=True)
class Processes:
    """The processes of a run. By default there is one, which shares nothing. Of n processes,
    process i makes the calls i, i + n, i + 2n ... of rewards; all get all grades.
    Example: Processes(index=1, count=2) makes the calls 1, 3, 5 ..."""

    index: int = 0
    count: int = 1
    # a value of this process -> the values of all processes
    share: Callable[[Any], list] = lambda value: [value]
    # knows whether the run is to end (distributed.stopping); None: it is not
    stopping: Any = None
    # [B] bool: which rows of a batch this process's devices hold; None: all
    own_rows: Callable[[int], np.ndarray] | None = None

    def exchange(self, value: object, error: str | None, stops: bool = False) -> list:
        """The values of all, JSON each. Raises, on all, SharedError for an error, or StopRun."""
        everyone = self.share([value, error, stops])
        if self.stopping is not None:
            self.stopping.stop_if(any(stops for *_, stops in everyone))
        for _, error, _ in everyone:
            if error is not None:
                raise SharedError(error)
        return [value for value, *_ in everyone]

    def check_same(self, digests: list[str], what: str) -> None:
        """Raises SharedError, which says `what` the processes with another digest did."""
        others = [f"process {i}" for i, one in enumerate(digests) if one != digests[0]]
        if others:
            raise SharedError(f"{' and '.join(others)} {what}")


ALONE = Processes()


def same_on_all(processes: Processes, take: Callable[[], Any]) -> Any:
    """Returns the result of `take`, after all processes have compared it. Raises SharedError on all
    of them if one has another result, or if `take` raises ValueError on one."""
    if processes.count == 1:
        return take()
    taken = None
    error = None
    try:
        taken = take()
    # Raised only after the exchange, in which the other processes wait for this one.
    except ValueError as failed:
        error = str(failed)
    processes.check_same(
        processes.exchange(digest(taken), error),
        "took other examples than process 0: do all hosts have the same data files?",
    )
    return taken
