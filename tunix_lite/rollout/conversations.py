"""Conversations: a slot keeps its sequence while an environment answers, and goes on from there.

When a turn has ended, its tokens go to a `Partner`. What it answers is appended to the slot, and
decoding goes on; nothing is read or tokenised a second time. While the partner thinks, the other
slots decode. Where sequences wait for a slot, the cache of one that waits for its partner may be
kept on the host meanwhile (it is offloaded).

When answers come is a matter of the clock; what is sampled is not. A token depends on its own
sequence, and on a random key that follows from its prompt, its generation and the number of tokens
that the conversation has sampled before.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np

from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.rollout.engine import Engine, padded_width, prompt_widths
from tunix_lite.rollout.memory import free_host_bytes, memory_here
from tunix_lite.rollout.programs import Slots
from tunix_lite.rollout.requests import OnChunk, Request, RolloutArrays
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.types import (
    Conversation,
    Metrics,
    Prompts,
    Rollout,
    SampledTurn,
    TurnReply,
)


class Partner(Protocol):
    """Answers the turns of a rollout's rows, as environments do."""

    # most turns of a conversation
    max_turns: int
    # most tokens of a turn; None: as many as the conversation has left
    max_turn_tokens: int | None
    # prompts of the rows, where environments begin with their own texts; None: the task's
    prompts: Prompts | None
    # the same as texts, for display; None where it is that of the task
    openings: Sequence[str | None]

    def submit(self, row: int, tokens: list[int], ended: bool) -> None:
        """Takes a turn. ended: its last token is an end-of-sequence token; else it was cut, or
        ended by another token."""

    def replies(self, wait: bool, patience: float = 0.0) -> dict[int, TurnReply]:
        """Answers that have come, by row. wait: at least one. patience: seconds in which others may
        still come. All processes get the same."""

    def close(self) -> None:
        """Closes the partner: all conversations have ended."""


@dataclass
class Talk:
    """A conversation under way, from the host's side.

    Example: `Talk(row=3, request=request)`, not begun yet; later its `slot` is 0.
    """

    # row in the Rollout
    row: int
    # its `tokens` are all after the prompt, answers included; its `text` is that of the turn
    request: Request
    # the slot that holds it; None: none does
    slot: int | None = None
    # a copy of its slot on the host
    offloaded: Slots | None = None
    # [begin, end) of each turn among the tokens, and its answer
    turns: list[tuple[int, int, TurnReply | None]] = field(default_factory=list)
    # first token of the turn that is being sampled
    begin: int = 0
    num_sampled: int = 0
    # whether its partner has yet to answer
    is_waiting: bool = False
    # chunks that were decoded since it waits
    chunks_waited: int = 0
    # the answer that is to be appended
    answer: TurnReply | None = None
    # value of Conversation.ended; "" while the conversation is under way
    ended: str = ""

    @property
    def last_turn(self) -> list[int]:
        """The tokens of its last turn: rewards of the task are about them."""
        begin, end, _ = self.turns[-1]
        return self.request.tokens[begin:end]

    @property
    def is_sampling(self) -> bool:
        """Returns whether its slot runs."""
        return self.slot is not None and not self.is_waiting and self.answer is None


@dataclass
class Patience:
    """Decides how long to wait for answers before a chunk is decoded.

    A slot whose answer comes just after a chunk has begun stands still for all of it. Waiting for
    the answer costs the other slots less, if it comes soon. If it does not, the next chunks are
    decoded at once: 1, 3, 7, and at most 15 of them.

    Example: after a chunk of 10 ms, with 3 of 4 slots waiting, Patience().seconds(3, 4) is 0.00375.
    """

    # time of the fastest chunk so far: the first one compiles
    chunk_seconds: float = float("inf")
    # chunks that are still to be decoded at once, and as how many it was set
    left: int = 0
    most: int = 0

    def seconds(self, waiting: int, held: int) -> float:
        """Returns how long to wait with so many of the slots that hold a conversation waiting."""
        if self.left or not held or self.chunk_seconds == float("inf"):
            return 0.0
        return 0.5 * self.chunk_seconds * waiting / held

    def note(self, patience: float, all_came: bool) -> None:
        """Notes whether all answers came within so many seconds."""
        if patience:
            self.most = 0 if all_came else min(15, 2 * self.most + 1)
            self.left = self.most
        else:
            self.left = max(0, self.left - 1)


class ConversationScheduler:
    """The conversations of a rollout under way. The host alone gives slots, and frees them.

    Example: 16 conversations in 4 slots. Each call of `advance` appends answers, gives free slots
    to others, and decodes a chunk.
    """

    def __init__(
        self,
        engine: Engine,
        partner: Partner,
        requests: list[Request],
        most_offloaded: int,
    ):
        """engine: whose slots they take, nothing started. most_offloaded: how many slots that wait
        may be given to others."""
        self.engine = engine
        self.partner = partner
        self.most_offloaded = most_offloaded
        self.talks = [Talk(request.row, request) for request in requests]
        self.by_row = {talk.row: talk for talk in self.talks}
        self.by_slot: list[Talk | None] = [None] * engine.num_slots
        self.num_appended = 0
        self.num_offloaded = 0
        # Slots that decoded, and that held a sequence, summed over chunks.
        self.slots_decoding = 0
        self.slots_held = 0
        self.seconds_waited = 0.0
        self.patience = Patience()
        engine.admit(requests)

    @property
    def is_over(self) -> bool:
        """Returns whether all conversations have ended."""
        return not self.engine.unfinished

    @property
    def is_decoding(self) -> bool:
        """Returns whether any slot runs."""
        return any(talk is not None and talk.is_sampling for talk in self.by_slot)

    def in_steps(
        self,
        on_finished: Callable[[int, list[int]], None] | None,
        on_chunk: OnChunk | None,
        between_chunks: Callable[[], None] | None,
    ) -> Generator[None, None, Rollout]:
        """Stops after each chunk, and returns the Rollout; the callbacks are those of
        make_generate."""
        while not self.is_over:
            ended = self.advance()
            if on_finished is not None:
                for talk in ended:
                    on_finished(talk.row, talk.last_turn)
            if on_chunk is not None:
                held = [talk.request for talk in self.by_slot if talk is not None]
                alone = {talk.row: _conversations_as_rollout(self, [talk]) for talk in ended}
                on_chunk(held + [talk.request for talk in ended], alone)
            if between_chunks is not None:
                between_chunks()
            yield
        self.partner.close()
        return _conversations_as_rollout(self)

    def advance(self) -> list[Talk]:
        """Takes answers, fills slots, and decodes a chunk. Returns the conversations that ended."""
        ended = self.take_replies()
        self.offload()
        self.restore()
        self.append_answers()
        self.begin_others()
        if self.is_decoding:
            self.decode()
        return ended

    # ---- answers

    def take_replies(self) -> list[Talk]:
        """The answers that have come; if no slot has anything to do, it waits for one."""
        if not any(talk.is_waiting for talk in self.talks):
            return []
        can_work = self.is_decoding or (self.has_room and self.num_queued)
        held = [talk for talk in self.by_slot if talk is not None]
        patience = self.patience.seconds(sum(talk.is_waiting for talk in held), len(held))
        began = time.perf_counter()
        replies = self.partner.replies(wait=not can_work, patience=patience)
        self.patience.note(patience, all(t.row in replies for t in held if t.is_waiting))
        if not can_work:
            self.seconds_waited += time.perf_counter() - began
        ended = []
        # In the order of rows, so that all hosts do the same.
        for row in sorted(replies):
            talk = self.by_row[row]
            self.take_reply(talk, replies[row])
            if talk.ended:
                ended.append(talk)
        return ended

    def take_reply(self, talk: Talk, reply: TurnReply) -> None:
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
            talk.ended = "tokens"
        else:
            talk.answer = reply
            return

        request.reason = "eos" if reply.done and not reply.failure else "length"
        request.ended = self.engine.elapsed()
        self.engine.release(request, talk.slot)
        talk.offloaded = None
        if talk.slot is not None:
            self.by_slot[talk.slot] = None
            talk.slot = None

    # ---- slots

    @property
    def num_queued(self) -> int:
        """Conversations that could use a slot now, and have none."""
        ready = sum(
            talk.offloaded is not None and talk.answer is not None for talk in self.talks
        )
        return len(self.talks) - self.engine.num_taken + ready

    @property
    def has_room(self) -> bool:
        """Returns whether a slot is free, or could be freed."""
        can_offload = self.num_offloaded_now < self.most_offloaded
        held = sum(talk is not None and talk.is_waiting for talk in self.by_slot)
        return None in self.by_slot or bool(can_offload and held)

    @property
    def num_offloaded_now(self) -> int:
        """Conversations whose caches are on the host."""
        return sum(talk.offloaded is not None for talk in self.talks)

    def offload(self) -> None:
        """Frees slots whose conversations wait, for as many others as could go on.

        One that has just begun to wait stays for a chunk, since most answers come at once; unless
        no slot would decode.
        """
        needed = self.num_queued - self.by_slot.count(None)
        allowed = min(needed, self.most_offloaded - self.num_offloaded_now)
        if allowed <= 0:
            return
        least = 1 if self.is_decoding else 0
        waiting = [t for t in self.by_slot if t is not None and t.is_waiting]
        chosen = [talk for talk in waiting if talk.chunks_waited >= least]
        chosen.sort(key=lambda talk: -talk.chunks_waited)
        for talk in chosen[:allowed]:
            talk.offloaded = self.engine.offload(talk.slot, talk.request)
            self.by_slot[talk.slot] = None
            talk.slot = None
            self.num_offloaded += 1

    def restore(self) -> None:
        """Puts conversations that have their answer into free slots again."""
        ready = [t for t in self.talks if t.offloaded is not None and t.answer is not None]
        free = [slot for slot, talk in enumerate(self.by_slot) if talk is None]
        for talk, slot in zip(ready, free):
            self.engine.restore(slot, talk.offloaded)
            self.by_slot[slot] = talk
            talk.slot = slot
            talk.offloaded = None

    def append_answers(self) -> None:
        """Reads the answers of partners in the slots that they belong to."""
        ready = [t for t in self.by_slot if t is not None and t.answer is not None]
        new = {}
        for talk in ready:
            request = talk.request
            tokens = list(talk.answer.tokens)
            request.tokens += tokens
            request.logprobs += [0.0] * len(tokens)
            request.full_logprobs += [0.0] * len(tokens)
            # Stop texts are looked for in what is sampled, turn by turn.
            request.text = None
            request.tail = ""
            talk.begin = len(request.tokens)
            talk.answer = None
            new[talk.slot] = (tokens, talk.num_sampled + self.room_of_turn(talk))
            self.num_appended += len(tokens)
        self.engine.append(new)

    def room_of_turn(self, talk: Talk) -> int:
        """Tokens of its next turn, at most."""
        left = talk.request.limit - len(talk.request.tokens)
        most = self.partner.max_turn_tokens
        return left if most is None else min(left, most)

    def begin_others(self) -> None:
        """Gives free slots the next conversations of the queue."""
        for slot, request in self.engine.fill():
            talk = self.by_row[request.row]
            talk.slot = slot
            self.by_slot[slot] = talk

    # ---- decoding

    def decode(self) -> None:
        """Decodes a chunk, and sends the turns that have ended to the partner."""
        engine = self.engine
        programs = engine.programs
        saved = programs.save(engine.slots) if engine.criteria.texts else None
        began = time.perf_counter()
        engine.decode()
        chunk = engine.read_chunk()
        seconds = time.perf_counter() - began
        self.patience.chunk_seconds = min(self.patience.chunk_seconds, seconds)
        engine.chunks_absorbed += 1
        now = engine.elapsed()

        # each slot's tokens of the chunk up to a stop text; -1 without a stop text
        num_kept = np.full(engine.num_slots, -1, np.int32)
        for slot, talk in enumerate(self.by_slot):
            self.slots_held += talk is not None
            if talk is None or not talk.is_sampling:
                if talk is not None and talk.is_waiting:
                    talk.chunks_waited += 1
                continue
            self.slots_decoding += 1
            request = talk.request
            end = engine.take_tokens(chunk, slot, request)
            talk.num_sampled += request.num_new
            request.began = now if request.began is None else request.began
            if end is not None:
                num_kept[slot] = end
            if end is not None or not chunk.running[slot]:
                self.end_turn(talk)
        if (num_kept >= 0).any():
            engine.slots = programs.rewind(engine.slots, saved, chunk.tokens, num_kept)

    def end_turn(self, talk: Talk) -> None:
        """Sends the turn that has ended to the partner."""
        tokens = talk.request.tokens[talk.begin :]
        talk.turns.append((talk.begin, len(talk.request.tokens), None))
        talk.is_waiting = True
        talk.chunks_waited = 0
        ends = self.engine.criteria.tokens
        self.partner.submit(talk.row, tokens, ends.get(tokens[-1]) == "eos")

    def metrics(self) -> Metrics:
        """Tokens, slots and seconds of the rollout. perf/ and time/ depend on the clock."""
        engine = self.engine
        sampled = sum(talk.num_sampled for talk in self.talks)
        steps = engine.num_chunks * engine.chunk
        seconds = engine.elapsed()
        most_slots = engine.num_chunks * engine.num_slots
        return {
            "rollout/prefill_tokens": engine.prefill_tokens,
            "rollout/appended_tokens": self.num_appended,
            "perf/decode_steps": steps,
            "perf/slot_use": sampled / (steps * engine.num_slots),
            "perf/slots_busy": self.slots_decoding / most_slots,
            "perf/slots_held": self.slots_held / most_slots,
            "perf/slots_parked": self.num_offloaded,
            "perf/rollout_tokens_per_second": sampled / seconds,
            "time/waiting_for_environments": self.seconds_waited,
            "time/rollout": seconds,
        }


# ---- a rollout of conversations


def chunk_of_turns(chunk: int, max_turn_tokens: int | None) -> int:
    """Tokens that slots decode at a time, at most `chunk`; no more than the longest turns use.

    Example: with chunks of 16, turns of up to 8 tokens take one of 8, of up to 20 two of 10.
    """
    if max_turn_tokens is None:
        return chunk
    chunks = -(-max_turn_tokens // chunk)
    return -(-max_turn_tokens // chunks)


def conversation_requests(
    prompts: Prompts,
    num_generations: int,
    generation: GenerationConfig,
    partner: Partner,
    key: jax.Array,
) -> list[Request]:
    """The requests of P * G conversations. Where the generations of a prompt begin alike, they
    share one reading of it."""
    G = num_generations
    limit = generation.max_new_tokens
    own = partner.prompts or [prompt for prompt in prompts for _ in range(G)]
    key_data = np.asarray(jax.random.key_data(key))
    first_limit = min(limit, partner.max_turn_tokens or limit)
    requests = [
        Request(row // G, row // G, row % G, limit, tuple(map(int, ids)), key_data, row)
        for row, ids in enumerate(own)
    ]
    for request in requests:
        request.first_limit = first_limit

    # The widest prompts first: if memory does not suffice, that shows at once.
    widths = prompt_widths(generation.max_prompt_length)
    return sorted(requests, key=lambda one: -padded_width(len(one.ids), widths))


def most_offloaded(rollout: RolloutConfig, engine: Engine, num_conversations: int) -> int:
    """Returns how many slots of waiting conversations may be offloaded at once, by the memory that
    is free on every host. All hosts must call it."""
    spec = engine.programs.spec
    how = (spec.dtype, spec.generation, rollout, engine.num_slots)
    memory = memory_here(spec.cfg, *how)
    free = min(allgather_values(free_host_bytes()))
    return memory.offloading(num_conversations, free).most


def _conversations_as_rollout(
    talks: ConversationScheduler, some: list[Talk] | None = None
) -> Rollout:
    """The rollout of conversations that have all ended; some: of these alone, in this order."""
    spec = talks.engine.programs.spec
    chosen = sorted(talks.talks, key=lambda talk: talk.row) if some is None else some
    arrays = RolloutArrays.empty(len(chosen), spec.generation, spec.pad_id)
    width = arrays.width
    turn_ids = np.zeros(arrays.tokens.shape, np.int16)
    answered = np.zeros(arrays.tokens.shape, bool)
    conversations = np.empty(len(chosen), object)
    for row, talk in enumerate(chosen):
        arrays.write_completion(row, talk.request)
        turns = [SampledTurn(width + a, width + b, reply) for a, b, reply in talk.turns]
        for number, turn in enumerate(turns, start=1):
            turn_ids[row, turn.begin : turn.end] = number
        conversations[row] = Conversation(turns, talk.ended, talks.partner.openings[talk.row])
        answered[row] = arrays.completion_mask[row] & (turn_ids[row] == 0)

    # What an environment answered is read, and not sampled.
    prompts = [talk.request.ids for talk in chosen]
    rollout = arrays.rollout(prompts, 1, talks.metrics() if some is None else {})
    return rollout.replace(
        completion_mask=rollout.completion_mask & ~answered,
        turn_ids=turn_ids,
        conversations=conversations,
    )
