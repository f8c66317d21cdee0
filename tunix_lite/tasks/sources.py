"""Where examples come from. Every batch is a pure function of (seed, step), so resuming needs no
saved iterator.

A source is anything with `train` and `held_out`, each a sequence of examples; an example is a dict.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import grain
import numpy as np

from tunix_lite.tasks.generated import is_held_out
from tunix_lite.tasks.row_files import (
    Rows,
    RowsOnDisk,
    check_on_error,
    digest_of_files,
    rows_of,
)
from tunix_lite.tasks.row_stream import RowStream

# examples, at least, before a search for prompts that fit is given up
LOOKED_AT = 2000
# examples that stand for all of them where they are not in memory
SAMPLED = 64
# threads that read examples ahead of the run
READ_THREADS = 2
# examples that become text together
AT_ONCE = 1000


def batch_at(examples: Sequence[dict], batch_size: int, seed: int, step: int) -> list[dict]:
    """Batch number `step` of an endless shuffled pass over `examples`; each epoch has an order of
    its own."""
    if isinstance(examples, RowStream):
        return examples.batch(batch_size, seed, step)
    if isinstance(examples, RowsOnDisk):
        key = ("ahead", batch_size, seed)
        if key not in examples.known:
            examples.known[key] = ReadAhead(examples, batch_size, seed)
        return examples.known[key].batch(step)
    order = order_of(examples, seed)
    return [examples[order[step * batch_size + i]] for i in range(batch_size)]


def news_of(examples: Sequence[dict]) -> str:
    """What is new of malformed rows since it was asked last; "" if nothing is."""
    return examples.news() if isinstance(examples, RowStream) else ""


class ReadAhead:
    """The batches of examples that must be read first: threads of grain read those that come next,
    while the run makes a step. Any other batch can be asked for, too."""

    def __init__(self, examples: Sequence[dict], batch_size: int, seed: int):
        self._dataset = order_of(examples, seed).map(lambda i: examples[int(i)])
        self._batch_size = batch_size
        self._next_step: int | None = None
        self._iterator: Any = None

    def batch(self, step: int) -> list[dict]:
        """The same as `batch_at` of examples in memory."""
        # a start, a resumed run, or one that asks for a step again
        if step != self._next_step:
            if self._iterator is not None:
                self._iterator.close()
            options = grain.ReadOptions(
                num_threads=READ_THREADS, prefetch_buffer_size=2 * self._batch_size
            )
            rest = self._dataset[step * self._batch_size :]
            self._iterator = iter(rest.to_iter_dataset(options))
        self._next_step = step + 1
        return [next(self._iterator) for _ in range(self._batch_size)]


def fitting_batch_at(
    examples: Sequence[dict],
    batch_size: int,
    seed: int,
    step: int,
    length: Callable[[dict], int],
    limit: int,
) -> tuple[list[dict], int]:
    """`batch_at` with no prompt longer than `limit`, and how many examples were passed over for
    being longer. ValueError for a stream, whose rows come in one order.

    An example that does not fit gives its place to the next in the order, from the end of this
    batch on, that fits and that the batch does not hold. `length` is example -> tokens. Raises
    ValueError if too few fit, of all examples or of the first that are looked at.
    """
    if isinstance(examples, RowStream):
        raise ValueError(
            "generation.long_prompts=drop takes other rows, and task.shuffle_buffer reads them in "
            "order; set generation.long_prompts=truncate"
        )
    order = order_of(examples, seed)
    at = (step + 1) * batch_size
    chosen = [order[i] for i in range(at - batch_size, at)]
    # of all examples looked at, each once
    lengths = {i: length(examples[i]) for i in set(chosen)}
    gaps = [place for place, i in enumerate(chosen) if lengths[i] > limit]
    most = min(len(examples), max(LOOKED_AT, 100 * batch_size))
    while gaps:
        # of few examples, at the latest when the next epoch ends
        if len(lengths) >= most:
            raise ValueError(_too_few_fit(sorted(lengths.values()), batch_size, limit))
        i = order[at]
        at += 1
        # else the batch holds it, or it is too long
        if i not in lengths:
            lengths[i] = length(examples[i])
            if lengths[i] <= limit:
                chosen[gaps.pop(0)] = i
    return [examples[i] for i in chosen], sum(n > limit for n in lengths.values())


def first_fitting(
    examples: Sequence[dict], count: int, length: Callable[[dict], int] | None, limit: int
) -> list[dict]:
    """The first `count` held-out examples, or all if there are fewer, with no prompt longer than
    `limit`. Raises ValueError if too few fit.

    length: example -> tokens; None: all fit.
    """
    enough = min(count, len(examples))
    if length is None:
        return [examples[i] for i in range(enough)]
    # examples are made one by one, so no more of them than needed
    everything = (examples[i] for i in range(len(examples)))
    fitting = list(islice((e for e in everything if length(e) <= limit), count))
    if len(fitting) < enough:
        raise ValueError(
            f"evaluation.num_examples={count}, but of {len(examples)} held-out prompts "
            f"{len(fitting)} fit "
            f"generation.max_prompt_length={limit}; lower num_examples or raise "
            "max_prompt_length"
        )
    return fitting


class Walk:
    """Goes through an order of examples from a position on, each example at most once, until all
    were seen; through few of them, `count` positions, though they come again.

    Example: `for position, place in Walk(order_of(examples, seed), 0, len(examples), 16): ...`;
    after a `break`, `position` is where the next walk begins.
    """

    def __init__(self, order: Sequence[int], position: int, num_examples: int, count: int):
        self.position = position
        self._order = order
        self._num_examples = num_examples
        self._count = count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(position in the order, number of the example)."""
        seen = set()
        few = self._num_examples < self._count
        end = self.position + (self._count if few else 2 * self._num_examples)
        while self.position < end and (few or len(seen) < self._num_examples):
            position = self.position
            place = int(self._order[position])
            self.position += 1
            if few or place not in seen:
                seen.add(place)
                yield position, place


def order_of(examples: Sequence[dict], seed: int) -> grain.MapDataset:
    """The numbers of all examples, endlessly: each epoch has a shuffle of its own."""
    return grain.MapDataset.range(len(examples)).shuffle(seed=seed).repeat()


def _too_few_fit(lengths: list[int], batch_size: int, limit: int) -> str:
    fit = sum(n <= limit for n in lengths)
    few = (
        f"only {fit} of the {len(lengths)} training prompts looked at fit"
        if fit
        else "no training prompt fits"
    )
    enough = lengths[min(batch_size, len(lengths)) - 1]
    return (
        f"{few} generation.max_prompt_length={limit}, and a batch takes {batch_size}; the shortest "
        f"has {lengths[0]} "
        f"tokens; raise generation.max_prompt_length to at least {enough}, or set "
        "generation.long_prompts=truncate"
    )


# ---- digests: is it the same data


def digest_of_data(source: Any) -> dict[str, str]:
    """A digest of each split, the same in every process: of all examples if they are a list, else
    see SAMPLED; of files that are not held in memory, see row_files.digest_of_files."""
    return {name: _digest_of_split(getattr(source, name)) for name in ("train", "held_out")}


def _digest_of_split(examples: Sequence[dict]) -> str:
    if isinstance(examples, Rows):
        if "digest" not in examples.known:
            examples.known["digest"] = _digest_of_examples(examples)
        return examples.known["digest"]
    if isinstance(examples, RowStream | RowsOnDisk):
        if "digest" not in examples.known:
            files = examples.files if isinstance(examples, RowStream) else [examples.file]
            examples.known["digest"] = digest_of_files(files)
        return examples.known["digest"]
    return _digest_of_examples(examples)


def _digest_of_examples(examples: Sequence[dict]) -> str:
    count = len(examples)
    places = range(count)
    # made or read one by one, and perhaps very many
    if not isinstance(examples, list | tuple) and count > SAMPLED:
        places = [i * (count - 1) // (SAMPLED - 1) for i in range(SAMPLED)]
    parts = [str(count)]
    for start in range(0, len(places), AT_ONCE):
        parts.append(digest([examples[i] for i in places[start : start + AT_ONCE]]))
    return digest(parts)


def digest(value: Any) -> str:
    """Of what examples are made of. The same in every process: not of addresses, nor of the order
    of a set."""
    try:
        text = json.dumps(value, sort_keys=True, default=_as_json)
    except TypeError:
        # keys of several types, or keys that JSON does not have
        text = json.dumps(_with_text_as_keys(value), default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_json(value: Any) -> Any:
    """What JSON does not have, as something that it does."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(digest(item) for item in value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def _with_text_as_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        pairs = (
            (f"{type(key).__name__} {_as_json(key)}", _with_text_as_keys(item))
            for key, item in value.items()
        )
        return dict(sorted(pairs, key=lambda pair: pair[0]))
    return (
        [_with_text_as_keys(item) for item in value] if isinstance(value, list | tuple) else value
    )


# ---- sources


@dataclass(frozen=True)
class Jsonl:
    """Examples from files with one JSON object a line; what stands in a file is the whole of that
    split.

    Example: `Jsonl("data/train.jsonl", "data/held_out.jsonl").train[0]` is the first line's object.
    """

    train_file: str  # path
    held_out_file: str  # path
    on_error: str = "raise"  # a malformed row: raise; skip: leave it out, and say how many

    def __post_init__(self):
        check_on_error(self.on_error)

    @cached_property
    def train(self) -> Rows:
        return rows_of(self.train_file, "jsonl", self.on_error)

    @cached_property
    def held_out(self) -> Rows:
        return rows_of(self.held_out_file, "jsonl", self.on_error)


@dataclass(frozen=True)
class Arithmetic:
    """Generated sums and differences of whole numbers, with their answers and two ways of saying
    them.

    A problem belongs to the held-out set or to the training stream by a hash of its text, so the
    two never overlap. An example has `question`, `answer`, and `completion`, a demonstration: the
    answer at once or, for a share `worked` of the problems, every step before it.

    Example: {"question": "25 + 19 + 15 + 8", "answer": "67", ...}.
    """

    # Fewest numbers in a problem.
    min_terms: int = 4
    # Most numbers in a problem.
    max_terms: int = 4
    # Largest number in a problem.
    max_value: int = 29
    # Operators between the numbers.
    operators: tuple[str, ...] = ("+", "-")
    # Share of demonstrations for sft that show every step, from 0 to 1.
    worked: float = 0.45
    # Problems in one pass of the training data.
    num_train: int = 1_000_000
    # Held-out problems, for evaluation. None of them is trained on.
    num_held_out: int = 256

    def __post_init__(self):
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(
                f"min_terms={self.min_terms}, max_terms={self.max_terms}: need 2 <= min_terms <= "
                "max_terms"
            )
        if self.max_value < 9:
            raise ValueError(
                f"max_value={self.max_value} leaves too few different problems; use at least 9"
            )
        if not self.operators or set(self.operators) - {"+", "-"}:
            raise ValueError(f"operators={list(self.operators)}: choose from '+' and '-'")
        if not 0 <= self.worked <= 1:
            raise ValueError(f"worked={self.worked} is a share, from 0 to 1")
        if min(self.num_train, self.num_held_out) < 1:
            raise ValueError(
                f"num_train={self.num_train}, num_held_out={self.num_held_out}: both must be at "
                "least 1"
            )

    @property
    def train(self) -> "Problems":
        return Problems(self, held_out=False, count=self.num_train)

    @property
    def held_out(self) -> "Problems":
        return Problems(self, held_out=True, count=self.num_held_out)


@dataclass(frozen=True)
class Problems:
    """One split of `Arithmetic`: example i is made, not stored, and is the same on every
    machine.

    Example: Arithmetic().train[0]["answer"] -> "67".
    """

    settings: Arithmetic
    held_out: bool
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng((int(self.held_out), int(index)))
        while True:
            terms, signs = self._draw(rng)
            question = str(terms[0]) + "".join(f" {s} {t}" for s, t in zip(signs, terms[1:]))
            if is_held_out(question) == self.held_out:
                return self._example(
                    question, terms, signs, bool(rng.random() < self.settings.worked)
                )

    def _draw(self, rng: np.random.Generator) -> tuple[list[int], list[str]]:
        count = rng.integers(self.settings.min_terms, self.settings.max_terms + 1)
        terms = [int(t) for t in rng.integers(1, self.settings.max_value + 1, count)]
        return terms, [str(s) for s in rng.choice(self.settings.operators, count - 1)]

    def _example(self, question: str, terms: list[int], signs: list[str], worked: bool) -> dict:
        total = terms[0]
        steps = []
        for sign, term in zip(signs, terms[1:]):
            after = total + term if sign == "+" else total - term
            steps.append(f"{total} {sign} {term} = {after}")
            total = after
        lines = [*(steps if worked else []), f"The answer is {total}."]
        return {"question": question, "answer": str(total), "completion": "\n".join(lines)}
