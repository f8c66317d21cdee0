"""A completion as a reward function gets it: its text, which also knows how many tokens it had."""


class CompletionText(str):
    """The text of a completion. `num_tokens`: how many tokens the model sampled for it, the
    end-of-sequence token included.

    A run hands these to reward functions. A plain text will do for all that ask for no tokens.

    Example: CompletionText("12 + 3 = 15", 9).num_tokens == 9.
    """

    num_tokens: int

    def __new__(cls, text: str, num_tokens: int) -> "CompletionText":
        completion = super().__new__(cls, text)
        completion.num_tokens = num_tokens
        return completion

    def __getnewargs__(self) -> tuple[str, int]:
        return str(self), self.num_tokens


UNITS = ("tokens", "words", "characters")


def check_unit(unit: str) -> None:
    """Raises ValueError for none of UNITS."""
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r}; it is {', '.join(UNITS[:-1])} or {UNITS[-1]}")


def length_of(completion: str, unit: str) -> int:
    """Counts the completion's length in tokens, words or characters. Raises ValueError where tokens
    are asked of a plain text, which has none."""
    if unit == "characters":
        return len(completion)
    if unit == "words":
        return len(completion.split())
    if not isinstance(completion, CompletionText):
        raise ValueError(
            "a plain text has no number of tokens: give a rewards.completion.CompletionText"
        )
    return completion.num_tokens
