"""Metrics and completions to Trackio (extra `trackio`): a database on this machine."""

from dataclasses import dataclass

from tunix_lite.tracking.plugs import TableRun, TrackedRun, check_installed, with_plain_keys


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

    def __call__(self, run: TrackedRun) -> "TableRun":
        import trackio

        opened = trackio.init(
            project=self.project or run.project,
            name=run.name,
            space_id=self.space_id,
            config=with_plain_keys(run.settings),
            resume="allow",
            embed=False,
        )
        return TableRun(trackio, opened)
