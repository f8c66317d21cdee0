"""A row of data as text and as tokens, and which special tokens in it are only text."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunix_lite.models.tokenizer import Quoted, Tokenizer
from tunix_lite.plain_text import SHOWN, shortened
from tunix_lite.tasks.sources import Rows

# letters, one of which marks what the fields of an example put into a prompt
FILLERS = range(0x4E00, 0x9FA5)


@dataclass(frozen=True)
class PromptText:
    """How the examples of a task become text and tokens.

    Example: PromptText("What is {q}?", "text", tokenizer, source).ask({"q": "1 + 2"}) is "What is 1
    + 2?".
    """

    template: str  # TaskConfig.prompt
    special_tokens_in_data: str  # of TaskConfig
    tokenizer: Tokenizer
    source: Any  # messages say where in it an example stands

    def ask(self, example: dict) -> str:
        """The user's message for an example. Raises ValueError if the template does not fit."""
        try:
            return self.template.format(**example)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(self._misfit(example, error)) from error

    def prompt(self, example: dict) -> list[int]:
        """The tokens of the prompt, however many. ValueError, with the place of the example, if
        there are none."""
        with self._naming(example):
            row = self.tokenizer.prompt(self._message(example))
        if not row:
            raise ValueError(self._empty(example))
        return row

    def demonstration(self, example: dict) -> list[int]:
        """The tokens of the example's `completion`, with the one that ends the turn."""
        with self._naming(example):
            completion = self.completion(example)
            quoted = self._as_data(completion, self.tokenizer.special_in(completion))
            return self.tokenizer.demonstration(self._message(example), quoted)

    def length(self, example: dict) -> int:
        """Tokens of the prompt."""
        return len(self.prompt(example))

    def completion(self, example: dict) -> str:
        """The text to learn from. Raises ValueError if there is none."""
        if "completion" not in example:
            raise ValueError(
                "an example for sft needs a `completion`; this one has "
                f"{', '.join(map(str, example))[:SHOWN]}"
            )
        if not isinstance(completion := example["completion"], str):
            raise ValueError(f"a `completion` is a text; this one is {shortened(completion)}")
        return completion

    def place(self, example: dict) -> str:
        """`train.jsonl, line 250: ` of an example that comes from a file; else nothing."""
        for rows in (getattr(self.source, name, None) for name in ("train", "held_out")):
            if isinstance(rows, Rows):
                for index, row in enumerate(rows):
                    if row is example:
                        return f"{rows.where(index)}: "
        return ""

    @contextlib.contextmanager
    def _naming(self, example: dict) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.place(example)}{error}") from error

    # ---- messages

    def _misfit(self, example: dict, error: Exception) -> str:
        if isinstance(error, KeyError):
            fields = ", ".join(map(str, example))
            fields = fields if len(fields) <= SHOWN else f"{fields[:SHOWN]}…"
            return f"task.prompt names {error}, but an example has {fields}"
        wrong = (
            f"task.prompt={shortened(self.template)} does not fit the example "
            f"{shortened(example)} ({error})"
        )
        return f"{wrong}; write {{name}} for a field, {{{{ for a brace"

    def _empty(self, example: dict) -> str:
        wrong = f"the prompt of the example {shortened(example)} has no tokens"
        return f"{self.place(example)}{wrong}; task.prompt={shortened(self.template)}"

    # ---- special tokens in data

    def special_in(self, message: str, example: dict) -> list[tuple[int, int]]:
        """Where fields of the example spell special tokens in its message, [start, end) each; those
        of task.prompt itself are meant."""
        if not (spelled := self.tokenizer.special_in(message)):
            return []
        filler = next(c for c in map(chr, FILLERS) if c not in message and c not in self.template)
        filled = self.template.format(**_filled(example, filler))
        if len(filled) == len(message) and all(f in (m, filler) for f, m in zip(filled, message)):
            return [(start, end) for start, end in spelled if filler in filled[start:end]]
        if all(message[start:end] not in self.template for start, end in spelled):
            return spelled
        both = (
            f"task.prompt={shortened(self.template)} and {shortened(example)} both hold a "
            "special token"
        )
        hidden = "and !r or a format hides which is which"
        raise ValueError(
            f"{both}, {hidden}; leave that out, or set task.special_tokens_in_data=control"
        )

    def _message(self, example: dict) -> str | Quoted:
        message = self.ask(example)
        return self._as_data(message, self.special_in(message, example))

    def _as_data(self, text: str, spelled: list[tuple[int, int]]) -> str | Quoted:
        """The text as the tokenizer shall take it, with special tokens of the data in these
        places."""
        if not spelled or self.special_tokens_in_data == "control":
            return text
        if self.special_tokens_in_data == "text":
            return Quoted(text, tuple(spelled))
        start, end = spelled[0]
        raise ValueError(
            f"{shortened(text)} holds the special token {text[start:end]!r}; "
            "task.special_tokens_in_data=text takes it "
            "as mere letters, control as the token"
        )


def _filled(value: Any, filler: str) -> Any:
    """An example with every text in it replaced by one letter, as often as the text has letters."""
    if isinstance(value, str):
        return filler * len(value)
    if isinstance(value, Mapping):
        return {key: _filled(item, filler) for key, item in value.items()}
    return [_filled(item, filler) for item in value] if isinstance(value, list | tuple) else value


# ---- tokens of a batch


def fitted_prompts(
    text: PromptText, examples: list[dict], width: int, truncates: bool
) -> list[list[int]]:
    """The tokens of each prompt, at most `width` of them. A longer one keeps its last tokens if
    `truncates`, or is a ValueError naming it."""
    rows = [text.prompt(example) for example in examples]
    if truncates:
        rows = [row[-width:] for row in rows]
    for example, row in zip(examples, rows):
        if len(row) > width:
            raise ValueError(_too_long(text, example, len(row), width))
    return rows


def _too_long(text: PromptText, example: dict, length: int, width: int) -> str:
    return (
        f"{text.place(example)}the prompt {shortened(text.ask(example))} has "
        f"{length} tokens, more than "
        f"generation.max_prompt_length={width}; raise it to at least {length}, "
        "or set generation.long_prompts=truncate or drop"
    )


def fitted_completions(
    text: PromptText, examples: list[dict], max_new_tokens: int
) -> list[list[int]]:
    """The tokens of each demonstration. Raises ValueError for one of more than `max_new_tokens`."""
    rows = []
    for example in examples:
        row = text.demonstration(example)
        if len(row) > max_new_tokens:
            raise ValueError(
                f"{text.place(example)}the completion {shortened(example['completion'])} has "
                f"{len(row)} tokens, "
                f"more than generation.max_new_tokens={max_new_tokens}; raise it to at "
                f"least {len(row)}"
            )
        rows.append(row)
    return rows


def side_by_side(
    prompts: list[list[int]], completions: list[list[int]], widths: tuple[int, int], pad_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, token_mask, completion_mask, [B, T] each: left-padded prompts, then right-padded
    completions. widths: columns of prompts and of completions."""
    middle = widths[0]
    shape = (len(prompts), sum(widths))
    tokens = np.full(shape, pad_id, np.int32)
    token_mask = np.zeros(shape, bool)
    completion_mask = np.zeros(shape, bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions)):
        begin = middle - len(prompt)
        end = middle + len(completion)
        tokens[i, begin:end] = [*prompt, *completion]
        token_mask[i, begin:end] = True
        completion_mask[i, middle:end] = True
    return tokens, token_mask, completion_mask
