"""`tunix-lite evaluate checkpoint=outputs/latest`: how good a model is at a task, and how sure that
is; or two models at several tasks."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.commands import program
from tunix_lite.commands.generate import PartialFile, escape_for_terminal
from tunix_lite.commands.which_weights import WhichWeights, open_chosen_model
from tunix_lite.config import RunConfig, build, plain
from tunix_lite.distributed.agreement import process_info, user_code_digests
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.join import (
    agree,
    exit_at_once_on_failure,
    exit_when_a_peer_is_lost,
    hosts,
    initialise,
    is_first,
)
from tunix_lite.distributed.meeting import NotMet
from tunix_lite.errors import ConfigError, RunFailed, error_context
from tunix_lite.evaluation import report
from tunix_lite.evaluation.statistics import Estimate
from tunix_lite.files.imports import looking_in_working_folder
from tunix_lite.files.plain_text import visible
from tunix_lite.files.untrusted import as_path
from tunix_lite.inference.language_model import LanguageModel, load, run_settings
from tunix_lite.inference.rollouts import generate_of
from tunix_lite.models import source
from tunix_lite.models.source import ModelConfig
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.runs.evaluate import rollout_sizes
from tunix_lite.runs.samples import evaluation_rows, graded_row
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.runs.score import HeldOut, held_out_examples, model_scores
from tunix_lite.tasks.processes import Processes
from tunix_lite.tracking.progress import StandardError
from tunix_lite.tracking.rundir import RunDir, json_lines, json_value
from tunix_lite.types import Graded

# the files of an evaluation
RESULTS = ("results.json", "results.md")
# the end of the names of files of an evaluation that is not over
PARTIAL = ".partial.jsonl"


@dataclass(frozen=True)
class EvaluateTaskConfig:
    """Settings of an evaluation: tasks, examples, samples, and the model to compare with.

    Example: `EvaluateTaskConfig(num_examples=64, num_samples=8)`: avg@8 and pass@k of 64 examples.
    """

    # Task options to evaluate, such as [arithmetic,gsm8k], with a table for each. [] uses task=.
    tasks: tuple[str, ...] = ()
    # Held-out examples of each task. null uses all.
    num_examples: int | None = None
    # Samples of each example besides the greedy completion, for avg@k, pass@k and maj@k. 0 draws
    # none.
    num_samples: int = 0
    # Temperature of those samples, above 0. The greedy completion has none.
    temperature: float = 1.0
    # Model to compare with: a run folder, a weights folder or a hub name. null compares with none.
    against: str | None = None
    # Step of the checkpoint to use from the run in `against`. null uses the newest.
    against_step: int | None = None
    # Example field that ROUGE compares completions with. null computes no ROUGE.
    reference: str | None = None
    # Level of the confidence intervals, between 0 and 1.
    level: float = 0.95

    def __post_init__(self):
        if self.num_examples is not None and self.num_examples < 1:
            raise ValueError(
                f"num_examples={self.num_examples} must be at least 1, or null: all"
            )
        if self.num_samples < 0:
            raise ValueError(f"num_samples={self.num_samples} must not be negative; 0: none")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature} must be above 0; num_samples=0 gives the greedy "
                "completions alone"
            )
        if not 0 < self.level < 1:
            raise ValueError(f"level={self.level} is between 0 and 1, such as 0.95")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={list(self.tasks)} names one of them twice")
        if self.against is None and self.against_step is not None:
            raise ValueError("against_step needs a run: give against=FOLDER, too")


@dataclass(frozen=True)
class EvaluateConfig(WhichWeights):
    """Settings of the command: the model, its evaluation, and the folder of the results."""

    evaluate: EvaluateTaskConfig = field(default_factory=EvaluateTaskConfig)
    # Folder for the results. null uses evaluation/ in the run folder, or a folder under outputs/.
    out: str | None = None
    # true replaces earlier results in the output folder.
    overwrite: bool = False


def main() -> None:
    with looking_in_working_folder(), exit_at_once_on_failure():
        program.run_command(
            "evaluate",
            EvaluateConfig,
            evaluate_models,
            composes_again=True,
            positional="checkpoint",
        )


def evaluate_models(
    run: RunConfig, settings: EvaluateConfig, composed_again: Callable[[list[str]], RunConfig]
) -> None:
    """Evaluates the model, and the one that it is compared with; prints and writes the results.

    Of several processes each samples and grades its share, and the first one prints and writes.
    Raises ConfigError for tasks or an `out` that cannot be used, on all of them, before a model is
    loaded.
    """
    keep_programs(run.runtime.program_cache)
    # One evaluation of all processes that were started as one, which is mostly this one alone.
    values = {"evaluate": plain(settings.evaluate), "step": settings.step}
    with error_context(""):
        try:
            initialise(run.launch, os.environ, process_info(plain(run) | values))
        except NotMet as error:
            raise RunFailed(str(error)) from error
    with exit_when_a_peer_is_lost():
        options = settings.evaluate
        runs = {} if options.tasks else {type(run.task.source).__name__.lower(): run}
        out = None
        seen = {}
        error = None
        # What is wrong may be of this machine alone, and the others must hear of it.
        try:
            for name in options.tasks:
                runs[name] = composed_again([f"task={name}"])
            out = output_folder(run, settings, list(runs)) if is_first() else None
            seen = check_models(run, options, runs)
        except ConfigError as problem:
            error = str(problem)
        with error_context(""):
            agree(seen, error)

        models, scores, rows = score_models(run, settings, runs, out)
        results = {
            name: report.task_result(of_task, options.level, run.seed)
            for name, of_task in scores.items()
        }
        if out is None:
            return

        # The tables are printed, and written with their numbers and all completions.
        facts = asdict(options) | {
            "seed": run.seed,
            "generation": asdict(run.generation),
            "mixed_precision": run.training.mixed_precision,
        }
        text = report.as_markdown(models, facts, results)
        print(escape_for_terminal(text), end="")
        numbers = {"models": models, "settings": facts}
        numbers |= {"tasks": {name: asdict(result) for name, result in results.items()}}
        files = {f"{name}.jsonl": json_lines(completions) for name, completions in rows.items()}
        files["results.md"] = text
        files["results.json"] = json.dumps(json_value(numbers), indent=2) + "\n"
        with _named_out(out):
            out.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                _replace(out / name, content)
            for file in out.glob(f"*{PARTIAL}"):
                file.unlink()
        _say(f"results.json, results.md and all completions are in {out}")


def evaluate_model(
    model: LanguageModel, run: RunConfig, asked: EvaluateTaskConfig | None = None
) -> dict[str, Estimate]:
    """Evaluates a loaded model on the task of `run`: each score with its interval.

    asked: how many examples and samples, and the level of the intervals; None: all held-out
    examples, greedy. `tasks` and `against` are the command's. Nothing is written. Raises
    ConfigError.

    Example: `evaluate_model(load("bundled"), compose([]))["accuracy"].value`.
    """
    asked = asked or EvaluateTaskConfig()
    if asked.tasks or asked.against is not None:
        raise ConfigError(
            "tasks and against are settings of the command: call this once for each of them"
        )
    name = type(run.task.source).__name__.lower()
    held_out = _examples(name, run, model.tokenizer, asked)
    _, scores = _evaluate_one(run, asked, model, held_out, "model", name, None)
    return report.task_result({"model": scores}, asked.level, run.seed).scores["model"]


def check_models(
    run: RunConfig, options: EvaluateTaskConfig, runs: dict[str, RunConfig]
) -> dict[str, str]:
    """Finds the models, and checks the examples of every task. Returns what must be the same on all
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
    examples = {
        f"data of {name}": _examples(name, each, model.tokenizer, options)
        for model in models.values()
        for name, each in runs.items()
    }
    if len(hosts()) == 1:
        return {}
    seen = {name: source.weights_digest(model) for name, model in models.items()}
    for name, held_out in examples.items():
        seen[name] = held_out.task.digest(held_out.examples, ("held_out",))
    for each in runs.values():
        seen |= user_code_digests(each)
    return seen


def score_models(
    run: RunConfig, settings: EvaluateConfig, runs: dict[str, RunConfig], out: Path | None
) -> tuple[dict[str, dict], dict[str, dict[str, dict[str, np.ndarray]]], dict[str, list[dict]]]:
    """Returns (descriptions of the models, scores by task and model, completions by file) of one
    model after the other: the second may need the memory of the first.

    out: the folder in which completions are written as they are graded; None: they are not.
    """
    options = settings.evaluate
    models = {}
    scores: dict[str, dict[str, dict[str, np.ndarray]]] = {name: {} for name in runs}
    rows: dict[str, list[dict]] = {}
    for which in ("model", "against"):
        if which == "against" and options.against is None:
            continue
        if which == "model":
            model = open_chosen_model(run, settings)
        else:
            mesh_shape = run.model.mesh_shape
            dtype = run.training.mixed_precision
            with _naming_against(options):
                model = load(
                    options.against,
                    step=options.against_step,
                    mesh_shape=mesh_shape,
                    dtype=dtype,
                )
        weights = str(model.source.name if model.run is None else model.run)
        dtype = np.dtype(model.dtype).name
        models[which] = {"weights": weights, "step": model.step, "dtype": dtype}
        for name, each in runs.items():
            held_out = _examples(name, each, model.tokenizer, options)
            completions, scores[name][which] = _evaluate_one(
                each, options, model, held_out, which, name, out
            )
            rows[f"{which}.{name}"] = completions
        del model
    return models, scores, rows


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
        # A link in the folder of somebody else could lead to a folder of yours.
        if not out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"out: {out} is a link to another place; give out=FOLDER")
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


def _examples(
    name: str, run: RunConfig, tokenizer: Tokenizer, options: EvaluateTaskConfig
) -> HeldOut:
    """The held-out examples of a task. Raises ConfigError, with its name if there are several."""
    with error_context(name) if options.tasks else contextlib.nullcontext():
        return held_out_examples(run, tokenizer, options.num_examples, options.reference)


@contextlib.contextmanager
def _naming_against(options: EvaluateTaskConfig) -> Iterator[None]:
    """Puts evaluate.against in front of errors of the model that it names."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"evaluate.against={options.against}: {error}") from error


def _evaluate_one(
    run: RunConfig,
    options: EvaluateTaskConfig,
    model: LanguageModel,
    held_out: HeldOut,
    which: str,
    name: str,
    out: Path | None,
) -> tuple[list[dict], dict[str, np.ndarray]]:
    """The rows of the completions of a model on a task, and its scores."""
    count = len(held_out.examples)
    drawn = f" and {options.num_samples} samples of each" if options.num_samples else ""
    _say(f"{name}, {which}: {count} greedy completions{drawn}")
    counts = [(count, max(options.num_samples, 1))]
    dtype = run.training.tp_reduce_dtype
    generate = generate_of(model, run.generation, run.rollout, counts, dtype)
    processes = Processes(jax.process_index(), jax.process_count(), allgather_values)
    about = {"model": which, "task": name}
    rollouts = rollout_sizes(count, options.num_samples)
    path = None if out is None else out / f"{which}.{name}{PARTIAL}"
    if path is not None:
        before = (
            " (there are some of an evaluation that did not finish)" if path.exists() else ""
        )
        _say(f"completions are in {path} as they are graded{before}")
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(PartialFile(path))

        def write(group: int, is_greedy: bool, graded: Graded) -> None:
            with _named_out(out):
                file.write(json_lines([about | graded_row(graded, group, is_greedy)]))

        progress = SamplingProgress(StandardError(), rollouts, None if out is None else write)
        task = opened.enter_context(
            held_out.task.with_workers(
                run.rewards, progress.line.say, processes, run.conversation
            )
        )
        opened.enter_context(progress)
        evaluated, scores = model_scores(
            Policy(generate, None),
            model.params,
            HeldOut(task, held_out.examples),
            run.seed,
            options.num_samples,
            options.temperature,
            options.reference,
            progress,
        )
    return [about | row for row in evaluation_rows(evaluated)], scores


def _say(text: str) -> None:
    """Results go to standard output, all else to standard error, of the first process."""
    if is_first():
        print(visible(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _named_out(out: Path) -> Iterator[None]:
    """A disk that fails is an error of the setting `out`."""
    with error_context("out"):
        try:
            yield
        except OSError as error:
            raise ValueError(f"{out} cannot be written: {error.strerror}") from error


def _replace(file: Path, text: str) -> None:
    """Replaces a file: neither a link nor a pipe of that name is followed. Raises OSError."""
    fresh = file.with_name(f"{file.name}.tmp")
    fresh.unlink(missing_ok=True)
    with fresh.open("x", encoding="utf-8") as opened:
        opened.write(text)
    fresh.replace(file)
