"""Judging capitals: strings in, a number out. Any function that Python can import will do."""


def names_it(completion: str, example: dict) -> float:
    """1 if the wanted city stands in the completion, however it is written, else 0."""
    return float(example["answer"].lower() in completion.lower())


def few_words(completion: str, example: dict, most: int = 5) -> float:
    """1 for a completion of at most `most` words, else 0."""
    return float(len(completion.split()) <= most)


def first_line(completion: str) -> str | None:
    """What is shown as the answer: the first line, or None if there is no text."""
    return completion.strip().partition("\n")[0] or None


def shortest_first(completions: list[str], example: dict) -> list[float]:
    """Of a group: 1 for the shortest completion, 0 for the longest, evenly between."""
    order = sorted(completions, key=len, reverse=True)
    return [order.index(completion) / max(len(order) - 1, 1) for completion in completions]
