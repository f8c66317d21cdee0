"""A task of rows in files of your own, all of it set from the command line."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from tunix_lite.tasks.prompt_text import PromptTemplate
from tunix_lite.tasks.row_files import (
    KINDS,
    Rows,
    RowsOnDisk,
    check_is_file,
    check_on_error,
    rows_of,
    rows_on_disk,
)
from tunix_lite.tasks.row_stream import RowStream
from tunix_lite.tasks.task import Reward, TaskConfig

# of the rows of one file, every so many-th is held out
HELD_OUT_EVERY = 10


def whole_text(completion: str) -> str:
    """The completion without white space around it: the answer where nothing else is known."""
    return completion.strip()


@dataclass(frozen=True)
class FileRows:
    """Rows of files as a source: each makes a prompt, or is refused or left out when it is read.

    Example: `task=jsonl task.train=train.jsonl` makes one, with the template of task.prompt.
    """

    train_file: str
    held_out_file: str | None  # None: every HELD_OUT_EVERY-th row of train_file
    format: str  # one of row_files.KINDS
    on_error: str  # a malformed row: raise; skip: leave it out
    template: PromptTemplate
    in_memory: bool = True  # False: rows are read from the file when they are needed
    shuffle_buffer: int | None = None  # rows shuffled at a time of files read in order; None: all

    @cached_property
    def train(self) -> Rows | RowsOnDisk | RowStream:
        """The rows to train on."""
        if self.shuffle_buffer is not None:
            return RowStream(
                self.train_file, self.shuffle_buffer, self.format, self.on_error, self.template
            )
        if not self.in_memory:
            check_is_file(self.train_file)
            modified = os.stat(self.train_file).st_mtime_ns
            return rows_on_disk(self.train_file, modified, self.on_error, self.template)
        return self._whole if self.held_out_file else self._part(is_held_out=False)

    @cached_property
    def held_out(self) -> Rows:
        """The rows to evaluate with."""
        return self._read(self.held_out_file) if self.held_out_file else self._part(True)

    @cached_property
    def _whole(self) -> Rows:
        return self._read(self.train_file)

    def _read(self, file: str) -> Rows:
        # a row that makes no prompt is malformed, too
        return rows_of(file, self.format, self.on_error, self.template)

    def _part(self, is_held_out: bool) -> Rows:
        places = [
            i
            for i in range(len(self._whole))
            if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == is_held_out
        ]
        part = self._whole.part(places)
        if not is_held_out:
            part.skipped, part.first_skipped = self._whole.skipped, self._whole.first_skipped
        return part


@dataclass(frozen=True)
class FilesTaskConfig(TaskConfig):
    """A task as one line of a command: files, a prompt and a reward.

    Example: task=jsonl task.train=train.jsonl task.prompt='{question}' task.reward=my_rewards.near
    """

    # made of the settings below
    source: Any = field(init=False, default=None)
    # User's message, where {names} are columns. null uses the column `messages` or `prompt`.
    prompt: str | None = None
    # More rewards by name: '+task.rewards.short={fn: my_rewards.short, weight: 0.1}'. {} has none.
    rewards: dict[str, Reward] = field(default_factory=dict)
    # Function that says if a completion is right, for eval/accuracy. null takes a reward above 0 as
    # right.
    correct: Callable | None = None
    # Function that reads the answer out of a completion, for display and votes.
    extract: Callable = whole_text
    # File to train on. A run needs it.
    train: str | None = None
    # File to evaluate with. null holds out every tenth row of `train`.
    held_out: str | None = None
    # Function (completion, row) -> number by its dotted path. Its row holds all columns.
    reward: Callable | None = None
    # Format of both files: jsonl, csv or parquet.
    format: str = "jsonl"
    # For a row that cannot be read or makes no prompt: raise stops, skip leaves it out and counts
    # it.
    on_error: str = "raise"
    # false reads rows ahead of the run instead of all at once. Needs format=jsonl and a held_out
    # file.
    in_memory: bool = True
    # Rows shuffled at a time while the files of `train` (data/*.jsonl) are read in order. null
    # shuffles all rows.
    shuffle_buffer: int | None = None

    def __post_init__(self):
        if self.train is None:
            raise ValueError("train is missing: give task.train=FILE")
        if self.format not in KINDS:
            raise ValueError(f"format={self.format!r}; it is {', '.join(KINDS)}")
        check_on_error(self.on_error)
        if not self.in_memory and (self.format != "jsonl" or self.held_out is None):
            raise ValueError(
                "in_memory=false is for format=jsonl, and takes the held-out rows from a file of "
                "their own: give task.held_out=FILE"
            )
        self._check_stream()
        rewards = dict(self.rewards)
        if self.reward is not None:
            name = _name_of(self.reward)
            if rewards.get(name, Reward(self.reward)) != Reward(self.reward):
                raise ValueError(f"reward and rewards.{name} have the same name; rename the latter")
            rewards = {name: Reward(self.reward)} | rewards
        if not rewards and self.environment is None:
            raise ValueError(
                "reward is missing: give task.reward=module.function, which gets (completion, row) "
                "and returns a number, or a ready one, such as "
                "tunix_lite.rewards.answers.NumericAnswer where the column `answer` is a number"
            )
        # the dataclass is frozen for everybody else
        settle = partial(object.__setattr__, self)
        settle("rewards", rewards)
        single = [reward.fn for reward in rewards.values() if not reward.group]
        if self.correct is None and not single and rewards:
            raise ValueError("correct is missing: rewards of a group do not say what is right")
        settle("correct", self.correct or next(iter(single), TaskConfig.correct))
        settle("source", FileRows(*self._files, self.template, self.in_memory, self.shuffle_buffer))
        super().__post_init__()

    def _check_stream(self) -> None:
        """Raises ValueError if the files cannot be read in order."""
        if self.shuffle_buffer is None:
            return
        if self.shuffle_buffer < 1:
            raise ValueError(f"shuffle_buffer={self.shuffle_buffer} must be at least 1; or null")
        if not self.in_memory:
            raise ValueError(
                "shuffle_buffer reads the files in order, and in_memory=false reads rows from all "
                "over one; leave one of the two out"
            )
        if self.held_out is None:
            raise ValueError(
                "shuffle_buffer takes the held-out rows from a file of their own: give "
                "task.held_out=FILE"
            )

    @property
    def _files(self) -> tuple[str, str | None, str, str]:
        return self.train, self.held_out, self.format, self.on_error


def _name_of(fn: Callable) -> str:
    """The name under which a reward is logged: that of the function or of its class."""
    fn = fn.func if isinstance(fn, partial) else fn
    return getattr(fn, "__name__", type(fn).__name__)
