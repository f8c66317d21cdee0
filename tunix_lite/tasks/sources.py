"""Sources of examples. Every batch is a pure function of (seed, step), so resuming needs no saved
iterator.

A source is anything with `train` and `held_out`, each a sequence of examples; an example is a dict.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from itertools import count
from typing import Any

import grain
import numpy as np

from tunix_lite.tasks.fitting import Look
from tunix_lite.tasks.generated import is_held_out
from tunix_lite.tasks.row_files import (
    ReadAhead,
    Rows,
    RowsOnDisk,
    RowStream,
    check_on_error,
    digest_of_files,
    rows_of,
)

# examples, at least, before a search for prompts that fit is given up
LOOKED_AT = 2000
# examples that stand for all of them where they are not in memory
SAMPLED = 64
# the splits of a source
SPLITS = ("train", "held_out")
# examples that become text together
AT_ONCE = 1000


def batch_at(examples: Sequence[dict], batch_size: int, seed: int, step: int) -> list[dict]:
    """Batch number `step` of an endless shuffled pass over `examples`; each epoch has an order of
    its own."""
    if isinstance(examples, RowStream):
        return examples.batch(batch_size, seed, step)
    order = order_of(examples, seed)

    def batch(number: int) -> list[dict]:
        places = range(number * batch_size, (number + 1) * batch_size)
        return [examples[int(order[place])] for place in places]

    if isinstance(examples, RowsOnDisk):
        ahead = examples.known.setdefault(("ahead", batch_size, seed), ReadAhead())
        return ahead.batch(step, lambda first: map(batch, count(first)))
    return batch(step)


class FittingOrders:
    """The batches of examples that fit, in the orders of all seeds: each example is looked at once.

    In the endless shuffled order of a seed each example that fits comes once an epoch. Batch number
    `step` is the same whatever was asked before.

    Example: FittingOrders(rows, look, 48).batch(16, seed=0, step=3) is the fourth batch, and how
    many examples were passed over on the way to it.
    """

    def __init__(self, examples: Sequence[dict], look: Callable[[dict], Look], limit: int):
        """limit: of the tokens of a prompt, for messages."""
        self.examples = examples
        self.limit = limit
        self._look = look
        # looks, by number of the example
        self._looks: dict[int, Look] = {}
        self._num_fitting: int | None = None
        # beginning of the batch after the last one, by batch size and seed
        self._places: dict[tuple[int, int], _Place] = {}

    def are_of(self, examples: Sequence[dict]) -> bool:
        """True if the looks are of these very examples, or of others that are made in the same
        way."""
        is_equal = is_dataclass(examples) and self.examples == examples
        return self.examples is examples or is_equal

    def batch(self, batch_size: int, seed: int, step: int) -> tuple[list[dict], int]:
        """Raises ValueError if too few fit, of all examples or of the first that are looked at."""
        order = order_of(self.examples, seed)
        place = self._places.pop((batch_size, seed), _Place())
        if step < place.step:
            place = _Place()
        # With so many, an example waits for one batch at most: the batch after this place is right.
        if (self.num_fitting or 0) >= 2 * batch_size and step - place.step > 1:
            epoch, left = divmod((step - 1) * batch_size, self.num_fitting)
            place = _Place(step - 1, epoch * len(self.examples))
            while left:
                left -= self.fits(int(order[place.position]))
                place.position += 1
        while True:
            chosen, passed_over = self._take(order, place, batch_size)
            if place.step > step:
                break
        self._places[batch_size, seed] = place
        return [self.examples[i] for i in chosen], passed_over

    def _take(
        self, order: Sequence[int], place: "_Place", batch_size: int
    ) -> tuple[list[int], int]:
        """The numbers of the next examples, and how many were passed over; moves the place on."""
        count = len(self.examples)
        chosen, place.waiting = place.waiting, []
        place.step += 1
        passed_over = 0
        while len(chosen) < batch_size:
            i = int(order[place.position])
            place.position += 1
            # If no example is left out, the batches are those of `batch_at`.
            fits = self.fits(i)
            if fits and i in chosen and self.num_fitting != count:
                place.waiting.append(i)
            elif fits:
                chosen.append(i)
            else:
                passed_over += 1
            is_given_up = passed_over >= max(LOOKED_AT, 100 * batch_size)
            num_fitting = self.num_fitting
            if is_given_up or (num_fitting is not None and num_fitting < min(batch_size, count)):
                raise ValueError(self._too_few(batch_size))
        return chosen, passed_over

    def fits(self, i: int) -> bool:
        """True if example number i is taken."""
        if i not in self._looks:
            self._looks[i] = self._look(self.examples[i])
        return self._looks[i].fits

    @property
    def num_fitting(self) -> int | None:
        """Counts the examples that are taken; None: not all were looked at."""
        if self._num_fitting is None and len(self._looks) == len(self.examples):
            self._num_fitting = sum(look.fits for look in self._looks.values())
        return self._num_fitting

    def _too_few(self, batch_size: int) -> str:
        """Describes why a batch cannot be filled."""
        looks = self._looks.values()
        fit = sum(look.fits for look in looks)
        others = [look.why for look in looks if look.prompt_length is None]
        if others:
            return (
                f"only {fit} of the {len(looks)} training examples looked at can be taken, and a "
                f"batch takes {batch_size}; the first that cannot: {others[0]}"
            )
        few = "no training prompt fits"
        if fit:
            few = f"only {fit} of the {len(looks)} training prompts looked at fit"
        lengths = sorted(look.prompt_length for look in looks)
        enough = lengths[min(batch_size, len(lengths)) - 1]
        return (
            f"{few} generation.max_prompt_length={self.limit}, and a batch takes {batch_size}; the "
            f"shortest has {lengths[0]} tokens; raise generation.max_prompt_length to at least "
            f"{enough}, or set generation.long_prompts=truncate"
        )


@dataclass
class _Place:
    """Beginning of a batch: its number, the position in the order, and the numbers of examples that
    the batch before it held already, which this one takes."""

    step: int = 0
    position: int = 0
    waiting: list[int] = field(default_factory=list)


def first_fitting(
    examples: Sequence[dict], count: int, look: Callable[[dict], Look] | None
) -> list[dict]:
    """The first `count` held-out examples that fit, or all that do if there are no more than
    `count`. Raises ValueError if too few fit. look: None: all fit."""
    if look is None:
        return [examples[i] for i in range(min(count, len(examples)))]
    fitting = []
    first_unfit = ""
    # examples are made one by one, so no more of them than needed
    for i in range(len(examples)):
        if len(fitting) == count:
            break
        example = examples[i]
        if (why := look(example).why) == "":
            fitting.append(example)
        first_unfit = first_unfit or why
    if len(fitting) < min(count, len(examples)) and (count < len(examples) or not fitting):
        raise ValueError(
            f"evaluation.num_examples={count}, but of {len(examples)} held-out prompts "
            f"{len(fitting)} fit (the first that does not: {first_unfit}); lower num_examples"
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


# ---- digests: is it the same data


def digest_of_data(source: Any, splits: Sequence[str] = SPLITS) -> dict[str, str]:
    """A digest of each of these splits, the same in every process: of all examples if they are a
    list, else see SAMPLED; of files that are not held in memory, see row_files.digest_of_files."""
    return {name: _digest_of_split(getattr(source, name)) for name in splits}


def _digest_of_split(examples: Sequence[dict]) -> str:
    known = examples.known if isinstance(examples, Rows | RowsOnDisk | RowStream) else {}
    if "digest" in known:
        return known["digest"]
    if isinstance(examples, RowStream | RowsOnDisk):
        files = examples.files if isinstance(examples, RowStream) else [examples.file]
        known["digest"] = digest_of_files(files)
        return known["digest"]
    num_examples = len(examples)
    places = range(num_examples)
    # made or read one by one, and perhaps very many
    if not isinstance(examples, list | tuple) and num_examples > SAMPLED:
        places = [i * (num_examples - 1) // (SAMPLED - 1) for i in range(SAMPLED)]
    parts = [str(num_examples)]
    for start in range(0, len(places), AT_ONCE):
        parts.append(digest([examples[i] for i in places[start : start + AT_ONCE]]))
    known["digest"] = digest(parts)
    return known["digest"]


def digest(value: Any) -> str:
    """Hashes the values that examples are made of. The same in every process: it uses no addresses
    and no order of a set."""
    try:
        text = json.dumps(value, sort_keys=True, default=_as_json)
    except TypeError:
        # keys of several types, or keys that JSON does not have
        text = json.dumps(_with_text_as_keys(value), default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_json(value: Any) -> Any:
    """Replaces a value that JSON does not have by one that it has."""
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
