"""Rewards for conversations: how near is a completion to the answer in the data."""

from tunix_lite.rewards.similarity import RougeL
from tunix_lite.tasks.messages import conversation_of

ROUGE_L = RougeL(field="reference")


def like_answer(completion: str, example: dict, turn: str = "first") -> float:
    """ROUGE-L, 0 to 1, of the completion and the first (or last) assistant turn of `messages`."""
    return ROUGE_L(completion, {"reference": _answer(example, turn)})


def same_as_answer(completion: str, example: dict, turn: str = "first") -> float:
    """1 if the completion is that turn, but for white space around it, else 0."""
    return float(completion.strip() == _answer(example, turn).strip())


def _answer(example: dict, turn: str) -> str:
    turns = [said for said in conversation_of(example) if said.role == "assistant"]
    if not turns:
        raise ValueError("the conversation has no assistant turn to compare with")
    # a turn of tool calls alone says nothing
    texts = [said.text for said in turns if said.text] or [""]
    return texts[0 if turn == "first" else -1]
