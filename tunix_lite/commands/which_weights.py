"""Chooses the weights of a command: those of a run's checkpoint, or those that `model` names."""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from tunix_lite.inference.language_model import LanguageModel, open_model, run_settings
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.parallel.mesh import devices_taken
from tunix_lite.settings.config import RunConfig


@dataclass(frozen=True)
class WhichWeights:
    """The settings that generate, chat and export share.
    Example: `checkpoint=outputs/latest step=40`."""

    # Run folder whose newest checkpoint is used. null uses model.weights.
    checkpoint: str | None = None
    # Step of the checkpoint to use from that run, or best (training.best_metric). null uses the
    # newest.
    step: int | str | None = None

    def __post_init__(self):
        if self.step is not None and self.checkpoint is None:
            raise ValueError("step= needs a run: give checkpoint=FOLDER, too")

    def open(self, run: RunConfig, dtype: str | None = None) -> LanguageModel:
        """Loads the model that `run.model` and these settings name, onto `run.model.mesh_shape`.
        dtype: bf16 or fp32; None: as training.mixed_precision says. Raises ConfigError."""
        keep_programs(run.runtime.program_cache)
        # Weights that the run drew at random come back only from the run's own seed.
        folder = None
        seed = run.seed
        if self.checkpoint is not None:
            folder = Path(self.checkpoint).expanduser()
            _, seed = run_settings(folder, run.model.family)

        dtype = dtype or run.training.mixed_precision
        model = open_model(run.model, folder, self.step, dtype, seed)
        if model.mesh.size < jax.device_count():
            print(f"devices: {devices_taken(model.mesh)}", file=sys.stderr)
        return model
