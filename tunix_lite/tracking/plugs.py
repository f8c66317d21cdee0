"""Trackers of other projects: Weights & Biases and MLflow, each an extra of its name; and
a guard that lets a run go on without a tracker that fails."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flax.traverse_util import flatten_dict

from tunix_lite.basics.plain_text import escaped, visible
from tunix_lite.basics.types import Metrics
from tunix_lite.tracking.rundir import json_lines, json_value
from tunix_lite.tracking.tracker import Tracker

# most characters of a text in a table of completions
_MOST_TEXT = 2_000
# parameters that an MLflow server takes at a time, and characters of one
_PARAMETERS_AT_ONCE = 100
_MOST_CHARACTERS = 500


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns of a run when it is opened. Example: TrackedRun(folder,
    "2026-11-22/14-36-08", "tunix_lite", {"seed": 0}, resume_at=None)."""

    folder: Path
    name: str
    # project_name
    project: str
    # all settings, nested, as YAML has them
    settings: dict
    # the step that it goes on from; None: it begins
    resume_at: int | None

    def tracker_id(self, tracker: str) -> str | None:
        """The id that a tracker gave the run of this folder; None: it has none yet."""
        file = self.folder / f".{tracker}_id"
        text = file.read_text().strip() if file.is_file() else ""
        return text if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) else None

    def keep_id(self, tracker: str, text: str) -> None:
        """Keeps the id in the run's folder, so that a run that resumes goes on there, too."""
        (self.folder / f".{tracker}_id").write_text(f"{text}\n")


class _Plug:
    """A tracker whose package and extra have the name of its class, in small letters."""

    def check(self) -> None:
        """Raises ValueError, with what to install, if the package is not there."""
        package = type(self).__name__.lower()
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed: pip install -e '.[{package}]'")


@dataclass(frozen=True)
class Wandb(_Plug):
    """Opens a run at Weights & Biases, or goes on with that of the same folder.
    Example: `tracking=wandb tracking.trackers.wandb.mode=offline` writes below the run's folder,
    for `wandb sync`."""

    # conf/tracking/wandb.yaml explains each setting
    project: str | None = None
    entity: str | None = None
    mode: str | None = None

    def __call__(self, run: TrackedRun) -> Tracker:
        # An extra of the package: nobody needs it who does not name it.
        import wandb

        opened = wandb.init(
            project=self.project or run.project,
            entity=self.entity,
            mode=self.mode,
            name=run.name,
            id=run.tracker_id("wandb"),
            resume="allow",
            dir=str(run.folder),
            config=run.settings,
        )
        run.keep_id("wandb", opened.id)
        columns = ["prompt", "completion", "expected", "extracted", "correct", "reward"]
        columns += ["rewards", "advantage"]

        def cell(value: object) -> float | int | str | None:
            plain = json_value(value)
            if isinstance(plain, float | int | None):
                return plain
            return visible(str(plain)[:_MOST_TEXT])

        def log_samples(step: int, rows: list[dict]) -> None:
            cells = [[cell(row.get(name)) for name in columns] for row in rows]
            table = wandb.Table(columns=columns, data=cells)
            opened.log({"samples": table}, step=step)

        def log(step: int, metrics: Metrics) -> None:
            opened.log(dict(metrics), step=step)

        return SimpleNamespace(log=log, log_samples=log_samples, close=opened.finish)


@dataclass(frozen=True)
class Mlflow(_Plug):
    """Opens a run in MLflow, or goes on with that of the same folder.
    Example: `tracking=mlflow tracking.trackers.mlflow.tracking_uri=sqlite:///mlflow.db`."""

    # conf/tracking/mlflow.yaml explains each setting
    experiment: str | None = None
    tracking_uri: str | None = None

    def __call__(self, run: TrackedRun) -> Tracker:
        import mlflow

        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        mlflow.set_experiment(self.experiment or run.project)
        # a run that resumes goes on in its own page
        known = run.tracker_id("mlflow")
        opened = mlflow.start_run(run_id=known, run_name=None if known else run.name)
        run.keep_id("mlflow", opened.info.run_id)
        # MLflow refuses to change a parameter that a run has.
        if known is None:
            texts = [
                (re.sub(r"[^\w\-. /]", "_", name), escaped(str(value), _MOST_CHARACTERS - 1))
                for name, value in flatten_dict(run.settings, sep=".").items()
            ]
            # the server refuses more in one request
            for begin in range(0, len(texts), _PARAMETERS_AT_ONCE):
                mlflow.log_params(dict(texts[begin : begin + _PARAMETERS_AT_ONCE]))

        def log(step: int, metrics: Metrics) -> None:
            numbers = {name: float(value) for name, value in metrics.items()}
            mlflow.log_metrics(numbers, step=step)

        def log_samples(step: int, rows: list[dict]) -> None:
            # an artifact, with a completion a line
            mlflow.log_text(json_lines(rows), f"samples/step_{step:06d}.jsonl")

        return SimpleNamespace(log=log, log_samples=log_samples, close=mlflow.end_run)


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
                self._say(
                    f"warning: {self._name} failed ({reason}); nothing more is sent to it"
                )

        return guarded
