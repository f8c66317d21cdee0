"""`tunix-lite watch RUN`: show the numbers of a run that goes on elsewhere, by its files alone.

They may be of somebody else: they are read as data, up to a size. Nothing is written.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.live

from tunix_lite.commands import program
from tunix_lite.distributed.folder_lock import is_abandoned
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.files.plain_text import escaped, visible
from tunix_lite.files.untrusted import MOST_LINE, as_path, read_from, read_object, read_yaml
from tunix_lite.tracking.console import Screen, Terminal, is_live, step_line
from tunix_lite.tracking.dashboard import Dashboard
from tunix_lite.tracking.rows import MOST_STEPS, is_number, row_of
from tunix_lite.tracking.rundir import RunDir

# Seconds between two looks at the files.
EVERY = 1.0
# Most bytes that are read of the end of metrics.jsonl, and most numbers of a step.
_MOST = 4 * 2**20
_MOST_METRICS = 400


@dataclass(frozen=True)
class WatchRun:
    """Which run is looked at.

    Example: `tunix-lite watch outputs/latest` is WatchRun(folder="outputs/latest").
    """

    # Folder of the run. `tunix-lite watch FOLDER` is the short form.
    folder: str | None = None

    def __post_init__(self):
        if self.folder is None:
            raise ValueError("give the folder of a run: tunix-lite watch outputs/latest")


def main() -> None:
    program.run_command("watch", WatchRun, watch, positional="folder", takes_run=False)


def watch(settings: WatchRun) -> None:
    """Shows a live region, elsewhere a line a step, until the run ends or Ctrl-C comes; then how
    the run ended. The run itself is not touched."""
    with error_context(""):
        folder = as_path(settings.folder)
    run_dir = RunDir(folder)
    # a run makes its settings first
    if not (run_dir.status.exists() or (folder / ".hydra").exists()):
        raise ConfigError(f"{escaped(str(folder))} is not the folder of a run")
    training = _read(read_yaml, folder / ".hydra" / "config.yaml").get("training")
    max_steps = training.get("max_steps") if isinstance(training, dict) else None
    is_known = type(max_steps) is int and 0 < max_steps < MOST_STEPS
    board = Dashboard(max_steps if is_known else None)
    terminal = Terminal(file=Screen(sys.stdout), highlight=False)
    has_region = terminal.is_terminal and is_live("auto", terminal)
    live = rich.live.Live(
        console=terminal,
        get_renderable=lambda: board.drawn(*terminal.size),
        refresh_per_second=2,
    )
    shown = -1
    has_ended = False
    with (
        live if has_region else contextlib.nullcontext(),
        contextlib.suppress(KeyboardInterrupt),
    ):
        while not has_ended:
            # Before the rows: what an ended run has logged is then all there. A run lets go of its
            # lock after it has written how it ended.
            has_ended = is_abandoned(folder)
            status = _read(read_object, run_dir.status).get("status", "running")
            has_ended |= status != "running"
            for step, metrics in last_rows(run_dir.metrics):
                if step > shown:
                    shown = step
                    board.log(step, metrics)
                    if not has_region:
                        print(step_line(step, board.max_steps, metrics), flush=True)
            if not has_ended:
                time.sleep(EVERY)

    status = _read(read_object, run_dir.status)
    word, error = status.get("status"), status.get("error")
    if word == "running" and is_abandoned(folder):
        print(f"its process was killed; hydra.run.dir={escaped(str(folder))} goes on")
    elif isinstance(word, str):
        why = f": {escaped(error, 400)}" if isinstance(error, str) else ""
        print(f"{escaped(word)} after step {escaped(str(status.get('steps')))}{why}")


def last_rows(file: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of each whole line in the end of metrics.jsonl; [] if it cannot be read."""
    part, rows = b"", []
    with contextlib.suppress(ValueError, OSError):
        part, _ = read_from(file, max(0, file.stat().st_size - _MOST), _MOST)
    for line in part.split(b"\n"):
        if len(line) <= MOST_LINE and (row := row_of(line)) is not None:
            step = row.pop("step")
            numbers = [(visible(name), x) for name, x in row.items() if is_number(x)]
            rows.append((step, dict(numbers[:_MOST_METRICS])))
    return rows


def _read(reader: Callable[[Path, int], dict[str, Any]], file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none that can be read."""
    with contextlib.suppress(ValueError):
        return reader(file, MOST_LINE)
    return {}
