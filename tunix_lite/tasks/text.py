"""Plain text to learn from, every token of it: rows that hold as many tokens as fit, for training
from scratch and for adapting a model to a domain."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tunix_lite.basics.addresses import check_on_disk
from tunix_lite.basics.errors import check_choices, check_numbers
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.tasks.hub_rows import is_hub, pinned
from tunix_lite.tasks.processes import shared_errors
from tunix_lite.tasks.sources import SPLITS, digest, digest_of_data
from tunix_lite.tasks.task import Task, TaskConfig, TaskLengthsConfig
from tunix_lite.tasks.token_files import TokenFiles, TokenRows

CACHE = "~/.cache/tunix_lite/text"
unset = partial(dataclasses.field, init=False)


@dataclass(frozen=True)
class _TextSource:
    """The rows of text files, as a source. Example: source.train[0] is {"row": 0, "split": ...}."""

    config: "TextTaskConfig"
    tokenizer: Tokenizer | None = None

    @cached_property
    def files(self) -> list[TokenFiles]:
        """The files of training, and of held-out rows if they have their own. Raises ValueError."""
        config = self.config
        patterns = ((config.train, "train"), (config.held_out, "test"))
        return [
            TokenFiles(
                pinned(pattern, split) if is_hub(pattern) else pattern,
                self.tokenizer,
                Path(CACHE if config.cache == "auto" else config.cache).expanduser(),
                config.field,
                config.special_tokens_in_data,
                config.held_out_every if config.held_out is None else 0,
                (jax.process_index(), jax.process_count()),
            )
            for pattern, split in patterns
            if pattern is not None
        ]

    @cached_property
    def train(self) -> TokenRows:
        """The rows to train on. Raises ValueError for a malformed document."""
        if self.tokenizer is None:
            raise ValueError(
                "task=text has rows of tokens to learn from, and no prompts to answer; "
                "a run with algorithm=sft reads them"
            )
        return self.files[0].rows("train", self.config.row_tokens)

    @cached_property
    def held_out(self) -> TokenRows:
        """The rows that are held out: of files of their own, or of some documents of `train`."""
        split = "held_out" if self.config.held_out is None else "train"
        return self.files[-1].rows(split, self.config.row_tokens)

    def doing(self, seconds: float) -> str:
        """What is done while tokens are made, for people."""
        folders = [folder for files in self.files for folder in files.folders]
        made = sum(folder.is_dir() for folder in folders)
        return f"tokenising text: {made} of {len(folders)} parts are there"


@dataclass(frozen=True)
class TextTaskConfig(TaskConfig):
    """A task of plain text: files of documents, joined with the end token and cut into full rows.
    Example: algorithm=sft task=text task.train='corpus/*.jsonl' task.row_tokens=1024"""

    # conf/task/text.yaml explains each setting
    # made of the settings below, once the tokenizer is there
    source: Any = unset(default=None, compare=False, repr=False)
    # what other tasks have, and rows of text do not
    prompt: str | None = unset(default=None)
    rewards: dict = unset(default_factory=dict)
    correct: Callable | None = unset(default=None)
    extract: Callable | None = unset(default=None)
    system: str | None = unset(default=None)
    learned_turns: str = unset(default="last")
    environment: Callable | None = unset(default=None)
    lengths: TaskLengthsConfig | None = unset(default=None)
    train: str | None = None
    held_out: str | None = None
    held_out_every: int = 100
    field: str = "text"
    row_tokens: int = 1024
    attention: str = "documents"
    cache: str = "auto"

    packs_rows = True

    def __post_init__(self):
        check_on_disk("cache", self.cache)
        check_choices(self, {"attention": ("documents", "across")})
        check_numbers(self, "row_tokens", lambda x: x >= 2, "must be at least 2")
        rule = "must be 0, or 2 or more: 1 leaves nothing to train on"
        check_numbers(self, "held_out_every", lambda x: x == 0 or x >= 2, rule)
        if self.train is None:
            raise ValueError("train is missing: give task.train=FILE, or a pattern")
        object.__setattr__(self, "source", _TextSource(self))

    def task(self, tokenizer: Tokenizer, *arguments: Any, **settings: Any) -> "TextTask":
        """Its task, and settings whose source has rows of tokens."""
        made = copy.copy(self)
        object.__setattr__(made, "source", _TextSource(self, tokenizer))
        return TextTask(made, tokenizer, *arguments, **settings)

    def functions(self) -> dict[str, Callable]:
        """Returns none: no completions are graded."""
        return {}

    def texts(self, limit: int | None) -> Iterator[str]:
        """See TaskConfig."""
        return self.source.files[0].texts(limit)

    def check_algorithm(self, needs_demonstrations: bool) -> None:
        """See TaskConfig."""
        if not needs_demonstrations:
            raise ValueError("rows of text have no prompts to sample from; set algorithm=sft")


@dataclass(frozen=True)
class TextTask(Task):
    """A task whose examples are rows of tokens.
    Example: task.demonstrations([{"row": 0, "split": "train"}]) -> its tokens and masks."""

    def describe(self) -> str:
        """What there is to train on, for people. Raises ValueError if there is nothing."""
        train, held_out = (getattr(self.config.source, split) for split in SPLITS)
        if not len(train):
            raise ValueError(f"{self.config.train} has no text to train on")
        return (
            f"{train.num_tokens:,} tokens of {train.num_documents:,} documents in {len(train):,} "
            f"rows of {train.width:,}; held out: {len(held_out):,} rows"
        )

    @shared_errors()
    def segments(self, examples: list[dict]) -> np.ndarray:
        """See Task. With task.attention=across a row is one document."""
        shape = (len(examples), self.max_prompt_length + self.max_new_tokens)
        segments_BT = np.zeros(shape, np.int32)
        for i, example in enumerate(examples):
            row = getattr(self.config.source, example["split"]).segment_ids(example["row"])
            segments_BT[i, : len(row)] = 1 if self.config.attention == "across" else row
        return segments_BT

    @shared_errors()
    def demonstrations(
        self, examples: list[dict], name: str = "completion"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See Task: every token is learned that another of its document predicts. Tokens of rows
        that are on devices of other processes are not read; they are padding here."""
        if name != "completion":
            raise ValueError(f"rows of text have no `{name}`; task=text is for algorithm=sft")
        segments_BT = self.segments(examples)
        tokens_BT = np.full(segments_BT.shape, self.tokenizer.pad_id, np.int32)
        own_rows = self.processes.own_rows
        is_own = np.ones(len(examples), bool) if own_rows is None else own_rows(len(examples))
        for i in np.flatnonzero(is_own):
            rows = getattr(self.config.source, examples[i]["split"])
            row = rows.tokens(examples[i]["row"])
            tokens_BT[i, : len(row)] = row
        token_mask_BT = segments_BT > 0
        learned_BT = token_mask_BT.copy()
        learned_BT[:, 0] = False
        learned_BT[:, 1:] &= segments_BT[:, 1:] == segments_BT[:, :-1]
        return tokens_BT, token_mask_BT, learned_BT

    def digest(self, examples: list[dict], splits: Sequence[str] = SPLITS) -> str:
        """See Task."""
        return digest([digest_of_data(self.config.source, splits), examples])
