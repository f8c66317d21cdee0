"""`tunix-lite check`: whether this machine, its devices and the processes of a run are in order."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.commands import program
from tunix_lite.commands.checks.devices import look_at_devices
from tunix_lite.commands.checks.machine import CheckLine, fails
from tunix_lite.config import RunConfig
from tunix_lite.distributed.host_memory import prepare_gpu
from tunix_lite.distributed.process_place import find_place


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
        if self.timeout < 1 or (self.devices is not None and self.devices < 1):
            raise ValueError(
                f"devices={self.devices} and timeout={self.timeout} must be at least 1"
            )


def main() -> None:
    # What a run would have of a GPU.
    prepare_gpu()
    program.run_command("check", Check, _check_machine)


def _check_machine(run: RunConfig, settings: Check) -> None:
    """Looks at everything, prints a line for each, and ends the process: 1 if anything fails."""
    lines: list[CheckLine] = []
    facts: dict = {}
    is_first = True

    def show(line: CheckLine) -> None:
        # Of several processes only the first prints what is in order; each prints what is not.
        lines.append(line)
        if not settings.json and (is_first or line.state == "fails"):
            print(line, flush=True)

    try:
        is_first = find_place(run.launch, os.environ).process_id == 0
    except ValueError as problem:
        show(fails("launch", str(problem), "tunix-lite launch --nprocs=2 check"))
    else:
        folder = Path("outputs")
        facts = look_at_devices(run.launch, folder, settings.timeout, settings.devices, show)
    is_ok = all(line.state != "fails" for line in lines)
    if settings.json:
        lines_as_json = [vars(line) for line in lines]
        print(json.dumps({"ok": is_ok, "lines": lines_as_json, "facts": facts}, indent=2))
    sys.exit(0 if is_ok else 1)
