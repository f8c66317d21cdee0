"""Pairs of completions of one prompt, one preferred to the other: data for algorithm=dpo."""

from dataclasses import dataclass
from typing import Any

from tunix_lite.plain_text import shortened
from tunix_lite.tasks.files import FileRows, FilesTaskConfig
from tunix_lite.tasks.prompt_text import PromptTemplate, conversation_of
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
        """The row with `chosen` and `rejected` as texts; where there is no prompt but what the two
        conversations have in common, with that as `messages`."""
        answers = {}
        asked: dict[str, Any] = {}
        for name in FIELDS:
            if name not in row:
                raise ValueError(f"a preference needs `{name}`; this one has {', '.join(row)}")
            answers[name] = row[name]
            if not isinstance(row[name], str):
                *before, last = conversation_of({"messages": row[name]})
                if last.role != "assistant":
                    raise ValueError(f"`{name}` does not end with the assistant")
                answers[name] = last.content
                asked[name] = [{"role": turn.role, "content": turn.content} for turn in before]
        if answers["chosen"] == answers["rejected"]:
            raise ValueError(f"`chosen` and `rejected` are the same: {shortened(row['chosen'])}")
        pair = {**row, **answers, "completion": answers["chosen"]}
        if self.prompt is None and "prompt" not in row and "messages" not in row:
            if len(asked) != 2 or asked["chosen"] != asked["rejected"]:
                raise ValueError(
                    "a preference needs a `prompt`, or `chosen` and `rejected` as conversations "
                    "that differ in the last turn alone"
                )
            pair["messages"] = asked["chosen"]
        return pair


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
    return float(completion.strip() == example["chosen"].strip())
