"""Text <-> tokens: a `tokenizer.json`, its chat template, and the set of tokens that end a
sequence."""

import base64
import contextlib
import json
import mmap
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tunix_lite.files.untrusted import read_object, read_text
from tunix_lite.models.charsmap import longest_replacement
from tunix_lite.models.chat_template import ChatTemplate, as_template_reads, to_plain_values
from tunix_lite.plain_text import escaped, shortened, shown

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


# of a text, by what tokenizer.json replaces in it; ten replacements by ten letters: 10^10
MOST_GROWTH = 1000
CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
# characters that mean nothing: no template and no tokenizer knows them
PRIVATE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class Quoted:
    """A text of which some parts, [start, end) each, are only text, whatever special token they
    spell."""

    text: str
    parts: tuple[tuple[int, int], ...]

    def covered(self, with_what: str) -> str:
        """The text, as long as before, with one character for each of such a part."""
        text = list(self.text)
        for start, end in self.parts:
            text[start:end] = with_what * (end - start)
        return "".join(text)


@dataclass(frozen=True)
class Tokenizer:
    """What a folder in Hugging Face layout says about text. Make one with `Tokenizer.load`."""

    folder: Path
    backend: tokenizers.Tokenizer
    template: "ChatTemplate | None"  # a base model has none
    special: dict[str, str]  # bos_token, eos_token, pad_token ... as the template expects them
    eos_ids: tuple[int, ...]  # any of these ends a completion (Gemma 3: 1 and 106)
    pad_id: int  # filler only: masks decide what counts (Llama 3 names no pad_token)
    # what the tokenizer itself puts before a text: Gemma and Llama a BOS, Qwen nothing
    start_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads the FILES that matter of a folder, and generation_config.json.

        Raises ValueError naming the file that is missing or says too little.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        backend = _backend(folder / "tokenizer.json")
        # some files carry the settings of somebody's training
        backend.no_truncation()
        backend.no_padding()
        config = _json(folder / "tokenizer_config.json")
        special = _special_tokens(folder, config)
        eos_ids = _eos_ids(folder, backend, special)
        pad_id = backend.token_to_id(special.get("pad_token", "")) or 0
        added = _of_the_library(
            lambda: backend.encode("x", add_special_tokens=True), folder / "tokenizer.json"
        )
        text_at = added.special_tokens_mask.index(0) if 0 in added.special_tokens_mask else 0
        return cls(
            folder,
            backend,
            _template(folder, config),
            special,
            eos_ids,
            pad_id,
            tuple(added.ids[:text_at]),
        )

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def encode(self, text: str) -> list[int]:
        """Exactly the tokens of `text`: special tokens written out in it are recognised, none is
        added."""
        try:
            with _panics_named(self.folder / "tokenizer.json"):
                return self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as error:
            raise ValueError(
                f"{shortened(text)} holds half of a character (a lone surrogate): no text"
            ) from error

    def special_in(self, text: str) -> list[tuple[int, int]]:
        """Where a text spells special tokens, [start, end) each: what the tokenizer calls so, and
        what ends a turn."""
        if self._has_normalized:
            with _panics_named(self.folder / "tokenizer.json"):
                found = self.backend.encode(text, add_special_tokens=False)
            return [
                place
                for token, place in zip(found.ids, found.offsets)
                if token in self._special_tokens
            ]
        return [found.span() for found in self._special_texts.finditer(text)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the tokens, special tokens left out unless they are asked for."""
        with _panics_named(self.folder / "tokenizer.json"):
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> "TextStream":
        """A decoder for tokens that come one after the other."""
        return TextStream(self, skip_special)

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, **variables) -> str:
        """The conversation as the model was trained to see it; `variables` go to the template
        (tools, ...)."""
        if self.template is None:
            raise ValueError(
                f"{self.folder} has no chat template (chat_template.jinja, or one in "
                "tokenizer_config.json or "
                f"chat_template.json): this is a base model, which takes plain text and no messages"
            )
        if not messages:
            raise ValueError("a conversation has at least one message; this one has none")
        messages = [as_template_reads(message) for message in messages]
        values = {"tools": None, "documents": None, **self.special, **to_plain_values(variables)}
        return self.template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **values
        )

    def prompt(self, asked: str | Quoted | list[dict], **variables) -> list[int]:
        """The tokens of a user message, or of a conversation, ready for the model to go on, with
        its BOS once.

        Without a chat template a text is taken as it is, and goes on. Raises ValueError if there is
        a second BOS.
        """

        def write(read: Callable) -> str:
            message = read(asked)
            if isinstance(message, str) and not self.has_chat_template:
                return message
            return self.chat(_conversation(message), **variables)

        ids = self._ids(write, asked)
        # the templates of some fine-tunes leave it out
        if tuple(ids[: len(self.start_ids)]) != self.start_ids:
            ids = [*self.start_ids, *ids]
        bos = self.special.get("bos_token")
        bos_id = self.backend.token_to_id(bos) if bos else None
        # A token that the tokenizer never adds may open every turn and be called BOS all the same
        # (SmolLM).
        twice = ids.count(bos_id) > 1 if bos_id in self.start_ids else ids[:2] == [bos_id] * 2
        if twice:
            raise ValueError(
                f"the chat template and the message {shortened(asked)} together hold more than one "
                f"{bos}"
            )
        return ids

    def demonstration(
        self, asked: str | Quoted | list[dict], completion: str | Quoted, **variables
    ) -> list[int]:
        """The tokens to say after `prompt(asked)`: those of the completion and the one that ends
        the turn."""

        def write(read: Callable) -> str:
            if not self.has_chat_template:
                return read(completion)
            messages = _conversation(read(asked))
            before = self.chat(messages, **variables)
            answered = [*messages, {"role": "assistant", "content": read(completion)}]
            whole = self.chat(answered, add_generation_prompt=False, **variables)
            if not whole.startswith(before):
                raise ValueError(
                    "the chat template writes an answered conversation differently from its prompt"
                )
            return whole[len(before) :]

        ids = self._ids(write, asked, completion)
        ends = [i for i, token in enumerate(ids) if token in self.eos_ids]
        if ends:
            return ids[: ends[0] + 1]
        named = self.backend.token_to_id(self.special.get("eos_token", ""))
        return [*ids, named if named in self.eos_ids else self.eos_ids[0]]

    # ---- texts that spell special tokens and mean none

    def _ids(
        self, write: Callable[[Callable], str], *texts: str | Quoted | list[dict]
    ) -> list[int]:
        """The tokens of what `write` makes of these texts, which it reads with the function that it
        is given."""
        written = write(lambda text: text.text if isinstance(text, Quoted) else text)
        quoted = [text for text in texts if isinstance(text, Quoted) and text.parts]
        if not quoted:
            return self.encode(written)
        # Where the template put a quoted part is seen by a second look, with a character there that
        # is nowhere else.
        cover = next(
            c
            for c in map(chr, PRIVATE)
            if c not in written and not any(c in text.text for text in quoted)
        )
        covered = write(lambda text: text.covered(cover) if isinstance(text, Quoted) else text)
        if len(covered) != len(written) or any(
            c not in (w, cover) for w, c in zip(written, covered)
        ):
            raise ValueError(
                f"the chat template does not write {shortened(quoted[0].text)} as it is"
            )
        return self._quoted_ids(written, covered)

    def _quoted_ids(self, written: str, covered: str) -> list[int]:
        """The tokens of `written`, where only those special tokens count that stand in `covered`,
        too.

        One call of a tokenizer that knows special tokens by other names, so that what stands around
        them is cut up as ever. Raises ValueError if its vocabulary spells a special token even so.
        """
        backend, names, ids = self._renamed
        parts, at = [], 0
        for found in self._special_texts.finditer(covered):
            parts += [written[at : found.start()], names[found.group()]]
            at = found.end()
        with _panics_named(self.folder / "tokenizer.json"):
            tokens = backend.encode("".join([*parts, written[at:]]), add_special_tokens=False).ids
        if spelled := self._special_tokens.keys() & set(tokens):
            name = self.backend.id_to_token(spelled.pop())
            raise ValueError(
                f"this tokenizer has no way to write {name!r} as text, and {shortened(written)} "
                "holds it"
            )
        return [ids.get(token, token) for token in tokens]

    @cached_property
    def _special_tokens(self) -> dict[int, tokenizers.AddedToken]:
        ends = {self.backend.token_to_id(text) for text in self.special.values()} | {*self.eos_ids}
        added = self.backend.get_added_tokens_decoder()
        return {
            i: token for i, token in added.items() if (token.special or i in ends) and token.content
        }

    @cached_property
    def _has_normalized(self) -> bool:
        """Whether there is one that more than its own text spells, as `<EOS>` does `<eos>` where
        case is nothing."""
        return any(token.normalized for token in self._special_tokens.values())

    @cached_property
    def _special_texts(self) -> re.Pattern:
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
        """The same tokenizer with other names for special tokens; the names; and its ids, as those
        of the real ones.

        No text can hold such a name: it is made of private characters, and another one in every
        process.
        """
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        prefix = "".join(chr(PRIVATE[byte]) for byte in secrets.token_bytes(16))
        names, ids = {}, {}
        for i, token in self._special_tokens.items():
            name = names[token.content] = f"{prefix}{i}{prefix[0]}"
            how = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            backend.add_tokens(
                [tokenizers.AddedToken(name, special=False, normalized=False, **how)]
            )
            ids[backend.token_to_id(name)] = i
        return backend, names, ids


def _conversation(asked: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


class TextStream:
    """The text of tokens as they come, never half a character; all of it together is `decode` of
    all tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        added = tokenizer.backend.get_added_tokens_decoder()
        self.silent = {i for i, token in added.items() if token.special and skip_special}
        # the last piece and what follows; its length; its text
        self.ids, self.done, self.shown = (
            [],
            0,
            "",
        )

    def feed(self, ids: Iterable[int]) -> str:
        """The text that the tokens so far decide and that was not given out before."""
        self.ids += [int(i) for i in ids]
        text = self.tokenizer.decode(self.ids, self.skip_special)
        if self._may_change(text):
            return ""
        new = text[len(self.shown) :]
        # Decoding starts at the last piece that has text, so that a long stream costs no more per
        # token than a short one, and that a decoder that treats the first piece specially (drops
        # its space) goes on as before.
        tail = self.tokenizer.decode(self.ids[self.done :], self.skip_special)
        self.ids, self.shown = (self.ids[self.done :], tail) if tail else (self.ids, text)
        self.done = len(self.ids)
        return new

    def end(self) -> str:
        """What is held back, when no more tokens come: if anything, bytes that are no character."""
        text = self.tokenizer.decode(self.ids, self.skip_special)
        new, self.ids, self.done, self.shown = text[len(self.shown) :], [], 0, ""
        return new

    def _may_change(self, text: str) -> bool:
        # A run of byte tokens (Gemma's <0xE4>) is decoded as one: what looks whole may yet prove to
        # be none.
        said = next((i for i in reversed(self.ids) if i not in self.silent), None)
        token = self.tokenizer.backend.id_to_token(said) if said is not None else None
        return (
            text.endswith("\ufffd") or re.fullmatch("<0x[0-9A-Fa-f]{2}>", token or "") is not None
        )


def _backend(file: Path) -> tokenizers.Tokenizer:
    _check_charsmaps(file)
    backend = _of_the_library(lambda: tokenizers.Tokenizer.from_file(str(file)), file)
    for kind in ("normalizer", "decoder"):
        part = getattr(backend, kind)
        with _charsmap_named(file):
            growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > MOST_GROWTH:
            raise ValueError(
                f"{file}: the replacements of its {kind} can make a text {MOST_GROWTH:,} times as "
                "long"
            )
    return backend


def _check_charsmaps(file: Path) -> None:
    """Raises ValueError for a table at which the library would panic while it reads the file, and
    report that itself.

    The file is not parsed for it: those of today's vocabularies have 30 MB, and few hold a table.
    """
    if not file.stat().st_size:
        return
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for found in CHARSMAP.finditer(content):
            with _charsmap_named(file):
                _longest_replacement(found[1].replace(b"\\/", b"/"))


@contextlib.contextmanager
def _charsmap_named(file: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: its Precompiled normalizer cannot be used ({error})") from error


def _longest_replacement(encoded: str | bytes) -> int:
    return longest_replacement(base64.b64decode(encoded, validate=True))


def _growth(part: dict) -> int:
    """How many times as long a normalizer or a decoder, as the library writes it, can make a text
    by replacing."""
    growth = 1
    for inner in part.get("normalizers") or part.get("decoders") or ():
        growth *= _growth(inner)
    if part.get("type") == "Replace":
        # an empty text, or a regular expression that takes one
        matches_nothing = not part["pattern"].get("String")
        growth *= max(1, len(part["content"]) + matches_nothing)
    if part.get("type") == "Precompiled":
        growth *= max(1, _longest_replacement(part["precompiled_charsmap"]))
    return growth


def _of_the_library(act: Callable[[], Any], file: Path):
    """What the library does with a file. Raises ValueError: it raises nothing narrower, and panics
    as Rust does."""
    try:
        return act()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"{file} cannot be read ({escaped(str(error).replace(chr(10), ' '))})"
        ) from error


@contextlib.contextmanager
def _panics_named(file: Path) -> Iterator[None]:
    """Raises ValueError, with the file, where the library panics: a regular expression in it that
    goes on for ever."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{file} fails ({escaped(str(error))})") from error


def _template(folder: Path, config: dict) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate.compile(read_text(file), str(file))
    # The second file was written for image processors, so where they differ a tokenizer goes by its
    # own.
    for name in ("tokenizer_config.json", "chat_template.json"):
        text = (config if name == "tokenizer_config.json" else _json(folder / name)).get(
            "chat_template"
        )
        if isinstance(text, list):
            if not all(
                isinstance(each, dict) and isinstance(each.get("name"), str) for each in text
            ):
                raise ValueError(
                    f"{folder / name}: chat_template={shown(text)}; a list holds objects of name "
                    "and template"
                )
            named = {each["name"]: each.get("template") for each in text}
            if "default" not in named:
                names = escaped(", ".join(named))
                raise ValueError(f"{folder / name} names the chat templates {names}, no `default`")
            text = named["default"]
        if text is not None:
            return ChatTemplate.compile(text, str(folder / name))
    return None


def _special_tokens(folder: Path, config: dict) -> dict[str, str]:
    named = dict(config)
    # older folders keep them apart
    if "added_tokens_decoder" not in config:
        named |= _json(folder / "special_tokens_map.json")
    extra = named.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {
        k: v.get("content") if isinstance(v, dict) else v
        for k, v in named.items()
        if k.endswith("_token") and v
    }
    # not add_bos_token: true
    return {k: v for k, v in texts.items() if isinstance(v, str)}


def _eos_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        eos = _json(folder / name).get("eos_token_id")
        if eos is not None and eos != []:
            ids = tuple(eos) if isinstance(eos, list) else (eos,)
            if any(type(i) is not int or i < 0 for i in ids):
                raise ValueError(
                    f"{folder / name}: eos_token_id={shown(eos)}; it is the number of a token, or "
                    "a list of them"
                )
            return ids
    eos = backend.token_to_id(special.get("eos_token", ""))
    if eos is None:
        raise ValueError(
            f"{folder} names no end-of-sequence token in generation_config.json or config.json"
        )
    return (eos,)


def _json(path: Path) -> dict:
    return read_object(path) if path.is_file() else {}
