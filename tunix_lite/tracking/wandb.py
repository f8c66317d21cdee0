"""Metrics, completions and histograms to Weights & Biases (extra `wandb`)."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.tracking.plugs import TrackedRun, check_installed, columns_of, keep_id, kept_id
from tunix_lite.types import Metrics


@dataclass(frozen=True)
class Wandb:
    """Opens a run at Weights & Biases, or goes on with that of the same folder.

    Example: `tracking=wandb tracking.trackers.wandb.mode=offline` writes below the run's folder,
    for `wandb sync`.
    """

    # Project that lists the run.
    project: str | None = None
    # User or team. null uses the one of `wandb login`.
    entity: str | None = None
    # online, offline or disabled. null uses WANDB_MODE or the default of wandb.
    mode: str | None = None

    def check(self) -> None:
        """Raises ValueError, with what to install, if wandb is not there."""
        check_installed("wandb")

    def __call__(self, run: TrackedRun) -> "WandbRun":
        import wandb

        opened = wandb.init(
            project=self.project or run.project,
            entity=self.entity,
            mode=self.mode,
            name=run.name,
            id=kept_id(run.folder, "wandb"),
            resume="allow",
            dir=str(run.folder),
            config=run.settings,
        )
        keep_id(run.folder, "wandb", opened.id)
        return WandbRun(wandb, opened)


class WandbRun:
    """A `Tracker` of one run."""

    def __init__(self, wandb, opened):
        """wandb: the module. opened: what its `init` returned."""
        self._wandb = wandb
        self._run = opened

    def log(self, step: int, metrics: Metrics) -> None:
        """All metrics of a step at once."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[dict]) -> None:
        """The completions of a step as a table."""
        columns, cells = columns_of(rows)
        self._run.log({"samples": self._wandb.Table(columns=columns, data=cells)}, step=step)

    def log_histograms(self, step: int, values: dict[str, np.ndarray]) -> None:
        """A histogram of each."""
        drawn = {name: self._wandb.Histogram(found) for name, found in values.items()}
        self._run.log(drawn, step=step)

    def close(self) -> None:
        """Uploads what is left, and ends the run."""
        self._run.finish()
