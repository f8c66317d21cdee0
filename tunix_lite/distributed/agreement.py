"""What each process of a run says of itself, and who of them differs."""

import contextlib
import dataclasses
import hashlib
import inspect
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tunix_lite.distributed.allgather import allgather_values

PACKAGES = ("tunix-lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
NOT_COMPARED = {"launch.process_id"}
# differences, or processes, in a message
SHOWN = 5

# variables that hold several
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Variables of jax that a process may have to itself: its place in the run, its devices (which
# `accelerator` and check_devices compare), caches, and what it says or writes for people. All
# others may change programs.
OWN_VARIABLES = re.compile(
    r"JAX_(COORDINATOR_|PROCESS_|NUM_PROCESSES|LOCAL_|NUM_CPU_DEVICES|PLATFORM|\w+_VISIBLE_DEVICES|\w*ADDRESS|\w*_PORT$"
    r"|\w*CACHE|LOG|DEBUG_|DISTRIBUTED_DEBUG|TRACEBACK_|TRACER_ERROR_|PPRINT_|DUMP_|INCLUDE_\w*DUMPS)"
)
OWN_FLAGS = re.compile(r"--xla_(force_host_platform_device_count|\w*dump_|\w*cache)")
# what their names begin with in messages
VARIABLE = "variable "


@dataclass(frozen=True)
class ProcessInfo:
    """What a process says of itself."""

    values: dict[str, str]  # what must be the same on all that have it
    folder: str | None = None  # that process 0 writes to
    host: str = ""


@dataclass(frozen=True)
class Agreement:
    """What all know afterwards."""

    hosts: list[str]  # by process
    folder: str | None  # of process 0


def process_info(settings: dict, folder: str | None = None) -> ProcessInfo:
    """This process: packages, code, kind of devices, variables of jax, and the settings of its run
    as plain values."""
    found = {f"package {name}": _version(name) for name in PACKAGES}
    found |= {
        f"package {name}": version for name in PLUGINS if (version := _version(name)) != "none"
    }
    found |= {"tunix-lite's code": code_digest(Path(__file__).parents[1])}
    found |= {"python": platform.python_version(), "accelerator": accelerator()}
    return ProcessInfo(
        found | compiler_variables(os.environ) | flatten_settings(settings), folder, host_name()
    )


def flatten_settings(value: object, name: str = "") -> dict[str, str]:
    """Every setting as text, by its whole name. Of an absolute path the end: its start belongs to a
    machine."""
    if isinstance(value, dict):
        dot = f"{name}." if name else ""
        return {
            key: text
            for part, item in value.items()
            for key, text in flatten_settings(item, f"{dot}{part}").items()
        }
    is_path = isinstance(value, str) and value.startswith(("/", "~"))
    return {} if name in NOT_COMPARED else {name: Path(value).name if is_path else str(value)}


def code_digest(folder: Path) -> str:
    """A digest of the Python files in a folder: two commits of a checkout have one version."""
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
    return _digest(
        "".join(f"{name} {_digest(files[name].read_bytes())}\n" for name in sorted(files)).encode()
    )


def user_code_digests(settings: Any, name: str = "") -> dict[str, str]:
    """A digest of the file of each function and class in built settings that is not of this
    package."""
    found = {}
    for where, named in _named(settings, name):
        if (named.__module__ or "").partition(".")[0] == __name__.partition(".")[0]:
            continue
        # written in C, or in a notebook: no file
        with contextlib.suppress(OSError, TypeError):
            if file := inspect.getsourcefile(inspect.unwrap(named)):
                found[f"code of {where}"] = _digest(Path(file).read_bytes())
    return found


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Functions and classes that settings give by path: (the setting, what it names)."""
    inside = {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield name, type(value)
        inside = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, partial):
        yield name, value.func
        inside = value.keywords
    elif isinstance(value, dict):
        inside = value
    elif isinstance(value, list | tuple):
        inside = dict(enumerate(value))
    elif value is not None and not isinstance(value, bool | int | float | str):
        yield name, value if callable(value) and hasattr(value, "__qualname__") else type(value)
    for part, item in inside.items():
        yield from _named(item, f"{name}.{part}" if name else str(part))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def compiler_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of jax and XLA that may change a program, without those that a process may have to
    itself."""
    found = {name: value for name, value in sorted(environ.items()) if name.startswith("JAX_")}
    found = {
        name: value for name, value in found.items() if value and not OWN_VARIABLES.match(name)
    }
    for name in FLAGS:
        for word in environ.get(name, "").split():
            flag, _, value = word.partition("=")
            if not OWN_FLAGS.match(flag):
                found[f"{name} {flag}"] = value or "true"
    return flatten_settings({f"{VARIABLE}{name}": value for name, value in found.items()})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def accelerator() -> str:
    """What jax would use here, as far as that can be known before it is used."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "CPU"
    names = {p.name for p in Path("/dev").glob("*")} if Path("/dev").is_dir() else set()
    if any(re.fullmatch(r"nvidia\d+", name) for name in names):
        return "NVIDIA GPU"
    return (
        "TPU"
        if any(
            re.fullmatch(r"accel\d+|vfio", name) and _version("libtpu") != "none" for name in names
        )
        else "CPU"
    )


def host_name() -> str:
    return socket.gethostname()


# ---- who differs


def describe_differences(said: dict[int, tuple[str, dict[str, str]]]) -> str | None:
    """Who differs from most in what, in words; None: nobody. Of two halves, that of process 0 is
    right.

    `said` is, by process, its name and its values; a value that a process does not have is no
    difference.
    """
    differences = []
    for key in dict.fromkeys(key for _, values in said.values() for key in values):
        have = {p: values[key] for p, (_, values) in sorted(said.items()) if key in values}
        # in the order of processes, and the first of equals is the most common
        counts = Counter(have.values())
        usual = counts.most_common(1)[0][0]
        for value in [value for value in counts if value != usual]:
            odd = [said[p][0] for p, own in have.items() if own == value]
            differences.append(
                f"{enumerate_names(odd)} {'has' if len(odd) == 1 else 'have'} {key}={value}, "
                f"the others {usual}"
            )
    if not differences:
        return None
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return "; ".join(differences[:SHOWN]) + more


def enumerate_names(names: list[str]) -> str:
    """process 1, process 2 and 7 more."""
    shown = (
        names if len(names) <= SHOWN else [*names[: SHOWN - 1], f"{len(names) - SHOWN + 1} more"]
    )
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


REMEDY = "Start all of them with the same command and the same packages"


def mismatch_error(everyone: dict[int, ProcessInfo]) -> str | None:
    unset = {
        name: "not set"
        for own in everyone.values()
        for name in own.values
        if name.startswith(VARIABLE)
    }
    said = {p: (f"process {p} ({own.host})", unset | own.values) for p, own in everyone.items()}
    text = describe_differences(said)
    return None if text is None else f"{text}. {REMEDY}"


# ---- once jax has started


def agree_through_jax(own: ProcessInfo, error: str | None = None) -> Agreement:
    """The same agreement where jax has started; all hear of an `error` that one has found.

    Raises ValueError, on all of them: a process that knows its own error says that one.
    """
    everyone = gather_process_info(own, error)
    wrong = {
        p: theirs.values["error"] for p, theirs in everyone.items() if "error" in theirs.values
    }
    if error is not None:
        raise ValueError(error)
    for p, text in wrong.items():
        raise ValueError(f"process {p} ({everyone[p].host}): {text}")
    if text := mismatch_error(everyone):
        raise ValueError(text)
    return Agreement([everyone[p].host for p in sorted(everyone)], everyone[0].folder)


def gather_process_info(own: ProcessInfo, error: str | None = None) -> dict[int, ProcessInfo]:
    """What every process says of itself, by process."""
    values = own.values | ({} if error is None else {"error": error})
    everyone = allgather_values(dataclasses.asdict(dataclasses.replace(own, values=values)))
    return {p: ProcessInfo(**said) for p, said in enumerate(everyone)}
