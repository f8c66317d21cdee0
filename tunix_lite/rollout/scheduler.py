"""One rollout from the host's side: which prompts are read next, when a chunk of decoding starts,
and which completions its tokens belong to.

While requests wait in the queue, the devices always have a chunk ahead of them: the host starts a
refill and a chunk of decoding before it reads the tokens of the chunk before. (A loop that asks
after every token would make a GPU wait for the host after every token.) With several hosts, each
one runs this code and reads all tokens, so all of them decide the same.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import jax
import numpy as np

from tunix_lite.parallel.compiling import stopwatch
from tunix_lite.parallel.mesh import axis_size
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout.programs import DecodedChunk, Programs, Queue, SamplerSpec, Slots
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


@dataclass(frozen=True)
class PromptBlocks:
    """The prompts of a rollout in blocks, one a prefill, and their turns in the prompt cache.

    Example: 5 prompts in blocks of 2, of which 2 are in the cache: block 2, the last one, takes the
    rows 0 and 1 of the cache, where block 0 was.
    """

    # prompts in reading order; those of a block have one padded width
    blocks: list[Prompts]
    # most prompts of a block
    block_size: int
    # blocks that the prompt cache holds
    cache_blocks: int
    num_generations: int
    # the widths that prompts may be padded to, the widest first
    widths: list[int]
    # the requests of each prompt; None: num_generations of each
    requests_of: list[int] | None = None

    @functools.cached_property
    def requests_ready(self) -> np.ndarray:
        """Requests whose prompts have been read, by the number of blocks read."""
        ends = np.cumsum([0, *map(len, self.blocks)])
        return np.cumsum([0, *self.repeats])[ends]

    @property
    def repeats(self) -> list[int]:
        """The requests of each prompt."""
        if self.requests_of is not None:
            return self.requests_of
        return [self.num_generations] * sum(map(len, self.blocks))

    @property
    def cache_rows(self) -> int:
        return self.cache_blocks * self.block_size

    def first_row(self, block: int) -> int:
        """The row of the prompt cache at which a block begins: it overwrites the block that came
        `cache_blocks` before."""
        return block % self.cache_blocks * self.block_size

    def rows(self) -> list[int]:
        """The row of each prompt in the prompt cache."""
        return [
            self.first_row(b) + i for b, block in enumerate(self.blocks) for i in range(len(block))
        ]


def prompt_blocks(
    spec: SamplerSpec,
    prompts: Prompts,
    num_generations: int,
    num_slots: int,
    fsdp: int | None = None,
    requests_of: list[int] | None = None,
    usual: int | None = None,
) -> PromptBlocks:
    """prompts: in the order of the requests, `num_generations` of which each one has, or as many as
    `requests_of` says. fsdp: None takes that of the current mesh. usual: the prompts of a usual
    rollout, for which the prompt cache is made; None: of this one."""
    fsdp = axis_size("fsdp") if fsdp is None else fsdp
    generation = spec.generation
    widths = prompt_widths(generation.max_prompt_length)
    longest = generation.max_new_tokens
    size, cache_blocks = prompt_cache_blocks(
        usual or len(prompts), num_generations, widths, num_slots, longest, spec.chunk, fsdp
    )

    # A block holds prompts of one width. So the width to which a prompt is padded depends on its
    # length alone, and the rounding of its keys and values does, too.
    blocks = []
    for _, group in groupby(prompts, lambda prompt: padded_width(len(prompt), widths)):
        alike = list(group)
        blocks += [alike[i : i + size] for i in range(0, len(alike), size)]
    return PromptBlocks(blocks, size, cache_blocks, num_generations, widths, requests_of)


class RolloutScheduler:
    """One rollout under way: its arrays on the devices, and the host's record of them.

    Call fill_slots once, then next_chunk and absorb in turns until next_chunk returns None.

    Example: 16 requests in 4 slots with chunks of 8 tokens. fill_slots starts two chunks; every
    next_chunk returns the tokens of the oldest one and starts another.
    """

    def __init__(
        self,
        programs: Programs,
        per_layer_params: Params,
        temperature: np.float32,
        requests: list[Request],
        prompts: PromptBlocks,
        num_slots: int,
        key: jax.Array,
        carried: Prompts = (),
        place_carried: Callable[[Slots, Queue], Slots] | None = None,
        most_requests: int = 0,
    ):
        """requests: in the order in which slots take them. key: the random key of the rollout, or
        one for each request. carried: the prompts of the first requests, which have tokens of an
        earlier rollout and are not in `prompts`; place_carried puts them into the first slots.
        most_requests: of a rollout of this kind, if there may be fewer."""
        self.programs = programs
        self.per_layer_params = per_layer_params
        self.temperature = temperature
        self.requests = requests
        self.prompts = prompts
        self.num_slots = num_slots

        # Tokens that a slot decodes at a time, and of a whole sequence.
        self.chunk = programs.spec.chunk
        self.length = programs.spec.max_length
        # Of each request.
        lengths = np.array([len(prompt) for block in prompts.blocks for prompt in block], int)
        carried_lengths = np.array([len(prompt) for prompt in carried], int)
        self.prompt_lengths = np.append(carried_lengths, np.repeat(lengths, prompts.repeats))
        self.num_carried = len(carried)
        self.place_carried = place_carried
        self.tokens_before = sum(len(request.tokens) for request in requests)

        # What the host knows: chunks that were started and not absorbed yet; blocks that were
        # prefilled; requests that slots are known to have taken, and they may have taken more; the
        # request that the host has ended, by slot (-1: none).
        self.in_flight: deque[DecodedChunk] = deque()
        # of each of them, Request.prompts_read
        self.read_before: deque[tuple[int, int]] = deque()
        self.num_chunks = 0
        self.chunks_absorbed = 0
        self.blocks_prefilled = 0
        self.prefill_tokens = 0
        self.all_prompt_tokens = int(lengths.sum())
        self.num_taken = self.num_carried
        self.stopped = np.full(num_slots, -1, np.int32)
        self.unfinished = len(requests)
        self.most_requests = most_requests
        self.elapsed = stopwatch()

        # What is on the devices. Carried requests are read into slots of all columns, so that few
        # programs are compiled.
        self.columns = self.length if carried else self.columns_needed()
        self.prompt_cache = programs.make_prompt_cache(prompts.cache_rows)
        self.queue = self._make_queue(key)
        self.slots = programs.make_slots(num_slots, self.columns)

    def _make_queue(self, key: jax.Array) -> Queue:
        """Puts all requests on the devices."""
        columns = (
            [request.index for request in self.requests],
            [request.generation for request in self.requests],
            self._prompt_rows(),
            [request.first_limit or request.limit for request in self.requests],
        )

        count = len(self.requests)
        padding = queue_length(max(count, self.most_requests)) - count
        padded = [np.pad(np.asarray(column, np.int32), (0, padding)) for column in columns]
        key_data = np.asarray(jax.random.key_data(key))
        if key_data.ndim > 1:
            key_data = np.pad(key_data, ((0, padding), (0, 0)))
        return self.programs.make_queue(key_data, *padded)

    def _prompt_rows(self) -> np.ndarray:
        """The row of the prompt cache of each request; carried ones need none."""
        rows = np.array(self.prompts.rows(), np.int32)
        return np.pad(np.repeat(rows, self.prompts.repeats), (self.num_carried, 0))

    def fill_slots(self) -> None:
        """Fills the slots with the first requests, and starts as many chunks as should be under
        way."""
        if self.num_carried:
            self.slots = self.place_carried(self.slots, self.queue)
        # All other slots are free, so each refill takes all requests that are ready.
        while self.num_taken < min(self.num_slots, len(self.requests)):
            self.prefill_blocks()
            self.refill()
            self.num_taken = min(self.num_ready, self.num_slots)

        self.start_chunk()
        if self.num_taken < len(self.requests):
            self.start_chunk()

    @property
    def num_ready(self) -> int:
        """Requests whose prompts have been read."""
        return self.num_carried + int(self.prompts.requests_ready[self.blocks_prefilled])

    def prefill_blocks(self) -> None:
        """Reads all blocks of prompts for which the prompt cache has room.

        A block has room once slots have taken all requests of the block whose place it takes.
        """
        prompts = self.prompts
        while self.blocks_prefilled < len(prompts.blocks):
            overwritten = max(0, self.blocks_prefilled - prompts.cache_blocks + 1)
            if self.num_carried + prompts.requests_ready[overwritten] > self.num_taken:
                return

            # Rows that the block does not fill hold one token, so that no sequence is empty.
            block = prompts.blocks[self.blocks_prefilled]
            width = padded_width(max(map(len, block)), prompts.widths)
            tokens = np.zeros((prompts.block_size, width), np.int32)
            lengths = np.ones(prompts.block_size, np.int32)
            for i, prompt in enumerate(block):
                tokens[i, : len(prompt)] = prompt
                lengths[i] = len(prompt)

            first_row = np.int32(prompts.first_row(self.blocks_prefilled))
            self.prompt_cache = self.programs.prefill(
                self.prompt_cache, self.per_layer_params, tokens, lengths, first_row
            )
            self.blocks_prefilled += 1
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
        # Conversations that go on together are a matter of the clock, and the columns, too, decide
        # on the last bits of a sum: there, all are read.
        is_fixed = self.programs.spec.holds
        if is_fixed or kv_cache.columns_in_use(1, self.length) == self.length:
            return self.length
        ahead = (self.num_chunks - self.chunks_absorbed + 1) * self.chunk
        longest = self.prompts.widths[0]
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
        self.read_before.append((self.prefill_tokens, self.all_prompt_tokens - self.prefill_tokens))
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

    def next_started_chunk(self) -> DecodedChunk | None:
        """Returns the next chunk that was started, and starts no other one: the rollout is to end
        here."""
        return jax.device_get(self.in_flight.popleft()) if self.in_flight else None

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
        now = self.elapsed()
        self.chunks_absorbed += 1
        prompts_read = self.read_before.popleft()
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

            request.prompts_read = prompts_read
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
        tokens = sum(len(request.tokens) for request in self.requests) - self.tokens_before
        steps = self.num_chunks * self.chunk
        seconds = self.elapsed()
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


def queue_length(count: int) -> int:
    """The requests that a queue of `count` is padded to, so that few programs are compiled."""
    return next_power_of_two(count, least=MIN_QUEUE)


def prompt_widths(longest: int) -> list[int]:
    """The widths that prompts are padded to, the widest first: three at most, as a program is
    compiled for each.

    By halves to MIN_PROMPT_WIDTH; of more than three the widest, one in the middle and the
    narrowest. Example: prompt_widths(512) is [512, 128, 64].
    """
    widths = widths_by_halves(longest)
    if len(widths) <= 3:
        return widths
    return [longest, widths[len(widths) // 2], widths[-1]]


def widths_by_halves(longest: int) -> list[int]:
    """`longest`, and its halves down to MIN_PROMPT_WIDTH.

    Example: widths_by_halves(512) is [512, 256, 128, 64].
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
