"""Sources of examples, which are dicts: anything with `train` and `held_out`, a sequence each.
Every batch is a pure function of (seed, step), so resuming needs no saved iterator."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import grain
import numpy as np

from tunix_lite.basics.errors import check_choices, check_numbers
from tunix_lite.basics.untrusted import as_path
from tunix_lite.tasks.generated import GeneratedSource, check_range
from tunix_lite.tasks.hub_rows import HubData, is_hub, pinned
from tunix_lite.tasks.row_files import RowChecker, Rows

# examples of which one must fit, where they are not in memory
LOOKED_AT = 2000
# examples that stand for all of them where they are not in memory
SAMPLED = 64
NO_TRAIN = "train is missing: give task.train=FILE"
# the splits of a source
SPLITS = ("train", "held_out")
# examples that become text together
AT_ONCE = 1000


class Source(Protocol):
    """The data of a task."""

    @property
    def train(self) -> Sequence[dict]:
        """The examples to train on."""

    @property
    def held_out(self) -> Sequence[dict]:
        """The examples to evaluate with."""


def batch_at(
    examples: Sequence[dict],
    batch_size: int,
    seed: int,
    step: int,
    last_batch: str | None = None,
) -> list[dict]:
    """Batch number `step` of an endless pass over `examples`, shuffled anew in each epoch.
    last_batch: what becomes of the examples at the end of an epoch that fill no batch: drop, or
    keep, a smaller one; None: the next epoch fills it."""
    # the numbers of all examples, endlessly: each epoch has a shuffle of its own
    order = grain.MapDataset.range(len(examples)).shuffle(seed=seed).repeat()
    places = range(step * batch_size, (step + 1) * batch_size)
    if last_batch is not None:
        each = batches_of_epoch(len(examples), batch_size, last_batch)
        epoch, number = divmod(step, each)
        end = min((number + 1) * batch_size, len(examples))
        begin = epoch * len(examples)
        places = range(begin + number * batch_size, begin + end)
    return [examples[int(order[place])] for place in places]


def batches_of_epoch(count: int, batch_size: int, last_batch: str) -> int:
    """Counts the batches of a pass over so many examples. Raises ValueError if there is none."""
    if last_batch == "drop" and count < batch_size:
        raise ValueError(
            f"an epoch of {count:,} rows has no batch of {batch_size:,}; "
            f"training.prompts_per_step={count} fits, or training.last_batch=keep"
        )
    if last_batch == "keep":
        return -(-count // batch_size)
    return count // batch_size


@dataclass(frozen=True)
class NextThatFits(Sequence):
    """Examples that are made when they are asked for, in place of each that is left out the next
    one. Example: NextThatFits(source.train, why_not)[5] is example 5, or 6 if that is left out."""

    examples: Sequence[dict]
    # why an example is left out; "": it is not
    why_not: Callable[[dict], str]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict:
        why = ""
        for i in range(index, index + LOOKED_AT):
            example = self.examples[i % len(self)]
            if not (why := self.why_not(example)):
                return example
        raise ValueError(f"none of {LOOKED_AT:,} training examples can be taken: {why}")


def spread(count: int, limit: int) -> Sequence[int]:
    """Numbers of so many examples: all, or `limit` of them, evenly spread."""
    if count <= limit:
        return range(count)
    return [i * (count - 1) // (limit - 1) for i in range(limit)]


def digest_of_data(source: Source, splits: Sequence[str] = SPLITS) -> dict[str, str]:
    """A digest of each split, the same in every process: of a list, or of SAMPLED examples."""
    digests = {}
    for name in splits:
        examples = getattr(source, name)
        digests[name] = getattr(examples, "digest", None)
        if not isinstance(digests[name], str):
            count = len(examples)
            # made one by one, and perhaps very many
            is_list = isinstance(examples, list | tuple)
            places = spread(count, count if is_list else SAMPLED)
            parts = [str(count)]
            for start in range(0, len(places), AT_ONCE):
                parts.append(digest([examples[i] for i in places[start : start + AT_ONCE]]))
            digests[name] = digest(parts)
    return digests


def digest(value: object) -> str:
    """Hashes the values that examples are made of; the same in every process."""

    def as_json(other: object) -> Any:
        if isinstance(other, np.ndarray | np.generic):
            return other.tolist()
        # the order of a set differs from process to process, and so do addresses
        if isinstance(other, set):
            return sorted(map(digest, other))
        return re.sub(r" at 0x[0-9a-fA-F]+", "", str(other))

    try:
        text = json.dumps(value, sort_keys=True, default=as_json)
    except TypeError:
        # keys of several types, or keys that JSON does not have
        text = as_json(value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FileRows:
    """Rows of files, or of data sets of the hub. The ending of a file's name says its format: one
    JSON object a line, or Parquet.
    Example: `FileRows("train.jsonl", "held_out.jsonl").train[0]` is the first line's object."""

    # conf/task/jsonl.yaml explains each setting
    # File to train on, .jsonl or .parquet, or hub:org/name:config:split. null has none.
    train_file: str | None
    # File to evaluate with. null holds out rows of train_file.
    held_out_file: str | None = None
    on_error: str = "raise"
    # What makes the example of a row by its method check(row). null takes the row itself.
    checker: RowChecker | None = None
    held_out_every: int = 10
    fields: dict[str, str] | None = None
    max_rows: int | None = None

    def __post_init__(self):
        check_choices(self, {"on_error": ("raise", "skip")})
        rule = "must be at least 2: 1 leaves no row to train on"
        check_numbers(self, "held_out_every", lambda x: x >= 2, rule)
        check_numbers(
            self, "max_rows", lambda x: x >= 1, "must be at least 1, or null for all"
        )
        for name in filter(is_hub, (self.train_file, self.held_out_file)):
            HubData.parse(name)

    @cached_property
    def train(self) -> Rows:
        """The rows to train on. Raises ValueError without a file."""
        rows = self._all
        if self.held_out_file:
            return rows
        return rows.part([i for i in range(len(rows)) if (i + 1) % self.held_out_every])

    @cached_property
    def held_out(self) -> Rows:
        """The rows to evaluate with."""
        if self.held_out_file:
            return self._rows(self.held_out_file, "test")
        rows = self._all
        return rows.part(range(self.held_out_every - 1, len(rows), self.held_out_every))

    @cached_property
    def _all(self) -> Rows:
        return self._rows(self.train_file, "train")

    def _rows(self, file: str | None, split: str) -> Rows:
        """All rows of a file. split: of a name of the hub that has none."""
        if file is None:
            raise ValueError(NO_TRAIN)
        name = pinned(file, split) if is_hub(file) else str(as_path(file))
        if not is_hub(file) and not Path(name).is_file():
            raise ValueError(f"{name} is not a file")
        fields = tuple((self.fields or {}).items())
        return Rows(name, self.on_error, self.checker, fields, self.max_rows)


@dataclass(frozen=True)
class Arithmetic(GeneratedSource):
    """Generated sums and differences of whole numbers. The demonstration says the answer at once
    or, for a share `worked` of the problems, every step before it.
    Example: {"question": "25 + 19 + 15 + 8", "answer": "67", ...}."""

    # conf/task/arithmetic.yaml explains each setting
    min_terms: int = 4
    max_terms: int = 4
    max_value: int = 29
    operators: tuple[str, ...] = ("+", "-")
    worked: float = 0.45

    def __post_init__(self):
        check_range(self, "min_terms", "max_terms")
        if self.max_value < 9:
            raise ValueError(
                f"max_value={self.max_value} leaves too few different problems; use at least 9"
            )
        if not self.operators or set(self.operators) - {"+", "-"}:
            raise ValueError(f"operators={list(self.operators)}: choose from '+' and '-'")
        if not 0 <= self.worked <= 1:
            raise ValueError(f"worked={self.worked} is a share, from 0 to 1")
        super().__post_init__()

    def make(self, rng: np.random.Generator) -> dict:
        """Makes one problem."""
        count = rng.integers(self.min_terms, self.max_terms + 1)
        first, *terms = (int(t) for t in rng.integers(1, self.max_value + 1, count))
        signs = [str(sign) for sign in rng.choice(self.operators, count - 1)]
        question = str(first)
        total = first
        lines = []
        for sign, term in zip(signs, terms):
            question += f" {sign} {term}"
            after = total + term if sign == "+" else total - term
            lines.append(f"{total} {sign} {term} = {after}")
            total = after
        # a problem of the other split is drawn again, and takes no number for its demonstration
        before = rng.bit_generator.state
        if rng.random() >= self.worked:
            lines = []
        rng.bit_generator.state = before
        completion = "\n".join([*lines, f"The answer is {total}."])
        return {"question": question, "answer": str(total), "completion": completion}
