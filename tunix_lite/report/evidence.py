"""What the folder of a run says of it: settings, metrics, completions. Files of somebody else, so
only data: what cannot be read is named and left out, and nothing that they name is imported."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.files import untrusted
from tunix_lite.plain_text import escaped, shown
from tunix_lite.tracking.rows import is_number, read_rows
from tunix_lite.tracking.rundir import RunDir, with_chosen_values

# most steps of metrics.jsonl that are looked at: the first ones
MOST_STEPS = 100_000
# most files of samples/ that are looked at, the first ones and the last ones; and lines of each
MOST_FILES = 8
MOST_SAMPLES = 4096
# most bytes of a file of samples/ that are looked at
MOST_SAMPLE_BYTES = 24 * 2**20
# stand for a completion, and for the share without an answer, among the names of metrics
EXAMPLE = "an example"
UNREAD = "samples/unread"
# no setting, and no metric that counts something, is as large as this
MOST_NUMBER = 1e18


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it stands; numbers that are not finite are left out.

    Example: `evidence.series("reward/mean").early` is its mean over the first third of the steps.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def early(self) -> float:
        """Mean over the first third of the steps, one step at least."""
        return float(self.values[: max(len(self) // 3, 1)].mean())

    @property
    def late(self) -> float:
        """Mean over the last third of the steps, one step at least."""
        return float(self.values[-max(len(self) // 3, 1) :].mean())

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def largest(self) -> float:
        return float(self.values.max())

    @property
    def least(self) -> float:
        return float(self.values.min())

    @property
    def count(self) -> int:
        return len(self)

    def where(self, chosen: np.ndarray) -> "Series":
        return Series(self.name, self.steps[chosen], self.values[chosen])

    def at_largest(self) -> int:
        """The step of the largest value."""
        return int(self.steps[self.values.argmax()])

    def __str__(self) -> str:
        """`reward/mean 0.42 → 0.66 (steps 1 to 60)`: the first third against the last."""
        steps = f"steps {self.steps[0]} to {self.steps[-1]}"
        early, late = (
            f"{mean:.0f}" if abs(mean) >= 100 else f"{mean:.3g}" for mean in (self.early, self.late)
        )
        return f"{self.name} {early} → {late} ({steps})"


@dataclass(frozen=True)
class Evidence:
    """All that is known of a run.

    Example: `read_evidence(Path("outputs/latest")).setting("optimizer.learning_rate")`.
    """

    folder: Path
    settings: dict
    # one for each step that was trained, in order
    rows: list[dict]
    # one for each step that was evaluated
    evaluations: list[dict]
    # step -> the lines of its file
    samples: dict[int, list[dict]]
    status: dict
    # parameters of the architecture by model.json: embed_dim and the like
    architecture: dict
    # files that could not be read, and why
    unread: list[str] = field(default_factory=list)
    # metrics that were read out of the rows: the detectors ask for the same few again and again
    _columns: dict[str, Series] = field(default_factory=dict, init=False, compare=False)

    def series(self, name: str, least: int = 1, at_rollouts: bool = False) -> Series | None:
        """A metric; None if fewer than `least` steps have it. at_rollouts: only of the first update
        of a rollout."""
        if name not in self._columns:
            rows = self.evaluations if name.startswith("eval/") else self.rows
            numbers = {row["step"]: row[name] for row in rows if is_number(row.get(name))}
            values = np.array([*numbers.values()], np.float64)
            self._columns[name] = Series(name, np.array([*numbers]), values)
        column = self._columns[name]
        if at_rollouts and len(column):
            every = max(self.number("algorithm.updates_per_rollout", 1), 1)
            column = column.where((column.steps - 1) % every == 0)
        return column if len(column) >= least else None

    def shown(self, *names: str) -> list[str]:
        """Each metric by its course, each setting by its value, and EXAMPLE by a completion of the
        last file; what the run does not have is left out."""
        texts = []
        for name in names:
            series = self.series(name)
            if series is not None:
                texts.append(str(series))
            elif self.setting(name) is not None:
                value = self.setting(name)
                texts.append(f"{name}={value if is_number(value) else excerpt(value)}")
            elif name == EXAMPLE and self.samples:
                last = max(self.samples)
                text = excerpt(self.samples[last][0].get("completion", ""), 100)
                texts.append(f"such as {text} (step {last})")
            elif name == UNREAD and self.share(is_unread):
                share = self.share(is_unread)
                texts.append(f"{share:.0%} of the completions in samples/ have extracted: null")
        return texts

    def setting(self, name: str) -> Any:
        """A setting by its dotted name; None if it is not known."""
        value: Any = self.settings
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, name: str, default: float) -> Any:
        """A setting that is a number, else the default."""
        value = self.setting(name)
        return value if is_number(value) and abs(value) < MOST_NUMBER else default

    @property
    def num_steps(self) -> int:
        return len(self.rows)

    @property
    def group_size(self) -> int:
        """Completions of a prompt; 1 if not known."""
        return int(self.number("algorithm.num_generations", 1))

    @property
    def sampled(self) -> list[dict]:
        """All completions of samples/ that were looked at."""
        return [row for step in sorted(self.samples) for row in self.samples[step]]

    def groups(self, step: int) -> list[list[dict]]:
        """The completions of a step by their group; where the file does not say it, as they stand
        there."""
        rows = self.samples[step]
        if all(type(row.get("group")) is int for row in rows):
            numbers = sorted({row["group"] for row in rows})
            return [[row for row in rows if row["group"] == number] for number in numbers]
        size = self.group_size
        if size < 2 or len(rows) % size:
            return []
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def share(self, of: Callable[[dict], bool], step: int | None = None) -> float | None:
        """The share of completions for which this holds; None if there are none."""
        rows = self.sampled if step is None else self.samples.get(step, [])
        return float(np.mean([of(row) for row in rows])) if rows else None


def read_evidence(folder: Path) -> Evidence:
    """Reads the folder of a run. Raises ValueError if it is none: it has no metrics.jsonl."""
    run_dir = RunDir(folder)
    if not run_dir.metrics.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {run_dir.metrics.name}")
    unread: list[str] = []
    rows, evaluations = _read_metrics(run_dir, unread)
    status = _read(unread, run_dir.status, untrusted.read_object)
    model = _read(unread, folder / RunDir.MODEL, untrusted.read_object).get("model")
    architecture = model.get("architecture") if isinstance(model, dict) else None

    # The settings that Hydra kept, with the values that the run chose; of a run from Python those
    # of its fingerprint, which are fewer.
    settings = _read(unread, folder / ".hydra" / "config.yaml", untrusted.read_yaml)
    fingerprint = _read(unread, run_dir.fingerprint, untrusted.read_object)
    return Evidence(
        folder=folder,
        settings=with_chosen_values(settings, fingerprint) if settings else fingerprint,
        rows=rows,
        evaluations=evaluations,
        samples=_read_samples(folder, unread),
        status=status,
        architecture=architecture if isinstance(architecture, dict) else {},
        unread=unread,
    )


def _read(unread: list[str], file: Path, reader: Callable[[Path], dict]) -> dict:
    """Reads a file; {} if it is not there, or cannot be read, which is noted."""
    try:
        return reader(file) if file.exists() else {}
    except ValueError as error:
        unread.append(escaped(str(error)))
        return {}


def _read_metrics(run_dir: RunDir, unread: list[str]) -> tuple[list[dict], list[dict]]:
    """The rows of trained steps, and those with an evaluation; a step twice counts once, as last
    written."""
    by_step: dict[int, dict] = {}
    num_bad = 0
    for number, line, row in read_rows(run_dir.metrics):
        if number > MOST_STEPS:
            unread.append(f"{run_dir.metrics}: lines after {MOST_STEPS:,} are left out")
            break
        if row is None:
            num_bad += bool(line.strip())
        else:
            by_step[row["step"]] = row
    if num_bad:
        unread.append(f"{run_dir.metrics}: {num_bad} lines are not the metrics of a step")
    rows = [by_step[step] for step in sorted(by_step)]
    trained = [row for row in rows if "train/loss" in row or "train/skipped" in row]
    return trained, [row for row in rows if "eval/accuracy" in row]


def _read_samples(folder: Path, unread: list[str]) -> dict[int, list[dict]]:
    """The lines of the first and the last files of samples/."""
    chosen = sample_steps(folder)
    if len(chosen) > MOST_FILES:
        chosen = chosen[: MOST_FILES // 2] + chosen[-MOST_FILES // 2 :]
    samples = {step: read_samples(folder, step, "step", unread) for step in chosen}
    return {step: rows for step, rows in samples.items() if rows}


def read_samples(folder: Path, step: int, name: str, unread: list[str]) -> list[dict]:
    """As `read_sample_file`; [] without a file, or if it cannot be read, which is noted."""
    try:
        return read_sample_file(folder, step, name) or []
    except ValueError as error:
        unread.append(escaped(str(error)))
        return []


def sample_steps(folder: Path, name: str = "step") -> list[int]:
    """The steps that samples/ has a file of, in order. name: `evaluation` for its completions."""
    samples = folder / "samples"
    steps = set()
    for file in samples.glob(f"{name}_*.jsonl") if samples.is_dir() else ():
        digits = file.stem.removeprefix(f"{name}_")
        if digits.isascii() and digits.isdecimal() and len(digits) < 19:
            steps.add(int(digits))
    return sorted(step for step in steps if _sample_file(folder, step, name).is_file())


def _sample_file(folder: Path, step: int, name: str) -> Path:
    return folder / "samples" / f"{name}_{step:06d}.jsonl"


def read_sample_file(folder: Path, step: int, name: str = "step") -> list[dict] | None:
    """The completions of a step, or of the evaluation after it, as samples/ has them; None if there
    is no file of it. Only the first MOST_SAMPLES lines and MOST_SAMPLE_BYTES. Raises ValueError."""
    file = _sample_file(folder, step, name)
    if not file.is_file():
        return None
    rows = []
    num_bytes = 0
    for number, (line, is_whole) in enumerate(
        untrusted.read_lines(file, untrusted.MOST_SAMPLE_LINE), 1
    ):
        num_bytes += len(line)
        if number > MOST_SAMPLES or num_bytes > MOST_SAMPLE_BYTES or not is_whole:
            break
        try:
            row = untrusted.parse_object(line.decode("utf-8"), "the line")
        except ValueError as error:
            raise ValueError(f"{file}: line {number} cannot be read ({error})") from error
        rows.append(row)
    return rows


def read_overrides(folder: Path, unread: list[str]) -> list[str] | None:
    """The overrides of the run's command line, as Hydra kept them; None: there are none to read."""
    file = folder / ".hydra" / "overrides.yaml"
    if not file.exists():
        return None
    try:
        return untrusted.read_yaml_texts(file)
    except ValueError as error:
        unread.append(escaped(str(error)))
        return None


def read_plan(folder: Path, unread: list[str]) -> dict:
    """The run's own mesh in plan.json, with `capacity_bytes` of a device; {} if there is none."""
    plan = _read(unread, folder / "plan.json", untrusted.read_object)
    plans = plan.get("plans")
    if not isinstance(plans, list) or not plans or not isinstance(plans[0], dict):
        return {}
    return plans[0] | {"capacity_bytes": plan.get("capacity_bytes")}


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps that checkpoints/ has a folder of, in order; whether they are whole is not seen."""
    names = [path.name for path in RunDir(folder).checkpoints.glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def is_unread(row: dict) -> bool:
    """Whether no answer was read out of a completion."""
    return "extracted" in row and row["extracted"] is None


def excerpt(text: Any, most: int = 60) -> str:
    """A text of the run, for a message."""
    text = text if isinstance(text, str) else str(text)
    return shown(text if len(text) <= most else text[:most] + "…")
