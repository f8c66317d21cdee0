"""`tunix-lite check`: whether this machine, its devices and the processes of a run are in order."""

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from tunix_lite.commands import program
from tunix_lite.commands.checks import machine
from tunix_lite.commands.checks.devices import look_at_devices, probe_environment
from tunix_lite.commands.checks.lines import CheckLine, fails, look_within, ok
from tunix_lite.config import RunConfig
from tunix_lite.distributed.host_memory import prepare_gpu
from tunix_lite.distributed.process_place import find_place
from tunix_lite.errors import ConfigError
from tunix_lite.models import hub
from tunix_lite.parallel.mesh import resolve_mesh_shape
from tunix_lite.planning import hardware
from tunix_lite.planning.hardware import GiB, Machine
from tunix_lite.planning.plan import estimated
from tunix_lite.resolved.run import find_model
from tunix_lite.settings import compose as composing


@dataclass(frozen=True)
class Check:
    """How a machine is looked at.

    Example: `tunix-lite check devices=4` is Check(devices=4).
    """

    # Number of pretend CPU devices to check instead. null checks the attached devices.
    devices: int | None = None
    # Seconds that each check may take. A check that takes longer fails.
    timeout: int = 60
    # true prints one JSON object instead of lines.
    json: bool = False

    def __post_init__(self):
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices={self.devices} must be at least 1")
        if self.timeout < 1:
            raise ValueError(f"timeout={self.timeout} must be at least 1 second")


def main() -> None:
    # What a run would have of a GPU.
    prepare_gpu()
    # As other programs spell it.
    sys.argv[1:] = ["json=true" if word == "--json" else word for word in sys.argv[1:]]

    # Settings of a run that are wrong are one of the lines.
    def check_alone(settings: Check, error: ConfigError) -> None:
        check_machine(None, settings, error)

    program.run_command("check", Check, check_machine, without_run=check_alone)


def check_machine(
    run: RunConfig | None, settings: Check, error: ConfigError | None = None
) -> None:
    """Looks at everything, prints a line for each, and ends the process: 1 if anything fails.

    error: why there is no run.
    """
    launch = composing.compose([]).launch if run is None else run.launch
    place = wrong_place = None
    try:
        place = find_place(launch, os.environ)
    except ValueError as problem:
        wrong_place = fails("launch", str(problem), "tunix-lite launch --nprocs=2 check")
    is_first = place is None or place.process_id == 0
    shown: list[CheckLine] = []

    def show(line: CheckLine) -> None:
        # Of several processes only the first prints what is in order; each prints what is not.
        shown.append(line)
        if not settings.json and (is_first or line.state == "fails"):
            line.print_to(sys.stdout)

    # The machine: no device is started. Then what the settings of a run say.
    _check_machine(run, settings, show)
    if run is None:
        show(fails("configuration", str(error), "tunix-lite train --help"))
    else:
        algorithm = type(run.algorithm).__name__
        lora = f", LoRA of rank {run.model.lora.rank}" if run.model.lora.rank else ""
        model = f"{run.model.weights}{lora}, {run.training.mixed_precision}"
        show(ok("configuration", f"composes: {algorithm} on {model}"))

    # The devices, in another process; and the run of these settings on them.
    facts: dict = {}
    if wrong_place is not None:
        show(wrong_place)
    else:
        environment = probe_environment(settings.devices, os.environ)
        facts = look_at_devices(launch, Path("outputs"), settings.timeout, environment, show)
        for line in _on_devices(run, settings, facts) if facts else ():
            show(line)

    code = int(any(line.state == "fails" for line in shown))
    if settings.json:
        lines = [vars(line) for line in shown]
        print(json.dumps({"ok": code == 0, "lines": lines, "facts": facts}, indent=2))
    leave(code)


def _check_machine(
    run: RunConfig | None, settings: Check, show: Callable[[CheckLine], None]
) -> None:
    """What is installed, the GPUs as their driver sees them, memory, disk and the hub's token."""
    gpus: list[machine.GpuInUse] = []

    def look_at_gpus() -> list[CheckLine]:
        seen, error = machine.nvidia_gpus()
        gpus.extend(seen)
        driver = machine.driver_line(seen, error, machine.cuda_version())
        return [driver, *machine.gpu_memory_lines(seen)]

    weights = None if run is None else run.model.weights
    hub_model = weights if weights is not None and hub.is_hub_name(weights) else None
    show(ok("python", f"{platform.python_version()} at {sys.executable}"))
    lines = look_within(3 * machine.SMI_SECONDS, "driver", look_at_gpus)
    lines = machine.jax_lines(0 if settings.devices is not None else len(gpus)) + lines
    looks = {
        "memory": machine.host_memory_line,
        "disk": lambda: machine.disk_line(Path("outputs")),
        "hub": lambda: machine.token_line(hub_model),
    }
    for name, look in looks.items():
        lines += look_within(settings.timeout, name, lambda look=look: [look()])
    for line in lines:
        show(line)


def _on_devices(run: RunConfig | None, settings: Check, facts: dict) -> list[CheckLine]:
    """Whether jax took the accelerator, and whether the run of these settings fits on it."""
    lines: list[CheckLine] = []
    platform = facts["platform"]
    wants_cpu = machine.wants_cpu() or settings.devices is not None
    if (
        platform == "cpu"
        and not wants_cpu
        and machine.cuda_version()
        and machine.nvidia_gpus()[0]
    ):
        text = "jax runs on the CPU, though it has a plugin for the GPUs here"
        why = "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'  # says why"
        lines.append(fails("devices", text, why))
    if run is None:
        return lines

    # Formulas alone: the devices stay with the probe.
    jax.config.update("jax_platforms", "cpu")
    count = facts["devices"]
    capacity = facts["memory_bytes"]
    fix = "model.mesh_shape=[[-1,1],[fsdp,tp]]"
    try:
        sizes = resolve_mesh_shape(run.model.mesh_shape, count)
        fix = "tunix-lite plan mesh=all analytic=true"
        kind = next((h for h in hardware.TABLE if facts["kind"] in h.kinds), None)
        attached = Machine("attached", platform, count, kind, capacity, "as jax says")
        plan = estimated(run, attached, *find_model(run.model), sizes)
    except (ConfigError, ValueError) as error:
        return [*lines, fails("mesh", str(error), fix)]
    shown = " x ".join(f"{size} {axis}" for axis, size in sizes.items())
    lines.append(ok("mesh", f"{shown}; {plan.resolved.batch.sequences} sequences per update"))
    room = "" if capacity is None else f" of {capacity / GiB:.2f}"
    text = f"{plan.peak_bytes / GiB:.2f}{room} GiB a device at most, by an estimate"
    if plan.fits is False:
        words = " ".join(word for word in sys.argv[1:] if "=" in word)
        fix = f"tunix-lite plan analytic=true {words}".rstrip()
        return [*lines, fails("plan", f"{text}: this run does not fit", fix)]
    return [*lines, ok("plan", text)]


def leave(code: int) -> None:
    """Ends the process although a thread may still wait for a disk or a device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
