"""Metrics, settings and completions to MLflow (extra `mlflow`)."""

from dataclasses import dataclass

from tunix_lite.tracking.plugs import TrackedRun, check_installed, flat_texts, keep_id, kept_id
from tunix_lite.tracking.rundir import json_lines
from tunix_lite.types import Metrics

# parameters that a server takes at a time, and characters of one
PARAMETERS_AT_ONCE = 100
MOST_CHARACTERS = 500


@dataclass(frozen=True)
class Mlflow:
    """Opens a run in MLflow, or goes on with that of the same folder.

    Example: `tracking=mlflow tracking.trackers.mlflow.tracking_uri=sqlite:///mlflow.db`.
    """

    # MLflow experiment that lists the run.
    experiment: str | None = None
    # Address of the MLflow server. null uses MLFLOW_TRACKING_URI or the default of MLflow.
    tracking_uri: str | None = None

    def check(self) -> None:
        """Raises ValueError, with what to install, if mlflow is not there."""
        check_installed("mlflow")

    def __call__(self, run: TrackedRun) -> "MlflowRun":
        import mlflow

        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        mlflow.set_experiment(self.experiment or run.project)
        known = kept_id(run.folder, "mlflow")
        opened = mlflow.start_run(run_id=known, run_name=None if known else run.name)
        keep_id(run.folder, "mlflow", opened.info.run_id)
        if known is None:
            texts = list(flat_texts(run.settings, MOST_CHARACTERS).items())
            for begin in range(0, len(texts), PARAMETERS_AT_ONCE):
                mlflow.log_params(dict(texts[begin : begin + PARAMETERS_AT_ONCE]))
        return MlflowRun(mlflow)


class MlflowRun:
    """A `Tracker` of one run."""

    def __init__(self, mlflow):
        """mlflow: the module, with the run active."""
        self._mlflow = mlflow

    def log(self, step: int, metrics: Metrics) -> None:
        """All numbers of a step at once."""
        self._mlflow.log_metrics(
            {name: float(value) for name, value in metrics.items()}, step=step
        )

    def log_samples(self, step: int, rows: list[dict]) -> None:
        """The completions of a step as an artifact, one a line."""
        self._mlflow.log_text(json_lines(rows), f"samples/step_{step:06d}.jsonl")

    def close(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()
