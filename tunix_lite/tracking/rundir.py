"""The folder of a run: what stands in it, and the status that says how the run ended."""

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """outputs/<project_name>/<date>/<time>/ and the names of what is in it."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def make(self) -> None:
        """Creates the folder, and points `outputs/latest` at it if it lies under a folder named outputs."""
        self.path.mkdir(parents=True, exist_ok=True)
        outputs = next((p for p in self.path.absolute().parents if p.name == "outputs"), None)
        if outputs is not None:
            fresh = outputs / f".latest.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(self.path.absolute().relative_to(outputs), target_is_directory=True)
            fresh.replace(outputs / "latest")

    def write_status(self, status: dict) -> None:
        """status.json, replaced as a whole: a reader never sees half of it."""
        fresh = self.path / "status.json.tmp"
        fresh.write_text(json.dumps(status, indent=2) + "\n")
        fresh.replace(self.path / "status.json")

    def write_samples(self, step: int, rows: list[dict]) -> None:
        """samples/step_000010.jsonl: one completion a line."""
        (self.path / "samples").mkdir(exist_ok=True)
        file = self.path / "samples" / f"step_{step:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
