"""A task: where examples come from, how they are asked, how they are graded."""

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import groupby, islice
from typing import Any

import numpy as np

from tunix_lite.models.tokenizer import Quoted, Tokenizer
from tunix_lite.plain_text import SHOWN, shortened
from tunix_lite.rewards.math import correct, final_answer
from tunix_lite.rewards.pool import Outcome, Pool, RewardsConfig
from tunix_lite.rewards.worker import number, numbers, text
from tunix_lite.tasks.sources import Rows, batch_at, digest, digest_of_data, fitting_batch_at, where
from tunix_lite.types import Graded, Metrics, Rollout

NO_TEXT = "half of a character (a lone surrogate), which is no text"
SPECIAL_TOKENS = ("text", "control", "error")
# examples of a split that become tokens before the start; of more, so many of them
MEASURED = 10_000
# letters, one of which marks what the fields of an example put into a prompt
FILLERS = range(0x4E00, 0x9FA5)


class SharedError(ValueError):
    """An error that all processes of a run raise at the same place, since all have the same
    examples and grades."""


def raises_shared_error(method: Callable) -> Callable:
    """A method of examples, which are the same on all processes; so its errors are shared."""

    @wraps(method)
    def call(*arguments):
        try:
            return method(*arguments)
        except ValueError as error:
            raise SharedError(str(error)) from error

    return call


@dataclass(frozen=True)
class Reward:
    """A reward function and what it counts in the total.

    Example: Reward(longest_first, 0.5, group=True) ranks the completions of a group.
    """

    # (completion, example) -> number; of a group: (completions, example) -> a number for each
    fn: Callable
    weight: float = 1.0  # factor in the sum of rewards
    group: bool = False  # fn gets all completions of a prompt at once, and compares them


@dataclass(frozen=True)
class TaskConfig:
    """A task as YAML writes it: plain functions and texts, no tokenizer yet."""

    source: Any  # has `train` and `held_out`, sequences of examples (tunix_lite.tasks.sources)
    prompt: str  # the user's message; {names} are fields of the example
    rewards: dict[str, Reward]  # by the name under which they are logged
    # (completion, example) -> 1 if right: eval/accuracy and the marks on samples
    correct: Callable = correct
    extract: Callable = final_answer  # completion -> the answer as text or None, for display
    # `<end_of_turn>` in a row: text: mere letters; control: the token; error
    special_tokens_in_data: str = "text"

    def __post_init__(self):
        if self.special_tokens_in_data not in SPECIAL_TOKENS:
            raise ValueError(
                f"special_tokens_in_data={self.special_tokens_in_data!r}; it is text, control or "
                "error"
            )
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one reward function")
        if taken := {"mean", "std", "groups_that_agree"} & self.rewards.keys():
            raise ValueError(
                f"a reward cannot be called {taken.pop()!r}: the metric of that name means "
                "something else"
            )
        for name, reward in self.rewards.items():
            given = "(completions, example)" if reward.group else "(completion, example)"
            _check_call(f"rewards.{name}.fn", reward.fn, given)
        _check_call("correct", self.correct, "(completion, example)")
        _check_call("extract", self.extract, "(completion)")

    def functions(self) -> dict[str, Callable]:
        """All that is called on completions, by the name in messages: (completion, example) ->
        plain value, or (completions, example) -> list of numbers for those in `group_names`."""
        called = {
            _of(name): partial(numbers if reward.group else number, reward.fn)
            for name, reward in self.rewards.items()
        }
        if self.correct_is == "correct":
            called["correct"] = partial(number, self.correct)
        return called | {"extract": partial(text, self.extract)}

    @property
    def group_names(self) -> list[str]:
        """The functions that get a whole group."""
        return [_of(name) for name, reward in self.rewards.items() if reward.group]

    @property
    def correct_is(self) -> str:
        """Which of the functions says what is right: often it is a reward, and is not called a
        second time."""
        same = (
            _of(name)
            for name, reward in self.rewards.items()
            if not reward.group and _bound(reward.fn) == _bound(self.correct)
        )
        return next(same, "correct")


def _check_call(where: str, fn: Callable, given: str) -> None:
    """Raises ValueError if fn cannot be called with so many arguments."""
    try:
        inspect.signature(fn).bind(*given.split(","))
    except TypeError as error:
        raise ValueError(f"{where} is called with {given} and its settings: {error}") from error


def _of(name: str) -> str:
    return f"reward {name!r}"


def _bound(fn: Callable) -> tuple:
    """What makes two functions the same one: bound settings, too."""
    return (fn.func, fn.args, fn.keywords) if isinstance(fn, partial) else (fn,)


@dataclass(frozen=True)
class Task:
    """Data, prompts and rewards with a tokenizer: an algorithms.algorithm.TaskInterface.

    `max_prompt_length` and `max_new_tokens`: the most tokens of a prompt and of a completion.

    Example: task.prompts([{"question": "1 + 2"}]) -> [[2, 105, 2364, ...]].
    """

    config: TaskConfig
    tokenizer: Tokenizer
    max_prompt_length: int
    max_new_tokens: int
    # a longer prompt: error; truncate: keep its last tokens; drop: take another example
    long_prompts: str = "error"
    pool: Pool | None = None  # where rewards are called; None: where they are asked for
    # gets a line where rewards fail; None: only the metrics have it
    say: Callable[[str], None] | None = None
    # Of n processes, process i grades the completions i, i + n, i + 2n ...; all get all grades.
    process: int = 0
    num_processes: int = 1
    # a value of this process -> the values of all processes
    share: Callable[[Any], list] = lambda value: [value]
    stopping: Any = None  # knows whether the run is to end (distributed.stopping); None: it is not
    # all processes take the same batches; not while one may still find its settings wrong
    is_running: bool = False

    @contextlib.contextmanager
    def with_workers(
        self, settings: RewardsConfig, say: Callable[[str], None], stopping: Any = None
    ) -> Iterator["Task"]:
        """The task whose rewards run as `settings` say. The workers begin to start now, and are
        gone at the end. stopping: knows whether the run is to end."""
        with contextlib.closing(Pool(self.config.functions(), settings)) as pool:
            yield replace(self, pool=pool, say=say, stopping=stopping, is_running=True)

    def batch(self, batch_size: int, seed: int, step: int) -> tuple[list[dict], int]:
        """Training examples number `step`, and how many were dropped on the way to them.

        In a run of several processes all compare what they take. Raises ValueError, on all of them:
        one has others, or finds too few.
        """
        if not self.is_running or self.num_processes == 1:
            return self._batch(batch_size, seed, step)
        taken: tuple = ([], 0)
        error = None
        try:
            taken = self._batch(batch_size, seed, step)
        except ValueError as failed:
            error = str(failed)

        # every process raises, or none does
        everyone = self.share([digest(taken), error])
        errors = [error for _, error in everyone if error is not None]
        if errors:
            raise SharedError(errors[0])
        others = _unlike_the_first([theirs for theirs, _ in everyone])
        if others:
            raise SharedError(
                f"{others} took other examples than process 0: do all hosts have the same data "
                "files?"
            )
        return taken

    def _batch(self, batch_size: int, seed: int, step: int) -> tuple[list[dict], int]:
        train = self.config.source.train
        if self.long_prompts != "drop":
            return batch_at(train, batch_size, seed, step), 0
        return fitting_batch_at(train, batch_size, seed, step, self._length, self.max_prompt_length)

    def held_out(self, count: int) -> list[dict]:
        """The first `count` held-out examples, of those that fit if others are dropped. ValueError
        if too few."""
        examples = self.config.source.held_out
        if len(examples) < count:
            raise ValueError(
                f"evaluation.num_examples={count}, but the held-out set has {len(examples)}"
            )
        if self.long_prompts != "drop":
            return [examples[i] for i in range(count)]
        # examples are made one by one, so no more of them than needed
        everything = (examples[i] for i in range(len(examples)))
        short = (e for e in everything if self._length(e) <= self.max_prompt_length)
        fitting = list(islice(short, count))
        if len(fitting) < count:
            raise ValueError(
                f"evaluation.num_examples={count}, but of {len(examples)} held-out prompts "
                f"{len(fitting)} fit "
                f"generation.max_prompt_length={self.max_prompt_length}; lower the one or raise "
                "the other"
            )
        return fitting

    def digest(self, examples: list[dict]) -> str:
        """What another host has otherwise, if its data files or its tokenizer are not the same."""
        tokens = [self._tokens(example) for example in examples]
        return digest([digest_of_data(self.config.source), examples, tokens])

    def check_examples(self, demonstrates: bool, num_held_out: int) -> str:
        """Checks all examples in memory before the start. Returns a summary of them for people; ""
        if they are not in memory.

        Each must make a prompt and, if `demonstrates`, have a completion; MEASURED of each split
        must not be too long, if that is an error. Raises ValueError with the place of the first
        that is wrong, or with how many are too long.
        """
        train = self.config.source.train
        held_out = self.config.source.held_out
        if not isinstance(train, list | tuple) or not isinstance(held_out, list | tuple):
            return ""
        if not isinstance(train, Rows):
            return self._check_examples(train, held_out, demonstrates, num_held_out)
        settings = (
            self.config.prompt,
            self.config.special_tokens_in_data,
            self.long_prompts,
            demonstrates,
            num_held_out,
        )
        asked = (
            settings,
            str(self.tokenizer.folder),
            self.max_prompt_length,
            self.max_new_tokens,
            id(held_out),
        )
        # a start asks twice
        if asked not in train.known:
            train.known[asked] = self._check_examples(train, held_out, demonstrates, num_held_out)
        return train.known[asked]

    def _check_examples(
        self, train: Sequence, held_out: Sequence, demonstrates: bool, num_held_out: int
    ) -> str:
        asked, special = self._texts(train, demonstrates)
        self._measure(train, len(train), "training", special, demonstrates)
        asked_then, special_then = self._texts(held_out, False)
        self._measure(held_out, num_held_out, "held-out", special_then, False)
        said = [f"{len(train):,} examples to train on, {len(held_out):,} held out"]
        in_training = {*asked}
        if both := sum(prompt in in_training for prompt in asked_then):
            said.append(f"{both:,} of the held-out prompts are training prompts, too")
        if count := len(special) + (0 if held_out is train else len(special_then)):
            taken = {"text": "as mere text", "control": "as control tokens"}[
                self.config.special_tokens_in_data
            ]
            said.append(
                f"special tokens in {count:,} examples are taken {taken} "
                "(task.special_tokens_in_data)"
            )
        return "; ".join(said)

    def ask(self, example: dict) -> str:
        """The user's message for an example."""
        try:
            return self.config.prompt.format(**example)
        except KeyError as error:
            fields = ", ".join(map(str, example))
            fields = fields if len(fields) <= SHOWN else f"{fields[:SHOWN]}…"
            raise ValueError(f"task.prompt names {error}, but an example has {fields}") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            wrong = (
                f"task.prompt={shortened(self.config.prompt)} does not fit the example "
                f"{shortened(example)} ({error})"
            )
            raise ValueError(f"{wrong}; write {{name}} for a field, {{{{ for a brace") from error

    @raises_shared_error
    def prompts(self, examples: list[dict]) -> list[list[int]]:
        """The token ids of each prompt, at most `max_prompt_length` of them. A longer prompt loses
        its beginning, or is a ValueError naming it."""
        rows = [self._tokens(example) for example in examples]
        width = self.max_prompt_length
        if self.long_prompts == "truncate":
            rows = [row[-width:] for row in rows]
        for example, row in zip(examples, rows):
            if len(row) > width:
                raise ValueError(
                    f"{self._place(example)}the prompt {shortened(self.ask(example))} has "
                    f"{len(row)} tokens, more than "
                    f"generation.max_prompt_length={width}; raise it to at least {len(row)}, "
                    "or set generation.long_prompts=truncate or drop"
                )
        return rows

    def truncated(self, examples: list[dict]) -> int:
        """How many prompts are longer than `max_prompt_length`. The repeats of an example, a group,
        are one prompt."""
        return sum(
            self._length(next(group)) > self.max_prompt_length
            for _, group in groupby(examples, key=id)
        )

    @raises_shared_error
    def demonstrations(self, examples: list[dict]):
        """tokens, token_mask, completion_mask, [B, T] each: left-padded prompts, then the
        right-padded `completion` of each example."""
        width = self.max_prompt_length
        shape = (len(examples), width + self.max_new_tokens)
        tokens = np.full(shape, self.tokenizer.pad_id, np.int32)
        token_mask = np.zeros(shape, bool)
        completion_mask = np.zeros(shape, bool)
        for i, (example, prompt) in enumerate(zip(examples, self.prompts(examples))):
            row = self._demonstration(example)
            if len(row) > self.max_new_tokens:
                raise ValueError(
                    f"{self._place(example)}the completion {shortened(example['completion'])} has "
                    f"{len(row)} tokens, "
                    f"more than generation.max_new_tokens={self.max_new_tokens}; raise it to at "
                    f"least {len(row)}"
                )
            begin = width - len(prompt)
            end = width + len(row)
            tokens[i, begin:end] = [*prompt, *row]
            token_mask[i, begin:end] = True
            completion_mask[i, width:end] = True
        return tokens, token_mask, completion_mask

    def grader(self, examples: list[dict]) -> "Grader":
        """Grades the completions of `examples`, one of each, as they come."""
        return Grader(self, examples)

    def grade(self, examples: list[dict], rollout: Rollout) -> Graded:
        """Every completion as text, its rewards, and their metrics."""
        return self.grader(examples).results(rollout)

    # ---- an example as tokens

    def _tokens(self, example: dict) -> list[int]:
        with self._naming(example):
            row = self.tokenizer.prompt(self._message(example))
        if not row:
            wrong = f"the prompt of the example {shortened(example)} has no tokens"
            raise ValueError(
                f"{self._place(example)}{wrong}; task.prompt={shortened(self.config.prompt)}"
            )
        return row

    def _demonstration(self, example: dict) -> list[int]:
        with self._naming(example):
            completion = self._completion(example)
            quoted = self._as_data(completion, self.tokenizer.special_in(completion))
            return self.tokenizer.demonstration(self._message(example), quoted)

    def _completion(self, example: dict) -> str:
        if "completion" not in example:
            raise ValueError(
                "an example for sft needs a `completion`; this one has "
                f"{', '.join(map(str, example))[:SHOWN]}"
            )
        if not isinstance(completion := example["completion"], str):
            raise ValueError(f"a `completion` is a text; this one is {shortened(completion)}")
        return completion

    def _message(self, example: dict) -> str | Quoted:
        message = self.ask(example)
        return self._as_data(message, self._special_in(message, example))

    def _special_in(self, message: str, example: dict) -> list[tuple[int, int]]:
        """Where fields of the example spell special tokens in its message; those of task.prompt
        itself are meant."""
        if not (spelled := self.tokenizer.special_in(message)):
            return []
        filler = next(
            c for c in map(chr, FILLERS) if c not in message and c not in self.config.prompt
        )
        filled = self.config.prompt.format(**_filled(example, filler))
        if len(filled) == len(message) and all(f in (m, filler) for f, m in zip(filled, message)):
            return [(start, end) for start, end in spelled if filler in filled[start:end]]
        if all(message[start:end] not in self.config.prompt for start, end in spelled):
            return spelled
        both = (
            f"task.prompt={shortened(self.config.prompt)} and {shortened(example)} both hold a "
            "special token"
        )
        hidden = "and !r or a format hides which is which"
        raise ValueError(
            f"{both}, {hidden}; leave that out, or set task.special_tokens_in_data=control"
        )

    def _as_data(self, text: str, spelled: list[tuple[int, int]]) -> str | Quoted:
        """The text as the tokenizer shall take it, with special tokens of the data in these
        places."""
        if not spelled or self.config.special_tokens_in_data == "control":
            return text
        if self.config.special_tokens_in_data == "text":
            return Quoted(text, tuple(spelled))
        start, end = spelled[0]
        raise ValueError(
            f"{shortened(text)} holds the special token {text[start:end]!r}; "
            "task.special_tokens_in_data=text takes it "
            "as mere letters, control as the token"
        )

    # ---- where it stands

    @contextlib.contextmanager
    def _naming(self, example: dict) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._place(example)}{error}") from error

    def _place(self, example: dict) -> str:
        """`train.jsonl, line 250: ` of an example that comes from a file; else nothing."""
        for rows in (getattr(self.config.source, name, None) for name in ("train", "held_out")):
            if isinstance(rows, Rows):
                for index, row in enumerate(rows):
                    if row is example:
                        return f"{rows.where(index)}: "
        return ""

    # ---- all examples, before the start

    def _texts(self, examples: Sequence, demonstrates: bool) -> tuple[list[int], list[int]]:
        """A hash of each prompt, and the examples whose fields spell special tokens."""
        asked, special = [], []
        for i, example in enumerate(examples):
            try:
                message = self.ask(example)
                message.encode()
                spells = bool(self._special_in(message, example))
                if demonstrates:
                    spells |= bool(self.tokenizer.special_in(self._completion(example)))
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where(examples, i)}: {NO_TEXT}, in {shortened(message)}"
                ) from error
            except ValueError as error:
                raise ValueError(f"{where(examples, i)}: {error}") from error
            asked.append(hash(message))
            if spells:
                special.append(i)
        return asked, special

    def _measure(
        self, examples: Sequence, most: int, which: str, special: list[int], demonstrates: bool
    ) -> None:
        """Raises ValueError: how many of the first `most` are too long; or the place of one that
        cannot be tokens."""
        count = min(most, len(examples))
        places = (
            range(count)
            if count <= MEASURED
            else [i * (count - 1) // (MEASURED - 1) for i in range(MEASURED)]
        )
        looked = (
            f"{count:,}"
            if len(places) == count
            else f"the {len(places):,} (of {count:,}) looked at"
        )
        lengths = {i: len(self._tokens(examples[i])) for i in special[:MEASURED] if i < count}
        if self.long_prompts == "error":
            lengths |= {i: len(self._tokens(examples[i])) for i in places if i not in lengths}
            _check_lengths(
                lengths,
                self.max_prompt_length,
                f"of {looked} {which} prompts are longer than generation.max_prompt_length",
                ", or set generation.long_prompts=truncate or drop",
                examples,
            )
        if demonstrates:
            _check_lengths(
                {i: len(self._demonstration(examples[i])) for i in {*places, *special[:MEASURED]}},
                self.max_new_tokens,
                f"of {looked} {which} completions are longer than generation.max_new_tokens",
                "",
                examples,
            )

    def _length(self, example: dict) -> int:
        return len(self._tokens(example))


# seconds between two checks whether the run is to end, while grades are waited for
LOOK_SECONDS = 0.2


def _check_lengths(
    lengths: dict[int, int], limit: int, what: str, remedy: str, examples: Sequence
) -> None:
    """lengths: tokens, by the number of the example."""
    too_long = {i: length for i, length in lengths.items() if length > limit}
    if too_long:
        longest = max(too_long, key=too_long.get)
        raise ValueError(
            f"{len(too_long):,} {what}={limit}; the longest has {too_long[longest]:,} tokens "
            f"({where(examples, longest)}); raise it to at least {too_long[longest]}{remedy}"
        )


def _filled(value: Any, filler: str) -> Any:
    """An example with every text in it replaced by one letter, as often as the text has letters."""
    if isinstance(value, str):
        return filler * len(value)
    if isinstance(value, Mapping):
        return {key: _filled(item, filler) for key, item in value.items()}
    return [_filled(item, filler) for item in value] if isinstance(value, list | tuple) else value


class Grader:
    """Grades completions one by one, while others are still sampled; `examples` has one entry per
    completion.

    Completions of one and the same example that stand side by side are a group. A reward of the
    whole group is called when the last of them has ended.
    """

    def __init__(self, task: Task, examples: list[dict]):
        self.task = task
        self.examples = examples
        self.pool = task.pool or Pool(task.config.functions(), RewardsConfig(workers=0))
        self._group_names = task.config.group_names
        self._names = [name for name in task.config.functions() if name not in self._group_names]
        # rows of each group, and the group of each row
        runs = groupby(range(len(examples)), key=lambda row: id(examples[row]))
        self._groups = [list(rows) for _, rows in runs]
        self._group_of = {row: g for g, rows in enumerate(self._groups) for row in rows}
        # row -> its text
        self._completions: dict[int, str] = {}
        # job -> its calls: rows, then groups; None: another process makes them
        self._futures: dict[int, Future | None] = {}
        # for which the run waited
        self.seconds = 0.0

    def submit(self, row: int, tokens: Sequence[int]) -> None:
        """Sends a completion that has ended to the rewards. row: its place in `examples`."""
        began = time.perf_counter()
        completion = self.task.tokenizer.decode(tokens)
        self._completions[row] = completion
        self._futures[row] = self._call(row, completion, row, self._names)

        # the last of its group: now the group can be compared
        group = self._group_of[row]
        rows = self._groups[group]
        if self._group_names and all(other in self._completions for other in rows):
            job = len(self.examples) + group
            completions = [self._completions[other] for other in rows]
            self._futures[job] = self._call(job, completions, row, self._group_names)
        self.seconds += time.perf_counter() - began

    def _call(
        self, job: int, completion: str | list[str], row: int, names: list[str]
    ) -> Future | None:
        if job % self.task.num_processes != self.task.process:
            return None
        return self.pool.submit(completion, self.examples[row], names)

    def results(self, rollout: Rollout) -> Graded:
        """Waits for all grades. Completions that were not submitted are graded now.

        Raises ValueError if a reward failed and rewards.on_error=raise, if all completions were
        dropped, or if processes graded other completions; StopRun if the run was asked to stop
        while it waited.
        """
        tokens = np.asarray(rollout.tokens)
        mask = np.asarray(rollout.completion_mask)
        rows = range(len(self.examples))
        for row in rows:
            if row not in self._completions:
                self.submit(row, tokens[row][mask[row]])

        # wait for the workers of all processes
        began = time.perf_counter()
        completions = [self._completions[row] for row in rows]
        futures = tuple(self._futures[job] for job in sorted(self._futures))
        found = self._found(futures, digest([self.examples, completions]))
        self.seconds += time.perf_counter() - began
        of_rows = self._of_rows(found)
        dropped_B = self._dropped(of_rows)
        failures = self._failures(completions, found, dropped_B)

        # rewards, weighted; of a failed call 0
        config = self.task.config
        each = {name: _values(of_rows, _of(name)) for name in config.rewards}
        total_B = sum(config.rewards[name].weight * values for name, values in each.items())
        right_B = _values(of_rows, config.correct_is) > 0

        kept_B = ~dropped_B
        metrics = {
            "reward/mean": float(total_B[kept_B].mean()),
            "reward/std": float(total_B[kept_B].std()),
            **{f"reward/{name}": float(values[kept_B].mean()) for name, values in each.items()},
            **failures,
            "completions/correct": float(np.mean(right_B)),
            **self._metrics(rollout),
        }
        asked = [self.task.ask(example) for example in self.examples]
        extracted = [None if kind else value for kind, value in (one["extract"] for one in of_rows)]
        # whoever forgets to leave it out will notice
        rewards_B = np.where(dropped_B, np.nan, total_B)
        weights = {name: reward.weight for name, reward in config.rewards.items()}
        return Graded(
            prompts=asked,
            completions=completions,
            rewards=rewards_B,
            correct=right_B,
            extracted=extracted,
            metrics=metrics,
            dropped=dropped_B,
            each=each,
            weights=weights,
        )

    def _of_rows(self, found: list[dict[str, Outcome]]) -> list[dict[str, Outcome]]:
        """The outcomes for each completion; of a group's call, what it says of that completion."""
        count = len(self.examples)
        of_rows = [dict(one) for one in found[:count]]
        for rows, of_group in zip(self._groups, found[count:]):
            for name, (kind, values) in of_group.items():
                for place, row in enumerate(rows):
                    of_rows[row][name] = (kind, values if kind else values[place])
        return of_rows

    def _dropped(self, of_rows: list[dict[str, Outcome]]) -> np.ndarray:
        """[B] bool: a reward of it failed, and rewards.on_error=drop."""
        if self.pool.settings.on_error != "drop":
            return np.zeros(len(of_rows), bool)
        names = [_of(name) for name in self.task.config.rewards]
        return np.array([any(one[name][0] for name in names) for one in of_rows])

    def _metrics(self, rollout: Rollout) -> Metrics:
        """How long completions are, and how long grading took."""
        lengths_B = np.asarray(rollout.completion_mask).sum(axis=1)
        metrics = {
            "completions/mean_length": float(lengths_B.mean()),
            "completions/max_length": int(lengths_B.max()),
            "completions/truncated": float(1 - np.asarray(rollout.finished).mean()),
            "time/rewards": self.seconds,
        }
        if self.task.long_prompts == "truncate":
            # only a prompt that fills its row can have been cut
            full_B = np.asarray(rollout.token_mask)[:, 0]
            full = [example for example, is_full in zip(self.examples, full_B) if is_full]
            metrics["prompts/truncated"] = self.task.truncated(full)
        return metrics

    def _found(self, futures: tuple[Future | None, ...], graded: str) -> list[dict[str, Outcome]]:
        """What was found about each completion, by whichever process. Raises ValueError on all if
        one of them does.

        graded: a digest of it, which must be the same everywhere; held-out examples are compared
        nowhere else.
        """
        stopping = self.task.stopping
        gives_up = (lambda: False) if stopping is None else stopping.is_requested
        own: list | None = []
        error = None
        try:
            own = _results(tuple(future for future in futures if future is not None), gives_up)
        except ValueError as failed:
            error = str(failed)

        # every process raises, or stops, or none does
        everyone = self.task.share([own, error, graded])
        if stopping is not None:
            stopping.stop_if(any(theirs is None for theirs, *_ in everyone))
        errors = [error for _, error, _ in everyone if error is not None]
        if errors:
            raise SharedError(errors[0])
        others = _unlike_the_first([theirs for *_, theirs in everyone])
        if others:
            raise SharedError(
                f"{others} graded other prompts or completions than process 0: do all hosts have "
                "the "
                "same data files and the same tokenizer?"
            )
        count = len(everyone)
        return [everyone[row % count][0][row // count] for row in range(len(futures))]

    def _failures(
        self, completions: list[str], found: list[dict[str, Outcome]], dropped_B: np.ndarray
    ) -> Metrics:
        """How many calls failed in which way, and how many completions are dropped for it; a line
        to the console if there is anything. Raises SharedError if all are dropped."""
        kinds = Counter(kind for one in found for kind, _ in one.values())
        counts = {metric: kinds[kind] for metric, kind in FAILED.items()}
        counts["rewards/dropped"] = int(dropped_B.sum())
        if not any(counts.values()):
            return counts
        count = len(completions)
        first = self._first_failure(completions, found)
        if dropped_B.all():
            raise SharedError(f"all {count} completions were dropped; the first: {first}")
        if self.task.say is not None:
            failed = ", ".join(
                f"{metric.removeprefix('rewards/')} {number}"
                for metric, number in counts.items()
                if number
            )
            self.task.say(
                f"rewards that failed, of {count} completions: {failed}; the first: {first}"
            )
        return counts

    def _first_failure(self, completions: list[str], found: list[dict[str, Outcome]]) -> str:
        of_groups = [[completions[row] for row in rows] for rows in self._groups]
        return next(
            self.pool.describe_failure(name, outcome, texts)
            for texts, one in zip([*completions, *of_groups], found)
            for name, outcome in one.items()
            if outcome[0]
        )


def _unlike_the_first(digests: list[str]) -> str:
    """The processes that have another one than process 0, in words."""
    return " and ".join(f"process {i}" for i, theirs in enumerate(digests) if theirs != digests[0])


# a metric -> the kind of failure of which it counts the calls
FAILED = {
    "rewards/errors": "error",
    "rewards/timeouts": "timeout",
    "rewards/crashes": "crash",
    "rewards/not_numbers": "not_number",
}


def _results(
    futures: tuple[Future, ...], gives_up: Callable[[], bool]
) -> list[dict[str, Outcome]] | None:
    """In the order of rows, whatever that of the workers is; None if gives_up() says so before all
    are there.

    Raises what one of them raises, without the others.
    """
    left = set(futures)
    while left:
        done, left = wait(futures, timeout=LOOK_SECONDS, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            break
        if left and gives_up():
            return None
    for future in (future for future in futures if future in done):
        future.result()
    return [future.result() for future in futures]


def _values(found: list[dict[str, Outcome]], name: str) -> np.ndarray:
    """What a function says of each completion, [B]; 0 where it failed."""
    return np.array([0.0 if failed else value for failed, value in (one[name] for one in found)])
