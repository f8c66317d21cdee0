"""The common work of a run's processes in a task: they take the same examples, and each grades its
share of the completions."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tunix_lite.tasks.sources import digest


class SharedError(ValueError):
    """An error that all processes of a run raise at the same place, since all have the same
    examples and grades."""


@contextlib.contextmanager
def shared_errors() -> Iterator[None]:
    """Makes the errors inside shared, where the examples are the same on all processes."""
    try:
        yield
    except ValueError as error:
        raise SharedError(str(error)) from error


@dataclass(frozen=True)
class Processes:
    """The processes of a run. By default there is one, which shares nothing.

    Of n processes, process i makes the calls i, i + n, i + 2n ... of rewards; all get all grades.

    Example: Processes(index=1, count=2) makes the calls 1, 3, 5 ...
    """

    index: int = 0
    count: int = 1
    # a value of this process -> the values of all processes
    share: Callable[[Any], list] = lambda value: [value]
    stopping: Any = (
        None  # knows whether the run is to end (distributed.stopping); None: it is not
    )


ALONE = Processes()


def same_on_all(processes: Processes, take: Callable[[], tuple]) -> tuple:
    """Returns the result of `take`, after all processes have compared it. take: () -> (examples,
    ...).

    Raises SharedError on all of them if one has other examples, or if `take` raises ValueError on
    one.
    """
    if processes.count == 1:
        return take()
    taken: tuple = ([], 0)
    error = None
    try:
        taken = take()
    except ValueError as failed:
        error = str(failed)

    # every process raises, or none does
    everyone = processes.share([digest(taken), error])
    errors = [error for _, error in everyone if error is not None]
    if errors:
        raise SharedError(errors[0])
    others = unlike_the_first([theirs for theirs, _ in everyone])
    if others:
        raise SharedError(
            f"{others} took other examples than process 0: do all hosts have the same data files?"
        )
    return taken


def unlike_the_first(digests: list[str]) -> str:
    """Names processes whose value differs from process 0's; "" if there are none."""
    return " and ".join(
        f"process {i}" for i, theirs in enumerate(digests) if theirs != digests[0]
    )
