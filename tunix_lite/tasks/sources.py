"""Sources of examples. Every batch is a pure function of (seed, step), so resuming needs no saved
iterator.

A source is anything with `train` and `held_out`, each a sequence of examples; an example is a dict.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any, Protocol

import grain
import numpy as np

from tunix_lite.tasks.fitting import Look
from tunix_lite.tasks.generated import GeneratedSource, check_range
from tunix_lite.tasks.row_files import Rows, RowStream, check_on_error, digest_of_files, rows_of

# examples, at least, before a search for prompts that fit is given up
LOOKED_AT = 2000
# examples that stand for all of them where they are not in memory
SAMPLED = 64
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


def batch_at(examples: Sequence[dict], batch_size: int, seed: int, step: int) -> list[dict]:
    """Batch number `step` of an endless pass over `examples`, shuffled anew in each epoch."""
    if isinstance(examples, RowStream):
        return examples.batch(batch_size, seed, step)
    order = order_of(examples, seed)
    places = range(step * batch_size, (step + 1) * batch_size)
    return [examples[int(order[place])] for place in places]


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
        self._num_fitting = 0
        # beginning of the batch after the last one, by batch size and seed
        self._places: dict[tuple[int, int], _Place] = {}

    def are_of(self, examples: Sequence[dict]) -> bool:
        """True if the looks are of these examples, or of others that are made in the same way."""
        is_equal = is_dataclass(examples) and self.examples == examples
        return self.examples is examples or is_equal

    def batch(self, batch_size: int, seed: int, step: int) -> tuple[list[dict], int]:
        """Raises ValueError if too few fit, of all examples or of the first that are looked at."""
        order = order_of(self.examples, seed)
        place = self._places.pop((batch_size, seed), _Place())
        if step < place.step:
            place = _Place()
        while place.step <= step:
            chosen, passed_over = self._take(order, place, batch_size)
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
            if i not in self._looks:
                self._looks[i] = self._look(self.examples[i])
                self._num_fitting += self._looks[i].fits
            # None: not all were looked at
            num_fitting = self._num_fitting if len(self._looks) == count else None
            # If no example is left out, the batches are those of `batch_at`.
            if not self._looks[i].fits:
                passed_over += 1
            elif i in chosen and num_fitting != count:
                place.waiting.append(i)
            else:
                chosen.append(i)
            is_given_up = passed_over >= max(LOOKED_AT, 100 * batch_size)
            if is_given_up or (num_fitting is not None and num_fitting < min(batch_size, count)):
                raise ValueError(self._too_few(batch_size))
        return chosen, passed_over

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
    """Beginning of a batch. waiting: examples that the batch before it held already."""

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


def order_of(examples: Sequence[dict], seed: int) -> grain.MapDataset:
    """The numbers of all examples, endlessly: each epoch has a shuffle of its own."""
    return grain.MapDataset.range(len(examples)).shuffle(seed=seed).repeat()


# ---- digests: is it the same data


def digest_of_data(source: Source, splits: Sequence[str] = SPLITS) -> dict[str, str]:
    """A digest of each of these splits, the same in every process: of all examples if they are a
    list, else see SAMPLED; of files that are not held in memory, see row_files.digest_of_files."""
    return {name: _digest_of_split(getattr(source, name)) for name in splits}


def _digest_of_split(examples: Sequence[dict]) -> str:
    known = examples.known if isinstance(examples, Rows | RowStream) else {}
    if "digest" in known:
        return known["digest"]
    if isinstance(examples, RowStream):
        known["digest"] = digest_of_files(examples.files)
        return known["digest"]
    num_examples = len(examples)
    places = range(num_examples)
    # made one by one, and perhaps very many
    if not isinstance(examples, list | tuple) and num_examples > SAMPLED:
        places = [i * (num_examples - 1) // (SAMPLED - 1) for i in range(SAMPLED)]
    parts = [str(num_examples)]
    for start in range(0, len(places), AT_ONCE):
        parts.append(digest([examples[i] for i in places[start : start + AT_ONCE]]))
    known["digest"] = digest(parts)
    return known["digest"]


def digest(value: object) -> str:
    """Hashes the values that examples are made of; the same in every process."""
    try:
        text = json.dumps(value, sort_keys=True, default=_as_json)
    except TypeError:
        # keys of several types, or keys that JSON does not have
        text = json.dumps(_with_text_as_keys(value), sort_keys=True, default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_json(value: object) -> Any:
    """Replaces a value that JSON does not have by one that it has."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(digest(item) for item in value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def _with_text_as_keys(value: object) -> Any:
    if isinstance(value, Mapping):
        pairs = ((f"{type(key).__name__} {_as_json(key)}", item) for key, item in value.items())
        return {key: _with_text_as_keys(item) for key, item in pairs}
    is_list = isinstance(value, list | tuple)
    return [_with_text_as_keys(item) for item in value] if is_list else value


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
class Arithmetic(GeneratedSource):
    """Generated sums and differences of whole numbers, with their answers and two ways of saying
    them.

    An example has `question`, `answer`, and `completion`, a demonstration: the answer at once or,
    for a share `worked` of the problems, every step before it.

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

    def __post_init__(self):
        check_range(self, 2, "min_terms", "max_terms")
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
        """See generated.Generator."""
        count = rng.integers(self.min_terms, self.max_terms + 1)
        first, *terms = (int(t) for t in rng.integers(1, self.max_value + 1, count))
        signs = [str(sign) for sign in rng.choice(self.operators, count - 1)]
        question = str(first) + "".join(f" {s} {t}" for s, t in zip(signs, terms))
        total = first
        lines = []
        for sign, term in zip(signs, terms):
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
