"""`tunix-lite generate prompt="..."`, or `prompts=FILE`: completions of a run's model or of any
other."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.inference.language_model import LanguageModel, Prompt, open_model, run_settings
from tunix_lite.parallel.mesh import of_all
from tunix_lite.plain_text import shortened, visible
from tunix_lite.tasks.sources import json_of, lines_of


@dataclass(frozen=True)
class GenerateConfig:
    """What to answer, and where to put it."""

    # the folder of a run, whose newest weights speak; null: model.weights as they are
    checkpoint: str | None = None
    step: int | None = None  # of an older checkpoint of that run; null: the newest
    prompt: str | None = None  # one prompt, answered on the terminal as it is drawn
    # or a file: .jsonl with "prompt" or "messages" in each line, or text, a prompt a line
    prompts: str | None = None
    num_generations: int = 1  # completions of each prompt
    batch_size: int = 64  # sequences drawn together; changes memory and speed, not what is said
    out: str | None = None  # a .jsonl file for the completions; null: the terminal
    overwrite: bool = False  # replace `out` if it exists

    def __post_init__(self):
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give prompt='...' or prompts=FILE, one of the two")
        if self.num_generations < 1 or self.batch_size < self.num_generations:
            raise ValueError(
                f"num_generations={self.num_generations} must be at least 1, and "
                f"batch_size={self.batch_size} at "
                "least that"
            )
        if self.step is not None and self.checkpoint is None:
            raise ValueError("step= is of a run: give checkpoint=FOLDER, too")


def main() -> None:
    program.run_command("generate", GenerateConfig, generate)


def generate(run: RunConfig, settings: GenerateConfig) -> None:
    """Reads the prompts, loads the model and writes what it says."""
    if settings.prompt is not None:
        asked, most = [settings.prompt], None
    else:
        asked, most = read_prompts(
            Path(settings.prompts).expanduser(), run.generation.max_new_tokens
        )
    out = None if settings.out is None else Path(settings.out).expanduser()
    if out is not None:
        if out.is_dir():
            raise ConfigError(
                f"out={out} is a folder; give a file, such as {out}/completions.jsonl"
            )
        if out.exists() and not settings.overwrite:
            raise ConfigError(
                f"out={out} exists; give another file, or overwrite=true to replace it"
            )
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"out={out}: there is no folder {out.absolute().parent}")
    model = open_chosen_model(run, settings)
    with error_context("generate"):
        if settings.prompt is not None and settings.num_generations == 1 and out is None:
            for text in model.stream(settings.prompt, run.generation, run.seed, run.rollout):
                print(escape_for_terminal(text), end="", flush=True)
            print()
            return
        how = settings.num_generations, run.seed, settings.batch_size
        said = model.generate(asked, run.generation, *how, max_new_tokens=most, rollout=run.rollout)
    if missing := len({*range(len(asked))} - {completion.prompt for completion in said}):
        print(f"{missing} of {len(asked)} prompts were too long, and dropped", file=sys.stderr)
    rows = [{**asdict(completion), "prompt": asked[completion.prompt]} for completion in said]
    if out is not None:
        out.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
        print(
            f"{len(rows)} completions of {len(asked) - missing} prompts are in {out}",
            file=sys.stderr,
        )
        return
    for row in rows:
        question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        print(
            escape_for_terminal(
                "> "
                f"{question}\n{row['text']}{' [cut]' if row['finish_reason'] == 'length' else ''}\n"
            )
        )


def escape_for_terminal(text: str) -> str:
    """What a model says, as it is for a file or a pipe; on a terminal, with what would act on it
    escaped."""
    return visible(text) if sys.stdout.isatty() else text


def open_chosen_model(run: RunConfig, settings, dtype: str | None = None) -> LanguageModel:
    """The model that `model` and `checkpoint` name, on its mesh; dtype None: as
    training.mixed_precision says."""
    folder = None if settings.checkpoint is None else Path(settings.checkpoint).expanduser()
    seed = run.seed if folder is None else run_settings(folder, run.model.family)[1]
    model = open_model(
        run.model, folder, settings.step, dtype or run.training.mixed_precision, seed
    )
    if model.mesh.size < jax.device_count():
        print(f"devices: {of_all(model.mesh)}", file=sys.stderr)
    return model


def read_prompts(file: Path, most: int) -> tuple[list[Prompt], list[int]]:
    """The prompts of a file, "prompt" or "messages" of each line of .jsonl, else each line; and the
    most tokens of each one's completions: "max_new_tokens" of its line, else `most`. Raises
    ConfigError."""
    if not file.is_file():
        raise ConfigError(f"prompts={file} is not a file")
    try:
        lines = list(lines_of(file))
    except ValueError as error:
        raise ConfigError(f"prompts={error}") from error
    if not lines:
        raise ConfigError(f"prompts={file} holds no prompt")
    if file.suffix != ".jsonl":
        return [line for _, line in lines], [most] * len(lines)
    asked, limits = zip(*(_prompt(file, i, line, most) for i, line in lines))
    return list(asked), list(limits)


def _prompt(file: Path, number: int, line: str, most: int) -> tuple[Prompt, int]:
    try:
        row = json_of(line, f"{file}, line {number}")
    except ValueError as error:
        raise ConfigError(f"prompts={error}") from error
    asked = row.get("prompt", row.get("messages")) if isinstance(row, dict) else row
    is_conversation = (
        isinstance(asked, list) and asked and all(isinstance(message, dict) for message in asked)
    )
    if not (isinstance(asked, str) and asked) and not is_conversation:
        raise ConfigError(
            f'prompts={file}, line {number}: expected {{"prompt": "..."}} or {{"messages": [...]}}'
        )
    limit = row.get("max_new_tokens", most) if isinstance(row, dict) else most
    if type(limit) is not int or not 1 <= limit <= most:
        raise ConfigError(
            f"prompts={file}, line {number}: max_new_tokens={shortened(limit)}; it is 1 to "
            f"generation.max_new_tokens={most}"
        )
    return asked, limit
