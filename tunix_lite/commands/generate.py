"""`tunix-lite generate outputs/latest`: a conversation on the terminal, the completion of a prompt,
or those of a file of prompts."""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.plain_text import shortened, visible
from tunix_lite.basics.untrusted import parse_json
from tunix_lite.commands import program
from tunix_lite.commands.which_weights import WhichWeights
from tunix_lite.inference.language_model import Completion, LanguageModel, Prompt
from tunix_lite.runs.sampling_progress import SamplingProgress
from tunix_lite.settings.config import RunConfig
from tunix_lite.tasks.row_files import DEEPEST, lines_of
from tunix_lite.tracking.progress import SHORT_SECONDS, Progress, StandardError, after


@dataclass(frozen=True)
class GenerateConfig(WhichWeights):
    """The prompts, and where to write the completions."""

    # conf/command/generate.yaml explains each setting
    prompt: str | None = None
    prompts: str | None = None
    system: str | None = None
    num_generations: int = 1
    batch_size: int = 64
    out: str | None = None
    overwrite: bool = False

    def __post_init__(self):
        num_given = sum(x is not None for x in (self.prompt, self.prompts, self.system))
        if num_given > 1 or (not num_given and self.out is not None):
            raise ValueError("give prompt='...' or prompts=FILE, one of the two")
        if self.num_generations < 1 or self.batch_size < self.num_generations:
            raise ValueError(
                f"num_generations={self.num_generations} must be at least 1, and "
                f"batch_size={self.batch_size} at least that"
            )
        super().__post_init__()


def main() -> None:
    program.run_command("generate", GenerateConfig, generate, positional="checkpoint")


def generate(run: RunConfig, settings: GenerateConfig) -> None:
    """Reads the prompts, loads the model, and prints or writes the completions. Raises ConfigError
    for prompts or an `out` that cannot be used, before the model is loaded."""
    if settings.prompt is None and settings.prompts is None:
        _talk(run, settings)
        return
    limits = None
    prompts = [settings.prompt]
    if settings.prompts is not None:
        file = Path(settings.prompts).expanduser()
        prompts, limits = read_prompts(file, run.generation.max_new_tokens)
    out = None if settings.out is None else Path(settings.out).expanduser()
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"out={out}: give a file in a folder that is there")
    if out is not None and out.exists() and not settings.overwrite:
        more = "give another file, or overwrite=true to replace it"
        raise ConfigError(f"out={out} exists; {more}")
    model = settings.open(run)

    with error_context("generate"):
        # A single completion appears on the terminal while it is sampled.
        if settings.prompt is not None and settings.num_generations == 1 and out is None:
            _print_while_sampled(model, settings.prompt, run, run.seed)
            return
        count = len(prompts) * settings.num_generations
        progress = SamplingProgress(StandardError(), [count], patience=SHORT_SECONDS)
        with contextlib.ExitStack() as opened:
            if out is not None:
                # A kill leaves those that have ended.
                partial = out.with_name(f"{out.name}.partial")
                ended = opened.enter_context(partial.open("w", encoding="utf-8", buffering=1))
            opened.enter_context(progress)

            def on_chunk(requests: list, completions: list[Completion]) -> None:
                # the progress first: it counts what is printed below
                progress.on_chunk(requests, {})
                if out is not None:
                    ended.write(_lines(completions, prompts))
                    return
                with progress.hidden():
                    for completion in completions:
                        prompt = prompts[completion.prompt]
                        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                        cut = " [cut]" if completion.finish_reason == "length" else ""
                        text = f"> {question}\n{completion.text}{cut}\n"
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
        program.say(f"{dropped} of {len(prompts)} prompts were too long, and dropped")
    if out is not None:
        out.write_text(_lines(completions, prompts), encoding="utf-8")
        partial.unlink()
        answered = f"{len(completions)} completions of {len(prompts) - dropped} prompts"
        program.say(f"{answered} are in {out}")


def _talk(run: RunConfig, settings: GenerateConfig) -> None:
    """A conversation: reads lines from standard input, and prints the model's answer to each.
    Raises ConfigError if the model has no chat template."""
    model = settings.open(run)
    if not model.tokenizer.has_chat_template:
        raise ConfigError(
            f"{model.source.name} has no chat template; model.chat_template=chatml or FILE.jinja "
            "gives it one, and prompt='...' continues a text"
        )
    hints = ["every line is a message; /reset begins anew, exit or Ctrl-D ends"]
    if settings.checkpoint is not None:
        hints.insert(0, f"the model of {Path(settings.checkpoint).resolve()}")
    if model.source.name == "bundled":
        hints.append("the bundled model does sums of three or four numbers, one at a time")
    program.say("\n".join(hints))
    start = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    messages = list(start)
    turn = 0
    # Standard input is None where the process was started without one.
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        read = sys.stdin.readline()
        line = read.strip()
        if not read or line in ("/exit", "/quit", "exit", "quit"):
            return
        if line == "/reset":
            messages = list(start)
        elif line:
            conversation = [*messages, {"role": "user", "content": line}]
            try:
                # Each turn has a seed of its own, or a repeated question would get the same answer.
                seed = (run.seed + turn) % 2**32
                answer = _print_while_sampled(model, conversation, run, seed)
            except ValueError as error:
                # Too long, or not what the template allows: the conversation stays as it was.
                program.say(f"{error}. /reset begins anew")
                continue
            messages = [*conversation, {"role": "assistant", "content": answer}]
            turn += 1


def _print_while_sampled(
    model: LanguageModel, prompt: Prompt, run: RunConfig, seed: int
) -> str:
    """Prints a completion while it is sampled, and returns it. Until its first piece comes,
    standard error says that programs compile."""
    pieces = model.stream(prompt, run.generation, seed, run.rollout)
    waiting = Progress(
        StandardError(),
        lambda seconds: f"compiling the sampler and reading the prompt{after(seconds)}",
        patience=SHORT_SECONDS,
    )
    with waiting:
        # it comes when all is compiled
        first = next(pieces)
    whole = ""
    for text in chain([first], pieces):
        whole += text
        print(escape_for_terminal(text), end="", flush=True)
    print()
    return whole


def _lines(completions: list[Completion], prompts: list[Prompt]) -> str:
    """Lines of the file: the fields of each completion, with its prompt in place of its index."""
    rows = (asdict(each) | {"prompt": prompts[each.prompt]} for each in completions)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def escape_for_terminal(text: str) -> str:
    """Escapes control characters in a model's text if standard output is a terminal. Files and
    pipes get the text as it is."""
    return visible(text) if sys.stdout.isatty() else text


def read_prompts(file: Path, most: int) -> tuple[list[Prompt], list[int]]:
    """The prompts of a file, and for each the most tokens of its completions: `max_new_tokens` of
    its line, or `most`. Lines are {"prompt": "..."} or {"messages": [...]} of .jsonl, else prompts.
    Raises ConfigError with the line that is wrong."""
    if not file.is_file():
        raise ConfigError(f"prompts: {file} is not a file")
    with error_context("prompts"):
        lines = list(lines_of(file))
    if not lines:
        raise ConfigError(f"prompts: {file} holds no prompt")
    if file.suffix != ".jsonl":
        return [line for _, line in lines], [most] * len(lines)
    prompts = []
    limits = []
    for number, line in lines:
        where = f"prompts: {file}, line {number}"
        with error_context(where):
            row = parse_json(line, DEEPEST)
        # a line that is only a text is a prompt, too
        if not isinstance(row, dict):
            row = {"prompt": row}
        prompt = row.get("prompt", row.get("messages"))
        is_messages = isinstance(prompt, list) and all(
            isinstance(message, dict) for message in prompt
        )
        if not prompt or not (isinstance(prompt, str) or is_messages):
            raise ConfigError(
                f'{where}: expected {{"prompt": "..."}} or {{"messages": [...]}}'
            )
        # a command has no tools to call, and a prompt that names some would be answered by calls
        if row.get("tools") is not None:
            raise ConfigError(f"{where}: has `tools`: serve the model, and send them to it")
        limit = row.get("max_new_tokens", most)
        if type(limit) is not int or not 1 <= limit <= most:
            raise ConfigError(
                f"{where}: max_new_tokens={shortened(limit)}; it is 1 to "
                f"generation.max_new_tokens={most}"
            )
        prompts.append(prompt)
        limits.append(limit)
    return prompts, limits
