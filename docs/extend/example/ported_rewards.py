"""Rewards that were written for TRL and verl, and the functions that call them here."""

import re


def accuracy(completions, answer, **kwargs):
    """For TRL: 1 for each completion that ends in its answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(text.strip().endswith(right)) for text, right in zip(texts, answer, strict=True)
    ]


def of_trl(completions: list[str], example: dict) -> list[float]:
    """Calls it for a group: chats of one message, and each column as a list."""
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    columns = {name: [value] * len(completions) for name, value in example.items()}
    return accuracy(completions=chats, **columns)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """For verl: 1 if the last number is the right one."""
    numbers = re.findall(r"-?\d+", solution_str)
    return {"score": float(numbers[-1:] == [ground_truth]), "source": data_source}


def of_verl(completion: str, example: dict) -> float:
    """Calls it with the columns of verl's rows."""
    right = example["reward_model"]["ground_truth"]
    columns = example["data_source"], completion, right, example["extra_info"]
    return compute_score(*columns)["score"]
