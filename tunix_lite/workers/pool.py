"""Functions in processes that can be killed: none of them can hang, crash or end the run.

Each worker has a thread here that feeds it and reads its answers. A call that takes too long, or
takes its process down, has failed; the worker is replaced, and the calls behind that one are made
by the next.
"""

import io
import itertools
import os
import pickle
import queue
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tunix_lite.workers.child import NotANumber, outcome, short_repr
from tunix_lite.workers.process import START_SECONDS, Outcome, WorkerProcess

ON_ERROR = ("raise", "zero", "drop")
ON_NONE = ("error", "unscorable", "skip")
# the kinds of outcomes that are failures; others are "", and those that on_none asks for
FAILURES = ("error", "timeout", "crash", "not_number")
# end of a message about a function that returned None, after its name
IS_NONE = "is None, not a number,"
# completions sent to a worker at once, at most
BATCH = 16
# attempts: what ends a worker before it listens is mostly a signal that was meant for the run
STARTS = 3


class NoScore(NotANumber):
    """A function returned None: rewards.on_none says what that means."""

    kind = "none"


@dataclass(frozen=True)
class RewardsConfig:
    """Settings of reward functions: where they run, and what becomes of a call that fails."""

    # When a reward fails: raise stops the run, zero counts it as 0, drop skips the completion.
    on_error: str = "raise"
    # Seconds that one call of a reward function may take. A longer call has failed.
    timeout: float = 10.0
    # Processes that compute rewards. 0 uses the training process, without a timeout, for debugging.
    workers: int = 1
    # When a reward returns None: error counts it as failed, unscorable skips the completion, skip
    # uses the other rewards alone.
    on_none: str = "error"

    def __post_init__(self):
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error={self.on_error!r}; it is raise, zero or drop")
        if self.on_none not in ON_NONE:
            raise ValueError(f"on_none={self.on_none!r}; it is error, unscorable or skip")
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout} must be above 0")
        if self.workers < 0:
            raise ValueError(
                f"workers={self.workers} must not be negative; 0: in the process that trains"
            )


def check_portable(functions: dict[str, Callable], group: str = "rewards") -> None:
    """Raises ValueError naming the first function that a worker could not be given, and the remedy.
    group: of the settings, as a message names it."""
    for name, fn in functions.items():
        try:
            _Packing(io.BytesIO()).dump(fn)
        except Exception as error:
            # pickling runs what objects say of themselves, so it can be any
            raise ValueError(_cannot_be_sent(name, str(error), group)) from error


def check_times(functions: dict[str, Callable], settings: RewardsConfig) -> None:
    """Raises ValueError naming a function that may take longer than rewards.timeout, by its own
    settings (`most_seconds`)."""
    for name, fn in functions.items():
        # as TaskConfig.functions binds it
        reward = fn.args[0] if isinstance(fn, partial) and fn.args else fn
        seconds = getattr(reward, "most_seconds", 0.0)
        if settings.workers and seconds >= settings.timeout:
            raise ValueError(
                f"{name} may take {seconds:g} seconds by its settings, and "
                f"rewards.timeout={settings.timeout:g}; set rewards.timeout above {seconds:g}"
            )


class _Job(NamedTuple):
    """Functions to call on one completion, or on the completions of one group."""

    future: Future
    completion: str | list[str]
    example: dict
    names: list[str]


class Pool:
    """Calls functions on completions, in `settings.workers` processes or, if that is 0, here and
    now.

    functions, by the name that messages give them: (completion, example) -> anything that JSON can
    hold. A function of a group gets the list of its completions. group: of the settings, as
    messages name it.
    """

    def __init__(
        self, functions: dict[str, Callable], settings: RewardsConfig, group: str = "rewards"
    ):
        self.functions = functions
        self.group = group
        self.settings = settings
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        # numbers of calls
        self._numbers = itertools.count()
        self._workers: list[WorkerProcess | None] = [None] * settings.workers
        self._ending = False
        # seconds of each call since the last `taken_seconds`
        self._seconds: deque[float] = deque()
        if settings.workers:
            check_portable(functions, group)
        places = range(settings.workers)
        self._threads = [
            threading.Thread(target=self._serve, args=(place,), daemon=True) for place in places
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, completion: str | list[str], example: dict, names: Sequence[str] | None = None
    ) -> "Future[dict[str, Outcome]]":
        """Calls functions on a completion, or on all completions of a group.

        names: which functions; None: all of them. Returns the outcome of each by its name. The
        future raises ValueError for the first failure if on_error=raise.
        """
        names = list(self.functions) if names is None else list(names)
        future: Future = Future()
        if self._threads:
            self._jobs.put(_Job(future, completion, example, names))
            return future
        try:
            called = (self._called_here(name, completion, example) for name in names)
            future.set_result(self._by_name(names, completion, called))
        except ValueError as error:
            future.set_exception(error)
        return future

    def taken_seconds(self) -> list[float]:
        """The seconds of each call that has been made since this was asked last; of one that was
        lost with its worker, rewards.timeout."""
        count = len(self._seconds)
        return [self._seconds.popleft() for _ in range(count)]

    def _called_here(self, name: str, completion: str | list[str], example: dict) -> Outcome:
        began = time.perf_counter()
        result = outcome(self.functions[name], completion, example)
        self._seconds.append(time.perf_counter() - began)
        return result

    def describe_failure(self, name: str, result: Outcome, completion: str | list[str]) -> str:
        """Describes a failure: `reward 'short' is nan for the completion '...'`."""
        kind, how = result
        if kind == "timeout":
            how = f"took more than {self.group}.timeout={self.settings.timeout:g} seconds"
        what = "completion" if isinstance(completion, str) else "completions"
        return f"{name} {how} for the {what} {short_repr(completion)}"

    def close(self) -> None:
        """Ends the workers at once; jobs that are not done are lost."""
        self._ending = True
        for worker in self._workers:
            if worker is not None:
                worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(START_SECONDS)

    def _by_name(
        self, names: list[str], completion: str | list[str], outcomes: Iterator[Outcome]
    ) -> dict[str, Outcome]:
        by_name = {}
        for name in names:
            by_name[name] = self._with_none_treated(next(outcomes))
            if by_name[name][0] in FAILURES and self.settings.on_error == "raise":
                problem = self.describe_failure(name, by_name[name], completion)
                raise ValueError(
                    f"{problem}; {self.group}.on_error=zero or drop continues without it"
                )
        return by_name

    def _with_none_treated(self, result: Outcome) -> Outcome:
        """The outcome as rewards.on_none has it, where a function returned None, or a list with it.

        In a list of a group, None stays where it is no error.
        """
        kind, value = result
        is_in_list = isinstance(value, list) and None in value
        if self.settings.on_none == "error":
            return ("not_number", IS_NONE) if kind == "none" or is_in_list else result
        return (self.settings.on_none, IS_NONE) if kind == "none" else result

    # ---- a thread and its worker

    def _serve(self, place: int) -> None:
        """Starts the worker before the first job; if it cannot start, the first jobs report it."""
        with suppress(Exception):
            self._worker(place)
        while jobs := self._next_jobs():
            try:
                outcomes = self._outcomes(place, jobs)
                for job in jobs:
                    job.future.set_result(self._by_name(job.names, job.completion, outcomes))
            except Exception as error:
                self._drop(place)
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)
        self._drop(place)

    def _next_jobs(self) -> list[_Job]:
        """Takes a share of the waiting jobs, so that no worker idles while another has much before
        it; [] at the end."""
        jobs = [self._jobs.get()]
        with suppress(queue.Empty):
            for _ in range(min(BATCH - 1, self._jobs.qsize() // len(self._threads))):
                jobs.append(self._jobs.get_nowait())
        return [] if self._ending or None in jobs else jobs

    def _outcomes(self, place: int, jobs: list[_Job]) -> Iterator[Outcome]:
        """The outcome of each function of each job, in order. The first call without an answer is
        the one that failed."""
        places = {name: index for index, name in enumerate(self.functions)}
        calls = [
            (next(self._numbers), places[name], (job.completion, job.example))
            for job in jobs
            for name in job.names
        ]
        while calls:
            worker = self._worker(place)
            worker.send(_packed(calls, self.group), self.settings.timeout)
            for number, *_ in calls:
                result = worker.answer(self.settings.timeout, number)
                is_lost = result[0] in ("timeout", "crash")
                self._seconds.append(self.settings.timeout if is_lost else worker.seconds)
                calls = calls[1:]
                if result[0] == "refused":
                    raise ValueError(
                        f"an example cannot be sent to a worker process: {result[1]}; "
                        f"{_in_process(self.group)}"
                    )
                if self._ending:
                    raise ValueError(f"the workers of {self.group} were closed")

                # the calls behind it are made by the next worker
                if is_lost:
                    self._drop(place)
                yield result
                if is_lost:
                    break

    def _worker(self, place: int) -> WorkerProcess:
        """The worker of this place, or a new one if that has ended. It ended while it had nothing
        to do, so no call is to blame."""
        worker = self._workers[place]
        if worker is not None and worker.process.poll() is None:
            return worker
        for _ in range(STARTS):
            self._drop(place)
            try:
                # a reward that uses jax leaves the accelerator alone
                environment = os.environ | {"JAX_PLATFORMS": "cpu"}
                worker = self._workers[place] = WorkerProcess(environment)
            except OSError as error:
                raise ValueError(
                    f"{self.group}: a worker process could not start: {error}"
                ) from error
            # close() may have looked before it stood there
            if self._ending:
                worker.kill()
            worker.send(_packed(list(self.functions.values()), self.group), START_SECONDS)
            kind, how = worker.answer(START_SECONDS)
            if kind == "ready":
                return worker
            if kind != "crash":
                break
        self._drop(place)
        how = how or f"not ready after {START_SECONDS} seconds"
        why = f"a worker process could not start: {how}"
        raise ValueError(_cannot_be_sent(self.group, why, self.group))

    def _drop(self, place: int) -> None:
        if self._workers[place] is not None:
            self._workers[place].kill()
            self._workers[place].release()
            self._workers[place] = None


# ---- small print

# words of messages for functions that run in a worker, by the group of their settings
WORKERS_RUN = {"rewards": "rewards", "conversation": "environments"}


def _in_process(group: str) -> str:
    return f"{group}.workers=0 runs {WORKERS_RUN[group]} in the process that trains"


class _Packing(pickle.Pickler):
    """Refuses objects of __main__: a worker has another one."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")
        return NotImplemented


def _packed(what: Any, group: str) -> bytes:
    try:
        return pickle.dumps(what)
    except Exception as error:
        raise ValueError(
            f"an example cannot be sent to a worker process: {error}; {_in_process(group)}"
        ) from error


def _cannot_be_sent(name: str, why: str, group: str) -> str:
    return (
        f"{name}: {why}. {WORKERS_RUN[group].capitalize()} run in other processes: put it at the "
        f"top of a module of its own; or {_in_process(group)}"
    )
