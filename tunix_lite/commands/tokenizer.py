"""`tunix-lite tokenizer task=text task.train=stories.txt out=FOLDER`: a tokenizer for a model with
random weights, trained on the texts that it will learn from."""

from dataclasses import dataclass
from pathlib import Path

from tunix_lite.basics.errors import check_numbers, error_context
from tunix_lite.commands import program
from tunix_lite.models.tokenizer_training import train_tokenizer
from tunix_lite.settings.config import RunConfig


@dataclass(frozen=True)
class TokenizerConfig:
    """Settings of the command: the kind and the size of the tokenizer, and its folder."""

    # conf/command/tokenizer.yaml explains each setting
    out: str | None = None
    kind: str = "bpe"
    vocab_size: int = 8192
    num_examples: int | None = 100_000
    overwrite: bool = False

    def __post_init__(self):
        if self.out is None:
            raise ValueError("out is missing: give out=FOLDER")
        rule = "must be at least 2, or null for all"
        check_numbers(self, "num_examples", lambda x: x >= 2, rule)


def main() -> None:
    program.run_command("tokenizer", TokenizerConfig, _train)


def _train(run: RunConfig, settings: TokenizerConfig) -> None:
    """Trains the tokenizer, and says how large and how good it is. Raises ConfigError."""
    folder = Path(settings.out).expanduser()
    with error_context("out"):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; give out=FOLDER")
        if (folder / "tokenizer.json").exists() and not settings.overwrite:
            raise ValueError(f"{folder} has a tokenizer; overwrite=true replaces it")
    with error_context("task"):
        if not any(run.task.texts(2)):
            raise ValueError("there is no text to learn from")
    with error_context(""):
        # One after the other: all of them may be larger than memory.
        texts = run.task.texts(settings.num_examples)
        made = train_tokenizer(texts, folder, settings.kind, settings.vocab_size)
    texts = [*run.task.texts(1000)]
    size = sum(len(text.encode()) for text in texts)
    num_tokens = sum(len(made.encode(text)) for text in texts)
    print(
        f"{made.num_tokens:,} tokens; one stands for {size / num_tokens:.2f} bytes on average"
    )
    print(f"written to {folder}: model=random model.target_params=5M model.tokenizer={folder}")
