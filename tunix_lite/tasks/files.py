"""A task of rows in files of your own, all of it set from the command line."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from tunix_lite.rewards.model import RewardModel
from tunix_lite.tasks.chat import same_as_answer
from tunix_lite.tasks.prompt_text import PromptTemplate
from tunix_lite.tasks.sources import NO_TRAIN, FileRows
from tunix_lite.tasks.task import Reward, TaskConfig, as_rewards


def whole_text(completion: str) -> str:
    """The completion without white space around it: the answer where nothing else is known."""
    return completion.strip()


@dataclass(frozen=True)
class FilesTaskConfig(TaskConfig):
    """A task as one line of a command: files, a prompt and a reward.
    Example: task=jsonl task.train=train.jsonl task.prompt='{question}' task.reward=my_rewards.near
    """

    # conf/task/jsonl.yaml explains each setting
    # made of the settings below
    source: Any = field(init=False, default=None)
    prompt: str | None = None
    rewards: dict[str, Reward | RewardModel] = field(default_factory=dict)
    correct: Callable | None = None
    extract: Callable = whole_text
    train: str | None = None
    held_out: str | None = None
    held_out_every: int = 10
    fields: dict[str, str] | None = None
    max_rows: int | None = None
    reward: Callable | None = None
    on_error: str = "raise"

    # template that checks the rows of the files, and makes examples of them
    reads: ClassVar[type[PromptTemplate]] = PromptTemplate

    def __post_init__(self):
        if self.train is None and self.held_out is None:
            raise ValueError(NO_TRAIN)
        rewards = as_rewards(self.rewards)
        if self.reward is not None:
            # logged by the name of the function, or of its class
            fn = self.reward.func if isinstance(self.reward, partial) else self.reward
            name = getattr(fn, "__name__", type(fn).__name__)
            if rewards.get(name, Reward(self.reward)) != Reward(self.reward):
                raise ValueError(
                    f"reward and rewards.{name} have the same name; rename the latter"
                )
            rewards = {name: Reward(self.reward)} | rewards
        if not rewards and self.environment is None:
            # `check_algorithm` refuses it where completions are to be learned from
            rewards = {"_same_as_demonstration": Reward(same_as_answer)}
        # the dataclass is frozen for everybody else
        settle = partial(object.__setattr__, self)
        settle("rewards", rewards)
        single = [reward.fn for reward in rewards.values() if not reward.group]
        if self.correct is None and not single and rewards:
            raise ValueError("correct is missing: rewards of a group do not say what is right")
        settle("correct", self.correct or next(iter(single), TaskConfig.correct))
        source = FileRows(
            self.train,
            self.held_out,
            self.on_error,
            self.reads(self.prompt, self.system, self.learned_turns),
            self.held_out_every,
            self.fields,
            self.max_rows,
        )
        settle("source", source)
        super().__post_init__()

    def check_algorithm(self, needs_demonstrations: bool) -> None:
        """See TaskConfig. Without a reward there is something to evaluate by, no more."""
        is_default = self.reward is None and [*self.rewards] == ["_same_as_demonstration"]
        if is_default and not needs_demonstrations:
            raise ValueError(
                "reward is missing: give task.reward=module.function, which gets (completion, row) "
                "and returns a number, or a ready one, such as "
                "tunix_lite.rewards.answers.NumericAnswer where the column `answer` is a number"
            )
