"""Decides which rows of data a run can take, and makes their tokens, of limited length.

A row does not fit if its prompt or what is to be learned from it is too long, if the chat template
refuses it, or if there is nothing to learn from. generation.long_prompts says what becomes of one
that is too long, and task.on_error=skip leaves out all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tunix_lite.plain_text import shortened
from tunix_lite.tasks.prompt_text import PromptText

TRUNCATE = "or set generation.long_prompts=truncate or drop"


class Look(NamedTuple):
    """Result of a look at a row.

    Example: Look("train.jsonl, line 3: the prompt 'What ...' has 60 tokens, more than ...", 60).
    """

    why: str  # why the row is left out, with its place; "": it is not
    prompt_length: int | None = None  # tokens; None: something else than the prompt is wrong

    @property
    def fits(self) -> bool:
        """True if the run takes the row."""
        return not self.why


@dataclass(frozen=True)
class RowLimits:
    """Conditions that a row must meet to be taken.

    Example: RowLimits(48, 16, "drop", ("completion",), skips=False).
    """

    max_prompt_length: int
    max_new_tokens: int
    long_prompts: str  # treatment of prompts that are too long: error, truncate or drop
    learned: tuple[str, ...]  # the fields that the algorithm learns from; () for sampled ones
    skips: bool  # task.on_error=skip: what would be an error is left out

    @property
    def leaves_out(self) -> bool:
        """True if some rows may be left out; else one that cannot be taken is an error."""
        return self.long_prompts == "drop" or self.skips

    @property
    def setting(self) -> str:
        """The setting by which rows are left out, for messages."""
        return "task.on_error=skip" if self.skips else "generation.long_prompts=drop"

    def look(self, text: PromptText, example: dict) -> Look:
        """Tells if the example is taken, and if not, why. Raises ValueError for what no setting
        leaves out."""
        try:
            return self._look(text, example)
        except ValueError as error:
            if not self.skips:
                raise
            return Look(str(error))

    def _look(self, text: PromptText, example: dict) -> Look:
        length = text.length(example)
        cuts = self.long_prompts == "truncate"
        if length > self.max_prompt_length and not cuts:
            return Look(_long_prompt(text, example, length, self.max_prompt_length), length)
        for name in self.learned:
            tokens = len(text.demonstration(example, name)[0])
            if tokens > self.max_new_tokens and not cuts:
                return Look(_long_completion(text, example, name, tokens, self.max_new_tokens))
        return Look("", length)


def _long_prompt(text: PromptText, example: dict, length: int, width: int) -> str:
    return (
        f"{text.place(example)}the prompt {shortened(text.ask(example))} has "
        f"{length} tokens, more than "
        f"generation.max_prompt_length={width}; raise it to at least {length}, {TRUNCATE}"
    )


def _long_completion(text: PromptText, example: dict, name: str, length: int, most: int) -> str:
    what = "completion" if name == "completion" else f"`{name}`"
    shown = shortened(text.completion(example, name)[0].text)
    return (
        f"{text.place(example)}the {what} {shown} has {length} tokens, more than "
        f"generation.max_new_tokens={most}; raise it to at least {length}, {TRUNCATE}"
    )


def fitted_prompts(
    text: PromptText, examples: Sequence[dict], width: int, truncates: bool
) -> list[list[int]]:
    """The tokens of each prompt, at most `width` of them. A longer one keeps its last tokens if
    `truncates`, or is a ValueError naming it."""
    rows = [text.prompt(example) for example in examples]
    if truncates:
        rows = [row[-width:] for row in rows]
    for example, row in zip(examples, rows):
        if len(row) > width:
            raise ValueError(_long_prompt(text, example, len(row), width))
    return rows


def fitted_completions(
    text: PromptText, examples: Sequence[dict], name: str, most: int, truncates: bool
) -> list[tuple[list[int], list[bool]]]:
    """The tokens of each demonstration in the field `name`, and which of them are learned. One of
    more than `most` keeps its first tokens if `truncates`, or is a ValueError naming it."""
    rows = []
    for example in examples:
        row, learned = text.demonstration(example, name)
        if len(row) > most and not truncates:
            raise ValueError(_long_completion(text, example, name, len(row), most))
        rows.append((row[:most], learned[:most]))
    return rows


def side_by_side(
    prompts: list[list[int]],
    completions: list[tuple[list[int], list[bool]]],
    widths: tuple[int, int],
    pad_id: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, token_mask, completion_mask, [B, T] each: left-padded prompts, then right-padded
    completions. widths: columns of prompts and of completions."""
    middle = widths[0]
    shape = (len(prompts), sum(widths))
    tokens = np.full(shape, pad_id, np.int32)
    token_mask = np.zeros(shape, bool)
    completion_mask = np.zeros(shape, bool)
    for i, (prompt, (completion, learned)) in enumerate(zip(prompts, completions)):
        begin = middle - len(prompt)
        end = middle + len(completion)
        tokens[i, begin:end] = [*prompt, *completion]
        token_mask[i, begin:end] = True
        completion_mask[i, middle:end] = learned
    return tokens, token_mask, completion_mask
