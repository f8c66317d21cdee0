"""A row of data as text and as tokens, and which special tokens in it are only text."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from string import Formatter
from typing import Any, NamedTuple

import numpy as np

from tunix_lite.models.tokenizer import Quoted, Tokenizer
from tunix_lite.models.turns import TurnTokens
from tunix_lite.plain_text import SHOWN, shortened
from tunix_lite.tasks.row_files import Rows

NO_TEXT = "half of a character (a lone surrogate), which is no text"
# letters, one of which marks what the fields of an example put into a prompt
FILLERS = range(0x4E00, 0x9FA5)
ROLES = ("system", "user", "assistant", "tool")


class Message(NamedTuple):
    """A turn of a conversation.

    Example: Message("user", "What is 1 + 2?").
    """

    role: str
    content: str | Quoted
    # what made the content of the example's fields; None: the content is data as a whole
    template: str | None = None


@dataclass(frozen=True)
class PromptTemplate:
    """How the fields of an example become the messages that a prompt is made of.

    Example: PromptTemplate("What is {q}?").messages({"q": "1 + 2"}) -> [Message("user", "What is 1
    + 2?", ...)].
    """

    # the user's message; None: the field `messages`, or else `prompt`, of an example has it
    prompt: str | None
    system: str | None = None  # before it; {names} are fields here, too
    answered: str = "last"  # which assistant turn of `messages` is not asked but learned: last, all

    def messages(self, example: dict) -> list[Message]:
        """The messages that the model answers. Raises ValueError if the example does not fit."""
        if self.prompt is not None:
            asked = [Message("user", self._filled_in("prompt", self.prompt, example), self.prompt)]
        else:
            asked, _ = self.split(example)
        if self.system is None or asked[0].role == "system":
            return asked
        return self.with_system(asked, example)

    def with_system(self, asked: list[Message], example: dict) -> list[Message]:
        """The messages after the system message, which there must be."""
        system = self._filled_in("system", self.system, example)
        return [Message("system", system, self.system), *asked]

    def check(self, example: dict) -> None:
        """Raises ValueError if the example makes no messages, or none that are text."""
        text = "\n".join(message.content for message in self.messages(example))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{NO_TEXT}, in {shortened(text)}") from error

    def split(self, example: dict) -> tuple[list[Message], list[Message]]:
        """The conversation of an example: what is asked, and the turns that answer and follow."""
        turns = conversation_of(example)
        answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        if self.answered == "last" and (not answers or answers[-1] != len(turns) - 1):
            return turns, []
        if not answers:
            return turns, []
        first = answers[0] if self.answered == "all" else answers[-1]
        if not first:
            raise ValueError("a conversation begins with the assistant; nothing is asked")
        return turns[:first], turns[first : answers[-1] + 1]

    def _filled_in(self, name: str, template: str, example: dict) -> str:
        # null would become the word None in the prompt
        for column in _fields_of(template):
            if "." in column or "[" in column:
                raise ValueError(
                    f"task.{name} has {{{column}}}; write the name of a column alone, without `.` "
                    "and `[`"
                )
            if column in example and example[column] is None:
                raise ValueError(
                    f"task.{name} names {column!r}, which is null here; it needs a value"
                )
        try:
            return template.format(**example)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(_misfit(name, template, example, error)) from error


def conversation_of(example: dict) -> list[Message]:
    """The messages in the field `messages`, or in `prompt`: a text, or a list of {role, content}.

    Raises ValueError for anything else.
    """
    name = "messages" if "messages" in example else "prompt"
    if name not in example:
        raise ValueError(
            "an example needs a field `prompt` or `messages`, or give "
            f"task.prompt='...{{column}}...'; this one has {_fields(example)}"
        )
    turns = example[name]
    if isinstance(turns, str) and name == "prompt":
        return [Message("user", turns)]
    if not isinstance(turns, list | tuple) or not turns:
        raise ValueError(f"`{name}` is {shortened(turns)}; it is a list of {{role, content}}")
    found = []
    for turn in turns:
        is_message = isinstance(turn, Mapping) and {"role", "content"} <= turn.keys()
        if not is_message or not isinstance(turn["content"], str) or turn["role"] not in ROLES:
            raise ValueError(
                f"`{name}` holds {shortened(turn)}; a message has a role ({', '.join(ROLES)}) and "
                "a content, which is text"
            )
        found.append(Message(turn["role"], turn["content"]))
    return found


@dataclass(frozen=True)
class PromptText:
    """How the examples of a task become text and tokens.

    Example: PromptText(PromptTemplate("{q}?"), "text", tokenizer, source).ask({"q": "1 + 2"}) is "1
    + 2?".
    """

    template: PromptTemplate
    special_tokens_in_data: str  # of TaskConfig
    tokenizer: Tokenizer
    source: Any  # messages say where in it an example stands
    variables: dict = field(default_factory=dict)  # for the chat template, such as `tools`

    @cached_property
    def turn_tokens(self) -> TurnTokens:
        """How what is answered to a turn becomes tokens."""
        return TurnTokens(self.tokenizer, self.special_tokens_in_data, self.variables)

    def ask(self, example: dict) -> str:
        """The user's message for an example, the last one if there are several. Raises ValueError
        if the example does not fit."""
        return self.template.messages(example)[-1].content

    def prompt(self, example: dict) -> list[int]:
        """The tokens of the prompt, however many. ValueError, with the place of the example, if
        there are none."""
        with self._naming(example):
            row = self.tokenizer.prompt(self._asked(example), **self.variables)
        if not row:
            raise ValueError(self._empty(example))
        return row

    def demonstration(self, example: dict) -> tuple[list[int], list[bool]]:
        """The tokens of the answer to learn from, and which of them are learned: of an answer in
        several turns only those of the assistant. Each turn ends with the token that ends it."""
        with self._naming(example):
            asked = self._asked(example)
            turns = [
                Message(role, self._as_data(content, self.tokenizer.special_in(content)))
                for role, content, _ in self.completion(example)
            ]
            if len(turns) > 1:
                return self._answered(asked, turns)
            answer = self.tokenizer.demonstration(asked, turns[0].content, **self.variables)
            return answer, [True] * len(answer)

    def _answered(
        self, asked: str | Quoted | list[dict], turns: list[Message]
    ) -> tuple[list[int], list[bool]]:
        """The tokens of several turns that follow a prompt, and which are the assistant's."""
        history = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        num_answered = len(history)
        tokens: list[int] = []
        learned: list[bool] = []
        for turn in turns:
            if turn.role == "assistant":
                # what was asked since the last answer; the prompt holds what was before the first
                if tokens:
                    tokens += self.tokenizer.between(
                        history[:num_answered], history, **self.variables
                    )
                    learned += [False] * (len(tokens) - len(learned))
                tokens += self.tokenizer.demonstration(history, turn.content, **self.variables)
                learned += [True] * (len(tokens) - len(learned))
                num_answered = len(history) + 1
            history = [*history, {"role": turn.role, "content": turn.content}]
        return tokens, learned

    def length(self, example: dict) -> int:
        """Tokens of the prompt."""
        return len(self.prompt(example))

    def completion(self, example: dict) -> list[Message]:
        """The turns to learn from: the text `completion`, or what answers in `messages`. Raises
        ValueError if there is none."""
        if "completion" not in example and self.template.prompt is None:
            _, turns = self.template.split(example)
            if turns:
                return turns
        if "completion" not in example:
            raise ValueError(
                "an example for sft needs a `completion`; this one has "
                f"{', '.join(map(str, example))[:SHOWN]}"
            )
        if not isinstance(completion := example["completion"], str):
            raise ValueError(f"a `completion` is a text; this one is {shortened(completion)}")
        return [Message("assistant", completion)]

    def place(self, example: dict) -> str:
        """File, line and a colon, of an example that comes from a file; else nothing."""
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

    def _empty(self, example: dict) -> str:
        wrong = f"the prompt of the example {shortened(example)} has no tokens"
        return f"{self.place(example)}{wrong}; task.prompt={shortened(self.template.prompt)}"

    def _asked(self, example: dict) -> str | Quoted | list[dict]:
        """What the tokenizer makes a prompt of: a message, or a conversation."""
        messages = self.template.messages(example)
        contents = [
            self._as_data(message.content, self._special_in(message, example))
            for message in messages
        ]
        if len(messages) == 1 and messages[0].role == "user":
            return contents[0]
        return [
            {"role": message.role, "content": content}
            for message, content in zip(messages, contents)
        ]

    # ---- special tokens in data

    def spells_special(self, example: dict, demonstrates: bool) -> bool:
        """Whether data spells a special token in the prompt of the example or, if `demonstrates`,
        in what is learned."""
        messages = self.template.messages(example)
        spells = [bool(self._special_in(message, example)) for message in messages]
        if demonstrates:
            turns = self.completion(example)
            spells += [bool(self.tokenizer.special_in(turn.content)) for turn in turns]
        return any(spells)

    def _special_in(self, message: Message, example: dict) -> list[tuple[int, int]]:
        """Where fields of the example spell special tokens in a message, [start, end) each; those
        of task.prompt and task.system themselves are meant."""
        text, template = message.content, message.template
        if not (spelled := self.tokenizer.special_in(text)) or template is None:
            return spelled
        filler = next(c for c in map(chr, FILLERS) if c not in text and c not in template)
        filled = template.format(**_filled(example, filler))
        if len(filled) == len(text) and all(f in (m, filler) for f, m in zip(filled, text)):
            return [(start, end) for start, end in spelled if filler in filled[start:end]]
        if all(text[start:end] not in template for start, end in spelled):
            return spelled
        name = "prompt" if message.role == "user" else "system"
        both = (
            f"task.{name}={shortened(template)} and {shortened(example)} both hold a special token"
        )
        hidden = "and with !r or a format it cannot be told which one is of the data"
        raise ValueError(
            f"{both}, {hidden}; leave the format out, or set task.special_tokens_in_data=control"
        )

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


@lru_cache(maxsize=64)
def _fields_of(template: str) -> tuple[str, ...]:
    """The fields that a template names; none of one that is no template, which is refused later."""
    try:
        return tuple(name for _, name, _, _ in Formatter().parse(template) if name)
    except ValueError:
        return ()


def _misfit(name: str, template: str, example: dict, error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"task.{name} names {error}, but an example has {_fields(example)}"
    wrong = (
        f"task.{name}={shortened(template)} does not fit the example {shortened(example)} ({error})"
    )
    return f"{wrong}; write {{name}} for a field, {{{{ for a brace"


def _fields(example: dict) -> str:
    fields = ", ".join(map(str, example))
    return fields if len(fields) <= SHOWN else f"{fields[:SHOWN]}…"


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
) -> list[tuple[list[int], list[bool]]]:
    """The tokens of each demonstration, and which of them are learned. Raises ValueError for one of
    more than `max_new_tokens`."""
    rows = []
    for example in examples:
        row, learned = text.demonstration(example)
        if len(row) > max_new_tokens:
            shown = shortened(text.completion(example)[0].content)
            raise ValueError(
                f"{text.place(example)}the completion {shown} has "
                f"{len(row)} tokens, "
                f"more than generation.max_new_tokens={max_new_tokens}; raise it to at "
                f"least {len(row)}"
            )
        rows.append((row, learned))
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
