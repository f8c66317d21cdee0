"""Text <-> tokens: a `tokenizer.json`, its chat template, and the tokens that end a sequence."""

import base64
import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tunix_lite.basics.plain_text import escaped, shortened, shown
from tunix_lite.basics.untrusted import read_text
from tunix_lite.models.chat_template import ChatTemplate, as_template_reads, to_plain_values
from tunix_lite.models.gguf_file import is_gguf
from tunix_lite.models.gguf_metadata import small_object
from tunix_lite.models.gguf_tokenizer import gguf_tokenizer

# What in a folder belongs to the tokenizer; an export copies those that are there.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)


# The replacements of a tokenizer.json may make a text so many times as long. Ten replacements of a
# letter by ten letters would make it 10^10 times as long.
_MOST_GROWTH = 1000
# Name of a tool, or text of a turn, that no template knows, to see whether and where it is written.
_PROBE = "ProbeOfTools"
# Special tokens of Gemma 4 that are part of a call of a tool (environments/tool_calls.py).
_OF_CALLS = ("<|tool_call>", "<tool_call|>", '<|"|>')
# What clients of a server may read of a panic of the library: it has no folder.
_FAILS = "tokenizer.json fails"
# Flags of a token in tokenizer_config.json.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Characters of private use, which no template and no tokenizer knows; fonts have icons below them.
_PRIVATE = range(0xFF000, 0xFFFFE)
# Drawn anew, so that no text holds them: they stand around what `as_data` marks as text.
_PREFIX = "".join(chr(_PRIVATE[byte]) for byte in secrets.token_bytes(16))
_OPEN = f"{_PREFIX}{chr(_PRIVATE[256])}"
_CLOSE = f"{_PREFIX}{chr(_PRIVATE[257])}"
# What is left of one that was cut at its end or at its beginning.
_BEGUN = (_PREFIX[:2], _OPEN[-2:], _CLOSE[-2:])


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a folder in Hugging Face layout or of a GGUF file, and its chat template.

    Example: Tokenizer.load("models/gemma-3-1b-it").prompt("2 + 2?") is the list of token ids of a
    user's turn, ready for the model to continue.
    """

    folder: Path
    backend: tokenizers.Tokenizer
    template: "ChatTemplate | None"  # a base model has none
    special: dict[str, str]  # bos_token, eos_token, pad_token ... as the template expects them
    eos_ids: tuple[int, ...]  # any of these ends a completion (Gemma 3: 1 and 106)
    pad_id: int  # padding; masks decide which tokens count (Llama 3 names no pad_token)
    # tokens that the tokenizer puts before a text: Gemma and Llama a BOS, Qwen nothing
    start_ids: tuple[int, ...]
    # number of tokens of the model; a text that needs another one is refused. None: not known
    vocab_size: int | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads those of FILES that are in the folder, or the metadata of a GGUF file. Raises
        ValueError naming the file that is missing, damaged or incomplete."""
        folder = Path(folder)
        file = folder if is_gguf(folder) else folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        read = gguf_tokenizer if is_gguf(folder) else tokenizers.Tokenizer.from_file
        with _named(f"{file} cannot be read", Exception):
            backend = read(str(file))
        for kind in ("normalizer", "decoder"):
            part = getattr(backend, kind)
            if part is not None and _growth(json.loads(part.__getstate__())) > _MOST_GROWTH:
                raise ValueError(
                    f"{file}: the replacements of its {kind} can make a text "
                    f"{_MOST_GROWTH:,} times as long"
                )
        # Some files carry the settings of the training that wrote them.
        backend.no_truncation()
        backend.no_padding()

        # The special tokens, by the names that templates expect.
        config = small_object(folder, "tokenizer_config.json")
        # The flags of this file win in transformers, too.
        file = folder / "tokenizer_config.json"
        entries = config.get("added_tokens_decoder") or {}
        if not isinstance(entries, dict):
            raise ValueError(f"{file}: added_tokens_decoder={shown(entries)}; it is an object")
        known = {one.content: one for one in backend.get_added_tokens_decoder().values()}
        # sorted by number, so that new tokens get theirs
        for number, entry in sorted(entries.items(), key=lambda item: (len(item[0]), item[0])):
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                raise ValueError(
                    f"{file}: added_tokens_decoder[{shown(number)}]={shown(entry)}; it is an "
                    "object with a content"
                )
            # As in transformers: an absent flag is false, but for `normalized` of plain tokens.
            flags = {"normalized": not entry.get("special")} | entry
            flags = {name: bool(flags.get(name)) for name in FLAGS}
            there = known.get(entry["content"])
            if there is None or flags != {name: getattr(there, name) for name in FLAGS}:
                backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        named = dict(config)
        # Older folders have a file of their own for them.
        if "added_tokens_decoder" not in config:
            named |= small_object(folder, "special_tokens_map.json")
        extra = named.get("extra_special_tokens")
        named |= extra if isinstance(extra, dict) else {}
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
        # Other keys end so, too: add_bos_token=true.
        special = {
            k: v for k, v in texts.items() if k.endswith("_token") and v and isinstance(v, str)
        }

        # What the tokenizer adds before a text shows in the encoding of one.
        with _named(f"{file} cannot be read", Exception):
            encoded = backend.encode("x", add_special_tokens=True)
        is_added = encoded.special_tokens_mask
        num_before = is_added.index(0) if 0 in is_added else 0
        made = cls(
            folder=folder,
            backend=backend,
            template=None,
            special=special,
            # `with_template` below reads them from the folder
            eos_ids=(),
            pad_id=backend.token_to_id(special.get("pad_token", "")) or 0,
            start_ids=tuple(encoded.ids[:num_before]),
        )
        return made.with_template(_template(folder, config))

    def with_template(self, template: ChatTemplate | None) -> "Tokenizer":
        """The same with another chat template, and with the ends that this template writes."""
        ends = _eos_ids(self.folder, self.backend, self.special)
        made = replace(self, template=template, eos_ids=ends)
        return replace(made, eos_ids=tuple(dict.fromkeys((*ends, *made.ends_of_turns))))

    @cached_property
    def ends_of_turns(self) -> tuple[int, ...]:
        """The tokens that end the assistant's turns which answer or call a tool."""
        question = {"role": "user", "content": "Question"}
        function = {"name": _PROBE, "arguments": {}}
        call = {"id": "ProbeCall", "type": "function", "function": function}
        answer = {"role": "assistant", "content": _PROBE}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        tokens = self.backend.get_added_tokens_decoder()
        ends = []
        # No template, or one for other conversations.
        with contextlib.suppress(ValueError):
            for turn, is_end in ((answer, str.startswith), (called, str.endswith)):
                written = self.chat([question, turn], add_generation_prompt=False)
                _, marker, after = written.rpartition(_PROBE)
                # Behind the name of a tool stands the end of the call, too, which ends no turn.
                fit = [
                    (len(token.content), i)
                    for i, token in tokens.items()
                    if marker
                    and token.content
                    and (token.special or turn is answer)
                    and is_end(after.strip(), token.content)
                ]
                # Of tokens that begin alike, the longest is the one that stands there.
                ends += [i for _, i in sorted(fit)[-1:]]
        return tuple(dict.fromkeys(ends))

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, the special ones too, and its id."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def cuts_left(self) -> bool:
        """True if transformers cuts the beginning of a text that is too long, and not its end."""
        config = small_object(self.folder, "tokenizer_config.json")
        return config.get("truncation_side") == "left"

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the vocabulary, the special ones too."""
        return len(self.vocabulary)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of text that one token stands for, at most."""
        return max(len(token.encode()) for token in self.vocabulary)

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer takes conversations; else it takes plain text only."""
        return self.template is not None

    @cached_property
    def writes_tools(self) -> bool:
        """True if the chat template writes the tools that it is given."""
        if self.template is None:
            return False
        parameters = {"type": "object", "properties": {}}
        function = {"name": _PROBE, "description": "", "parameters": parameters}
        messages = [{"role": "user", "content": "Question"}]
        try:
            # seen only by trying: a template may take tools and write nothing
            written = self.chat(messages, tools=[{"type": "function", "function": function}])
        except ValueError:
            return False
        return _PROBE in written

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, special ones spelled in it too. ValueError: a lone surrogate."""
        try:
            with _named(_FAILS):
                ids = self.backend.encode(text, add_special_tokens=False).ids
            return self._in_table(ids)
        except (TypeError, UnicodeError) as error:
            raise ValueError(
                f"{shortened(text)} holds half of a character (a lone surrogate): no text"
            ) from error

    @cached_property
    def beyond(self) -> dict[int, str]:
        """The tokens that the model has no embedding for, by id. Most models have none."""
        if self.vocab_size is None:
            return {}
        return {i: text for text, i in self.vocabulary.items() if i >= self.vocab_size}

    def _in_table(self, ids: list[int]) -> list[int]:
        """The tokens. ValueError for one without an embedding: JAX would take the last one."""
        if self.beyond and (lost := [i for i in ids if i in self.beyond]):
            raise ValueError(
                f"a text holds {shown(self.beyond[lost[0]])}, token {lost[0]} of the tokenizer, "
                f"and the model has embeddings for {self.vocab_size} tokens (vocab_size)"
            )
        return ids

    def special_in(self, text: str) -> list[tuple[int, int]]:
        """Finds the special tokens and ends of turns that a text spells, [start, end) each."""
        if self._has_normalized:
            with _named(_FAILS):
                # a normalizer changes the text first, so no search in it would find them all
                encoded = self.backend.encode(text, add_special_tokens=False)
            return [
                span
                for token, span in zip(encoded.ids, encoded.offsets)
                if token in self._special_tokens
            ]
        return [match.span() for match in self._special_texts.finditer(text)]

    def quoted(self, value: object, how: str) -> Any:
        """A value of data, such as messages, with the special tokens in it as of `as_data`."""
        if isinstance(value, str):
            return as_data(value, self.special_in(value), how)
        if isinstance(value, Mapping):
            return {
                self.quoted(key, how): self.quoted(item, how) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.quoted(item, how) for item in value]
        return value

    @cached_property
    def silent_ids(self) -> frozenset[int]:
        """The special tokens, without those that are part of a call of a tool."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(
            i for i, token in added.items() if token.special and token.content not in _OF_CALLS
        )

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the tokens. skip_special: without special tokens, but those of calls."""
        visible = [int(token) for token in ids]
        if skip_special:
            visible = [token for token in visible if token not in self.silent_ids]
        with _named(_FAILS):
            return self.backend.decode(visible, skip_special_tokens=False)

    def stream(self, skip_special: bool = True) -> "TextStream":
        """A decoder for tokens that come one after the other. skip_special: as of `decode`."""
        return TextStream(self, skip_special)

    def chat(
        self, messages: list[dict], add_generation_prompt: bool = True, **variables
    ) -> str:
        """The conversation as the model was trained to see it; `variables` go to the template.
        Raises ValueError without a template, and where it fails.

        messages: [{"role": "user", "content": "hi"}, ...].
        """
        if self.template is None:
            raise ValueError(
                "the model has no chat template (chat_template.jinja, or one in "
                "tokenizer_config.json or chat_template.json): a base model takes plain text and "
                "no messages; model.chat_template=chatml or FILE.jinja gives it one"
            )
        if not messages:
            raise ValueError("a conversation has at least one message; this one has none")
        # plain values: a stranger's template may call any method of what it gets
        messages = [as_template_reads(message) for message in messages]
        for name in variables:
            if name in self.special or name.endswith("_token"):
                raise ValueError(
                    f"{shown(name)} is a token, which the tokenizer names, and no variable of a "
                    "chat template"
                )
        values = {
            "tools": None,
            "documents": None,
            **self.special,
            **to_plain_values(variables),
        }
        return self.template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **values
        )

    def prompt(self, conversation: str | list[dict], **variables) -> list[int]:
        """The tokens of a user message, or of a conversation, ready for the model to continue, with
        its BOS once; without a template those of the text. Raises ValueError if there is a second
        BOS."""
        written = conversation
        if self.has_chat_template or not isinstance(conversation, str):
            written = self.chat(_conversation(conversation), **variables)
        # The templates of some fine-tunes leave out what the tokenizer starts with.
        ids = self.written_ids(written)
        if tuple(ids[: len(self.start_ids)]) != self.start_ids:
            ids = [*self.start_ids, *ids]

        # A second BOS is a mistake of the template or of the message.
        bos = self.special.get("bos_token")
        bos_id = self.backend.token_to_id(bos) if bos else None
        # A token that the tokenizer never adds may open every turn and be called BOS all the same
        # (SmolLM).
        if bos_id in self.start_ids:
            is_twice = ids.count(bos_id) > 1
        else:
            is_twice = ids[:2] == [bos_id] * 2
        if is_twice:
            raise ValueError(
                f"the chat template and the message {shortened(conversation)} together hold more "
                f"than one {bos}"
            )
        return ids

    def demonstration(
        self, conversation: str | list[dict], completion: str | dict, **variables
    ) -> list[int]:
        """The tokens that follow `prompt(conversation)`, with the one that ends the turn."""
        turn = completion
        if not isinstance(turn, dict):
            turn = {"role": "assistant", "content": completion}
        if not self.has_chat_template:
            written = turn["content"]
        else:
            messages = _conversation(conversation)
            # The answer is what stands behind the prompt: its markers are learned, too.
            before = self.chat(messages, **variables)
            full = self.chat([*messages, turn], add_generation_prompt=False, **variables)
            if not full.startswith(before):
                raise ValueError(
                    f"the chat template of {self.folder} writes an answered conversation "
                    "differently from its prompt, so the tokens of the answer are not known; "
                    "choose a model, or write a chat_template.jinja, whose prompt is the beginning "
                    "of the answered conversation"
                )
            written = full[len(before) :]

        # Up to the first end of a turn. Where the template writes none, one is added.
        ids = self.written_ids(written)
        ends = [i for i, token in enumerate(ids) if token in self.eos_ids]
        if ends:
            return ids[: ends[0] + 1]
        return [*ids, self.end_id]

    def conversation(self, messages: list[dict], **variables) -> list[int]:
        """The tokens of a whole conversation, as apply_chat_template of transformers gives them
        without a prompt for a next turn. `read_until` says where a reward model is read. Raises
        ValueError, also where there is no chat template."""
        return self.written_ids(self.chat(messages, False, **variables))

    @property
    def end_id(self) -> int:
        """The token that ends a text: the eos_token, if a completion may end with it."""
        named = self.backend.token_to_id(self.special.get("eos_token", ""))
        if named in self.eos_ids:
            return named
        return self.eos_ids[0]

    def documents(self, texts: list[str], special: str) -> list[list[int]]:
        """The tokens of each text, many at once, without those that begin and end it. special: what
        special tokens spelled in it are, as of `as_data`. Raises ValueError."""
        marked = self.quoted(texts, special)
        plain = [text for text in marked if _OPEN not in text]
        try:
            with _named(_FAILS):
                encoded = self.backend.encode_batch_fast(plain, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise ValueError(
                "half of a character (a lone surrogate), which is no text"
            ) from error
        plain_ids = iter(self._in_table(one.ids) for one in encoded)
        ids = []
        for text in marked:
            ids.append(self.written_ids(text) if _OPEN in text else next(plain_ids))
        return ids

    def between(self, earlier: list[dict], later: list[dict], **variables) -> list[int]:
        """The tokens from the end of `earlier` to where the model continues `later`."""

        before = self.chat(earlier, False, **variables)
        full = self.chat(later, **variables)
        if not full.startswith(before):
            raise ValueError(
                f"the chat template of {self.folder} writes earlier turns differently when "
                "others follow, so several turns of one conversation are not learned from at "
                "once; set task.learned_turns=last"
            )
        # the end of a turn may go on after its token, with a newline
        places = []
        for token in self.eos_ids:
            end = self.backend.id_to_token(token)
            if end and end in before:
                places.append(before.rfind(end) + len(end))
        last = max(places, default=len(before))
        return self.written_ids(full[last:])

    # ---- texts that spell special tokens but mean plain text

    def written_ids(self, written: str) -> list[int]:
        """The tokens of a text in which `as_data` has marked what is plain text. Raises ValueError
        if the template has changed such a part, or the vocabulary spells a special token even
        so."""
        as_json = json.dumps(_PREFIX)[1:-1]
        if as_json in written:
            text = re.sub(f"{re.escape(as_json)}.{{12}}", "", written)
            raise ValueError(f"the chat template does not write {shortened(text)} as it is")
        if not any(mark in written for mark in _BEGUN):
            return self.encode(written)
        # A template that cuts a text may leave half of a mark, or put its own words inside of one.
        special = self._special_texts.pattern
        data = re.findall(f"(?s){_OPEN}(.*?){_CLOSE}", written)
        left = re.sub(f"(?s){_OPEN}.*?{_CLOSE}", "", written)
        is_changed = any(mark in left for mark in _BEGUN)
        for text in data:
            # with more around a special token than its mark
            if re.search(special, text) and not re.fullmatch(special, text):
                is_changed = True
        if is_changed:
            text = re.sub(f"[{_PREFIX}{_OPEN[-1]}{_CLOSE[-1]}]", "", written)
            raise ValueError(f"the chat template does not write {shortened(text)} as it is")
        # One call of a tokenizer that knows special tokens by other names cuts the text as always.
        backend, names, ids = self._renamed
        parts = []
        at = 0
        for match in re.finditer(f"(?s:{_OPEN}.*?{_CLOSE})|{special}", written):
            own = match.group()
            parts += [written[at : match.start()]]
            parts += [names.get(own) or own.removeprefix(_OPEN).removesuffix(_CLOSE)]
            at = match.end()
        renamed = "".join([*parts, written[at:]])
        with _named(_FAILS):
            encoded = backend.encode(renamed, add_special_tokens=False)
        for token, (start, end) in zip(encoded.ids, encoded.offsets):
            if token not in self._special_tokens:
                continue
            name = self._special_tokens[token].content
            # An unknown character gives the unknown token, too, and does not spell it.
            unknown = self.backend.encode(chr(_PRIVATE[0]), add_special_tokens=False).ids
            if token in unknown and name not in renamed[start:end]:
                continue
            raise ValueError(
                f"this tokenizer has no way to write {name!r} as text, and "
                f"{shortened(written.replace(_OPEN, '').replace(_CLOSE, ''))} holds it"
            )
        return self._in_table([ids.get(token, token) for token in encoded.ids])

    @cached_property
    def _special_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Tokens by id: those that the tokenizer calls special, and those that end a turn."""
        # some files do not mark the tokens that end a turn
        ends = {self.backend.token_to_id(text) for text in self.special.values()} | {
            *self.eos_ids
        }
        added = self.backend.get_added_tokens_decoder()
        return {
            i: token
            for i, token in added.items()
            if (token.special or i in ends) and token.content
        }

    @cached_property
    def _has_normalized(self) -> bool:
        """True if a normalizer may make one of another text, such as `<eos>` of `<EOS>`."""
        return any(token.normalized for token in self._special_tokens.values())

    @cached_property
    def _special_texts(self) -> re.Pattern:
        """Matches the text of any special token, the longest first."""
        # The first alternative that matches wins, and some tokens begin as others do.
        tokens = sorted(
            self._special_tokens.values(), key=lambda token: len(token.content), reverse=True
        )
        alone = r"(?<!\w){}(?!\w)"
        texts = (
            (alone if token.single_word else "{}").format(re.escape(token.content))
            for token in tokens
        )
        return re.compile("|".join(texts) or "(?!)")

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """It with other names for special tokens; the name by its text; the real id by its id."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        # It then takes what spells a special token as text.
        backend.encode_special_tokens = True
        names = {}
        ids = {}
        for i, token in self._special_tokens.items():
            name = names[token.content] = f"{_PREFIX}{i}{_PREFIX[0]}"
            how = {
                "single_word": token.single_word,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
            }
            backend.add_tokens(
                [tokenizers.AddedToken(name, special=False, normalized=False, **how)]
            )
            ids[backend.token_to_id(name)] = i
        return backend, names, ids


def read_until(ids: list[int], pad_id: int | None) -> list[int]:
    """The tokens up to the one at which transformers reads a reward model: the last that is not the
    padding token, even if that ends the turn, too. None: there is no such token."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


def as_data(text: str, spelled: list[tuple[int, int]], how: str) -> str:
    """Marks these special tokens of data as text, leaves them (control), or raises ValueError."""
    if not spelled or how == "control":
        return text
    if how == "text":
        parts = []
        at = 0
        for start, end in spelled:
            parts += [text[at:start], _OPEN, text[start:end], _CLOSE]
            at = end
        return "".join([*parts, text[at:]])
    start, end = spelled[0]
    raise ValueError(
        f"{shortened(text)} holds the special token {text[start:end]!r}; "
        "task.special_tokens_in_data=text takes it as mere letters, control as the token"
    )


def _conversation(content: str | list[dict]) -> list[dict]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return content


class TextStream:
    """The text of tokens as they come, never half a character; all pieces together are `decode` of
    all."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self.silent = tokenizer.silent_ids if skip_special else frozenset()
        # The tokens of the last piece that had text, and those after it.
        self.ids: list[int] = []
        # How many of them are that piece.
        self.done = 0
        # Their text that was returned already.
        self.shown = ""

    def feed(self, ids: Iterable[int]) -> str:
        """The text that no later token can change and that was not returned before."""
        self.ids += [int(i) for i in ids]
        text = self.tokenizer.decode(self.ids, self.skip_special)
        # Byte tokens (Gemma's <0xE4>) are decoded together: a character may turn out to be none.
        spoken = [token for token in self.ids if token not in self.silent]
        last = self.tokenizer.backend.id_to_token(spoken[-1]) if spoken else None
        if text.endswith("\ufffd") or re.fullmatch("<0x[0-9A-Fa-f]{2}>", last or ""):
            return ""
        new = text[len(self.shown) :]

        # The next decoding starts at the last piece that has text. So a long stream costs no more
        # per token, and a decoder that drops the space of the first piece drops none here.
        tail = self.tokenizer.decode(self.ids[self.done :], self.skip_special)
        if tail:
            self.ids = self.ids[self.done :]
        self.shown = tail or text
        self.done = len(self.ids)
        return new

    def end(self) -> str:
        """The rest of the text, when no more tokens come: at most bytes that are no character."""
        text = self.tokenizer.decode(self.ids, self.skip_special)
        new = text[len(self.shown) :]
        self.ids = []
        self.done = 0
        self.shown = ""
        return new


def _growth(part: dict) -> int:
    """Bounds how many times as long the replacements of a normalizer or a decoder make a text."""
    growth = 1
    for inner in part.get("normalizers") or part.get("decoders") or ():
        growth *= _growth(inner)
    if part.get("type") == "Replace":
        # An empty text, or a regular expression, which may match one.
        matches_nothing = not part["pattern"].get("String")
        growth *= max(1, len(part["content"]) + matches_nothing)
    if part.get("type") == "Precompiled":
        # the size of a table of characters, the table, and the replacements, each ended by a 0
        table = base64.b64decode(part["precompiled_charsmap"])
        replacements = table[4 + int.from_bytes(table[:4], "little") :]
        growth *= max(1, *map(len, replacements.split(b"\0")))
    return growth


@contextlib.contextmanager
def _named(failure: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns a panic of the library, and errors of these kinds, into a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:
        # A panic of the library is no Exception.
        if not isinstance(error, kinds) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{failure} ({escaped(str(error).replace(chr(10), ' '))})") from error


def _template(folder: Path, config: dict) -> ChatTemplate | None:
    """The chat template of a folder. config: of tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate.compile(read_text(file), str(file))
    # chat_template.json was written for image processors, so the tokenizer's own file decides.
    for name in ("tokenizer_config.json", "chat_template.json"):
        content = config if name == "tokenizer_config.json" else small_object(folder, name)
        text = content.get("chat_template")
        if isinstance(text, list):
            named = {
                one["name"]: one.get("template")
                for one in text
                if isinstance(one, dict) and isinstance(one.get("name"), str)
            }
            if "default" not in named:
                raise ValueError(
                    f"{folder / name}: chat_template={shown(text)}; a list holds objects of name "
                    "and template, one of them `default`"
                )
            text = named["default"]
        if text is not None:
            return ChatTemplate.compile(text, str(folder / name))
    return None


def _eos_ids(
    folder: Path,
    backend: tokenizers.Tokenizer,
    special: dict[str, str],
) -> tuple[int, ...]:
    """The ids that end a completion: of generation_config.json, config.json, or eos_token."""
    ids = []
    config = small_object(folder, "config.json")
    for name, content in (
        ("generation_config.json", small_object(folder, "generation_config.json")),
        ("config.json", config),
        ("config.json: text_config", config.get("text_config")),
    ):
        eos = content.get("eos_token_id") if isinstance(content, dict) else None
        if eos is None:
            continue
        # Gemma has a list, Llama a number
        named = eos if isinstance(eos, list) else [eos]
        if any(type(i) is not int or i < 0 for i in named):
            raise ValueError(
                f"{folder / name}: eos_token_id={shown(eos)}; it is the number of a token, or "
                "a list of them"
            )
        ids += named
    by_name = backend.token_to_id(special.get("eos_token", ""))
    if not ids and by_name is None:
        where = "its metadata" if is_gguf(folder) else "generation_config.json or config.json"
        raise ValueError(f"{folder} names no end-of-sequence token in {where}")
    return tuple(dict.fromkeys(ids or [by_name]))
