"""What the folder of a run says of it: settings, metrics, completions. Files of somebody else, so
only data: what cannot be read is named and left out, and nothing that they name is imported."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunix_lite.basics import untrusted
from tunix_lite.basics.plain_text import escaped, shown
from tunix_lite.tracking.rows import is_number, read_rows
from tunix_lite.tracking.rundir import RunDir, with_chosen_values

# What is looked at: the first lines of metrics.jsonl; the first and the last files of samples/; and
# lines and bytes of each of these.
MOST_STEPS = 100_000
_MOST_FILES = 8
_MOST_SAMPLES = 4096
_MOST_SAMPLE_BYTES = 24 * 2**20
# stand for a completion, and for the share without an answer, among the names of metrics
EXAMPLE = "an example"
UNREAD = "samples/unread"
# no setting, and no metric that counts something, is as large as this
MOST_NUMBER = 1e18


class Series:
    """One metric over the steps at which it stands; numbers that are not finite are left out.
    Without any step it is false, and its numbers are nan, which no bound holds for.
    Example: `evidence.series("reward/mean").early` is its mean over the first third of the
    steps."""

    def __init__(self, name: str, steps: np.ndarray, values: np.ndarray):
        self.name = name
        self.steps = steps
        self.values = values
        # nan compares false with everything, so that a fault without numbers is none
        known = values if len(values) else np.array([np.nan])
        # one step is noise, and half of a run hides a turn
        third = max(len(known) // 3, 1)
        self.first = float(known[0])
        self.last = float(known[-1])
        self.early = float(known[:third].mean())
        self.late = float(known[-third:].mean())
        self.mean = float(known.mean())
        self.largest = float(known.max())
        self.least = float(known.min())

    def __len__(self) -> int:
        return len(self.values)

    def where(self, chosen: np.ndarray) -> "Series":
        return Series(self.name, self.steps[chosen], self.values[chosen])

    def at_largest(self) -> int:
        """The step of the largest value."""
        return int(self.steps[self.values.argmax()])

    def rises(self) -> bool:
        """Whether the last third lies above the first by more than its noise."""
        third = len(self) // 3
        if third < 2:
            return self.last > self.first + 0.1
        noise = self.values[-third:].std() + self.values[:third].std()
        return self.late > self.early + max(noise / np.sqrt(third), 0.01)

    def __str__(self) -> str:
        """`reward/mean 0.42 → 0.66 (steps 1 to 60)`: the first third against the last."""
        steps = f"(steps {self.steps[0]} to {self.steps[-1]})"
        return f"{self.name} {self.early:.3g} → {self.late:.3g} {steps}"


@dataclass(frozen=True)
class Evidence:
    """All that is known of a run.
    Example: `read_evidence(Path("outputs/latest")).setting("optimizer.learning_rate")`."""

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

    def series(self, name: str) -> Series:
        """A metric; without a step if the run has none of it."""
        if name not in self._columns:
            rows = self.evaluations if name.startswith("eval/") else self.rows
            numbers = {row["step"]: row[name] for row in rows if is_number(row.get(name))}
            values = np.array([*numbers.values()], np.float64)
            self._columns[name] = Series(name, np.array([*numbers], np.int64), values)
        return self._columns[name]

    def sampler_gap(self) -> Series:
        """train/sampler_gap of the first updates of rollouts alone."""
        every = max(self.number("algorithm.updates_per_rollout", 1), 1)
        column = self.series("train/sampler_gap")
        return column.where((column.steps - 1) % every == 0)

    def shown(self, *names: str) -> list[str]:
        """Each metric by its course, each setting by its value, and EXAMPLE by a completion of the
        last file; what the run does not have is left out."""
        texts = []
        for name in names:
            value = self.setting(name)
            if self.series(name):
                texts.append(str(self.series(name)))
            elif value is not None:
                texts.append(f"{name}={value if is_number(value) else excerpt(value)}")
            elif name == EXAMPLE and self.samples:
                last = max(self.samples)
                text = excerpt(self.samples[last][0].get("completion", ""), 100)
                texts.append(f"such as {text} (step {last})")
            elif name == UNREAD and (share := self.share(is_unread)) > 0:
                texts.append(
                    f"{share:.0%} of the completions in samples/ have extracted: null"
                )
        return texts

    def setting(self, name: str) -> Any:
        """A setting by its dotted name; None if it is not known."""
        return _at(self.settings, name)

    def number(self, name: str, default: float = np.nan) -> Any:
        """A setting that is a number, else the default."""
        value = self.setting(name)
        if is_number(value) and abs(value) < MOST_NUMBER:
            return value
        return default

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
        """The completions of a step by their group, as the file says it."""
        groups: dict[int, list[dict]] = {}
        for row in self.samples[step]:
            if type(row.get("group")) is int:
                groups.setdefault(row["group"], []).append(row)
        return [groups[number] for number in sorted(groups)]

    def share(self, of: Callable[[dict], bool]) -> float:
        """The share of completions for which this holds; nan if there are none."""
        rows = self.sampled
        if not rows:
            return np.nan
        return float(np.mean([of(row) for row in rows]))


def _at(value: Any, name: str) -> Any:
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_evidence(folder: Path) -> Evidence:
    """Reads the folder of a run. Raises ValueError if it is none: it has no metrics.jsonl."""
    run_dir = RunDir(folder)
    if not run_dir.metrics.is_file():
        raise ValueError(
            f"{folder} is not the folder of a run: it has no {run_dir.metrics.name}"
        )

    unread = []
    # A step that stands there twice counts once, as last written.
    by_step: dict[int, dict] = {}
    num_bad = 0
    for number, line, row in read_rows(run_dir.metrics):
        if number > MOST_STEPS:
            unread.append(f"{run_dir.metrics}: lines after {MOST_STEPS:,} are left out")
            break
        if row is not None:
            by_step[row["step"]] = row
        elif line.strip():
            num_bad += 1
    if num_bad:
        unread.append(f"{run_dir.metrics}: {num_bad} lines are not the metrics of a step")
    rows = [by_step[step] for step in sorted(by_step)]

    # The settings that Hydra kept, with the values that the run chose; of a run from Python those
    # of its fingerprint, which are fewer.
    status = _read(unread, run_dir.status, untrusted.read_object)
    model = _read(unread, folder / RunDir.MODEL, untrusted.read_object)
    architecture = _at(model, "model.architecture")
    settings = _read(unread, folder / ".hydra" / "config.yaml", untrusted.read_yaml)
    fingerprint = _read(unread, run_dir.fingerprint, untrusted.read_object)
    steps = sample_steps(folder)
    if len(steps) > _MOST_FILES:
        steps = steps[: _MOST_FILES // 2] + steps[-_MOST_FILES // 2 :]
    samples = {step: read_samples(folder, step, "step", unread) for step in steps}
    return Evidence(
        folder,
        with_chosen_values(settings, fingerprint) if settings else fingerprint,
        [row for row in rows if "train/loss" in row or "train/skipped" in row],
        [row for row in rows if "eval/accuracy" in row or "eval/loss" in row],
        {step: lines for step, lines in samples.items() if lines},
        status,
        architecture if isinstance(architecture, dict) else {},
        unread,
    )


def _read(unread: list[str], file: Path, reader: Callable[[Path], Any]) -> Any:
    """Reads a file; {} if it is not there, or cannot be read, which is noted."""
    try:
        return reader(file) if file.exists() else {}
    except ValueError as error:
        unread.append(escaped(str(error)))
        return {}


def read_samples(folder: Path, step: int, name: str, unread: list[str]) -> list[dict]:
    """The completions of a step, or of the `evaluation` after it, as the first lines of samples/
    have them; [] without a file, or if it cannot be read, which is noted."""
    return _read(unread, _sample_file(folder, step, name), _sample_rows) or []


def sample_steps(folder: Path, name: str = "step") -> list[int]:
    """The steps that samples/ has a file of, in order. name: `evaluation` for its completions."""
    steps = set()
    for file in (folder / "samples").glob(f"{name}_*.jsonl"):
        # More digits would not fit into the 64 bits of a step.
        match = re.fullmatch(rf"{name}_([0-9]{{1,18}})", file.stem)
        if match and _sample_file(folder, int(match[1]), name).is_file():
            steps.add(int(match[1]))
    return sorted(steps)


def _sample_file(folder: Path, step: int, name: str) -> Path:
    return folder / "samples" / f"{name}_{step:06d}.jsonl"


def _sample_rows(file: Path) -> list[dict]:
    rows = []
    num_bytes = 0
    lines = untrusted.read_lines(file, untrusted.MOST_SAMPLE_LINE)
    for number, (line, is_whole) in enumerate(lines, 1):
        num_bytes += len(line)
        # a folder may be somebody else's, and of any size
        if number > _MOST_SAMPLES or num_bytes > _MOST_SAMPLE_BYTES or not is_whole:
            break
        try:
            rows.append(untrusted.parse_object(line.decode("utf-8"), "the line"))
        except ValueError as error:
            raise ValueError(f"{file}: line {number} cannot be read ({error})") from error
    return rows


def read_overrides(folder: Path, unread: list[str]) -> list[str] | None:
    """The overrides of the run's command line, as Hydra kept them; None: there are none to read."""
    texts = _read(unread, folder / ".hydra" / "overrides.yaml", untrusted.read_yaml_texts)
    return None if isinstance(texts, dict) else texts


def is_unread(row: dict) -> bool:
    """Whether no answer was read out of a completion."""
    return "extracted" in row and row["extracted"] is None


def excerpt(text: Any, most: int = 60) -> str:
    """A text of the run, for a message."""
    text = str(text)
    if len(text) > most:
        text = text[:most] + "…"
    return shown(text)
