"""Functions in processes that can be killed: none of them can hang, crash or end the run. A call
that takes too long, or takes its process down, has failed; the next worker makes the calls behind
it."""

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
from typing import NamedTuple

from tunix_lite.workers.child import NotANumber, outcome, short_repr
from tunix_lite.workers.process import START_SECONDS, Outcome, WorkerProcess

ON_ERROR = ("raise", "zero", "drop")
_ON_NONE = ("error", "unscorable", "skip")
# the kinds of outcomes that are failures; others are "", and those that on_none asks for
FAILURES = ("error", "timeout", "crash", "not_number")
# end of a message about a function that returned None, after its name
IS_NONE = "is None, not a number,"
# completions sent to a worker at once, at most
_BATCH = 16
# attempts: what ends a worker before it listens is mostly a signal that was meant for the run
STARTS = 3


class NoScore(NotANumber):
    """A function returned None: rewards.on_none says what that means."""

    kind = "none"


@dataclass(frozen=True)
class RewardsConfig:
    """Settings of reward functions: where they run, and what becomes of a call that fails."""

    # conf/rewards/default.yaml explains each setting
    on_error: str = "raise"
    timeout: float = 10.0
    workers: int = 1
    on_none: str = "error"

    def __post_init__(self):
        check_workers(self.on_error, self.timeout, self.workers)
        if self.on_none not in _ON_NONE:
            raise ValueError(f"on_none={self.on_none!r}; it is error, unscorable or skip")


def check_workers(on_error: str, timeout: float, workers: int) -> None:
    """Raises ValueError for settings that no pool can have."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}; it is raise, zero or drop")
    if timeout <= 0:
        raise ValueError(f"timeout={timeout} must be above 0")
    if workers < 0:
        raise ValueError(
            f"workers={workers} must not be negative; 0: in the process that trains"
        )


def check_portable(functions: dict[str, Callable], group: str = "rewards") -> None:
    """Raises ValueError, with a remedy, for the first function that no worker can get."""
    for name, fn in functions.items():
        try:
            _Packing(io.BytesIO()).dump(fn)
        except Exception as error:
            # pickling runs what objects say of themselves, so it can be any
            raise ValueError(_cannot_run(name, str(error), group)) from error


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
    """Calls functions on completions, in `settings.workers` processes or, if that is 0, here.
    functions, by the name in messages: (completion, example) -> a value for JSON; those of a group
    get a list of completions. group: of the settings, as messages name it."""

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
        self._threads = [
            threading.Thread(target=self._serve, args=(place,), daemon=True)
            for place in range(settings.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, completion: str | list[str], example: dict, names: Sequence[str] | None = None
    ) -> "Future[dict[str, Outcome]]":
        """Calls functions on a completion, or on all completions of a group: the outcome of each by
        its name. names: which functions; None: all of them. The future raises ValueError for the
        first failure if on_error=raise."""
        names = list(self.functions) if names is None else list(names)
        future = Future()
        if self._threads:
            # a thread for each worker takes jobs, as many at once as are worth a message
            self._jobs.put(_Job(future, completion, example, names))
            return future

        def call_here() -> Iterator[Outcome]:
            for name in names:
                began = time.perf_counter()
                result = outcome(self.functions[name], completion, example)
                self._seconds.append(time.perf_counter() - began)
                yield result

        try:
            future.set_result(self.by_name(names, completion, call_here()))
        except ValueError as error:
            future.set_exception(error)
        return future

    def taken_seconds(self) -> list[float]:
        """The seconds of each call since this was asked last; of one that was lost with its worker,
        rewards.timeout."""
        return [self._seconds.popleft() for _ in range(len(self._seconds))]

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
        # Before they get their None: a thread that waits for an answer would not take it.
        for worker in self._workers:
            if worker is not None:
                worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(START_SECONDS)

    def by_name(
        self, names: list[str], completion: str | list[str], outcomes: Iterator[Outcome]
    ) -> dict[str, Outcome]:
        """The next outcomes by the names of their functions, as on_none takes them. Raises
        ValueError for a failure if on_error=raise."""
        on_none = self.settings.on_none
        by_name = {}
        for name in names:
            kind, value = next(outcomes)
            # In a list of a group, None stays where it is no error.
            is_in_list = isinstance(value, list) and None in value
            if on_none == "error" and (kind == "none" or is_in_list):
                kind, value = "not_number", IS_NONE
            elif kind == "none":
                kind, value = on_none, IS_NONE
            by_name[name] = Outcome(kind, value)
            if kind in FAILURES and self.settings.on_error == "raise":
                problem = self.describe_failure(name, by_name[name], completion)
                raise ValueError(
                    f"{problem}; {self.group}.on_error=zero or drop continues without it"
                )
        return by_name

    def _serve(self, place: int) -> None:
        # starts the worker before the first job; if it cannot start, the first jobs report it
        with suppress(Exception):
            self._worker(place)
        while True:
            # A share of the jobs, so that no worker idles while another has much before it.
            jobs: list[_Job] = [self._jobs.get()]
            # Another thread may have taken them meanwhile.
            with suppress(queue.Empty):
                for _ in range(min(_BATCH - 1, self._jobs.qsize() // len(self._threads))):
                    jobs.append(self._jobs.get_nowait())
            if self._ending or None in jobs:
                return self._drop(place)
            try:
                outcomes = self._outcomes(place, jobs)
                for job in jobs:
                    job.future.set_result(self.by_name(job.names, job.completion, outcomes))
            except Exception as error:
                # Answers to this batch may still be in its pipe.
                self._drop(place)
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)

    def _outcomes(self, place: int, jobs: list[_Job]) -> Iterator[Outcome]:
        """The outcome of each function of each job: the first call without an answer has failed."""
        places = {name: index for index, name in enumerate(self.functions)}
        calls = [
            (next(self._numbers), places[name], (job.completion, job.example))
            for job in jobs
            for name in job.names
        ]
        while calls:
            worker = self._worker(place)
            try:
                message = pickle.dumps(calls)
            except Exception as error:
                raise self._cannot_send(str(error)) from error
            worker.send(message, self.settings.timeout)
            for number, *_ in calls:
                result = worker.answer(self.settings.timeout, number)
                is_lost = result[0] in ("timeout", "crash")
                self._seconds.append(self.settings.timeout if is_lost else worker.seconds)
                calls = calls[1:]
                if result[0] == "refused":
                    raise self._cannot_send(result[1])
                if self._ending:
                    raise ValueError(f"the workers of {self.group} were closed")

                # the calls behind it are made by the next worker
                if is_lost:
                    self._drop(place)
                yield result
                if is_lost:
                    break

    def _cannot_send(self, why: str) -> ValueError:
        return ValueError(
            f"an example cannot be sent to a worker process: {why}; {_in_process(self.group)}"
        )

    def _worker(self, place: int) -> WorkerProcess:
        """The worker of this place, or a new one if that has ended while it had nothing to do."""
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
            worker.send(pickle.dumps(list(self.functions.values())), START_SECONDS)
            kind, how = worker.answer(START_SECONDS)
            if kind == "ready":
                return worker
            if kind != "crash":
                break
        self._drop(place)
        how = how or f"not ready after {START_SECONDS} seconds"
        why = f"a worker process could not start: {how}"
        raise ValueError(_cannot_run(self.group, why, self.group))

    def _drop(self, place: int) -> None:
        if self._workers[place] is not None:
            self._workers[place].kill()
            self._workers[place].release()
            self._workers[place] = None


class _Packing(pickle.Pickler):
    """Refuses objects of __main__: a worker has another one."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")
        return NotImplemented


# words of messages for functions that run in a worker, by the group of their settings
_WORKERS_RUN = {"rewards": "rewards", "conversation": "environments"}


def _in_process(group: str) -> str:
    return f"{group}.workers=0 runs {_WORKERS_RUN[group]} in the process that trains"


def _cannot_run(name: str, why: str, group: str) -> str:
    return (
        f"{name}: {why}. {_WORKERS_RUN[group].capitalize()} run in other processes: put it at the "
        f"top of a module of its own; or {_in_process(group)}"
    )
