"""`tunix-lite evaluate checkpoint=outputs/latest`: how good a model is at a task, and how sure that
is; or two models."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.imports import looking_in_working_folder
from tunix_lite.basics.untrusted import as_path
from tunix_lite.commands import program
from tunix_lite.commands.generate import escape_for_terminal
from tunix_lite.commands.which_weights import WhichWeights
from tunix_lite.distributed.agreement import digests_of_code, process_info
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.join import (
    agree,
    exit_at_once_on_failure,
    exit_when_a_peer_is_lost,
    hosts,
    initialise,
    is_first,
)
from tunix_lite.inference.language_model import LanguageModel, load, run_settings
from tunix_lite.inference.rollouts import generate_of
from tunix_lite.models import source
from tunix_lite.models.source import ModelConfig
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.report import evaluation
from tunix_lite.report.statistics import Estimate
from tunix_lite.runs.evaluate import (
    evaluate,
    held_out_examples,
    model_scores,
    rollout_sizes,
    with_reward_models,
)
from tunix_lite.runs.samples import evaluation_rows
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.runs.setup import locate_frozen
from tunix_lite.settings.config import RunConfig, build, plain
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.task import TaskConfig
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.progress import StandardError
from tunix_lite.tracking.rundir import RunDir, json_lines, json_value


@dataclass(frozen=True)
class EvaluateTaskConfig:
    """Settings of an evaluation: examples, samples, and the model to compare with.
    Example: `EvaluateTaskConfig(num_examples=64, num_samples=8)`: avg@8 and pass@k of 64."""

    # conf/command/evaluate.yaml explains each setting
    num_examples: int | None = None
    num_samples: int = 0
    temperature: float = 1.0
    against: str | None = None
    against_step: int | str | None = None
    reference: str | None = None
    level: float = 0.95

    def __post_init__(self):
        if self.num_examples is not None and self.num_examples < 1:
            raise ValueError(
                f"num_examples={self.num_examples} must be at least 1, or null: all"
            )
        if self.num_samples < 0 or self.temperature <= 0:
            raise ValueError(
                f"num_samples={self.num_samples} must not be negative, and "
                f"temperature={self.temperature} must be above 0"
            )
        if not 0 < self.level < 1:
            raise ValueError(f"level={self.level} is between 0 and 1, such as 0.95")
        if self.against is None and self.against_step is not None:
            raise ValueError("against_step needs a run: give against=FOLDER, too")


@dataclass(frozen=True)
class EvaluateConfig(WhichWeights):
    """Settings of the command: the model, its evaluation, and the folder of the results."""

    # conf/command/evaluate.yaml explains each setting
    evaluate: EvaluateTaskConfig = field(default_factory=EvaluateTaskConfig)
    out: str | None = None
    overwrite: bool = False


def main() -> None:
    with looking_in_working_folder(), exit_at_once_on_failure():
        program.run_command(
            "evaluate", EvaluateConfig, _evaluate_models, positional="checkpoint"
        )


def _evaluate_models(run: RunConfig, settings: EvaluateConfig) -> None:
    """Evaluates the model, and the one that it is compared with; the first process prints and
    writes the results. Raises ConfigError, before a model is loaded, on all processes."""
    keep_programs(run.runtime.program_cache)
    options = settings.evaluate
    # One evaluation of all processes that were started as one, which is mostly this one alone.
    values = {"evaluate": plain(options), "step": settings.step}
    with error_context(""):
        initialise(run.launch, os.environ, process_info(plain(run) | values))
    with exit_when_a_peer_is_lost():
        out = None
        seen = {}
        error = None
        # What is wrong may be of this machine alone, and the others must hear of it.
        try:
            out = output_folder(run, settings) if is_first() else None
            seen = _check_models(run, options)
        except ConfigError as problem:
            error = str(problem)
        with error_context(""):
            agree(seen, error)

        # One model after the other: the second may need the memory of the first.
        name = _task_name(run.task)
        models = {}
        scores = {}
        files = {}
        openers = {"model": partial(settings.open, run)}
        if options.against is not None:
            # as a decorator: errors of loading it begin with the setting
            openers["against"] = _naming_against(options)(
                partial(
                    load,
                    options.against,
                    step=options.against_step,
                    mesh_shape=run.model.mesh_shape,
                    dtype=run.training.mixed_precision,
                )
            )
        for which, opener in openers.items():
            models[which], rows, scores[which] = _score(run, options, opener, which)
            files[f"{which}.{name}.jsonl"] = json_lines(rows)
        result = evaluation.task_result(scores, options.level, run.seed)
        if out is None:
            return

        # The table is printed, and written with its numbers and all completions.
        facts = asdict(options) | {
            "seed": run.seed,
            "generation": asdict(run.generation),
            "mixed_precision": run.training.mixed_precision,
        }
        text = evaluation.as_markdown(models, facts, name, result)
        print(escape_for_terminal(text), end="")
        numbers = {"models": models, "settings": facts, "tasks": {name: asdict(result)}}
        files["results.md"] = text
        files["results.json"] = json.dumps(json_value(numbers), indent=2) + "\n"
        with error_context("out"):
            try:
                out.mkdir(parents=True, exist_ok=True)
                for file, content in files.items():
                    # neither a link nor a pipe of that name is followed
                    fresh = out / f"{file}.tmp"
                    fresh.unlink(missing_ok=True)
                    with fresh.open("x", encoding="utf-8") as opened:
                        opened.write(content)
                    fresh.replace(out / file)
            except OSError as problem:
                raise ValueError(f"{out} cannot be written: {problem.strerror}") from problem
        program.say(f"results.json, results.md and all completions are in {out}")


def evaluate_model(
    model: LanguageModel, run: RunConfig, asked: EvaluateTaskConfig | None = None
) -> dict[str, Estimate]:
    """Evaluates a loaded model on the task of `run`: each score with its interval. asked: how many
    examples and samples, and the level of the intervals; None: all held-out examples, greedy.
    `against` is the command's. Nothing is written. Raises ConfigError.
    Example: `evaluate_model(load("bundled"), compose([]))["accuracy"].value`."""
    asked = asked or EvaluateTaskConfig()
    if asked.against is not None:
        raise ConfigError("against is a setting of the command: call this once for each model")
    *_, scores = _score(run, asked, lambda: model, "model")
    return evaluation.task_result({"model": scores}, asked.level, run.seed).scores["model"]


def _task_name(task: TaskConfig) -> str:
    return type(task.source).__name__.lower()


def _check_models(run: RunConfig, options: EvaluateTaskConfig) -> dict[str, str]:
    """Finds the models, and checks the examples of the task. Returns what must be the same on all
    processes and is not in the settings. Raises ConfigError."""
    with error_context(""):
        models = {"weights": source.locate(run.model)}
    if options.against is not None:
        with _naming_against(options):
            # As `load` finds it.
            folder = as_path(options.against)
            other = ModelConfig(weights=options.against)
            if (folder / RunDir.MODEL).is_file():
                if Checkpoints(RunDir(folder).checkpoints).latest_step() is None:
                    raise ConfigError("it holds no checkpoint")
                other = build(ModelConfig, run_settings(folder)[0], "model")
            elif options.against_step is not None:
                raise ConfigError("only a run has an against_step")
            models["weights of evaluate.against"] = source.locate(other)
    seen = {}
    scoring = {name: one for name, one in run.scoring_models.items() if one.reward}
    locate_frozen(scoring, models["weights"])
    for name, model in models.items():
        task, examples = held_out_examples(
            run, model.tokenizer, options.num_examples, options.reference
        )
        if len(hosts()) > 1:
            seen[name] = source.weights_digest(model)
            seen["data"] = task.digest(examples, ("held_out",))
            seen["code"] = str(digests_of_code(plain(run)))
    return seen


def output_folder(run: RunConfig, settings: EvaluateConfig) -> Path:
    """The folder for the results. Raises ConfigError if it could not be written, or holds others
    already."""
    if settings.out is not None:
        out = Path(settings.out).expanduser()
    elif settings.checkpoint is not None:
        folder = Path(settings.checkpoint).expanduser()
        step = settings.step
        checkpoints = Checkpoints(RunDir(folder).checkpoints)
        if not isinstance(step, int) and checkpoints.steps():
            with error_context("checkpoint"):
                step = checkpoints.chosen_step(step)
        out = folder / "evaluation" / f"step_{step or 0:06d}" / _task_name(run.task)
        # A link in the folder of somebody else could lead to a folder of yours.
        if not out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"out: {out} is a link to another place; give out=FOLDER")
    else:
        now = time.strftime("%Y-%m-%d/%H-%M-%S")
        out = Path("outputs") / run.project_name / "evaluation" / now
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; give a folder")
    there = [name for name in ("results.json", "results.md") if (out / name).exists()]
    if there and not settings.overwrite:
        raise ConfigError(
            f"out={out} holds {there[0]}; give another folder, or overwrite=true to replace it"
        )
    return out


@contextlib.contextmanager
def _naming_against(options: EvaluateTaskConfig) -> Iterator[None]:
    """Puts evaluate.against in front of errors of the model that it names."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"evaluate.against={options.against}: {error}") from error


def _score(
    run: RunConfig,
    options: EvaluateTaskConfig,
    opener: Callable[[], LanguageModel],
    which: str,
) -> tuple[dict, list[dict], dict[str, np.ndarray]]:
    """What a model is, the rows of its completions on the task, and its scores. opener: loads it.
    Its weights as they were loaded are freed before it samples, unless the caller holds them."""
    model = opener()
    task, examples = held_out_examples(
        run, model.tokenizer, options.num_examples, options.reference
    )
    name = _task_name(run.task)
    count = len(examples)
    drawn = f" and {options.num_samples} samples of each" if options.num_samples else ""
    if is_first():
        program.say(f"{name}, {which}: {count} greedy completions{drawn}")
    # the samples are the largest rollout, and the cache must hold that
    counts = [(count, max(options.num_samples, 1))]
    reduce = run.training.tp_reduce_dtype
    generate = generate_of(model, run.generation, run.rollout, counts, reduce)
    # Both rollouts read these, and nothing needs the weights as they were loaded.
    with jax.set_mesh(model.mesh):
        model = replace(model, params=generate.prepare(model.params))
    scoring = {name: one for name, one in run.scoring_models.items() if one.reward}
    located = locate_frozen(scoring, model.source)
    task = with_reward_models(task, scoring, located, model.mesh, model.dtype)
    processes = Processes(jax.process_index(), jax.process_count(), allgather_values)
    progress = SamplingProgress(StandardError(), rollout_sizes(count, options.num_samples))
    with (
        task.with_workers(run.rewards, progress.say, processes, run.conversation) as graded_by,
        progress,
        jax.set_mesh(model.mesh),
    ):
        evaluated = evaluate(
            Policy(generate, None),
            graded_by,
            model.params,
            examples,
            jax.random.key(run.seed),
            options.num_samples,
            options.temperature,
            progress,
        )
    scores = model_scores(evaluated, task.references(examples, options.reference))
    rows = [{"model": which, "task": name} | row for row in evaluation_rows(evaluated)]
    weights = str(model.source.name if model.run is None else model.run)
    dtype = np.dtype(model.dtype).name
    return {"weights": weights, "step": model.step, "dtype": dtype}, rows, scores
