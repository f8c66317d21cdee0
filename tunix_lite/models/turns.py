"""The tokens that stand between two turns of the model in a conversation. What was sampled stays;
the tokens of an answer are those with which the chat template goes on after a placeholder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tunix_lite.basics.plain_text import escaped
from tunix_lite.models.tokenizer import Tokenizer

# Letters alone: no template changes them, and no tokenizer joins them with a line break.
PLACEHOLDER = "PlaceholderOfTheTurn"
# Answers whose tokens are kept: the conversations of a group often hear the same.
MOST_KEPT = 4096


@dataclass(frozen=True)
class TurnTokens:
    """A tokenizer that writes answers to a turn.

    special_tokens_in_data: whether a special token that an answer spells is letters (text), the
    token (control), or an error. variables: go to the chat template, such as `tools`.

    Example: TurnTokens(tokenizer).between([{"role": "user", "content": "Higher."}], ended=True).
    """

    tokenizer: Tokenizer
    special_tokens_in_data: str = "text"
    variables: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, messages: str | list[dict]) -> list[int]:
        """The tokens of the prompt with which a conversation begins: a message, or messages."""
        quoted = self.tokenizer.quoted(messages, self.special_tokens_in_data)
        return self.tokenizer.prompt(quoted, **self.variables)

    def between(self, messages: str | list[dict], ended: bool) -> list[int]:
        """The tokens from the last one that the model sampled in a turn to the first one of the
        next.

        messages: the answer, {role, content} each; a text is a user's message; those of the
        assistant continue the model's own text. ended: the turn's last token ends it; else that
        token comes first here. Raises ValueError where the chat template refuses these messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        # environments repeat themselves, and templates take their time
        key = (tuple(tuple(sorted(message.items())) for message in messages), bool(ended))
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = tuple(self._between(messages, ended))
        return list(self._kept[key])

    @cached_property
    def _kept(self) -> dict[tuple, tuple[int, ...]]:
        return {}

    def _between(self, messages: list[dict], ended: bool) -> list[int]:
        tokenizer = self.tokenizer
        answered = tokenizer.quoted(messages, self.special_tokens_in_data)
        contents = [message["content"] for message in answered]
        roles = [message["role"] for message in answered]
        if "assistant" in roles and set(roles) != {"assistant"}:
            raise ValueError(
                "an answer has messages of the assistant, which continue the model's text, and "
                f"others ({', '.join(roles)}); it is one or the other"
            )
        if not tokenizer.has_chat_template or "assistant" in roles:
            ids = tokenizer.written_ids("".join(contents))
            # The next turn is drawn behind an answer, so there must be one.
            return ids or tokenizer.encode("\n")

        # Behind a placeholder that no message holds, so that no tokenizer puts anything before it.
        placeholder = PLACEHOLDER
        while any(placeholder in message["content"] for message in messages):
            placeholder += "s"
        before = tokenizer.encode(placeholder)
        after = self._after_the_turn(answered, placeholder)
        ids = tokenizer.written_ids(placeholder + after)
        if ids[: len(before)] != before:
            # Letters were joined with the placeholder, so the text goes without it.
            ids = tokenizer.written_ids(after)
            before = []
        ids = ids[len(before) :]
        if not ended:
            return ids
        # the tokens behind the first one that ends a turn; all, where the template writes none
        places = range(len(ids))
        first = next((place for place in places if ids[place] in tokenizer.eos_ids), -1)
        return ids[first + 1 :]

    def _after_the_turn(self, messages: list[dict], placeholder: str) -> str:
        """Returns the text that the chat template writes from the end of a turn of the model on."""
        before = [
            {"role": "user", "content": "Question"},
            {"role": "assistant", "content": placeholder},
        ]
        try:
            written = self.tokenizer.chat([*before, *messages], **self.variables)
        except ValueError as error:
            raise ValueError(f"{error}; {_wanted(messages)}") from error
        # a template may strip or repeat what the model said, and then nobody knows where its turn
        # ends
        if written.count(placeholder) != 1:
            raise ValueError(
                "the chat template does not write the text of the "
                "assistant once, as it is, so a conversation cannot go on after it"
            )
        after = written.partition(placeholder)[2]
        # some templates drop messages of roles that they do not know, without a word
        texts = [message["content"].strip() for message in messages]
        lost = [text for text in texts if text not in after]
        if lost:
            raise ValueError(
                f"the chat template does not write the message "
                f"'{escaped(lost[0], 80)}' as it is; {_wanted(messages)}"
            )
        return after


def _wanted(messages: list[dict]) -> str:
    """Describes what an environment may answer instead."""
    roles = ", ".join(message["role"] for message in messages) or "none"
    return (
        f"what follows a turn of the model has the roles {roles} here; one message of the role "
        "user is what every chat template takes"
    )
