"""Rewards that look at the form of a completion, not at what it says."""


def brevity(completion: str, example: dict, length: int = 200) -> float:
    """1 for an empty completion, falling in a straight line to 0 at `length` characters."""
    return max(0.0, 1.0 - len(completion) / length)


def contains(completion: str, example: dict, text: str) -> float:
    """1 if `text` stands in the completion, else 0."""
    return float(text in completion)
