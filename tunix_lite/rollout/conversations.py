"""Conversations: a slot keeps its sequence while an environment answers, and goes on from there.
When answers come is a matter of the clock; what is sampled follows from the prompt, the generation
and the number of tokens sampled before."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np

from tunix_lite.basics.types import (
    Conversation,
    Metrics,
    Prompts,
    Rollout,
    SampledTurn,
    TurnReply,
)
from tunix_lite.rollout.engine import Engine, padded_width
from tunix_lite.rollout.requests import OnChunk, Request, RolloutArrays


class Partner(Protocol):
    """Answers the turns of a rollout's rows, as environments do."""

    max_turns: int  # most turns of a conversation
    # most tokens of a turn; None: as many as the conversation has left
    max_turn_tokens: int | None
    # prompts of the rows, where environments begin with their own texts; None: the task's
    prompts: Prompts | None
    # the same as texts, for display; None where it is that of the task
    openings: Sequence[str | None]

    def submit(self, row: int, tokens: list[int], ended: bool) -> None:
        """Takes a turn. ended: its last token is an end-of-sequence token; else it was cut."""

    def replies(self, wait: bool, patience: float = 0.0) -> dict[int, TurnReply]:
        """Answers that came, by row. wait: for one at least. patience: seconds for others."""

    def close(self) -> None:
        """Closes the partner: all conversations have ended."""


@dataclass
class _Talk:
    """A conversation under way, from the host's side.
    Example: `_Talk(request)`, not begun yet; later its `slot` is 0."""

    # its `tokens` are all after the prompt, answers included; its `text` is that of the turn
    request: Request
    slot: int | None = None  # the slot that holds it; None: none does
    # [begin, end) of each turn among the tokens, and its answer
    turns: list[tuple[int, int, TurnReply | None]] = field(default_factory=list)
    # first token of the turn that is being sampled
    begin: int = 0
    num_sampled: int = 0
    is_waiting: bool = False  # whether its partner has yet to answer
    answer: TurnReply | None = None  # the answer that is to be appended
    ended: str = ""  # value of Conversation.ended; "" while the conversation is under way

    @property
    def is_sampling(self) -> bool:
        """Returns whether its slot runs."""
        return self.slot is not None and not self.is_waiting and self.answer is None


@dataclass
class _Patience:
    """Decides how long to wait for answers before a chunk is decoded.
    Example: after a chunk of 10 ms, with 3 of 4 slots waiting, Patience().seconds(3, 4) is 0.00375.
    """

    chunk_seconds: float = math.inf  # time of the fastest chunk so far: the first one compiles
    # chunks that are still to be decoded at once, and as how many it was set
    left: int = 0
    most: int = 0

    def seconds(self, waiting: int, held: int) -> float:
        """Returns how long to wait with so many of the slots that hold a conversation waiting."""
        if self.left or not held or self.chunk_seconds == math.inf:
            return 0.0
        return 0.5 * self.chunk_seconds * waiting / held

    def note(self, patience: float, all_came: bool) -> None:
        """Notes whether all answers came within so many seconds."""
        # A slot whose answer comes just after a chunk has begun stands still for all of it. Where
        # waiting was in vain, the next 1, 3, 7 and at most 15 chunks are decoded at once.
        if patience:
            self.most = 0 if all_came else min(15, 2 * self.most + 1)
            self.left = self.most
        else:
            self.left = max(0, self.left - 1)


class ConversationScheduler:
    """The conversations of a rollout under way. The host alone gives slots, and frees them.
    Example: 16 conversations in 4 slots."""

    def __init__(
        self,
        engine: Engine,
        partner: Partner,
        prompts: Prompts,
        num_generations: int,
        key: jax.Array,
    ):
        """Generations of a prompt that begin alike share one reading of it."""
        limit = engine.programs.spec.generation.max_new_tokens
        first_limit = min(limit, partner.max_turn_tokens or limit)
        key_data = np.asarray(jax.random.key_data(key))
        requests = []
        own = partner.prompts or [one for one in prompts for _ in range(num_generations)]
        for row, prompt in enumerate(own):
            p, g = divmod(row, num_generations)
            ids = tuple(map(int, prompt))
            request = Request(p, p, g, limit, ids, key_data, row, first_limit=first_limit)
            requests.append(request)
        # The widest prompts first: if memory does not suffice, that shows at once.
        requests.sort(key=lambda one: -padded_width(len(one.ids), engine.widths))
        self.engine = engine
        self.partner = partner
        self.talks = [_Talk(request) for request in requests]
        self.by_row = {talk.request.row: talk for talk in self.talks}
        self.by_slot: list[_Talk | None] = [None] * engine.num_slots
        self.num_appended = 0
        # Slots that decoded, and that held a sequence, summed over chunks.
        self.slots_decoding = 0
        self.slots_held = 0
        self.seconds_waited = 0.0
        self.patience = _Patience()
        engine.admit(requests)

    @property
    def held(self) -> list[_Talk]:
        """The conversations that have a slot, in the order of the slots."""
        return [talk for talk in self.by_slot if talk is not None]

    @property
    def is_decoding(self) -> bool:
        """Returns whether any slot runs."""
        return any(talk.is_sampling for talk in self.held)

    def in_steps(
        self,
        on_finished: Callable[[int, list[int]], None] | None,
        on_chunk: OnChunk | None,
        between_chunks: Callable[[], None] | None,
    ) -> Generator[None, None, Rollout]:
        """Stops after each chunk, and returns the Rollout; callbacks as in make_generate."""
        while self.engine.unfinished:
            # Replies first: they end conversations, and `fill` gives their slots away in the
            # same round.
            ended = self.take_replies()
            self.append_answers()
            for slot, request in self.engine.fill():
                talk = self.by_row[request.row]
                talk.slot = slot
                self.by_slot[slot] = talk
            if self.is_decoding:
                self.decode()

            if on_finished is not None:
                for talk in ended:
                    begin, end, _ = talk.turns[-1]
                    on_finished(talk.request.row, talk.request.tokens[begin:end])
            if on_chunk is not None:
                requests = [talk.request for talk in self.held + ended]
                alone = {one.request.row: self._rollout([one], {}) for one in ended}
                on_chunk(requests, alone)
            if between_chunks is not None:
                between_chunks()
            yield
        self.partner.close()
        in_order = sorted(self.talks, key=lambda talk: talk.request.row)
        return self._rollout(in_order, self.metrics())

    # ---- answers

    def take_replies(self) -> list[_Talk]:
        """Takes the answers that have come; waits for one if no slot has anything to do. Returns
        the conversations that ended."""
        if not any(talk.is_waiting for talk in self.talks):
            return []
        held = self.held
        waiting = [talk for talk in held if talk.is_waiting]
        num_queued = len(self.talks) - self.engine.num_taken
        can_work = self.is_decoding or bool(None in self.by_slot and num_queued)
        patience = self.patience.seconds(len(waiting), len(held))
        began = time.perf_counter()
        replies = self.partner.replies(wait=not can_work, patience=patience)
        self.patience.note(patience, all(talk.request.row in replies for talk in waiting))
        # The devices stood still for the environments only then.
        if not can_work:
            self.seconds_waited += time.perf_counter() - began
        # In the order of rows, so that all hosts do the same.
        talks = [self.by_row[row] for row in sorted(replies)]
        for talk in talks:
            self.take_reply(talk, replies[talk.request.row])
        return [talk for talk in talks if talk.ended]

    def take_reply(self, talk: _Talk, reply: TurnReply) -> None:
        """Ends the conversation, or keeps the answer to append it."""
        begin, end, _ = talk.turns[-1]
        talk.turns[-1] = (begin, end, reply)
        talk.is_waiting = False
        request = talk.request
        if reply.failure:
            talk.ended = "failed"
        elif reply.done:
            talk.ended = "done"
        elif len(talk.turns) >= self.partner.max_turns:
            talk.ended = "turns"
        elif len(request.tokens) + len(reply.tokens) >= request.limit:
            # Behind this answer not one token could be sampled.
            talk.ended = "tokens"
        else:
            talk.answer = reply
            return

        request.reason = "eos" if talk.ended == "done" else "length"
        request.ended = self.engine.elapsed()
        self.engine.release(request, talk.slot)
        self.by_slot[talk.slot] = None
        talk.slot = None

    def append_answers(self) -> None:
        """Reads the answers of partners in the slots that they belong to."""
        new = {}
        for talk in self.held:
            if talk.answer is None:
                continue
            request = talk.request
            tokens = list(talk.answer.tokens)
            request.tokens += tokens
            # Nobody sampled them: zeros keep these lists as long as the tokens.
            request.logprobs += [0.0] * len(tokens)
            request.full_logprobs += [0.0] * len(tokens)
            # Stop texts are looked for in what is sampled, turn by turn.
            request.text = None
            request.tail = ""
            talk.begin = len(request.tokens)
            talk.answer = None
            room = request.limit - talk.begin
            most = min(room, self.partner.max_turn_tokens or room)
            new[talk.slot] = (tokens, talk.num_sampled + most)
            self.num_appended += len(tokens)
        for slot, pieces in self.engine.append(new).items():
            self.by_slot[slot].request.routes += pieces

    # ---- decoding

    def decode(self) -> None:
        """Decodes a chunk, and sends the turns that have ended to the partner."""
        engine = self.engine
        began = time.perf_counter()
        # No chunk is started ahead: which slots go on is known only from the tokens of this one.
        engine.decode()
        chunk = engine.read_chunk()
        seconds = time.perf_counter() - began
        self.patience.chunk_seconds = min(self.patience.chunk_seconds, seconds)
        engine.chunks_absorbed += 1
        now = engine.elapsed()

        # each slot's tokens of the chunk behind a stop text; -1 without a stop text
        num_lost = np.full(engine.num_slots, -1, np.int32)
        self.slots_held += len(self.held)
        for talk in self.held:
            if not talk.is_sampling:
                continue
            self.slots_decoding += 1
            request = talk.request
            end = engine.take_tokens(chunk, talk.slot, request)
            talk.num_sampled += request.num_new
            request.began = now if request.began is None else request.began
            if end is not None:
                num_lost[talk.slot] = (chunk.tokens[:, talk.slot] >= 0).sum() - end
            if end is not None or not chunk.running[talk.slot]:
                # Its turn has ended.
                tokens = request.tokens[talk.begin :]
                talk.turns.append((talk.begin, len(request.tokens), None))
                talk.is_waiting = True
                ended = engine.criteria.tokens.get(tokens[-1]) == "eos"
                self.partner.submit(request.row, tokens, ended)
        # The devices know no stop texts, and decoded beyond them.
        if (num_lost >= 0).any():
            engine.slots = engine.programs.rewind(engine.slots, num_lost)

    def metrics(self) -> Metrics:
        """Tokens, slots and seconds of the rollout. perf/ and time/ depend on the clock."""
        engine = self.engine
        most_slots = engine.num_chunks * engine.num_slots
        of_engine = engine.metrics()
        return {
            "rollout/prefill_tokens": engine.prefill_tokens,
            "rollout/appended_tokens": self.num_appended,
            "perf/decode_steps": of_engine["rollout/decode_steps"],
            "perf/slot_use": of_engine["rollout/slot_use"],
            "perf/slots_busy": self.slots_decoding / most_slots,
            "perf/slots_held": self.slots_held / most_slots,
            "perf/rollout_tokens_per_second": of_engine["perf/rollout_tokens_per_second"],
            "time/waiting_for_environments": self.seconds_waited,
            "time/rollout": of_engine["time/rollout"],
        }

    def _rollout(self, talks: list[_Talk], metrics: Metrics) -> Rollout:
        """The rollout of conversations that have ended, a row each."""
        spec = self.engine.programs.spec
        arrays = RolloutArrays.empty(len(talks), spec.generation, spec.pad_id)
        width = arrays.width
        turn_ids = np.zeros(arrays.tokens.shape, np.int16)
        conversations = np.empty(len(talks), object)
        for row, talk in enumerate(talks):
            arrays.write_completion(row, talk.request)
            turns = [SampledTurn(width + a, width + b, reply) for a, b, reply in talk.turns]
            for number, turn in enumerate(turns, start=1):
                turn_ids[row, turn.begin : turn.end] = number
            opening = self.partner.openings[talk.request.row]
            conversations[row] = Conversation(turns, talk.ended, opening)

        # What an environment answered is read, and not sampled: it belongs to no turn.
        rollout = arrays.rollout([talk.request.ids for talk in talks], 1, metrics)
        return rollout.replace(
            completion_mask=rollout.completion_mask & (turn_ids > 0),
            turn_ids=turn_ids,
            conversations=conversations,
        )
