"""A completion as a reward function gets it: its text, which also knows how many tokens it had."""


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
        return str(self), self.num_tokens
