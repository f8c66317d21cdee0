"""Rewards that return more than plain numbers. A worker imports this, so it imports little."""

from tunix_lite.rewards.scores import Score, no_answer


def of_text(completion: str, example: dict):
    """`none`, `no answer`, `stopped`, or a number."""
    if completion == "none":
        return None
    if completion == "no answer":
        return no_answer("it holds no number")
    if completion == "stopped":
        return Score(0.25, "stopped", "its code took more than `seconds`")
    return float(completion)


def of_group(completions: list[str], example: dict) -> list:
    return [of_text(completion, example) for completion in completions]


def num_tokens(completion: str, example: dict) -> float:
    return completion.num_tokens


def num_tokens_of_group(completions: list[str], example: dict) -> list[float]:
    return [completion.num_tokens for completion in completions]


def one(completion: str, example: dict) -> float:
    return 1.0


def shown(completion: str) -> str:
    return completion
