"""The folder of a run: what stands in it, and the status that says how the run ended."""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunix_lite.files.untrusted import read_object
from tunix_lite.plain_text import encodable, shown, visible
from tunix_lite.tracking import disk
from tunix_lite.tracking.console import minutes
from tunix_lite.tracking.rows import is_number, rows_until


@dataclass(frozen=True)
class RunDir:
    """outputs/<project_name>/<date>/<time>/ and the names of what is in it.

    Of several processes each has a log of its own; everything else is written by the first, and by
    no other.
    """

    # the model's settings: what generate, chat and export read
    MODEL = "model.json"

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
        """Raises ValueError if the folder could not be made or written, or what must be a file in
        it is a folder."""
        there = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"{there} is a file; give a folder")
        for file in (
            self.log,
            self.metrics,
            self.status,
            self.fingerprint,
            self.reference,
            self.path / self.MODEL,
        ):
            if file.is_dir():
                raise ValueError(
                    f"{file} is a folder, and the run keeps a file of that name: move the folder "
                    "away"
                )
            # whoever reads it waits
            if file.is_fifo() or file.is_socket():
                raise ValueError(
                    f"{file} is not a file, and the run keeps a file of that name: move it away"
                )
        for folder in (self.checkpoints, self.path / "samples", self.path / "skipped"):
            if folder.exists() and not folder.is_dir():
                raise ValueError(
                    f"{folder} is a file, and the run keeps a folder of that name: move the file "
                    "away"
                )
        for folder in (there, *(p for p in (self.checkpoints,) if p.is_dir())):
            try:
                with tempfile.TemporaryFile(
                    dir=folder
                ) as file:  # asking for permission says nothing of a full disk
                    file.write(bytes(64 * 1024))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise ValueError(f"{folder} cannot be written to: {disk.reason(error)}") from error

    def make(self) -> None:
        """Creates the folder."""
        self.path.mkdir(parents=True, exist_ok=True)

    def point_latest_here(self) -> None:
        """Points `outputs/latest` here, if this lies under a folder named outputs: once there is a
        checkpoint.

        So that whoever names it finds one, though another run has begun since.
        """
        # of outputs/latest, the folder that it points to
        whole = self.path.resolve()
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
        said = read_object(file)
        for key, kind in (("model", dict), ("seed", int)):
            if type(said.get(key)) is not kind:
                raise ValueError(
                    f"{file}: {key} is {shown(said.get(key))}; this is not the {self.MODEL} of a "
                    "run"
                )
        return {"model": said["model"], "seed": said["seed"]}

    def accuracies(self, until: int) -> dict:
        """`eval` of status.json by the lines of metrics.jsonl up to this step; {} if they hold no
        accuracy."""
        seen = [
            {"accuracy": row["eval/accuracy"]}
            for _, _, row in rows_until(self.metrics, until)
            if _is_seen(row)
        ]
        return {"first": seen[0], "last": seen[-1]} if seen else {}

    def write_skipped(self, step: int, arrays: dict) -> Path:
        """skipped/step_000010.npz: the batch of an update that was not finite, [B, T] each, by
        name."""
        file = self.skipped(step)
        if self.is_first:
            file.parent.mkdir(exist_ok=True)
            fresh = file.with_suffix(".npz.tmp")
            with fresh.open("wb") as half:
                np.savez_compressed(half, **arrays)
            fresh.replace(file)
        return file

    def write_samples(self, step: int, rows: list[dict]) -> None:
        """samples/step_000010.jsonl: one completion a line. JSON escapes controls; halves of
        characters are ours."""
        if not self.is_first:
            return
        (self.path / "samples").mkdir(exist_ok=True)
        file = self.path / "samples" / f"step_{step:06d}.jsonl"
        rows = [
            {k: encodable(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Status:
    """status.json: how far the run is, how good it was at first and last, and how it ended.

    Written with each evaluation and each checkpoint, so that a run that is killed loses nothing of
    it that counts.
    """

    def __init__(self, run_dir: RunDir, about: dict | None = None):
        """`about` does not change during the run: seed, mesh, versions. What an earlier part of the
        run said stays."""
        self._run_dir, self.about, self._began = run_dir, about or {}, time.perf_counter()
        self.steps, self.started = 0, False
        self.eval, self._seconds_before, self._began_from, _ = read_status(run_dir.status)
        # what made it end before its last step, with a checkpoint
        self.stopped: str | None = None

    @property
    def seconds(self) -> float:
        """Spent on the run, its earlier parts included."""
        return self._seconds_before + time.perf_counter() - self._began

    def progress(self) -> str:
        """How far the run is, as the end of a sentence."""
        return f"after step {self.steps}" if self.started else "before its first step"

    def start(self, step: int, begins: bool = False) -> None:
        """The run goes on from `step`; from 0 it forgets what an earlier one said, else what was
        seen after `step`.

        begins: it takes that step from another run's folder, or from nowhere.
        """
        self.steps, self.started = step, True
        self._began_from = step if begins or step == 0 else self._began_from
        if step == 0:
            self.eval, self._seconds_before = {}, 0.0
        elif seen := self._run_dir.accuracies(step):
            self.eval = seen | {"first": self.eval.get("first", seen["first"])}
        self.write("running")

    def record_accuracy(self, accuracy: float) -> None:
        """A held-out accuracy: the first stays the first."""
        self.eval.setdefault("first", {"accuracy": accuracy})
        self.eval["last"] = {"accuracy": accuracy}

    def write(self, word: str, **more) -> None:
        more |= {"stopped": self.stopped} if self.stopped else {}
        more = {
            name: visible(text) if isinstance(text, str) else text for name, text in more.items()
        }
        status = {
            "status": word,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "eval": self.eval,
        }
        began = {} if self._began_from is None else {"began_from": self._began_from}
        self._run_dir.write_json(self._run_dir.status, {**status, **began, **more, **self.about})

    def closing_lines(self, resume_hint: str) -> list[tuple[str, str]]:
        """The lines that end the output of a run, each with its style for the console.

        resume_hint: the setting with which the same command resumes, `hydra.run.dir=FOLDER`.
        """
        said = []
        if self.eval:
            first, last = (self.eval[k]["accuracy"] for k in ("first", "last"))
            said.append((f"held-out accuracy {first:.1%} → {last:.1%}", "bold green"))
        said.append(
            (
                f"{self.steps} steps in {minutes(self.seconds)}; everything is in "
                f"{self._run_dir.path}",
                "",
            )
        )
        if self.stopped:
            what = (
                f"with {resume_hint} goes on" if self.steps else "begins anew, as no step was made"
            )
            said.append((f"stopped by {self.stopped}; the same command {what}", ""))
        return said


def read_status(file: Path) -> tuple[dict, float, int | None, str]:
    """(eval, seconds, the step that the run began from or None where nobody says, what is wrong) of
    a status.json.

    No file: no run was here. What cannot be read is left out, and said in the last of them: the run
    itself does not depend on it.
    """
    if not os.path.lexists(file):
        return {}, 0.0, None, ""
    try:
        said = read_object(file)
    except ValueError as error:
        # a full disk left half a file
        return {}, 0.0, None, str(error)
    seen, seconds, began = said.get("eval", {}), said.get("seconds", 0.0), said.get("began_from")
    wrong = []
    names = {"first", "last"}
    if (
        not isinstance(seen, dict)
        or set(seen) not in (set(), names)
        or not all(map(_has_accuracy, seen.values()))
    ):
        wrong, seen = [*wrong, "eval"], {}
    if not is_number(seconds) or seconds < 0:
        wrong, seconds = [*wrong, "seconds"], 0.0
    if began is not None and (type(began) is not int or began < 0):
        wrong, began = [*wrong, "began_from"], None
    return seen, seconds, began, f"{file} cannot be read at {', '.join(wrong)}" if wrong else ""


def _has_accuracy(value) -> bool:
    return isinstance(value, dict) and is_number(value.get("accuracy"))


def _is_seen(row: dict) -> bool:
    return is_number(row.get("eval/accuracy"))
