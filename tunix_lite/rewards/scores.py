"""The data that reward functions get, and their values: a number, or a Score, which says more; and
errors for anything else."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tunix_lite.workers.child import MOST_REWARD, NotANumber, bounded, short_repr
from tunix_lite.workers.pool import IS_NONE, NoScore


class CompletionText(str):
    """The text of a completion, as a run hands it to rewards. `num_tokens`: tokens that the model
    sampled for it, the end-of-sequence token included.
    Example: CompletionText("12 + 3 = 15", 9).num_tokens == 9."""

    num_tokens: int

    def __new__(cls, text: str, num_tokens: int) -> "CompletionText":
        completion = super().__new__(cls, text)
        completion.num_tokens = num_tokens
        return completion

    def __getnewargs__(self) -> tuple[str, int]:
        # Without it, pickle would make one of the text alone.
        return str(self), self.num_tokens


def field_of(example: Mapping, field: str) -> Any:
    """Reads a field of the example. Dots lead into the objects of a row:
    `reward_model.ground_truth`. Raises ValueError if there is no such field."""
    # The name of a column may have dots itself.
    if field in example:
        return example[field]
    value = example
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            fields = ", ".join(map(str, example))
            raise ValueError(f"an example has no field {field!r}: it has {fields:.200}")
        value = value[name]
    return value


class Score(float):
    """A number with the reason why the completion did not get more. Anywhere else it is that
    number.

    kind: "no_answer", the completion holds no answer that could be read; "stopped", its code was
    stopped by a limit; or "cut", a reward model has read a part of it. A run counts them
    (`rewards/no_answer`, `rewards/stopped`, `rewards/cut`), so that a score of 0 for them is not
    taken for that of a wrong answer. `why` says more, in words.
    Example: Score(0, "no_answer", "it holds no number") + 1.0 == 1.0."""

    KINDS = ("no_answer", "stopped", "cut")

    kind: str
    why: str

    def __new__(cls, value: float, kind: str, why: str) -> "Score":
        if kind not in cls.KINDS:
            raise ValueError(f"kind={kind!r}; it is {' or '.join(cls.KINDS)}")
        score = super().__new__(cls, value)
        score.kind = kind
        score.why = why
        return score

    def __getnewargs__(self) -> tuple[float, str, str]:
        return float(self), self.kind, self.why


def to_json(value: object) -> Any:
    """A value of a reward as JSON can hold it; `from_json` is the way back."""
    if isinstance(value, Score):
        return {"score": float(value), "kind": value.kind, "why": value.why}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return value


def from_json(value: object) -> Any:
    """The value that `to_json` was given."""
    if isinstance(value, dict):
        return Score(value["score"], value["kind"], value["why"])
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def no_answer(why: str) -> Score:
    """0 for a completion whose answer could not be read."""
    return Score(0.0, "no_answer", why)


def number(fn: Callable[[str, dict], object], completion: str, example: dict) -> float | dict:
    """The number that a reward function returns, as JSON can hold it. NoScore if it is None,
    NotANumber if it is no number or not finite; '1' is a text, not a number."""
    value = fn(completion, example)
    if value is None:
        raise NoScore(IS_NONE)
    return to_json(_finite(value))


def numbers(
    fn: Callable[[list[str], dict], object], completions: list[str], example: dict
) -> list[float | dict | None]:
    """The numbers that a reward function of a whole group returns: a finite one, or None, for each
    completion, in their order. NotANumber if it is anything else."""
    values = fn(completions, example)
    try:
        # an array of numpy is a list, too
        values = list(values)
    except TypeError as error:
        raise NotANumber(f"is {short_repr(values)}, not a list of numbers,") from error
    if len(values) != len(completions):
        raise NotANumber(f"is {len(values)} numbers, not {len(completions)},")
    return [None if value is None else to_json(_finite(value)) for value in values]


def _finite(value: object) -> float:
    # float() would read a text, too.
    if not hasattr(value, "__float__"):
        raise NotANumber(f"is {short_repr(value)}, not a number,")
    try:
        as_float = float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise NotANumber(f"is {short_repr(value)}, not a number,") from error
    if not math.isfinite(as_float):
        raise NotANumber(f"is {as_float}")
    if abs(as_float) > MOST_REWARD:
        raise NotANumber(f"is {as_float:g}, beyond {MOST_REWARD:g},")
    return value if isinstance(value, Score) else as_float


def text(fn: Callable[[str], object], completion: str, example: dict) -> str | None:
    """The text that `extract` returns for a completion, KEPT characters of it at most."""
    answer = fn(completion)
    if answer is None:
        return None
    return bounded(str(answer))
