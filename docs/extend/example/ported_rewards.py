"""Rewards as TRL and verl call them."""

import re


def accuracy(completions, answer, **kwargs):
    """For TRL: 1 for each completion that ends in its answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(text.strip().endswith(right)) for text, right in zip(texts, answer, strict=True)
    ]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """For verl: 1 if the last number is the right one."""
    numbers = re.findall(r"-?\d+", solution_str)
    return {"score": float(numbers[-1:] == [ground_truth]), "source": data_source}
