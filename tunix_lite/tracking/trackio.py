"""Metrics, completions and histograms to Trackio (extra `trackio`): a database on this machine."""

from dataclasses import dataclass

import numpy as np

from tunix_lite.tracking.plugs import TrackedRun, check_installed, columns_of, with_plain_keys
from tunix_lite.types import Metrics


@dataclass(frozen=True)
class Trackio:
    """Opens a run in Trackio, or goes on with that of the same name.

    Example: `tracking=trackio`, then `trackio show --project tunix_lite` in another terminal.
    """

    # Project that lists the run.
    project: str | None = None
    # Space of the Hugging Face hub. null keeps the data on this machine.
    space_id: str | None = None

    def check(self) -> None:
        """Raises ValueError, with what to install, if trackio is not there."""
        check_installed("trackio")

    def __call__(self, run: TrackedRun) -> "TrackioRun":
        import trackio

        opened = trackio.init(
            project=self.project or run.project,
            name=run.name,
            space_id=self.space_id,
            config=with_plain_keys(run.settings),
            resume="allow",
            embed=False,
        )
        return TrackioRun(trackio, opened)


class TrackioRun:
    """A `Tracker` of one run."""

    def __init__(self, trackio, opened):
        """trackio: the module. opened: what its `init` returned."""
        self._trackio = trackio
        self._run = opened

    def log(self, step: int, metrics: Metrics) -> None:
        """All metrics of a step at once."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[dict]) -> None:
        """The completions of a step as a table."""
        columns, cells = columns_of(rows)
        self._run.log({"samples": self._trackio.Table(columns=columns, data=cells)}, step=step)

    def log_histograms(self, step: int, values: dict[str, np.ndarray]) -> None:
        """A histogram of each."""
        drawn = {name: self._trackio.Histogram(found) for name, found in values.items()}
        self._run.log(drawn, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
