"""Rewards for rows to learn from: how near is a completion to the answer in the row."""

from tunix_lite.rewards.similarity import RougeL
from tunix_lite.tasks.messages import conversation_of

ROUGE_L = RougeL(field="reference")


def like_answer(completion: str, example: dict) -> float:
    """ROUGE-L, 0 to 1, with the row's `completion` or the first assistant turn of `messages`."""
    return ROUGE_L(completion, {"reference": _answer(example)})


def same_as_answer(completion: str, example: dict) -> float:
    """1 if the completion is that text, but for white space around it, else 0."""
    return float(completion.strip() == _answer(example).strip())


def _answer(example: dict) -> str:
    demonstration = example.get("completion")
    if isinstance(demonstration, str):
        return demonstration
    if demonstration is not None:
        example = {"messages": demonstration}
    texts = [turn.text for turn in conversation_of(example) if turn.role == "assistant"]
    if not texts:
        raise ValueError("the conversation has no assistant turn to compare with")
    # a turn of tool calls alone says nothing
    return next(filter(None, texts), "")
