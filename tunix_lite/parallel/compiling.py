"""Compiles programs before they run, keeps a clock of compiling, and keeps programs in a folder."""

import contextlib
import functools
import hashlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.monitoring

T = TypeVar("T")
# (name of the program, seconds that it took to compile; None: the compiler begins now)
CompileWatcher = Callable[[str, float | None], None]
# On two cores threads take as long as one program after the other, and a tenth more memory.
_FEWEST_CORES = 4
# What jax reports of each program, in this order, with the seconds that it took.
_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"

# Programs that compile faster are not worth a file.
LEAST_SECONDS = 0.1
# Programs that were not used for the longest time are removed when the folder holds more bytes.
MOST_BYTES = 4 << 30


def compiled_once(
    lower: Callable[..., jax.stages.Lowered],
) -> Callable[..., jax.stages.Compiled]:
    """compiled(*args) -> the executable of lower(*args), compiled once for arguments of the same
    structure."""
    executables = {}

    def compiled(*args: Any) -> jax.stages.Compiled:
        # jax.jit has a cache of its own, but gives no executable to ask about memory
        leaves, structure = jax.tree.flatten(args)
        # An executable takes only arrays that have its shapes and lie at its places.
        key = (structure, *((x.shape, x.dtype, x.sharding) for x in leaves))
        if key not in executables:
            executables[key] = lower(*args).compile()
        return executables[key]

    return compiled


class _Abandoned(Exception):
    """Ends a thread that compiles what nobody waits for any more."""


def compiled_together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of calls that compile programs, each in a thread of its own if there are cores
    for it. All counts as waiting for the compiler. After an error no thread begins another
    program."""
    if len(calls) < 2 or (os.cpu_count() or 1) < _FEWEST_CORES:
        return [call() for call in calls]
    mesh = jax.sharding.get_mesh()  # the current mesh is a thread's own
    watcher = _compiling.watcher
    # Threads within threads end together.
    abandoned = _compiling.abandoned or threading.Event()

    def one(call: Callable[[], T]) -> T:
        # Both belong to a thread, and this one is new.
        _compiling.watcher = watcher
        _compiling.abandoned = abandoned
        try:
            with jax.set_mesh(mesh):
                return call()
        except BaseException:
            abandoned.set()
            raise

    began = time.perf_counter()
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(one, call) for call in calls]
    try:
        wait(futures)
    except BaseException:
        # of a signal's handler
        abandoned.set()
        raise
    finally:
        pool.shutdown(wait=False)
    # A compilation cannot be ended from outside, so nobody waits above for the others.
    errors = [future.exception() for future in futures if future.exception() is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, _Abandoned)), errors[0])
    # Each thread has counted for itself, and this one has waited for all.
    _compiling.add(began, time.perf_counter())
    return [future.result() for future in futures]


def check_wanted() -> None:
    """Ends a thread of `compiled_together` whose programs nobody waits for. Call it before a
    compilation."""
    if _compiling.abandoned is not None and _compiling.abandoned.is_set():
        raise _Abandoned


class _Compiling(threading.local):
    """Counts the seconds that a thread has waited for the compiler."""

    def __init__(self) -> None:
        self.seconds = 0.0
        # (beginning, end) of what is counted in `seconds`; none overlaps another
        self.counted: list[tuple[float, float]] = []
        self.watcher: CompileWatcher | None = None
        # set once the programs that this thread compiles are no longer waited for
        self.abandoned: threading.Event | None = None

    def add(self, begin: float, end: float) -> None:
        """Counts these seconds, but none twice: a program is traced while another one is."""
        self.seconds += end - begin
        while self.counted and self.counted[-1][0] >= begin:
            inner_begin, inner_end = self.counted.pop()
            self.seconds -= inner_end - inner_begin
        self.counted.append((begin, end))


_compiling = _Compiling()


def _on_event(event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
    """A listener of jax.monitoring, called in the thread that waits."""
    if event not in (_TRACED, _LOWERED, COMPILED):
        return
    now = time.perf_counter()
    _compiling.add(now - seconds, now)
    if _compiling.watcher is not None and event != _TRACED:
        name = fun_name.removeprefix("jit(").removesuffix(")") or "a program"
        _compiling.watcher(name, seconds if event == COMPILED else None)


@functools.cache
def _listen() -> None:
    # Once in a process: a listener that is registered twice is called twice.
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def stopwatch() -> Callable[[], float]:
    """Returns () -> seconds since this call, without those that this thread waited for the
    compiler."""
    _listen()
    began = time.perf_counter()
    before = _compiling.seconds
    return lambda: time.perf_counter() - began - (_compiling.seconds - before)


@contextlib.contextmanager
def watching_compiler(watcher: CompileWatcher) -> Iterator[Callable[[], float]]:
    """Inside, the watcher is called when the compiler begins and ends. Yields () -> seconds of
    waiting."""
    _listen()
    before = _compiling.seconds
    outer, _compiling.watcher = _compiling.watcher, watcher
    try:
        yield lambda: _compiling.seconds - before
    finally:
        _compiling.watcher = outer


def keep_programs(where: str | None) -> Path | None:
    """Lets jax keep compiled programs in a folder, and take them from there. Call it before a
    program is compiled. where: the folder; auto: one in the user's cache folder; None: programs are
    not kept. Returns our folder; None: there is none."""
    # Where a user has set jax's own folder, it stays.
    if where is None or jax.config.jax_compilation_cache_dir:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(where if where != "auto" else f"{cache}/tunix_lite").expanduser()
    # XLA compiles for the instructions that this processor has.
    about = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about += [s for s in lines if s.startswith(("model name", "flags", "Features"))][:2]
    folder = base / f"programs-{hashlib.sha256(chr(10).join(about).encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # mkdir accepts a folder that is there already and cannot be written.
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        print(f"compiled programs are not kept: {error}", file=sys.stderr)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return folder
