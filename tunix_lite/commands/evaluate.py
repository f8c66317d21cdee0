"""`tunix-lite evaluate checkpoint=outputs/latest`: how good a model is at a task, and how sure that
is; or two models at several tasks."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.commands import program
from tunix_lite.commands.generate import escape_for_terminal
from tunix_lite.commands.which_weights import WhichWeights, open_chosen_model
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.evaluation import report
from tunix_lite.inference.language_model import LanguageModel, load
from tunix_lite.inference.rollouts import generate_of
from tunix_lite.models import source
from tunix_lite.runs.samples import sample_rows, write_rows
from tunix_lite.runs.score import HeldOut, held_out_examples, model_scores
from tunix_lite.tracking.rundir import RunDir

# the files of an evaluation
RESULTS = ("results.json", "results.md")


@dataclass(frozen=True)
class EvaluateTaskConfig:
    """What is asked, how often, and whom the model is compared with."""

    # options of the group `task`, a table each; empty: the one that task= says
    tasks: tuple[str, ...] = ()
    num_examples: int | None = None  # held-out examples of each task; null: all
    # samples of each example beside its greedy completion: avg@k, pass@k, maj@k; 0: greedy only
    num_samples: int = 0
    temperature: float = 1.0  # of those samples
    # another model on the same examples: the folder of a run or of weights, or a name on the hub
    against: str | None = None
    against_step: int | None = None  # of an older checkpoint of that run; null: the newest
    # a field of the examples that ROUGE compares completions with; null: no ROUGE
    reference: str | None = None
    level: float = 0.95  # of the intervals

    def __post_init__(self):
        if self.num_examples is not None and self.num_examples < 1:
            raise ValueError(f"num_examples={self.num_examples} must be at least 1, or null: all")
        if self.num_samples < 0:
            raise ValueError(f"num_samples={self.num_samples} must not be negative; 0: none")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature} must be above 0; greedy completions are there "
                "without samples"
            )
        if not 0 < self.level < 1:
            raise ValueError(f"level={self.level} is between 0 and 1, such as 0.95")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={list(self.tasks)} names one of them twice")
        if self.against is None and self.against_step is not None:
            raise ValueError("against_step is of a run: give against=FOLDER, too")


@dataclass(frozen=True)
class EvaluateConfig(WhichWeights):
    """Which model, what is asked, and where the results go."""

    evaluate: EvaluateTaskConfig = field(default_factory=EvaluateTaskConfig)
    # a folder for the results; null: evaluation/ in the folder of the run, else in outputs/
    out: str | None = None
    # replace the results in that folder
    overwrite: bool = False


def main() -> None:
    program.run_command("evaluate", EvaluateConfig, evaluate_models, composes_again=True)


def evaluate_models(
    run: RunConfig, settings: EvaluateConfig, composed_again: Callable[[list[str]], RunConfig]
) -> None:
    """Evaluates the model, and the one that it is compared with; prints and writes the results.

    Raises ConfigError for tasks or an `out` that cannot be used, before a model is loaded.
    """
    asked = settings.evaluate
    runs = {_task_name(): run} if not asked.tasks else {}
    for name in asked.tasks:
        runs[name] = composed_again([f"task={name}"])
    out = output_folder(run, settings, list(runs))
    with error_context(""):
        tokenizer = source.locate(run.model).tokenizer
    for name, each in runs.items():
        _examples(name, each, tokenizer, asked)

    # One model after the other: the second may need the memory of the first.
    models = {}
    scores: dict[str, dict[str, dict[str, np.ndarray]]] = {name: {} for name in runs}
    rows: dict[str, list[dict]] = {}
    for which in ("model", "against"):
        if which == "against" and asked.against is None:
            continue
        model = open_chosen_model(run, settings) if which == "model" else _other_model(run, asked)
        models[which] = _described(model)
        for name, each in runs.items():
            held_out = _examples(name, each, model.tokenizer, asked)
            found, scores[name][which] = _evaluate_one(each, asked, model, held_out, which, name)
            rows[f"{which}.{name}"] = found
        del model

    results = {
        name: report.task_result(found, asked.level, run.seed) for name, found in scores.items()
    }
    _write(out, run, settings, models, results, rows)


def _task_name() -> str:
    return "task"


def output_folder(run: RunConfig, settings: EvaluateConfig, tasks: list[str]) -> Path:
    """The folder for the results. Raises ConfigError if it could not be written, or holds others
    already."""
    if settings.out is not None:
        out = Path(settings.out).expanduser()
    elif settings.checkpoint is not None:
        folder = Path(settings.checkpoint).expanduser()
        step = settings.step
        if step is None:
            step = Checkpoints(RunDir(folder).checkpoints).latest_step()
        out = folder / "evaluation" / f"step_{step or 0:06d}" / "+".join(tasks)
    else:
        now = time.strftime("%Y-%m-%d/%H-%M-%S")
        out = Path("outputs") / run.project_name / "evaluation" / now
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; give a folder")
    there = [name for name in RESULTS if (out / name).exists()]
    if there and not settings.overwrite:
        raise ConfigError(
            f"out={out} holds {there[0]}; give another folder, or overwrite=true to replace it"
        )
    return out
