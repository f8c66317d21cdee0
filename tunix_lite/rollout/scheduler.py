"""One rollout, as the host sees it: which prompts are read next, when a chunk is started, and what
it drew.

The devices always have a chunk ahead of them while requests wait in the queue: the host starts a
refill and a chunk of decoding before it reads what the one before drew. (A loop that asks after
every token would make a GPU wait for the host after every token.) On several hosts, each runs this
and sees all tokens, so all of them decide the same.
"""

import math
import time
from collections import deque
from itertools import groupby

import jax
import numpy as np

from tunix_lite.parallel.mesh import axis_size
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.programs import DecodedChunk, Programs
from tunix_lite.rollout.requests import Request, not_finite, up_to_stop
from tunix_lite.types import Metrics

# prompts that are read together, padded: enough to keep any device busy
TOKENS_PER_PREFILL = 4096
# that prompts are read: two are under way, and a third is being started
CHUNKS_AHEAD = 3
# tokens; below it, prompts are not sorted by length
NARROWEST = 64


class RolloutScheduler:
    """One rollout on its way: what is on the devices, and what the host knows of it."""

    def __init__(
        self, programs: Programs, per_layer_params, temperature, asked: list[Request], chunk: int
    ):
        self.programs, self.per_layer_params, self.temperature = (
            programs,
            per_layer_params,
            temperature,
        )
        self.asked, self.chunk = asked, chunk
        # chunks that were started and not read yet
        self.in_flight: deque[DecodedChunk] = deque()
        # requests known to have been taken; more may have been
        self.started = 0
        self.unfinished = len(asked)
        self.began = time.perf_counter()
        self.num_chunks = self.chunks_read = self.prefill_tokens = 0

    def plan_blocks(
        self, prompts, num_generations: int, widths: list[int], num_slots: int, longest: int
    ) -> None:
        """Prepares reading the prompts, in blocks of as many as are read together, and a shelf for
        some of the blocks.

        `longest`: tokens of a completion.
        """
        self.block, self.room = prompt_cache_blocks(
            len(prompts),
            num_generations,
            widths,
            num_slots,
            longest,
            self.chunk,
            axis_size("fsdp"),
        )
        # prompts of one width together: what a prompt is padded to depends on it alone, and so do
        # the last digits
        alike = [
            [*group]
            for _, group in groupby(prompts, lambda prompt: padded_width(len(prompt), widths))
        ]
        self.blocks = [
            group[i : i + self.block] for group in alike for i in range(0, len(group), self.block)
        ]
        self.num_generations, self.widths, self.num_read = num_generations, widths, 0
        # of each request
        self.prompt_lengths = np.repeat([len(prompt) for prompt in prompts], num_generations)
        self.length = widths[0] + longest
        # by blocks read
        self.ready = np.cumsum([0, *(len(block) * num_generations for block in self.blocks)])
        self.shelf = self.programs.make_prompt_cache(self.room * self.block)

    def enqueue(self, key) -> None:
        """Puts all requests into the queue."""
        places = [
            b % self.room * self.block + i
            for b, block in enumerate(self.blocks)
            for i in range(len(block))
        ]
        rows = np.repeat(places, self.num_generations)
        padding = next_power_of_two(len(self.asked), least=NARROWEST) - len(self.asked)
        columns = (
            [a.index for a in self.asked],
            [a.generation for a in self.asked],
            rows,
            [a.limit for a in self.asked],
        )
        columns = [np.pad(np.asarray(column, np.int32), (0, padding)) for column in columns]
        self.queue = self.programs.make_queue(np.asarray(jax.random.key_data(key)), *columns)

    def fill_slots(self, num_slots: int) -> None:
        """Fills the slots, and starts as many chunks as should be under way."""
        self.columns, self.num_slots = self.columns_needed(), num_slots
        self.slots = self.programs.make_slots(num_slots, self.columns)
        self.stopped = np.full(num_slots, -1, np.int32)
        # all slots are free: what is ready is taken
        while self.started < min(num_slots, len(self.asked)):
            self.prefill_blocks()
            self.refill()
            self.started = min(self.num_ready, num_slots)
        self.start_chunk()
        if self.started < len(self.asked):
            self.start_chunk()

    @property
    def num_ready(self) -> int:
        """Requests whose prompts have been read."""
        return int(self.ready[self.num_read])

    def prefill_blocks(self) -> None:
        """Reads all blocks of prompts that have room, which is that of blocks whose requests have
        all been taken."""
        while self.num_read < len(self.blocks):
            if self.ready[max(0, self.num_read - self.room + 1)] > self.started:
                return
            block = self.blocks[self.num_read]
            width = padded_width(max(map(len, block)), self.widths)
            tokens, lengths = np.zeros((self.block, width), np.int32), np.ones(self.block, np.int32)
            for i, row in enumerate(block):
                tokens[i, : len(row)], lengths[i] = row, len(row)
            place = np.int32(self.num_read % self.room * self.block)
            self.shelf = self.programs.prefill(
                self.shelf, self.per_layer_params, tokens, lengths, place
            )
            self.num_read += 1
            self.prefill_tokens += sum(map(len, block))

    def refill(self) -> None:
        # jax may read a host's array where it lies, and later than now
        stopped = self.stopped.copy()
        self.slots = self.programs.refill(
            self.slots, self.shelf, self.queue, np.int32(self.num_ready), stopped
        )

    def columns_needed(self) -> int:
        """Columns of the cache that suffice until the chunk that is started now has ended: what
        decoding reads.

        Of a chunk that it has not read the host knows only that no sequence can have grown by more.
        """
        if kv_cache.columns_in_use(1, self.length) == self.length:
            return self.length
        ahead, longest = (self.num_chunks - self.chunks_read + 1) * self.chunk, self.widths[0]
        for prompt, answer in zip(self.prompt_lengths, self.asked):
            if answer.reason is None:
                longest = max(longest, prompt + min(answer.limit, len(answer.tokens) + ahead))
        return kv_cache.columns_in_use(int(longest), self.length)

    def start_chunk(self) -> None:
        """Starts reading prompts and refilling, as long as there is something to take, and a chunk
        of decoding."""
        if (columns := self.columns_needed()) != self.columns:
            self.slots, self.columns = self.programs.resize(self.slots, columns), columns
        if self.num_chunks and self.started < len(self.asked):
            self.prefill_blocks()
            self.refill()
        decode = self.programs.decode if self.temperature > 0 else self.programs.decode_greedy
        self.slots, drawn = decode(self.slots, self.per_layer_params, self.temperature)
        jax.tree.map(lambda x: x.copy_to_host_async(), drawn)
        self.in_flight.append(drawn)
        self.num_chunks += 1

    def next_chunk(self) -> DecodedChunk | None:
        """What the oldest chunk under way drew, with the next one started; None if nothing is
        unfinished."""
        if not self.unfinished:
            return None
        drawn = jax.device_get(self.in_flight.popleft())
        self.started = int(drawn.num_taken)
        everything_taken = self.started == len(self.asked)
        if everything_taken:
            # its memory is free
            self.shelf = None
        # when nothing waits any more, a chunk ahead might find nobody running: look first
        if not everything_taken or (not self.in_flight and drawn.running.any()):
            self.start_chunk()
        return drawn

    def absorb(
        self, drawn: DecodedChunk, ends: dict[int, str], stop: tuple[str, ...], tokenizer, prompts
    ) -> list[Request]:
        """Hands each token to its completion, and finds those that have ended. Raises
        FloatingPointError."""
        now, touched = time.perf_counter() - self.began, []
        self.chunks_read += 1
        for slot in np.flatnonzero(drawn.requests >= 0):
            answer = self.asked[drawn.requests[slot]]
            if answer.reason is not None:
                continue
            count = int((drawn.tokens[:, slot] >= 0).sum())
            new = drawn.tokens[:count, slot].tolist()
            if not np.isfinite(drawn.logprobs[:count, slot]).all():
                raise FloatingPointError(not_finite(answer, prompts[answer.prompt], tokenizer))
            if stop and (kept := up_to_stop(answer, new, stop, tokenizer)) is not None:
                new, answer.reason, self.stopped[slot] = new[:kept], "stop", drawn.requests[slot]
            answer.began = now if answer.began is None else answer.began
            answer.tokens += new
            answer.logprobs += drawn.logprobs[: len(new), slot].tolist()
            answer.full_logprobs += drawn.full_logprobs[: len(new), slot].tolist()
            if not drawn.running[slot] and answer.reason is None:
                answer.reason = ends.get(answer.tokens[-1], "length")
            if answer.reason is not None:
                answer.ended, self.unfinished = now, self.unfinished - 1
            touched.append(answer)
        return touched

    def metrics(self) -> Metrics:
        """What the rollout took."""
        tokens, steps = (
            sum(len(answer.tokens) for answer in self.asked),
            self.num_chunks * self.chunk,
        )
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
    """(prompts that are read together, such blocks on the shelf) of a rollout.

    The shelf holds the prompts of the requests that may start within CHUNKS_AHEAD chunks, where
    completions have a quarter of their longest length on average. Their own lengths do not count:
    all steps run one program.
    """
    per_prefill = max(1, TOKENS_PER_PREFILL // widths[0])
    block = -(-min(next_power_of_two(num_prompts), per_prefill) // fsdp) * fsdp
    starting = num_slots * min(1, 4 * CHUNKS_AHEAD * chunk / longest)
    # blocks that there can be
    most = -(-num_prompts // block) + len(widths) - 1
    return block, min(most, max(2, math.ceil(starting / (num_generations * block))))


def prompt_widths(longest: int) -> list[int]:
    """The few widths that prompts are padded to, the widest first: halves, down to NARROWEST."""
    widths = [longest]
    while widths[-1] >= 2 * NARROWEST:
        widths.append(-(-widths[-1] // 2))
    return widths


def padded_width(length: int, widths: list[int]) -> int:
    """The least of the widths that holds `length` tokens."""
    return min(width for width in widths if width >= length)


def next_power_of_two(count: int, least: int = 1) -> int:
    """The least power of two that is not below either."""
    return 1 << (max(count, least) - 1).bit_length()
