"""What was predicted of a run against what its files say it took, phase by phase."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from tunix_lite.errors import ConfigError
from tunix_lite.planning.forecast import Forecast
from tunix_lite.planning.lengths import json_rows

# Steps left out at the start, which compile.
FIRST = 2
# A phase of a forecast, and the metrics that it is measured by.
ROLLOUT = "time/rollout"
UPDATE = "time/update"
STEP = "time/step"


@dataclass(frozen=True)
class PredictedRow:
    """One row: predicted and measured, in seconds, tokens or steps.

    Example: PredictedRow("update", 0.78, 0.80).off is -0.025.
    """

    name: str
    predicted: float
    # None: the run has not measured it
    measured: float | None

    @property
    def off(self) -> float | None:
        """How far off the prediction is, as a share of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


def measured(folder: str) -> dict[str, float]:
    """Medians of the numbers in metrics.jsonl over the steps after the first ones. Raises
    ConfigError where there are none.

    A phase that only some steps have, such as a rollout that serves several updates, counts with
    its share of a step."""
    file = Path(folder).expanduser() / "metrics.jsonl"
    rows = [row for row in json_rows(file) if isinstance(row.get(STEP), int | float)]
    if not rows:
        raise ConfigError(f"verify={folder}: there is no metrics.jsonl with steps of a run in it")
    if len(rows) <= FIRST:
        raise ConfigError(
            f"verify={folder}: the run has {len(rows)} steps; the first {FIRST} compile and do not "
            f"count, so it takes at least {FIRST + 1}"
        )
    rows = rows[FIRST:]
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    found = {}
    for name in names:
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        found[name] = float(statistics.median(values))
        if name.startswith("time/"):
            found[name] = found[name] * len(values) / len(rows)
    return found


def predicted_against(found: Forecast, took: dict[str, float]) -> list[PredictedRow]:
    """Predicted against measured: phases, the step, tokens and counts."""
    scorers = [
        name
        for name in found.seconds
        if name not in ("prefill", "decode", "refill", "update", "rest")
    ]
    rows = []
    if found.rollout_seconds:
        rows.append(PredictedRow("rollout", found.rollout_seconds, took.get(ROLLOUT)))
    for name in scorers:
        keys = ("time/reference", "time/rescore") if name == "scoring" else (f"time/{name}",)
        seconds = [took[key] for key in keys if key in took]
        rows.append(PredictedRow(name, found.seconds[name], sum(seconds) if seconds else None))
    rows.append(PredictedRow("update", found.seconds["update"], took.get(UPDATE)))
    known = sum(row.measured or 0.0 for row in rows)
    step = took[STEP]
    rows.append(PredictedRow("rest", found.seconds["rest"], max(0.0, step - known)))
    rows.append(PredictedRow("step", found.step_seconds, step))
    speed = took.get("perf/tokens_per_second")
    rows.append(PredictedRow("tokens/s", found.tokens_per_second, speed))
    if found.decode_steps:
        steps = took.get("rollout/decode_steps")
        rows.append(PredictedRow("decode steps", float(found.decode_steps), steps))
        read = took.get("rollout/prefill_tokens")
        rows.append(PredictedRow("prefill tokens", float(found.prefill_tokens), read))
    return rows
