"""A row of data as text and as tokens, and which special tokens in it are only text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from string import Formatter

from tunix_lite.basics.errors import error_context
from tunix_lite.basics.plain_text import shortened
from tunix_lite.models.chat_template import REASONING
from tunix_lite.models.tokenizer import Tokenizer, as_data
from tunix_lite.models.turns import TurnTokens
from tunix_lite.tasks.messages import (
    FREE,
    Message,
    conversation_of,
    fields_of,
    messages_in,
    tools_in,
)
from tunix_lite.tasks.row_files import place_of

NO_TEXT = "half of a character (a lone surrogate), which is no text"


@dataclass(frozen=True)
class PromptTemplate:
    """Turns the fields of an example into the messages that a prompt is made of.
    Example: PromptTemplate("What is {q}?").messages({"q": "1 + 2"}) -> [Message("user", "What is 1
    + 2?", ...)]."""

    # the user's message; None: the field `messages`, or else `prompt`, of an example has it
    prompt: str | None
    system: str | None = None  # before it; {names} are fields here, too
    # which assistant turn of `messages` is not asked but learned: last, all
    answered: str = "last"

    def messages(self, example: dict) -> list[Message]:
        """The messages that the model answers. Raises ValueError if the example does not fit."""
        if self.prompt is not None:
            messages = [Message("user", *self._filled_in("prompt", self.prompt, example))]
        else:
            messages, _ = self.split(example)
        if self.system is None or messages[0].role == "system":
            return messages
        return self.with_system(messages, example)

    def with_system(self, messages: list[Message], example: dict) -> list[Message]:
        """The messages after the system message, which there must be."""
        return [Message("system", *self._filled_in("system", self.system, example)), *messages]

    def tools(self, example: dict) -> list[dict] | None:
        """The tools of the row for the chat template; None: it has none, or task.prompt or
        task.system writes that column. Raises ValueError for what is no list of tools."""
        written = [*_fields_of(self.prompt or ""), *_fields_of(self.system or "")]
        return None if "tools" in written else tools_in(example)

    def hash(self, example: dict) -> int:
        """Returns a 64-bit hash of the prompt; the same within one process."""
        return hash(repr((self.messages(example), self.tools(example))))

    def check(self, example: dict) -> dict:
        """The example. Raises ValueError if it makes no messages, or none that are text."""
        text = "\n".join(message.text for message in self.messages(example))
        self.tools(example)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{NO_TEXT}, in {shortened(text)}") from error
        return example

    def split(self, example: dict) -> tuple[list[Message], list[Message]]:
        """The conversation of an example: what is asked, and the turns that answer and follow."""
        turns = conversation_of(example)
        answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        is_last = self.answered == "last"
        if not answers or (is_last and answers[-1] != len(turns) - 1):
            return turns, []
        first = answers[-1 if is_last else 0]
        if not first:
            raise ValueError("a conversation begins with the assistant; nothing is asked")
        return turns[:first], turns[first : answers[-1] + 1]

    def _filled_in(
        self, name: str, template: str, example: dict
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a template, as str.format makes it, and the spans that fields have in it."""
        # Not str.format, which does not say where the fields are.
        formatter = Formatter()
        text = ""
        spans = []
        try:
            for literal, column, spec, conversion in formatter.parse(template):
                text += literal
                if column is None:
                    continue
                # null would become the word None in the prompt
                if example[column] is None:
                    raise ValueError(f"{column!r} is null, and needs a value")
                # By the whole name: format would follow `.` and `[` into attributes of the value.
                value = formatter.convert_field(example[column], conversion)
                written = formatter.format_field(value, formatter.vformat(spec, (), example))
                spans.append((len(text), len(text) + len(written)))
                text += written
        except KeyError as error:
            raise ValueError(
                f"task.{name} names {error}, but an example has {fields_of(example)}; the name of "
                "a column stands alone, without `.` and `[`"
            ) from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"task.{name}={shortened(template)} does not fit the example {shortened(example)} "
                f"({error}); write {{name}} for a field, {{{{ for a brace"
            ) from error
        return text, spans


@dataclass(frozen=True)
class PromptText:
    """Turns the examples of a task into text and tokens.
    Example: PromptText(PromptTemplate("{q}?"), "text", tokenizer).ask({"q": "1 + 2"}) is "1 + 2?".
    """

    template: PromptTemplate
    special_tokens_in_data: str  # setting of TaskConfig
    tokenizer: Tokenizer
    # variables of the chat template, such as `tools`
    variables: dict = field(default_factory=dict)

    @cached_property
    def turn_tokens(self) -> TurnTokens:
        """Maker of the tokens of answers to a turn."""
        return TurnTokens(self.tokenizer, self.special_tokens_in_data, self.variables)

    def ask(self, example: dict) -> str:
        """The user's message for an example, the last one of several. Raises ValueError."""
        return self.template.messages(example)[-1].text

    def prompt(self, example: dict) -> list[int]:
        """The tokens of the prompt. Raises ValueError, with the place, if there are none."""
        with error_context(place_of(example), ValueError):
            messages = self._asked(example)
            # a model without a chat template takes plain text
            first = messages[0]
            is_text = len(messages) == 1 and first.keys() == {"role", "content"}
            if is_text and first["role"] == "user":
                messages = first["content"]
            row = self.tokenizer.prompt(messages, **self.variables_of(example))
        if not row:
            raise ValueError(
                f"{self.place(example)}the prompt of the example {shortened(example)} has no "
                f"tokens; task.prompt={shortened(self.template.prompt)}"
            )
        return row

    def demonstration(
        self, example: dict, name: str = "completion"
    ) -> tuple[list[int], list[bool]]:
        """The tokens of the answer to learn from, in the field `name`, and which of them are
        learned: of an answer in several turns only those of the assistant. Each turn ends with the
        token that ends it."""
        tokenizer = self.tokenizer
        tokens = []
        learned = []
        with error_context(place_of(example), ValueError):
            history = self._asked(example)
            variables = self.variables_of(example)
            num_answered = len(history)
            for turn in map(self._written, self.completion(example, name)):
                if turn["role"] == "assistant":
                    # messages since the last answer; the prompt holds those before the first
                    if tokens:
                        answered = history[:num_answered]
                        tokens += tokenizer.between(answered, history, **variables)
                        learned += [False] * (len(tokens) - len(learned))
                    tokens += tokenizer.demonstration(history, turn, **variables)
                    learned += [True] * (len(tokens) - len(learned))
                    num_answered = len(history) + 1
                history = [*history, turn]
        return tokens, learned

    def conversation(self, example: dict, answers: list[Message]) -> list[int]:
        """The tokens of a whole conversation, with its answers. ValueError names the place."""
        with error_context(place_of(example), ValueError):
            messages = [*self._asked(example), *map(self._written, answers)]
            return self.tokenizer.conversation(messages, **self.variables_of(example))

    def completion(self, example: dict, name: str = "completion") -> list[Message]:
        """The turns to learn from: the field `name`, a text or messages; without a `completion`
        what answers in `messages`. Raises ValueError if there is none."""
        completion = example.get(name)
        if isinstance(completion, str):
            return [Message("assistant", completion)]
        if isinstance(completion, list | tuple):
            turns = messages_in(name, completion)
            if turns[0].role != "assistant" or turns[-1].role != "assistant":
                raise ValueError(f"`{name}` begins and ends with the assistant")
            return turns
        if completion is not None:
            raise ValueError(
                f"a `{name}` is a text, or a list of messages; this one is {shortened(completion)}"
            )
        before = []
        turns = []
        is_in_row = name == "completion" and self.template.prompt is None
        if is_in_row:
            before, turns = self.template.split(example)
        if turns:
            return turns
        if not is_in_row or example.get("messages") is None:
            raise ValueError(
                f"an example for sft needs a `{name}`; this one has {fields_of(example)}"
            )
        if self.template.answered == "last" and any(one.role == "assistant" for one in before):
            raise ValueError(
                f"`messages` end with a turn of the {before[-1].role}, and task.learned_turns=last "
                "learns from the assistant's turn at the end; leave that turn out of the row, or "
                "set task.learned_turns=all, which learns from the assistant's turns before it"
            )
        raise ValueError("`messages` have no turn of the assistant to learn from")

    def place(self, example: dict) -> str:
        """File, line and a colon, of an example that comes from a file; else nothing."""
        place = place_of(example)
        return f"{place}: " if place else ""

    def _asked(self, example: dict) -> list[dict]:
        """The messages of which the tokenizer makes a prompt."""
        return [self._written(message) for message in self.template.messages(example)]

    def variables_of(self, example: dict) -> dict:
        """Returns the variables of the chat template beside the messages of an example."""
        tools = self.template.tools(example)
        if tools is None:
            return self.variables
        if "tools" in self.variables:
            raise ValueError(
                "the row has `tools`, and task.environment brings tools of its own; leave that "
                "column out, or give it another name"
            )
        if tools and not self.tokenizer.writes_tools:
            raise ValueError(
                f"the row has `tools`, and {self._reader} has no form for them; leave that column "
                "out and say in task.system which tools there are, or name it in task.prompt"
            )
        return self.variables | {
            "tools": self.tokenizer.quoted(tools, self.special_tokens_in_data)
        }

    def _written(self, message: Message) -> dict:
        """Writes a message for the tokenizer, with the data in it marked."""
        self._check_keys(message)
        spelled = self.tokenizer.special_in(message.text)
        if message.data is not None:
            # What the template of the task itself spells is meant.
            spelled = [
                (start, end)
                for start, end in spelled
                if any(first < end and start < last for first, last in message.data)
            ]
        how = self.special_tokens_in_data
        written = {"role": message.role}
        if message.content is not None:
            written["content"] = as_data(message.content, spelled, how)
        return written | (self.tokenizer.quoted(message.more, how) if message.more else {})

    def _check_keys(self, message: Message) -> None:
        template = self.tokenizer.template if message.more else None
        for key, value in (message.more or {}).items():
            names = REASONING if key in REASONING else (key,)
            is_read = template is not None and any(map(template.names, names))
            if key not in FREE and value not in ("", [], {}) and not is_read:
                raise ValueError(
                    f"a message of the {message.role} has the key {shortened(key)}, which "
                    f"{self._reader} does not read; leave it out of the file, or give a model "
                    "whose template reads it"
                )

    @property
    def _reader(self) -> str:
        if not self.tokenizer.has_chat_template:
            return f"{self.tokenizer.folder}, a model without a chat template,"
        return f"the chat template of {self.tokenizer.folder}"

    def check(self, example: dict, names: Sequence[str] = ()) -> None:
        """Raises ValueError for keys and tools, also in these fields, that no template reads."""
        messages = list(self.template.messages(example))
        for name in names:
            messages += self.completion(example, name)
        for message in messages:
            self._check_keys(message)
        self.variables_of(example)


@lru_cache(maxsize=64)
def _fields_of(template: str) -> tuple[str, ...]:
    """The fields that a template names; none of one that is no template, which is refused later."""
    try:
        return tuple(name for _, name, _, _ in Formatter().parse(template) if name)
    except ValueError:
        return ()
