"""A task: where examples come from, how they are asked, how they are graded."""

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from tunix_lite.basics.errors import check_choices
from tunix_lite.basics.plain_text import shortened
from tunix_lite.basics.types import Graded, Prompts, Rollout, left_padded
from tunix_lite.environments.environment import missing_method
from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.models.tokenizer import Tokenizer, read_until
from tunix_lite.rewards.math import correct, final_answer
from tunix_lite.rewards.model import RewardModel
from tunix_lite.rewards.scores import CompletionText, number, numbers, text
from tunix_lite.tasks.conversations import (
    ENVIRONMENT,
    EnvironmentPartner,
    conversation_metrics,
    of_conversations,
    turn_rewards,
    won,
)
from tunix_lite.tasks.grading import (
    FAILED,
    call_metrics,
    completion_metrics,
    dropped_of,
    reasons_of,
    reward_metrics,
    shared_outcomes,
    values_of,
)
from tunix_lite.tasks.processes import (
    ALONE,
    Processes,
    SharedError,
    same_on_all,
    shared_errors,
)
from tunix_lite.tasks.prompt_text import PromptTemplate, PromptText
from tunix_lite.tasks.reward_models import RewardScorer
from tunix_lite.tasks.sources import (
    SPLITS,
    NextThatFits,
    batch_at,
    digest,
    digest_of_data,
    spread,
)
from tunix_lite.workers.pool import FAILURES, IS_NONE, Pool, RewardsConfig
from tunix_lite.workers.process import Outcome

CHOICES = {
    "special_tokens_in_data": ("text", "control", "error"),
    "learned_turns": ("last", "all"),
}


@dataclass(frozen=True)
class Reward:
    """A reward function and its weight in the total.
    Example: Reward(longest_first, 0.5, group=True) ranks the completions of a group."""

    # (completion, example) -> number; of a group: (completions, example) -> a number for each; or a
    # RewardModel, which a run asks by itself
    fn: Callable
    weight: float = 1.0  # factor in the sum of rewards
    group: bool = False  # fn gets all completions of a prompt at once, and compares them


def as_rewards(rewards: Mapping[str, Reward | RewardModel]) -> dict[str, Reward]:
    """The same with a reward model that stands alone as a reward of weight 1."""
    return {
        name: one if isinstance(one, Reward) else Reward(one) for name, one in rewards.items()
    }


# names of metrics reward/NAME that mean something else
TAKEN = {ENVIRONMENT, "mean", "std", "min", "max"}
TAKEN |= {f"groups_{which}" for which in ("that_agree", "all_zero", "all_one", "mixed")}


@dataclass(frozen=True)
class TaskLengthsConfig:
    """Usual lengths of the prompts and the completions of a task, in tokens: the values of
    generation.max_prompt_length and max_new_tokens where nobody sets them.
    Example: `TaskLengthsConfig(256, 512)` for GSM8K."""

    # Longest prompt, in tokens.
    max_prompt_length: int
    # Longest completion, in tokens.
    max_new_tokens: int


@dataclass(frozen=True)
class TaskConfig:
    """A task as YAML writes it: plain functions and texts, no tokenizer yet.
    Example: `TaskConfig(Arithmetic(), "What is {question}?", {"correct": Reward(correct)})`."""

    # conf/task/arithmetic.yaml explains each setting
    source: Any  # has `train` and `held_out`, sequences of examples (tunix_lite.tasks.sources)
    prompt: str | None
    rewards: dict[str, Reward | RewardModel]
    correct: Callable = correct
    extract: Callable = final_answer
    special_tokens_in_data: str = "text"
    system: str | None = None
    learned_turns: str = "last"
    environment: Callable | None = None
    lengths: TaskLengthsConfig | None = None

    def __post_init__(self):
        check_choices(self, CHOICES)
        if self.learned_turns == "all" and self.prompt is not None:
            raise ValueError(
                "learned_turns=all would change nothing with task.prompt: it is of examples whose "
                "conversation is in `messages`; write task.learned_turns=last"
            )
        if not self.rewards and self.environment is None:
            raise ValueError("rewards is empty: name at least one reward function")
        made = self.environment
        if inspect.isroutine(made) or isinstance(made, partial):
            _check_call("environment is a function that makes one, and", made, "")
        elif made is not None and (name := missing_method(made)):
            raise ValueError(f"environment is a {type(made).__name__}, which has no {name}")
        if taken := (TAKEN | {f"{name}_std" for name in self.rewards}) & self.rewards.keys():
            raise ValueError(
                f"a reward cannot be called {taken.pop()!r}: the metric of that name means "
                "something else"
            )
        object.__setattr__(self, "rewards", as_rewards(self.rewards))
        for name, reward in self.rewards.items():
            if name in self.reward_models and not reward.group:
                continue
            arguments = "completions, example" if reward.group else "completion, example"
            _check_call(f"rewards.{name}.fn", reward.fn, arguments)
            if not np.isfinite(reward.weight):
                raise ValueError(f"rewards.{name}.weight={reward.weight} is no finite number")
        if self.environment is not None and self.reward_models:
            first = next(iter(self.reward_models))
            raise ValueError(
                f"rewards.{first} is a reward model, which reads single turns, and "
                "task.environment makes conversations; leave one of the two out"
            )
        if self.correct not in self.reward_models.values():
            _check_call("correct", self.correct, "completion, example")
        _check_call("extract", self.extract, "completion")

    # whether its examples are rows that hold as many tokens as fit (tasks/text.py)
    packs_rows = False

    def task(self, *arguments: Any, **settings: Any) -> "Task":
        """Its Task, with these arguments after the settings."""
        return Task(self, *arguments, **settings)

    def check_algorithm(self, needs_demonstrations: bool) -> None:
        """Raises ValueError if the algorithm cannot learn from this task. needs_demonstrations: it
        learns from rows; else from completions that it samples."""

    @property
    def template(self) -> PromptTemplate:
        """Template of the messages of an example."""
        return PromptTemplate(self.prompt, self.system, self.learned_turns)

    def texts(self, limit: int | None) -> Iterator[str]:
        """The texts of training examples that a model reads or writes: messages and what answers
        them. limit: of the examples, which are evenly spread; None: all. Raises ValueError."""
        rows = self.source.train
        for i in spread(len(rows), limit or len(rows)):
            messages = self.template.messages(rows[i])
            if self.prompt is None:
                messages = [*messages, *self.template.split(rows[i])[1]]
            yield from (message.text for message in messages)
            for name in ("completion", "chosen", "rejected"):
                answer = rows[i].get(name)
                if isinstance(answer, str):
                    yield answer

    def functions(self) -> dict[str, Callable]:
        """Returns all functions that are called on completions, by the name in messages:
        (completion, example) -> plain value, or (completions, example) -> list of numbers for those
        in `group_names`."""
        called = {
            _of(name): partial(numbers if reward.group else number, reward.fn)
            for name, reward in self.rewards.items()
            if name not in self.reward_models
        }
        # without rewards the environment says what is right
        if self.rewards and self.correct_is == "correct":
            called["correct"] = partial(number, self.correct)
        return called | {"extract": partial(text, self.extract)}

    @property
    def reward_models(self) -> dict[str, RewardModel]:
        """The rewards that are networks on the devices, by name. They are no functions."""
        fns = {name: reward.fn for name, reward in self.rewards.items()}
        return {name: fn for name, fn in fns.items() if isinstance(fn, RewardModel)}

    @property
    def weights(self) -> dict[str, float]:
        """Returns the weight of each reward."""
        return {name: reward.weight for name, reward in self.rewards.items()}

    @property
    def group_names(self) -> list[str]:
        """The functions that get a whole group."""
        return [_of(name) for name, reward in self.rewards.items() if reward.group]

    @property
    def correct_is(self) -> str:
        """Names the function that says what is right, often a reward."""
        for name, reward in self.rewards.items():
            if not reward.group and _bound(reward.fn) == _bound(self.correct):
                return _of(name)
        return "correct"


def _check_call(where: str, fn: Callable[..., object], arguments: str) -> None:
    """Raises ValueError if fn cannot be called with so many arguments."""
    try:
        inspect.signature(fn).bind(*filter(None, arguments.split(",")))
    except TypeError as error:
        raise ValueError(
            f"{where} is called with ({arguments}) and its settings: {error}"
        ) from error


def _of(name: str) -> str:
    return f"reward {name!r}"


def _bound(fn: Callable[..., object]) -> tuple:
    """Returns a key that is equal for equal functions: bound settings count, too."""
    if isinstance(fn, partial):
        return (fn.func, fn.args, fn.keywords)
    return (fn,)


class _TooLong(ValueError):
    """A prompt, or what is to be learned, has more tokens than the run takes."""


@dataclass(frozen=True)
class Task:
    """Data, prompts and rewards with a tokenizer: an algorithms.algorithm.TaskInterface.
    `max_prompt_length` and `max_new_tokens`: the most tokens of a prompt and of a completion.
    Example: task.prompts([{"question": "1 + 2"}]) -> [[2, 105, 2364, ...]]."""

    config: TaskConfig
    tokenizer: Tokenizer
    max_prompt_length: int
    max_new_tokens: int
    # what is too long: error; truncate: a prompt keeps its last tokens, and what is learned its
    # first; drop: take another example
    long_prompts: str = "error"
    pool: Pool | None = (
        None  # workers that call rewards; None: the run's own process calls them
    )
    # gets a line where rewards fail; None: only the metrics have it
    say: Callable[[str], None] | None = None
    # processes that take the same batches and share the grades; ALONE until settings are checked
    processes: Processes = ALONE
    conversation: ConversationConfig = ConversationConfig()
    # workers that run environments; None: completions are single turns, or no worker has begun yet
    environments: EnvironmentPool | None = None
    # loaded reward models by the names of their rewards; {}: there are none, or none is loaded
    scorers: Mapping[str, RewardScorer] = field(default_factory=dict)
    # the fields of an example that the algorithm learns from; (): completions are sampled
    learned: tuple[str, ...] = ()
    # how an epoch ends (training.last_batch); None: the data goes round without end
    last_batch: str | None = None
    # the examples that fit, by what that depends on; all that `replace` makes share it
    rows_that_fit: dict = field(default_factory=dict, compare=False, repr=False)

    @contextlib.contextmanager
    def with_workers(
        self,
        settings: RewardsConfig,
        say: Callable[[str], None],
        processes: Processes = ALONE,
        conversation: ConversationConfig | None = None,
    ) -> Iterator["Task"]:
        """Starts the workers of rewards, as `settings` say, and of environments, as `conversation`
        says. Yields the task that uses them. The workers are gone at the end."""
        conversation = conversation or self.conversation
        environments = contextlib.nullcontext()
        if self.config.environment is not None:
            environments = EnvironmentPool(self.config.environment, conversation)
        pool = contextlib.closing(Pool(self.config.functions(), settings))
        with pool as pool, environments as environments:
            started = {
                "pool": pool,
                "environments": environments,
                "conversation": conversation,
            }
            yield replace(self, say=say, processes=processes, **started)

    @cached_property
    def text(self) -> PromptText:
        """Maker of the text and tokens of an example."""
        config = self.config
        return PromptText(
            config.template,
            config.special_tokens_in_data,
            self.tokenizer,
            dict(getattr(config.environment, "template_variables", {})),
        )

    # ---- which examples are taken

    def batch(self, batch_size: int, seed: int, step: int) -> list[dict]:
        """Training examples number `step`. ValueError on all: one has others, or too few fit."""

        def take() -> list[dict]:
            rows = self.fitting
            if len(rows) < min(batch_size, len(self.config.source.train)):
                why = next(filter(None, map(self.why_left_out, self.config.source.train)))
                raise ValueError(
                    f"only {len(rows)} of {len(self.config.source.train):,} training examples can "
                    f"be taken, and a batch takes {batch_size}; the first that cannot: {why}"
                )
            return batch_at(rows, batch_size, seed, step, self.last_batch)

        return same_on_all(self.processes, take)

    @property
    def fitting(self) -> Sequence[dict]:
        """The training examples that are taken; batches and epochs are of them. Looked at once."""
        train = self.config.source.train
        if not self.leaves_out:
            return train
        if not isinstance(train, list | tuple):
            return NextThatFits(train, self.why_left_out)
        lengths = (self.max_prompt_length, self.max_new_tokens, self.long_prompts)
        key = (id(self.config), *lengths, self.learned)
        if key not in self.rows_that_fit:
            rows = [row for row in train if not self.why_left_out(row)]
            # Keeps the settings alive: their id is in the key.
            self.rows_that_fit[key] = rows, self.config
        return self.rows_that_fit[key][0]

    @property
    def skips(self) -> bool:
        """True if rows that would be an error are left out (task.on_error=skip)."""
        return getattr(self.config.source, "on_error", "raise") == "skip"

    @property
    def leaves_out(self) -> bool:
        """True if some examples may be left out; else one that cannot be taken is an error."""
        return self.long_prompts == "drop" or self.skips

    @property
    def other_remedy(self) -> str:
        """What else than a higher limit takes an example that is too long."""
        others = "truncate" if self.long_prompts == "drop" else "truncate or drop"
        return f"or set generation.long_prompts={others}"

    def why_left_out(self, example: dict) -> str:
        """Tells why an example is left out, or "". Raises ValueError where no setting does so."""
        try:
            self._prompt(example)
            for name in self.learned:
                self._demonstration(example, name)
        except ValueError as error:
            if not self.skips and not isinstance(error, _TooLong):
                raise
            return str(error)
        return ""

    def held_out(self, count: int, is_learned: bool = False) -> list[dict]:
        """The first `count` held-out examples that fit. Raises ValueError if too few do.
        is_learned: with what the algorithm learns from, for its loss; else their prompts are
        enough."""
        reader = self if is_learned else replace(self, learned=())
        rows = self.config.source.held_out
        # made one by one, so no more of them than needed
        taken = (row for row in rows if not (self.leaves_out and reader.why_left_out(row)))
        fitting = list(islice(taken, count))
        if len(fitting) < min(count, len(rows)) and (count < len(rows) or not fitting):
            setting = "loss_examples" if is_learned else "num_examples"
            why = next(filter(None, map(reader.why_left_out, rows)))
            raise ValueError(
                f"evaluation.{setting}={count}, but of {len(rows)} held-out prompts {len(fitting)} "
                f"fit (the first that does not: {why}); lower {setting}"
            )
        return fitting

    def references(self, examples: list[dict], field: str | None = None) -> list[str] | None:
        """The text of each example that a completion should resemble: in this field, or without one
        the demonstration that SFT learns from. None: there are none, or not of every example."""
        if field is not None:
            return [str(example[field]) for example in examples]
        if self.learned != ("completion",):
            return None
        try:
            return [self.text.completion(example)[0].text for example in examples]
        # an example has no demonstration
        except ValueError:
            return None

    # ---- tokens

    @shared_errors()
    def prompts(self, examples: list[dict]) -> Prompts:
        """The token ids of each prompt; a longer one loses its beginning, or is a ValueError."""
        return [self._prompt(example) for example in examples]

    def _prompt(self, example: dict) -> list[int]:
        row = self.text.prompt(example)
        width = self.max_prompt_length
        if len(row) > width and self.long_prompts != "truncate":
            raise _TooLong(
                f"{self.text.place(example)}the prompt {shortened(self.text.ask(example))} has "
                f"{len(row)} tokens, more than generation.max_prompt_length={width}; raise it to "
                f"at least {len(row)}, {self.other_remedy}"
            )
        return row[-width:]

    def _demonstration(self, example: dict, name: str) -> tuple[list[int], list[bool]]:
        row, learned = self.text.demonstration(example, name)
        most = self.max_new_tokens
        if len(row) > most and self.long_prompts != "truncate":
            what = name if name == "completion" else f"`{name}`"
            shown = shortened(self.text.completion(example, name)[0].text)
            raise _TooLong(
                f"{self.text.place(example)}the {what} {shown} has {len(row)} tokens, more than "
                f"generation.max_new_tokens={most}; raise it to at least {len(row)}, "
                f"{self.other_remedy}"
            )
        return row[:most], learned[:most]

    @shared_errors()
    def prompts_with(
        self, examples: list[dict], prompt: str, max_length: int | None
    ) -> Prompts:
        """The token ids of each prompt with another message, {names} in which are fields of the
        example. Raises ValueError, naming the example, if it has no such field, or for more tokens
        than max_length; None: max_prompt_length."""
        text = replace(self.text, template=replace(self.config.template, prompt=prompt))
        limit = self.max_prompt_length if max_length is None else max_length
        rows = [text.prompt(example) for example in examples]
        lengths = list(map(len, rows))
        longest = max(lengths)
        if longest > limit:
            place = text.place(examples[lengths.index(longest)])
            raise ValueError(
                f"{place}a prompt with it has {longest} tokens, more than {limit}; "
                f"set max_prompt_length={longest} beside it"
            )
        return rows

    @shared_errors()
    def demonstrations(
        self, examples: list[dict], name: str = "completion"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens, token_mask, completion_mask, [B, T] each: left-padded prompts, then what each
        example has in the field `name`, right-padded. One that is too long loses its end, or is a
        ValueError naming it."""
        middle = self.max_prompt_length
        shape = (len(examples), middle + self.max_new_tokens)
        tokens_BT = np.full(shape, self.tokenizer.pad_id, np.int32)
        token_mask_BT = np.zeros(shape, bool)
        completion_mask_BT = np.zeros(shape, bool)
        for i, example in enumerate(examples):
            prompt = self._prompt(example)
            row, learned = self._demonstration(example, name)
            begin = middle - len(prompt)
            end = middle + len(row)
            tokens_BT[i, begin:end] = [*prompt, *row]
            token_mask_BT[i, begin:end] = True
            completion_mask_BT[i, middle:end] = learned
        return tokens_BT, token_mask_BT, completion_mask_BT

    @shared_errors()
    def conversations(
        self, examples: list[dict], name: str = "completion"
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens and token_mask, [B, T] each: whole conversations with the answers in the field
        `name`, left-padded: the last column is the token at which a reward model is read. One that
        is too long loses its beginning with generation.long_prompts=truncate, else it is a
        ValueError naming it."""
        width = self.max_prompt_length + self.max_new_tokens
        rows = []
        for example in examples:
            ids = self.text.conversation(example, self.text.completion(example, name))
            row = read_until(ids, self.tokenizer.pad_id)
            if len(row) > width and self.long_prompts != "truncate":
                raise _TooLong(
                    f"{self.text.place(example)}the conversation with `{name}` has {len(row)} "
                    f"tokens, more than generation.max_prompt_length + max_new_tokens={width}; "
                    f"raise one of them by {len(row) - width}, {self.other_remedy}"
                )
            rows.append(row[-width:])
        return left_padded(rows, width, self.tokenizer.pad_id)

    def segments(self, examples: list[dict]) -> np.ndarray | None:
        """The documents of each example's tokens, as Batch.segment_ids; None: each is one."""
        return None

    def truncated(self, examples: list[dict]) -> int:
        """Counts the prompts that are longer than `max_prompt_length`."""
        lengths = [len(self.text.prompt(example)) for example in examples]
        return sum(length > self.max_prompt_length for length in lengths)

    def digest(self, examples: list[dict], splits: Sequence[str] = SPLITS) -> str:
        """Differs on a host with other data files (of `splits`) or another tokenizer."""
        tokens = [self.text.prompt(example) for example in examples]
        return digest([digest_of_data(self.config.source, splits), examples, tokens])

    # ---- rollouts and grades

    def partner(
        self, examples: list[dict], num_generations: int = 1
    ) -> EnvironmentPartner | None:
        """Starts the environments that answer the turns of conversations: num_generations for each
        example, side by side. None without an environment. Raises SharedError if one fails and
        conversation.on_error=raise."""
        if self.config.environment is None:
            return None
        return EnvironmentPartner(
            self.text,
            _repeated(examples, num_generations),
            self.environments,
            self.conversation,
            self.processes,
            self.max_prompt_length,
        )

    def grader(self, examples: list[dict], num_generations: int = 1) -> "Grader":
        """Grades num_generations completions of each example as they come, side by side."""
        return Grader(self, examples, num_generations)

    def grade(
        self, examples: list[dict], rollout: Rollout, num_generations: int = 1
    ) -> Graded:
        """Every completion as text, its rewards, and their metrics."""
        return self.grader(examples, num_generations).results(rollout)


def _repeated(examples: list[dict], num_generations: int) -> list[dict]:
    """The example of each completion."""
    return [example for example in examples for _ in range(num_generations)]


class Grader:
    """Grades completions one by one, while others are still sampled: those of example g are the
    rows g * num_generations and the following. Calls, one for each completion and one for each
    group where functions want it, are numbered in this order and divided over processes."""

    def __init__(self, task: Task, examples: list[dict], num_generations: int = 1):
        self.task = task
        # the example of each completion
        self.examples = _repeated(examples, num_generations)
        self.num_generations = num_generations
        self._pool = task.pool or Pool(task.config.functions(), RewardsConfig(workers=0))
        self._group_names = task.config.group_names
        self._names = [name for name in self._pool.functions if name not in self._group_names]
        # row -> its text
        self._completions: dict[int, CompletionText] = {}
        # number of a call -> what it is of, and its outcomes; None: another process makes it
        self._calls: dict[int, tuple[str | list[str], Future | None]] = {}
        # seconds for which the run waited for rewards
        self.seconds = 0.0

    def _rows(self, group: int) -> list[int]:
        first = group * self.num_generations
        return list(range(first, first + self.num_generations))

    def submit(self, row: int, tokens: Sequence[int]) -> None:
        """Sends a completion that has ended to the rewards. row: its place in `examples`."""
        began = time.perf_counter()
        completion = CompletionText(self.task.tokenizer.decode(tokens), len(tokens))
        self._completions[row] = completion
        calls = [(row, completion, self._names)]
        if self._group_names:
            group = row // self.num_generations
            of_group = [self._completions.get(other) for other in self._rows(group)]
            if None not in of_group:
                calls.append((len(self.examples) + group, of_group, self._group_names))
        processes = self.task.processes
        for call, called_on, names in calls:
            future = None
            if call % processes.count == processes.index:
                future = self._pool.submit(called_on, self.examples[row], names)
            self._calls[call] = called_on, future
        self.seconds += time.perf_counter() - began

    def results(self, rollout: Rollout) -> Graded:
        """Waits for all grades. Completions that were not submitted are graded now. Raises
        ValueError if a reward failed and rewards.on_error=raise, if all completions were dropped,
        or if processes graded other completions; StopRun if the run was asked to stop."""
        tokens_BT = rollout.tokens
        mask_BT = rollout.completion_mask
        rows = range(len(self.examples))
        for row in rows:
            if row not in self._completions:
                self.submit(row, tokens_BT[row][mask_BT[row]])

        # wait for the workers of all processes
        began = time.perf_counter()
        compared = digest([self.examples, [self._completions[row] for row in rows]])
        futures = [self._calls[call][1] for call in sorted(self._calls)]
        outcomes = shared_outcomes(futures, compared, self.task.processes)
        calls = dict(zip(sorted(self._calls), outcomes))
        texts = [str(self._completions[row]) for row in rows]
        for name in self.task.config.reward_models:
            if name not in self.task.scorers:
                raise ValueError(
                    f"rewards.{name} is a reward model, which a run and `tunix-lite evaluate` "
                    "load; leave it out here"
                )
            for row, outcome in enumerate(self.task.scorers[name](self.examples, texts)):
                calls[row] |= self._pool.by_name([_of(name)], texts[row], iter([outcome]))
        self.seconds += time.perf_counter() - began

        graded, kinds_BN, unscorable_B = self._graded(calls, rollout)
        task = self.task
        counts = call_metrics([*calls.values()]) | {
            "rewards/dropped": int(graded.dropped.sum()),
            "rewards/unscorable": int(unscorable_B.sum()),
        }
        ended = () if rollout.conversations is None else rollout.conversations
        turns = [turn for one in ended for turn in one.turns]
        replies = [turn.reply for turn in turns if turn.reply.failure]
        first = self._first_failure(calls)
        if replies and not first:
            first = replies[0].message
        total = len(self.examples)
        if graded.dropped.all():
            raise SharedError(f"all {total} completions were dropped; the first: {first}")
        failed = {name.removeprefix("rewards/"): counts[name] for name in FAILED}
        self._tell("rewards", "completions", failed, counts["rewards/dropped"], first)
        if replies:
            kinds = Counter(sorted(reply.failure for reply in replies))
            self._tell("environments", "conversations", kinds, 0, replies[0].message)
        groups = [self._rows(group) for group in range(len(rows) // self.num_generations)]
        metrics = reward_metrics(graded, kinds_BN, groups) | counts
        metrics |= completion_metrics(graded.correct, rollout)
        metrics["time/rewards"] = self.seconds
        if seconds := self._pool.taken_seconds():
            median, slow = np.percentile(seconds, [50, 99])
            metrics |= {"time/reward_p50": float(median), "time/reward_p99": float(slow)}
        if rollout.conversations is not None:
            metrics |= conversation_metrics(rollout)
        if task.long_prompts == "truncate":
            # only a prompt that fills its row can have been cut
            firsts = rows[:: self.num_generations]
            full = [row for row in firsts if rollout.token_mask[row, 0]]
            metrics["prompts/truncated"] = task.truncated([self.examples[row] for row in full])
        return replace(graded, metrics=metrics)

    def _tell(
        self, who: str, of: str, failed: Mapping[str, int], dropped: int, first: str
    ) -> None:
        """Says how many of them failed, and how the first did."""
        if self.task.say is not None and any(failed.values()):
            counts = {**failed, "dropped": dropped}
            how = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
            total = len(self.examples)
            self.task.say(f"{who} that failed, of {total} {of}: {how}; the first: {first}")

    def _first_failure(self, calls: dict[int, dict[str, Outcome]]) -> str:
        """Describes the first failure, or else the first completion that was not scored, if any."""
        failures = [
            (call, name, outcome)
            for call, outcomes in calls.items()
            for name, outcome in outcomes.items()
            if outcome.kind
        ]
        if not failures:
            return ""
        errors = [one for one in failures if one[2].kind in FAILURES]
        call, name, outcome = (errors or failures)[0]
        called_on, _ = self._calls[call]
        return self._pool.describe_failure(name, outcome, called_on)

    def _outcomes(self, row: int, calls: dict[int, dict[str, Outcome]]) -> dict[str, Outcome]:
        """The outcomes of a completion, with its part of those of its group's call."""
        outcomes = dict(calls[row])
        group = len(self.examples) + row // self.num_generations
        for name, outcome in calls.get(group, {}).items():
            outcomes[name] = outcome
            if not outcome.kind:
                value = outcome.value[row % self.num_generations]
                outcomes[name] = Outcome("", value)
                if value is None:
                    outcomes[name] = Outcome(self._pool.settings.on_none, IS_NONE)
        return outcomes

    def _graded(
        self, calls: dict[int, dict[str, Outcome]], rollout: Rollout
    ) -> tuple[Graded, np.ndarray, np.ndarray]:
        """The grades, without metrics; kinds of outcomes [B, rewards]; which are unscorable [B]."""
        task = self.task
        config = task.config
        rows = range(len(self.examples))
        outcomes = [self._outcomes(row, calls) for row in rows]
        conversations = rollout.conversations

        # rewards, weighted; one that failed counts 0, or drops its completion
        weights = config.weights
        each = {name: values_of(outcomes, _of(name)) for name in config.rewards}
        names = [_of(name) for name in config.rewards]
        kinds = [[one[name].kind for name in names] for one in outcomes]
        by_turn = []
        of_turns = {}
        if conversations is not None:
            by_turn = turn_rewards(rollout, task.conversation)
            each[ENVIRONMENT] = np.array([sum(turns) for turns in by_turn], np.float64)
            weights[ENVIRONMENT] = 1.0
            kinds = [[*row, ""] for row in kinds]
        kinds_BN = np.array(kinds)
        total_B = sum(weights[name] * np.nan_to_num(each[name]) for name in each)
        dropped_B, unscorable_B = dropped_of(kinds_BN, self._pool.settings.on_error)
        if conversations is not None:
            settings = task.conversation
            total_B, dropped_B = of_conversations(
                rollout, settings, total_B, dropped_B, by_turn
            )
            of_turns = {"turn_rewards": by_turn, "turn_discount": settings.turn_discount}
            if settings.on_limit == "mask":
                of_turns["masked"] = np.array([one.reached_limit for one in conversations])

        # Without other rewards, right is what the environment calls won, else what it rewards.
        if config.rewards:
            correct_B = values_of(outcomes, config.correct_is) > 0
        elif (correct_B := won(rollout)) is None:
            correct_B = each[ENVIRONMENT] > 0
        prompts = [task.text.ask(example) for example in self.examples]
        # environments may begin with something else
        for place, one in enumerate(() if conversations is None else conversations):
            if one.opening is not None:
                prompts[place] = one.opening
        extracted = [one["extract"] for one in outcomes]
        graded = Graded(
            prompts=prompts,
            completions=[str(self._completions[row]) for row in rows],
            # whoever forgets to leave a dropped one out will notice
            rewards=np.where(dropped_B, np.nan, total_B),
            correct=correct_B,
            extracted=[None if one.kind else one.value for one in extracted],
            metrics={},
            dropped=dropped_B,
            each=each,
            weights=weights,
            examples=self.examples,
            num_generations=self.num_generations,
            rollout=rollout,
            failures=[reasons_of(one) for one in outcomes],
            **of_turns,
        )
        return graded, kinds_BN, unscorable_B
