"""A task: where examples come from, how they are asked, how they are graded."""

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rewards.completion import CompletionText
from tunix_lite.rewards.math import correct, final_answer
from tunix_lite.rewards.scores import number, numbers, text
from tunix_lite.tasks.conversations import (
    ENVIRONMENT,
    EnvironmentPartner,
    conversation_metrics,
    failed_replies,
    of_conversations,
    turn_rewards,
    won,
)
from tunix_lite.tasks.fitting import Look, RowLimits, long_completion, long_prompt
from tunix_lite.tasks.grading import completion_metrics, grade_metrics
from tunix_lite.tasks.processes import ALONE, Processes, same_on_all, shared_errors
from tunix_lite.tasks.prompt_text import PromptTemplate, PromptText
from tunix_lite.tasks.reward_calls import (
    dropped_of,
    read_values,
    reasons_of,
    shared_outcomes,
    values_of,
)
from tunix_lite.tasks.row_files import RowStream
from tunix_lite.tasks.sources import (
    SPLITS,
    FittingOrders,
    batch_at,
    digest,
    digest_of_data,
    first_fitting,
)
from tunix_lite.types import Graded, Prompts, Rollout
from tunix_lite.workers.pool import FAILURES, IS_NONE, Pool, RewardsConfig
from tunix_lite.workers.process import Outcome

SPECIAL_TOKENS = ("text", "control", "error")
LEARNED_TURNS = ("last", "all")


@dataclass(frozen=True)
class Reward:
    """A reward function and its weight in the total.

    Example: Reward(longest_first, 0.5, group=True) ranks the completions of a group.
    """

    # (completion, example) -> number; of a group: (completions, example) -> a number for each
    fn: Callable
    # factor in the sum of rewards; or, of the number of the update from 0, what it is there
    weight: float | Callable = 1.0
    group: bool = False  # fn gets all completions of a prompt at once, and compares them


# names of metrics reward/NAME that mean something else
TAKEN = {ENVIRONMENT, "mean", "std", "min", "max"}
TAKEN |= {f"groups_{which}" for which in ("that_agree", "all_zero", "all_one", "mixed")}


@dataclass(frozen=True)
class TaskLengthsConfig:
    """Usual lengths of the prompts and the completions of a task, in tokens: the values of
    generation.max_prompt_length and max_new_tokens where nobody sets them.

    Example: `TaskLengthsConfig(256, 512)` for GSM8K.
    """

    # Longest prompt, in tokens.
    max_prompt_length: int
    # Longest completion, in tokens.
    max_new_tokens: int


@dataclass(frozen=True)
class TaskConfig:
    """A task as YAML writes it: plain functions and texts, no tokenizer yet.

    Example: `TaskConfig(Arithmetic(), "What is {question}?", {"correct": Reward(correct)})`.
    """

    source: Any  # has `train` and `held_out`, sequences of examples (tunix_lite.tasks.sources)
    # User's message, with {fields} of an example.
    prompt: str | None
    rewards: dict[str, Reward]  # by the name under which they are logged
    # Function that says if a completion is right, for eval/accuracy and sample marks.
    correct: Callable = correct
    # Function that reads the answer out of a completion, for display.
    extract: Callable = final_answer
    # Special tokens such as `<end_of_turn>` in a row: text reads letters, control the token, error
    # stops.
    special_tokens_in_data: str = "text"
    # System message before the user's, where {names} are fields of an example. null sends none.
    system: str | None = None
    # Assistant turns of `messages` that sft learns from: last or all.
    learned_turns: str = "last"
    # What answers the model between its turns, an environment such as
    # tunix_lite.environments.guessing.GuessingGame. null has single turns.
    environment: Callable | None = None
    # Usual lengths of this task: generation.max_prompt_length and max_new_tokens, unless you set
    # them. null has none.
    lengths: TaskLengthsConfig | None = None

    def __post_init__(self):
        if self.special_tokens_in_data not in SPECIAL_TOKENS:
            raise ValueError(
                f"special_tokens_in_data={self.special_tokens_in_data!r}; it is text, control or "
                "error"
            )
        if self.learned_turns not in LEARNED_TURNS:
            raise ValueError(f"learned_turns={self.learned_turns!r}; it is last or all")
        if self.learned_turns == "all" and self.prompt is not None:
            raise ValueError(
                "learned_turns=all would change nothing with task.prompt: it is of examples whose "
                "conversation is in `messages`; write task.learned_turns=last"
            )
        if not self.rewards and self.environment is None:
            raise ValueError("rewards is empty: name at least one reward function")
        made = self.environment
        missing = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
        if inspect.isroutine(made) or isinstance(made, partial):
            try:
                inspect.signature(made).bind()
            except TypeError as error:
                raise ValueError(
                    "environment is a function that makes one, called with its settings alone: "
                    f"{error}"
                ) from error
        elif made is not None and missing:
            raise ValueError(
                f"environment is a {type(made).__name__}, which has no method `{missing[0]}`; an "
                "environment has reset(example) and step(completion)"
            )
        if taken := (TAKEN | {f"{name}_std" for name in self.rewards}) & self.rewards.keys():
            raise ValueError(
                f"a reward cannot be called {taken.pop()!r}: the metric of that name means "
                "something else"
            )
        for name, reward in self.rewards.items():
            arguments = "(completions, example)" if reward.group else "(completion, example)"
            _check_call(f"rewards.{name}.fn", reward.fn, arguments)
            if callable(reward.weight):
                _check_call(f"rewards.{name}.weight", reward.weight, "(step)")
        _check_call("correct", self.correct, "(completion, example)")
        _check_call("extract", self.extract, "(completion)")

    def check_algorithm(self, needs_demonstrations: bool) -> None:
        """Raises ValueError if the algorithm cannot learn from this task. needs_demonstrations: it
        learns from rows; else from completions that it samples."""

    @property
    def template(self) -> PromptTemplate:
        """Template of the messages of an example."""
        return PromptTemplate(self.prompt, self.system, self.learned_turns)

    def functions(self) -> dict[str, Callable]:
        """Returns all functions that are called on completions, by the name in messages:
        (completion, example) -> plain value, or (completions, example) -> list of numbers for those
        in `group_names`."""
        called = {
            _of(name): partial(numbers if reward.group else number, reward.fn)
            for name, reward in self.rewards.items()
        }
        # without rewards the environment says what is right
        if self.rewards and self.correct_is == "correct":
            called["correct"] = partial(number, self.correct)
        return called | {"extract": partial(text, self.extract)}

    def weights(self, step: int) -> dict[str, float]:
        """Returns the weight of each reward in update number `step` (from 0).

        Raises ValueError for a schedule that gives no finite number.
        """
        weights = {}
        for name, reward in self.rewards.items():
            weights[name] = reward.weight(step) if callable(reward.weight) else reward.weight
            if not np.isfinite(weights[name]):
                raise ValueError(f"rewards.{name}.weight is {weights[name]} in step {step + 1}")
        return weights

    @property
    def group_names(self) -> list[str]:
        """The functions that get a whole group."""
        return [_of(name) for name, reward in self.rewards.items() if reward.group]

    @property
    def correct_is(self) -> str:
        """Names the function that says what is right, often a reward."""
        same = (
            _of(name)
            for name, reward in self.rewards.items()
            if not reward.group and _bound(reward.fn) == _bound(self.correct)
        )
        return next(same, "correct")


def _check_call(where: str, fn: Callable[..., object], arguments: str) -> None:
    """Raises ValueError if fn cannot be called with so many arguments."""
    try:
        inspect.signature(fn).bind(*arguments.split(","))
    except TypeError as error:
        raise ValueError(
            f"{where} is called with {arguments} and its settings: {error}"
        ) from error


def _of(name: str) -> str:
    return f"reward {name!r}"


def _bound(fn: Callable[..., object]) -> tuple:
    """Returns a key that is equal for equal functions: bound settings count, too."""
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
    # what is too long: error; truncate: a prompt keeps its last tokens, and what is learned its
    # first; drop: take another example
    long_prompts: str = "error"
    pool: Pool | None = None  # workers that call rewards; None: the run's own process calls them
    # gets a line where rewards fail; None: only the metrics have it
    say: Callable[[str], None] | None = None
    # processes that take the same batches and share the grades; ALONE until settings are checked
    processes: Processes = ALONE
    step: int = 0  # the number of the update, which weights of rewards may depend on
    # gets all that is graded, such as groups of which the algorithm keeps none
    on_graded: Callable[[Graded], None] | None = None
    conversation: ConversationConfig = ConversationConfig()
    # workers that run environments; None: completions are single turns, or no worker has begun yet
    environments: EnvironmentPool | None = None
    # the fields of an example that the algorithm learns from; (): completions are sampled
    learned: tuple[str, ...] = ()
    # the orders of examples that fit, by what they depend on; all that `replace` makes share it
    orders: dict = field(default_factory=dict, compare=False, repr=False)

    def at_step(self, step: int) -> "Task":
        """Returns the task with the reward weights of update number `step` (from 0)."""
        has_schedule = any(callable(reward.weight) for reward in self.config.rewards.values())
        return replace(self, step=step) if has_schedule else self

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
        conversation = self.conversation if conversation is None else conversation
        with contextlib.ExitStack() as at_end:
            pool = Pool(self.config.functions(), settings)
            at_end.enter_context(contextlib.closing(pool))
            environments = None
            if self.config.environment is not None:
                environments = EnvironmentPool(self.config.environment, conversation)
                at_end.enter_context(environments)
            yield replace(
                self,
                pool=pool,
                say=say,
                processes=processes,
                conversation=conversation,
                environments=environments,
            )

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

    def batch(self, batch_size: int, seed: int, step: int) -> tuple[list[dict], int]:
        """Training examples number `step`, and how many were dropped on the way to them.

        In a run of several processes all compare what they take. Raises ValueError, on all of them:
        one has others, or finds too few.
        """
        train = self.config.source.train

        def take() -> tuple[list[dict], int]:
            if not self.leaves_out:
                return batch_at(train, batch_size, seed, step), 0
            if not isinstance(train, RowStream):
                key = self.limits, self.config.template, self.config.special_tokens_in_data
                orders = self.orders.get(key)
                if orders is None or not orders.are_of(train):
                    orders = FittingOrders(train, self.look, self.max_prompt_length)
                    self.orders[key] = orders
                return orders.batch(batch_size, seed, step)
            if not self.limits.skips:
                raise ValueError(
                    "generation.long_prompts=drop takes other rows, and task.shuffle_buffer reads "
                    "them in order; set generation.long_prompts=truncate, or task.on_error=skip, "
                    "which leaves them out of the stream"
                )
            return train.batch(batch_size, seed, step, lambda row: self.look(row).why), 0

        taken = same_on_all(self.processes, take)
        if self.say is not None and isinstance(train, RowStream) and (news := train.news()):
            self.say(news)
        return taken

    @property
    def leaves_out(self) -> bool:
        """True if some examples may be left out; else one that cannot be taken is an error."""
        return self.limits.leaves_out

    @property
    def limits(self) -> RowLimits:
        """Conditions that an example must meet to be taken."""
        skips = getattr(self.config.source, "on_error", "raise") == "skip"
        return RowLimits(
            self.max_prompt_length, self.max_new_tokens, self.long_prompts, self.learned, skips
        )

    def look(self, example: dict) -> Look:
        """Tells if a training example is taken. Raises ValueError for one that is an error."""
        return self.limits.look(self.text, example)

    def held_out(self, count: int) -> list[dict]:
        """The first `count` held-out examples that fit. Raises ValueError if too few do."""
        limits = replace(self.limits, learned=())
        look = partial(limits.look, self.text) if limits.leaves_out else None
        return first_fitting(self.config.source.held_out, count, look)

    @shared_errors()
    def prompts(self, examples: list[dict]) -> Prompts:
        """The token ids of each prompt, at most `max_prompt_length` of them. A longer prompt loses
        its beginning, or is a ValueError naming it."""
        width = self.max_prompt_length
        rows = [self.text.prompt(example) for example in examples]
        if self.long_prompts == "truncate":
            return [row[-width:] for row in rows]
        for example, row in zip(examples, rows):
            if len(row) > width:
                raise ValueError(long_prompt(self.text, example, len(row), width))
        return rows

    @shared_errors()
    def prompts_with(self, examples: list[dict], prompt: str, max_length: int | None) -> Prompts:
        """The token ids of each prompt with another message, {names} in which are fields of the
        example. Raises ValueError, naming the example, if it has no such field, or for more tokens
        than max_length; None: max_prompt_length."""
        text = replace(self.text, template=replace(self.config.template, prompt=prompt))
        limit = self.max_prompt_length if max_length is None else max_length
        rows = [text.prompt(example) for example in examples]
        longest = max(map(len, rows))
        if longest > limit:
            place = text.place(examples[[*map(len, rows)].index(longest)])
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
        middle, most = self.max_prompt_length, self.max_new_tokens
        shape = (len(examples), middle + most)
        tokens_BT = np.full(shape, self.tokenizer.pad_id, np.int32)
        token_mask_BT = np.zeros(shape, bool)
        completion_mask_BT = np.zeros(shape, bool)
        for i, (example, prompt) in enumerate(zip(examples, self.prompts(examples))):
            row, learned = self.text.demonstration(example, name)
            if len(row) > most and self.long_prompts != "truncate":
                raise ValueError(long_completion(self.text, example, name, len(row), most))
            begin = middle - len(prompt)
            end = middle + min(len(row), most)
            tokens_BT[i, begin:end] = [*prompt, *row[:most]]
            token_mask_BT[i, begin:end] = True
            completion_mask_BT[i, middle:end] = learned[:most]
        return tokens_BT, token_mask_BT, completion_mask_BT

    def partner(self, examples: list[dict]) -> EnvironmentPartner | None:
        """Starts the environments that answer the turns of one conversation per example; None
        without an environment.

        Raises SharedError if one fails and conversation.on_error=raise.
        """
        if self.config.environment is None:
            return None
        if self.environments is None:
            raise ValueError("environments run inside of Task.with_workers alone")
        return EnvironmentPartner(
            self.text,
            examples,
            self.environments,
            self.conversation,
            self.processes,
            self.max_prompt_length,
        )

    def grader(self, examples: list[dict], num_generations: int = 1) -> "Grader":
        """Grades the completions of `examples`, one of each, as they come. num_generations: of a
        group, which stands side by side."""
        return Grader(self, examples, num_generations)

    def grade(self, examples: list[dict], rollout: Rollout, num_generations: int = 1) -> Graded:
        """Every completion as text, its rewards, and their metrics."""
        return self.grader(examples, num_generations).results(rollout)

    def truncated(self, examples: list[dict]) -> int:
        """Counts the prompts that are longer than `max_prompt_length`."""
        return sum(self.text.length(example) > self.max_prompt_length for example in examples)

    def digest(self, examples: list[dict], splits: Sequence[str] = SPLITS) -> str:
        """Differs on a host with other data files (of `splits`) or another tokenizer."""
        tokens = [self.text.prompt(example) for example in examples]
        return digest([digest_of_data(self.config.source, splits), examples, tokens])


class Grader:
    """Grades completions one by one, while others are still sampled; `examples` has one entry per
    completion, and `num_generations` of them that stand side by side are a group.

    There is a call for each completion and, for functions of a group, one for each group, when the
    last of it has ended. Calls are numbered in this order, and divided over the processes.
    """

    def __init__(self, task: Task, examples: list[dict], num_generations: int = 1):
        self.task = task
        self.examples = examples
        self.num_generations = num_generations
        self._pool = task.pool or Pool(task.config.functions(), RewardsConfig(workers=0))
        self._group_names = task.config.group_names
        self._names = [name for name in self._pool.functions if name not in self._group_names]
        rows = list(range(len(examples)))
        # the rows of each group
        self._groups = [
            rows[first : first + num_generations] for first in rows[::num_generations]
        ]
        # row -> its text
        self._completions: dict[int, CompletionText] = {}
        # number of a call -> its outcomes; None: another process makes it
        self._futures: dict[int, Future | None] = {}
        # seconds for which the run waited for rewards
        self.seconds = 0.0

    def submit(self, row: int, tokens: Sequence[int]) -> None:
        """Sends a completion that has ended to the rewards. row: its place in `examples`."""
        began = time.perf_counter()
        completion = CompletionText(self.task.tokenizer.decode(tokens), len(tokens))
        self._completions[row] = completion
        calls: list[tuple] = [(row, completion, self._names)]
        rows = self._groups[self.group_of(row)]
        if self._group_names and all(other in self._completions for other in rows):
            number = len(self.examples) + self.group_of(row)
            calls.append(
                (number, [self._completions[other] for other in rows], self._group_names)
            )
        processes = self.task.processes
        for number, called_on, names in calls:
            is_ours = number % processes.count == processes.index
            example = self.examples[row]
            self._futures[number] = (
                self._pool.submit(called_on, example, names) if is_ours else None
            )
        self.seconds += time.perf_counter() - began

    def group_of(self, row: int) -> int:
        """The number of the group that a completion belongs to."""
        return row // self.num_generations

    def grade_now(self, row: int, rollout: Rollout) -> Graded | None:
        """The grade of one completion that was submitted, without metrics; None: it has not come,
        another process calls its functions, or one failed in a way that ends the run.

        rollout: of this completion alone.
        """
        group = self.group_of(row)
        numbers = [row, len(self.examples) + group] if self._group_names else [row]
        futures = [self._futures.get(number) for number in numbers]
        if any(future is None or not future.done() or future.exception() for future in futures):
            return None
        outcome = read_values(futures[0].result())
        if self._group_names:
            of_group = read_values(futures[1].result())
            outcome |= self._of_member(of_group, self._groups[group].index(row))
        text = str(self._completions[row])
        return self._graded([self.examples[row]], [text], [outcome], rollout)[0]

    def _of_member(self, of_group: dict[str, Outcome], place: int) -> dict[str, Outcome]:
        """Returns the outcomes of a group's call for the completion at this place in the group."""
        own = {}
        for name, (kind, values) in of_group.items():
            if kind:
                own[name] = (kind, values)
            elif values[place] is None:
                own[name] = (self._pool.settings.on_none, IS_NONE)
            else:
                own[name] = ("", values[place])
        return own

    def results(self, rollout: Rollout, look: Callable[[], None] | None = None) -> Graded:
        """Waits for all grades. Completions that were not submitted are graded now.

        look: called now and then while it waits. Raises ValueError if a reward failed and
        rewards.on_error=raise, if all completions were dropped, or if processes graded other
        completions; StopRun if the run was asked to stop while it waited.
        """
        tokens_BT = np.asarray(rollout.tokens)
        mask_BT = np.asarray(rollout.completion_mask)
        for row in range(len(self.examples)):
            if row not in self._completions:
                self.submit(row, tokens_BT[row][mask_BT[row]])

        # wait for the workers of all processes
        began = time.perf_counter()
        completions = [self._completions[row] for row in range(len(self.examples))]
        futures = tuple(self._futures[number] for number in sorted(self._futures))
        compared = digest([self.examples, completions])
        of_calls = shared_outcomes(futures, compared, self.task.processes, look)
        if look is not None:
            look()
        self.seconds += time.perf_counter() - began

        # of completions, each with its part of the outcomes of its group's call
        outcomes = [dict(one) for one in of_calls[: len(self.examples)]]
        for rows, of_group in zip(self._groups, of_calls[len(self.examples) :]):
            for place, row in enumerate(rows):
                outcomes[row] |= self._of_member(of_group, place)
        texts = list(map(str, completions))
        graded, kinds_BN, unscorable_B = self._graded(self.examples, texts, outcomes, rollout)

        # metrics of grades, completions, and what they took
        task = self.task
        failed = failed_replies(rollout)
        first = failed[0].message if failed else ""
        metrics = grade_metrics(
            graded,
            of_calls,
            kinds_BN,
            unscorable_B,
            self._groups,
            self._first_failure(of_calls, texts) or first,
            task.say,
        )
        if failed and task.say is not None:
            kinds = Counter(reply.failure for reply in failed)
            how = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
            task.say(
                f"environments that failed, of {len(self.examples)} conversations: {how}; the "
                f"first: {first}"
            )
        metrics |= {
            f"rewards/weight_{name}": float(weight)
            for name, weight in graded.weights.items()
            if name in task.config.rewards and callable(task.config.rewards[name].weight)
        }
        metrics |= completion_metrics(graded.correct, rollout)
        metrics["time/rewards"] = self.seconds
        if seconds := self._pool.taken_seconds():
            median, slow = np.percentile(seconds, [50, 99])
            metrics |= {"time/reward_p50": float(median), "time/reward_p99": float(slow)}
        if rollout.conversations is not None:
            metrics |= conversation_metrics(rollout)
        if task.long_prompts == "truncate":
            # only a prompt that fills its row can have been cut
            full_P = np.asarray(rollout.token_mask)[:: self.num_generations, 0]
            firsts = self.examples[:: self.num_generations]
            full = [example for example, is_full in zip(firsts, full_P) if is_full]
            metrics["prompts/truncated"] = task.truncated(full)
        graded = replace(graded, metrics=metrics)
        if task.on_graded is not None:
            task.on_graded(graded)
        return graded

    def _first_failure(self, of_calls: list[dict[str, Outcome]], texts: list[str]) -> str:
        """Describes the first failure, or else the first completion that was not scored, if any."""
        kinds = {kind for one in of_calls for kind, _ in one.values()}
        shown = kinds.intersection(FAILURES) or kinds - {""}
        of_groups = [[texts[row] for row in rows] for rows in self._groups]
        failures = (
            self._pool.describe_failure(name, outcome, called_on)
            for called_on, one in zip([*texts, *of_groups], of_calls)
            for name, outcome in one.items()
            if outcome[0] in shown
        )
        return next(failures, "")

    def _graded(
        self,
        examples: list[dict],
        texts: list[str],
        outcomes: list[dict[str, Outcome]],
        rollout: Rollout,
    ) -> tuple[Graded, np.ndarray, np.ndarray]:
        """The grades without metrics; kinds of outcomes [B, rewards]; which are unscorable [B]."""
        # rewards, weighted; one that failed counts 0, or drops its completion
        config = self.task.config
        weights = config.weights(self.task.step)
        each = {name: values_of(outcomes, _of(name)) for name in config.rewards}
        kinds_BN = np.array([[one[_of(name)][0] for name in each] for one in outcomes])
        by_turn: list[list[float]] = []
        if rollout.conversations is not None:
            # rewards of environments for each turn of each completion
            by_turn = turn_rewards(rollout, self.task.conversation)
            kinds_B1 = np.full((len(by_turn), 1), "")
            kinds_BN = np.concatenate([kinds_BN, kinds_B1], axis=1) if each else kinds_B1
            each[ENVIRONMENT] = np.array([sum(turns) for turns in by_turn], np.float64)
        if by_turn:
            weights[ENVIRONMENT] = 1.0
        total_B = sum(weights[name] * np.nan_to_num(each[name]) for name in each)
        dropped_B, unscorable_B = dropped_of(kinds_BN, self._pool.settings.on_error)
        if by_turn:
            total_B, dropped_B = of_conversations(
                rollout, self.task.conversation, total_B, dropped_B, by_turn
            )

        # Where the environment alone gives rewards, right is what it calls won or, if it calls none
        # so, what it gave any.
        if config.rewards:
            correct_B = values_of(outcomes, config.correct_is) > 0
        elif (correct_B := won(rollout)) is None:
            correct_B = each[ENVIRONMENT] > 0
        prompts = [self.task.text.ask(example) for example in examples]
        if rollout.conversations is not None:
            # environments may begin with something else
            openings = [one.opening for one in rollout.conversations]
            prompts = [own if other is None else other for own, other in zip(prompts, openings)]
        extracted = [one["extract"] for one in outcomes]
        graded = Graded(
            prompts=prompts,
            completions=texts,
            # whoever forgets to leave a dropped one out will notice
            rewards=np.where(dropped_B, np.nan, total_B),
            correct=correct_B,
            extracted=[None if failed else answer for failed, answer in extracted],
            metrics={},
            dropped=dropped_B,
            each=each,
            weights=weights,
            examples=examples,
            num_generations=self.num_generations,
            rollout=rollout,
            turn_rewards=by_turn,
            failures=[reasons_of(one) for one in outcomes],
        )
        return graded, kinds_BN, unscorable_B
