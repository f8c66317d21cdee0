"""The server: an aiohttp application with the endpoints of the OpenAI API over one live engine;
where episodes of agents are recorded, also under /episodes/ID/v1. aiohttp is an extra: `pip install
-e '.[serve]'`."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.rollout.live import (
    EngineFailed,
    LiveEngine,
    LiveSequence,
    NewTokens,
    TooManyRequests,
)
from tunix_lite.serving.answers import ApiAnswer, ApiChoice, Piece, error_body, event
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.calls import Call, Limits, read_call
from tunix_lite.serving.face import Face, Handler, ServerSettings, TimedOut, read_json

if TYPE_CHECKING:
    from aiohttp import web

# Where the endpoints of one episode are.
_OF_EPISODE = "/episodes/{episode}"
# Types of errors by their status; the others are of the request or of the server.
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout"}


class _Recorder(Protocol):
    """Keeps what was asked and sampled in an episode, a run of an agent, whose id is part of the
    path or the API key. Each raises BadCall for an episode that there is not, or that is over."""

    def begin(self, episode: str, call: Call) -> Call:
        """The call as it shall be made: other settings, or other tokens of the same prompt."""

    def submitting(self, episode: str) -> AbstractContextManager:
        """Inside, the sequences of a call go to the engine, and its episode does not end."""

    def record(self, episode: str, call: Call, choices: list[Piece]) -> None:
        """Gets all choices of a call, whole, before the client has the last of them."""


class Server(Face):
    """The endpoints, and the engine that answers them."""

    statuses = {TooManyRequests: 429, EngineFailed: 503, TimedOut: 504}

    def __init__(
        self,
        engine: LiveEngine,
        tokenizer: Tokenizer,
        limits: Limits,
        settings: ServerSettings,
        recorder: _Recorder | None = None,
    ):
        """recorder: gets every call, by its episode. Then the id of the episode is the key."""
        super().__init__(settings)
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.recorder = recorder
        self.created = int(time.time())

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        yield "get", "/healthz", self._health
        for at in [""] if self.recorder is None else ["", _OF_EPISODE]:
            yield "get", f"{at}/v1/models", self._models
            yield "get", f"{at}/v1/models/{{name:.+}}", self._models
            yield "post", f"{at}/v1/completions", partial(self._answer, False)
            yield "post", f"{at}/v1/chat/completions", partial(self._answer, True)

    def check(self) -> None:
        if not self.engine.is_alive:
            raise EngineFailed(f"the engine failed: {self.engine.failure}")

    def error_body(self, error: Exception, status: int, message: str) -> dict:
        kind = "invalid_request_error" if status < 500 else "server_error"
        code = "rate_limit_exceeded" if status == 429 else getattr(error, "code", None)
        field = getattr(error, "field", None)
        return error_body(message, _ERROR_TYPES.get(status, kind), field, code)

    # ---- endpoints

    async def _health(self, request: "web.Request") -> tuple[int, dict]:
        return self.health(self.engine.is_alive)

    async def _models(self, request: "web.Request") -> dict:
        """All models, or the one of this name."""
        model = {
            "id": self.limits.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "tunix_lite",
            "max_model_len": self.limits.max_length,
        }
        name = request.match_info.get("name")
        if name is None:
            return {"object": "list", "data": [model]}
        if name != self.limits.model_name:
            raise BadCall(f"there is no model {name!r}", "model", "model_not_found")
        return model

    async def _answer(
        self, is_chat: bool, request: "web.Request"
    ) -> "dict | web.StreamResponse":
        body = await read_json(request)
        # Templates and tokenizers take their time, and other clients do not wait for it.
        call = await asyncio.to_thread(read_call, body, is_chat, self.limits, self.tokenizer)
        if self.recorder is not None:
            call = await asyncio.to_thread(
                self.recorder.begin, self._episode_of(request), call
            )
        answer = ApiAnswer(call, self.tokenizer)
        choices = [
            ApiChoice(i, self.tokenizer, call.stop, call.reads_calls)
            for i in range(len(call.prompts) * call.body.n)
        ]
        pieces = self._pieces(request, call, choices)
        if call.body.stream:
            return await self._stream(request, answer, choices, pieces)
        async for _ in pieces:
            pass
        return answer.whole(choices)

    def _episode_of(self, request: "web.Request") -> str:
        """The id of the episode that a request is part of: from its path, or its key."""
        return request.match_info.get("episode") or self.key_of(request)

    async def _stream(
        self,
        request: "web.Request",
        answer: ApiAnswer,
        choices: list[ApiChoice],
        pieces: AsyncGenerator[tuple[int, Piece]],
    ) -> "web.StreamResponse":
        """Server-sent events, one for each piece. An error after the first one is an event, too."""
        from aiohttp import web

        response = None
        seen = set()
        try:
            # If the client has left, its sequences end now, and not when somebody tidies up.
            async with contextlib.aclosing(pieces):
                async for index, piece in pieces:
                    if response is None:
                        headers = {
                            "Content-Type": "text/event-stream",
                            "Cache-Control": "no-cache",
                        }
                        response = web.StreamResponse(headers=headers)
                        await response.prepare(request)
                    is_first = index not in seen
                    seen.add(index)
                    await response.write(event(answer.piece(index, piece, is_first)))
        except (EngineFailed, TimedOut) as error:
            if response is None:
                # Nothing was sent yet, so the error can have its status.
                raise
            await response.write(event(error_body(str(error), "server_error")))
        else:
            if answer.call.body.stream_options.get("include_usage"):
                await response.write(event(answer.last(choices)))
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _pieces(
        self, request: "web.Request", call: Call, choices: list[ApiChoice]
    ) -> AsyncGenerator[tuple[int, Piece]]:
        """The pieces of all choices as they come. When the caller leaves, their slots are free."""
        arrived = asyncio.Queue()
        loop = asyncio.get_running_loop()
        # One timer for the request, as one for each piece takes more time than the piece.
        timer = loop.call_later(self.settings.request_seconds, arrived.put_nowait, None)

        def on_tokens(index: int, new: NewTokens) -> None:
            # in the engine's thread, which must not end with the loop
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, (index, new))

        sequences = [
            LiveSequence(
                call.prompts[choice.index // call.body.n],
                replace(call.draw, generation=choice.index % call.body.n),
                call.max_tokens,
                partial(on_tokens, choice.index),
            )
            for choice in choices
        ]
        left = len(sequences)
        read = sum(map(len, call.prompts))
        sampled = 0
        try:
            with contextlib.ExitStack() as submitting:
                if self.recorder is not None:
                    submitting.enter_context(
                        self.recorder.submitting(self._episode_of(request))
                    )
                self.engine.submit(sequences)
            while left:
                arrival = await arrived.get()
                if arrival is None:
                    most = self.settings.request_seconds
                    raise TimedOut(f"the request took more than {most:g} s")
                index, new = arrival
                # A stop text has ended it here, and the engine did not know yet.
                if choices[index].whole.finish_reason is not None:
                    continue
                if new.reason == "error":
                    raise EngineFailed(new.message)
                piece = choices[index].add(new)
                sampled += len(piece.tokens)
                request["counts"] = f"{read} + {sampled} tokens"
                if piece.finish_reason is not None:
                    left -= 1
                    # The engine knows no stop texts of clients; to one that has ended, this
                    # does nothing.
                    self.engine.cancel(sequences[index])
                # The next call of an agent may come as soon as it has the last piece.
                if self.recorder is not None and not left:
                    wholes = [choice.whole for choice in choices]
                    self.recorder.record(self._episode_of(request), call, wholes)
                yield index, piece
        finally:
            timer.cancel()
            for sequence in sequences:
                self.engine.cancel(sequence)
