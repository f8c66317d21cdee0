"""Pairs of completions of one prompt, one preferred to the other: data for algorithm=dpo."""

from dataclasses import dataclass

from tunix_lite.basics.plain_text import shortened
from tunix_lite.tasks.files import FilesTaskConfig
from tunix_lite.tasks.messages import Message, conversation_of, fields_of, messages_in
from tunix_lite.tasks.prompt_text import PromptTemplate

FIELDS = ("chosen", "rejected")


@dataclass(frozen=True)
class _PairTemplate(PromptTemplate):
    """A prompt template whose examples have two answers: texts, or whole conversations."""

    def check(self, row: dict) -> dict:
        """The row with `chosen` and `rejected` as texts, or as messages where an answer is more
        than a text. Where there is no prompt, that of `chosen` is it, as `messages`. Raises
        ValueError for a row that is no such pair."""
        for name in FIELDS:
            if row.get(name) is None:
                raise ValueError(f"a preference needs `{name}`; this one has {fields_of(row)}")
        turns = {name: _turns(name, row[name]) for name in FIELDS}
        pair = dict(row)
        # the messages with which a conversation begins; None: whatever is before its last turn
        before = None
        if self.prompt is None and row.get("prompt") is None and row.get("messages") is None:
            before = turns["chosen"][:-1]
            if not before:
                raise ValueError(
                    "a preference needs a `prompt`, or `chosen` and `rejected` as conversations "
                    "that begin with the same messages"
                )
            pair["messages"] = list(row["chosen"][:-1])
        elif self.prompt is None:
            before = conversation_of(row)

        answers = []
        for name, messages in turns.items():
            begin = 0
            if messages[0].role != "assistant":
                begin = len(messages) - 1 if before is None else len(before)
            start = _stripped(messages[:begin])
            if begin and before is not None and start != _stripped(before):
                raise ValueError(
                    f"`{name}` begins with other messages than the prompt of the row; leave "
                    "`prompt` or `messages` out of the row, or let `chosen` and `rejected` hold "
                    "the answers alone"
                )
            answer = messages[begin:]
            answers.append(answer)
            is_text = len(answer) == 1 and answer[0].more is None
            pair[name] = answer[0].content if is_text else list(row[name][begin:])
        if answers[0] == answers[1]:
            raise ValueError(
                f"`chosen` and `rejected` are the same: {shortened(row['chosen'])}"
            )
        return super().check(pair | {"completion": pair["chosen"]})


def _turns(name: str, answer: object) -> list[Message]:
    """An answer as messages. Raises ValueError for one that does not end with the assistant."""
    if isinstance(answer, str):
        return [Message("assistant", answer)]
    turns = messages_in(name, answer)
    if turns[-1].role != "assistant":
        raise ValueError(f"`{name}` does not end with the assistant")
    return turns


def _stripped(turns: list[Message]) -> list[Message]:
    return [turn._replace(content=turn.text.strip()) for turn in turns]


@dataclass(frozen=True)
class PreferencesTaskConfig(FilesTaskConfig):
    """A task of pairs: each row has `prompt`, `chosen` and `rejected`.
    Example: task=preferences algorithm=dpo task.train=pairs.jsonl"""

    reads = _PairTemplate


def is_chosen(completion: str, example: dict) -> float:
    """1 if the completion is the chosen one, but for white space around it, else 0."""
    [*_, last] = _turns("chosen", example["chosen"])
    return float(completion.strip() == last.text.strip())
