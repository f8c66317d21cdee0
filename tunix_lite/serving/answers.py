"""Answers for a client: the text of each choice as its tokens come, and the API's JSON objects."""

import json
import time
import uuid
from dataclasses import dataclass, field
from itertools import accumulate

from tunix_lite.models.tokenizer import TextStream, Tokenizer
from tunix_lite.rollout.live import NewTokens
from tunix_lite.serving.calls import Call
from tunix_lite.serving.tools import CallReader


@dataclass
class Piece:
    """The part of a choice that one chunk added."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    calls: list[dict] = field(default_factory=list)  # calls of tools, as the API writes them

    def add(self, later: "Piece") -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.calls += later.calls


class ApiChoice:
    """One completion, as a client sees it: its text without the stop text that ended it."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        reads_calls: bool = False,
    ):
        self.index = index
        self.reader = CallReader() if reads_calls else None
        self.stop = stop
        self.stream: TextStream = tokenizer.stream()
        # text that may be the beginning of a stop text
        self.held = ""
        # all pieces as one
        self.whole = Piece("", [], [])

    def add(self, new: NewTokens) -> Piece:
        """The next piece. A stop text ends the choice here, whatever comes after it."""
        # Where texts end the choice, each token is decoded by itself; else all together.
        size = 1 if self.stop else max(1, len(new.tokens))
        longest = max(map(len, self.stop), default=1)
        piece = Piece("", [], [])
        for start in range(0, len(new.tokens), size):
            part = slice(start, start + size)
            piece.tokens += new.tokens[part]
            piece.logprobs += new.full_logprobs[part]
            self.held += self.stream.feed(new.tokens[part])
            if (end := self._stop_at()) is not None:
                piece.text += self.held[:end]
                self.held = ""
                piece.finish_reason = "stop"
                break
            # The last characters may be the beginning of a stop text.
            free = max(0, len(self.held) - longest + 1)
            piece.text += self.held[:free]
            self.held = self.held[free:]
        if piece.finish_reason is None and new.reason is not None:
            self.held += self.stream.end()
            piece.text += self.held[: self._stop_at()]
            piece.finish_reason = "length" if new.reason == "length" else "stop"
        if self.reader is not None:
            # Text that may be part of a call stays in the reader; the last piece gets the calls.
            piece.text = self.reader.feed(piece.text)
            if piece.finish_reason is not None:
                rest, piece.calls = self.reader.end()
                piece.text += rest
            if piece.calls and piece.finish_reason == "stop":
                piece.finish_reason = "tool_calls"
        self.whole.add(piece)
        return piece

    def _stop_at(self) -> int | None:
        """The place at which the first stop text begins in what is held."""
        places = [self.held.find(text) for text in self.stop]
        return min((place for place in places if place >= 0), default=None)


@dataclass(frozen=True)
class ApiAnswer:
    """The objects of one request."""

    call: Call
    tokenizer: Tokenizer
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[ApiChoice]) -> dict:
        """The answer to a request that does not stream."""
        bodies = [self._choice(choice.index, choice.whole) for choice in choices]
        return self._head() | {"choices": bodies, "usage": self._usage(choices)}

    def piece(self, index: int, piece: Piece, is_first: bool) -> dict:
        """A chunk of a stream."""
        choice = self._choice(index, piece, of_stream=True, is_first=is_first)
        return self._head(of_stream=True) | {"choices": [choice]}

    def last(self, choices: list[ApiChoice]) -> dict:
        """The chunk with the numbers of tokens."""
        return self._head(of_stream=True) | {"choices": [], "usage": self._usage(choices)}

    def _usage(self, choices: list[ApiChoice]) -> dict:
        prompt = sum(map(len, self.call.prompts))
        sampled = sum(len(choice.whole.tokens) for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _head(self, of_stream: bool = False) -> dict:
        kind = "text_completion"
        if self.call.is_chat:
            kind = "chat.completion.chunk" if of_stream else "chat.completion"
        name = f"{'chatcmpl' if self.call.is_chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.call.model}

    def _choice(
        self, index: int, piece: Piece, of_stream: bool = False, is_first: bool = False
    ) -> dict:
        choice = {"index": index, "finish_reason": piece.finish_reason}
        text = piece.text
        if not self.call.is_chat:
            choice["text"] = text
        elif of_stream:
            delta = {"role": "assistant"} if is_first else {}
            if text or not piece.calls:
                delta["content"] = text
            if piece.calls:
                # A call comes whole.
                delta["tool_calls"] = [
                    {"index": i, **call} for i, call in enumerate(piece.calls)
                ]
            choice["delta"] = delta
        else:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            if piece.calls:
                choice["message"] |= {"content": text or None, "tool_calls": piece.calls}
        choice["logprobs"] = None
        texts = [self.tokenizer.decode([token], skip_special=False) for token in piece.tokens]
        if self.call.logprobs and self.call.is_chat:
            content = [
                {
                    "token": text,
                    "logprob": logprob,
                    # Part of a character has no text of its own.
                    "bytes": None if "\ufffd" in text else list(text.encode()),
                    "top_logprobs": [],
                }
                for text, logprob in zip(texts, piece.logprobs)
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        elif self.call.logprobs:
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": piece.logprobs,
                "top_logprobs": None,
                # Where each text begins when they stand side by side.
                "text_offset": [*accumulate(map(len, texts), initial=0)][:-1],
            }
        if self.call.body.return_token_ids:
            choice["token_ids"] = piece.tokens
            # the prompt is said once, with the first piece
            if is_first or not of_stream:
                choice["prompt_token_ids"] = self.call.prompts[index // self.call.body.n]
        return choice


def error_body(
    message: str, kind: str, field: str | None = None, code: str | None = None
) -> dict:
    """An error as the API writes it."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def event(value: dict) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
