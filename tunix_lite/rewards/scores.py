"""What a reward function may return beside a plain number."""

from typing import Any


class Score(float):
    """A number, and what kept the completion from getting more. Anywhere else it is that number.

    kind: "no_answer", the completion holds no answer that could be read; or "stopped", its code was
    stopped by a limit. A run counts both (`rewards/no_answer`, `rewards/stopped`), so that a score
    of 0 for them is not taken for that of a wrong answer. `why` says more, in words.

    Example: Score(0, "no_answer", "it holds no number") + 1.0 == 1.0.
    """

    KINDS = ("no_answer", "stopped")

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


def to_json(value: Any) -> Any:
    """A value of a reward as JSON can hold it; `from_json` is the way back."""
    if isinstance(value, Score):
        return {"score": float(value), "kind": value.kind, "why": value.why}
    return [to_json(item) for item in value] if isinstance(value, list) else value


def from_json(value: Any) -> Any:
    """What `to_json` made a value of."""
    if isinstance(value, dict):
        return Score(value["score"], value["kind"], value["why"])
    return [from_json(item) for item in value] if isinstance(value, list) else value


def no_answer(why: str) -> Score:
    """0 for a completion whose answer could not be read."""
    return Score(0.0, "no_answer", why)
