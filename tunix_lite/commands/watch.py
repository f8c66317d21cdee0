"""`tunix-lite watch RUN`: show the numbers of a run that goes on elsewhere, by its files alone.

They may be of somebody else: they are read as data, a bounded part at a time. Nothing is written.
"""

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.live
import rich.text

from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.distributed.folder_lock import is_abandoned
from tunix_lite.errors import ConfigError
from tunix_lite.files.plain_text import escaped, visible
from tunix_lite.files.untrusted import MOST_LINE, as_path, read_from, read_object, read_yaml
from tunix_lite.report.evidence import read_samples, sample_steps
from tunix_lite.tracking.console import Screen, Terminal, is_live, lines_of_sample, step_line
from tunix_lite.tracking.dashboard import Dashboard, best_middle_worst
from tunix_lite.tracking.rows import MOST_STEPS, is_number, row_of
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Metrics

# Seconds between two looks at the files.
EVERY = 0.5
# Seconds without a step after which that is said.
SILENT = 60
# Most bytes of metrics.jsonl that one look reads; the first look reads those before its end.
MOST = 4 * 2**20
# Most numbers of a step.
MOST_METRICS = 400
# What a run makes first in its folder; one of them is there before its first step.
OF_A_RUN = (".hydra", "status.json", "metrics.jsonl")
# Words of status.json for a run that has ended.
ENDED = ("completed", "stopped", "failed", "interrupted")


@dataclass(frozen=True)
class WatchOptions:
    """How a run is looked at.

    Example: `tunix-lite watch RUN watch.once=true` is WatchOptions(once=True).
    """

    # true shows the run once and ends. false keeps showing it.
    once: bool = False


@dataclass(frozen=True)
class WatchRun:
    """Which run is looked at.

    Example: `tunix-lite watch outputs/latest` is WatchRun(folder="outputs/latest").
    """

    # Folder of the run. `tunix-lite watch FOLDER` is the short form.
    folder: str | None = None
    watch: WatchOptions = WatchOptions()

    def __post_init__(self):
        if self.folder is None:
            raise ValueError("give the folder of a run: tunix-lite watch outputs/latest")


def main() -> None:
    program.run_command("watch", WatchRun, watch, positional="folder")


def watch(run: RunConfig, settings: WatchRun) -> None:
    """Shows the run until it ends, or until Ctrl-C; the run itself is not touched."""
    try:
        folder = as_path(settings.folder)
        name = escaped(str(folder))
        if not folder.is_dir():
            raise ValueError(f"{name} is no folder of a run")
        if not any((folder / file).exists() for file in OF_A_RUN):
            raise ValueError(f"{name} is not the folder of a run: it has no status.json")
        followed = FollowedRun(folder)
        with contextlib.suppress(KeyboardInterrupt):
            _show(followed, run.tracking.console, settings.watch.once)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    # How the run ended, or that it goes on.
    status = followed.status()
    word = status.get("status")
    if not isinstance(word, str):
        print(f"{name} has no status yet")
    elif word == "running" and is_abandoned(folder):
        print(f"its process is gone without a word: it was killed; hydra.run.dir={name} goes on")
    else:
        error = status.get("error")
        why = f": {escaped(error, 400)}" if isinstance(error, str) else ""
        print(f"{escaped(word)} after step {escaped(str(status.get('steps')))}{why}")


def _show(followed: "FollowedRun", mode: str, once: bool) -> None:
    """The live region of a run, and above it samples as they come; elsewhere a line a step."""
    terminal = Terminal(file=Screen(sys.stdout), highlight=False)
    has_region = terminal.is_terminal and is_live(mode, terminal)
    max_steps = followed.steps_setting("training", "max_steps")
    every = followed.steps_setting("evaluation", "interval_steps") or 0
    board = Dashboard(max_steps, evaluates_every=every)
    live = rich.live.Live(
        console=terminal,
        get_renderable=lambda: board.drawn(*terminal.size),
        refresh_per_second=2,
    )
    since = time.monotonic()
    with live if has_region else contextlib.nullcontext():
        while True:
            # Before the rows: what an ended run has logged is then all there.
            has_ended = followed.has_ended()
            for step, metrics in followed.new_rows():
                board.log(step, metrics)
                since = time.monotonic()
                if not has_region:
                    print(step_line(step, max_steps, metrics), flush=True)
            # Above the region: the best, the middle and the worst of the newest completions.
            samples = followed.new_samples() if has_region else []
            for row in best_middle_worst([samples]):
                for line in lines_of_sample(row | {"turns": None}, True):
                    terminal.print(rich.text.Text(visible(line)))
            if has_ended or once:
                return
            if time.monotonic() - since > SILENT:
                board.busy("waiting; no new step for", since)
            time.sleep(EVERY)


class FollowedRun:
    """What the files of a run have said since the last look.

    Example: `run = FollowedRun(Path("outputs/latest"))`, then `run.new_rows()` again and again.
    """

    def __init__(self, folder: Path):
        self.run_dir = RunDir(folder)
        self._offset: int | None = None
        self._rest = b""
        self._sample = -1

    def new_rows(self) -> list[tuple[int, Metrics]]:
        """(step, metrics) of each line since the last call, in the order of the file.

        Half a line waits for its other half. A file that was cut, as by a run that resumed, is read
        anew. Raises ValueError if it cannot be read.
        """
        file = self.run_dir.metrics
        if not file.is_file():
            return []
        size = file.stat().st_size
        if self._offset is None:
            self._offset = max(0, size - MOST)
            # The first line is then half of one, most likely.
            self._rest = b"" if self._offset == 0 else b"{"
        if size < self._offset:
            self._offset, self._rest = 0, b""
        part, _ = read_from(file, self._offset, MOST)
        self._offset += len(part)
        *lines, self._rest = (self._rest + part).split(b"\n")
        # No line of a run is as long: it is left out, as its end will be.
        self._rest = self._rest[: MOST_LINE + 1]
        rows = []
        for line in lines:
            if len(line) <= MOST_LINE and (row := row_of(line)) is not None:
                step = row.pop("step")
                numbers = [(visible(name), x) for name, x in row.items() if is_number(x)]
                rows.append((step, dict(numbers[:MOST_METRICS])))
        return rows

    def status(self) -> dict[str, Any]:
        """status.json; {} where there is none that can be read."""
        with contextlib.suppress(ValueError):
            return read_object(self.run_dir.status, MOST_LINE)
        return {}

    def has_ended(self) -> bool:
        """Whether the run has ended, or its process of this machine was killed."""
        # The lock first: a run lets go of it after it has written how it ended.
        return is_abandoned(self.run_dir.path) or self.status().get("status") in ENDED

    def steps_setting(self, group: str, name: str) -> int | None:
        """A number of steps of the run's settings; None where they cannot be read."""
        settings: dict = {}
        with contextlib.suppress(ValueError):
            settings = read_yaml(self.run_dir.path / ".hydra" / "config.yaml", MOST_LINE)
        values = settings.get(group)
        steps = values.get(name) if isinstance(values, dict) else None
        return steps if type(steps) is int and 0 < steps < MOST_STEPS else None

    def new_samples(self) -> list[dict]:
        """The rows of the newest file of samples/, where they have not been returned before."""
        before, self._sample = self._sample, max(sample_steps(self.run_dir.path), default=-1)
        if self._sample == before:
            return []
        return read_samples(self.run_dir.path, self._sample, "step", [])
