"""Pairs of completions of one prompt, one preferred to the other: data for algorithm=dpo."""

from dataclasses import dataclass
from typing import Any

from tunix_lite.plain_text import shortened
from tunix_lite.tasks.files import FileRows, FilesTaskConfig
from tunix_lite.tasks.messages import Message, conversation_of, fields_of, messages_in
from tunix_lite.tasks.prompt_text import PromptTemplate
from tunix_lite.tasks.row_files import Rows

FIELDS = ("chosen", "rejected")


@dataclass(frozen=True)
class PairTemplate(PromptTemplate):
    """A prompt template whose examples have two answers, too: texts, or conversations that end with
    the assistant.

    Example: an example has `prompt`, `chosen` and `rejected`.
    """

    def check(self, example: dict) -> None:
        """Raises ValueError if the example makes no prompt with two different answers."""
        super().check(self.pair(example))

    def pair(self, row: dict) -> dict:
        """The row with `chosen` and `rejected` as texts, or as messages where an answer is more
        than a text. Where there is no prompt but what the two conversations have in common, with
        that as `messages`."""
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
            begins = {name: self._answer_begins(name, turns[name], row) for name in FIELDS}
        answers = {name: turns[name][begins[name] :] for name in FIELDS}
        if answers["chosen"] == answers["rejected"]:
            raise ValueError(f"`chosen` and `rejected` are the same: {shortened(row['chosen'])}")
        for name, answer in answers.items():
            is_text = len(answer) == 1 and answer[0].more is None
            pair[name] = answer[0].content if is_text else list(row[name][begins[name] :])
        return pair | {"completion": pair["chosen"]}

    def _answer_begins(self, name: str, turns: list[Message], row: dict) -> int:
        """The turn with which an answer begins, whose conversation may begin with the prompt."""
        if turns[0].role == "assistant":
            return 0
        if self.prompt is not None:
            return len(turns) - 1
        prompt = conversation_of(row)
        if [_stripped(turn) for turn in turns[: len(prompt)]] != list(map(_stripped, prompt)):
            raise ValueError(
                f"`{name}` begins with other messages than the prompt of the row; leave "
                "`prompt` or `messages` out of the row, or let `chosen` and `rejected` hold the "
                "answers alone"
            )
        return len(prompt)


def _turns(name: str, answer: Any) -> list[Message]:
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
class PairRows(FileRows):
    """The rows of files as pairs.

    Example: `task=preferences task.train=pairs.jsonl` makes one.
    """

    @property
    def train(self) -> Rows:
        """The pairs to learn from."""
        return super().train.changed(self.template.pair, self.template)

    @property
    def held_out(self) -> Rows:
        """The pairs to evaluate with."""
        return super().held_out.changed(self.template.pair, self.template)


@dataclass(frozen=True)
class PreferencesTaskConfig(FilesTaskConfig):
    """A task of pairs: each row has `prompt`, `chosen` and `rejected`.

    Example: task=preferences algorithm=dpo task.train=pairs.jsonl
    """

    def __post_init__(self):
        if not self.in_memory:
            raise ValueError("in_memory=false is not for preferences")
        if self.shuffle_buffer is not None:
            raise ValueError("shuffle_buffer is not for preferences")
        super().__post_init__()
        rows = self.source
        template = PairTemplate(self.prompt, self.system, self.learned_turns)
        source = PairRows(rows.train_file, rows.held_out_file, rows.format, rows.on_error, template)
        object.__setattr__(self, "source", source)


def is_chosen(completion: str, example: dict) -> float:
    """1 if the completion is the chosen one, but for white space around it, else 0."""
    [*_, last] = _turns("chosen", example["chosen"])
    return float(completion.strip() == last.text.strip())
