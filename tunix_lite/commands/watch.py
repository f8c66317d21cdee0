"""`tunix-lite watch RUN`: show the numbers of a run that goes on elsewhere."""

import sys
import time
from dataclasses import dataclass

import rich.console
import rich.live

from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.distributed.folder_lock import is_abandoned
from tunix_lite.errors import ConfigError
from tunix_lite.files.untrusted import as_path
from tunix_lite.plain_text import escaped
from tunix_lite.tracking.console import Screen, Terminal, is_live, step_line
from tunix_lite.tracking.dashboard import Dashboard, sample_panel
from tunix_lite.tracking.follow import FollowedRun
from tunix_lite.tracking.rewrapped import Rewrapped

# Seconds between two looks at the files.
EVERY = 0.5
# Seconds without a step after which that is said.
SILENT = 60
# What a run makes first in its folder; one of them is there before its first step.
OF_A_RUN = (".hydra", "status.json", "metrics.jsonl")


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
        if not folder.is_dir():
            raise ValueError(f"{escaped(str(folder))} is no folder of a run")
        if not any((folder / name).exists() for name in OF_A_RUN):
            raise ValueError(
                f"{escaped(str(folder))} is not the folder of a run: it has no status.json"
            )
        followed = FollowedRun(folder)
        terminal = Terminal(file=Screen(sys.stdout), highlight=False)
        try:
            if terminal.is_terminal and is_live(run.tracking.console, terminal):
                _show_live(followed, terminal, settings.watch.once)
            else:
                _print_lines(followed, settings.watch.once)
        except KeyboardInterrupt:
            pass
        _print_end(followed)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _show_live(followed: FollowedRun, terminal: Terminal, once: bool) -> None:
    """A live region, and above it samples as they come."""
    every = followed.evaluates_every()
    board = Dashboard(followed.max_steps(), is_here=False, evaluates_every=every)
    since = time.monotonic()

    rewrapped = Rewrapped(terminal)

    def drawn() -> rich.console.RenderableType:
        return rewrapped.measured(board.drawn(*terminal.size))

    # before the hook that rich pushes
    terminal.push_render_hook(rewrapped)
    live = rich.live.Live(console=terminal, get_renderable=drawn, refresh_per_second=2)
    with live:
        while True:
            # Before the rows: what an ended run has logged is then all there.
            has_ended = _has_ended(followed)
            for step, metrics in followed.new_rows():
                board.log(step, metrics)
                since = time.monotonic()
            found = followed.new_samples()
            panel = sample_panel(*found, terminal.width) if found else None
            if panel is not None:
                terminal.print(panel)
            if has_ended or once:
                return
            if time.monotonic() - since > SILENT:
                board.busy("waiting; no new step for", since)
            time.sleep(EVERY)


def _print_lines(followed: FollowedRun, once: bool) -> None:
    """A plain line for each step."""
    max_steps = followed.max_steps()
    since = time.monotonic()
    while True:
        has_ended = _has_ended(followed)
        for step, metrics in followed.new_rows():
            print(step_line(step, max_steps, metrics), flush=True)
            since = time.monotonic()
        if has_ended or once:
            return
        if time.monotonic() - since > SILENT:
            print(f"no new step for {SILENT} s", flush=True)
            since = time.monotonic()
        time.sleep(EVERY)


def _has_ended(followed: FollowedRun) -> bool:
    """Whether the run has ended, or its process of this machine was killed."""
    # The lock first: a run lets go of it after it has written how it ended.
    return is_abandoned(followed.run_dir.path) or followed.has_ended()


def _print_end(followed: FollowedRun) -> None:
    """How the run ended, or that it goes on."""
    status = followed.status()
    word = status.get("status")
    if not isinstance(word, str):
        print(f"{escaped(str(followed.run_dir.path))} has no status yet")
        return
    if word == "running" and is_abandoned(followed.run_dir.path):
        path = escaped(str(followed.run_dir.path))
        print(f"its process is gone without a word: it was killed; hydra.run.dir={path} goes on")
        return
    error = status.get("error")
    why = f": {escaped(error, 400)}" if isinstance(error, str) else ""
    print(f"{escaped(word)} after step {escaped(str(status.get('steps')))}{why}")
