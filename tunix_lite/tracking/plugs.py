"""What trackers of other projects share: which run it is, packages that may be missing, ids kept
for resuming, and a guard that lets a run go on without a tracker that fails."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tunix_lite.files.plain_text import escaped, visible
from tunix_lite.tracking.rundir import json_value
from tunix_lite.tracking.tracker import Tracker
from tunix_lite.types import Metrics

# most characters of a text in a table of completions
MOST_TEXT = 2_000


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns of a run when it is opened.

    Example: TrackedRun(folder, "2026-11-22/14-36-08", "tunix_lite", {"seed": 0}, resume_at=None).
    """

    folder: Path
    name: str
    # project_name
    project: str
    # all settings, nested, as YAML has them
    settings: dict
    # the step that it goes on from; None: it begins
    resume_at: int | None


def run_name(folder: Path) -> str:
    """`2026-11-22/14-36-08`: the last two parts of a run's folder."""
    return "/".join(folder.absolute().parts[-2:])


# ---- packages, and ids


def check_installed(package: str) -> None:
    """Raises ValueError, with what to install, if the package is not there. Its extra has its
    name."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{package} is not installed: pip install -e '.[{package}]'")


def kept_id(folder: Path, tracker: str) -> str | None:
    """The id that a tracker gave the run of this folder; None: it has none yet."""
    file = folder / f".{tracker}_id"
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return text if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) else None


def keep_id(folder: Path, tracker: str, text: str) -> None:
    """Keeps the id in the run's folder, so that a run that resumes goes on there, too."""
    (folder / f".{tracker}_id").write_text(f"{text}\n")


# ---- what they are given


def columns_of(rows: list[dict]) -> tuple[list[str], list[list[Any]]]:
    """Completions as a table: its heads, and its cells row by row. Texts are cut."""
    rewards = list(dict.fromkeys(name for row in rows for name in row.get("rewards") or {}))
    plain = ["prompt", "completion", "expected", "extracted", "correct", "reward"]
    cells = []
    for row in rows:
        own = [row.get(name) for name in plain]
        own += [(row.get("rewards") or {}).get(name) for name in rewards]
        own.append(row.get("advantage"))
        cells.append(
            [visible(x[:MOST_TEXT]) if isinstance(x, str) else json_value(x) for x in own]
        )
    return [*plain, *(f"reward {name}" for name in rewards), "advantage"], cells


def flat(settings: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted names of all settings, and their values."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flat_texts(settings: dict, most: int) -> dict[str, str]:
    """All settings by dotted name, as texts of at most `most` characters."""
    texts = {name: escaped(str(value), most - 1) for name, value in flat(settings)}
    return {re.sub(r"[^\w\-. /]", "_", name): text for name, text in texts.items()}


def with_plain_keys(settings: dict) -> dict:
    """The settings with `target` for `_target_`: some trackers keep names with _ for themselves."""
    return {
        str(key).strip("_"): with_plain_keys(value) if isinstance(value, dict) else value
        for key, value in settings.items()
    }


# ---- trackers of a run


class TableRun:
    """A `Tracker` over wandb, or over trackio, which has the same calls."""

    def __init__(self, module: ModuleType, opened: Any):
        """module: with `Table`. opened: what its `init` returned."""
        self._module = module
        self._opened = opened

    def log(self, step: int, metrics: Metrics) -> None:
        """Sends all metrics of a step at once."""
        self._opened.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[dict]) -> None:
        """Sends the completions of a step as a table."""
        columns, cells = columns_of(rows)
        self._opened.log({"samples": self._module.Table(columns=columns, data=cells)}, step=step)

    def close(self) -> None:
        """Sends what is left, and ends the run."""
        self._opened.finish()


class Guarded:
    """A tracker whose failure is said once, and does not end the run."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]):
        """name: its setting. say: prints a line."""
        self._name = name
        self._tracker: Any = tracker
        self._say = say

    def __getattr__(self, method: str) -> Callable[..., None]:
        """A method of the tracker: log, close, or one of those that it may have."""

        def guarded(*arguments: object) -> None:
            action = getattr(self._tracker, method, None)
            if action is None:
                return
            try:
                action(*arguments)
            # What other projects raise is not known here.
            except Exception as error:
                self._tracker = None
                reason = escaped(f"{type(error).__name__}: {error}", 300)
                self._say(f"warning: {self._name} failed ({reason}); nothing more is sent to it")

        return guarded
