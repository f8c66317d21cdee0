"""What each process of a run reports about itself, and which processes differ: other packages,
code, devices or compiler variables make other programs, whose collectives hang."""

import ast
import dataclasses
import hashlib
import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tunix_lite.distributed.allgather import allgather_values

_PACKAGES = ("tunix-lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
# Most differences, or names of processes, in a message.
_SHOWN = 5

# Variables that hold several flags each; the flags are compared one by one.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Variables of jax that may differ between processes: the id of the process, its devices (which
# `accelerator` and `check_devices` compare), its caches, logging and dumps. All others may change
# compiled programs.
_OWN_VARIABLES = re.compile(
    r"JAX_(COORDINATOR_|PROCESS_|NUM_PROCESSES|LOCAL_|NUM_CPU_DEVICES|PLATFORM"
    r"|\w+_VISIBLE_DEVICES|\w*ADDRESS|\w*_PORT$"
    r"|\w*CACHE|LOG|DEBUG_|DISTRIBUTED_DEBUG|TRACEBACK_|TRACER_ERROR_|PPRINT_|DUMP_"
    r"|INCLUDE_\w*DUMPS)"
)
_OWN_FLAGS = re.compile(r"--xla_(force_host_platform_device_count|\w*dump_|\w*cache)")
# The prefix of environment variables in `ProcessInfo.values` and in messages.
_VARIABLE = "variable "


@dataclass(frozen=True)
class ProcessInfo:
    """What a process reports about itself when the processes of a run meet.
    Example: `ProcessInfo({"package jax": "0.10.2", "seed": "0"}, "outputs/run", "node-1")`."""

    # name -> value; all processes that have a name must have the same value
    values: dict[str, str]
    # the folder of the run, as this process would choose it; that of process 0 counts
    folder: str | None = None
    host: str = ""  # the name of the machine


@dataclass(frozen=True)
class Agreement:
    """What all processes know after they have met.
    Example: `Agreement(["node-1", "node-2"], "outputs/run")`, two processes on two machines."""

    hosts: list[str]  # the name of each process's machine, in the order of process ids
    folder: str | None  # the folder of the run, as process 0 chose it


def process_info(settings: dict, folder: str | None = None) -> ProcessInfo:
    """This process: packages, code, devices, compiler variables, settings, the run's folder."""
    # Plugins are compared only between the machines that have them.
    versions = {name: installed_version(name) for name in (*_PACKAGES, *_PLUGINS)}
    values = {f"package {name}": version for name, version in versions.items() if version}

    # Versions do not change between two commits of a checkout, so the code itself counts.
    package = Path(__file__).parents[1]
    files = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    lines = [f"{name} {_digest(files[name].read_bytes())}\n" for name in sorted(files)]
    values["tunix-lite's code"] = _digest("".join(lines).encode())
    values["python"] = platform.python_version()
    # Read from /dev, because asking jax would start its backend.
    accelerator = "CPU"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        names = {p.name for p in Path("/dev").glob("*")}
        # /dev/vfio is there for other devices, too.
        if any(re.fullmatch(r"accel\d+|vfio", name) for name in names):
            accelerator = "TPU" if installed_version("libtpu") else "CPU"
        if any(re.fullmatch(r"nvidia\d+", name) for name in names):
            accelerator = "NVIDIA GPU"
    values["accelerator"] = accelerator
    values |= _compiler_variables(os.environ)
    values |= _flatten_settings(settings)
    return ProcessInfo(values, folder, socket.gethostname())


def _flatten_settings(value: object, name: str = "") -> dict[str, str]:
    """Nested settings as texts by dotted names; `/data/gemma`, an absolute path, is `gemma`."""
    if isinstance(value, dict):
        prefix = f"{name}." if name else ""
        flat = {}
        for part, item in value.items():
            flat |= _flatten_settings(item, f"{prefix}{part}")
        return flat
    # The one setting in which processes must differ.
    if name == "launch.process_id":
        return {}
    # Hosts may have the same folder at different paths.
    if isinstance(value, str) and value.startswith(("/", "~")):
        value = Path(value).name
    return {name: str(value)}


def digests_of_code(settings: object) -> dict[str, str]:
    """Returns digests, by module, of the user's own code that plain settings name by dotted path,
    rewards above all. Comments and blank lines do not count."""
    if isinstance(settings, dict | list | tuple):
        values = settings.values() if isinstance(settings, dict) else settings
        digests = {}
        for value in values:
            digests |= digests_of_code(value)
        return digests
    if not isinstance(settings, str) or not all(map(str.isidentifier, settings.split("."))):
        return {}
    name = settings.rpartition(".")[0]
    # a class in a class: the module is what was imported
    while name and name not in sys.modules:
        name = name.rpartition(".")[0]
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    is_ours = name.partition(".")[0] == "tunix_lite"
    # what is installed has a version
    if is_ours or file.suffix != ".py" or "site-packages" in file.parts:
        return {}
    return {name: _digest(ast.dump(ast.parse(file.read_bytes())).encode())}


def _compiler_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of jax and XLA that may change compiled programs, each flag by itself."""
    variables = {}
    for name, value in sorted(environ.items()):
        if name.startswith("JAX_") and value and not _OWN_VARIABLES.match(name):
            variables[f"{_VARIABLE}{name}"] = value
    for name in _FLAGS:
        for word in environ.get(name, "").split():
            flag, _, value = word.partition("=")
            if not _OWN_FLAGS.match(flag):
                variables[f"{_VARIABLE}{name} {flag}"] = value or "true"
    # Paths among them may differ between hosts, as those of settings may.
    return _flatten_settings(variables)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def installed_version(package: str) -> str | None:
    """The version of an installed package; None: it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---- which processes differ


def describe_differences(reports: dict[int, tuple[str, dict[str, str]]]) -> str | None:
    """Says which processes differ from the majority, and in what. None if all agree. reports:
    process id -> (name of the process, its values); who lacks a value is not compared in it."""
    differences = []
    keys = dict.fromkeys(key for _, values in reports.values() for key in values)
    for key in keys:
        have = {p: values[key] for p, (_, values) in sorted(reports.items()) if key in values}
        # Counter keeps the order of processes, and most_common takes the first of equals.
        counts = Counter(have.values())
        usual = counts.most_common(1)[0][0]
        for value in counts:
            if value == usual:
                continue
            odd = [reports[p][0] for p, own in have.items() if own == value]
            has = "has" if len(odd) == 1 else "have"
            differences.append(
                f"{enumerate_names(odd)} {has} {key}={value}, the others {usual}"
            )
    if len(differences) > _SHOWN:
        differences = [*differences[:_SHOWN], f"and {len(differences) - _SHOWN} more"]
    return "; ".join(differences) or None


def enumerate_names(names: list[str]) -> str:
    """A list of names as text, at most _SHOWN of them: `process 1, process 2 and 7 more`."""
    if len(names) > _SHOWN:
        names = [*names[: _SHOWN - 1], f"{len(names) - _SHOWN + 1} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def mismatch_error(everyone: dict[int, ProcessInfo]) -> str | None:
    """The error, with the remedy, if processes differ; None if they agree. everyone: by id."""
    # Who lacks a value is not compared in it, but an unset variable is a difference.
    unset = {}
    for info in everyone.values():
        unset |= {name: "not set" for name in info.values if name.startswith(_VARIABLE)}
    reports = {
        p: (f"process {p} ({info.host})", unset | info.values) for p, info in everyone.items()
    }
    text = describe_differences(reports)
    remedy = "Start all of them with the same command and the same packages"
    return None if text is None else f"{text}. {remedy}"


# ---- after jax has started


def agree_through_jax(own: ProcessInfo, error: str | None = None) -> Agreement:
    """Lets all processes agree, as `meeting.meet` does, but through collectives of jax. error: what
    this process has found wrong. Raises ValueError on all of them if they differ, or one has an
    error."""
    # Before any error is raised: whoever did not report would leave the others waiting.
    reports = allgather_values([dataclasses.asdict(own), error])
    if error is not None:
        raise ValueError(error)
    everyone = {p: ProcessInfo(**report) for p, (report, _) in enumerate(reports)}
    for p, (_, theirs) in enumerate(reports):
        if theirs is not None:
            raise ValueError(f"process {p} ({everyone[p].host}): {theirs}")
    text = mismatch_error(everyone)
    if text is not None:
        raise ValueError(text)
    return Agreement([everyone[p].host for p in sorted(everyone)], everyone[0].folder)
