"""Decides which rows of data a run can take.

A row does not fit if its prompt or what is to be learned from it is too long, if the chat template
refuses it, or if there is nothing to learn from. generation.long_prompts says what becomes of one
that is too long, and task.on_error=skip leaves out all of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tunix_lite.files.plain_text import shortened
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
        """Tells if the example is taken. Raises ValueError for what no setting leaves out."""
        cuts = self.long_prompts == "truncate"
        try:
            length = text.length(example)
            if length > self.max_prompt_length and not cuts:
                return Look(long_prompt(text, example, length, self.max_prompt_length), length)
            for name in self.learned:
                tokens = len(text.demonstration(example, name)[0])
                if tokens > self.max_new_tokens and not cuts:
                    return Look(
                        long_completion(text, example, name, tokens, self.max_new_tokens)
                    )
        except ValueError as error:
            if not self.skips:
                raise
            return Look(str(error))
        return Look("", length)


def long_prompt(text: PromptText, example: dict, length: int, width: int) -> str:
    """Describes a prompt of more than `width` tokens."""
    return (
        f"{text.place(example)}the prompt {shortened(text.ask(example))} has "
        f"{length} tokens, more than "
        f"generation.max_prompt_length={width}; raise it to at least {length}, {TRUNCATE}"
    )


def long_completion(text: PromptText, example: dict, name: str, length: int, most: int) -> str:
    """Describes a demonstration of more than `most` tokens in the field `name`."""
    what = "completion" if name == "completion" else f"`{name}`"
    shown = shortened(text.completion(example, name)[0].text)
    return (
        f"{text.place(example)}the {what} {shown} has {length} tokens, more than "
        f"generation.max_new_tokens={most}; raise it to at least {length}, {TRUNCATE}"
    )
