"""Verifiable arithmetic: read the answer out of a completion, and compare it."""

import re

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def final_answer(completion: str) -> str | None:
    """The last number in the completion, or None: `12 + 3 = 15` -> `15`."""
    numbers = NUMBER.findall(completion)
    if numbers:
        return numbers[-1].replace(",", "")
    return None


def correct(completion: str, example: dict) -> float:
    """1 if the final answer equals the example's `answer` as a number, else 0.
    Example: `correct("12 + 3 = 15", {"answer": "15"})` is 1.0."""
    answer, expected = final_answer(completion), str(example["answer"]).replace(",", "")
    try:
        return float(answer is not None and float(answer) == float(expected))
    except ValueError as error:
        raise ValueError(
            f"the answer {expected[:200]!r} of an example is not a number"
        ) from error
