"""The folder of a run: what stands in it, and the status that says how the run ended."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunix_lite.tracking import disk
from tunix_lite.tracking.console import minutes


@dataclass(frozen=True)
class RunDir:
    """outputs/<project_name>/<date>/<time>/ and the names of what is in it.

    Of several processes each has a log of its own; everything else is written by the first, and by no other.
    """

    MODEL = "model.json"  # the model's settings: what generate, chat and export read

    path: Path
    process: int = 0

    @property
    def is_first(self) -> bool:
        return self.process == 0

    @property
    def log(self) -> Path:
        return self.path / ("train.log" if self.is_first else f"train.p{self.process}.log")

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def fingerprint(self) -> Path:
        return self.path / "fingerprint.json"

    @property
    def reference(self) -> Path:
        return self.path / "reference.json"

    @property
    def kept_reference(self) -> Path:
        return self.path / "reference"

    def skipped(self, step: int) -> Path:
        return self.path / "skipped" / f"step_{step:06d}.npz"

    def check(self) -> None:
        """Raises ValueError if the folder could not be made or written."""
        there = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"{there} is a file; give a folder")
        for folder in (there, *(p for p in (self.checkpoints,) if p.is_dir())):
            try:
                with tempfile.TemporaryFile(dir=folder) as file:  # asking for permission says nothing of a full disk
                    file.write(bytes(64 * 1024))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise ValueError(f"{folder} cannot be written to: {disk.reason(error)}") from error

    def make(self) -> None:
        """Creates the folder, and points `outputs/latest` at it if it lies under a folder named outputs."""
        self.path.mkdir(parents=True, exist_ok=True)
        whole = self.path.resolve()  # of outputs/latest, the folder that it points to
        outputs = next((p for p in whole.parents if p.name == "outputs"), None)
        if outputs is not None and self.is_first:
            fresh = outputs / f".latest.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(whole.relative_to(outputs), target_is_directory=True)
            fresh.replace(outputs / "latest")

    def write_model(self, settings: dict) -> None:
        """model.json: what `read_model` gives back."""
        self.write_json(self.path / self.MODEL, settings)

    def write_json(self, file: Path, values: dict) -> None:
        """Replaces the file as a whole: a reader never sees half of it."""
        if self.is_first:
            fresh = file.with_suffix(".json.tmp")
            fresh.write_text(json.dumps(values, indent=2) + "\n")
            fresh.replace(file)

    def read_model(self) -> dict:
        """The `model` settings of the run and its seed. Raises ValueError if there are none."""
        file = self.path / self.MODEL
        if not file.is_file():
            raise ValueError(f"{self.path} is not the folder of a run: it has no {self.MODEL}")
        try:
            said = json.loads(file.read_text())
            return {"model": dict(said["model"]), "seed": int(said["seed"])}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} cannot be read ({error!r})") from error

    def accuracies(self, until: int) -> dict:
        """`eval` of status.json by the lines of metrics.jsonl up to this step; {} if they hold no accuracy."""
        seen = []
        for line in self.metrics.read_text().splitlines() if self.metrics.is_file() else []:
            with contextlib.suppress(ValueError):  # half a line of a run that was killed
                row = json.loads(line)
                if row["step"] <= until and row.get("eval/accuracy") is not None:
                    seen.append({"accuracy": row["eval/accuracy"]})
        return {"first": seen[0], "last": seen[-1]} if seen else {}

    def write_skipped(self, step: int, arrays: dict) -> Path:
        """skipped/step_000010.npz: the batch of an update that was not finite, [B, T] each, by name."""
        file = self.skipped(step)
        if self.is_first:
            file.parent.mkdir(exist_ok=True)
            fresh = file.with_suffix(".npz.tmp")
            with fresh.open("wb") as half:
                np.savez_compressed(half, **arrays)
            fresh.replace(file)
        return file

    def write_samples(self, step: int, rows: list[dict]) -> None:
        """samples/step_000010.jsonl: one completion a line."""
        if not self.is_first:
            return
        (self.path / "samples").mkdir(exist_ok=True)
        file = self.path / "samples" / f"step_{step:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Status:
    """status.json: how far the run is, how good it was at first and last, and how it ended.

    Written with each evaluation and each checkpoint, so that a run that is killed loses nothing of it that counts.
    """

    def __init__(self, run_dir: RunDir, about: dict | None = None):
        """`about` does not change during the run: seed, mesh, versions. What an earlier part of the run said stays."""
        self._run_dir, self.about, self._began = run_dir, about or {}, time.perf_counter()
        try:
            earlier = dict(json.loads(run_dir.status.read_text()))
        except (FileNotFoundError, ValueError, TypeError):  # no run was here, or a full disk left half a file
            earlier = {}
        self.steps, self.eval, self.started = 0, earlier.get("eval", {}), False
        self.stopped: str | None = None  # what made it end before its last step, with a checkpoint
        self._seconds_before = earlier.get("seconds", 0.0)

    @property
    def seconds(self) -> float:
        """Spent on the run, its earlier parts included."""
        return self._seconds_before + time.perf_counter() - self._began

    def when(self) -> str:
        """How far the run is, as the end of a sentence."""
        return f"after step {self.steps}" if self.started else "before its first step"

    def start(self, step: int) -> None:
        """The run goes on from `step`; from 0 it forgets what an earlier one said, else what was seen after `step`."""
        self.steps, self.started = step, True
        if step == 0:
            self.eval, self._seconds_before = {}, 0.0
        elif seen := self._run_dir.accuracies(step):
            self.eval = seen | {"first": self.eval.get("first", seen["first"])}
        self.write("running")

    def saw(self, accuracy: float) -> None:
        """A held-out accuracy: the first stays the first."""
        self.eval.setdefault("first", {"accuracy": accuracy})
        self.eval["last"] = {"accuracy": accuracy}

    def write(self, word: str, **more) -> None:
        more |= {"stopped": self.stopped} if self.stopped else {}
        status = {"status": word, "steps": self.steps, "seconds": round(self.seconds, 1), "eval": self.eval}
        self._run_dir.write_json(self._run_dir.status, {**status, **more, **self.about})

    def last_words(self, goes_on: str) -> list[tuple[str, str]]:
        """What is said at the end, each with its style; `goes_on`: the setting with which the same command goes on."""
        said = []
        if self.eval:
            first, last = (self.eval[k]["accuracy"] for k in ("first", "last"))
            said.append((f"held-out accuracy {first:.1%} → {last:.1%}", "bold green"))
        said.append((f"{self.steps} steps in {minutes(self.seconds)}; everything is in {self._run_dir.path}", ""))
        if self.stopped:
            said.append((f"stopped by {self.stopped}; the same command with {goes_on} goes on", ""))
        return said


def closing_with(close: Callable[[], None]):
    """For an ExitStack: closes, and what that says of the disk counts only if nothing went wrong before."""

    def leave(_, error: BaseException | None, __) -> None:
        try:
            close()
        except OSError as second:
            if error is None:
                raise
            error.add_note(f"and then {second}")

    return leave
