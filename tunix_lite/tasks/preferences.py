"""Pairs of completions of one prompt, one preferred to the other: data for algorithm=dpo."""

from dataclasses import dataclass

from tunix_lite.files.plain_text import shortened
from tunix_lite.tasks.files import FilesTaskConfig
from tunix_lite.tasks.messages import Message, conversation_of, fields_of, messages_in
from tunix_lite.tasks.prompt_text import PromptTemplate

FIELDS = ("chosen", "rejected")


@dataclass(frozen=True)
class PairTemplate(PromptTemplate):
    """A prompt template whose examples have two answers, too: texts, or conversations that end with
    the assistant.

    Example: an example has `prompt`, `chosen` and `rejected`.
    """

    def check(self, row: dict) -> dict:
        """The row with `chosen` and `rejected` as texts, or as messages where an answer is more
        than a text. Where there is no prompt but what the two conversations have in common, with
        that as `messages`. Raises ValueError for a row that is no such pair."""
        for name in FIELDS:
            if row.get(name) is None:
                raise ValueError(f"a preference needs `{name}`; this one has {fields_of(row)}")
        turns = {name: _turns(name, row[name]) for name in FIELDS}
        pair = dict(row)
        if self.prompt is None and row.get("prompt") is None and row.get("messages") is None:
            before = {name: messages[:-1] for name, messages in turns.items()}
            if not before["chosen"] or before["chosen"] != before["rejected"]:
                raise ValueError(
                    "a preference needs a `prompt`, or `chosen` and `rejected` as conversations "
                    "that differ in the last turn alone"
                )
            pair["messages"] = list(row["chosen"][:-1])
            begins = dict.fromkeys(FIELDS, len(before["chosen"]))
        else:
            begins = {}
            prompt = (
                [] if self.prompt is not None else list(map(_stripped, conversation_of(row)))
            )
            for name, messages in turns.items():
                # an answer alone, or a conversation that begins with the prompt
                begins[name] = 0 if messages[0].role == "assistant" else len(prompt)
                if self.prompt is not None and messages[0].role != "assistant":
                    begins[name] = len(messages) - 1
                elif list(map(_stripped, messages[: begins[name]])) != prompt[: begins[name]]:
                    raise ValueError(
                        f"`{name}` begins with other messages than the prompt of the row; leave "
                        "`prompt` or `messages` out of the row, or let `chosen` and `rejected` "
                        "hold the answers alone"
                    )
        answers = {name: turns[name][begins[name] :] for name in FIELDS}
        if answers["chosen"] == answers["rejected"]:
            raise ValueError(f"`chosen` and `rejected` are the same: {shortened(row['chosen'])}")
        for name, answer in answers.items():
            is_text = len(answer) == 1 and answer[0].more is None
            pair[name] = answer[0].content if is_text else list(row[name][begins[name] :])
        return super().check(pair | {"completion": pair["chosen"]})


def _turns(name: str, answer: object) -> list[Message]:
    """An answer as messages. Raises ValueError for one that does not end with the assistant."""
    if isinstance(answer, str):
        return [Message("assistant", answer)]
    turns = messages_in(name, answer)
    if turns[-1].role != "assistant":
        raise ValueError(f"`{name}` does not end with the assistant")
    return turns


def _stripped(turn: Message) -> Message:
    return turn._replace(content=turn.text.strip())


@dataclass(frozen=True)
class PreferencesTaskConfig(FilesTaskConfig):
    """A task of pairs: each row has `prompt`, `chosen` and `rejected`.

    Example: task=preferences algorithm=dpo task.train=pairs.jsonl
    """

    @property
    def row_template(self) -> PairTemplate:
        """Template that makes pairs of the rows."""
        return PairTemplate(self.prompt, self.system, self.learned_turns)


def is_chosen(completion: str, example: dict) -> float:
    """1 if the completion is the chosen one, but for white space around it, else 0."""
    [*_, last] = _turns("chosen", example["chosen"])
    return float(completion.strip() == last.text.strip())
