"""One rollout from the host's side: which prompts are read next, when a chunk of decoding starts,
and which completions its tokens belong to.

While requests wait in the queue, the devices always have a chunk ahead of them: the host starts a
refill and a chunk of decoding before it reads the tokens of the chunk before. (A loop that asks
after every token would make a GPU wait for the host after every token.) With several hosts, each
one runs this code and reads all tokens, so all of them decide the same.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby

import jax
import numpy as np

from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.programs import DecodedChunk, Programs
from tunix_lite.rollout.requests import Request, StopCriteria, not_finite, stop_text_end
from tunix_lite.types import Metrics, Params, Prompts

# Tokens, padding included, of the prompts that one prefill reads: enough to keep any device busy.
TOKENS_PER_PREFILL = 4096
# Prompts are read for so many chunks to come: two are under way, and a third is being started.
CHUNKS_AHEAD = 3
# Tokens. Prompts below this length are not sorted by length.
MIN_PROMPT_WIDTH = 64
# Requests. A shorter queue is padded to this length.
MIN_QUEUE = 64


class RolloutScheduler:
    """One rollout under way: the arrays on the devices, and what the host knows of them.

    Call plan_blocks, enqueue and fill_slots once each, then next_chunk and absorb in turns until
    next_chunk returns None.

    Example: 16 requests in 4 slots with chunks of 8 tokens. fill_slots starts two chunks; every
    next_chunk returns the tokens of the oldest one and starts another.
    """

    def __init__(
        self,
        programs: Programs,
        per_layer_params: Params,
        temperature: np.float32,
        requests: list[Request],
    ):
        self.programs = programs
        self.per_layer_params = per_layer_params
        self.temperature = temperature
        # In the order in which slots take them.
        self.requests = requests
        # Tokens that a slot decodes at a time.
        self.chunk = programs.spec.chunk

        # Chunks that were started and not read yet.
        self.in_flight: deque[DecodedChunk] = deque()
        # Requests that slots are known to have taken. They may have taken more.
        self.num_taken = 0
        self.unfinished = len(requests)
        self.began = time.perf_counter()
        self.num_chunks = 0
        self.chunks_read = 0
        self.prefill_tokens = 0

    def plan_blocks(
        self,
        prompts: Prompts,
        num_generations: int,
        num_slots: int,
        fsdp: int,
    ) -> None:
        """Cuts the prompts into blocks that are read together, and makes room for some blocks.

        prompts: one for every `num_generations` requests, in their order.
        """
        generation = self.programs.spec.generation
        widths = prompt_widths(generation.max_prompt_length)
        longest = generation.max_new_tokens
        self.block, self.room = prompt_cache_blocks(
            len(prompts), num_generations, widths, num_slots, longest, self.chunk, fsdp
        )

        # A block holds prompts of one width. So the width to which a prompt is padded depends on
        # its length alone, and the rounding of its keys and values does, too.
        self.blocks = []
        for _, group in groupby(prompts, lambda prompt: padded_width(len(prompt), widths)):
            alike = list(group)
            self.blocks += [alike[i : i + self.block] for i in range(0, len(alike), self.block)]
        self.num_read = 0

        self.num_generations = num_generations
        self.widths = widths
        self.length = self.programs.spec.max_length
        # Of each request.
        self.prompt_lengths = np.repeat([len(prompt) for prompt in prompts], num_generations)
        # Requests whose prompts have been read, by the number of blocks read.
        counts = [len(block) * num_generations for block in self.blocks]
        self.ready = np.cumsum([0, *counts])
        self.prompt_cache = self.programs.make_prompt_cache(self.room * self.block)

    def enqueue(self, key: jax.Array) -> None:
        """Puts all requests into the queue. key: the random key of the rollout."""
        # Blocks take turns in the prompt cache: block b overwrites block b - room.
        places = [
            b % self.room * self.block + i
            for b, block in enumerate(self.blocks)
            for i in range(len(block))
        ]
        columns = (
            [request.index for request in self.requests],
            [request.generation for request in self.requests],
            np.repeat(places, self.num_generations),
            [request.limit for request in self.requests],
        )

        # Few lengths of queues, so that few programs are compiled.
        count = len(self.requests)
        padding = next_power_of_two(count, least=MIN_QUEUE) - count
        padded = [np.pad(np.asarray(column, np.int32), (0, padding)) for column in columns]
        self.queue = self.programs.make_queue(np.asarray(jax.random.key_data(key)), *padded)

    def fill_slots(self, num_slots: int) -> None:
        """Fills the slots with the first requests, and starts as many chunks as should be under
        way."""
        self.num_slots = num_slots
        self.columns = self.columns_needed()
        self.slots = self.programs.make_slots(num_slots, self.columns)
        # The request that the host has ended, by slot; -1: none.
        self.stopped = np.full(num_slots, -1, np.int32)

        # All slots are free, so each refill takes all requests that are ready.
        while self.num_taken < min(num_slots, len(self.requests)):
            self.prefill_blocks()
            self.refill()
            self.num_taken = min(self.num_ready, num_slots)

        self.start_chunk()
        if self.num_taken < len(self.requests):
            self.start_chunk()

    @property
    def num_ready(self) -> int:
        """Requests whose prompts have been read."""
        return int(self.ready[self.num_read])

    def prefill_blocks(self) -> None:
        """Reads all blocks of prompts for which the prompt cache has room.

        A block has room once slots have taken all requests of the block whose place it takes.
        """
        while self.num_read < len(self.blocks):
            if self.ready[max(0, self.num_read - self.room + 1)] > self.num_taken:
                return

            # Rows that the block does not fill hold one token, so that no sequence is empty.
            block = self.blocks[self.num_read]
            width = padded_width(max(map(len, block)), self.widths)
            tokens = np.zeros((self.block, width), np.int32)
            lengths = np.ones(self.block, np.int32)
            for i, prompt in enumerate(block):
                tokens[i, : len(prompt)] = prompt
                lengths[i] = len(prompt)

            first_row = np.int32(self.num_read % self.room * self.block)
            self.prompt_cache = self.programs.prefill(
                self.prompt_cache, self.per_layer_params, tokens, lengths, first_row
            )
            self.num_read += 1
            self.prefill_tokens += sum(map(len, block))

    def refill(self) -> None:
        """Starts the program that gives free slots the requests that are ready."""
        # A copy, as jax may read a host's array later than now, when absorb has changed it.
        stopped = self.stopped.copy()
        self.slots = self.programs.refill(
            self.slots, self.prompt_cache, self.queue, np.int32(self.num_ready), stopped
        )

    def columns_needed(self) -> int:
        """Columns of the cache that suffice until the chunk that is started now has ended, which
        are the columns that decoding reads.

        Of chunks that the host has not read yet it knows only that no sequence grows by more.
        """
        if kv_cache.columns_in_use(1, self.length) == self.length:
            return self.length
        ahead = (self.num_chunks - self.chunks_read + 1) * self.chunk
        longest = self.widths[0]
        for prompt_length, request in zip(self.prompt_lengths, self.requests):
            if request.reason is None:
                new = min(request.limit, len(request.tokens) + ahead)
                longest = max(longest, prompt_length + new)
        return kv_cache.columns_in_use(int(longest), self.length)

    def start_chunk(self) -> None:
        """Starts prefills and a refill, as long as requests wait, and a chunk of decoding."""
        columns = self.columns_needed()
        if columns != self.columns:
            self.slots = self.programs.resize(self.slots, columns)
            self.columns = columns

        if self.num_chunks and self.num_taken < len(self.requests):
            self.prefill_blocks()
            self.refill()

        decode = self.programs.decode if self.temperature > 0 else self.programs.decode_greedy
        self.slots, decoded = decode(self.slots, self.per_layer_params, self.temperature)
        jax.tree.map(lambda x: x.copy_to_host_async(), decoded)
        self.in_flight.append(decoded)
        self.num_chunks += 1

    def next_chunk(self) -> DecodedChunk | None:
        """The tokens of the oldest chunk under way, with the next chunk started; None if all
        requests have ended."""
        if not self.unfinished:
            return None
        decoded = jax.device_get(self.in_flight.popleft())
        self.num_taken = int(decoded.num_taken)
        all_taken = self.num_taken == len(self.requests)
        if all_taken:
            # Free its memory.
            self.prompt_cache = None

        # Once no request waits, the chunk ahead might find no slot running: look at it first.
        if not all_taken or (not self.in_flight and decoded.running.any()):
            self.start_chunk()
        return decoded

    def absorb(
        self,
        decoded: DecodedChunk,
        criteria: StopCriteria,
        prompts: Prompts,
    ) -> list[Request]:
        """Appends the tokens of a chunk to their requests, and ends those that are complete.

        Returns the requests that got tokens. prompts: as they were given, for messages. Raises
        FloatingPointError if a log-probability is not finite.
        """
        now = time.perf_counter() - self.began
        self.chunks_read += 1
        touched = []
        for slot in np.flatnonzero(decoded.requests >= 0):
            request = self.requests[decoded.requests[slot]]
            if request.reason is not None:
                continue
            count = int((decoded.tokens[:, slot] >= 0).sum())
            if not np.isfinite(decoded.logprobs[:count, slot]).all():
                prompt = prompts[request.prompt]
                raise FloatingPointError(not_finite(request, prompt, criteria.tokenizer))

            # Stop texts are looked for here, as the devices know tokens only.
            new = decoded.tokens[:count, slot].tolist()
            end = stop_text_end(request, new, criteria)
            if end is not None:
                new = new[:end]
                request.reason = "stop"
                self.stopped[slot] = decoded.requests[slot]

            if request.began is None:
                request.began = now
            request.tokens += new
            request.logprobs += decoded.logprobs[: len(new), slot].tolist()
            request.full_logprobs += decoded.full_logprobs[: len(new), slot].tolist()
            if not decoded.running[slot] and request.reason is None:
                request.reason = criteria.tokens.get(request.tokens[-1], "length")
            if request.reason is not None:
                request.ended = now
                self.unfinished -= 1
            touched.append(request)
        return touched

    def metrics(self) -> Metrics:
        """Tokens, steps and seconds of the rollout."""
        tokens = sum(len(request.tokens) for request in self.requests)
        steps = self.num_chunks * self.chunk
        seconds = time.perf_counter() - self.began
        return {
            "rollout/prefill_tokens": self.prefill_tokens,
            "rollout/decode_steps": steps,
            "rollout/slot_use": tokens / (steps * self.num_slots),
            "perf/rollout_tokens_per_second": tokens / seconds,
            "time/rollout": seconds,
        }


def prompt_cache_blocks(
    num_prompts: int,
    num_generations: int,
    widths: list[int],
    num_slots: int,
    longest: int,
    chunk: int,
    fsdp: int,
) -> tuple[int, int]:
    """(prompts of a block, blocks in the prompt cache) of a rollout.

    A block is read at once. The prompt cache holds the prompts of the requests that may start
    within CHUNKS_AHEAD chunks, if completions have a quarter of their longest length on average.
    Their real lengths do not count, so that all steps run one program.
    """
    per_prefill = max(1, TOKENS_PER_PREFILL // widths[0])
    block = -(-min(next_power_of_two(num_prompts), per_prefill) // fsdp) * fsdp
    starting = num_slots * min(1, 4 * CHUNKS_AHEAD * chunk / longest)
    # No rollout can have more blocks than these.
    most = -(-num_prompts // block) + len(widths) - 1
    return block, min(most, max(2, math.ceil(starting / (num_generations * block))))


def prompt_widths(longest: int) -> list[int]:
    """The few widths that prompts are padded to, the widest first, by halves to MIN_PROMPT_WIDTH.

    Example: prompt_widths(512) is [512, 256, 128, 64].
    """
    widths = [longest]
    while widths[-1] >= 2 * MIN_PROMPT_WIDTH:
        widths.append(-(-widths[-1] // 2))
    return widths


def padded_width(length: int, widths: Sequence[int]) -> int:
    """The least of the widths that holds `length` tokens."""
    return min(width for width in widths if width >= length)


def next_power_of_two(count: int, least: int = 1) -> int:
    """The least power of two that is at least `count` and `least`."""
    return 1 << (max(count, least) - 1).bit_length()
