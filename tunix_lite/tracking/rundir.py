"""The folder of a run: the names of its files, and status.json, which says how the run ended."""

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.basics import untrusted
from tunix_lite.basics.addresses import shown_place
from tunix_lite.basics.best import Best
from tunix_lite.basics.plain_text import counted, encodable, shown, visible
from tunix_lite.basics.types import Metrics
from tunix_lite.tracking import disk
from tunix_lite.tracking.console import as_words, scores_of, seconds_in_words
from tunix_lite.tracking.rows import is_number, rows_until


class RunDir:
    """The folder of a run, outputs/<project_name>/<date>/<time>/, and the names of its files. All
    but the logs are written by process 0 alone.
    Example: `RunDir(Path("outputs/latest")).metrics` is outputs/latest/metrics.jsonl."""

    # the file with the settings of the model, which generate, chat and export read
    MODEL = "model.json"

    def __init__(self, path: Path, process: int = 0):
        """process: the id of this process."""
        self.path = path
        self.is_first = process == 0
        self.log = path / ("train.log" if self.is_first else f"train.p{process}.log")
        # the metrics of all steps: tracking/rows.py
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        # how far the run is and how it ended: `Status`
        self.status = path / "status.json"
        # the settings that made the checkpoints: runs/fingerprint.py
        self.fingerprint = path / "fingerprint.json"
        # the text of the chat template that the run began with
        self.chat_template = path / "chat_template.jinja"
        # which weights the reference policy has, and they themselves, where the run keeps them
        self.reference = path / "reference.json"
        self.kept_reference = path / "reference"

    def skipped(self, step: int) -> Path:
        """The file with the batch of an update that was not finite: `write_skipped`."""
        return self.path / "skipped" / f"step_{step:06d}.npz"

    def check(self) -> None:
        """Raises ValueError if a run could not write here: no such folder can be made, something
        else lies where a run has a file or a folder, or the disk is full."""
        parents = (self.path.absolute(), *self.path.absolute().parents)
        for link in parents:
            if link.is_symlink() and not link.exists():
                raise ValueError(
                    f"{link} is a link to {os.readlink(link)}, which is not there: make that "
                    "folder, or remove the link"
                )
        there = next(path for path in parents if path.exists())
        if not there.is_dir():
            raise ValueError(f"{there} is a file; give a folder")

        # Reading a pipe would wait for ever.
        kinds = {path: "file" for path in vars(self).values() if isinstance(path, Path)}
        kinds |= {
            self.path / self.MODEL: "file",
            self.path: "folder",
            self.checkpoints: "folder",
        }
        kinds |= {self.path / name: "folder" for name in ("reference", "samples", "skipped")}
        for path, kind in kinds.items():
            is_other = path.exists() and path.is_dir() != (kind == "folder")
            if is_other or path.is_fifo():
                raise ValueError(
                    f"{path} is no {kind}, and the run keeps one there: move it away"
                )

        # Permissions say nothing about a full disk, so try to write.
        folders = [there]
        if self.checkpoints.is_dir():
            folders.append(self.checkpoints)
        for folder in folders:
            try:
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(bytes(64 * 1024))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise ValueError(
                    f"{folder} cannot be written to: {disk.reason(error)}"
                ) from error

    def point_latest_here(self) -> None:
        """Points the link outputs/latest here, if this folder is below one named outputs."""
        # The run may have been given outputs/latest itself as its folder.
        whole = self.path.resolve()
        outputs = next((parent for parent in whole.parents if parent.name == "outputs"), None)
        if outputs is not None and self.is_first:
            # A new link replaces the old one at once, so that there always is one.
            fresh = outputs / f".latest.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(whole.relative_to(outputs), target_is_directory=True)
            fresh.replace(outputs / "latest")

    def write_json(self, file: Path, values: dict) -> None:
        """Writes a JSON file, which replaces the old one at once: a reader never sees half of it.
        Raises ValueError for what the run could not read again, and OSError."""
        if not self.is_first:
            return
        text = json.dumps(values, indent=2) + "\n"
        most = untrusted.MOST_BYTES
        if len(text) > most:
            raise ValueError(
                f"{file} would have {len(text):,} bytes, and a run reads {most:,} of it at most: "
                "shorten the longest texts and lists of the settings"
            )
        untrusted.parse_object(text, str(file))
        fresh = file.with_suffix(".json.tmp")
        fresh.write_text(text)
        fresh.replace(file)

    def read_model(self) -> dict:
        """The settings of the run's model and its seed. ValueError: no run's folder, or damage."""
        file = self.path / self.MODEL
        if not file.is_file():
            text = f"{self.path} is not the folder of a run: "
            if (self.path / "config.json").is_file():
                raise ValueError(
                    f"{text}it holds a model; give model.weights={self.path} instead"
                )
            if self.path.is_dir():
                raise ValueError(f"{text}it has no {self.MODEL}")
            raise ValueError(f"{text}there is no such folder")
        saved = untrusted.read_object(file)
        for key, kind in (("model", dict), ("seed", int)):
            value = saved.get(key)
            if type(value) is not kind:
                raise ValueError(
                    f"{file}: {key} is {shown(value)}; this is not the {self.MODEL} of a run"
                )
        return {"model": saved["model"], "seed": saved["seed"]}

    def evaluations(self, until: int) -> dict:
        """The first and last evaluation up to step `until`, as `eval` of status.json, or {}."""
        rows = (row for _, _, row in rows_until(self.metrics, until))
        scores = [one for one in map(scores_of, rows) if one]
        if scores:
            return {"first": scores[0], "last": scores[-1]}
        return {}

    def measured(self, name: str, until: int) -> list[tuple[int, float]]:
        """The (step, value) of a metric in metrics.jsonl up to step `until`; nan: no number."""
        points = []
        for _, _, row in rows_until(self.metrics, until):
            if name in row:
                value = row[name] if is_number(row[name]) else math.nan
                points.append((row["step"], value))
        return points

    def write_skipped(self, step: int, arrays: dict[str, np.ndarray]) -> Path:
        """Writes skipped/step_000010.npz, the batch of an update that was not finite. Its file."""
        file = self.skipped(step)
        if self.is_first:
            file.parent.mkdir(exist_ok=True)
            fresh = file.with_suffix(".npz.tmp")
            with fresh.open("wb") as half:
                np.savez_compressed(half, **arrays)
            fresh.replace(file)
        return file

    def write_samples(self, step: int, rows: list[dict], name: str = "step") -> None:
        """Writes samples/step_000010.jsonl, a completion a line; name: step, or evaluation."""
        if self.is_first:
            folder = self.path / "samples"
            folder.mkdir(exist_ok=True)
            (folder / f"{name}_{step:06d}.jsonl").write_text(json_lines(rows))


def json_lines(rows: list[dict]) -> str:
    """One JSON object a line, its values by `json_value`."""
    return "".join(f"{json.dumps(json_value(row), allow_nan=False)}\n" for row in rows)


def json_value(value: Any, depth: int = untrusted.MOST_DEPTH) -> Any:
    """A value of a user's data as JSON can hold it: numbers that are not finite become null, half
    characters are escaped, and what JSON does not know becomes text. depth: of lists and objects in
    one another, as deep as readers take them."""
    if depth == 0 and isinstance(value, dict | list | tuple | np.ndarray):
        return f"(nested deeper than {untrusted.MOST_DEPTH})"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {
            encodable(str(key)): json_value(item, depth - 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple | np.ndarray):
        return [json_value(item, depth - 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return encodable(str(value))


# Characters of an error that status.json keeps, and steps that are best.
_MOST_ERROR = 100_000
_MOST_BEST = 10


class Status:
    """status.json: how far the run is, its first and last held-out accuracy, and how it ended. It
    is written with each evaluation and each checkpoint."""

    def __init__(self, run_dir: RunDir):
        """Reads the status.json of an earlier part of the run, if there is one."""
        self._run_dir = run_dir
        # what does not change during the run, such as seed, mesh and versions
        self.about: dict = {}
        self._began = time.perf_counter()
        # updates done, and whether the loop has begun
        self.steps = 0
        self.started = False
        # {"first": {"accuracy": ...}, "last": {"accuracy": ...}} with other scores, or {}
        self.eval, self._seconds_before, self._began_from, _ = read_status(run_dir.status)
        # the reason why it ended before its last step, with a checkpoint, such as "SIGTERM"
        self.stopped: str | None = None
        # why early stopping has ended it; "": it has not
        self.early_stopping = ""
        # the best steps until now by training.best_metric; None: it has not begun
        self.best: Best | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent on the run, its earlier parts included."""
        return self._seconds_before + time.perf_counter() - self._began

    def progress(self) -> str:
        """How far the run is, as the end of a sentence: `after step 5`."""
        return f"after step {self.steps}" if self.started else "before its first step"

    def start(self, step: int, begins: bool = False) -> None:
        """Writes that the run starts, or resumes, at `step`; accuracies after it are dropped.
        begins: its checkpoint is from another run's folder, so this run begins here."""
        self.steps = step
        self.started = True
        if begins or step == 0:
            self._began_from = step
        if step == 0:
            self.eval = {}
            self._seconds_before = 0.0
        else:
            logged = self._run_dir.evaluations(step)
            if logged:
                self.eval = logged | {"first": self.eval.get("first", logged["first"])}
        self.write("running")

    def record(self, metrics: Metrics) -> None:
        """Keeps the scores of an evaluation as the last ones; of the very first as both."""
        if scores := scores_of(metrics):
            self.eval.setdefault("first", scores)
            self.eval["last"] = scores

    def write(self, word: str, **more: Any) -> None:
        """Writes status.json, also with `more`. word: how it runs, or ended. Raises OSError."""
        if self.stopped:
            more["stopped"] = self.stopped
        if self.early_stopping:
            more["early_stopping"] = self.early_stopping
        if self.best is not None and self.best.values:
            more["best"] = self.best.first(_MOST_BEST)
        for name, value in more.items():
            if isinstance(value, str):
                more[name] = visible(value[:_MOST_ERROR])
        seconds = round(self.seconds, 1)
        status = {"status": word, "steps": self.steps, "seconds": seconds, "eval": self.eval}
        if self._began_from is not None:
            status["began_from"] = self._began_from
        self._run_dir.write_json(self._run_dir.status, {**status, **more, **self.about})

    def closing_lines(self, resume_hint: str) -> list[tuple[str, str]]:
        """The lines that end the output of a run, each with its style for the console. resume_hint:
        the setting with which the same command resumes, `hydra.run.dir=FOLDER`."""
        lines = []
        if self.eval:
            first = self.eval["first"]
            last = self.eval["last"]
            texts = []
            for name in sorted(first.keys() & last.keys()):
                values = (first[name], last[name])
                if not all(map(is_number, values)):
                    continue
                text = "{:.4f} → {:.4f}" if name == "loss" else "{:.1%} → {:.1%}"
                is_held_out = name in ("accuracy", "loss")
                what = f"held-out {name}" if is_held_out else as_words(name)
                texts.append(f"{what} {text.format(*values)}")
            if texts:
                lines.append((", ".join(texts), "bold green"))
        if self.early_stopping:
            lines.append((self.early_stopping, "yellow"))
        steps = f"{counted(self.steps, 'step')} in {seconds_in_words(self.seconds)}"
        lines.append((f"{steps}; everything is in {shown_place(self._run_dir.path)}", ""))
        if self.stopped:
            anew = "begins anew, as no step was made"
            does = f"with {resume_hint} goes on" if self.steps else anew
            lines.append((f"stopped by {self.stopped}; the same command {does}", ""))
        return lines


def with_chosen_values(settings: dict, fingerprint: dict) -> dict:
    """Hydra's settings, with the fingerprint's values for auto and for references."""
    chosen = {}
    for name, value in settings.items():
        there = fingerprint.get(name)
        if isinstance(value, dict):
            within = there if isinstance(there, dict) else {}
            value = with_chosen_values(value, within)
        elif isinstance(value, str):
            is_resolved = value == "auto" or "${" in value
            if is_resolved and there is not None:
                value = there
        chosen[name] = value
    return chosen


def read_status(file: Path) -> tuple[dict, float, int | None, str]:
    """Reads a status.json: (eval, seconds, began_from, what is wrong with it). What cannot be read
    becomes {}, 0.0 or None; began_from is the step that the run began from, None if not known."""
    status = {}
    problem = ""
    wrong = []
    # A full disk may have left half a file.
    try:
        status = untrusted.read_object(file) if os.path.lexists(file) else {}
    except ValueError as error:
        problem = str(error)

    # {}, or a first and a last accuracy
    ends = status.get("eval", {})
    scores = list(ends.values()) if isinstance(ends, dict) else [None]
    are_scores = all(
        x and isinstance(x, dict) and all(map(is_number, x.values())) for x in scores
    )
    if not are_scores or set(ends) not in (set(), {"first", "last"}):
        ends = {}
        wrong.append("eval")
    seconds = status.get("seconds", 0.0)
    if not is_number(seconds) or seconds < 0:
        seconds = 0.0
        wrong.append("seconds")
    began = status.get("began_from")
    if began is not None and (type(began) is not int or began < 0):
        began = None
        wrong.append("began_from")
    if wrong:
        problem = f"{file} cannot be read at {', '.join(wrong)}"
    return ends, seconds, began, problem
