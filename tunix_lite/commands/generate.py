"""`tunix-lite generate prompt="..."` or `prompts=FILE`: completions of one prompt, or many."""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from tunix_lite.commands import program
from tunix_lite.commands.which_weights import WhichWeights, open_chosen_model
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.files.plain_text import shortened, visible
from tunix_lite.inference.language_model import Completion, LanguageModel, Prompt
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.tasks.row_files import json_of, lines_of
from tunix_lite.tracking.progress import SHORT_SECONDS, Progress, StandardError, after


@dataclass(frozen=True)
class GenerateConfig(WhichWeights):
    """The prompts, and where to write the completions."""

    # One prompt. Its completion is printed token by token.
    prompt: str | None = None
    # File of prompts: .jsonl with `prompt` or `messages` in each line, or text with one prompt a
    # line.
    prompts: str | None = None
    # Completions sampled for each prompt. A single one is the likeliest.
    num_generations: int = 1
    # Sequences sampled together. It changes memory and speed, not the completions.
    batch_size: int = 64
    # File .jsonl for the completions. null prints them.
    out: str | None = None
    # true replaces the file in `out`.
    overwrite: bool = False

    def __post_init__(self):
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give prompt='...' or prompts=FILE, one of the two")
        if self.num_generations < 1 or self.batch_size < self.num_generations:
            raise ValueError(
                f"num_generations={self.num_generations} must be at least 1, and "
                f"batch_size={self.batch_size} at "
                "least that"
            )
        super().__post_init__()


def main() -> None:
    program.run_command("generate", GenerateConfig, generate, positional="checkpoint")


def generate(run: RunConfig, settings: GenerateConfig) -> None:
    """Reads the prompts, loads the model, and prints or writes the completions.

    Raises ConfigError for prompts or an `out` that cannot be used, before the model is loaded.
    """
    limits = None
    if settings.prompt is not None:
        prompts = [settings.prompt]
    else:
        file = Path(settings.prompts).expanduser()
        prompts, limits = read_prompts(file, run.generation.max_new_tokens)
    out = None if settings.out is None else Path(settings.out).expanduser()
    if out is not None:
        if out.is_dir():
            file = f"{out}/completions.jsonl"
            raise ConfigError(f"out={out} is a folder; give a file, such as {file}")
        if out.exists() and not settings.overwrite:
            more = "give another file, or overwrite=true to replace it"
            raise ConfigError(f"out={out} exists; {more}")
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"out={out}: there is no folder {out.absolute().parent}")
    model = open_chosen_model(run, settings)

    with error_context("generate"):
        # A single completion appears on the terminal while it is sampled.
        if settings.prompt is not None and settings.num_generations == 1 and out is None:
            print_while_sampled(model, settings.prompt, run, run.seed)
            return
        count = len(prompts) * settings.num_generations
        progress = SamplingProgress(StandardError(), [count], patience=SHORT_SECONDS)
        # Beside a pipe, such as /dev/stdout, there is no place for a file.
        is_file = out is not None and (out.is_file() or not out.exists())
        with PartialFile(_partial_file(out) if is_file else None) as ended, progress:
            progress.begin()

            def on_chunk(requests: list, completions: list[Completion]) -> None:
                progress.on_chunk(requests, {})
                rows = [_row(each, prompts) for each in completions]
                ended.write(_lines(rows))
                with progress.line.hidden() if out is None else contextlib.nullcontext():
                    for row in rows if out is None else ():
                        prompt = row["prompt"]
                        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                        cut = " [cut]" if row["finish_reason"] == "length" else ""
                        text = f"> {question}\n{row['text']}{cut}\n"
                        print(escape_for_terminal(text), flush=True)

            completions = model.generate(
                prompts,
                run.generation,
                settings.num_generations,
                run.seed,
                settings.batch_size,
                max_new_tokens=limits,
                rollout=run.rollout,
                on_chunk=on_chunk,
            )
    # All of them, in the order of their prompts.
    dropped = len(prompts) - len({completion.prompt for completion in completions})
    if dropped:
        print(f"{dropped} of {len(prompts)} prompts were too long, and dropped", file=sys.stderr)
    if out is not None:
        rows = [_row(completion, prompts) for completion in completions]
        out.write_text(_lines(rows), encoding="utf-8")
        _partial_file(out).unlink(missing_ok=True)
        answered = len(prompts) - dropped
        print(f"{len(rows)} completions of {answered} prompts are in {out}", file=sys.stderr)


def print_while_sampled(model: LanguageModel, prompt: Prompt, run: RunConfig, seed: int) -> str:
    """Prints a completion while it is sampled, and returns it. Until its first piece comes,
    standard error says that programs compile."""
    pieces = model.stream(prompt, run.generation, seed, run.rollout)
    waiting = Progress(
        StandardError(),
        lambda seconds: f"compiling the sampler and reading the prompt{after(seconds)}",
        patience=SHORT_SECONDS,
    )
    with waiting:
        texts = [next(pieces)]
    print(escape_for_terminal(texts[0]), end="", flush=True)
    for text in pieces:
        texts.append(text)
        print(escape_for_terminal(text), end="", flush=True)
    print()
    return "".join(texts)


class PartialFile:
    """Lines that are written as they come, so that a kill leaves them on the disk.

    Example: `with PartialFile(out.with_name("out.jsonl.partial")) as file:`, then
    `file.write('{"text": "4"}\\n')`.
    """

    def __init__(self, path: Path | None):
        """path: None: nothing is written. What is there is replaced, once there is a line."""
        self.path = path
        self._file: TextIO | None = None

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(self, *_) -> None:
        """Closes the file; it stays until all results are written."""
        if self._file is not None:
            self._file.close()

    def write(self, lines: str) -> None:
        """Adds the lines. Raises OSError."""
        if self.path is None or not lines:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            self._file = self.path.open("x", encoding="utf-8")
        self._file.write(lines)
        self._file.flush()


def _partial_file(out: Path) -> Path:
    """Returns the file of the completions until all of them have ended."""
    return out.with_name(f"{out.name}.partial")


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _row(completion: Completion, prompts: list[Prompt]) -> dict:
    """A line of the file: the fields of a completion, its prompt instead of the prompt's index."""
    return asdict(completion) | {"prompt": prompts[completion.prompt]}


def escape_for_terminal(text: str) -> str:
    """Escapes control characters in a model's text if standard output is a terminal.

    Files and pipes get the text as it is.
    """
    return visible(text) if sys.stdout.isatty() else text


def read_prompts(file: Path, most: int) -> tuple[list[Prompt], list[int]]:
    """The prompts of a file, and for each the most tokens of its completions.

    Each line of a .jsonl file is {"prompt": "..."} or {"messages": [...]}, and may have
    "max_new_tokens", else `most` counts. Each line of any other file is a prompt. Raises
    ConfigError with the line that is wrong.
    """
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
    read = [_read_prompt(f"prompts={file}, line {number}", line, most) for number, line in lines]
    return [prompt for prompt, _ in read], [limit for _, limit in read]


def _read_prompt(where: str, line: str, most: int) -> tuple[Prompt, int]:
    """The prompt in a line of a .jsonl file, and the most tokens of its completions."""
    try:
        row = json_of(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    row = row if isinstance(row, dict) else {"prompt": row}
    prompt = row.get("prompt", row.get("messages"))
    is_messages = isinstance(prompt, list) and all(
        isinstance(message, dict) for message in prompt
    )
    if not prompt or not (isinstance(prompt, str) or is_messages):
        raise ConfigError(f'{where}: expected {{"prompt": "..."}} or {{"messages": [...]}}')
    if row.get("tools") is not None:
        raise ConfigError(
            f"{where}: has `tools`, which this command does not give to the chat template; leave "
            "them out, or serve the model and send them with the messages"
        )
    limit = row.get("max_new_tokens", most)
    if type(limit) is not int or not 1 <= limit <= most:
        raise ConfigError(
            f"{where}: max_new_tokens={shortened(limit)}; it is 1 to "
            f"generation.max_new_tokens={most}"
        )
    return prompt, limit
