"""Metrics and completions to Weights & Biases (extra `wandb`)."""

from dataclasses import dataclass

from tunix_lite.tracking.plugs import TableRun, TrackedRun, check_installed, keep_id, kept_id


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

    def __call__(self, run: TrackedRun) -> "TableRun":
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
        return TableRun(wandb, opened)
