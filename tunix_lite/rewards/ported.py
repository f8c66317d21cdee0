"""Reward functions that were written for TRL or verl, as they are."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from tunix_lite.rewards.fields import field_of

# arguments that TRL gives beside columns, and that a reward here cannot get
UNKNOWN = ("completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class OfTRL:
    """A reward function of TRL: `fn(prompts, completions, **columns)` returns a number for each
    completion. It stands in a task with `group: true`, and is called once for each group.

    Columns are the fields of the example, each as a list with one entry for each completion. A
    function without `**kwargs` gets those that it names.
    Example: OfTRL(fn)(["a"], {"answer": "7"}) is fn(completions=["a"], answer=["7"])."""

    fn: Callable
    # True: a completion is [{"role": "assistant", "content": ...}], as TRL gives it for chats
    messages: bool = False
    # what `prompts` holds, with {fields} of the example; null: the field `prompt` or `messages`
    prompt: str | None = None

    def __post_init__(self):
        if inspect.iscoroutinefunction(self.fn):
            raise ValueError(f"fn={_name(self.fn)} is async; rewards are plain functions")
        if unknown := [name for name in UNKNOWN if name in self._required]:
            raise ValueError(
                f"fn={_name(self.fn)} asks for {unknown[0]}, which no reward gets here; give it a "
                "default there"
            )

    def __call__(self, completions: list[str], example: dict) -> list[float | None]:
        columns = {name: [value] * len(completions) for name, value in example.items()}
        columns.pop("prompts", None)
        prompt = example.get("prompt", example.get("messages"))
        if self.prompt is not None:
            text = self.prompt.format_map(example)
            prompt = [{"role": "user", "content": text}] if self.messages else text
        if prompt is not None:
            columns["prompts"] = [prompt] * len(completions)
        elif "prompts" in self._required:
            raise ValueError(
                f"{_name(self.fn)} asks for prompts, and an example has neither `prompt` nor "
                "`messages`; give the reward the text of task.prompt: prompt: '{question}'"
            )
        columns["completions"] = [
            [{"role": "assistant", "content": text}] if self.messages else text
            for text in completions
        ]
        names = inspect.signature(self.fn).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in names.values())
        return self.fn(**{k: v for k, v in columns.items() if takes_all or k in names})

    @property
    def _required(self) -> list[str]:
        """The names of arguments without a default."""
        named = inspect.signature(self.fn).parameters.values()
        return [
            one.name
            for one in named
            if one.default is one.empty
            and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        ]


@dataclass(frozen=True)
class OfVerl:
    """A reward function of verl: `fn(data_source, solution_str, ground_truth, extra_info)` returns
    a number, or a dict with the number as `score`.

    The settings name the fields of the example that it gets; dots lead into a column.
    Example: OfVerl(compute_score) for rows of verl's own Parquet files."""

    fn: Callable
    ground_truth: str = "reward_model.ground_truth"
    # null: it gets None
    data_source: str | None = "data_source"
    extra_info: str | None = "extra_info"

    def __call__(self, completion: str, example: dict) -> float | None:
        score = self.fn(
            data_source=None
            if self.data_source is None
            else field_of(example, self.data_source),
            solution_str=completion,
            ground_truth=field_of(example, self.ground_truth),
            extra_info=None if self.extra_info is None else field_of(example, self.extra_info),
        )
        return score["score"] if isinstance(score, dict) else score


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)
